"""Whatever a file, a variable or a command line holds: it is read, or one error of this package names it."""

from __future__ import annotations

import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings, strategies as st

from accelerate import Accelerator
from accelerate.accelerator import build_request
from accelerate.base import LONGEST, AccelerateError, environ
from accelerate.commands.kubernetes import as_manifest
from accelerate.commands.launch import launch_command_parser, read_settings
from accelerate.diagnostics.stopping import find_sources
from accelerate.diagnostics.watching import read_limits
from accelerate.launch import Machine, Target, as_json, as_text, resolve_plan
from accelerate.settings import (
    SECTIONS,
    Layer,
    Section,
    Settings,
    config_file,
    convert_config_to_fsdp2,
    decode,
    fsdp2_notes,
    load_config_from_file,
    merge_layers,
)
from accelerate.settings.migrations import migrate
from accelerate.settings.sections import StoppingSection
from accelerate.state import environments

TIMES = int(os.environ.get("FUZZ_TIMES", "1"))
"""How many times the usual number of examples is tried; somebody who looks for faults sets 20 or more."""
LONGEST_MESSAGE = 8 * LONGEST
DEFAULTS = {name: parameter.default for name, parameter in signature(Accelerator).parameters.items()}

# Texts

NUMBERS = ("", " ", "0", "-1", "2", "1.5", "1e999", "-inf", "nan", "0x10", "1_0", "9" * 30, "9" * 400)
OTHER_DIGITS = ("9" * 5000, "\u0663", "\u00b2", "\uff11", "\u0663:\u0663:\u0663")
WORDS = (
    "true",
    "no",
    "None",
    "auto",
    "all",
    "NO",
    "FSDP",
    "nvme",
    "max",
    "1:2:3",
    "9-9:9:9",
    "1,1",
    "0=24GB",
)
PATHS = ("~", "~no-user-of-this-name/x", "/", ".", "a" * 400, "a/" * 5000, "\udcff", "\ud800", "a\0b", "'")
NESTED = ("{" * 5000, "[" * 5000, '["a"]', '{"zero_optimization": 1}', "1(x999999999)", "[" * 300 + "1-")
FLAG_LIKE = ("-", "--", "-x", "--no", "a=b,c")
TEXTS = st.sampled_from(
    [*NUMBERS, *OTHER_DIGITS, *WORDS, *PATHS, *NESTED, *FLAG_LIKE]
) | st.text(st.characters(), max_size=20)  # fmt: skip


def can_be_a_variable(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= c < "\udc80" or "\udcff" < c < "\ue000" for c in text)


# Values of files

SCALARS = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.binary(max_size=5), st.dates()),
    *(st.sampled_from([10**400, -1, 2**64]), TEXTS),
)
KEYS = st.text(max_size=5) | SCALARS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
SYNTAX = [*"{}[]\n,'|#1", "a: ", "&x ", "*x", "<<: ", "- ", "? ", "  ", "!!int ", "!!bool ", "!!set "]


def places() -> Iterator[tuple[str, str]]:
    """The group, or nothing, and the key of every option of the file."""
    for section in SECTIONS:
        yield from ((section.file_key or "", row.key) for row in section.options() if row.key)


PLACES = list(places())
GROUPS = sorted({where for where, _ in PLACES if where})
KNOWN_KEYS = sorted({key for _, key in PLACES})
MAPPINGS = st.dictionaries(st.sampled_from(KNOWN_KEYS) | KEYS, VALUES, max_size=4)
WAYS = ("NO", "FSDP", "DEEPSPEED", "MEGATRON_LM", "MULTI_CPU", "XLA", False)

# Variables

OPTIONS = [(section, row) for section in SECTIONS for row in section.options()]
VARIABLES = [(section, name) for section, row in OPTIONS for name in (*row.variables, *row.aliases)]
STARTERS = (
    *(environments.from_torchrun, environments.from_open_mpi, environments.from_mvapich),
    *(environments._pmi, environments._sagemaker, environments._slurm),
)
OF_STARTERS = {
    name
    for starter in STARTERS
    for part in (starter.rank, starter.size, starter.local_rank, starter.local_size, starter.node)
    for name in part
}
OF_PLACES = sorted(
    OF_STARTERS
    | {"MASTER_ADDR", "MASTER_PORT", "SM_HOSTS", "ACCELERATE_USE_SAGEMAKER", "ACCELERATE_USE_CPU"}
    | {"SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"}
    | {"ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"}
)

MACHINE = Machine(
    cores=4,
    port_in_use=lambda port: False,
    free_port=lambda: 29500,
    environ={},
    mpi_version=lambda: "Open MPI",
    has_module=lambda name: False,
)


def many(usual: int) -> settings:
    return settings(max_examples=usual * TIMES)


@cache
def parser() -> Any:
    return launch_command_parser()


FLAGS = sorted({flag for action in parser()._actions for flag in action.option_strings} - {"-h", "--help"})


def refused(act: Callable[[], object]) -> str:
    """The error that something ends with; nothing where it works."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            act()
    except AccelerateError as error:
        said.write(str(error) or "an error without a text")
    except SystemExit as ended:
        return said.getvalue() if ended.code == 2 else f"code {ended.code}"
    return said.getvalue()


def names(problem: str, name: str) -> bool:
    """Whether an error about one value names its place, and is short."""
    return name.replace("-", "_") in problem.replace("-", "_") and len(problem) < LONGEST_MESSAGE


def plan(merged: Settings, *words: str) -> None:
    """Decide what a launch would start, and write it for people and for machines."""
    target = Target("script", "train.py", words)
    refused(lambda: as_manifest("job", None, merged, target, {}))
    found, chosen = resolve_plan(merged, MACHINE, target)
    json.loads(as_json(found, chosen))
    assert as_text(found, chosen)


def use_file(content: bytes, name: str) -> None:
    """Do with a file what the commands do."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(content)
        read: list[Any] = []
        problem = refused(lambda: read.append(config_file.read_mapping(path)))
        assert str(path) in problem or read
        if problem:
            return
        refused(lambda: plan(merge_layers(config_file.read_layer(path, "file"))))
        refused(lambda: yaml.safe_dump(load_config_from_file(str(path)).to_dict()))
        refused(lambda: json.dumps(load_config_from_file(str(path)).to_dict(), sort_keys=True))
        refused(lambda: (convert_config_to_fsdp2(read[0]), fsdp2_notes(read[0])))


@many(250)
@given(place=st.sampled_from(PLACES), value=VALUES)
def test_each_key_of_a_file_takes_a_value_or_is_named(place: tuple[str, str], value: Any) -> None:
    where, key = place
    values: dict[str, Any] = {}
    mapping = {where: {key: value}} if where else {key: value}
    problem = refused(lambda: values.update(config_file.check(migrate(mapping)[0], Path("file"))))
    assert not problem or names(problem, key)
    refused(lambda: plan(merge_layers(Layer("file", values))))


@many(200)
@given(
    mapping=MAPPINGS,
    groups=st.dictionaries(st.sampled_from(GROUPS), MAPPINGS | VALUES, max_size=3),
    way=st.sampled_from(WAYS),
)
def test_files_of_any_values(mapping: dict[Any, Any], groups: dict[str, Any], way: object) -> None:
    held = {**mapping, **groups, "distributed_type": way}
    use_file(yaml.safe_dump(held).encode("utf-8", "replace"), "c.yaml")
    if all(isinstance(key, str) for key in held):
        use_file(json.dumps(held, default=str, skipkeys=True).encode(), "c.json")


@many(150)
@given(content=st.binary(max_size=60) | TEXTS.map(lambda text: text.encode("utf-8", "replace")))
def test_files_of_any_bytes(content: bytes) -> None:
    use_file(content, "c.yaml")
    use_file(content, "c.json")


@many(100)
@given(parts=st.lists(st.sampled_from(SYNTAX), max_size=25))
def test_files_of_any_syntax(parts: list[str]) -> None:
    use_file("".join(parts).encode(), "c.yaml")


@many(250)
@given(pair=st.sampled_from(VARIABLES), text=TEXTS)
def test_each_variable_is_read_or_named(pair: tuple[type[Section], str], text: str) -> None:
    section, name = pair
    problem = refused(lambda: decode(section, {name: text}))
    assert not problem or names(problem, name)


@pytest.mark.usefixtures("states")
@pytest.mark.filterwarnings("ignore::UserWarning")  # about settings without effect
@many(150)
@given(
    found=st.dictionaries(
        st.sampled_from([name for _, name in VARIABLES]), TEXTS.filter(can_be_a_variable), max_size=4
    ),
    way=st.sampled_from(["FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG", "CPU"]),
)
def test_a_worker_reads_its_variables_or_names_one(found: dict[str, str], way: str) -> None:
    variables = {f"ACCELERATE_USE_{way}": "true", **found}

    def read() -> None:
        build_request(variables, **DEFAULTS)
        read_limits(variables)
        find_sources(decode(StoppingSection, variables), variables, reads_files=True)

    with environ.clear_environment():
        environ.assign(variables)
        refused(read)


@many(300)
@given(
    numbers=st.dictionaries(st.sampled_from(OF_PLACES), st.integers(-1, 4).map(str), max_size=8),
    texts=st.dictionaries(st.sampled_from(OF_PLACES), TEXTS, max_size=2),
)
def test_a_worker_reads_its_rank_or_names_a_variable(numbers: dict[str, str], texts: dict[str, str]) -> None:
    found: list[Any] = []
    problem = refused(lambda: found.append(environments.detect({**numbers, **texts})))
    if problem:
        assert any(names(problem, name) for name in OF_PLACES)
    else:
        assert 0 <= found[0].rank < found[0].size


@many(250)
@given(
    words=st.lists(
        st.tuples(st.sampled_from(FLAGS), TEXTS).map("=".join) | st.sampled_from(FLAGS) | TEXTS, max_size=6
    )
)
def test_any_command_line_is_explained_or_refused(words: list[str]) -> None:
    def explained() -> None:
        args = parser().parse_args([*words, "train.py"])
        plan(read_settings(args), *args.training_script_args)

    with environ.clear_environment(), tempfile.TemporaryDirectory() as home:
        environ.assign({"HF_HOME": home})
        assert not refused(explained).startswith("code")


@many(250)
@example(flag="--tee", text="\ud800")  # its first name is -t
@given(flag=st.sampled_from([flag for flag in FLAGS if flag.startswith("--")]), text=TEXTS)
def test_each_flag_is_read_or_named(flag: str, text: str) -> None:
    with environ.clear_environment(), tempfile.TemporaryDirectory() as home:
        environ.assign({"HF_HOME": home})
        problem = refused(lambda: read_settings(parser().parse_args([f"{flag}={text}", "train.py"])))
    assert not problem or names(problem, flag)
