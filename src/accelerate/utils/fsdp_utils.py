"""Old import path of what shards, loads and merges models under FSDP."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
