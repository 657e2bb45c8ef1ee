"""Vocabulary of the package: imports nothing of ours and no torch."""
