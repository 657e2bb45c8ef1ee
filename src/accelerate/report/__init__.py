"""The report of a run: one page of HTML from the records that its ranks wrote."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
