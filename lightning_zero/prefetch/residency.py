"""Which buckets are whole now, never more than the bound allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from lightning_zero.comm import ShardReads
from lightning_zero.observe.recorder import SILENT, Recorder, Span
from lightning_zero.params.bucket import ParameterBucket, ParamStatus
from lightning_zero.params.dense import fingerprint


class Residency:
    """Brings buckets in and gives them back.

    Args:
        buckets: All buckets in model order, resident ones included.
        shards: Brings shards together, and guards changes of them.
        max_live_numel: Most elements of full buckets at any time; None for no bound.
        recorder: Told of each transfer.

    Raises:
        ValueError: A bucket alone is larger than the bound.
    """

    def __init__(
        self,
        buckets: Sequence[ParameterBucket],
        shards: ShardReads,
        max_live_numel: int | None = None,
        recorder: Recorder = SILENT,
    ) -> None:
        self.buckets: dict[int, ParameterBucket] = {}
        self.shards = shards
        self.max_live_numel = max_live_numel
        self._recorder = recorder
        self._spans: dict[int, Span] = {}
        self.by_storage: dict[int, ParameterBucket] = {}
        """Buckets that come and go, by the identity of their storage."""
        self.live_numel = 0
        """Elements of buckets that are whole or on their way, resident ones included."""
        self.add(buckets)

    def add(self, buckets: Sequence[ParameterBucket]) -> None:
        """More buckets.

        Raises:
            ValueError: A bucket alone is larger than the bound.
        """
        for bucket in buckets:
            self.buckets[bucket.layout.index] = bucket
            if bucket.status is not ParamStatus.NOT_AVAILABLE:
                self.live_numel += bucket.layout.padded_numel
            if not bucket.is_resident:
                self.by_storage[bucket.storage_key()] = bucket
        self._check_bound()

    def _check_bound(self) -> None:
        every = self.buckets.values()
        resident_numel = sum(b.layout.padded_numel for b in every if b.is_resident)
        coming = [bucket.layout.padded_numel for bucket in every if not bucket.is_resident]
        largest_numel = max(coming, default=0)
        max_live_numel = self.max_live_numel
        if max_live_numel is not None and resident_numel + largest_numel > max_live_numel:
            raise ValueError(
                f"max_live_numel={max_live_numel} is less than the largest bucket"
                f" ({largest_numel} elements) and the parameters that stay ({resident_numel}) need:"
                f" {resident_numel + largest_numel - max_live_numel} elements more are needed. Set"
                " a smaller bucket_numel, or a larger max_live_numel."
            )

    def room_numel(self) -> float:
        """Elements that may still be brought in."""
        return (
            float("inf") if self.max_live_numel is None else self.max_live_numel - self.live_numel
        )

    def make_room(
        self,
        bucket: ParameterBucket,
        candidates: Iterable[ParameterBucket],
        next_use: Callable[[int], int | None],
    ) -> None:
        """Give back others until a bucket fits, the one with the farthest next use first.

        Args:
            bucket: What is needed.
            candidates: What nobody uses now.
            next_use: Place of the next use of a bucket in the trace; None if it is not known.

        Raises:
            RuntimeError: All others are in use.
        """
        needed_numel = bucket.layout.padded_numel
        if self.room_numel() >= needed_numel:
            return

        def distance(other: ParameterBucket) -> float:
            place = next_use(other.layout.index)
            return float("inf") if place is None else place

        for other in sorted(candidates, key=distance, reverse=True):
            if other.status is not ParamStatus.NOT_AVAILABLE:
                self.give_back(other)
            if self.room_numel() >= needed_numel:
                return
        live = [str(b) for b in self.buckets.values() if b.status is not ParamStatus.NOT_AVAILABLE]
        raise RuntimeError(
            f"{bucket} needs {needed_numel} elements, {needed_numel - self.room_numel():.0f} more"
            f" than max_live_numel={self.max_live_numel} leaves: {self.live_numel} are in use by"
            f" modules that are running ({', '.join(live)}). Set a larger max_live_numel, or a"
            " smaller bucket_numel."
        )

    def start(self, bucket: ParameterBucket, direction: str, is_ahead: bool = False) -> None:
        """Start to bring a bucket in, if it is neither here nor on its way."""
        if bucket.status is not ParamStatus.NOT_AVAILABLE:
            return
        index, numel = bucket.layout.index, bucket.layout.padded_numel
        self.live_numel += numel
        if self._recorder.is_silent:
            bucket.begin_unshard(key=index)
            return
        kind = "prefetch" if is_ahead else "fetch"
        self._spans[index] = self._recorder.begin(f"{direction}_all_gather", index, numel)
        span = self._recorder.begin(f"{direction}_{kind}_submit", index, numel)
        bucket.begin_unshard(key=index)
        self._recorder.end(span)

    def wait(
        self, bucket: ParameterBucket, direction: str = "", timeout: timedelta | None = None
    ) -> None:
        """Wait for a bucket that is on its way."""
        if bucket.status is ParamStatus.AVAILABLE:
            return
        if self._recorder.is_silent:
            bucket.wait(timeout)
            return
        index = bucket.layout.index
        span = None
        if direction:
            span = self._recorder.begin(
                f"{direction}_fetch_wait", index, bucket.layout.padded_numel
            )
        bucket.wait(timeout)
        if span is not None:
            self._recorder.end(span)
        if index in self._spans:
            self._recorder.end(self._spans.pop(index))

    def give_back(
        self,
        bucket: ParameterBucket,
        timeout: timedelta | None = None,
        found: int | None = None,
    ) -> None:
        """Free a bucket that comes and goes; what was written to it is kept.

        Args:
            bucket: The bucket.
            timeout: Longest wait for one that is on its way.
            found: Fingerprint of its values when it came, to find writes that leave no other trace.
        """
        if bucket.status is ParamStatus.NOT_AVAILABLE:
            return
        self.wait(bucket, timeout=timeout)
        is_changed = found is not None and fingerprint(bucket.flat) != found
        if bucket.was_written() or is_changed:
            with self.update(f"writing to weights of {bucket}"):
                bucket.keep_written_values()
        key = bucket.storage_key()
        bucket.reshard()
        if bucket.storage_key() != key:
            del self.by_storage[key]
            self.by_storage[bucket.storage_key()] = bucket
        self.live_numel -= bucket.layout.padded_numel
        if not self._recorder.is_silent:
            self._recorder.instant("release", bucket.layout.index, bucket.layout.padded_numel)

    @contextmanager
    def update(self, reason: str, note: int = 0) -> Iterator[list[int]]:
        """Inside, shards may be changed; for all ranks to enter. Yields the notes of all ranks.

        Args:
            reason: What is to follow, the same on all ranks.
            note: A number for the others to see.
        """
        for bucket in self.buckets.values():
            if not bucket.is_resident and bucket.status is ParamStatus.INFLIGHT:
                self.wait(bucket)
        with self.shards.update(reason, note) as notes:
            yield notes

    def forget(self, bucket: ParameterBucket) -> None:
        """A bucket is dissolved."""
        del self.buckets[bucket.layout.index]
        self.by_storage = {key: b for key, b in self.by_storage.items() if b is not bucket}
        if bucket.status is not ParamStatus.NOT_AVAILABLE:
            self.live_numel -= bucket.layout.padded_numel
