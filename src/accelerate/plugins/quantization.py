"""BnbQuantizationConfig: how bitsandbytes quantizes a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accelerate.base import ConfigurationError, CustomDtype, wrong_value
from accelerate.plugins.checks import one_of

if TYPE_CHECKING:
    import torch

_FORMATS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass
class BnbQuantizationConfig:
    """To how many bits linear layers are quantized by bitsandbytes, and which stay as they are.

    Args:
        load_in_8bit: quantize to 8 bits (LLM.int8()).
        llm_int8_threshold: with 8 bits: inputs above it are multiplied in 16 bits.
        load_in_4bit: quantize to 4 bits.
        bnb_4bit_quant_type: with 4 bits: "fp4" or "nf4".
        bnb_4bit_use_double_quant: with 4 bits: whether the scales are quantized, too.
        bnb_4bit_compute_dtype: with 4 bits: what is computed in: "fp32", "fp16", "bf16", or torch's dtype.
        torch_dtype: dtype of all that is not quantized, named like the one above. None is the compute dtype
            with 4 bits and float16 with 8 bits.
        skip_modules: names of modules that are not quantized. None finds the output layer and tied ones.
        keep_in_fp32_modules: names of modules that are not quantized and are float32.

    Attributes:
        target_dtype: dtype of the quantized weights, `CustomDtype.INT4` for 4 bits.

    Raises:
        ConfigurationError: a value that cannot be, or not exactly one of 8 and 4 bits.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: str | torch.dtype = "fp16"  # torch's dtype after construction
    torch_dtype: str | torch.dtype | None = None  # torch's dtype after construction
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None
    target_dtype: Any = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        import torch

        self._check()
        self.bnb_4bit_compute_dtype = _dtype("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype)
        if self.torch_dtype is None:
            self.torch_dtype = self.bnb_4bit_compute_dtype if self.load_in_4bit else torch.float16
        self.torch_dtype = _dtype("torch_dtype", self.torch_dtype)
        self.target_dtype = CustomDtype.INT4 if self.load_in_4bit else torch.int8

    @property
    def unquantized_modules(self) -> list[str]:
        """Names of modules that the user keeps from being quantized."""
        return [*(self.skip_modules or ()), *(self.keep_in_fp32_modules or ())]

    def _check(self) -> None:
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise wrong_value(name, value, "it is not a boolean", "Give True or False")
        if self.load_in_8bit == self.load_in_4bit:
            problem = "can't be both True" if self.load_in_8bit else "are both False"
            raise ConfigurationError(
                f"load_in_8bit and load_in_4bit {problem}: a model is quantized to one of them. "
                f"Set {'only ' if self.load_in_8bit else ''}one of them to True."
            )
        threshold = self.llm_int8_threshold
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
            raise wrong_value("llm_int8_threshold", threshold, "it is not a number", "Give one, such as 6.0")
        one_of("bnb_4bit_quant_type", self.bnb_4bit_quant_type, ("fp4", "nf4"))
        for name in ("skip_modules", "keep_in_fp32_modules"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, list):
                raise wrong_value(name, value, "it is not a list", "Give a list of names of modules")


def _dtype(name: str, value: object) -> torch.dtype:
    import torch

    if isinstance(value, torch.dtype):
        return value
    if not isinstance(value, str):
        fix = f"Give torch's dtype, or one of {', '.join(_FORMATS)}"
        raise wrong_value(name, value, "it is no dtype", fix)
    return getattr(torch, _FORMATS[one_of(name, value, _FORMATS)])  # type: ignore[no-any-return]
