"""What a worker steps of a bucket, where the worker sees it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.grads.bucket import GradientBucket
from lightning_zero.ops import adam_step_
from lightning_zero.optim.adam_options import AVERAGES
from lightning_zero.optim.bucket_steps import State
from lightning_zero.optim.pieces import MasterPiece
from lightning_zero.optim.superoffload.speculation import Assumed, HostSteps
from lightning_zero.worker import AdamJob, AdamUndoJob, Shared, Ticket


class _Names(NamedTuple):
    """A piece, as the worker knows it."""

    master: Shared
    exp_avg: Shared
    exp_avg_sq: Shared
    grad: Shared
    undo: Shared
    copy: tuple[Shared, ...]
    """Empty where parameters have the dtype of the master."""


class SharedStates:
    """Averages and undo record of a bucket.

    Args:
        master: Master weights 1-D [S], in memory that the worker sees, as all of these.
        copy: The same in the dtype of the parameters; None where that is fp32.
        gradients: The bucket's gradients.
        steps: The worker.
    """

    def __init__(
        self, master: Tensor, copy: Tensor | None, gradients: GradientBucket, steps: HostSteps
    ) -> None:
        self._master = master
        self._copy = copy
        self._gradients = gradients
        self._steps = steps
        self.averages = {key: steps.zeros(master.numel(), torch.float32) for key in AVERAGES}
        """1-D [S] each, by their names in the optimizer's states."""
        self._undo = steps.zeros(3 * master.numel(), torch.float32)
        self._own: dict[MasterPiece, tuple[Tensor, ...]] = {}
        self._names: dict[MasterPiece, _Names] = {}

    def of(self, piece: MasterPiece) -> tuple[Tensor, ...]:
        """Averages of a piece, of its shape."""
        if piece not in self._own:
            self._own[piece] = tuple(piece.view(self.averages[key]) for key in AVERAGES)
        return self._own[piece]

    def make(self, piece: MasterPiece, state: State) -> None:
        """Begin the states of a piece."""
        state["step"] = torch.tensor(0.0)
        for key, own in zip(AVERAGES, self.of(piece), strict=True):
            state[key] = own.zero_()

    def has(self, piece: MasterPiece, state: State) -> bool:
        """Whether the states of a piece are the tensors here."""
        return all(state[key] is own for key, own in zip(AVERAGES, self.of(piece), strict=True))

    def adopt(self, piece: MasterPiece, state: State) -> None:
        """Take in states that somebody has put in their place."""
        for key, own in zip(AVERAGES, self.of(piece), strict=True):
            if state[key].data_ptr() != own.data_ptr():
                own.copy_(state[key])
            state[key] = own

    def versions(self) -> tuple[int, ...]:
        """Change with whoever writes to averages, but the worker."""
        return tuple(average._version for average in self.averages.values())

    def note_step(self) -> None:
        """The worker has written to master and averages."""
        torch.autograd.graph.increment_version([self._master, *self.averages.values()])

    def step(self, assumed: Assumed, is_ahead: bool) -> list[Ticket]:
        """Have the worker make a step; may be under way when this returns.

        Args:
            assumed: The step.
            is_ahead: Record what :meth:`undo` needs.
        """
        found = []
        for options, places in assumed.by_options():
            names = [self._named(assumed.pieces[at]) for at in places]
            job = AdamJob(
                masters=tuple(name.master for name in names),
                exp_avgs=tuple(name.exp_avg for name in names),
                exp_avg_sqs=tuple(name.exp_avg_sq for name in names),
                grads=tuple(name.grad for name in names),
                steps=tuple(assumed.steps[at] for at in places),
                options=options,
                copies=tuple(copy for name in names for copy in name.copy),
                undo=tuple(name.undo for name in names) if is_ahead else (),
            )
            found.append(self._steps.submit(job))
        return found

    def undo(self, assumed: Assumed) -> Ticket:
        """Have the worker take a step back; may be under way when this returns."""
        names = [self._named(piece) for piece in assumed.pieces]
        job = AdamUndoJob(
            masters=tuple(name.master for name in names),
            exp_avgs=tuple(name.exp_avg for name in names),
            exp_avg_sqs=tuple(name.exp_avg_sq for name in names),
            undo=tuple(name.undo for name in names),
            copies=tuple(copy for name in names for copy in name.copy),
        )
        return self._steps.submit(job)

    def step_here(self, assumed: Assumed, grad: Tensor) -> None:
        """Make a step by a gradient 1-D [S] that only this process has; writes no copy."""
        for options, places in assumed.by_options():
            pieces = [assumed.pieces[at] for at in places]
            adam_step_(
                [piece.tensor.detach() for piece in pieces],
                [self.of(piece)[0] for piece in pieces],
                [self.of(piece)[1] for piece in pieces],
                [piece.view(grad) for piece in pieces],
                [assumed.steps[at] for at in places],
                **options,
            )

    def _named(self, piece: MasterPiece) -> _Names:
        if piece not in self._names:
            begin = piece.piece.shard_offset
            end = begin + piece.piece.numel
            share, copy = self._steps.share, self._copy
            self._names[piece] = _Names(
                master=share(self._master[begin:end]),
                exp_avg=share(self.averages["exp_avg"][begin:end]),
                exp_avg_sq=share(self.averages["exp_avg_sq"][begin:end]),
                grad=share(self._gradients.shard_grad[begin:end]),
                undo=share(self._undo[3 * begin : 3 * end].view(3, -1)),
                copy=() if copy is None else (share(copy[begin:end]),),
            )
        return self._names[piece]


def is_complete(state: State) -> bool:
    """Whether a state is one of Adam."""
    return all(key in state for key in ("step", *AVERAGES))
