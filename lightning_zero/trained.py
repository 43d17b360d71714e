"""This rank's pieces of what is trained, for those who average or exchange them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_zero.held import HeldParameters
from lightning_zero.optim.pieces import MasterPiece, PieceTable
from lightning_zero.params.bucket import ParameterBucket
from lightning_zero.prefetch.coordinator import ParameterCoordinator


class TrainedPieces:
    """Reads and overwrites the pieces of all trained parameters between two steps.

    Args:
        table: This rank's pieces.
        coordinator: Guards changes of shards.
        held: Knows what users hold whole.
        publish: Has resident buckets brought together again.
    """

    def __init__(
        self,
        table: PieceTable,
        coordinator: ParameterCoordinator,
        held: HeldParameters,
        publish: Callable[[Sequence[ParameterBucket]], None],
    ) -> None:
        self._table = table
        self._coordinator = coordinator
        self._held = held
        self._publish = publish

    def pieces(self) -> dict[nn.Parameter, MasterPiece]:
        """This rank's pieces as they are now, by their parameters."""
        return {piece.parameter: piece for piece in self._table.pieces()}

    def values(self) -> dict[nn.Parameter, Tensor]:
        """What the optimizer steps: the fp32 master where there is one. Views, not copies."""
        with torch.no_grad():
            for master in self._table.masters:
                master.refresh()
        return {piece.parameter: piece.tensor.detach() for piece in self._table.pieces()}

    def shown(self) -> dict[nn.Parameter, Tensor]:
        """What the model computes with, in the dtype of the parameters. Views, not copies."""
        return {p.parameter: p.view(p.master.parameters.shard) for p in self._table.pieces()}

    def show(self, values: Mapping[nn.Parameter, Tensor], reason: str) -> None:
        """Have the model compute with other values; masters stay. To be called on all ranks.

        Args:
            values: A tensor of the shape of each piece; pieces of others stay.
            reason: What it is for, the same on all ranks.

        Raises:
            RuntimeError: Somebody holds parameters whole.
        """
        with self._overwriting(reason):
            for parameter, shown in self.shown().items():
                if parameter in values:
                    shown.copy_(values[parameter])

    def keep(self, values: Mapping[nn.Parameter, Tensor], reason: str) -> None:
        """Train on from other values. To be called on all ranks.

        Args:
            values: See :meth:`show`.
            reason: See :meth:`show`.

        Raises:
            RuntimeError: Somebody holds parameters whole.
        """
        with self._overwriting(reason):
            for parameter, value in self.values().items():
                if parameter in values:
                    value.copy_(values[parameter])
            for master in self._table.masters:
                master.store()
                master.end_step()
                master.parameters.times_kept += 1

    @contextmanager
    def _overwriting(self, reason: str) -> Iterator[None]:
        """Inside, shards may be changed; after it the new ones are on their way."""
        self._held.check_left(reason)
        self._coordinator.visits.settle()
        self._coordinator.release_all()
        buckets = [master.parameters for master in self._table.masters]
        for bucket in buckets:
            self._coordinator.before_update(bucket)
        with self._coordinator.residency.update(reason), torch.no_grad():
            yield
            for bucket in buckets:
                bucket.note_update()
        self._publish(buckets)
