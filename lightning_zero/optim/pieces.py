"""Stepping pieces with the user's optimizer.

The optimizer object stays the user's, and its ``param_groups`` keep naming the user's parameters:
schedulers, monitors and finetuning callbacks look at them. Only around the inner step are the
groups swapped to this rank's pieces of the master shards, and back. Between steps
``optimizer.state`` is keyed by the user's parameters and holds this rank's pieces of the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.grads.bucket import GradientBucket
from lightning_zero.optim.masters import MasterShard
from lightning_zero.plan.layout import Piece, Slot


class MasterPiece:
    """What the optimizer sees of one parameter on this rank.

    Args:
        parameter: The user's parameter.
        master: Master shard of its bucket.
        slot: Place of the parameter in the bucket.
        piece: Overlap with this rank's shard.
    """

    def __init__(
        self, parameter: nn.Parameter, master: MasterShard, slot: Slot, piece: Piece
    ) -> None:
        self.parameter = parameter
        self.master = master
        self.slot = slot
        self.piece = piece
        self.is_whole = piece.numel == slot.numel
        self.tensor = nn.Parameter(self.view(master.tensor.detach()))

    def release(self) -> None:
        """Keep the shape of the piece, but not its master; a more precise one stays."""
        if not self.master.has_copy:
            self.tensor = nn.Parameter(torch.empty_like(self.tensor, device="meta"))

    def has_grad(self, used: frozenset[nn.Parameter]) -> bool:
        """Whether some rank used the parameter, and nobody has cleared its gradient since."""
        if self.parameter not in used:
            return False
        return not self.master.gradients.is_cleared(self.piece.slot)

    @property
    def grad(self) -> Tensor:
        """Gradient of the piece in the dtype of its master, a view."""
        return self.view(self.master.step_grad)

    @property
    def grad_as_is(self) -> Tensor:
        """Gradient of the piece to be read, in the dtype it has: no copy is made."""
        return self.view(self.master.grad_as_is)

    def scale_grad(self, factor: Tensor) -> None:
        """Multiply the gradient.

        Args:
            factor: 0-d fp32.
        """
        self.master.scale_grad(self.piece, factor)

    def view(self, shard: Tensor) -> Tensor:
        """The piece of a shard: 1-D, or of the true shape if the whole parameter is here."""
        offset = self.piece.shard_offset
        if self.is_whole:
            begin = shard.storage_offset() + offset
            return shard.as_strided(self.slot.shape, self.slot.stride, begin)
        return shard[offset : offset + self.piece.numel]


class PieceTable:
    """This rank's pieces of all trainable parameters."""

    def __init__(self, masters: Sequence[MasterShard]) -> None:
        self.masters: list[MasterShard] = []
        self._pieces: dict[nn.Parameter, MasterPiece] = {}
        self._master_of: dict[nn.Parameter, MasterShard] = {}
        self.place: dict[nn.Parameter, tuple[GradientBucket, int]] = {}
        """Bucket and slot of every trainable parameter."""
        self.add(masters)

    def add(self, masters: Sequence[MasterShard]) -> None:
        """More master shards; to be called between steps."""
        self.masters += masters
        for master in masters:
            layout, parameters = master.parameters.layout, master.parameters.parameters
            for slot, parameter in enumerate(parameters):
                self.place[parameter] = master.gradients, slot
                self._master_of[parameter] = master
            for piece in master.parameters.pieces():
                parameter = parameters[piece.slot]
                slot_plan = layout.slots[piece.slot]
                self._pieces[parameter] = MasterPiece(parameter, master, slot_plan, piece)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self.place

    def release(self) -> None:
        """Free what belongs to the parameters, once they are whole again."""
        for master in self.masters:
            master.bring_together()
        for piece in self._pieces.values():
            piece.release()
        for master in self.masters:
            master.release()

    def pieces(self) -> Iterable[MasterPiece]:
        """All pieces of this rank."""
        return self._pieces.values()

    def piece(self, parameter: nn.Parameter) -> MasterPiece | None:
        """This rank's piece of a parameter; None if there is none."""
        return self._pieces.get(parameter)

    def master_of(self, parameter: nn.Parameter) -> MasterShard | None:
        """Master shard of a parameter's bucket; None for one that is not trained."""
        return self._master_of.get(parameter)

    def pieces_of(self, optimizer: Optimizer) -> Iterator[MasterPiece]:
        """This rank's pieces of an optimizer's parameters."""
        for parameter in parameters_of(optimizer):
            piece = self._pieces.get(parameter)
            if piece is not None:
                yield piece

    def masters_of(self, optimizer: Optimizer) -> list[MasterShard]:
        """Master shards of the buckets that hold parameters of an optimizer, in model order."""
        wanted = {self._master_of[p] for p in parameters_of(optimizer) if p in self._master_of}
        return [master for master in self.masters if master in wanted]

    @contextmanager
    def swapped(self, optimizer: Optimizer, used: frozenset[nn.Parameter]) -> Iterator[None]:
        """Let an optimizer see pieces instead of parameters while inside.

        Args:
            optimizer: The user's optimizer.
            used: Parameters that some rank has a gradient for; pieces of others get grad None.
        """
        parameters_by_group = [group["params"] for group in optimizer.param_groups]
        state = optimizer.state
        swapped: list[MasterPiece] = []
        for group, parameters in zip(optimizer.param_groups, parameters_by_group, strict=True):
            here = [piece for p in parameters if (piece := self._pieces.get(p)) is not None]
            swapped.extend(here)
            group["params"] = [piece.tensor for piece in here]
        for piece in swapped:
            piece.tensor.grad = piece.grad if piece.has_grad(used) else None
            if piece.parameter in state:
                state[piece.tensor] = state.pop(piece.parameter)
        try:
            yield
        finally:
            # Looked up again: load_state_dict replaces groups and state by new objects.
            for group, parameters in zip(optimizer.param_groups, parameters_by_group, strict=True):
                group["params"] = parameters
            state = optimizer.state
            for piece in swapped:
                piece.tensor.grad = None
                if piece.tensor in state:
                    state[piece.parameter] = state.pop(piece.tensor)


def parameters_of(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    """All parameters of an optimizer, in order of its groups."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
