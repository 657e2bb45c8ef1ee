"""Start processes without fork."""

import os

import torch

from accelerate import Accelerator, debug_launcher, notebook_launcher
from accelerate.utils import patch_environment


def add_up() -> None:
    total = Accelerator(cpu=True).reduce(torch.tensor(1.0)).item()
    assert total == 2
    assert not hasattr(os, "fork")
    print("added up")


if __name__ == "__main__":
    debug_launcher(add_up, num_processes=2)
    with patch_environment(ACCELERATE_USE_CPU="true"):
        notebook_launcher(add_up, num_processes=2)
