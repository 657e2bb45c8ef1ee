"""Public names of the package by their old import paths, loaded on first use."""

from accelerate.base import attach
from accelerate.utils.tqdm import tqdm as tqdm  # the function, where the submodule has the same name

__getattr__, __dir__, __all__ = attach(__name__)
