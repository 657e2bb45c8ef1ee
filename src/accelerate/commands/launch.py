"""The command `accelerate launch`, which resolves the settings to a plan and runs it.

The settings of flags, environment and configuration file are merged first. `accelerate.launch` resolves the
plan and contains the launchers.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

from accelerate import launch
from accelerate.base import ConfigurationError, attach, end_with_parent, environ, shown
from accelerate.commands.kubernetes import MANIFESTS, as_manifest
from accelerate.commands.utils import DEVICE_PROBES, Subparsers, entry_point, make_parser
from accelerate.launch import (
    FORWARDED,
    RECORDED,
    Kind,
    LaunchPlan,
    NewestCheckpoint,
    Target,
    as_json,
    as_text,
    choose_cpu_or_devices,
    collect,
    find_first,
    keep,
    machine,
    open_folder,
    record_digest,
    record_failures,
    resolve_plan,
)
from accelerate.launch.backends import Launcher, launcher_for
from accelerate.settings import (
    CustomArgumentParser,
    CustomHelpFormatter,
    Settings,
    all_options,
    clean_option as clean_option,
    default_config_file as default_config_file,
    env,
    find_config_file,
    flags,
    merge_layers,
    options_to_group as options_to_group,
    read_layer,
)
from accelerate.settings.sections import DiagnosticsSection, LaunchSection

# Names that can be imported from here, too, and are loaded on first use. A launch needs none of them.
__getattr__, __dir__, _RE_EXPORTS = attach(
    __name__,
    {
        "accelerate.base": (
            "DEEPSPEED_MULTINODE_LAUNCHERS",
            "TORCH_DYNAMO_MODES",
            "ComputeEnvironment",
            "DistributedType",
            "convert_dict_to_env_variables",
            "get_int_from_env",
            "is_deepspeed_available",
            "is_rich_available",
            "is_sagemaker_available",
            "patch_environment",
            "str_to_bool",
        ),
        "accelerate.commands.config.config_utils": ("DYNAMO_BACKENDS",),
        "accelerate.devices": (
            *DEVICE_PROBES,
            "check_cuda_p2p_ib_support",
            "is_bf16_available",
            "is_torch_xla_available",
        ),
        "accelerate.launch": ("PrepareForLaunch",),
        "accelerate.commands.namespace": (
            "deepspeed_launcher",
            "multi_gpu_launcher",
            "prepare_deepspeed_cmd_env",
            "prepare_multi_gpu_env",
            "prepare_sagemager_args_inputs",
            "prepare_simple_launcher_cmd_env",
            "prepare_tpu",
            "sagemaker_launcher",
            "simple_launcher",
            "tpu_launcher",
            "tpu_pod_launcher",
        ),
        "accelerate.settings": ("SageMakerConfig", "load_config_from_file"),
    },
)

DESCRIPTION = (
    "Run a script on one or several processes, on one or several machines. Every option can also be "
    "written with dashes. Where an option is set several times, a flag wins over an environment variable, "
    "that over --config_file, and that over the default configuration file."
)
DEFAULT_FILE = "default file"
PARSERS = ("HfArgumentParser", "TrlParser", "jsonargparse", "LightningCLI", "tyro", "fire", "hydra", "click")
"""Names in scripts whose arguments are not written in them."""
ENDED_BY_USER = tuple(128 + number for number in FORWARDED)
"""Exit codes of a run that the user ended, unless the launcher recorded that ranks failed."""


class LaunchParser(CustomArgumentParser):
    """Parser that records the flags that were given."""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: object = None) -> Any:
        """Parses arguments as argparse does, and sets the attribute ``given`` of the namespace."""
        words: Sequence[str] = sys.argv[1:] if args is None else list(args)
        self._words = words
        parsed, rest = super().parse_known_args(words, namespace)
        if rest:  # raised here, because the parent parser does not know these flags to suggest another
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        flags.mark_given(self, parsed, words)
        # Some versions of argparse drop a `--` that is the first argument of the script.
        script_args = parsed.training_script_args
        if list(words[: len(words) - len(script_args)][-2:]) == [parsed.training_script, "--"]:
            parsed.training_script_args = ["--", *script_args]
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        """Exits with an error message, which is a special one if the script is missing."""
        missing = message.startswith("the following arguments are required: training_script")
        super().error(_missing_script(self._words) if missing else message)


def _missing_script(words: Sequence[str]) -> str:
    """Returns the message for a missing script, with the flag that may have consumed it as its value."""
    last = [part for word in words[-2:] for part in word.split("=", 1)]
    flag, value = ["", "", *last][-2:]
    is_value = flag.startswith("-") and value.endswith(".py")
    reason = f" ({flag} took {shown(value)} as its value)" if is_value else ""
    return f"the script to run is missing{reason}: accelerate launch [options] train.py"


def read_settings(args: argparse.Namespace) -> Settings:
    """Returns the settings of file, environment and flags.

    PET_* variables take precedence over all except flags.
    """
    given, present = getattr(args, "config_file", None), environ.current()
    path = find_config_file(given)
    layers = [read_layer(path, str(path) if given else f"{DEFAULT_FILE} {path}")] if path else []
    return env.apply_torchrun_variables(merge_layers(*layers, env.layer(present), flags.layer(args)), present)


def make_plan(args: argparse.Namespace) -> tuple[LaunchPlan, Settings]:
    """Returns the plan of a launch and its settings, without starting processes."""
    settings = choose_cpu_or_devices(read_settings(args))
    this_machine = machine.look(environ.current(), cpu=settings[LaunchSection].cpu)
    return resolve_plan(settings, this_machine, Target.of(args))


def launch_command(args: argparse.Namespace) -> None:
    """Runs a script with the settings of flags, environment and configuration file.

    Args:
        args: Arguments parsed by `launch_command_parser`.

    Raises:
        ConfigurationError: The settings are not valid.
        SystemExit: The script failed. The exit code is that of the script.
    """
    if getattr(args, "manifest", None) or getattr(args, "image", None):
        print(_manifest(args), end="")
        return
    plan, settings = make_plan(args)
    launcher = launcher_for(plan)
    if getattr(args, "explain", False) or getattr(args, "dry_run", False):
        print(as_json(plan, settings) if args.dry_run else as_text(plan, settings))
        return
    check_script(plan.target)
    if late := _find_late_flags(plan.target):
        print(
            f"accelerate launch: {', '.join(late)} after the script is passed to the script. Options of "
            "accelerate launch are written before it.",
            file=sys.stderr,
        )
    if plan.notes and not args.quiet:
        print(f"accelerate launch: {'; '.join(plan.notes)}.", file=sys.stderr)
    sys.stderr.flush()
    is_shown = settings[DiagnosticsSection].monitor and plan.launcher in RECORDED
    if code := _run(launcher, plan, is_shown):
        sys.exit(code)


def check_script(target: Target) -> None:
    """Raises an error for a script that does not exist, a folder without one, and the path of a module."""
    if target.kind == "module" and "/" in target.name:
        raise ConfigurationError(
            f"{shown(target.name)} is a path, and --module takes a name with dots, such as package.train. "
            "Leave out --module to run a file."
        )
    is_folder = os.path.isdir(target.name)
    path = os.path.join(target.name, "__main__.py") if is_folder else target.name
    if target.kind != "script" or os.path.exists(path):
        return
    if is_folder:
        raise ConfigurationError(
            f"{shown(target.name)} is a folder without __main__.py. Name a script in it."
        )
    raise ConfigurationError(f"There is no script {shown(target.name)} here. Check the path.")


def _find_late_flags(target: Target) -> list[str]:
    """Returns flags of this command among the arguments of a script whose text does not name them."""
    given = [word.split("=", 1)[0] for word in target.arguments if word.startswith("--")]
    if not given or target.kind != "script":
        return []
    script = Path(target.name)
    text = _source_with_local_modules(script / "__main__.py" if script.is_dir() else script)
    if any(parser in text for parser in PARSERS):
        return []
    names = {f"--{row.name}" for row in all_options().values()}
    return [word for word in given if word in names and word[2:] not in text]


def _source_with_local_modules(script: Path) -> str:
    """Returns the text of a script and of the modules beside it that it imports."""
    text = script.read_text(encoding="utf-8", errors="replace")
    names = set(re.findall(r"^\s*(?:from|import)\s+(\w+)", text, re.MULTILINE))
    patterns = [pattern for name in names for pattern in (f"{name}.py", f"{name}/**/*.py")]
    paths = [path for pattern in patterns for path in script.parent.glob(pattern)]
    return "\n".join([text, *(path.read_text(encoding="utf-8", errors="replace") for path in paths)])


def _manifest(args: argparse.Namespace) -> str:
    """Returns the Kubernetes manifest that runs this launch, as YAML."""
    if not args.manifest:
        raise ConfigurationError("--image requires --manifest. Pass --manifest as well, or leave it out.")
    if args.explain or args.dry_run:
        raise ConfigurationError("--manifest, --explain and --dry_run exclude each other. Keep one of them.")
    settings = choose_cpu_or_devices(read_settings(args))
    return as_manifest(args.manifest, args.image, settings, Target.of(args), environ.current())


def _run(launcher: Launcher, plan: LaunchPlan, is_shown: bool) -> int:
    """Runs a plan, with views of it if it is shown, and prints the reason of a failure as the last output."""
    end_with_parent(environ.take_parent())  # the launcher of all replica groups
    folder, lock = open_folder()
    with lock:
        recorded = record_failures(plan, folder)
        view: AbstractContextManager[LaunchPlan] = nullcontext(recorded)
        try:
            if is_shown:  # other runs do not import it
                view = launch.printed_views(recorded, folder, plan.target.name)
            with view as shown_plan:
                code = launcher.run(shown_plan)
        except BaseException:
            shutil.rmtree(folder)
            raise
        if code and "SLURM_STEP_ID" in environ.current():
            # srun terminates all tasks as soon as one has failed. This task prints its failure first.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if code in ENDED_BY_USER and (newest := NewestCheckpoint.read(folder)) is not None:
            step = f" of step {newest.step}" if newest.step >= 0 else ""
            print(
                f"accelerate launch: ended by the user. The newest checkpoint{step} is {newest.path}: a "
                "run that calls load_state with it continues from there.",
                file=sys.stderr,
            )
        is_recorded = code and recorded is not plan
        if is_recorded and _explain_failure(folder, code, plan.rendezvous.log_dir):
            keep(folder)
        else:
            shutil.rmtree(folder)
    return code


def _explain_failure(folder: Path, code: int, log_dir: str | None) -> bool:
    """Prints the failure of a run that its ranks recorded, and returns whether the folder is still needed."""
    from accelerate.diagnostics import digest  # imported only by runs that fail

    outcome = collect(folder, code)
    is_intended = code in ENDED_BY_USER and not outcome.seen.codes
    first = find_first(outcome)
    # The launcher of all replica groups prints a line when one of them ends.
    is_group = environ.REPLICA in environ.current()
    has_error = first is not None and first.failure is not None and first.kind != Kind.AFTER
    if is_intended or (is_group and not has_error) or not digest.is_informative(outcome):
        return False
    report = Path(log_dir) if log_dir else folder
    digest.write_report(outcome, report)
    text = digest.format_screen(outcome, report, log_dir)
    print(text, file=sys.stderr, flush=True)
    try:
        record_digest(folder, text)
    except OSError as error:
        print(f"accelerate launch: the failure cannot be added to the records: {error}.", file=sys.stderr)
    return log_dir is None


def _validate_launch_command(args: argparse.Namespace) -> tuple[argparse.Namespace, Any, bool]:
    """Fills a namespace with the values that a launch would use.

    Returns:
        The namespace, the loaded configuration or ``None``, and whether the file sets the mixed precision.
    """
    from accelerate.settings import load_config_from_file  # not needed by a launch

    _, settings = make_plan(args)
    for row, value, _ in settings:
        setattr(args, row.name, value)
    path = find_config_file(getattr(args, "config_file", None))
    loaded = None if path is None else load_config_from_file(str(path))
    return args, loaded, path is not None and settings.source("mixed_precision").endswith(str(path))


def launch_command_parser(subparsers: Subparsers | None = None) -> CustomArgumentParser:
    """Returns the parser of ``accelerate launch``, added to `subparsers` if given."""
    parser = make_parser(
        "launch",
        DESCRIPTION,
        launch_command,
        subparsers,
        parser_class=LaunchParser,
        allow_abbrev=False,
        formatter_class=CustomHelpFormatter,
    )
    add_script_options(parser)
    add = parser.add_argument
    add(
        "--explain",
        action="store_true",
        help="Print every value with its source, the environment and the command, and start nothing.",
    )
    add("--dry_run", action="store_true", help="Print the plan as JSON, and start nothing.")
    add(
        "--manifest",
        choices=tuple(MANIFESTS),
        metavar="KIND",
        help="Print the manifest of Kubernetes that runs this command in pods, one per node, and start "
        "nothing: pytorchjob (Kubeflow), jobset, or job (an indexed Job and a Service).",
    )
    add("--image", help="Container image of the pods, with --manifest.")
    add_target(parser)
    return parser


def add_script_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say what the target is, and which file has the settings."""
    add = parser.add_argument
    add("--config_file", help="Configuration file, instead of the default one.")
    add("--quiet", "-q", action="store_true", default=None, help="Do not print assumptions.")
    add("-m", "--module", action="store_true", default=None, help="The script is a module, as in python -m.")
    add("--no_python", action="store_true", default=None, help="The script is a program, not a Python file.")


def add_target(parser: CustomArgumentParser) -> None:
    """Adds the flags of all settings, and the script with its arguments."""
    flags.add_sections(parser)
    parser.add_argument("training_script", help="What to run; its own arguments follow it.")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="Arguments of the script.")


main = entry_point(launch_command_parser, __name__)
