"""What is saved, and how it reaches the disk.

The names below are loaded on first use: reading a manifest needs no torch."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
