"""Process groups of the engine.

Every room gets a group of its own, so that its transfers never interleave with Lightning's own
calls, with torchmetrics or with user code on the default group, nor with those of another room.

[Note: groups at rest]
A group of gloo keeps threads, one of which wakes a hundred times a second, and NCCL keeps memory.
So a process that trains again and again, with a strategy for each run, uses its groups again: who
has done with them lets them rest, on all ranks at the same point of the program, and who needs some
takes the ones that came to rest last.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from lightning_zero.comm.api import Collectives
from lightning_zero.comm.collectives import choose_collectives
from lightning_zero.comm.messages import make_reads
from lightning_zero.comm.reads import CollectiveReads, OwnReads, ShardReads

DEFAULT_TIMEOUT = timedelta(minutes=30)
MAX_FREEING_S = 1.0
ProcessGroup = dist.ProcessGroup


class ShardGroups:
    """Collectives over all ranks that share the model states, one set per room.

    Args:
        gradients: Reductions of gradients, and small agreements about them.
        parameters: Gathers and publishes of parameters.
        control: Start-up, buffers and checkpoints.
        timeout: Longest wait for the other ranks in any transfer.
    """

    def __init__(
        self,
        gradients: Collectives,
        parameters: Collectives,
        control: Collectives,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        self.gradients = gradients
        self.parameters = parameters
        self.control = control
        self._timeout = timeout
        self._reads: ShardReads | None = None
        self._background: ProcessGroup | None = None
        self._key: _Key | None = None
        self._sent_before = 0

    @classmethod
    def create(cls, timeout: timedelta | None = None) -> ShardGroups:
        """The groups over all ranks of the default group; to be called on all ranks.

        Args:
            timeout: Longest wait for the other ranks in any transfer; None for the default group's,
                and half an hour where threads wait.
        """
        waits = timeout or DEFAULT_TIMEOUT
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            one = choose_collectives(None)
            return cls(one, one, one, waits)
        key = _Key(dist.group.WORLD, timeout)
        groups = _taken_from_rest(key)
        if groups is None:
            first, second, third = (dist.new_group(timeout=timeout) for _ in range(3))
            groups = cls(
                choose_collectives(first),
                choose_collectives(second),
                choose_collectives(third),
                waits,
            )
        groups._key = key
        groups._sent_before += groups.sent_nbytes
        return groups

    def rest(self) -> None:
        """Let others use these groups; see [Note: groups at rest].

        For all ranks to call at the same point, when the engine that used them is closed and
        nothing is under way. This object is not to be used any more.
        """
        key, self._key = self._key, None
        if key is not None:
            _resting.append((key, self._twin()))

    def end(self) -> None:
        """End these groups, which may be in the middle of something.

        For all ranks to call at the same point, when nobody uses the groups any more.
        """
        key, self._key = self._key, None
        if key is None or key.world is not dist.group.WORLD:
            return  # one rank has none, and those of a default group that is gone went with it
        if self._reads is not None:
            self._reads.end()
        for collectives in {self.gradients, self.parameters, self.control}:
            collectives.end()
        if self._background is not None:
            dist.destroy_process_group(self._background)
        # Who frees a group waits for what is under way in it, and that may be until its timeout.
        held = [self.gradients, self.parameters, self.control, self._reads, self._background]
        alone = choose_collectives(None)
        self.gradients = self.parameters = self.control = alone
        self._reads = self._background = None
        freeing = threading.Thread(target=held.clear, name="end of groups", daemon=True)
        freeing.start()
        freeing.join(MAX_FREEING_S)

    def _twin(self) -> ShardGroups:
        twin = ShardGroups(self.gradients, self.parameters, self.control, self._timeout)
        twin._reads, twin._background = self._reads, self._background
        return twin

    def reads(self, gather_by: str = "auto") -> ShardReads:
        """How sharded parameters come together; to be called on all ranks.

        Args:
            gather_by: ``"one_sided"``, ``"collective"``, or ``"auto"`` for one-sided reads where
                transfers go through host memory anyway.
        """
        if self.world_size == 1:
            return OwnReads()
        if gather_by == "collective" or (gather_by == "auto" and not self.parameters.is_host_side):
            return CollectiveReads(self.parameters, self.control)
        if self._reads is None:
            self._reads = make_reads(self._timeout)
        return self._reads

    def background(self) -> ProcessGroup | None:
        """A host-side group for a thread; None for one rank. To be called on all ranks."""
        if self.world_size == 1:
            return None
        if self._background is None:
            self._background = dist.new_group(backend="gloo", timeout=self._timeout)
        return self._background

    @property
    def rank(self) -> int:
        """This rank."""
        return self.gradients.rank

    @property
    def world_size(self) -> int:
        """Ranks that share the model states (W)."""
        return self.gradients.world_size

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank has sent for gradients and parameters."""
        read = 0 if self._reads is None else self._reads.sent_nbytes
        total = self.gradients.sent_nbytes + self.parameters.sent_nbytes + read
        return total - self._sent_before


class _Key(NamedTuple):
    """Groups of which kind."""

    world: ProcessGroup | None
    """The default group that they were made in."""
    timeout: timedelta | None
    """As given to :meth:`ShardGroups.create`."""


_resting: list[tuple[_Key, ShardGroups]] = []


def _taken_from_rest(key: _Key) -> ShardGroups | None:
    """Groups that came to rest last; those of a default group that is gone are forgotten."""
    _resting[:] = [(known, groups) for known, groups in _resting if known.world is key.world]
    for place in reversed(range(len(_resting))):
        if _resting[place][0] == key:
            return _resting.pop(place)[1]
    return None
