"""Peak FLOPs per second of devices by their names, as torch returns them."""

import pytest

from accelerate.devices import find_peak_flops
from accelerate.devices.peak_flops import PEAK_TFLOPS


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("Tesla V100-SXM2-32GB", "float16", 125),
        ("Tesla V100-PCIE-16GB", "float16", 112),
        ("Tesla V100S-PCIE-32GB", "float16", 130),
        ("Tesla V100-SXM2-32GB", "bfloat16", None),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("NVIDIA A100-SXM4-40GB", "float32", 19.5),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bfloat16", None),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA L40S", "bfloat16", 362),
        ("NVIDIA L40", "bfloat16", None),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 80GB HBM3", "float8_e4m3fn", 1978.9),
        ("NVIDIA H100 PCIe", "float16", 756),
        ("NVIDIA H100 NVL", "bfloat16", 835.5),
        ("NVIDIA H200", "bfloat16", 989.4),
        ("NVIDIA H200 NVL", "bfloat16", 835.5),
        ("NVIDIA GH200 480GB", "bfloat16", None),
        ("NVIDIA B200", "bfloat16", 2250),
        ("NVIDIA GB200", "bfloat16", None),
        ("AMD Instinct MI250X", "bfloat16", 191.5),
        ("AMD Instinct MI300X", "float8_e5m2fnuz", 2614.9),
        ("NVIDIA GeForce RTX 4090", "bfloat16", None),
        ("NVIDIA A100-SXM4-80GB", "float64", None),
        ("", "float32", None),
    ],
)
def test_the_peak_of_a_device_in_a_dtype(name: str, dtype: str, expected: float | None) -> None:
    assert find_peak_flops(name, dtype) == (None if expected is None else pytest.approx(expected * 1e12))


@pytest.mark.parametrize("pattern", list(PEAK_TFLOPS))
def test_the_peaks_of_a_device_grow_with_shorter_dtypes(pattern: str) -> None:
    row = PEAK_TFLOPS[pattern]
    tflops = [row[name] for name in ("float32", "tf32", "float16", "float8") if name in row]
    assert tflops == sorted(tflops)
    assert row.get("bfloat16", row["float16"]) == row["float16"]
