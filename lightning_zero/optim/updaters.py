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

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero import _compat
from lightning_zero.comm import Collectives
from lightning_zero.comm.agreed import failing_together
from lightning_zero.memory.streams import StateStream
from lightning_zero.optim.apart import ApartSteps, steps_apart
from lightning_zero.optim.bucket_steps import grouped, step_in_place
from lightning_zero.optim.masters import HostMaster, MasterShard, refresh_together
from lightning_zero.optim.pieces import PieceTable
from lightning_zero.optim.streamed import StreamedMaster

Used = frozenset[nn.Parameter]
"""Parameters that some rank has a gradient for."""

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
        is_agreed = self._control is not None
        step = _BucketwiseStep(optimizer, self._table, masters, used, self._stream, is_agreed)
        # The last of the user's own hooks comes before it, and sees what is about to be stepped.
        handle = optimizer.register_step_pre_hook(step.run)
        hidden = frozenset() if _compat.has_step_hooks(optimizer, besides=1) else step.hidden()
        try:
            with self._table.swapped(optimizer, used - hidden):
                yield
        finally:
            handle.remove()
        step.finish()
        if self._control is not None:
            with failing_together(self._control, "step with states in files", TOLD):
                step.raise_kept()

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


class _BucketwiseStep:
    """One step of an optimizer, of which each bucket is stepped by itself."""

    def __init__(
        self,
        optimizer: Optimizer,
        table: PieceTable,
        masters: Sequence[MasterShard],
        used: Used,
        stream: StateStream | None,
        is_agreed: bool,
    ) -> None:
        self._masters = masters
        self._stream = stream
        self._is_agreed = is_agreed
        self._error: Exception | None = None
        self._stepped: dict[MasterShard, int] = {}
        """Masters that were stored, and which version of them."""
        self._groups = grouped(optimizer, table, used)

    def hidden(self) -> Used:
        """Parameters whose gradients need not be made for the optimizer to see."""
        return frozenset(
            piece.parameter
            for master, groups in self._groups.items()
            if isinstance(master, HostMaster) and not master.has_made_grad
            for group in groups
            for piece in group.pieces
        )

    @torch.no_grad()
    def run(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        """Hook before the optimizer's own step, which has nothing left to do after it."""
        found_inf = getattr(optimizer, "found_inf", None)  # of a loss scaler: the step is left out
        if found_inf is None or not bool(found_inf):
            self._guarded(partial(self._step, optimizer))
        for groups in self._groups.values():
            for group in groups:
                for piece in group.pieces:
                    piece.tensor.grad = None
        self._groups.clear()

    def _guarded(self, run: Callable[[], None]) -> None:
        """Keep an error of one rank's disk until all of them know of it."""
        try:
            run()
        except Exception as error:
            if not self._is_agreed:
                raise
            self._error = error

    def _step(self, optimizer: Optimizer) -> None:
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

    def raise_kept(self) -> None:
        """Raise what was kept: files of this rank could not be read or written."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Store what was not stepped here, and what a hook after the step has written to."""
        if self._error is None:
            self._guarded(self._store_rest)

    def _store_rest(self) -> None:
        for master in self._masters:
            is_file = isinstance(master, StreamedMaster)
            version = self._stepped.get(master, master.tensor._version if is_file else None)
            if version != master.tensor._version:
                master.settle()
                master.store()
