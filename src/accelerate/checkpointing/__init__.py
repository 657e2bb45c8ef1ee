"""Checkpoints, from the states of objects to files that are committed together.

A *checkpoint folder* (`manifest`, `folder`, `temporary`, `retention`) has files, a manifest with their
checksums, and a name that it gets when it is complete. A *part* (`parts`, `sharded`) saves and loads one
object of a run. A *saver* (`saving`) writes the files of all parts and commits the folder; `loading` chooses,
verifies and reads one.

Names are imported on first use, so that reading a manifest does not import torch.
"""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
