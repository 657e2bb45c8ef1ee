"""State of the process and of the run, the process group, and consensus of ranks over its store.

Names of other packages are part of this import path.
"""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
