"""Old import path of functions that shard, load and merge models under FSDP."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
