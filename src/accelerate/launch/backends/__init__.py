"""Launchers: each a small class that runs a plan."""
