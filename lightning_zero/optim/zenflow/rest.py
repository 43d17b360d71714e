"""Who steps the rest: this process, or a worker beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zero.memory.link import HostLink
from lightning_zero.ops import adam_columns_step_
from lightning_zero.optim.zenflow.columns import AdamStates, is_uniform, step_uniform_
from lightning_zero.worker import ColumnsJob, HostWorker, Ticket
from lightning_zero.worker.jobs import AdamJob, AdamOptions


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

    def step(
        self,
        states: AdamStates,
        grad: Tensor,
        counts: Tensor,
        is_stepped: Tensor,
        first_column: int,
        options: AdamOptions,
        copy: Tensor | None,
    ) -> None:
        """Step a piece of a matrix; may be under way when this returns.

        Args:
            states: Weights, averages and averages of squares, 1-D; changed.
            grad: 1-D, not to be written to before :meth:`finish`.
            counts: Steps of each column, int64 [columns], this one included where it is stepped.
            is_stepped: Columns whose result matters, bool [columns]; others may become anything.
            first_column: Column of the first element.
            options: Of the step.
            copy: 1-D, takes the new weights in the dtype of the parameters.
        """
        own = counts[is_stepped]
        if is_uniform(own):
            step_uniform_(states, grad, float(own[0]), options, copy)
        else:
            adam_columns_step_(
                *states, grad, counts.clamp(min=1), first_column=first_column, copy=copy, **options
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

    def step(
        self,
        states: AdamStates,
        grad: Tensor,
        counts: Tensor,
        is_stepped: Tensor,
        first_column: int,
        options: AdamOptions,
        copy: Tensor | None,
    ) -> None:
        """See the base class."""
        if not self._worker.has(grad):  # one that does not wait: all is to be done at once
            self.finish()
            super().step(states, grad, counts, is_stepped, first_column, options, copy)
            return
        share = self._worker.share
        master, exp_avg, exp_avg_sq = map(share, states)
        copies = () if copy is None else (share(copy),)
        own = counts[is_stepped]
        job: AdamJob | ColumnsJob
        if is_uniform(own):
            lists = (master,), (exp_avg,), (exp_avg_sq,), (share(grad),)
            job = AdamJob(*lists, (float(own[0]),), options, copies)
        else:
            steps = tuple(counts.clamp(min=1).tolist())
            names = master, exp_avg, exp_avg_sq, share(grad)
            job = ColumnsJob(*names, steps, first_column, options, *copies)
        self._under_way.append(self._worker.submit(job))

    def finish(self) -> None:
        """See the base class."""
        while self._under_way:
            self._under_way.pop(0).wait()
