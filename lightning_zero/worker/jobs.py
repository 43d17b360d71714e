"""What a worker can be told to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from lightning_zero.ops import adam_columns_step_, adam_step_, adam_step_undo_
from lightning_zero.worker.shared import Shared, SharedMemory


class Job(ABC):
    """Something to be done with tensors in shared memory; is pickled, so it holds their names."""

    @abstractmethod
    def run(self, memory: SharedMemory) -> None:
        """Do it, in the worker."""


class AdamOptions(TypedDict):
    """What Adam does in one step, beside its tensors: see :func:`.ops.adam_step_`."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool
    grad_scale: float


@dataclass(frozen=True, slots=True)
class AdamJob(Job):
    """A step of many pieces, see :func:`.ops.adam_step_`."""

    masters: tuple[Shared, ...]
    exp_avgs: tuple[Shared, ...]
    exp_avg_sqs: tuple[Shared, ...]
    grads: tuple[Shared, ...]
    steps: tuple[float, ...]
    options: AdamOptions
    copies: tuple[Shared, ...] = ()
    undo: tuple[Shared, ...] = ()

    def run(self, memory: SharedMemory) -> None:
        """See the base class."""
        adam_step_(
            _all(self.masters, memory),
            _all(self.exp_avgs, memory),
            _all(self.exp_avg_sqs, memory),
            _all(self.grads, memory),
            self.steps,
            copies=_all(self.copies, memory),
            undo=_all(self.undo, memory),
            **self.options,
        )


@dataclass(frozen=True, slots=True)
class AdamUndoJob(Job):
    """Takes a step back, see :func:`.ops.adam_step_undo_`."""

    masters: tuple[Shared, ...]
    exp_avgs: tuple[Shared, ...]
    exp_avg_sqs: tuple[Shared, ...]
    undo: tuple[Shared, ...]
    copies: tuple[Shared, ...] = ()

    def run(self, memory: SharedMemory) -> None:
        """See the base class."""
        lists = self.masters, self.exp_avgs, self.exp_avg_sqs, self.undo, self.copies
        adam_step_undo_(*(_all(each, memory) for each in lists))


@dataclass(frozen=True, slots=True)
class ColumnsJob(Job):
    """A step of a run of a matrix, by columns: see :func:`.ops.adam_columns_step_`."""

    master: Shared
    exp_avg: Shared
    exp_avg_sq: Shared
    grad: Shared
    counts: tuple[int, ...]
    first_column: int
    options: AdamOptions
    copy: Shared | None = None

    def run(self, memory: SharedMemory) -> None:
        """See the base class."""
        adam_columns_step_(
            memory.tensor(self.master),
            memory.tensor(self.exp_avg),
            memory.tensor(self.exp_avg_sq),
            memory.tensor(self.grad),
            torch.tensor(self.counts),
            first_column=self.first_column,
            copy=None if self.copy is None else memory.tensor(self.copy),
            **self.options,
        )


@dataclass(frozen=True, slots=True)
class AccumulateJob(Job):
    """Adds a gradient to a sum."""

    total: Shared
    grad: Shared
    factor: float
    """What the gradient is multiplied with."""
    is_first: bool
    """The sum begins with it."""

    def run(self, memory: SharedMemory) -> None:
        """See the base class."""
        total, grad = memory.tensor(self.total), memory.tensor(self.grad)
        accumulate(total, grad, self.factor, self.is_first)


def _all(names: tuple[Shared, ...], memory: SharedMemory) -> list[Tensor]:
    return [memory.tensor(name) for name in names]


@torch.no_grad()
def accumulate(total: Tensor, grad: Tensor, factor: float, is_first: bool) -> None:
    """Add a gradient, multiplied in fp32, to a sum of fp32 in place; or begin the sum with it."""
    if is_first:
        total.copy_(grad).mul_(factor)
    else:
        total.add_(grad, alpha=factor)
