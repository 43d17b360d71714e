"""Reads of the shards of other ranks: their interface, and what needs no messages of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from lightning_zero.comm.api import Collectives, Done, Handle


class ShardReads(ABC):
    """Reads of shards of all ranks, and the fence between two versions of them."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.needs_own = False
        self.sent_nbytes = 0
        """Bytes this rank has sent to ranks that have read from it."""

    @abstractmethod
    def open(self, shards: Mapping[int, Tensor]) -> None:
        """Offer this rank's shards, by the key of their bucket; for all ranks to call."""

    def extend(self, shards: Mapping[int, Tensor]) -> None:  # noqa: B027  (few have to know)
        """Offer more shards; for all ranks to call, inside of an update."""

    @abstractmethod
    def all_gather(self, flat: Tensor, shard: Tensor, key: int) -> Handle:
        """Fill a flat tensor with the shards of all ranks, by reading them.

        Args:
            flat: 1-D [N]. Its own part already holds the shard.
            shard: 1-D [S], this rank's shard.
            key: Key under which the shards were offered.
        """

    @abstractmethod
    def fence(self, reason: str, note: int = 0) -> list[int]:
        """Meet all ranks; after it no rank reads the current version any more.

        Args:
            reason: What is to follow, the same on all ranks.
            note: A number for the others to see.

        Returns:
            The notes of all ranks, in order.

        Raises:
            RuntimeError: A rank did not come in time, or came for another reason.
        """

    @abstractmethod
    def publish(self) -> None:
        """The shards have their new values."""

    @abstractmethod
    def close(self) -> None:
        """Withdraw the shards, once no rank reads them any more; for all ranks to call."""

    @abstractmethod
    def abandon(self) -> None:
        """Let go of the shards after an error, without the other ranks; no session comes after.

        The others are answered as long as somebody keeps the shards, so that they see an error of
        their own, if they make the same.
        """

    def end(self) -> None:  # noqa: B027  (only some have something to end)
        """End what serves other ranks; to be called on all ranks, and nothing else after it."""

    @contextmanager
    def update(self, reason: str, note: int = 0) -> Iterator[list[int]]:
        """Inside, shards may be changed; for all ranks to enter. Yields the notes of all ranks."""
        notes = self.fence(reason, note)
        yield notes
        self.publish()


class OwnReads(ShardReads):
    """One rank: its shard is the whole."""

    def __init__(self) -> None:
        super().__init__(rank=0, world_size=1)

    def open(self, shards: Mapping[int, Tensor]) -> None:
        """See the base class."""

    def all_gather(self, flat: Tensor, shard: Tensor, key: int) -> Handle:
        """See the base class."""
        return Done()

    def fence(self, reason: str, note: int = 0) -> list[int]:
        """See the base class."""
        return [note]

    def publish(self) -> None:
        """See the base class."""

    def close(self) -> None:
        """See the base class."""

    def abandon(self) -> None:
        """See the base class."""


class CollectiveReads(ShardReads):
    """Gathers that all ranks call together, for backends without one-sided reads.

    Args:
        collectives: Does the gathers.
        control: Compares notes.
    """

    def __init__(self, collectives: Collectives, control: Collectives) -> None:
        super().__init__(collectives.rank, collectives.world_size)
        self._collectives, self._control = collectives, control
        self.needs_own = True
        self._note = 0

    def open(self, shards: Mapping[int, Tensor]) -> None:
        """See the base class."""

    def all_gather(self, flat: Tensor, shard: Tensor, key: int) -> Handle:
        """See the base class."""
        return self._collectives.all_gather(flat, shard, key)

    def fence(self, reason: str, note: int = 0) -> list[int]:
        """Compare a note that has changed; that all ranks are here the gathers themselves tell."""
        if note == self._note:
            return [note] * self.world_size
        self._note = note
        return [int(theirs) for theirs in self._control.exchange_objects(note)]

    def publish(self) -> None:
        """See the base class."""

    def close(self) -> None:
        """See the base class."""

    def abandon(self) -> None:
        """See the base class."""
