"""The command `accelerate verify`, which compares the training of a script in two launches."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import verification
from accelerate.base import ConfigurationError, LaunchError, environ, wrong_value
from accelerate.commands.launch import (
    LaunchParser,
    add_script_options,
    add_target,
    check_script,
    launch_command_parser,
    read_settings,
)
from accelerate.commands.utils import Subparsers, entry_point, make_parser
from accelerate.launch import LAUNCH_COMMAND, Target, choose_cpu_or_devices
from accelerate.monitoring import RECORDS_VARIABLE
from accelerate.settings import CustomArgumentParser, CustomHelpFormatter, Settings
from accelerate.settings.sections import LaunchSection
from accelerate.verification import ENTRY, Options, Run

DESCRIPTION = (
    "Check that a script trains with this launch what one process trains. It runs the unmodified script "
    "twice for a few optimizer steps, with these flags and on one process with the same samples in each "
    "step, and compares samples, losses, gradient norms, learning rates and weights. Flags are those of "
    "accelerate launch."
)
OWN = {"--steps": 1, "--against": 1, "--json": 1, "--report": 1, "--keep_dropout": 0, "--tolerance": 1}
"""Options of this command with the number of their values."""
OFFLINE = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "DISABLED",
    "CLEARML_OFFLINE_MODE": "1",
    "NEPTUNE_MODE": "debug",
    "SWANLAB_MODE": "disabled",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Variables that turn off the network of trackers that the script uses itself."""
RECORDS = "records"
"""Folder of the records of a run in its folder."""
SCRUBBED = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
"""Prefixes of variables that choose a layout, which the reference does not have."""
KEPT = ("ACCELERATE_TORCH_DEVICE",)


def verify_command(args: argparse.Namespace) -> None:
    """Runs a script in two launches and compares what they train.

    Raises:
        ConfigurationError: The settings are not valid, or the runs cannot be compared.
        LaunchError: One of the runs failed.
        SystemExit: The runs differ. The exit code is 1.
    """
    if args.steps < 1:
        raise wrong_value("--steps", args.steps, "at least one step is compared", "Pass a larger number")
    if args.no_python:
        raise wrong_value("--no_python", True, "only Python scripts and modules are recorded", "Leave it out")
    if args.tolerance is not None and not 0 < args.tolerance < math.inf:
        raise wrong_value("--tolerance", args.tolerance, "it is a factor above 0", "Pass a number such as 2")
    check_script(Target.of(args))
    _check_writable("--json", args.json)
    _check_writable("--report", args.report)
    against = None if args.against is None else _parse_against(args)
    target = [args.training_script, *args.training_script_args]
    flags = without_own(args.words[: len(args.words) - len(target)])
    settings = choose_cpu_or_devices(read_settings(args))
    if (machines := settings[LaunchSection].num_machines or 1) > 1:
        raise wrong_value("--num_machines", machines, "runs are compared on one machine", "Leave it out")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # removes the folder
    with tempfile.TemporaryDirectory(prefix="accelerate-verify-") as name:
        folder = Path(name)
        options = Options(str(folder / "run"), args.steps, keeps_dropout=args.keep_dropout)
        run_both = partial(_run_both, flags, target, against, settings)
        run, reference = run_both(options)
        tolerances = verification.tolerances_of(run, args.tolerance)
        findings = verification.compare(run, reference, tolerances)
        if first := verification.find_traced(findings):
            print(
                f"accelerate verify: step {first.step}: {first.text}. Both runs are repeated to compare the "
                "outputs of modules in this step."
            )
            traced = replace(
                options,
                folder=str(folder / "traced"),
                steps=first.step,
                traced_step=first.step,
                traced_optimizer=first.optimizer,
            )
            findings = verification.with_cause(findings, verification.compare(*run_both(traced), tolerances))
        print(verification.format_runs(run, reference, findings, args.steps))
        if args.json is not None:
            from accelerate.report import finite_values

            content = finite_values(verification.as_json(run, reference, findings, tolerances))
            Path(args.json).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if args.report is not None:
            _write_report(Path(args.report), run, reference)
        if any(not finding.is_expected for finding in findings):
            sys.exit(1)


def _write_report(path: Path, run: Run, reference: Run) -> None:
    """Writes the page of `accelerate report` about both runs."""
    from accelerate.report import read_run, write_page

    pairs = [(run, "this launch"), (reference, "the reference")]
    page = write_page([read_run(each.folder / RECORDS, name) for each, name in pairs])
    path.write_text(page, encoding="utf-8", errors="replace")


def _parse_against(args: argparse.Namespace) -> list[str]:
    """Returns the flags of the second launch, after a check of their names and values."""
    try:
        words = shlex.split(args.against)
    except ValueError as error:
        raise wrong_value("--against", args.against, str(error), "Close the quotation marks") from error
    module = ["--module"] if args.module else []
    parsed = launch_command_parser().parse_args([*words, *module, args.training_script])
    if parsed.training_script != args.training_script or parsed.training_script_args:
        reason = f"{parsed.training_script!r} is not a flag of accelerate launch"
        raise wrong_value("--against", args.against, reason, "Pass flags only")
    read_settings(parsed)
    return words


def _check_writable(option: str, path: str | None) -> None:
    """Raises an error before the runs if a file of the result cannot be written."""
    if path is None:
        return
    if Path(path).is_dir():
        raise ConfigurationError(f"{option} {path} is a folder. Name a file in it.")
    is_new = not Path(path).exists()
    try:
        Path(path).touch()
    except OSError as error:
        raise ConfigurationError(f"{option} {path} cannot be written: {error.strerror}.") from error
    if is_new:
        Path(path).unlink()  # a run that fails leaves no empty file


def without_own(words: Sequence[str]) -> list[str]:
    """Returns the flags of `accelerate launch` among those of this command."""
    rest: list[str] = []
    num_values = 0
    for word in words:
        name, has_value = word.split("=", 1)[0].replace("-", "_").replace("__", "--", 1), "=" in word
        if num_values:
            num_values -= 1
        elif name in OWN:
            num_values = 0 if has_value else OWN[name]
        else:
            rest.append(word)
    return rest


def _run_both(
    flags: list[str], target: list[str], against: list[str] | None, settings: Settings, options: Options
) -> tuple[Run, Run]:
    """Runs the script in two launches, and returns their records.

    Args:
        target: Script and its arguments.
        against: Flags of the second launch, or None for the reference on one process.
    """
    run = _run("this launch", flags, target, options)
    other = replace(options, folder=f"{options.folder}-reference")
    if against is None:
        flags = _reference_flags(settings, flags, Path(options.folder))
        other = replace(other, factor=run.num_groups, is_reference=True, initial=options.folder)
        return run, _run("the reference on one process", flags, target, other)
    reference = _run("--against", against, target, other)
    factor, rest = divmod(run.num_groups, reference.num_groups)
    if rest:
        reason = f"it has {reference.num_groups} data-parallel groups, and the launch {run.num_groups}"
        fix = "Let it have a number that divides that of the first launch"
        raise wrong_value("--against", shlex.join(against), reason, fix)
    if factor > 1:  # with as many samples in each step
        other = replace(other, folder=f"{options.folder}-against", factor=factor)
        reference = _run("--against", against, target, other)
    return run, reference


def _run(title: str, flags: Sequence[str], target: Sequence[str], options: Options) -> Run:
    """Runs the script once, and returns its records."""
    folder = Path(options.folder)
    folder.mkdir(parents=True)
    is_module = any(word in ("-m", "--module") for word in flags)
    flags = [word for word in flags if word not in ("-m", "--module")]
    words = [*LAUNCH_COMMAND, *flags, str(ENTRY), *(["-m"] if is_module else []), *target]
    print(f"accelerate verify: {title}: accelerate launch {shlex.join([*flags, *target])}", flush=True)
    present = environ.current()
    hidden = [name for name in present if name.startswith(SCRUBBED) and name not in KEPT]
    variables = {
        **{name: text for name, text in present.items() if not (options.is_reference and name in hidden)},
        **OFFLINE,
        "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
        RECORDS_VARIABLE: str(folder / RECORDS),
        environ.PARENT: str(os.getpid()),
        **options.as_variables(),
    }
    code = subprocess.run(words, env=variables, check=False).returncode
    if code:
        raise LaunchError(f"The run of {title} ended with exit code {code}. Its output is above.")
    run = verification.read_run(folder)
    if not run.steps:
        raise ConfigurationError(
            f"The run of {title} took no optimizer step with a batch of a prepared loader, so nothing can "
            "be compared. Pass model, optimizer and loader to accelerator.prepare, and let the script train."
        )
    if not run.is_complete:
        raise LaunchError(
            f"The run of {title} ended before its weights were read, so they cannot be compared. Let the "
            "script return, call accelerator.end_training(), or pass fewer --steps than it takes."
        )
    return run


def _reference_flags(settings: Settings, flags: Sequence[str], folder: Path) -> list[str]:
    """Returns the flags of the reference on one process."""
    values: Mapping[str, Any] = {row.name: value for row, value, _ in settings}
    config = folder / "reference.yaml"
    config.write_text("num_processes: 1\nnum_machines: 1\n", encoding="utf-8")
    words = ["--config_file", str(config), "--num_processes", "1"]
    if values["mixed_precision"] not in (None, "no"):
        words += ["--mixed_precision", str(values["mixed_precision"])]
    if (steps := values["gradient_accumulation_steps"]) not in (None, 1):
        words += ["--gradient_accumulation_steps", str(steps)]
    if values["cpu"]:
        words.append("--cpu")
    return [*words, *(word for word in flags if word in ("-m", "--module"))]


class VerifyParser(LaunchParser):
    """Parser that keeps its arguments, of which most are passed on to `accelerate launch`."""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: object = None) -> Any:
        """Parses arguments as argparse does, and sets the attribute ``words`` of the namespace."""
        parsed, rest = super().parse_known_args(args, namespace)
        parsed.words = list(self._words)
        return parsed, rest


def verify_command_parser(subparsers: Subparsers | None = None) -> CustomArgumentParser:
    """Returns the parser of ``accelerate verify``, added to `subparsers` if given."""
    parser = make_parser(
        "verify",
        DESCRIPTION,
        verify_command,
        subparsers,
        parser_class=VerifyParser,
        allow_abbrev=False,
        formatter_class=CustomHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=5, metavar="N", help="Number of optimizer steps to compare.")
    add(
        "--against",
        metavar="FLAGS",
        help="Flags of a second launch that takes the place of the reference, for models that do not fit one "
        'process, such as "--num_processes 2".',
    )
    add("--json", metavar="FILE", help="File for the result as JSON.")
    add("--report", metavar="FILE", help="File for the page of accelerate report about both runs.")
    add("--keep_dropout", action="store_true", help="Apply dropout, whose masks then differ.")
    add(
        "--tolerance",
        type=float,
        metavar="FACTOR",
        help="Factor of all tolerances, which depend on the mixed precision.",
    )
    add_script_options(parser)
    add_target(parser)
    return parser


main = entry_point(verify_command_parser, __name__)
