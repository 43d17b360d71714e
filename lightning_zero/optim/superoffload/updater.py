"""Confirms what was stepped during backward, or has it made anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from torch.optim import Optimizer

from lightning_zero.comm import Collectives
from lightning_zero.comm.agreed import failing_together
from lightning_zero.optim.adam_options import check_adam
from lightning_zero.optim.apart import ApartSteps
from lightning_zero.optim.bucket_steps import Group, step_in_place
from lightning_zero.optim.hooked_steps import HookedStep, Used
from lightning_zero.optim.masters import MasterShard
from lightning_zero.optim.pieces import PieceTable, parameters_of
from lightning_zero.optim.superoffload.master import SuperMaster
from lightning_zero.optim.superoffload.speculation import HostSteps, Speculation
from lightning_zero.optim.updaters import TOLD, Updater


def check_super_offload(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers whose steps cannot be made ahead.

    Raises:
        ValueError: There is one.
    """
    for optimizer in optimizers:
        check_adam(
            optimizer,
            "super_offload",
            "steps by Adam ahead and takes that back where it was wrong, and cannot do so",
        )
        if any(p.dtype.itemsize > 4 for p in parameters_of(optimizer)):
            raise ValueError(
                f"super_offload steps in fp32, and {type(optimizer).__name__} has parameters of"
                " fp64: train in fp32, or remove super_offload"
            )


class SuperOffloadUpdater(Updater):
    """Steps ahead, see [Note: speculation] in ``__init__.py``.

    Args:
        table: This rank's pieces.
        steps: This rank's worker.
        control: Group over which ranks tell each other whether their workers have failed.
    """

    def __init__(self, table: PieceTable, steps: HostSteps, control: Collectives) -> None:
        super().__init__(table)
        self._steps = steps
        self._control = control

    @property
    def counts(self) -> Speculation:
        """What came of this rank's steps."""
        return self._steps.counts

    def accumulating(self) -> AbstractContextManager[None]:
        """See the base class."""
        return self._steps.accumulating()

    def bring_together(self, optimizer: Optimizer) -> None:
        """See the base class."""
        with failing_together(self._control, "step in a worker", TOLD):
            super().bring_together(optimizer)

    @contextmanager
    def _stepping(
        self, optimizer: Optimizer, masters: Sequence[MasterShard], used: Used
    ) -> Iterator[None]:
        check_super_offload([optimizer])  # one may come later than training has begun
        step = _Step(optimizer, self._table, masters, used, self._steps)
        with step.within():
            yield
        step.finish()
        with failing_together(self._control, "step in a worker", TOLD):
            self._steps.errors.raise_kept()
        step.store()


class _Step(HookedStep):
    """One step of an optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        table: PieceTable,
        masters: Sequence[MasterShard],
        used: Used,
        steps: HostSteps,
    ) -> None:
        super().__init__(optimizer, table, used)
        self._masters = masters
        self._steps = steps
        self._versions = {master: master.tensor._version for master in masters}
        """Of masters, when they were last in line with their shards."""
        self._has_run = False

    def _show(self) -> None:
        """See the base class: as if nothing had been stepped ahead, and they may write to it."""
        for master in self._masters:
            if isinstance(master, SuperMaster):
                master.take_back()

    def _step(self, optimizer: Optimizer) -> None:
        self._has_run = True
        self._steps.errors.run(partial(self._step_buckets, optimizer))

    def _step_buckets(self, optimizer: Optimizer) -> None:
        ahead: dict[SuperMaster, list[Group]] = {}
        others: dict[MasterShard, list[Group]] = {}
        for each, groups in self._groups.items():
            if isinstance(each, SuperMaster):
                ahead[each] = groups
            else:
                others[each] = groups
        for master, groups in ahead.items():
            master.begin_step(optimizer, groups)
        apart = ApartSteps(optimizer)
        for other, groups in others.items():  # on the device, while the worker steps
            step_in_place(optimizer, apart, other, groups)
            self._versions[other] = other.tensor._version
        for master, groups in ahead.items():
            master.finish_step(optimizer, groups)

    def finish(self) -> None:
        """A step that was left out is as if nothing had been stepped ahead."""
        if not self._has_run:
            self._show()

    def store(self) -> None:
        """Bring new values to the parameters' shards, and what hooks have written."""
        for master, version in self._versions.items():
            if master.tensor._version == version:
                continue
            master.settle()
            if isinstance(master, SuperMaster):
                master.show()
            else:
                master.store()
