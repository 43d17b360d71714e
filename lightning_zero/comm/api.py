"""What the engine asks of a backend.

Shape legend: N padded elements of a bucket, W ranks of the group, S = N // W, r this rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from torch import Tensor


class Handle(Protocol):
    """Result of an asynchronous call."""

    def wait(self, timeout: timedelta | None = None) -> None:
        """Block the caller (CPU) or the current stream (accelerator) until the call is done."""


class Done:
    """Handle of a call that was complete when it returned."""

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return at once."""


class Gathers(Protocol):
    """Whatever brings the shards of a bucket together."""

    rank: int
    world_size: int
    needs_own: bool
    """Whether the own part of a flat tensor is read when its gather begins, not when it ends."""

    def all_gather(self, flat: Tensor, shard: Tensor, key: int) -> Handle:
        """Fill a flat tensor 1-D [N] with the shards 1-D [S] of all ranks, in place."""


class Collectives(ABC):
    """Collectives of one group of ranks.

    ``key`` tells the calls that may be in flight together apart: all ranks use the same key for the
    same transfer; transfers of one key meet in the order of their calls. ``advance``, called by all
    ranks together, begins a new generation: no transfer is taken for one of another generation.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.needs_own = True
        self.is_host_side = True
        """Whether transfers go through host memory, so that a thread can answer as well."""
        self.sent_nbytes = 0
        """Bytes this rank has sent: exact for point-to-point transfers, else the ring's theory."""

    @abstractmethod
    def all_gather(self, flat: Tensor, shard: Tensor, key: int) -> Handle:
        """Fill a flat tensor with the shards of all ranks, in place.

        Args:
            flat: 1-D [N]. Its own part ``flat[r * S:(r + 1) * S]`` already holds the shard.
            shard: 1-D [S], this rank's shard; may be a view of ``flat``. Not written to until the
                handle has been waited for.
            key: See the class.
        """

    @abstractmethod
    def scratch_numel(self, flat_numel: int) -> int:
        """Elements of scratch memory that a ``reduce_scatter`` of [N] needs."""

    @abstractmethod
    def reduce_scatter(
        self, flat: Tensor, out: Tensor, accumulate: bool, key: int, scratch: Tensor
    ) -> Handle:
        """Sum a flat tensor over ranks; this rank receives its own shard of the sum.

        Args:
            flat: 1-D [N], summand of this rank; not written to until the handle has been waited
            for.
            out: 1-D [S], receives the sum when the handle is waited for; any floating dtype.
            accumulate: Add to ``out`` instead of overwriting it.
            key: See the class.
            scratch: 1-D [``scratch_numel(N)``], dtype of ``flat``; free again after the wait.
        """

    @abstractmethod
    def all_reduce(self, flat: Tensor) -> Handle:
        """Sum a 1-D tensor over ranks, in place on all of them."""

    @abstractmethod
    def agree(self, values: Tensor) -> None:
        """Sum a small 1-D float64 tensor over ranks, in place, before returning."""

    @abstractmethod
    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Overwrite tensors of any shape and dtype with those of one rank.

        Args:
            tensors: Of the same shapes and dtypes on all ranks.
            source: The rank whose values all get.
        """

    @abstractmethod
    def gather(self, shard: Tensor, key: int) -> Tensor | None:
        """Bring one 1-D [S] tensor per rank to rank 0, end to end 1-D [N]; None on the others."""

    @abstractmethod
    def gather_objects(self, value: Any) -> list[Any] | None:
        """Bring one picklable object per rank to rank 0; None on the others."""

    @abstractmethod
    def exchange_objects(self, value: Any, what: str = "") -> list[Any]:
        """Bring one small picklable object per rank to all ranks.

        Args:
            value: This rank's object.
            what: What the ranks meet for, for the error if one does not come.
        """

    def end(self) -> None:  # noqa: B027  (one rank has nothing to end)
        """End the process group; to be called on all ranks, and nothing else after it."""

    @abstractmethod
    def advance(self) -> None:
        """Begin a new generation of keys."""
