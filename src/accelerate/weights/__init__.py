"""Weights of modules: their files, and the names that share one tensor."""
