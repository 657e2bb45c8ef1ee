"""Missing packages of Megatron-LM are reported with how to install them."""

from __future__ import annotations

import sys

import pytest
import torch

from accelerate.strategies.megatron import library
from accelerate.utils import MegatronLMPlugin

from .conftest import Fake


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    core, training, device = library.find_missing(MegatronLMPlugin())
    assert "megatron.core cannot be imported" in core
    assert "pip install megatron-core" in core
    assert "clone https://github.com/NVIDIA/Megatron-LM" in training
    assert "CUDA" in device


def test_a_missing_parent_is_a_missing_module(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "megatron.training")

    def find_spec(name: str) -> object:
        if name == "megatron.training":
            raise ModuleNotFoundError(name)
        return object()

    monkeypatch.setattr(library, "find_spec", find_spec)
    (problem,) = library.find_missing(MegatronLMPlugin())
    assert problem.startswith("megatron.training")
