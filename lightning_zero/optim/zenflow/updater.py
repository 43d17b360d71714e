"""Steps important columns on the device and the rest on the host, less often."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_zero import _compat
from lightning_zero.comm import Collectives
from lightning_zero.comm.agreed import failing_together
from lightning_zero.optim.adam_options import adam_options
from lightning_zero.optim.apart import ApartSteps
from lightning_zero.optim.bucket_steps import Group, step_in_place
from lightning_zero.optim.masters import HostMaster, MasterShard
from lightning_zero.optim.pieces import MasterPiece, PieceTable, parameters_of
from lightning_zero.optim.updaters import TOLD, HostUpdater, Used
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
        kind = type(optimizer)
        groups = optimizer.param_groups
        if kind not in (torch.optim.Adam, torch.optim.AdamW):
            raise ValueError(
                f"zenflow steps columns by Adam, each with its own number of steps, and cannot do"
                f" that for {kind.__name__}: use torch.optim.Adam or AdamW, or remove zenflow"
            )
        if any(group["amsgrad"] for group in groups):
            raise ValueError(
                f"zenflow does not know {kind.__name__}(amsgrad=True): remove one of the two"
            )
        if any(p.dtype == torch.float64 for p in parameters_of(optimizer)):
            raise ValueError(
                "zenflow steps master weights of fp32, and some parameters are fp64, which would"
                " lose precision: train in another precision, or remove zenflow"
            )


class ZenFlowUpdater(HostUpdater):
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
        handle = optimizer.register_step_pre_hook(step.run)
        if step.has_hooks:
            step.bring_together()
        hidden = frozenset() if step.has_hooks else step.hidden()
        try:
            with self._table.swapped(optimizer, used - hidden):
                yield
        finally:
            handle.remove()
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


class _ZenFlowStep:
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
        self._table = table
        self._used = [p for p in parameters_of(optimizer) if p in used]
        self._clock = clock
        self._config = config
        self._collectives = collectives
        self._masters: list[ZenFlowMaster] = []
        self._pieces: dict[MasterPiece, int] = {}
        """All pieces in the two worlds, and the numbers of their groups."""
        self._stepped: set[MasterPiece] = set()
        """Those that have a gradient."""
        self._error: Exception | None = None
        self.has_begun = False
        """The worker has been given something to do, the same on all ranks."""
        self._others: dict[MasterShard, list[Group]] = {}
        """What is stepped as a whole on the device."""
        self.has_hooks = _compat.has_step_hooks(optimizer, besides=0)
        """Hooks of the user look at what is stepped."""
        self._sort(optimizer, used)

    def _sort(self, optimizer: Optimizer, used: Used) -> None:
        for number, group in enumerate(optimizer.param_groups):
            others: dict[MasterShard, list[MasterPiece]] = {}
            for parameter in group["params"]:
                piece = self._table.piece(parameter)
                if piece is None:
                    continue
                has_grad = piece.has_grad(used)
                if isinstance(piece.master, ZenFlowMaster):
                    self._pieces[piece] = number
                    if has_grad:
                        self._stepped.add(piece)
                    if piece.master not in self._masters:
                        self._masters.append(piece.master)
                elif has_grad:
                    others.setdefault(piece.master, []).append(piece)
            for master, pieces in others.items():
                self._others.setdefault(master, []).append(Group(number, pieces))

    def hidden(self) -> Used:
        """Parameters whose gradients need not be made for the optimizer to see."""
        return frozenset(
            piece.parameter
            for piece in self._stepped
            if isinstance(piece.master, HostMaster) and not piece.master.has_made_grad
        )

    def bring_together(self) -> None:
        """Let hooks of the user see what there is."""
        for master in self._masters:
            master.bring_together()

    @torch.no_grad()
    def run(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        """Hook before the optimizer's own step, which has nothing left to do after it."""
        found_inf = getattr(optimizer, "found_inf", None)  # of a loss scaler: the step is left out
        if found_inf is None or not bool(found_inf):
            self._step(optimizer)
        for piece in self._stepped:
            piece.tensor.grad = None
        for groups in self._others.values():
            for group in groups:
                for piece in group.pieces:
                    piece.tensor.grad = None

    def _step(self, optimizer: Optimizer) -> None:
        apart = ApartSteps(optimizer)
        for other, groups in self._others.items():
            step_in_place(optimizer, apart, other, groups)
        self._adopt(optimizer)
        turn = self._clock.turn()
        if turn.selects:
            self._select(optimizer)
        for piece in self._stepped:
            part = self._part(piece)
            part.step_important(self._options(optimizer, piece, _factor(piece)))
        updates = self._rest(optimizer, turn)
        for master in self._masters:
            master.show_important()
            master.note()
        self._clock.take(turn, updates)
        for master in self._masters:
            master.clock_state = self._clock.state()
        if self.has_hooks:
            self.bring_together()

    def _adopt(self, optimizer: Optimizer) -> None:
        for master in self._masters:
            own = [piece for piece in self._pieces if piece.master is master]
            master.adopt(optimizer, own)
        for piece in self._pieces:
            if piece in self._stepped and not self._part(piece).has_state:
                self._part(piece).make_state(optimizer.state[piece.tensor])

    def _select(self, optimizer: Optimizer) -> None:
        """Choose columns anew. What waits was measured by the old ones, and is stepped before."""
        chosen = agree_on_columns(self._used, self._table, self._collectives, self._config)
        self._step_waiting(optimizer, self._clock.window)
        self._show_rest()
        for master in self._masters:  # the rest has come with old values of the important ones
            master.show_important()
        for piece in self._pieces:
            if piece.parameter in chosen and self._part(piece).has_state:
                self._part(piece).choose(chosen[piece.parameter])
        for master in self._masters:
            master.note()

    def _rest(self, optimizer: Optimizer, turn: Turn) -> bool:
        """Whether the window has ended with this step, and what waits is stepped."""
        rest = [piece for piece in self._stepped if self._part(piece).has_rest]
        window = 0 if turn.selects else self._clock.window
        is_now = turn.is_warm_up or not self._config.overlap_step
        if turn.updates and not window and is_now:
            self._step_now(optimizer, rest)
            self._show_rest()
            return True
        for piece in rest:
            self._part(piece).wait(_factor(piece))
        updates = turn.updates or (self._config.update_interval == "auto" and self._is_due())
        if updates and self._config.overlap_step:
            self._show_rest()
            self._step_waiting(optimizer, window + 1)
            self.has_begun = True
        elif updates:
            self._step_waiting(optimizer, window + 1)
            self._show_rest()
        return updates

    def _step_now(self, optimizer: Optimizer, pieces: Sequence[MasterPiece]) -> None:
        """A window of one step: nothing has to wait."""
        for master in self._masters:
            options = {
                piece: self._options(optimizer, piece, _factor(piece))
                for piece in pieces
                if piece.master is master
            }
            self._guarded(partial(master.begin_rest, options, has_waited=False))

    def _step_waiting(self, optimizer: Optimizer, window: int) -> None:
        """Step by the mean of what waits."""
        for master in self._masters:
            options = {
                piece: self._options(optimizer, piece, 1.0 / window)
                for piece in self._pieces
                if piece.master is master and self._part(piece).waited
            }
            self._guarded(partial(master.begin_rest, options, has_waited=True))

    def _show_rest(self) -> None:
        """On all ranks or on none."""
        if self._config.overlap_step:
            with failing_together(self._collectives, IN_WORKER, TOLD):
                self.raise_kept()
                for master in self._masters:
                    master.finish_rest()
        for master in self._masters:
            master.show_rest()

    def _guarded(self, run: Callable[[], None]) -> None:
        """Keep an error of one rank's worker until all of them know of it."""
        if self._error is not None:
            return
        try:
            run()
        except RuntimeError as error:
            if not self._config.overlap_step:
                raise
            self._error = error

    def raise_kept(self) -> None:
        """Raise what was kept: the worker of this rank has failed."""
        if self._error is not None:
            raise self._error

    def _is_due(self) -> bool:
        """Whether enough weights have gradients waiting that are as large as important ones."""
        weights = [p for p in self._used if columns(self._table, p) > 1]
        sums = torch.zeros(max(1, 4 * len(weights)), dtype=torch.float64)
        for at, parameter in enumerate(weights):
            piece = self._table.piece(parameter)
            if piece is not None and piece in self._stepped:
                sums[4 * at : 4 * at + 4] = self._part(piece).sizes(_factor(piece))
        self._collectives.agree(sums)
        due = 0
        for waiting, rest_numel, important, numel in sums[: 4 * len(weights)].view(-1, 4).tolist():
            due += waiting * numel >= important * rest_numel
        return due >= self._config.auto_ratio * len(weights)

    def _part(self, piece: MasterPiece) -> Part:
        if not isinstance(piece.master, ZenFlowMaster):
            raise AssertionError("a piece that is stepped as a whole has no parts")
        return piece.master.part(piece)

    def _options(self, optimizer: Optimizer, piece: MasterPiece, scale: float) -> AdamOptions:
        return adam_options(optimizer, optimizer.param_groups[self._pieces[piece]], scale)

    def finish(self) -> None:
        """Take in what a hook after the step has written to."""
        for master in self._masters:
            if master.is_newer_on_host:
                master.settle()
                master.store()


def _factor(piece: MasterPiece) -> float:
    """What the gradient is still to be multiplied with."""
    factor = piece.master.factors.get(piece.piece.slot)  # type: ignore[attr-defined]
    return 1.0 if factor is None else float(factor)
