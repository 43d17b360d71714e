"""Columns of a piece of a matrix, packed and put back.

[Note: columns of a piece]
A weight is a matrix of its first axis by all others, as it lies in memory: the columns of a linear
layer are its input channels, those of a convolution its input channels and places in the kernel. A
piece is a run of that matrix: the end of one row, whole rows, the beginning of one more. Packed, it
is the same three parts with the chosen columns only.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.ops import (
    adam_columns_step_,
    adam_step_,
    column_importance,
    gather_columns,
    scatter_columns_,
)
from lightning_zero.plan.layout import Slot
from lightning_zero.worker.jobs import AdamOptions


def columns_of(slot: Slot) -> int:
    """How many columns a parameter has; 1 for one that is no matrix in this order of memory."""
    if len(slot.shape) < 2 or not slot.numel:
        return 1
    columns = slot.numel // slot.shape[0]
    return columns if slot.stride[0] == columns or slot.shape[0] == 1 else 1


class PieceColumns:
    """Where rows begin and end in a piece, see [Note: columns of a piece].

    Args:
        columns: Of the matrix.
        begin: First element of the piece, counted in the matrix.
        numel: Elements of the piece.
    """

    def __init__(self, columns: int, begin: int, numel: int) -> None:
        self.columns = columns
        self.first = begin % columns
        """Column of the first element."""
        self.head_numel = min(numel, -begin % columns)
        self.rows = (numel - self.head_numel) // columns
        self.tail_numel = numel - self.head_numel - self.rows * columns

    def split(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """End of a row 1-D, whole rows [rows, columns], beginning of a row 1-D; views."""
        last = self.head_numel + self.rows * self.columns
        rows = flat[self.head_numel : last].view(self.rows, self.columns)
        return flat[: self.head_numel], rows, flat[last:]

    def importance(self, flat: Tensor) -> Tensor:
        """Sum of the squares of each column of a piece of a gradient, fp64 [columns] on the CPU."""
        head, rows, tail = self.split(flat)
        found = torch.zeros(self.columns, dtype=torch.float64)
        if self.rows:
            found += column_importance(rows).to("cpu")
        for part, first in ((head, self.first), (tail, 0)):
            found[first : first + len(part)] += part.double().square().to("cpu")
        return found


class ChosenColumns:
    """Some columns of a piece.

    Args:
        place: The piece.
        indices: Of the columns, int64 [k], ascending.
        device: Where columns are packed, and where matrices may be as well as on the CPU.
    """

    def __init__(self, place: PieceColumns, indices: Tensor, device: torch.device) -> None:
        self.place = place
        self.indices = indices.cpu()
        """Of the columns, on the CPU."""
        self.is_all = len(indices) == place.columns
        in_head = (self.indices >= place.first) & (self.indices < place.first + place.head_numel)
        self._head = self.indices[in_head]
        self._tail = self.indices[self.indices < place.tail_numel]
        cpu = torch.device("cpu")
        self._on = {
            where: (
                self._head.to(where) - place.first,
                self.indices.to(where),
                self._tail.to(where),
            )
            for where in {cpu, device}
        }
        self.numel = len(self._head) + place.rows * len(self.indices) + len(self._tail)
        """Elements of all chosen columns in the piece."""

    def gather(self, flat: Tensor) -> Tensor:
        """The chosen columns of a piece 1-D, packed 1-D; a copy."""
        if self.is_all:
            return flat.detach().clone()
        on_head, on_rows, on_tail = self._on[flat.device]
        head, rows, tail = self.place.split(flat.detach())
        packed = gather_columns(rows, on_rows).flatten()
        return torch.cat((head[on_head], packed, tail[on_tail]))

    def scatter_(self, flat: Tensor, packed: Tensor) -> None:
        """Write packed columns to their places in a piece 1-D of the same dtype."""
        if self.is_all:
            flat.copy_(packed)
            return
        on_head, on_rows, on_tail = self._on[flat.device]
        head, rows, tail = self.place.split(flat.detach())
        first, middle, last = self._split(packed)
        head[on_head] = first
        scatter_columns_(rows, on_rows, middle.view(self.place.rows, len(self.indices)))
        tail[on_tail] = last

    def _split(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [len(self._head), self.place.rows * len(self.indices), len(self._tail)]
        head, rows, tail = torch.split(packed, sizes)
        return head, rows, tail

    def step_(self, states: AdamStates, grad: Tensor, counts: Tensor, options: AdamOptions) -> None:
        """Step packed columns by Adam.

        Args:
            states: Packed weights, averages and averages of squares; changed.
            grad: Packed, of any dtype.
            counts: Steps of all columns of the matrix, this one included, int64 [columns].
            options: Of the step.
        """
        own = counts[self.indices]
        if is_uniform(own):
            step_uniform_(states, grad, float(own[0]) if len(own) else 1.0, options)
            return
        parts = [self._split(state) for state in (*states, grad)]
        steps = counts[self._head], own, counts[self._tail]
        for master, exp_avg, exp_avg_sq, of_part, count in zip(*parts, steps, strict=True):
            if master.numel():
                adam_columns_step_(master, exp_avg, exp_avg_sq, of_part, count, **options)


class AdamStates(NamedTuple):
    """What Adam changes in a step, 1-D each."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def step_uniform_(
    states: AdamStates,
    grad: Tensor,
    count: float,
    options: AdamOptions,
    copy: Tensor | None = None,
) -> None:
    """Step elements that have all taken as many steps; see :func:`.ops.adam_step_`."""
    master, exp_avg, exp_avg_sq = states
    copies = [] if copy is None else [copy]
    adam_step_([master], [exp_avg], [exp_avg_sq], [grad], [count], copies=copies, **options)


def is_uniform(counts: Tensor) -> bool:
    """Whether all columns have taken as many steps."""
    return not len(counts) or bool((counts == counts[0]).all())


def top_columns(importance: Tensor, count: int) -> Tensor:
    """The most important columns, the same on all ranks.

    Args:
        importance: [columns], the same on all ranks.
        count: How many.

    Returns:
        Their indices, int64 [count], ascending. Of equal ones the first.
    """
    order = torch.argsort(importance.cpu(), descending=True, stable=True)
    return order[:count].sort().values


def is_finite(importance: Tensor) -> bool:
    """Whether a measure tells anything."""
    return math.isfinite(float(importance.sum()))
