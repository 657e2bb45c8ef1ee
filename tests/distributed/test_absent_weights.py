"""Code outside of a forward that needs weights of layers on other ranks of a pipeline gets an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.stand_ins.cases import call_for_each
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

from accelerate import Accelerator, ParallelismConfig
from accelerate.base import StateError, is_torch_version
from accelerate.strategies.pipeline.absent import absent_tensor
from accelerate.utils import PipelineConfig

pytestmark = pytest.mark.skipif(is_torch_version("<", "2.13"), reason="pipelines need torch 2.13")
Run = Callable[..., list[Any]]


class Pair(nn.Module):
    """A student on the first stage, a teacher on the second, and an input that is tied to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4, bias=False)
        self.student, self.teacher = (nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2))
        self.leave = nn.Linear(4, 4)
        self.leave.weight = self.enter.weight

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.enter(hidden)
        for layer in self.student:
            hidden = torch.tanh(layer(hidden))
        for layer in self.teacher:
            hidden = torch.tanh(layer(hidden))
        output: Tensor = self.leave(hidden)
        return output


def prepare_pair() -> tuple[Accelerator, Any]:
    torch.manual_seed(0)
    mesh = ParallelismConfig(pp_size=2, pp_handler=PipelineConfig(microbatches=2))
    accelerator = Accelerator(cpu=True, parallelism_config=mesh)
    model = accelerator.prepare(Pair())
    accelerator.forward_backward(model, (torch.randn(4, 4), torch.randn(4, 4)), F.mse_loss)
    return accelerator, model


def lerp_each(first: Any, second: Any) -> None:
    for target, source in zip(first.parameters(), second.parameters(), strict=False):
        target.lerp_(source, 0.1)


def lerp_named(first: Any, second: Any) -> None:
    sources = dict(second.named_parameters())
    for name, target in first.named_parameters():
        target.mul_(0.9).add_(sources[name], alpha=0.1)


def lerp_lists(first: Any, second: Any) -> None:
    torch._foreach_lerp_(list(first.parameters()), list(second.parameters()), 0.1)


def copy_weight(first: Any, second: Any) -> None:
    first[0].weight.copy_(second[0].weight)


def load_weights(first: Any, second: Any) -> None:
    first.load_state_dict(second.state_dict())


def add_norms(first: Any, second: Any) -> None:
    float(sum(parameter.norm() for parameter in [*first.parameters(), *second.parameters()]))


LOOPS = (lerp_each, lerp_named, lerp_lists, copy_weight, load_weights, add_norms)


def update_teacher() -> list[str]:
    _, model = prepare_pair()
    texts = []
    for loop in LOOPS:
        with (
            torch.no_grad(),
            pytest.raises(StateError, match="is in a pipeline|are not on this rank") as error,
        ):
            loop(model.teacher, model.student)
        texts.append(str(error.value))
    return texts


def test_a_loop_over_weights_of_layers_on_different_ranks_raises_an_error_on_both(run: Run) -> None:
    first, second = run(update_teacher)
    assert "weight of teacher.0 on stage 1" in first[0]
    assert "weight of student.0 on stage 0" in second[0]


def update_copy() -> None:
    """An average by hand, of a copy from before `prepare`, matches parameters by position."""
    torch.manual_seed(0)
    mesh = ParallelismConfig(pp_size=2, pp_handler=PipelineConfig(microbatches=2))
    accelerator = Accelerator(cpu=True, parallelism_config=mesh)
    model = Pair()
    average = copy.deepcopy(model)
    model = accelerator.prepare(model)
    assert [p.shape for p in model.parameters()] == [p.shape for p in average.parameters()]
    with torch.no_grad(), pytest.raises(StateError, match=r"average weights with accelerator\.average"):
        lerp_each(average, model)
    first, second = ([*model.named_parameters()] for _ in range(2))
    assert first == second
    assert len(first) < len(list(model.parameters()))


def test_a_copy_from_before_prepare_is_not_matched_with_other_layers(run: Run) -> None:
    run(update_copy)


def draw_weights() -> list[Tensor]:
    """Returns a draw after loops that draw values for all parameters."""
    torch.manual_seed(0)
    mesh = ParallelismConfig(pp_size=2, pp_handler=PipelineConfig(microbatches=2))
    accelerator = Accelerator(cpu=True, parallelism_config=mesh)
    plain = nn.Sequential(nn.Linear(4, 40), nn.Linear(40, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model = accelerator.prepare(copy.deepcopy(plain))
    draws = []
    for each in (plain, model):
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in each.parameters():
                nn.init.normal_(parameter)
                parameter.add_(torch.randn_like(parameter)).data.clamp_(-1, 1)
        draws.append(torch.rand(4))
    whole, own = plain.state_dict(), dict(model.named_parameters())
    assert 0 < len(own) < len(whole)
    for name, parameter in own.items():
        assert torch.equal(parameter, whole[name])
    return draws


def test_loops_draw_the_values_of_one_process(run: Run) -> None:
    first, second = run(draw_weights)
    assert all(torch.equal(first[0], each) for each in (*first, *second))


def use_whole_layers() -> None:
    """Calls that need no values of other ranks work on each rank."""
    accelerator, model = prepare_pair()
    parts = (model.student, model.teacher)
    assert [sum(parameter.numel() for parameter in part.parameters()) for part in parts] == [40, 40]
    with torch.no_grad():
        for part in parts:
            lerp_each(part, part)
    copies = [copy.deepcopy(list(part.parameters())) for part in parts]
    assert [tuple(each.shape) for each in copies[0]] == [tuple(each.shape) for each in copies[1]]
    assert {parameter.device.type for part in parts for parameter in part.parameters()} == {"cpu"}
    for parameter in model.teacher.parameters():
        parameter.requires_grad = False
    assert not any(parameter.requires_grad for parameter in model.teacher.parameters())
    assert model.enter.weight is model.leave.weight
    assert accelerator.clip_grad_norm_(model.student.parameters(), 1.0) > 0
    groups: Any = [
        {"params": part.parameters(), "lr": rate} for part, rate in zip(parts, (0.1, 0.2), strict=True)
    ]
    optimizer = accelerator.prepare(torch.optim.AdamW(groups))
    is_first = accelerator.is_main_process
    assert [len(group["params"]) for group in optimizer.param_groups] == ([4, 0] if is_first else [0, 4])
    optimizer.step()
    assert len(model.student.state_dict() if is_first else model.teacher.state_dict()) == 4


def test_loops_that_need_no_values_of_other_ranks_work(run: Run) -> None:
    run(use_whole_layers)


def read_attributes() -> str:
    accelerator, model = prepare_pair()
    assert not hasattr(model.student[0], "missing")
    with pytest.raises(AttributeError) as error:
        _ = (model.teacher if accelerator.is_main_process else model.student)[0].missing
    return str(error.value)


def test_an_attribute_of_a_layer_on_another_rank_raises_an_error_that_names_it(run: Run) -> None:
    for number, text in enumerate(run(read_attributes)):
        name = ("teacher.0", "student.0")[number]
        assert f"{name} has no attribute 'missing' on this rank" in text


def replace_sharded() -> None:
    mesh = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2)).torch_device_mesh
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    absent = absent_tensor(weight, "layer on stage 0", torch.device("cpu"))
    assert absent.shape == (4, 2)
    assert isinstance(absent, nn.Parameter)


def test_a_sharded_weight_has_an_absent_one_in_its_place(run: Run) -> None:
    run(replace_sharded)


def scale_all(model: Any, optimizer: Any) -> None:
    """Clips by the norm of the gradients that the optimizer of this rank has."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    for parameter in parameters:
        parameter.grad.mul_((0.01 / norm).clamp(max=1.0))


def scale_named(model: Any, optimizer: Any) -> None:
    gradients = [p.grad for _, p in model.named_parameters()]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    torch._foreach_mul_(gradients, 0.01 / float(norm))


def halve(model: Any, optimizer: Any) -> None:
    for _, parameter in model.named_parameters():
        parameter.grad = parameter.grad / 2


def scale_each(model: Any, optimizer: Any) -> None:
    for _, parameter in model.named_parameters():
        parameter.grad /= parameter.grad.norm()


def clear_first_layers(model: Any, optimizer: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.grad *= not name.startswith("student")


def add_noise(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():  # all, so that all ranks draw the same numbers
        parameter.grad += torch.randn_like(parameter) * 0.01


def train_with(change: Callable[[Any, Any], None], steps: int) -> None:
    accelerator, model = prepare_pair()
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(steps):
        optimizer.zero_grad()
        accelerator.forward_backward(model, (torch.randn(4, 4), torch.randn(4, 4)), F.mse_loss)
        change(model, optimizer)
        optimizer.step()


def clip_late(model: Any, optimizer: Any) -> None:
    optimizer.calls = getattr(optimizer, "calls", 0) + 1
    if optimizer.calls > 2:
        scale_named(model, optimizer)


def refuse_changes(change: Callable[[Any, Any], None], steps: int) -> None:
    with pytest.raises(StateError, match="scaled their gradients by different factors") as error:
        train_with(change, steps)
    assert "accelerator.clip_grad_norm_(model.parameters(), max_norm)" in str(error.value)


def test_gradients_that_ranks_scale_by_their_own_norms_are_refused(run: Run) -> None:
    run(call_for_each, refuse_changes, [(scale_all, 1), (scale_named, 1), (clip_late, 4)])


def clip_whole_norm(model: Any, optimizer: Any) -> None:
    Accelerator().clip_grad_norm_(model.parameters(), 0.01)


def test_gradients_may_be_changed_without_the_norm_of_one_rank(run: Run) -> None:
    changes = [halve, scale_each, clear_first_layers, add_noise, clip_whole_norm]
    run(call_for_each, train_with, [(change, 3) for change in changes])
