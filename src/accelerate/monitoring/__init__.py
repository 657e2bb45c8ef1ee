"""How fast a run is and what happens in it: times of steps, records of each rank, and conclusions."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
