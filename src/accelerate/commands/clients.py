"""The command `accelerate clients`, which lists the installed libraries that depend on `accelerate`.

For each library it prints whether it accepts this package, and known differences of results.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from textwrap import fill

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from accelerate.base import ConfigurationError, replace_files
from accelerate.commands.utils import CustomArgumentParser, Subparsers, entry_point, make_parser

DESCRIPTION = (
    "List the installed libraries that use `accelerate`, whether they accept this package, and where results "
    "differ from those with the original."
)
PACKAGE = "accelerate"
HEADER = "Home-page: https://huggingface.co/docs/accelerate"
"""Line that `--allow` writes, with the page that documents the interface of this package."""
HEADER_WORD = "huggingface"
NEWEST_FOR_LLAMAFACTORY = Version("1.15.0")  # the newest version that llamafactory accepts
HEADER_LIBRARIES = ("sentence-transformers", "setfit")  # libraries whose training requires `HEADER_WORD`
HEADER_NOTICE = (
    "sentence-transformers, and setfit through it, trains only with a package whose metadata has the header "
    f'"Home-page" with the word "{HEADER_WORD}" in it. This package is an independent implementation of the '
    "interface and does not claim that page as its own. The header is your own statement to that one check: "
    "that you want to train with this package all the same. It changes one line of the installed metadata, "
    "which `pip show` displays; no code changes, and installing the package again removes it."
)
COMMON_DIFFERENCE = "batches of loaders without workers are drawn as in plain PyTorch, not one ahead"
WIDTH = 80
DIFFERENCES = {
    "transformers": "fp16 on a CPU is float16; a resumed Trainer with dispatch_batches sees the rest",
    **dict.fromkeys(("trl", "peft", "diffusers", "sentence-transformers"), "none in the programs compared"),
}
"""Library -> known differences of its results from those with the original."""


@dataclass(frozen=True)
class Client:
    """Library that depends on `accelerate`, with the reasons why it does not accept this package."""

    name: str
    version: str
    refusals: tuple[str, ...]  # empty if it accepts this package


def clients_command(args: argparse.Namespace) -> None:
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise ConfigurationError(
            "No installed metadata of `accelerate` was found, which libraries read. Install the package: "
            "pip install ."
        ) from None
    if args.undo:
        print(_undo(package))
    elif args.allow:
        print(fill(HEADER_NOTICE, WIDTH), end="\n\n")
        print(_allow(package))
    else:
        for line in _report(package):
            print(fill(line, WIDTH, subsequent_indent="  "))


def find_clients(package: metadata.Distribution) -> list[Client]:
    """Returns the installed libraries that require `accelerate`, sorted by name."""
    clients = {}
    for library in metadata.distributions():
        ranges = list(_ranges(library.requires or ()))
        if ranges:
            name = canonicalize_name(library.metadata["Name"])
            clients[name] = Client(name, library.version, tuple(_refusals(name, ranges, package)))
    return [clients[name] for name in sorted(clients)]


def _ranges(requires: Iterable[str]) -> Iterator[SpecifierSet]:
    """Yields the versions of `accelerate` that a distribution requires."""
    for line in requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:  # of old distributions, which pip ignores, too
            continue
        if canonicalize_name(requirement.name) == PACKAGE:
            yield requirement.specifier


def _refusals(name: str, ranges: Iterable[SpecifierSet], package: metadata.Distribution) -> Iterator[str]:
    for specifiers in ranges:
        if not specifiers.contains(package.version, prereleases=True):
            yield f"it requires {PACKAGE}{specifiers}"
    if name in HEADER_LIBRARIES and not _has_header(package):
        yield (
            "its training requires a header that this package does not have (the rest works): "
            f"`accelerate clients --allow {HEADER_LIBRARIES[0]}` explains it"
        )
    if name == "llamafactory" and Version(package.version) > NEWEST_FOR_LLAMAFACTORY:
        yield (
            f"it requires <={NEWEST_FOR_LLAMAFACTORY}, local version included; "
            "DISABLE_VERSION_CHECK=1 skips that check"
        )


def _has_header(package: metadata.Distribution) -> bool:
    return "Home-page" in package.metadata and HEADER_WORD in package.metadata["Home-page"]


def _report(package: metadata.Distribution) -> Iterator[str]:
    yield f"{PACKAGE} {package.version}, an independent implementation"
    clients = find_clients(package)
    if not clients:
        yield "No installed library requires it."
        return
    width = max(len(f"{client.name} {client.version}") for client in clients)
    for client in clients:
        head = f"{client.name} {client.version}"
        yield f"{head:{width}}  {'refuses' if client.refusals else 'accepts'}"
        yield from (f"  {reason}" for reason in client.refusals)
        if client.name in DIFFERENCES:
            yield f"  Differences: {DIFFERENCES[client.name]}"
    yield f"In all of them {COMMON_DIFFERENCE}."
    yield 'The guide "Libraries on top" lists the programs that were compared, and the numbers.'


def _allow(package: metadata.Distribution) -> str:
    if _has_header(package):
        return "The header exists already; nothing was changed."
    path = _file(package, "METADATA")
    head, separator, body = path.read_text(encoding="utf-8").partition("\n\n")
    _rewrite(package, f"{head}\n{HEADER}{separator}{body}")
    return f"Written to {path}:\n  {HEADER}\n`accelerate clients --undo` removes it."


def _undo(package: metadata.Distribution) -> str:
    path = _file(package, "METADATA")
    text = path.read_text(encoding="utf-8")
    if f"\n{HEADER}\n" not in text:
        return f"{path} does not have the header; nothing was changed."
    _rewrite(package, text.replace(f"\n{HEADER}\n", "\n", 1))
    return f"Removed from {path}:\n  {HEADER}"


def _file(package: metadata.Distribution, name: str) -> Path:
    for file in package.files or ():
        if file.name == name and file.parent.suffix == ".dist-info":
            return Path(str(file.locate()))
    raise ConfigurationError(
        f"The installation of {PACKAGE} {package.version} lists no {name}. Install it with pip: pip install ."
    )


def _rewrite(package: metadata.Distribution, text: str) -> None:
    """Replaces the metadata of the package, and its checksum in the list of installed files."""
    path, record = _file(package, "METADATA"), _file(package, "RECORD")
    content = text.encode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    rows = list(csv.reader(record.read_text(encoding="utf-8").splitlines()))
    name = f"{path.parent.name}/{path.name}"
    listed = [[name, f"sha256={digest}", str(len(content))] if row[:1] == [name] else row for row in rows]
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(listed)
    try:
        for target, data in ((path, content), (record, buffer.getvalue().encode())):
            with replace_files([target]) as (temporary,):
                temporary.write_bytes(data)
                shutil.copymode(target, temporary)
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be written: {error.strerror}. Run this as the user who installed the package, or "
            "in an environment of your own."
        ) from None


def clients_command_parser(subparsers: Subparsers | None = None) -> CustomArgumentParser:
    """Returns the parser of ``accelerate clients``, added to `subparsers` if given."""
    parser = make_parser("clients", DESCRIPTION, clients_command, subparsers)
    parser.add_argument(
        "--allow",
        choices=HEADER_LIBRARIES,
        help="Explain the header that this library requires, and write it.",
    )
    parser.add_argument("--undo", action="store_true", help="Remove that header again.")
    return parser


main = entry_point(clients_command_parser, __name__)
