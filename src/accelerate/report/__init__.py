"""HTML report of a run for `accelerate report`, built from the records that its ranks wrote."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
