"""Memory that two processes see, and tensors in it."""

from __future__ import annotations

import os
from bisect import bisect, insort
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shared:
    """A tensor in shared memory, as one process names it to the other."""

    arena: int
    """Number of the piece of memory."""

    offset: int
    """First element, counted from its beginning in elements of the dtype."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Arena:
    """One piece of shared memory, mapped into this process.

    Args:
        descriptor: Of a file without a name; may be closed afterwards.
        nbytes: Its size.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        # Python's mmap would keep a descriptor for each piece, of which a process has few.
        path = f"/proc/self/fd/{descriptor}"
        self.bytes = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        """1-D; the memory stays as long as any view of it."""
        self.begin = self.bytes.data_ptr()
        """Address of the first byte."""
        self.end = self.begin + nbytes
        """Address behind the last byte."""

    def tensor(self, shared: Shared) -> Tensor:
        """A tensor in it."""
        return self.bytes.view(shared.dtype).as_strided(shared.shape, shared.stride, shared.offset)


def new_file(nbytes: int) -> int:
    """A file in memory, without a name; zeros."""
    descriptor = os.memfd_create("lightning_zero")
    os.ftruncate(descriptor, nbytes)
    return descriptor


class SharedMemory:
    """All arenas that this process has mapped, by their numbers."""

    def __init__(self) -> None:
        self._arenas: dict[int, Arena] = {}
        self._begins: list[tuple[int, int]] = []
        """Where arenas begin, and their numbers; ascending, since there are many."""

    def add(self, number: int, arena: Arena) -> None:
        """One more."""
        self._arenas[number] = arena
        insort(self._begins, (arena.begin, number))

    def tensor(self, shared: Shared) -> Tensor:
        """What the other process has named."""
        return self._arenas[shared.arena].tensor(shared)

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in one of them."""
        return self._number(tensor) is not None

    def _number(self, tensor: Tensor) -> int | None:
        address = tensor.data_ptr()
        place = bisect(self._begins, address, key=itemgetter(0)) - 1
        number = self._begins[place][1] if place >= 0 else None
        return number if number is not None and address < self._arenas[number].end else None

    def shared(self, tensor: Tensor) -> Shared:
        """The name of a tensor for the other process.

        Raises:
            ValueError: It does not lie in shared memory.
        """
        number = self._number(tensor)
        if number is not None:
            address = tensor.data_ptr() - self._arenas[number].begin
            offset = address // tensor.element_size()
            return Shared(number, offset, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} does not lie in memory that is shared with"
            " the worker: make it with HostWorker.zeros"
        )

    def clear(self) -> None:
        """Forget them; memory goes with its last tensor."""
        self._arenas.clear()
        self._begins.clear()
