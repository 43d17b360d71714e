"""Unsharded copies of parameters, and what the owners of shards have, put together plainly.

[Note: independent]
Nothing here goes through the gathers and reductions that are checked: whole tensors come by one
plain all-reduce, of zeros but for what a rank owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_zero.comm import Collectives
from lightning_zero.engine import ZeroEngine
from lightning_zero.optim.pieces import MasterPiece, PieceTable
from lightning_zero.params.bucket import ParameterBucket
from lightning_zero.params.dense import flatten
from lightning_zero.plan.layout import Slot

COPIES = 6
"""Tensors per parameter: weight, what modules see, two of gradients, two of optimizer state."""


class Copy:
    """One parameter of the replica.

    Args:
        parameter: The user's parameter.
        bucket: The bucket that it lies in.
        slot: Its place there.
        is_trained: Whether it has a master shard.
    """

    def __init__(
        self, parameter: nn.Parameter, bucket: ParameterBucket, slot: Slot, is_trained: bool
    ) -> None:
        self.parameter = parameter
        self.slot = slot
        self.index = bucket.layout.index
        self.is_trained = is_trained
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        """Whole parameter of the replica, in its true shape and the dtype of the master."""
        self.seen = torch.empty(0)
        """What modules are to see, 1-D in dense order, in the dtype of the parameter."""

    @property
    def name(self) -> str:
        """Name of the parameter."""
        return self.slot.fqn

    def shaped(self, flat: Tensor) -> Tensor:
        """A 1-D tensor in the true shape, as a view."""
        return flat.as_strided(self.slot.shape, self.slot.stride, flat.storage_offset())

    def flat(self, tensor: Tensor) -> Tensor:
        """A tensor of the true shape, 1-D in dense order."""
        return flatten(tensor, self.slot.stride)

    def begin(self, values: Tensor) -> None:
        """Take the values that training begins with, 1-D in the dtype of the master."""
        self.weight = nn.Parameter(self.shaped(values.clone()), requires_grad=False)
        self.seen = values.to(self.parameter.dtype, copy=True)

    def follow(self, values: Tensor) -> None:
        """Take what a user has written; the rest of the master weights stays as it is.

        Args:
            values: 1-D, in the dtype of the parameter or of the master.
        """
        self.seen = values.to(self.parameter.dtype, copy=True)
        weight = self.flat(self.weight)
        is_written = values != weight.to(values.dtype)
        weight.copy_(torch.where(is_written, values.to(weight.dtype), weight))

    def values(self) -> Tensor:
        """What stands in the parameter now, in its true shape."""
        return self.parameter.detach()


def choose(engine: ZeroEngine, max_nbytes: int) -> list[Copy]:
    """The parameters to watch: in model order as many as fit, and at least one.

    Args:
        engine: Has the parameters.
        max_nbytes: Most memory of a rank for all tensors of the replica.
    """
    chosen: list[Copy] = []
    nbytes = 0
    for bucket, slot, parameter in partitioned(engine):
        nbytes += COPIES * parameter.numel() * max(parameter.element_size(), 4)
        if chosen and nbytes > max_nbytes:
            break
        chosen.append(Copy(parameter, bucket, slot, parameter in engine.table))
    return chosen


def partitioned(engine: ZeroEngine) -> Iterable[tuple[ParameterBucket, Slot, nn.Parameter]]:
    """All parameters with elements that lie in buckets, in model order."""
    for bucket in engine.buckets:
        for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
            if parameter.numel():
                yield bucket, slot, parameter


class Owners:
    """What the owners of shards have, whole on all ranks; every call is one of all ranks.

    Args:
        table: This rank's pieces.
        collectives: Group over which the ranks meet.
    """

    def __init__(self, table: PieceTable, collectives: Collectives) -> None:
        self._table = table
        self._collectives = collectives

    def whole(
        self, copies: Sequence[Copy], of_piece: Callable[[MasterPiece], Tensor | None]
    ) -> Mapping[Copy, Tensor]:
        """One tensor of each parameter, 1-D in dense order, in the dtype of the master.

        Args:
            copies: Parameters that are trained.
            of_piece: What this rank has for a piece, of its shape; None stands for zeros.

        Source:
            See [Note: independent].
        """
        kinds: dict[tuple[torch.dtype, bool], list[Copy]] = {}
        for copy in copies:
            master = self._table.master_of(copy.parameter)
            if master is None:
                raise AssertionError(f"{copy.name} is not trained")
            is_shared = master.parameters.layout.world_size > 1
            kinds.setdefault((master.tensor.dtype, is_shared), []).append(copy)
        found: dict[Copy, Tensor] = {}
        for (dtype, is_shared), alike in kinds.items():
            flat, parts = _joined(alike, dtype)
            for copy, part in zip(alike, parts, strict=True):
                self._put(copy, part, of_piece)
            if is_shared:
                self._collectives.all_reduce(flat).wait()
            found.update(zip(alike, parts, strict=True))
        return found

    def summed(self, tensors: Mapping[Copy, Tensor | None], dtype: torch.dtype) -> list[Tensor]:
        """Sums over all ranks, 1-D in dense order.

        Args:
            tensors: Of true shapes; None stands for zeros.
            dtype: In which they travel, are divided by the number of ranks, and summed.
        """
        flat, parts = _joined(list(tensors), dtype)
        for (copy, tensor), part in zip(tensors.items(), parts, strict=True):
            if tensor is not None:
                torch.mul(copy.flat(tensor), 1.0 / self._collectives.world_size, out=part)
        self._collectives.all_reduce(flat).wait()
        return parts

    def _put(
        self, copy: Copy, part: Tensor, of_piece: Callable[[MasterPiece], Tensor | None]
    ) -> None:
        piece = self._table.piece(copy.parameter)
        own = None if piece is None else of_piece(piece)
        if piece is None or own is None:
            return
        begin = piece.piece.param_offset
        dense = copy.flat(own) if piece.is_whole else own
        part[begin : begin + piece.piece.numel].copy_(dense)


def _joined(copies: Sequence[Copy], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Zeros for parameters end to end, and each one's part."""
    sizes = [copy.slot.numel for copy in copies]
    flat = torch.zeros(sum(sizes), dtype=dtype, device=copies[0].parameter.device)
    return flat, list(torch.split(flat, sizes))
