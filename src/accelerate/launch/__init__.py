"""From settings to running processes: resolve a plan, render it, run it. Imports no torch."""
