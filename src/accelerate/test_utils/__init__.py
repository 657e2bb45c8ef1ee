"""Helpers for tests of programs that use this package, and the scripts that `accelerate test` launches."""
