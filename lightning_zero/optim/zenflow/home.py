"""Gradients on the host, of which the important columns stay on the device as well.

[Note: picked on the way]
Where the device has memory of its own, the important columns of a gradient are picked from the
buffer in which its reduction has ended, before that leaves for the host: they need not come back.
What is picked holds as long as nobody has changed the gradient on the host.
"""

from __future__ import annotations

from torch import Tensor

from lightning_zero.grads.homes import HostHome, Landing, Reduced
from lightning_zero.memory.link import HostLink, Transfer
from lightning_zero.optim.zenflow.columns import ChosenColumns
from lightning_zero.plan.layout import Piece


class PickingHome(HostHome):
    """Picks columns on the way, see [Note: picked on the way].

    Args:
        link: The way to the host.
        keeps_factors: As for the base class.
    """

    def __init__(self, link: HostLink, keeps_factors: bool) -> None:
        super().__init__(link, keeps_factors)
        self._is_picking = not link.is_within_memory
        self._chosen: dict[int, tuple[Piece, ChosenColumns]] = {}
        self._picked: dict[int, Tensor] = {}
        self._version = -1

    def choose(self, piece: Piece, chosen: ChosenColumns) -> None:
        """Pick these columns from the next gradient on."""
        self._chosen[piece.slot] = piece, chosen
        self._picked.pop(piece.slot, None)

    def picked(self, bucket: Reduced, slot: int) -> Tensor | None:
        """Columns of the gradient as it is on the host now; None where they are not known.

        Args:
            bucket: The bucket.
            slot: Of a piece of this rank.
        """
        is_same = self._version == bucket.shard_grad._version
        return self._picked.get(slot) if is_same else None

    def take(self, bucket: Reduced, landing: Landing) -> Transfer | None:
        """See the base class."""
        for slot, (piece, chosen) in self._chosen.items() if self._is_picking else ():
            part = landing.out[piece.shard_offset : piece.shard_offset + piece.numel]
            new, old = chosen.gather(part), self._picked.get(slot)
            if not landing.joins:
                self._picked[slot] = new.to(bucket.shard_dtype)
            elif old is not None:
                old.add_(new)
        return super().take(bucket, landing)

    def settle(self, bucket: Reduced) -> None:
        """See the base class."""
        is_new = bool(self._leaving)
        super().settle(bucket)
        if is_new:
            self._version = bucket.shard_grad._version

    def drop(self) -> None:
        """See the base class."""
        super().drop()
        self._picked.clear()

    def before_accumulation(self, bucket: Reduced, kept: set[int]) -> None:
        """See the base class."""
        is_same = self._version == bucket.shard_grad._version
        for slot in list(self._picked):
            if not is_same or slot in self.factors and slot in kept:
                del self._picked[slot]  # it is about to be multiplied, or was changed
            elif slot not in kept:
                self._picked[slot].zero_()
        super().before_accumulation(bucket, kept)
