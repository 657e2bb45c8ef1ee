"""The forward of `offload.py` with the original package, where it is installed; prints seconds as JSON."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path


def main() -> int:
    request = json.loads(sys.argv[1])
    for module in sys.argv[2:]:
        import_module(module)
    import torch

    import accelerate

    from .models import make_stack
    from .offload import LAYERS, ROWS, infer

    if "indep" in accelerate.__version__:
        print(f"The package at {accelerate.__file__} is not the original.")
        return 1
    sizes, device = request["sizes"], request["device"]
    dtype = getattr(torch, request["dtype"])
    model = make_stack(sizes["width"], LAYERS, sizes["blocks"], dtype)
    inputs = torch.randn(ROWS, sizes["width"], dtype=dtype).to(device)
    block = LAYERS * sizes["width"] ** 2 * dtype.itemsize
    _, _, seconds = infer(model, device, request["kind"], sizes, block, inputs, Path.cwd())
    print(json.dumps({"seconds": seconds, "version": accelerate.__version__}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
