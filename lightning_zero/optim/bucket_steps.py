"""The step of one bucket's pieces, in as few passes over memory as there can be."""

from __future__ import annotations

from typing import NamedTuple

from torch.optim import Optimizer

from lightning_zero.optim.apart import ApartSteps
from lightning_zero.optim.masters import MasterShard
from lightning_zero.optim.pieces import MasterPiece


class Group(NamedTuple):
    """Pieces of one bucket that belong to one group of an optimizer."""

    number: int
    """Place of the group."""

    pieces: list[MasterPiece]
    """Those that have a gradient."""


def step_bucket(
    optimizer: Optimizer, apart: ApartSteps, master: MasterShard, groups: list[Group]
) -> None:
    """Step pieces of one bucket, and send the new values on their way.

    Args:
        optimizer: The user's optimizer, which names pieces now.
        apart: Its twin.
        master: The bucket's master.
        groups: What is to be stepped.
    """
    for group in groups:
        for piece in group.pieces:
            piece.tensor.grad = piece.grad
        options = optimizer.param_groups[group.number]
        apart.step(options, [piece.tensor for piece in group.pieces])
    master.store()
