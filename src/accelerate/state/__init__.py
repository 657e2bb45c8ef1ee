"""Who am I among the others: processes, devices and the state that prepared objects share.

Names of other packages are part of this import path."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
