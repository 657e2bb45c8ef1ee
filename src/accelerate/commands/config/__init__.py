"""The command `accelerate config`, with the configuration files that it writes and loads."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
