"""Every option declared once; flags, file, environment, questions and docs are derived."""
