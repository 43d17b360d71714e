"""Tensors of a checkpoint that are not in memory, and the parts that ranks write of them.

A sharded checkpoint has the layout of an ordinary one. Where that has a tensor, it has a
:class:`StoredTensor`: the description of a full tensor that the ranks hold, or that files hold, in
parts. Every part is a run of elements in the tensor's dense memory order, so any split fits any
other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero.params import parameter_dict

Reader = Callable[["StoredTensor", Tensor, int], None]
"""Fills a 1-D tensor with the elements of a stored one, from an index on."""

_TAG = "lightning_zero.stored_tensor"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A full tensor that is not in this process's memory."""

    key: str
    """Its name among all tensors of the checkpoint."""

    shape: torch.Size
    """Shape of the full tensor."""

    stride: tuple[int, ...]
    """Strides of the dense full tensor: its memory order."""

    dtype: torch.dtype
    """Its dtype."""

    reader: Reader | None = field(default=None, compare=False, repr=False)
    """Where its elements are; None while it is being saved."""

    @property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return self.shape.numel()

    def read(self, begin: int, end: int) -> Tensor:
        """Elements ``[begin, end)`` in dense memory order, 1-D.

        Raises:
            RuntimeError: The tensor is being saved, not loaded.
        """
        if self.reader is None:
            raise RuntimeError(
                f"{self.key!r} is not in memory as a whole: with checkpoint='sharded' each rank"
                " writes its own part. Use checkpoint='consolidated' to see or change full tensors"
                " in on_save_checkpoint."
            )
        values = torch.empty(end - begin, dtype=self.dtype)
        self.reader(self, values, begin)
        return values

    def full(self) -> Tensor:
        """The full tensor, read from the files."""
        return self.read(0, self.numel).as_strided(self.shape, self.stride)

    def __getattr__(self, name: str) -> Any:
        """Explain to hooks of users why there is no tensor.

        Raises:
            AttributeError: Always.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        todo = (
            "use checkpoint='consolidated' to see or change full tensors in on_save_checkpoint"
            if self.reader is None
            else "its full() reads the tensor from the files"
        )
        raise AttributeError(
            f"{self.key!r} of a sharded checkpoint is not in memory, so it has no {name!r}: {todo}"
        )


class Part(NamedTuple):
    """A run of elements of a stored tensor that this rank holds."""

    tensor: StoredTensor
    offset: int
    """First element, in dense memory order."""
    values: Tensor
    """1-D."""

    def copied(self) -> Part:
        """A copy in host memory, which training does not change."""
        return Part(self.tensor, self.offset, self.values.detach().to("cpu", copy=True))


def stored_in(checkpoint: Any) -> Iterator[StoredTensor]:
    """All stored tensors among dicts, lists and tuples."""
    if isinstance(checkpoint, StoredTensor):
        yield checkpoint
    elif isinstance(checkpoint, dict):
        for value in checkpoint.values():
            yield from stored_in(value)
    elif isinstance(checkpoint, (list, tuple)):
        for value in checkpoint:
            yield from stored_in(value)


def described(checkpoint: Any) -> Any:
    """The same with plain dicts in place of stored tensors, which every loader accepts."""
    return _mapped(
        checkpoint,
        lambda value: isinstance(value, StoredTensor),
        lambda value: {_TAG: (value.key, tuple(value.shape), value.stride, value.dtype)},
    )


def from_description(checkpoint: Any, reader: Reader) -> Any:
    """Undo :func:`described`."""

    def stored(value: dict[str, Any]) -> StoredTensor:
        key, shape, stride, dtype = value[_TAG]
        return StoredTensor(key, torch.Size(shape), tuple(stride), dtype, reader)

    return _mapped(checkpoint, lambda value: isinstance(value, dict) and _TAG in value, stored)


def loaded(checkpoint: Any) -> Any:
    """The same with every stored tensor in memory, once: names of tied weights share it."""
    full: dict[str, Tensor] = {}

    def in_memory(stored: StoredTensor) -> Tensor:
        if stored.key not in full:
            full[stored.key] = stored.full()
        return full[stored.key]

    return _mapped(checkpoint, lambda value: isinstance(value, StoredTensor), in_memory)


@contextmanager
def read_when_loaded(module: nn.Module) -> Iterator[None]:
    """Inside, ``load_state_dict`` takes stored tensors too, and reads those of a module at a time.

    Args:
        module: The module that is loaded into.
    """

    def bring_in(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in (*parameter_dict.plain(module), *module._buffers):
            value = state.get(prefix + name)
            if isinstance(value, StoredTensor):
                state[prefix + name] = value.full()

    modules: list[Any] = list(module.modules())  # the method has no types
    handles = [each.register_load_state_dict_pre_hook(bring_in) for each in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _mapped(value: Any, is_wanted: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    """A value with some leaves of its dicts, lists and tuples changed; the rest is shared."""
    if is_wanted(value):
        return change(value)
    if type(value) is dict:
        return {key: _mapped(each, is_wanted, change) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, is_wanted, change) for each in value)
    return value
