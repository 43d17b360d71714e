"""Who steps the rest: this process, or a worker beside it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.memory.link import HostLink
from lightning_zero.ops import adam_columns_step_
from lightning_zero.optim.zenflow.columns import AdamStates, is_uniform, step_uniform_
from lightning_zero.worker import ColumnsJob, HostWorker, Ticket
from lightning_zero.worker.jobs import AdamJob, AdamOptions


class RestStep(NamedTuple):
    """A step of a piece of a matrix."""

    states: AdamStates
    """Weights, averages and averages of squares, 1-D; changed."""
    grad: Tensor
    """1-D, not to be written to before :meth:`RestSteps.finish`."""
    counts: Tensor
    """Steps of each column, int64 [columns], this one included where it is stepped."""
    is_stepped: Tensor
    """Columns whose result matters, bool [columns]; others may become anything."""
    first_column: int
    """Column of the first element."""
    options: AdamOptions
    copy: Tensor | None
    """1-D, takes the new weights in the dtype of the parameters."""

    def common_count(self) -> float | None:
        """Steps of all columns that matter; None where they differ."""
        own = self.counts[self.is_stepped]
        return float(own[0]) if is_uniform(own) else None


class RestSteps:
    """Steps at once, in this process.

    Args:
        link: Gives host memory.
    """

    is_late = False
    """New values come with the end of the next window."""

    def __init__(self, link: HostLink) -> None:
        self._link = link

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """1-D host memory for what is stepped."""
        return self._link.zeros(numel, dtype)

    def owned(self, tensor: Tensor) -> Tensor:
        """The tensor, or a copy of it where it can be stepped."""
        return tensor

    def step(self, step: RestStep) -> None:
        """Make a step; may be under way when this returns."""
        count = step.common_count()
        if count is not None:
            step_uniform_(step.states, step.grad, count, step.options, step.copy)
            return
        adam_columns_step_(
            *step.states,
            step.grad,
            step.counts.clamp(min=1),
            first_column=step.first_column,
            copy=step.copy,
            **step.options,
        )

    def finish(self) -> None:
        """Wait for all steps.

        Raises:
            RuntimeError: One has failed.
        """


class WorkerSteps(RestSteps):
    """Steps in a worker, while this process goes on.

    Args:
        link: The way between the device and the host.
        worker: The worker.
    """

    is_late = True

    def __init__(self, link: HostLink, worker: HostWorker) -> None:
        super().__init__(link)
        self._worker = worker
        self._under_way: list[Ticket] = []

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See the base class."""
        return self._worker.zeros(numel, dtype)

    def owned(self, tensor: Tensor) -> Tensor:
        """See the base class."""
        if self._worker.has(tensor):
            return tensor
        flat = self._worker.zeros(tensor.numel(), tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride()).copy_(tensor)

    def step(self, step: RestStep) -> None:
        """See the base class."""
        if not self._worker.has(step.grad):  # one that does not wait: all is to be done at once
            self.finish()
            super().step(step)
            return
        share = self._worker.share
        master, exp_avg, exp_avg_sq = map(share, step.states)
        grad = share(step.grad)
        copies = () if step.copy is None else (share(step.copy),)
        count = step.common_count()
        job: AdamJob | ColumnsJob
        if count is not None:
            lists = (master,), (exp_avg,), (exp_avg_sq,), (grad,)
            job = AdamJob(*lists, (count,), step.options, copies)
        else:
            counts = tuple(step.counts.clamp(min=1).tolist())
            names = master, exp_avg, exp_avg_sq, grad
            job = ColumnsJob(*names, counts, step.first_column, step.options, *copies)
        self._under_way.append(self._worker.submit(job))

    def finish(self) -> None:
        """See the base class."""
        while self._under_way:
            self._under_way.pop(0).wait()
