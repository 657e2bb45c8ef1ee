"""Handler of activation checkpointing, which selects the activations that are recomputed in backward.

`strategies/recomputation.py` applies it to models when they are prepared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from accelerate.base import convert_file_size_to_int, wrong_value
from accelerate.plugins.handlers import KwargsHandler

MATMUL = "matmul"


@dataclass
class ActivationCheckpointing(KwargsHandler):
    """Selection of the activations that blocks recompute in the backward pass instead of keeping them.

    Args:
        every: Recompute the first of each `every` blocks. 1 recomputes all blocks.
        blocks: Class names of the blocks. None uses the outermost modules with parameters in `ModuleList` and
            `Sequential`, such as the layers of a transformer.
        save_operators: Operators whose outputs are kept while the rest of a block is recomputed, as a list of
            operators of torch, such as `torch.ops.aten.mm.default`. "matmul" selects matrix products,
            attention and `topk`. None keeps no outputs inside of blocks.
        budget: Bytes that the activations of a forward and backward pass may need, or text such as "12GB".
            For the first training batch of a model the first policy that fits is chosen, of these: recompute
            nothing, all but the outputs of "matmul", one block, more blocks, all blocks. It excludes `every`,
            `save_operators` and `offload`.
        offload: Whether the inputs of recomputed blocks are kept in pinned host memory. They are copied on a
            side stream while blocks compute, and copied back one block ahead in the backward pass. Without
            effect on the CPU.

    Raises:
        ConfigurationError: A value is wrong, or values exclude each other.
    """

    every: int = 1
    blocks: Sequence[str] | str | None = None
    save_operators: Literal["matmul"] | Sequence[Any] | None = None
    budget: int | str | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise wrong_value("every", self.every, "it is not a count of blocks", "Pass an integer from 1")
        names = [self.blocks] if isinstance(self.blocks, str) else self.blocks
        if names is not None and (not names or not all(isinstance(name, str) and name for name in names)):
            fix = 'Pass class names, such as ["LlamaDecoderLayer"]'
            raise wrong_value("blocks", self.blocks, "it has no names of classes", fix)
        self.blocks = None if names is None else list(names)
        if self.save_operators not in (None, MATMUL):
            self._check_operators()
        if self.budget is not None:
            self._check_budget(self.budget)

    def _check_operators(self) -> None:
        from accelerate import torch_private

        operators, fix = self.save_operators, "Pass 'matmul', or a list such as [torch.ops.aten.mm.default]"
        if isinstance(operators, str) or not isinstance(operators, Sequence) or not operators:
            raise wrong_value("save_operators", operators, "it is neither 'matmul' nor a list", fix)
        for operator in operators:
            if not torch_private.is_operator(operator):
                raise wrong_value(
                    "save_operators", operator, "it is not an overload of an operator of torch", fix
                )
            if torch_private.draws_random_numbers(operator, (), {}):
                reason = "it draws random numbers, and all of them must be drawn again in backward"
                raise wrong_value("save_operators", operator, reason, "Leave it out")

    def _check_budget(self, budget: int | str) -> None:
        if isinstance(budget, bool) or convert_file_size_to_int(budget) < 1:
            fix = "Pass a number of bytes, or text such as '12GB'"
            raise wrong_value("budget", budget, "it is not a number of bytes", fix)
        fixed = [name for name in ("every", "save_operators", "offload") if name in self.to_kwargs()]
        if fixed:
            reason = f"{', '.join(fixed)} already {'say' if len(fixed) > 1 else 'says'} what is recomputed"
            raise wrong_value("budget", budget, reason, "Pass one of them")

    @property
    def summary(self) -> str:
        """Short text that says what is recomputed."""
        count = "every block" if self.every == 1 else f"the first of each {self.every} blocks"
        if self.save_operators is None:
            return count
        operators = self.save_operators
        names = operators if isinstance(operators, str) else ", ".join(map(str, operators))
        return f"{count}, except for outputs of {names}"
