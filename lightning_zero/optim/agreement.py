"""What all ranks have to know about the gradients before an optimizer step.

One small sum over the ranks answers three questions: is there a gradient that was not reduced yet,
which parameters did anybody use ("nobody" keeps the meaning of ``grad is None``: no weight decay,
no momentum), and on which ranks was a gradient not finite. Only if one was, a second sum tells in
which parameters. Who asks for the norm pays for one more.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.comm.api import Collectives
from lightning_zero.grads.reducer import GradientReducer
from lightning_zero.optim.overflow import NonfiniteGradients
from lightning_zero.optim.pieces import MasterPiece, PieceTable, parameters_of


class GradientAgreement:
    """Agreements about the gradients of the latest backward.

    Args:
        reducer: Reducer whose gradients are agreed about.
        table: This rank's pieces.
        collectives: Group of the agreement.
        is_sharded: Ranks hold different pieces; else every rank holds them all.
    """

    def __init__(
        self,
        reducer: GradientReducer,
        table: PieceTable,
        collectives: Collectives,
        is_sharded: bool,
    ) -> None:
        self._reducer = reducer
        self._table = table
        self._collectives = collectives
        self._is_sharded = is_sharded
        self._generation = -1
        self._used: frozenset[nn.Parameter] = frozenset()
        self._nonfinite_ranks: tuple[int, ...] = ()
        self._nonfinite: tuple[nn.Parameter, ...] = ()

    def used(self) -> frozenset[nn.Parameter]:
        """Parameters that some rank has a gradient for; to be called on all ranks together."""
        if self._generation != self._reducer.generation:
            self._agree()
        return self._used

    def nonfinite(self, optimizer: Optimizer) -> NonfiniteGradients:
        """Where an optimizer's gradients are not finite, or were not before they were clipped.

        To be called on all ranks together; all get the same answer.
        """
        self.used()
        own = set(parameters_of(optimizer)) if self._nonfinite else ()
        places = [self._table.place[p] for p in self._nonfinite if p in own]
        names = tuple(bucket.layout.slots[slot].fqn for bucket, slot in places)
        return NonfiniteGradients(self._nonfinite_ranks if names else (), names)

    def total_norm(self, optimizer: Optimizer | None, norm_type: float = 2.0) -> float:
        """Norm of the averaged gradients over all parameters and ranks, each parameter once.

        Args:
            optimizer: Count the parameters of this optimizer only; None for all.
            norm_type: p of the p-norm, or inf.

        Returns:
            The norm before any later clipping; 0.0 if nobody has a gradient.
        """
        used = self.used()
        pieces = self._table.pieces_of(optimizer) if optimizer else self._table.pieces()
        counted = [piece for piece in pieces if piece.has_grad(used)]
        if not self._is_sharded:  # torch's own sum, as with plain data parallelism
            norm = torch.nn.utils.get_total_norm([piece.grad for piece in counted], norm_type)
            return float(norm)
        if math.isinf(norm_type):
            return self._largest(counted)
        powers = torch.zeros(1, dtype=torch.float64, device=self._device)
        for piece in counted:
            norm = torch.linalg.vector_norm(piece.grad_as_is, norm_type, dtype=torch.float64)
            powers += norm.pow(norm_type).to(powers.device)
        self._collectives.agree(powers)
        return float(powers.pow(1.0 / norm_type))

    def ask_again(self) -> None:
        """There are more parameters to agree about; what was found so far stays."""
        self._generation = -1

    def forget(self) -> None:
        """Nothing agreed holds any more."""
        self.ask_again()
        self._nonfinite_ranks, self._nonfinite = (), ()
        self._reducer.forget_nonfinite()

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self._table.place), torch.device("cpu"))

    def _largest(self, pieces: list[MasterPiece]) -> float:
        """Largest absolute value over ranks; a maximum by way of a sum of one entry per rank."""
        ranks, rank = self._collectives.world_size, self._collectives.rank
        found = torch.zeros(ranks, dtype=torch.float64, device=self._device)
        for piece in pieces:
            if piece.grad.numel():
                largest = piece.grad_as_is.abs().max().double().to(found.device)
                found[rank] = torch.maximum(found[rank], largest)
        self._collectives.agree(found)
        return float(found.max())

    def _agree(self) -> None:
        flags = self._flags()
        if flags.is_unreduced:
            self._reducer.reduce_unreduced()
            flags = self._flags()
        places = self._table.place.items()
        used = []
        for is_used, (parameter, (bucket, slot)) in zip(flags.is_used, places, strict=True):
            bucket.idle_steps[slot] = 0 if is_used else bucket.idle_steps[slot] + 1
            if is_used:
                used.append(parameter)
        self._used = frozenset(used)
        self._generation = self._reducer.generation
        self._reducer.forget_nonfinite()
        # What was found before may still be there, if nobody has cleared it since.
        if flags.nonfinite_ranks or flags.is_sum_nonfinite or self._nonfinite:
            self._find_nonfinite(flags.nonfinite_ranks)
        for master in self._table.masters:
            master.drop_step_grad()

    def _flags(self) -> _Flags:
        local = [float(self._reducer.has_unreduced())]
        for bucket, slot in self._table.place.values():
            local.append(float(slot in bucket.used and not bucket.is_cleared(slot)))
        ranks, end = self._collectives.world_size, len(local)
        local += [0.0] * (ranks + 1)
        values = torch.tensor(local, dtype=torch.float64, device=self._device)
        own, summed = self._reducer.nonfinite()
        if own is not None:
            values[end + self._collectives.rank] = own
        if summed is not None:
            values[end + ranks] = summed
        self._collectives.agree(values)
        found = [bool(value) for value in values.tolist()]
        return _Flags(
            is_unreduced=found[0],
            is_used=found[1:end],
            nonfinite_ranks=tuple(rank for rank in range(ranks) if found[end + rank]),
            is_sum_nonfinite=found[end + ranks],
        )

    def _find_nonfinite(self, ranks: tuple[int, ...]) -> None:
        """Ask all ranks in which parameters the averaged gradients are not finite."""
        place = self._table.place
        marks = torch.zeros(len(place), dtype=torch.float64, device=self._device)
        for index, (parameter, (bucket, slot)) in enumerate(place.items()):
            if parameter in self._used and slot in bucket.pieces and not bucket.is_cleared(slot):
                marks[index] = bucket.piece_grad(slot).isfinite().all().logical_not()
        self._collectives.agree(marks)
        pairs = zip(place, marks.tolist(), strict=True)
        self._nonfinite = tuple(parameter for parameter, is_found in pairs if is_found)
        if ranks or not self._nonfinite:
            self._nonfinite_ranks = ranks


class _Flags(NamedTuple):
    """What the ranks have told each other."""

    is_unreduced: bool
    """Somebody has a gradient that no reduction has taken."""

    is_used: list[bool]
    """Of each parameter, whether somebody has a gradient for it."""

    nonfinite_ranks: tuple[int, ...]
    """Ranks that had a gradient which is not finite, before any reduction."""

    is_sum_nonfinite: bool
    """A sum over the ranks was not finite."""
