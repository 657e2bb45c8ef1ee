"""How objects are prepared and stepped: one class for each way of training."""

from accelerate.strategies.base import Strategy
from accelerate.strategies.bundle import Bundle
from accelerate.strategies.request import Context, RunRequest
from accelerate.strategies.resolve import resolve_strategy as resolve_strategy

__all__ = ["Bundle", "Context", "RunRequest", "Strategy", "resolve"]
