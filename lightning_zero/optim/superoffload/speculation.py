"""What is assumed of a step, and who makes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_zero.comm.agreed import KeptError
from lightning_zero.optim.pieces import MasterPiece
from lightning_zero.worker import HostWorker, Job, Shared, Ticket
from lightning_zero.worker.jobs import AdamOptions


@dataclass(slots=True)
class Speculation:
    """What came of the steps of buckets, counted since training began."""

    confirmed: int = 0
    """Stepped during backward, and right."""

    undone: int = 0
    """Stepped during backward, and taken back."""

    made: int = 0
    """Stepped in the optimizer step, not taken from what was made before."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """All that the outcome of a bucket's step depends on, beside its states."""

    pieces: tuple[MasterPiece, ...]
    steps: tuple[float, ...]
    """Of each piece, this one included."""
    options: tuple[AdamOptions, ...]
    """Of each piece."""
    is_shared: bool
    """The gradient is the one that the worker sees."""
    grad_version: int
    grad_stamp: int | None
    """Of the gradient, where it may change without a word."""

    @property
    def is_plain(self) -> bool:
        """Whether it is what could have been assumed: nothing is multiplied."""
        return self.is_shared and all(options["grad_scale"] == 1.0 for options in self.options)

    def by_options(self) -> Iterator[tuple[AdamOptions, list[int]]]:
        """Pieces that are stepped alike, by their places."""
        left = list(range(len(self.pieces)))
        while left:
            options = self.options[left[0]]
            alike = [at for at in left if self.options[at] == options]
            left = [at for at in left if at not in alike]
            yield options, alike


@dataclass(slots=True)
class Guess:
    """A step that may have been made ahead."""

    assumed: Assumed
    state_versions: tuple[int, ...]
    tickets: list[Ticket] = field(default_factory=list)
    """Empty where it was not made, and is only to be held against the step that comes."""


class HostSteps:
    """A rank's worker, and what all buckets know of it.

    Args:
        worker: The worker.
    """

    def __init__(self, worker: HostWorker) -> None:
        self._worker = worker
        self.errors = KeptError()
        """Of the worker, until all ranks can raise them."""
        self.speculates = True
        """The backward under way is the last before a step, as far as anybody knows."""
        self.counts = Speculation()

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """1-D host memory that the worker sees."""
        return self._worker.zeros(numel, dtype)

    def share(self, tensor: Tensor) -> Shared:
        """Name a tensor for a job."""
        return self._worker.share(tensor)

    def submit(self, job: Job) -> Ticket:
        """Have a job done, after those that were submitted before."""
        return self._worker.submit(job)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Inside, backwards are not the last before a step."""
        was, self.speculates = self.speculates, False
        try:
            yield
        finally:
            self.speculates = was
