"""The step of one bucket's pieces, in as few passes over memory as there can be.

[Note: one pass]
On the host, memory decides how long a step takes. Adam with gradients of 16 bit, with gradients
that are still to be scaled, or with values to be sent in 16 bit, is one pass of our own op instead
of three or four. Everything else is stepped by a twin of the user's optimizer, in torch's fused
form where there is one and the user has not chosen another.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.ops import adam_step_
from lightning_zero.ops.libraries import is_native
from lightning_zero.optim.adam_options import adam_options
from lightning_zero.optim.apart import CHOICES, ApartSteps
from lightning_zero.optim.masters import HostMaster, MasterShard
from lightning_zero.optim.pieces import MasterPiece, PieceTable

State = MutableMapping[str, Any]


class Group(NamedTuple):
    """Pieces of one bucket that belong to one group of an optimizer."""

    number: int
    """Place of the group."""

    pieces: list[MasterPiece]
    """Those that have a gradient."""


class Bound(NamedTuple):
    """A piece, with the memory in which it is stepped."""

    piece: MasterPiece
    weight: Tensor
    """Of the shape of the piece, in the dtype of its master."""
    state: State
    """The optimizer's state of it, empty before its first step."""


def grouped(
    optimizer: Optimizer, table: PieceTable, used: frozenset[nn.Parameter]
) -> dict[MasterShard, list[Group]]:
    """What an optimizer is about to step, by bucket.

    Args:
        optimizer: The user's optimizer, which names parameters now.
        table: This rank's pieces.
        used: Parameters that some rank has a gradient for.
    """
    found: dict[MasterShard, list[Group]] = {}
    for number, group in enumerate(optimizer.param_groups):
        by_master: dict[MasterShard, list[MasterPiece]] = {}
        for parameter in group["params"]:
            piece = table.piece(parameter)
            if piece is not None and piece.has_grad(used):
                by_master.setdefault(piece.master, []).append(piece)
        for master, pieces in by_master.items():
            found.setdefault(master, []).append(Group(number, pieces))
    return found


def bound_in_place(optimizer: Optimizer, group: Group) -> list[Bound]:
    """The pieces of a group, stepped where they are. The optimizer names pieces now."""
    return [Bound(p, p.tensor, optimizer.state[p.tensor]) for p in group.pieces]


def step_in_place(
    optimizer: Optimizer, apart: ApartSteps, master: MasterShard, groups: Sequence[Group]
) -> None:
    """Step pieces of one bucket where they are, and send the new values on their way.

    Args:
        optimizer: The user's optimizer, which names pieces now.
        apart: Its twin.
        master: The bucket's master.
        groups: What is to be stepped.
    """
    bounds = [bound_in_place(optimizer, group) for group in groups]
    if isinstance(master, HostMaster):
        master.settle()
        copy = master.room_for_copy()
        is_copied = step_on_host(optimizer, apart, master, groups, bounds, copy)
        master.store(copy, is_copied)
    else:
        for group, of_group in zip(groups, bounds, strict=True):
            _step_by_twin(apart, optimizer.param_groups[group.number], of_group)
        master.store()
    for group in groups:
        for piece in group.pieces:
            if not optimizer.state[piece.tensor]:  # it has none
                del optimizer.state[piece.tensor]


def step_on_host(
    optimizer: Optimizer,
    apart: ApartSteps,
    master: HostMaster,
    groups: Sequence[Group],
    bounds: Sequence[Sequence[Bound]],
    copy: Tensor | None,
) -> bool:
    """Step pieces of one bucket in host memory.

    Args:
        optimizer: The user's optimizer.
        apart: Its twin.
        master: The bucket's master.
        groups: What is to be stepped.
        bounds: The same, with its memory.
        copy: 1-D [S], takes the new values in the dtype of the parameters; None for no copy.

    Returns:
        Whether all that is stepped has been written to ``copy``.
    """
    stepped = sum(len(group.pieces) for group in groups)
    if stepped < len(master.gradients.pieces) and copy is not master.parameters.shard:
        copy = None  # it would be sent with what nobody has written to it
    is_copied = copy is not None
    for group, of_group in zip(groups, bounds, strict=True):
        options = optimizer.param_groups[group.number]
        if _is_adam(optimizer, options, of_group) and _gains(master):
            _step_by_op(optimizer, options, master, of_group, copy)
        else:
            _step_by_twin(apart, options, of_group)
            is_copied = False
    return is_copied


def _step_by_twin(apart: ApartSteps, options: Mapping[str, Any], bounds: Sequence[Bound]) -> None:
    for bound in bounds:
        bound.weight.grad = bound.piece.grad
    apart.step(options, [(bound.weight, bound.state) for bound in bounds])
    for bound in bounds:
        bound.weight.grad = None


def _is_adam(optimizer: Optimizer, options: Mapping[str, Any], bounds: Sequence[Bound]) -> bool:
    """Whether this is plain Adam or AdamW, in a form that the user has left to us."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or options["amsgrad"]:
        return False
    if any(options.get(choice) for choice in CHOICES if choice != "fused"):
        return False
    if options.get("fused") is False or options.get("foreach") is False:
        return False
    return all(_is_plain(bound) for bound in bounds)


def _is_plain(bound: Bound) -> bool:
    averages = [bound.state[key] for key in ("exp_avg", "exp_avg_sq") if key in bound.state]
    return bound.weight.dtype == torch.float32 and all(
        average.dtype == torch.float32 and average.stride() == bound.weight.stride()
        for average in averages
    )


def _gains(master: HostMaster) -> bool:
    """Whether one pass does more than torch's fused step would, see [Note: one pass]."""
    does_more = master.has_copy or bool(master.factors) or not master.has_plain_grad
    return does_more and is_native(master.tensor.device)


def _step_by_op(
    optimizer: Optimizer,
    options: Mapping[str, Any],
    master: HostMaster,
    bounds: Sequence[Bound],
    copy: Tensor | None,
) -> None:
    for bound in bounds:
        if not bound.state:
            bound.state["step"] = torch.tensor(0.0)
            bound.state["exp_avg"] = torch.zeros_like(bound.weight)
            bound.state["exp_avg_sq"] = torch.zeros_like(bound.weight)
        bound.state["step"] += 1
    by_scale: dict[float, list[Bound]] = {}
    for bound in bounds:
        factor = master.factors.get(bound.piece.piece.slot)
        by_scale.setdefault(1.0 if factor is None else float(factor), []).append(bound)
    for scale, members in by_scale.items():
        adam_step_(
            [bound.weight.detach() for bound in members],
            [bound.state["exp_avg"] for bound in members],
            [bound.state["exp_avg_sq"] for bound in members],
            [bound.piece.view(master.grad_unscaled) for bound in members],
            [float(bound.state["step"]) for bound in members],
            copies=[] if copy is None else [bound.piece.view(copy) for bound in members],
            **adam_options(optimizer, options, scale),
        )
