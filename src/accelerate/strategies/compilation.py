"""Compilation of models by TorchDynamo, as the run requests."""

from __future__ import annotations

from typing import Any

from torch import nn

from accelerate.strategies.layer import Layer
from accelerate.wrappers import compiler_for


class Compilation(Layer):
    """Compilation of wrapped models."""

    def __init__(self, strategy: Any) -> None:
        self._plugin = strategy.context.request.dynamo

    def compile(self, model: nn.Module) -> nn.Module:
        return compiler_for(self._plugin)(model)
