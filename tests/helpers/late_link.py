"""A link whose copies happen as late as they may, to find what does not wait for them.

An accelerator copies on streams of its own. This link stands for the slowest one: each copy is put
off until somebody waits for it, or for a later one of the same direction. What reads a target or
writes to a source before that gets wrong numbers, each time.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from lightning_zero.memory.link import HostLink, Transfer


class LateLink(HostLink):
    """Host memory of a CPU, with copies that are put off."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._late: dict[bool, deque[_Late]] = {True: deque(), False: deque()}
        self.read: list[_Late] = []
        """Copies to the device of which the host cannot know that they are done."""
        self.late_count = 0
        """Copies that had not happened when the next one was asked for."""

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def _copy(self, source: Tensor, target: Tensor, is_up: bool) -> Transfer:
        self.late_count += bool(self._late[is_up])
        late = _Late(source, target, self._late[is_up], self.read)
        if is_up:
            self.read.append(late)
        self._late[is_up].append(late)
        return late


class _Late(Transfer):
    def __init__(
        self, source: Tensor, target: Tensor, row: deque[_Late], read: list[_Late]
    ) -> None:
        self.source, self._target, self._row, self._read = source, target, row, read
        self._is_done = False

    def wait(self) -> None:
        while not self._is_done:
            self._row.popleft().run()

    def wait_on_host(self) -> None:
        self.wait()
        if self in self._read:  # earlier ones of this direction are done, too
            del self._read[: self._read.index(self) + 1]

    def is_done(self) -> bool:
        return self._is_done

    def run(self) -> None:
        with torch.no_grad():
            self._target.copy_(self.source)
        self._is_done = True
