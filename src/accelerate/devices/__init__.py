"""What hardware there is: one table of backends, and what can be asked of it.

Imports torch inside functions only."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
