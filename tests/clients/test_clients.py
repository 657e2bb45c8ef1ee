"""Client libraries run unchanged, with equal results under every device map and number of processes.

Needs transformers, and for the other cases peft, trl, diffusers, sentence-transformers and datasets. The same
programs are held against the original interface by `benchmarks/clients.py`.
"""

from __future__ import annotations

import json
import math
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from .cases import BEST, CASES, Case, allow_training, numbers_of, run, sharded

LAUNCH = (sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes")
FSDP = {"transformer_layer_cls_to_wrap": ["GPT2Block"]}


def found_by(case: Case, folder: Path, *arguments: str, launcher: bool = False) -> Any:
    missing = [package for package in case.packages if find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    prefix = (*LAUNCH, str(case.processes)) if launcher else ()
    wanted = Case(case.program, case.packages, (*case.arguments, *arguments), case.processes)
    folder.mkdir(parents=True, exist_ok=True)
    return run(sys.executable, wanted, folder, prefix)


def check_trainer(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Losses are those of one process on the joined batch, and of the run that stopped and resumed."""
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert found["resumed"] == found["losses"]
    assert found["evaluation"] == pytest.approx(expected["evaluation"], abs=1e-5)
    assert found["prediction"][0] == expected["prediction"][0]
    assert found["prediction"][1] == pytest.approx(expected["prediction"][1], rel=1e-5)


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The Trainer on one process with the whole batch."""
    folder = tmp_path_factory.mktemp("joined")
    found: dict[str, Any] = found_by(CASES["Trainer"], folder, "per_device_train_batch_size=4")
    return found


@pytest.mark.slow
def test_a_custom_trainer_trains_and_resumes(tmp_path: Path) -> None:
    """One process; its checkpoint resumes exactly."""
    found = found_by(CASES["by hand"], tmp_path)
    assert found["losses"][-1] < found["losses"][0]
    assert len(found["again"]) == 2
    assert all(math.isfinite(number) for number in numbers_of(found))


@pytest.mark.slow
def test_a_custom_trainer_on_two_processes_matches_one_process(tmp_path: Path) -> None:
    """Its batches are split: numbers are those of one process."""
    one = found_by(CASES["by hand"], tmp_path / "one")
    case = Case("by_hand", ("sklearn",), processes=2)
    two = found_by(case, tmp_path / "two", launcher=True)
    assert numbers_of(two) == pytest.approx(numbers_of(one), abs=1e-5)
    low = found_by(case, tmp_path / "low", "amp=true")
    assert numbers_of(low) == pytest.approx(numbers_of(one), abs=5e-3)
    assert numbers_of(low) != numbers_of(one)


@pytest.mark.slow
def test_each_streamed_row_is_read_once_in_every_mode(tmp_path: Path) -> None:
    case = Case("streaming", ("datasets",), processes=2)
    one = found_by(CASES["datasets, streamed"], tmp_path / "one")
    two = found_by(case, tmp_path / "two", launcher=True)
    whole = list(range(37))
    counted = [name for name in one if name.endswith(", counted")]
    assert len(counted) == 6
    for name in counted:
        assert sorted(one[name]) == sorted(two[name]) == whole, name
    for name in ("dispatched", "dispatched and split"):
        assert two[f"{name}, counted"] == one[f"{name}, counted"], name
    for process, batches in enumerate(two["skipped"]):
        assert batches == two["as it comes"][process][2:]
    assert all(math.isfinite(loss) for loss in two["losses"])


@pytest.mark.slow
def test_the_trainer_reads_streams_on_two_processes(tmp_path: Path) -> None:
    case = Case("trainer", ("transformers", "datasets"), ("streamed=true",), 2)
    found = found_by(case, tmp_path, launcher=True)
    assert found["resumed"] == found["losses"]
    assert found["losses"][-1] < found["losses"][0]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_the_trainer_evaluates_the_mean_over_all_samples(tmp_path: Path, processes: int) -> None:
    found = found_by(Case("evaluating", ("transformers",), (), processes), tmp_path, launcher=processes > 1)
    assert len(found) == 18
    for name, (loss, mean, has_all_labels) in found.items():
        assert loss == pytest.approx(mean), name
        assert has_all_labels, name


@pytest.mark.slow
def test_the_trainer_in_half_precision_and_with_a_device_map(joined: dict[str, Any], tmp_path: Path) -> None:
    plain = found_by(CASES["Trainer"], tmp_path / "plain")
    placed = found_by(CASES["Trainer, device_map"], tmp_path / "placed")
    assert placed == plain
    shared = found_by(CASES["Trainer, device_map, two processes"], tmp_path / "shared")
    check_trainer(shared, joined)
    half = found_by(CASES["Trainer"], tmp_path / "half", "fp16=true")
    assert half["resumed"] == half["losses"] != plain["losses"]
    assert half["losses"] == pytest.approx(plain["losses"], abs=2e-3)


@pytest.mark.slow
def test_the_trainer_keeps_the_best_of_its_states(joined: dict[str, Any], tmp_path: Path) -> None:
    """Also sharded by either version of FSDP; an evaluation in between changes nothing."""
    found = found_by(CASES["Trainer, best of its states, two processes"], tmp_path / "copies")
    assert found["losses"] == pytest.approx(joined["losses"], abs=1e-5)
    for version in (1, 2):
        case = Case("trainer", ("transformers",), (*sharded(version), *BEST), 2)
        check_trainer(found_by(case, tmp_path / str(version)), found)


@pytest.mark.slow
def test_the_command_line_of_trl(tmp_path: Path) -> None:
    """Launched by itself, by both launchers, with arguments and with a file of settings."""
    found = found_by(Case("commands", ("transformers", "datasets", "trl", "peft")), tmp_path)
    assert found["dpo, launched"] == found["dpo"]
    assert found["sft, with settings"] == found["sft, two processes"] != found["sft"]
    assert found["dpo, launched with settings"] == found["dpo, two processes"]
    assert all(losses[-1] < losses[0] for losses in found.values())


def test_a_resumed_trainer_matches_an_uninterrupted_one(tmp_path: Path) -> None:
    found = found_by(CASES["Trainer, accumulating"], tmp_path)
    assert found["resumed"] == found["losses"]
    assert found["losses"][-1] < found["losses"][0]
    assert found["prediction"][0] == [11, 24, 98]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "launcher"),
    [
        ("Trainer, two processes", (), False),
        ("Trainer, two processes", (), True),
        ("Trainer, accumulating", (), False),
        ("Trainer, two processes", ('fsdp="full_shard auto_wrap"', FSDP), False),
        ("Trainer, two processes", ('fsdp="full_shard auto_wrap"', {**FSDP, "fsdp_version": 2}), False),
        (
            "Trainer, two processes",
            (
                'fsdp="full_shard auto_wrap"',
                {**FSDP, "fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
            ),
            True,
        ),
    ],
)
def test_the_trainer_matches_one_process_under_every_strategy(
    joined: dict[str, Any], tmp_path: Path, name: str, arguments: tuple[Any, ...], launcher: bool
) -> None:
    texts = [each if isinstance(each, str) else f"fsdp_config={json.dumps(each)}" for each in arguments]
    check_trainer(found_by(CASES[name], tmp_path, *texts, launcher=launcher), joined)


@pytest.mark.slow
def test_device_maps_keep_losses_and_predictions(tmp_path: Path) -> None:
    found = found_by(CASES["device maps"], tmp_path)
    losses = [loss for loss, *_ in found.values()]
    assert losses == pytest.approx([losses[0]] * 4, abs=1e-6)
    assert len({str(words) for _, words, _ in found.values()}) == 1
    assert "'disk'" in found["disk"][2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["peft", "peft, two processes"])
def test_adapters(tmp_path: Path, name: str) -> None:
    found = found_by(CASES[name], tmp_path)
    assert found["losses"][3] < found["losses"][0]
    assert found["offloaded"] == pytest.approx([found["again"]] * 2, abs=1e-5)


@pytest.mark.slow
def test_fine_tuning_on_two_processes_is_that_of_the_joined_batch(tmp_path: Path) -> None:
    whole = found_by(CASES["trl"], tmp_path / "whole", "4")
    shared = found_by(CASES["trl, two processes"], tmp_path / "shared", "2", launcher=True)
    assert numbers_of(shared) == pytest.approx(numbers_of(whole), abs=1e-4)
    assert whole["preferred"][0] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.slow
def test_pictures_are_equal_for_every_offload_of_the_parts(tmp_path: Path) -> None:
    ways = ("none", "parts", "layers", "model", "sequential")
    found = found_by(CASES["diffusers"], tmp_path, *ways)
    assert list(found["pictures"]) == list(ways)
    assert list(found["pictures"].values()) == pytest.approx([found["pictures"]["none"]] * 5, rel=1e-5)
    assert all(math.isfinite(loss) for loss in found["losses"])


@pytest.mark.slow
def test_embeddings_split_between_processes(tmp_path: Path) -> None:
    one = found_by(CASES["sentence-transformers"], tmp_path / "one")
    two = found_by(CASES["sentence-transformers, two processes"], tmp_path / "two")
    assert one["shape"] == two["shape"] == [10, 384]
    assert numbers_of(two) == pytest.approx(numbers_of(one), abs=1e-5)


@pytest.mark.slow
def test_sentence_transformers_trains_when_the_user_allows_it(tmp_path: Path) -> None:
    case = CASES["sentence-transformers, training"]
    with pytest.raises(RuntimeError, match="you need to install the `accelerate`"):
        found_by(case, tmp_path / "refused")
    allowed = allow_training(tmp_path)
    found = run(sys.executable, case, tmp_path, **allowed)
    assert len(found["losses"]) == 4
    two = run(sys.executable, CASES["sentence-transformers, training, two processes"], tmp_path, **allowed)
    assert len(two["losses"]) == 4
    assert all(math.isfinite(number) for number in numbers_of([found, two]))
