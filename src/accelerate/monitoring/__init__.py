"""Times of steps, records of each rank, conclusions, and the view of a run."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
