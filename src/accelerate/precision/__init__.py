"""Number formats: which dtype a forward runs in, and what that asks of the backward pass."""

from accelerate.precision.amp import get_grad_scaler, get_mixed_precision_context_manager
from accelerate.precision.base import Precision
from accelerate.precision.resolve import resolve_precision as resolve_precision

__all__ = ["Precision", "get_grad_scaler", "get_mixed_precision_context_manager", "resolve"]
