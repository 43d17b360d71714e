"""Steps important columns on the device and the rest on the host, less often."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_zero.comm import Collectives
from lightning_zero.comm.agreed import KeptError, failing_together
from lightning_zero.optim.adam_options import adam_options, check_adam
from lightning_zero.optim.apart import ApartSteps
from lightning_zero.optim.bucket_steps import step_in_place
from lightning_zero.optim.hooked_steps import HookedStep, Used
from lightning_zero.optim.masters import MasterShard
from lightning_zero.optim.pieces import MasterPiece, PieceTable, parameters_of
from lightning_zero.optim.updaters import TOLD, Updater
from lightning_zero.optim.zenflow.master import ZenFlowMaster
from lightning_zero.optim.zenflow.part import ENTRY, Part
from lightning_zero.optim.zenflow.selection import agree_on_columns, columns
from lightning_zero.plan.zenflow import Turn, ZenFlowClock, ZenFlowConfig
from lightning_zero.worker.jobs import AdamOptions

IN_WORKER = "step the rest in a worker"
"""What may fail on one rank."""


def check_zenflow(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers whose steps ZenFlow does not know.

    Raises:
        ValueError: There is one.
    """
    for optimizer in optimizers:
        check_adam(
            optimizer,
            "zenflow",
            "steps columns by Adam, each with its own number of steps, and cannot do that",
        )
        if any(p.dtype == torch.float64 for p in parameters_of(optimizer)):
            raise ValueError(
                "zenflow steps master weights of fp32, and some parameters are fp64, which would"
                " lose precision: train in another precision, or remove zenflow"
            )


class ZenFlowUpdater(Updater):
    """Steps in two worlds, see [Note: two worlds] in ``plan/zenflow.py``.

    Args:
        table: This rank's pieces.
        config: Options.
        collectives: Group of the ranks that share the states.
    """

    def __init__(self, table: PieceTable, config: ZenFlowConfig, collectives: Collectives) -> None:
        super().__init__(table)
        self._config = config
        self._collectives = collectives
        self._clocks: MutableMapping[Optimizer, ZenFlowClock] = weakref.WeakKeyDictionary()

    def begin_epoch(self) -> None:
        """See the base class."""
        for clock in self._clocks.values():
            clock.begin_epoch()

    def take_state(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """See the base class."""
        self._clocks[optimizer] = ZenFlowClock(self._config)
        for state in state_dict["state"].values():
            entry = state.get(ENTRY)
            if entry is not None and entry["at"] == int(state["step"]):
                self._clocks[optimizer].restore(entry["clock"])
                return

    def _clock(self, optimizer: Optimizer) -> ZenFlowClock:
        return self._clocks.setdefault(optimizer, ZenFlowClock(self._config))

    @contextmanager
    def _stepping(
        self, optimizer: Optimizer, masters: Sequence[MasterShard], used: Used
    ) -> Iterator[None]:
        step = _ZenFlowStep(
            optimizer, self._table, used, self._clock(optimizer), self._config, self._collectives
        )
        with step.within():
            yield
        step.finish()
        if step.has_begun:
            with failing_together(self._collectives, IN_WORKER, TOLD):
                step.raise_kept()

    @property
    def is_late(self) -> bool:
        """See the base class."""
        return self._config.overlap_step

    def settle(self) -> None:
        """See the base class."""
        with failing_together(self._collectives, IN_WORKER, TOLD):
            for master in self._table.masters:
                if isinstance(master, ZenFlowMaster):
                    master.show_rest()
                    master.show_important()
                    master.end_step()


class _ZenFlowStep(HookedStep):
    """One step of an optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        table: PieceTable,
        used: Used,
        clock: ZenFlowClock,
        config: ZenFlowConfig,
        collectives: Collectives,
    ) -> None:
        super().__init__(optimizer, table, used)
        self._clock = clock
        self._config = config
        self._collectives = collectives
        self._pieces: dict[ZenFlowMaster, dict[MasterPiece, int]] = {}
        """All pieces in the two worlds, and the numbers of their groups."""
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                piece = table.piece(parameter)
                if piece is not None and isinstance(piece.master, ZenFlowMaster):
                    self._pieces.setdefault(piece.master, {})[piece] = number
        self._agreed = [p for p in parameters_of(optimizer) if p in used]
        """Parameters that have a gradient, the same on all ranks."""
        self._kept = KeptError()
        """Errors of this rank's worker."""
        self.has_begun = False
        """The worker has been given something to do, the same on all ranks."""

    def _show(self) -> None:
        """See the base class."""
        for master in self._pieces:
            master.bring_together()

    def _stepped(self) -> Iterator[tuple[MasterPiece, int]]:
        """Pieces in the two worlds that have a gradient, and the numbers of their groups."""
        for master, groups in self._groups.items():
            if isinstance(master, ZenFlowMaster):
                yield from ((piece, group.number) for group in groups for piece in group.pieces)

    def _step(self, optimizer: Optimizer) -> None:
        apart = ApartSteps(optimizer)
        for other, groups in self._groups.items():
            if not isinstance(other, ZenFlowMaster):  # stepped as a whole on the device
                step_in_place(optimizer, apart, other, groups)
        self._adopt(optimizer)
        turn = self._clock.turn()
        if turn.selects:
            self._select(optimizer)
        for piece, number in self._stepped():
            options = adam_options(optimizer, optimizer.param_groups[number], _factor(piece))
            _part(piece).step_important(options)
        updates = self._rest(optimizer, turn)
        self._clock.take(turn, updates)
        for master in self._pieces:
            master.show_important()
            master.note()
            master.clock_state = self._clock.state()
        if self._has_hooks:
            self._show()

    def _adopt(self, optimizer: Optimizer) -> None:
        for master, pieces in self._pieces.items():
            master.adopt(optimizer, list(pieces))
        for piece, _ in self._stepped():
            if not _part(piece).has_state:
                _part(piece).make_state(optimizer.state[piece.tensor])

    def _select(self, optimizer: Optimizer) -> None:
        """Choose columns anew. What waits was measured by the old ones, and is stepped before."""
        chosen = agree_on_columns(self._agreed, self._table, self._collectives, self._config)
        self._step_waiting(optimizer, self._clock.window)
        self._show_rest()
        for master, pieces in self._pieces.items():
            master.show_important()  # the rest has come with old values of the important ones
            for piece in pieces:
                if piece.parameter in chosen and master.part(piece).has_state:
                    master.part(piece).choose(chosen[piece.parameter])
            master.note()

    def _rest(self, optimizer: Optimizer, turn: Turn) -> bool:
        """Whether the window has ended with this step, and what waits is stepped."""
        rest = [(p, number) for p, number in self._stepped() if _part(p).has_rest]
        window = 0 if turn.selects else self._clock.window
        is_now = turn.is_warm_up or not self._config.overlap_step
        if turn.updates and not window and is_now:
            self._step_now(optimizer, rest)
            self._show_rest()
            return True
        for piece, _ in rest:
            _part(piece).wait(_factor(piece))
        updates = turn.updates or (self._config.update_interval == "auto" and self._is_due())
        if updates and self._config.overlap_step:
            self._show_rest()
            self._step_waiting(optimizer, window + 1)
            self.has_begun = True
        elif updates:
            self._step_waiting(optimizer, window + 1)
            self._show_rest()
        return updates

    def _step_now(self, optimizer: Optimizer, pieces: Sequence[tuple[MasterPiece, int]]) -> None:
        """A window of one step: nothing has to wait."""
        by_master: dict[MasterShard, dict[MasterPiece, AdamOptions]] = {}
        for piece, number in pieces:
            options = adam_options(optimizer, optimizer.param_groups[number], _factor(piece))
            by_master.setdefault(piece.master, {})[piece] = options
        for master in self._pieces:
            self._begin_rest(master, by_master.get(master, {}), has_waited=False)

    def _step_waiting(self, optimizer: Optimizer, window: int) -> None:
        """Step by the mean of what waits."""
        for master, pieces in self._pieces.items():
            options = {
                piece: adam_options(optimizer, optimizer.param_groups[number], 1.0 / window)
                for piece, number in pieces.items()
                if master.part(piece).waited
            }
            self._begin_rest(master, options, has_waited=True)

    def _begin_rest(
        self, master: ZenFlowMaster, options: dict[MasterPiece, AdamOptions], has_waited: bool
    ) -> None:
        begin = partial(master.begin_rest, options, has_waited)
        if self._config.overlap_step:
            self._kept.run(begin)
        else:
            begin()

    def _show_rest(self) -> None:
        """On all ranks or on none."""
        if self._config.overlap_step:
            with failing_together(self._collectives, IN_WORKER, TOLD):
                self.raise_kept()
                for master in self._pieces:
                    master.finish_rest()
        for master in self._pieces:
            master.show_rest()

    def raise_kept(self) -> None:
        """Raise what was kept: the worker of this rank has failed."""
        self._kept.raise_kept()

    def _is_due(self) -> bool:
        """Whether enough weights have gradients waiting that are as large as important ones."""
        weights = [p for p in self._agreed if columns(self._table, p) > 1]
        stepped = {piece for piece, _ in self._stepped()}
        sums = torch.zeros(max(1, 4 * len(weights)), dtype=torch.float64)
        for at, parameter in enumerate(weights):
            piece = self._table.piece(parameter)
            if piece is not None and piece in stepped:
                sums[4 * at : 4 * at + 4] = _part(piece).sizes(_factor(piece))
        self._collectives.agree(sums)
        due = 0
        for waiting, rest_numel, important, numel in sums[: 4 * len(weights)].view(-1, 4).tolist():
            due += waiting * numel >= important * rest_numel
        return due >= self._config.auto_ratio * len(weights)

    def finish(self) -> None:
        """Take in what a hook after the step has written to."""
        for master in self._pieces:
            if master.is_newer_on_host:
                master.settle()
                master.store()


def _part(piece: MasterPiece) -> Part:
    if not isinstance(piece.master, ZenFlowMaster):
        raise AssertionError("a piece that is stepped as a whole has no parts")
    return piece.master.part(piece)


def _factor(piece: MasterPiece) -> float:
    """What the gradient is still to be multiplied with."""
    factor = piece.master.factors.get(piece.piece.slot)  # type: ignore[attr-defined]
    return 1.0 if factor is None else float(factor)
