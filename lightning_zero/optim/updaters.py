"""Where a step happens: on the device, in the user's optimizer, or on the host.

[Note: steps on the host]
What is offloaded is stepped within the user's ``optimizer.step()``, after all hooks that the user
has set before it, and before those after it: bucket by bucket, while the bucket before travels to
the device. Then the gradients of these pieces are gone, and the optimizer itself passes over them,
as it does over any parameter without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch.optim import Optimizer

from lightning_zero.comm import Collectives
from lightning_zero.comm.agreed import KeptError, failing_together
from lightning_zero.memory.streams import StateStream
from lightning_zero.optim.apart import ApartSteps, steps_apart
from lightning_zero.optim.bucket_steps import step_in_place
from lightning_zero.optim.hooked_steps import HookedStep, Used
from lightning_zero.optim.masters import MasterShard, refresh_together
from lightning_zero.optim.pieces import PieceTable
from lightning_zero.optim.streamed import StreamedMaster

TOLD = "other ranks could not {}: "
"""How an error of files begins on the ranks whose files are fine."""


class Updater:
    """Has the user's optimizers step the master shards of this rank, all at once, where they are.

    Args:
        table: This rank's pieces.
    """

    def __init__(self, table: PieceTable) -> None:
        self._table = table

    def begin_epoch(self) -> None:
        """An epoch of training begins."""

    @property
    def is_late(self) -> bool:
        """Whether new values may be under way between steps; the same on all ranks."""
        return False

    def settle(self) -> None:
        """Training ends: bring what is late into the parameters' shards; for all ranks."""

    def accumulating(self) -> AbstractContextManager[None]:
        """While inside, backwards are not the last before a step."""
        return nullcontext()

    def bring_together(self, optimizer: Optimizer) -> None:
        """Have states be what they were stepped to, see :meth:`.MasterShard.bring_together`.

        For all ranks to call.

        Args:
            optimizer: The user's optimizer, whose states somebody is about to look at or to change.
        """
        for master in self._table.masters_of(optimizer):
            master.bring_together()

    def take_state(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """An optimizer goes on from a checkpoint.

        Args:
            optimizer: The user's optimizer.
            state_dict: Its full state dict, the same on all ranks.
        """

    @contextmanager
    def stepping(self, optimizer: Optimizer, used: Used) -> Iterator[None]:
        """While inside, the optimizer steps this rank's pieces; shards have new values after it.

        Args:
            optimizer: The user's optimizer, to be stepped inside.
            used: Parameters that some rank has a gradient for.
        """
        masters = self._table.masters_of(optimizer)
        refresh_together(masters)
        with self._stepping(optimizer, masters, used):
            yield
        for master in masters:
            master.end_step()

    @contextmanager
    def _stepping(
        self, optimizer: Optimizer, masters: Sequence[MasterShard], used: Used
    ) -> Iterator[None]:
        """As :meth:`stepping`; masters that were stepped are on their way back after it."""
        with self._table.swapped(optimizer, used):
            yield
        self._store(masters)

    def _store(self, masters: Sequence[MasterShard]) -> None:
        for master in masters:
            master.store()


class HostUpdater(Updater):
    """Steps bucket by bucket what is on the host, see [Note: steps on the host].

    Args:
        table: This rank's pieces.
        stream: States in a file.
        control: Group over which ranks tell each other whether their files could be read and
            written; None where there are none.
    """

    def __init__(
        self,
        table: PieceTable,
        stream: StateStream | None = None,
        control: Collectives | None = None,
    ) -> None:
        super().__init__(table)
        self._stream = stream
        self._control = control
        self._apart: dict[type[Optimizer], bool] = {}

    @contextmanager
    def _stepping(
        self, optimizer: Optimizer, masters: Sequence[MasterShard], used: Used
    ) -> Iterator[None]:
        if not self.steps_apart(optimizer):
            with super()._stepping(optimizer, masters, used):
                yield
            return
        kept = None if self._control is None else KeptError()
        step = _BucketwiseStep(optimizer, self._table, masters, used, self._stream, kept)
        with step.within():
            yield
        step.finish()
        if self._control is not None and kept is not None:
            with failing_together(self._control, "step with states in files", TOLD):
                kept.raise_kept()

    def _store(self, masters: Sequence[MasterShard]) -> None:
        if self._control is None:
            super()._store(masters)
        else:  # of one rank's disk: all of them are to stop
            with failing_together(self._control, "write parameters", TOLD):
                super()._store(masters)

    def steps_apart(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer may be stepped bucket by bucket."""
        kind = type(optimizer)
        if kind not in self._apart:
            self._apart[kind] = steps_apart(optimizer)
        return self._apart[kind]


class _BucketwiseStep(HookedStep):
    """One step of an optimizer, of which each bucket is stepped by itself."""

    def __init__(
        self,
        optimizer: Optimizer,
        table: PieceTable,
        masters: Sequence[MasterShard],
        used: Used,
        stream: StateStream | None,
        kept: KeptError | None,
    ) -> None:
        super().__init__(optimizer, table, used)
        self._masters = masters
        self._stream = stream
        self._kept = kept
        """Errors of this rank's disk."""
        self._stepped: dict[MasterShard, int] = {}
        """Masters that were stored, and which version of them."""

    def _guarded(self, run: Callable[[], None]) -> None:
        if self._kept is None:
            run()
        else:
            self._kept.run(run)

    def _step(self, optimizer: Optimizer) -> None:
        self._guarded(partial(self._step_buckets, optimizer))

    def _step_buckets(self, optimizer: Optimizer) -> None:
        apart = ApartSteps(optimizer)
        # What is on an accelerator runs there while the host steps the rest.
        for master in sorted(self._groups, key=lambda master: master.is_on_host):
            if not isinstance(master, StreamedMaster):
                step_in_place(optimizer, apart, master, self._groups[master])
                self._stepped[master] = master.tensor._version
        streamed = {m.index: m for m in self._groups if isinstance(m, StreamedMaster)}
        if self._stream is None or not streamed:
            return
        if any(master.is_dirty for master in streamed.values()):
            self._stream.flush()
        for index, region in self._stream.window.sweep(list(streamed)):
            master = streamed[index]
            master.step(optimizer, apart, self._groups[master], region)
            self._stepped[master] = master.tensor._version

    def finish(self) -> None:
        """Store what was not stepped here, and what a hook after the step has written to."""
        self._guarded(self._store_rest)

    def _store_rest(self) -> None:
        for master in self._masters:
            is_file = isinstance(master, StreamedMaster)
            version = self._stepped.get(master, master.tensor._version if is_file else None)
            if version != master.tensor._version:
                master.settle()
                master.store()
