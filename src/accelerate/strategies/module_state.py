"""Attributes, buffers and random generators of modules before a forward that is computed once more."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from accelerate import rng, torch_private

MAX_COPIED = 2**16
"""Number of elements of the largest tensor whose values are copied."""
_CONTAINERS = (dict, list, set, deque, Counter, OrderedDict, defaultdict)
"""Types of containers whose contents are restored."""
_GENERATORS = tuple(rng.GENERATORS)
MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that each module has, such as its parameters and hooks, but for its mode."""


class SavedBuffer(NamedTuple):
    """Buffer of a module, and a copy of its values unless it is large."""

    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    values: Tensor | None

    @property
    def has_new_version(self) -> bool:
        """True if the module has another tensor now, or torch has noted a change of this one."""
        return self.current is not self.buffer or self.buffer._version != self.version

    @property
    def current(self) -> Tensor | None:
        """Buffer that the module has now."""
        return self.module._buffers.get(self.name)


class ModuleState:
    """Attributes that users add to modules, with the contents of lists and dicts, generators and buffers.

    Args:
        module: A module, of which all submodules are included.
        generators: Random generators besides those among the attributes.
        objects: Objects whose attributes are included.
    """

    def __init__(
        self,
        module: nn.Module,
        generators: Iterable[torch.Generator] = (),
        objects: Sequence[object] = (),
    ) -> None:
        self.objects = objects
        self._attributes = [(part, attributes_of(part)) for part in module.modules()]
        values = self.values
        for attributes in map(vars, objects):
            values += [attributes, *attributes.values()]
        self._contents: list[tuple[Any, Any]] = [
            (value, value.copy()) for value in values if type(value) in _CONTAINERS
        ]
        self._generators: list[tuple[Any, Any]] = []
        for value in (*values, *generators):
            if isinstance(value, _GENERATORS) and not isinstance(value, random.SystemRandom):  # has no state
                self.add_generator(value)
        self._tensors = [
            (part, name, value, value._version, _copy_of(value))
            for part, attributes in self._attributes
            for name, value in attributes.items()
            if type(value) is Tensor and not (value.requires_grad or value.is_inference())
        ]
        self._arrays = [
            (part, name, value.copy())
            for part, attributes in self._attributes
            for name, value in attributes.items()
            if type(value) is np.ndarray and value.size <= MAX_COPIED
        ]
        self._buffers = [
            SavedBuffer(part, name, buffer, buffer._version, _copy_of(buffer))
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]

    def add_generator(self, generator: object) -> bool:
        """Adds the state of a random generator, and returns whether it was not known."""
        is_new = not any(generator is known for known, _ in self._generators)
        if is_new:
            self._generators.append((generator, rng.state_of(generator)))
        return is_new

    def changed_buffers(self) -> list[SavedBuffer]:
        """Returns the buffers that have changed.

        Batch normalization changes its statistics without a new version, but counts its batches with one.
        """
        modules = {id(saved.module) for saved in self._buffers if saved.has_new_version}
        return [
            saved
            for saved in self._buffers
            if saved.has_new_version
            or (saved.values is not None and id(saved.module) in modules)
            or (saved.values is not None and not torch.equal(saved.values, saved.buffer))
        ]

    def new_flags(self) -> list[tuple[nn.Module, str]]:
        """Returns the modules and names of attributes that are True and did not exist."""
        return [
            (module, name)
            for module, attributes in self._attributes
            for name, value in attributes_of(module).items()
            if value is True and name not in attributes
        ]

    def new_tensors(self) -> list[tuple[nn.Module, str, Tensor]]:
        """Returns the modules, names and values of attributes that are other tensors now."""
        return [
            (module, name, value)
            for module, attributes in self._attributes
            for name, value in attributes_of(module).items()
            if isinstance(value, Tensor) and attributes.get(name) is not value
        ]

    @property
    def values(self) -> list[Any]:
        """Values of all attributes."""
        return [value for _, attributes in self._attributes for value in attributes.values()]

    @property
    def lost_buffer(self) -> str | None:
        """Name of a buffer or tensor that has changed in place and was not copied, or None."""
        tensors = [(saved.name, saved.buffer, saved.version, saved.values) for saved in self._buffers]
        tensors += [saved[1:] for saved in self._tensors]
        lost = (
            name for name, tensor, version, values in tensors if values is None and tensor._version != version
        )
        return next(lost, None)

    def restore_objects(self) -> None:
        """Gives the modules these attributes and tensors, without their values."""
        self._restore_attributes()
        for saved in self._buffers:
            saved.module._buffers[saved.name] = saved.buffer

    def restore_copies(self) -> None:
        """Gives the modules these attributes, and copies of the tensors with the values that they had.

        Autograd may have saved the tensors themselves.
        """
        self._restore_attributes()
        for module, name, *_, copied in self._tensors:
            if copied is not None:
                vars(module)[name] = copied.clone()
        for module, name, array in self._arrays:
            vars(module)[name] = array.copy()
        for saved in self._buffers:
            values = saved.buffer if saved.values is None else saved.values.clone()
            saved.module._buffers[saved.name] = values

    @torch.no_grad()
    def restore_values(self) -> None:
        """Gives the modules these attributes, tensors and their values."""
        changed = self.changed_buffers()
        self.restore_objects()
        for saved in changed:
            if saved.values is not None:
                saved.buffer.copy_(saved.values)

    def _restore_attributes(self) -> None:
        for module, attributes in self._attributes:
            for name in attributes_of(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
        for value, content in self._contents:
            value.clear()
            value.extend(content) if isinstance(value, (list, deque)) else value.update(content)
        for generator, state in self._generators:
            rng.set_state(generator, state)


def has_replaced_parameters(module: nn.Module) -> bool:
    """Returns whether a module has other tensors than parameters now, as in `torch.func.functional_call`."""
    values: Any = module._parameters.values()
    tensors = [each for each in values if not (each is None or isinstance(each, nn.Parameter))]
    return not all(map(torch_private.is_view_of_flat_parameter, tensors))


def _copy_of(buffer: Tensor) -> Tensor | None:
    return buffer.clone() if buffer.numel() <= MAX_COPIED else None


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Returns the attributes that the class or the user of a module has added, and its mode."""
    return {name: value for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES}
