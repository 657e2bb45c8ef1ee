"""Collectives between real processes."""

from __future__ import annotations

import warnings
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accelerate import Accelerator
from accelerate.nested import get_shape, iterate_tensors, listify, recursively_apply
from accelerate.ops import (
    CannotPadNestedTensorWarning,
    DistributedOperationException,
    Transport,
    broadcast,
    broadcast_object_list,
    copy_tensor_to_devices,
    current_transport,
    gather,
    gather_object,
    gather_tensor_shape,
    gather_valid,
    gather_valid_objects,
    pad_across_processes,
    reduce,
)
from accelerate.ops.collectives import gather_uneven
from accelerate.state import PartialState

Run = Callable[..., list[Any]]
Pair = namedtuple("Pair", ["first", "second"])
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
]


def rank() -> int:
    return PartialState().process_index


def size() -> int:
    return PartialState().num_processes


def plain(tensor: torch.Tensor) -> list[float]:
    return (tensor.real if tensor.is_complex() else tensor).float().tolist()


def collect_everything() -> dict[str, Any]:
    mine = torch.tensor([[rank(), 1]])
    nested = {"a": [mine, torch.tensor(rank())], "b": Pair(mine.float().T, (torch.zeros(0, 2),))}
    gathered = gather(nested)
    return {
        "type": type(gathered["b"]).__name__,
        "values": listify(gathered["a"]),
        "pair": [listify(gathered["b"].first), list(gathered["b"].second[0].shape)],
        "dtypes": [
            [dtype == (out := gather(torch.tensor([0, rank() % 2]).to(dtype))).dtype, plain(out)]
            for dtype in DTYPES
        ],
        "objects": gather_object([rank()] * (rank() + 1)),
        "one object": gather_object({"rank": rank()}),
        "text": gather_object(f"r{rank()}"),
    }


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_gather(run: Run, processes: int) -> None:
    ranks = range(processes)
    for result in run(collect_everything, processes=processes):
        assert result["type"] == "Pair"
        assert result["values"] == [[[r, 1] for r in ranks], list(ranks)]
        assert result["pair"] == [[row for r in ranks for row in ([float(r)], [1.0])], [0, 2]]
        parity = [value for r in ranks for value in (0.0, float(r % 2))]
        assert result["dtypes"] == [[True, parity]] * len(DTYPES)
        assert result["objects"] == [r for r in ranks for _ in range(r + 1)]
        assert result["one object"] == [{"rank": r} for r in ranks]
        assert result["text"] == [f"r{r}" for r in ranks]


def spread_from_last() -> dict[str, Any]:
    last = size() - 1
    weight = torch.nn.Parameter(torch.full((2, 2), float(rank())))
    column = torch.full((2, 3), rank()).T
    answers = [plain(broadcast(torch.tensor([rank()]).to(dtype), last)) for dtype in DTYPES]
    objects: list[Any] = ["first", {"rank": rank()}, *range(rank())]
    returned = broadcast_object_list(objects, from_process=last)
    only = torch.arange(3, dtype=torch.int16) if rank() == 1 else None
    return {
        "in place": broadcast({"w": weight}, last)["w"] is weight and weight.tolist(),
        "strided": broadcast(column, last) is column and column.tolist(),
        "dtypes": answers,
        "scalar": broadcast(torch.tensor(rank()), last).item(),
        "objects": objects,
        "same list": returned is objects,
        "shape": gather_tensor_shape(only).tolist(),
        "copied": listify(copy_tensor_to_devices(None if only is None else {"x": only, "y": (only + 1,)})),
    }


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_broadcast(run: Run, processes: int) -> None:
    last = processes - 1
    for result in run(spread_from_last, processes=processes):
        assert result["in place"] == [[last] * 2] * 2
        assert result["strided"] == [[last] * 2] * 3
        expected = [[float(min(last, 1) if dtype == torch.bool else last)] for dtype in DTYPES]
        assert result["dtypes"] == expected
        assert result["scalar"] == last
        assert result["objects"] == ["first", {"rank": last}, *range(last)]
        assert result["same list"]
        assert result["shape"] == [3]
        assert result["copied"] == {"x": [0, 1, 2], "y": ([1, 2, 3],)}


def scatter_from_last() -> dict[str, Any]:
    transport, last = current_transport(), size() - 1
    parts = [torch.tensor([[index, 7]], dtype=torch.int16) for index in range(size())]
    out = torch.zeros(1, 2, dtype=torch.int16)
    filled = transport.scatter(parts if rank() == last else None, out, source=last)
    return {"filled": filled is out and out.tolist(), "kind": type(transport).__name__}


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_scatter(run: Run, processes: int) -> None:
    for index, result in enumerate(run(scatter_from_last, processes=processes)):
        assert result == {"filled": [[index, 7]], "kind": "TorchTransport"}


def exchange_parts() -> list[list[list[float]]]:
    sent = [(rank() + target) % 3 for target in range(size())]
    received = [(rank() + source) % 3 for source in range(size())]
    values = [10.0 * rank() + target for target, count in enumerate(sent) for _ in range(count)]
    transport = current_transport()
    answers = []
    for exchange in (transport.all_to_all, partial(Transport.all_to_all, transport)):
        results = [exchange(torch.tensor(values).to(dtype), sent, received) for dtype in DTYPES]
        assert [result.dtype for result in results] == DTYPES
        answers.append([plain(result) for result in results])
    return answers


def test_all_to_all(run: Run) -> None:
    """The base class is the implementation of backends without this collective."""
    for rank, answers in enumerate(run(exchange_parts, processes=3)):
        values = [10.0 * source + rank for source in range(3) for _ in range((rank + source) % 3)]
        expected = [plain(torch.tensor(values).to(dtype)) for dtype in DTYPES]
        assert answers == [expected, expected]


def combine_much() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rank())
    numbers = torch.rand(300, 300, generator=generator)
    before = numbers.clone()
    everyone = gather(numbers[None])
    total = everyone[0] + everyone[1] if size() == 2 else everyone.sum(0)
    return {
        "sum": torch.allclose(reduce(numbers, "sum"), total, rtol=1e-6),
        "exact": size() > 2 or torch.equal(reduce(numbers, "sum"), total),
        "mean": torch.allclose(reduce(numbers.T, "mean"), total.T / size()),
        "integers": reduce((numbers * 99).long(), "sum").tolist() == (everyone * 99).long().sum(0).tolist(),
        "untouched": torch.equal(numbers, before),
    }


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_reduce_of_large_tensors(run: Run, processes: int) -> None:
    for result in run(combine_much, processes=processes):
        assert all(result.values()), result


def typed(tensor: torch.Tensor) -> tuple[torch.dtype, Any]:
    return tensor.dtype, tensor.tolist()


def combine() -> dict[str, Any]:
    mine = torch.tensor([float(rank()), 1.0])
    large = torch.tensor([60000.0], dtype=torch.float16)
    return {
        "mean": reduce({"x": [mine]})["x"][0].tolist(),
        "sum": reduce(mine, "sum").tolist(),
        "scaled": reduce(mine, "sum", scale=0.5).tolist(),
        "none": reduce(mine, "none").tolist(),
        "untouched": mine.tolist(),
        "scalar": reduce(torch.tensor(float(rank())), "sum").tolist(),
        "half": reduce(large).tolist(),
        "half dtype": reduce(large).dtype,
        "flags": reduce(torch.tensor([True, rank() == 0]), "sum").tolist(),
        "bytes": reduce(torch.tensor([200], dtype=torch.uint8), "sum").tolist(),
        "whole mean": reduce(torch.tensor([rank()])).tolist(),
        "complex": reduce(torch.tensor([1j * rank()]), "sum").tolist(),
        "complex mean": typed(reduce(torch.tensor([1j * rank()]))),
        "whole sum": typed(reduce(torch.tensor([rank()], dtype=torch.int32), "sum")),
        "max": reduce({"x": [mine]}, "max")["x"][0].tolist(),
        "min": reduce(mine, "min", scale=2.0).tolist(),
        "largest byte": typed(reduce(torch.tensor([100 + 50 * rank()], dtype=torch.uint8), "max")),
        "any": typed(reduce(torch.tensor([True, rank() == 0, False]), "max")),
        "all": typed(reduce(torch.tensor([True, rank() == 0, False]), "min")),
        "smallest half": typed(reduce(large - 32 * rank(), "min")),
        "large": typed(reduce(torch.full((300, 300), float(rank())), "max").unique()),
        "none of it": typed(reduce(torch.zeros(0, 2), "min")),
        "accelerator": Accelerator().reduce(mine, "max").tolist(),
        "gradient": reduce(mine.requires_grad_(), "sum").requires_grad,
    }


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_reduce(run: Run, processes: int) -> None:
    total = sum(range(processes))
    for index, result in enumerate(run(combine, processes=processes)):
        assert result == {
            "mean": [total / processes, 1.0],
            "sum": [float(total), float(processes)],
            "scaled": [total / 2, processes / 2],
            "none": [float(index), 1.0],
            "untouched": [float(index), 1.0],
            "scalar": float(total),
            "half": [60000.0],
            "half dtype": torch.float16,
            "flags": [processes, 1],
            "bytes": [200 * processes],
            "whole mean": [total / processes],
            "complex": [complex(0, total)],
            "complex mean": typed(torch.tensor([complex(0, total / processes)])),
            "whole sum": typed(torch.tensor([total])),
            "max": [processes - 1.0, 1.0],
            "min": [0.0, 2.0],
            "largest byte": typed(torch.tensor([50 + 50 * processes], dtype=torch.uint8)),
            "any": typed(torch.tensor([True, True, False])),
            "all": typed(torch.tensor([True, False, False])),
            "smallest half": typed(torch.tensor([60000.0 - 32 * (processes - 1)], dtype=torch.float16)),
            "large": typed(torch.tensor([processes - 1.0])),
            "none of it": typed(torch.zeros(0, 2)),
            "accelerator": [processes - 1.0, 1.0],
            "gradient": False,
        }


def pad_many_ways() -> dict[str, Any]:
    rows = torch.full((rank() + 1, 2), rank() + 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loose = torch.nested.nested_tensor([torch.ones(rank() + 1)], layout=torch.jagged)
        back = pad_across_processes(loose)
    return {
        "rows": pad_across_processes(rows, pad_index=-1).tolist(),
        "first": pad_across_processes(rows, pad_index=-1, pad_first=True).tolist(),
        "columns": pad_across_processes({"x": (rows.T,)}, dim=-1, pad_index=7)["x"][0].tolist(),
        "without the dim": pad_across_processes(rows[:, 0], dim=1).tolist(),
        "scalar": pad_across_processes(torch.tensor(rank())).item(),
        "longest is unchanged": pad_across_processes(rows) is rows,
        "nested": (back is loose, [w.category for w in caught if w.category is CannotPadNestedTensorWarning]),
    }


def test_padding(run: Run) -> None:
    short, long = run(pad_many_ways)
    assert short["rows"] == [[1, 1], [-1, -1]]
    assert long["rows"] == [[2, 2], [2, 2]]
    assert short["first"] == [[-1, -1], [1, 1]]
    assert short["columns"] == [[1, 7], [1, 7]]
    assert short["without the dim"] == [1]
    assert (short["scalar"], long["scalar"]) == (0, 1)
    assert (short["longest is unchanged"], long["longest is unchanged"]) == (False, True)
    assert short["nested"] == (True, [CannotPadNestedTensorWarning])


def gather_parts() -> dict[str, Any]:
    length = (2, 0, 3)[rank()]
    mine = torch.arange(length) + 10 * rank()
    batch = torch.arange(4).reshape(4, 1) + 10 * rank()
    counts = (4, 0, 2)
    return {
        "uneven": listify(gather_uneven({"x": mine, "s": torch.tensor(rank()), "m": mine.reshape(-1, 1)})),
        "even": gather_uneven(batch).shape[0],
        "nothing": get_shape(gather_uneven(torch.ones(0, 5))),
        "valid": listify(gather_valid({"x": (batch,)}, counts)),
        "shorter parts": gather_valid(batch[: counts[rank()]], counts).flatten().tolist(),
        "objects": gather_valid_objects([f"{rank()}{i}" for i in range(4)], counts),
        "none valid": get_shape(gather_valid(batch, (0, 0, 0))),
    }


def test_uneven_parts(run: Run) -> None:
    valid = [0, 1, 2, 3, 20, 21]
    joined = [0, 1, 20, 21, 22]
    for result in run(gather_parts, processes=3):
        assert result["uneven"] == {"x": joined, "s": [0, 1, 2], "m": [[x] for x in joined]}
        assert result["even"] == 12
        assert result["nothing"] == [0, 5]
        assert result["valid"] == {"x": ([[x] for x in valid],)}
        assert result["shorter parts"] == valid
        assert result["objects"] == ["00", "01", "02", "03", "20", "21"]
        assert result["none valid"] == [0, 1]


def refuse_mismatches() -> list[str]:
    shape = (1, 5) if rank() == 0 else (1, 2, 5)
    bad = {"tensor": torch.ones(shape)}
    rows = torch.ones(2, rank() + 1)
    order = {"a": torch.ones(1), "b": torch.ones(2)}
    keys = order if rank() == 0 else {"b": order["b"], "c": order["a"]}
    calls: list[Callable[[], Any]] = [
        lambda: gather(bad),
        lambda: reduce(bad),
        lambda: broadcast(bad),
        lambda: pad_across_processes(bad),
        lambda: gather(torch.ones(2, dtype=torch.float32 if rank() else torch.float16)),
        lambda: gather_uneven(rows),
        lambda: gather_valid(rows, (1, 2)),
        lambda: gather(keys),
    ]
    texts = []
    for call in calls:
        with pytest.raises(DistributedOperationException) as refused:
            call()
        texts.append(str(refused.value))
    assert gather(torch.tensor([rank()])).tolist() == [0, 1]  # the next collective still works
    return texts


@pytest.mark.cpu_only
def test_mismatches_are_refused_on_every_process(run: Run) -> None:
    first, second = run(refuse_mismatches)
    assert first == second
    for text, name in zip(first, ["gather", "reduce", "broadcast"], strict=False):
        assert f"Operation: `accelerate.utils.operations.{name}`\n" in text
        lines = "Input shapes:\n  - Process 0: {'tensor': [1, 5]}\n  - Process 1: {'tensor': [1, 2, 5]}\n"
        assert lines in text
    assert first[3].startswith("`accelerate.utils.operations.pad_across_processes` could not be carried out.")
    assert "Input dtypes:\n  - Process 0: torch.float16\n  - Process 1: torch.float32\n" in first[4]
    assert "  - Process 0: [2, 1]\n  - Process 1: [2, 2]\n" in first[5]
    assert "  - Process 0: {'a': [1], 'b': [2]}\n  - Process 1: {'b': [2], 'c': [1]}\n" in first[7]


def nested(scale: int) -> dict[str, Any]:
    """Every dtype, in every container, of a size that fills `scale` elements; other values on each rank."""
    generator = torch.Generator().manual_seed(rank())
    numbers = [torch.randint(0, 100, (scale, 3), generator=generator).to(dtype) for dtype in DTYPES]
    noise = torch.randn(scale, 5, generator=generator)
    return {
        "dtypes": numbers,
        "pair": Pair(noise, {"t": noise.T, "half": noise.half(), "flags": noise > 0}),
        "ordered": OrderedDict(b=noise[::2], a=noise.sum()),
        "default": defaultdict(
            list, {"empty": torch.zeros(0, 3), "parameter": torch.nn.Parameter(noise[:, 0])}
        ),
        "complex": torch.complex(noise, noise).conj(),
    }


def bits(data: Any) -> list[tuple[str, list[int], bytes]]:
    return [
        (
            str(leaf.dtype),
            list(leaf.shape),
            leaf.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
        for leaf in iterate_tensors(data)
    ]


def compare_with_leaf_by_leaf(scale: int) -> dict[str, Any]:
    transport, last = current_transport(), size() - 1
    data = nested(scale)
    packed = gather(data)
    one_by_one = recursively_apply(transport.gather, data)
    combinable = {
        "floats": data["pair"],
        "numbers": [t for t in data["dtypes"] if t.dtype != torch.float8_e4m3fn],
    }
    ordered = {**combinable, "numbers": [t for t in combinable["numbers"] if not t.is_complex()]}
    ways = [("sum", combinable), ("mean", combinable), ("max", ordered), ("min", ordered)]
    reduced = [reduce(given, how) for how, given in ways]
    reduced_one_by_one = [recursively_apply(transport.reduce, given, how) for how, given in ways]
    copies = [recursively_apply(torch.clone, data) for _ in range(2)]
    sent = broadcast(copies[0], last)
    recursively_apply(transport.broadcast, copies[1], last)
    return {
        "gather": bits(packed) == bits(one_by_one),
        "kinds": [type(part).__name__ for part in packed.values()],
        "factory": packed["default"].default_factory is list,
        "broadcast": bits(sent) == bits(copies[1]),
        "in place": all(
            a is b for a, b in zip(iterate_tensors(sent), iterate_tensors(copies[0]), strict=True)
        ),
        "reduce": bits(reduced) == bits(reduced_one_by_one),
        "close": all(
            torch.allclose(a, b, rtol=1e-2 if a.dtype.itemsize < 4 else 1e-5)
            for a, b in zip(iterate_tensors(reduced), iterate_tensors(reduced_one_by_one), strict=True)
        ),
        "equal everywhere": bits(reduced),
    }


@pytest.mark.parametrize(
    ("processes", "scale"),
    [
        (3, 4),
        (2, 10_000),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(2, 4), (2, 300), (3, 30_000)]),
    ],
)
def test_packed_is_leaf_by_leaf(run: Run, processes: int, scale: int) -> None:
    results = run(compare_with_leaf_by_leaf, scale, processes=processes)
    for result in results:
        assert result["gather"]
        assert result["kinds"] == ["list", "Pair", "OrderedDict", "defaultdict", "Tensor"]
        assert result["factory"]
        assert result["broadcast"]
        assert result["in place"]
        assert result["close"]
        assert result["reduce"] or processes > 2  # three numbers may be added up in another order
        assert result["equal everywhere"] == results[0]["equal everywhere"]


class Counter(TorchDispatchMode):
    """Counts the collectives within the context, of any caller."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def count_collectives() -> dict[str, int]:
    def count(function: Callable[[], Any]) -> int:
        with Counter() as counter:
            function()
        return counter.count

    small, middle = nested(4), [torch.ones(3000) for _ in range(10)]
    return {
        "gather": count(lambda: gather(small)),
        "reduce": count(lambda: reduce(small["pair"])),
        "broadcast": count(lambda: broadcast(small)),
        "pad": count(lambda: pad_across_processes([torch.ones(rank() + 1), torch.ones(2)])),
        "valid": count(lambda: gather_valid({"a": torch.ones(2, 3), "b": torch.ones(2)}, (2, 1))),
        "objects": count(lambda: gather_object(["x"] * rank())),
        "object list": count(lambda: broadcast_object_list([rank()])),
        "gather of more": count(lambda: gather(middle)),
        "reduce of more": count(lambda: reduce(middle)),
        "objects of more": count(lambda: gather_object(list(range(10_000 * rank())))),
    }


@pytest.mark.cpu_only
def test_one_collective_for_a_small_structure(run: Run) -> None:
    for counts in run(count_collectives):
        assert counts == {
            **dict.fromkeys(("gather", "reduce", "broadcast", "pad", "valid", "objects", "object list"), 1),
            **dict.fromkeys(("gather of more", "reduce of more", "objects of more"), 2),
        }


def call_different_operations() -> list[str]:
    first = rank() == 0
    two = torch.ones(2)
    calls: list[Callable[[], Any]] = [
        lambda: gather(two) if first else reduce(two),
        lambda: gather_object([1]) if first else broadcast({"a": two}),
        lambda: broadcast(two, 0 if first else 1),
        lambda: reduce(two, "sum" if first else "mean"),
        lambda: pad_across_processes(two) if first else broadcast_object_list([1]),
        lambda: gather(torch.ones(30_000)) if first else gather(two),
    ]
    texts = []
    for call in calls:
        with pytest.raises(DistributedOperationException) as refused:
            call()
        texts.append(str(refused.value).replace(__file__, "FILE"))
    assert gather(torch.tensor([rank()])).tolist() == [0, 1]  # the next collective still works
    return texts


@pytest.mark.cpu_only
def test_different_operations_are_refused_on_every_process(run: Run) -> None:
    first, second = run(call_different_operations)
    path = "accelerate.utils.operations"
    assert f"Operation:\n  - Process 0: `{path}.gather`\n  - Process 1: `{path}.reduce`\n" in first[0]
    assert "Input shapes:\n  - Process 0: [2]\n  - Process 1: [2]\n" in first[0]
    assert "Input shapes:\n  - Process 0: no tensors\n  - Process 1: {'a': [2]}\n" in first[1]
    assert "The arguments differ" in first[2]
    assert "Input arguments:\n  - Process 0: from_process=0\n  - Process 1: from_process=1\n" in first[2]
    assert "Process 0: reduction='sum'\n  - Process 1: reduction='mean'\n" in first[3]
    assert f"Process 0: `{path}.pad_across_processes`\n" in first[4]
    assert "Process 0: [30000]\n  - Process 1: [2]\n" in first[5]
    for text, other in zip(first, second, strict=True):
        assert text.removeprefix("`") in other or other in text
        assert "Called from:\n  - Process 0: FILE:" in text


def refuse_bad_arguments() -> list[str]:
    calls: list[tuple[type[Exception], Callable[[], Any]]] = [
        (TypeError, lambda: gather(["text"])),
        (ValueError, lambda: broadcast(torch.ones(1), 2)),
        (ValueError, lambda: broadcast_object_list([1], from_process=-1)),
        (ValueError, lambda: copy_tensor_to_devices(torch.ones(1))),
        (ValueError, lambda: reduce(torch.ones(1), "median")),
    ]
    texts = []
    for kind, call in calls:
        with pytest.raises(kind) as refused:
            call()
        texts.append(str(refused.value))
    return texts


def test_bad_arguments_are_named(run: Run) -> None:
    first, second = run(refuse_bad_arguments)
    assert first == second
    assert "was given str" in first[0]
    assert first[1].startswith("from_process=2: there are 2 processes.")
    assert first[2].startswith("from_process=-1: there are 2 processes.")
    assert "processes [0, 1] have one" in first[3]
    assert first[4].startswith("reduction='median'")


def combine_distributed_tensors(shape: tuple[int, ...]) -> dict[str, Any]:
    from torch.distributed.tensor import Shard, distribute_tensor

    PartialState()
    mesh = torch.distributed.init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))["inner"]
    group = mesh.mesh.min().item()
    whole = torch.arange(6.0).view(3, 2) + 10 * group
    data = {"shared": distribute_tensor(whole, mesh, [Shard(0)]), "own": torch.tensor([float(rank())])}
    norm = distribute_tensor(torch.tensor(4.0 + group), mesh)
    before = data["shared"].to_local().clone()
    return {
        "gather": gather(data),
        "norm": gather(norm),
        "mean": reduce([data["shared"], norm], "mean"),
        "sum": reduce(data["shared"], "sum", scale=0.5),
        "whole": whole,
        "same": torch.equal(before, data["shared"].to_local()),
    }


@pytest.mark.cpu_only
def test_a_distributed_tensor_is_one_value(run: Run) -> None:
    for found in run(combine_distributed_tensors, (1, 2)):
        torch.testing.assert_close(found["gather"]["shared"], found["whole"])
        assert found["gather"]["own"].tolist() == [0.0, 1.0]
        assert found["norm"].tolist() == [4.0]
        torch.testing.assert_close(found["mean"][0], found["whole"])
        assert found["mean"][1].item() == 4.0
        torch.testing.assert_close(found["sum"], found["whole"] / 2)
        assert found["same"]


@pytest.mark.slow
def test_groups_that_share_a_distributed_tensor_count_once(run: Run) -> None:
    first, third = torch.arange(6.0).view(3, 2), torch.arange(6.0).view(3, 2) + 20
    for found in run(combine_distributed_tensors, (2, 2), processes=4):
        torch.testing.assert_close(found["gather"]["shared"], torch.cat([first, third]))
        assert found["gather"]["own"].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert found["norm"].tolist() == [4.0, 6.0]
        torch.testing.assert_close(found["mean"][0], (first + third) / 2)
        assert found["mean"][1].item() == 5.0
        torch.testing.assert_close(found["sum"], (first + third) / 2)
        assert found["same"]


def gather_uneven_tensors() -> dict[str, Any]:
    mine = torch.arange(float(2 * rank())).view(-1, 2) + 10 * rank()  # no row on rank 0
    half = mine.to(torch.bfloat16).requires_grad_()
    accelerator = Accelerator()
    with pytest.raises(DistributedOperationException) as shapes:
        gather(torch.ones(2, rank() + 1), uneven=True)
    with pytest.raises(DistributedOperationException) as calls:
        gather(torch.ones(1), uneven=rank() == 0)
    joined = gather({"half": [half], "number": torch.tensor(rank())}, uneven=True)
    return {
        "float": accelerator.gather(mine, uneven=True).tolist(),
        "half": joined["half"][0],
        "number": joined["number"].tolist(),
        "shapes": str(shapes.value),
        "calls": str(calls.value),
    }


@pytest.mark.cpu_only
@pytest.mark.parametrize("debug", [False, True])
def test_gather_takes_uneven_tensors(run: Run, debug: bool) -> None:
    expected = [[10.0, 11.0], [20.0, 21.0], [22.0, 23.0]]
    environ = {"ACCELERATE_DEBUG_MODE": "1"} if debug else {}
    for result in run(gather_uneven_tensors, processes=3, env=environ):
        assert result["float"] == expected
        assert result["half"].dtype is torch.bfloat16
        assert not result["half"].requires_grad
        assert result["half"].tolist() == expected
        assert result["number"] == [0, 1, 2]
        assert "Operation: `accelerate.utils.operations.gather`" in result["shapes"]
        assert "  - Process 0: [2, 1]\n  - Process 1: [2, 2]\n  - Process 2: [2, 3]\n" in result["shapes"]
        assert "  - Process 0: uneven=True\n  - Process 1: \n" in result["calls"]


def test_one_process_gathers_uneven_tensors_unchanged(states: None) -> None:
    tensors = [torch.ones(2)]
    assert gather(tensors, uneven=True) is tensors
    assert Accelerator(cpu=True).gather(tensors, uneven=True) is tensors


def special_tensors() -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls these kinds prototypes
        return _special_tensors()


def _special_tensors() -> dict[str, torch.Tensor]:
    rows = [torch.ones(2, 3), torch.ones(3, 3)]
    return {
        "a nested tensor": torch.nested.nested_tensor(rows),
        "a nested tensor (jagged)": torch.nested.nested_tensor(rows, layout=torch.jagged),
        "the layout torch.sparse_coo": torch.eye(3).to_sparse(),
        "the layout torch.sparse_csr": torch.eye(3).to_sparse_csr(),
        "a quantized tensor": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "the meta device": torch.empty(2, device="meta"),
        "a masked tensor": torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])),
    }


def refuse_special_tensors() -> list[tuple[str, str]]:
    calls = (gather, broadcast, reduce, partial(gather, uneven=True))
    cases = special_tensors()
    return [(name, failing(call, {"x": [tensor]})) for name, tensor in cases.items() for call in calls]


def failing(call: Callable[..., Any], *args: Any) -> str:
    with pytest.raises((RuntimeError, TypeError)) as error:
        call(*args)
    return str(error.value)


def test_tensors_that_are_not_dense_are_refused_with_their_path(run: Run) -> None:
    for refusals in run(refuse_special_tensors):
        assert len(refusals) == 28
        for name, text in refusals:
            assert name.removesuffix(" (jagged)") in text
            assert "at ['x'][0]" in text


def pad_special_tensors() -> list[str]:
    cases = special_tensors()
    wrong = [
        name
        for name, tensor in cases.items()
        if "nested" not in name and pad_across_processes([tensor])[0] is not tensor
    ]
    for name in ("a nested tensor", "a nested tensor (jagged)"):
        with pytest.warns(CannotPadNestedTensorWarning):
            assert pad_across_processes({"x": cases[name]})["x"] is cases[name]
    assert "given str at ['x'][1]" in failing(pad_across_processes, {"x": [torch.ones(1), "name"]})
    assert "given str at ['x'][1]" in failing(gather, {"x": [torch.ones(1), "name"]})
    return wrong


def test_padding_returns_tensors_that_are_not_dense_unchanged(run: Run) -> None:
    assert run(pad_special_tensors) == [[], []]
