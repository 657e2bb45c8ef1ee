"""Peak FLOPs per second of devices, from the data sheets of their vendors."""

import re
from collections.abc import Mapping

_H100_SXM = {"float32": 67.0, "tf32": 494.7, "float16": 989.4, "bfloat16": 989.4, "float8": 1978.9}
_HOPPER_NVL = {"float32": 60.0, "tf32": 417.5, "float16": 835.5, "bfloat16": 835.5, "float8": 1670.5}

PEAK_TFLOPS: Mapping[str, Mapping[str, float]] = {
    r"\bV100-SXM": {"float32": 15.7, "float16": 125.0},
    r"\bV100-PCIE": {"float32": 14.0, "float16": 112.0},
    r"\bV100S\b": {"float32": 16.4, "float16": 130.0},
    r"\bA100\b": {"float32": 19.5, "tf32": 156.0, "float16": 312.0, "bfloat16": 312.0},
    r"\bL4\b": {"float32": 30.3, "tf32": 60.0, "float16": 121.0, "bfloat16": 121.0, "float8": 242.5},
    r"\bL40S\b": {"float32": 91.6, "tf32": 183.0, "float16": 362.0, "bfloat16": 362.0, "float8": 733.0},
    r"\bH100 PCIe": {"float32": 51.0, "tf32": 378.0, "float16": 756.0, "bfloat16": 756.0, "float8": 1513.0},
    r"\bH100 NVL": _HOPPER_NVL,
    r"\bH100\b.*\bHBM3\b": _H100_SXM,
    r"\bH200 NVL": _HOPPER_NVL,
    r"\bH200$": _H100_SXM,
    r"\bB200$": {"float32": 75.0, "tf32": 1125.0, "float16": 2250.0, "bfloat16": 2250.0, "float8": 4500.0},
    # torch sees each of the two dies as a device
    r"\bMI250X$": {"float32": 47.9, "float16": 191.5, "bfloat16": 191.5},
    r"\bMI300X\b": {"float32": 163.4, "tf32": 653.7, "float16": 1307.4, "bfloat16": 1307.4, "float8": 2614.9},
}
"""Pattern of the name of a device -> dtype of a matrix multiplication -> 10^12 FLOPs per second, dense."""


def find_peak_flops(device_name: str, dtype: str) -> float | None:
    """Returns the peak FLOPs per second of a device, or None if they are not known.

    Args:
        device_name: Name of the device, as of `torch.cuda.get_device_name`.
        dtype: Name of the torch dtype of matrix multiplications, such as "bfloat16", or "tf32".
    """
    if re.search(r"\bMIG\b", device_name):  # a part of a device
        return None
    name = "float8" if dtype.startswith("float8") else dtype
    rows = (row for pattern, row in PEAK_TFLOPS.items() if re.search(pattern, device_name))
    tflops = next(rows, {}).get(name)
    return None if tflops is None else tflops * 1e12
