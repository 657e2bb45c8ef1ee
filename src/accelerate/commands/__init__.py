"""Subcommands of the `accelerate` command line, which parse arguments, call other packages and print."""
