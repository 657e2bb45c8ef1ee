"""Names, shapes and dtypes of the tensors of a model, read without its weights.

They are read from safetensors headers, else from a model that a library builds on the meta device.
`accelerate estimate-memory` calls `read_tensors`.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from accelerate.base import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    CheckpointError,
    ConfigurationError,
    expanded,
    require,
    shortened,
    wrong_value,
)

CONFIG_NAME = "config.json"


@dataclass(frozen=True)
class Weight:
    """Name, shape and dtype of one tensor of a model."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # name in safetensors, such as F32, BF16, I64 or F8_E4M3

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        """True for weights that can be cast, which excludes indices, masks and packed weights."""
        return self.dtype in ("F64", "F32", "F16", "BF16")

    @property
    def stored_bytes(self) -> int:
        family = self.dtype.partition("_")[0]
        bits = 8 if family == "BOOL" else int("".join(c for c in family if c.isdigit()))
        return math.ceil(self.numel * bits / 8)


@dataclass(frozen=True)
class ModelTensors:
    """Tensors of a model, and a text for the user with their source."""

    weights: tuple[Weight, ...]
    source: str


def read_tensors(model: str, library: str | None, trust_remote_code: bool) -> ModelTensors:
    """Returns the tensors of a model, without loading or downloading weights.

    Args:
        model: Folder, ``.safetensors`` file, configuration file, or name of a model on the Hub.
        library: Library that builds the empty model if there are no headers, "transformers" or "timm".
        trust_remote_code: Whether code that comes with the model may run.
    """
    path = expanded(model)
    if os.path.isdir(path):
        return _of_folder(path, library, trust_remote_code)
    if os.path.isfile(path):
        if path.suffix == ".safetensors":
            return ModelTensors(tuple(_read_header(path)), f"safetensors header of {path}")
        if path.suffix == ".json":
            return _of_empty_model(str(path), "transformers", trust_remote_code)
        reason = "this is neither a .safetensors file nor a configuration file (.json)"
        raise wrong_value("MODEL", str(path), reason, "Name one of these, or the model's folder")
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise wrong_value("MODEL", model, "there is no such file or folder", "Check the path")
    return _of_hub(model, library, trust_remote_code)


def _of_folder(path: Path, library: str | None, trust_remote_code: bool) -> ModelTensors:
    if files := _safetensors_of(path):
        weights = tuple(weight for file in files for weight in _read_header(file))
        return ModelTensors(weights, f"safetensors headers of {path}")
    if (path / CONFIG_NAME).is_file():
        return _of_empty_model(str(path), library or "transformers", trust_remote_code)
    reason = f"this folder has neither safetensors files nor {CONFIG_NAME}"
    raise wrong_value("MODEL", str(path), reason, "Name the folder of a model")


def _safetensors_of(path: Path) -> list[Path]:
    from accelerate.weights import read_weight_map  # imports torch

    index = path / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        single = path / SAFE_WEIGHTS_NAME
        return [single] if single.is_file() else sorted(path.glob("*.safetensors"))
    try:
        names = sorted(set(read_weight_map(index).values()))
    except CheckpointError as error:
        raise wrong_value("MODEL", str(index), str(error), "Check the file") from error
    if not names:
        raise wrong_value("MODEL", str(index), "its weight_map names no files", "Check the file")
    return [path / name for name in names]


def _read_header(path: Path) -> Iterator[Weight]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_slice(name)
                yield Weight(name, tuple(tensor.get_shape()), tensor.get_dtype())
    except (SafetensorError, OSError) as error:
        reason = f"this file cannot be read: {error}"
        raise wrong_value("MODEL", str(path), reason, "Check the file") from error


def _of_hub(model: str, library: str | None, trust_remote_code: bool) -> ModelTensors:
    """Returns the tensors of a model on the Hub, or of its cached files if the Hub cannot be reached."""
    try:
        info = verify_on_hub(model)
    except Unreachable as error:
        folder = _cached_folder(model)
        if folder is None:
            raise ConfigurationError(str(error)) from error
        return _of_folder(folder, library, trust_remote_code)
    if weights := _query_hub(model, lambda hub: _headers_on_hub(hub, model)):
        return ModelTensors(weights, f"safetensors headers of {model} on the Hub")
    return _of_empty_model(model, library or info.library_name or "", trust_remote_code)


def _headers_on_hub(hub: ModuleType, model: str) -> tuple[Weight, ...]:
    try:
        files = hub.get_safetensors_metadata(model).files_metadata
    except hub.utils.NotASafetensorsRepoError:
        return ()
    return tuple(
        Weight(name, tuple(info.shape), str(info.dtype))
        for file in files.values()
        for name, info in file.tensors.items()
    )


def _cached_folder(model: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    for name in (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, CONFIG_NAME):
        path = try_to_load_from_cache(model, name)
        if isinstance(path, str):
            return Path(path).parent
    return None


class Unreachable(ConfigurationError):
    """Error of a request to the Hub that got no answer."""


def verify_on_hub(repo: str, token: str | None = None) -> Any:
    """Returns the description of a model on the Hub.

    Args:
        repo: Name of the model, as ``owner/name``.
        token: Token for models that are not public. ``None`` uses the stored token.

    Returns:
        The `ModelInfo` of huggingface_hub.

    Raises:
        ConfigurationError: The model does not exist, this user may not read it, or the Hub cannot be reached.
    """
    return _query_hub(repo, lambda hub: hub.model_info(repo, token=token))


HUB_ERRORS = {
    "GatedRepoError": (
        "its owner lets only users in who accepted the terms",
        "Accept them on its page, then run `hf auth login`",
    ),
    "RepositoryNotFoundError": (
        "the Hub has no such model, or it is private",
        "Check the name; for a private one run `hf auth login`",
    ),
    "HFValidationError": ("this is not a valid name of a model", "Write owner/name"),
    "SafetensorsParsingError": ("its safetensors header cannot be read", "Tell the owner of the model"),
}
"""Errors of huggingface_hub -> the reason and the fix, for errors that the user can fix."""


def _query_hub(repo: str, query: Callable[[Any], Any]) -> Any:
    import huggingface_hub
    from huggingface_hub import utils

    errors: Any = utils  # `huggingface_hub.errors` has only some of them before 0.25
    try:
        return query(huggingface_hub)
    except tuple(getattr(errors, name) for name in HUB_ERRORS) as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        reason, fix = next(texts for name, texts in HUB_ERRORS.items() if name in kinds)
        raise wrong_value("MODEL", repo, reason, fix) from error
    except (errors.OfflineModeIsEnabled, errors.HfHubHTTPError, OSError, *_connection_errors()) as error:
        reason = f"the Hub cannot be reached ({' '.join(str(error).partition(chr(10))[0].split())})"
        fix = "Check the connection, or give a local folder"
        if isinstance(error, errors.OfflineModeIsEnabled):
            reason = "HF_HUB_OFFLINE is set, and the model is not cached on this machine"
            fix = "Unset it, or give a local folder"
        raise Unreachable(f"MODEL={repo!r}: {reason}. {fix}.") from error


def _connection_errors() -> tuple[type[Exception], ...]:
    """Returns the error classes of the HTTP client of huggingface_hub, which depends on its version."""
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    modules = {kind.__module__.partition(".")[0] for kind in type(get_session()).__mro__}
    kinds = [getattr(sys.modules[module], "TransportError", None) for module in modules]
    return tuple(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception))


def _of_empty_model(model: str, library: str, trust_remote_code: bool) -> ModelTensors:
    empty = create_empty_model(model, library, trust_remote_code)
    from accelerate.weights import DTYPES

    names = {dtype: name for name, dtype in DTYPES.items()}
    weights = tuple(
        Weight(name, tuple(tensor.shape), names.get(tensor.dtype, f"X{8 * tensor.element_size()}"))
        for name, tensor in (*empty.named_parameters(), *empty.named_buffers())
    )
    return ModelTensors(weights, f"an empty model that {library} built for {model}")


def create_empty_model(
    model_name: str, library_name: str, trust_remote_code: bool = False, access_token: str | None = None
) -> Any:
    """Builds a model on the meta device, which has shapes and no memory.

    Args:
        model_name: Name of the model on the Hub, or a local folder or configuration file.
        library_name: "transformers" or "timm".
        trust_remote_code: Whether code that comes with the model may run.
        access_token: Token for models that are not public.

    Returns:
        A `torch.nn.Module`.

    Raises:
        ConfigurationError: The library is unknown, or it cannot build the model.
        MissingPackageError: The library is not installed.
    """
    if library_name not in BUILDERS:
        reason = f"{model_name} has no safetensors files, and this library cannot build an empty model"
        raise wrong_value("--library_name", library_name, reason, f"Use one of {', '.join(BUILDERS)}")
    require(library_name, f"The size of {model_name}, which has no safetensors files,")
    import torch

    try:
        with torch.device("meta"):
            return BUILDERS[library_name](model_name, trust_remote_code, access_token)
    except Exception as error:
        text = shortened(" ".join(str(error).split())) or type(error).__name__
        reason = f"{library_name} cannot build it: {text}"
        raise wrong_value("MODEL", model_name, reason, "Check the name and --library_name") from error


def _with_transformers(model: str, trust_remote_code: bool, token: str | None) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code, token=token)
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)(config)
    return transformers.AutoModel.from_config(config, trust_remote_code=trust_remote_code)


def _with_timm(model: str, trust_remote_code: bool, token: str | None) -> Any:
    import timm

    return timm.create_model(add_timm_hub_prefix(model), pretrained=False)


BUILDERS = {"transformers": _with_transformers, "timm": _with_timm}


def add_timm_hub_prefix(model_name: str) -> str:
    """Returns timm's form of a name on the Hub, ``hf-hub:owner/name`` for ``owner/name``."""
    on_hub = "/" in model_name and ":" not in model_name
    return f"hf-hub:{model_name}" if on_hub else model_name


def check_has_model(error: BaseException) -> str:
    """Returns the library that raised an error because it does not know a model.

    Args:
        error: The error of an attempt to build a model.

    Returns:
        "timm" or "transformers" if the error means that the library does not know the model, else "unknown".
    """
    for library, marks in UNKNOWN_MODEL.items():
        if any(mark in str(error) for mark in marks):
            return library
    return "unknown"


UNKNOWN_MODEL = {
    "timm": ("Unknown model",),
    "transformers": ("Unrecognized model", "does not appear to have a file named config.json", "model type"),
}
