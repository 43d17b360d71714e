"""Brings parameters in before they are used, and gives them back.

First form: unshard on use, prefetch of the next bucket, release after use, gather again in
backward. Every read of a weight goes through here (``ZeroParameterDict``, unit hooks, saved
tensors), so no place in a model has to be registered.

[Note: release]
Forward: a bucket goes when the last running unit that uses it has ended and the order does not name
it next. A weight read outside of its unit's forward may be held in a local variable, so its bucket
stays until the unit that reads it, or the whole forward, ends.
Backward: a bucket goes when all its gradients have arrived (no node that reads it is left), else at
the end of backward; never in between, since recomputed activations hold views of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import nn

from lightning_zero import _compat
from lightning_zero.params.bucket import ParameterBucket, ParamStatus
from lightning_zero.prefetch.order import UseOrder

Borrowed = list[ParameterBucket]


class ParameterCoordinator:
    """Decides when buckets are unsharded and resharded.

    Args:
        buckets: All buckets in model order, resident ones included.
        overlap_comm: Gather the next bucket while the current one is used.
    """

    def __init__(self, buckets: Sequence[ParameterBucket], overlap_comm: bool) -> None:
        self.buckets = {bucket.layout.index: bucket for bucket in buckets}
        self._bucket_of = {p: bucket for bucket in buckets for p in bucket.parameters}
        self._overlap_comm = overlap_comm
        self._orders = {name: UseOrder() for name in ("train", "backward", "eval")}
        self._users: Counter[int] = Counter()
        self._borrowed: list[Borrowed] = []
        self._is_held = False
        self._opened: list[ParameterBucket] = []

    def bucket_of(self, parameter: nn.Parameter) -> ParameterBucket | None:
        """The bucket of a parameter; None for one that is in no bucket."""
        return self._bucket_of.get(parameter)

    @contextmanager
    def forward_scope(self) -> Iterator[None]:
        """Everything that runs inside belongs to one step; what it gathered is given back after."""
        is_outermost = not self._borrowed
        if is_outermost:
            self.settle()
        self._borrowed.append([])
        try:
            yield
        finally:
            borrowed = self._borrowed.pop()
            if not _compat.in_backward():
                if is_outermost:
                    self._orders["train"].restart()
                    self._orders["eval"].restart()
                    self.release_all()
                else:
                    self._release_unused(borrowed)

    @contextmanager
    def held(self, buckets: Sequence[ParameterBucket]) -> Iterator[None]:
        """Buckets are available, and nothing is given back, while inside."""
        self.settle()
        was_held, self._is_held = self._is_held, True
        try:
            for bucket in buckets:
                self._start(bucket)
                bucket.wait()
            yield
        finally:
            self._is_held = was_held
            if not was_held:
                self.release_all()

    def before(self, buckets: Sequence[ParameterBucket]) -> None:
        """A unit that uses these buckets is about to run."""
        self._borrowed.append([])
        for bucket in buckets:
            self._users[bucket.layout.index] += 1
            self.need(bucket)

    def after(self, buckets: Sequence[ParameterBucket]) -> None:
        """The unit has run, or has raised."""
        borrowed = self._borrowed.pop() if self._borrowed else []
        for bucket in buckets:
            self._users[bucket.layout.index] -= 1
        if not _compat.in_backward():
            self._release_unused([*buckets, *borrowed])

    def on_access(self, parameter: nn.Parameter) -> None:
        """A parameter is about to be read by name."""
        bucket = self._bucket_of.get(parameter)
        if bucket is None or bucket.status is ParamStatus.AVAILABLE:
            return
        self.need(bucket)
        if bucket.is_resident:
            return
        if self._borrowed:
            self._borrowed[-1].append(bucket)
        elif not _compat.in_backward():
            self._opened.append(bucket)

    def is_in_step(self) -> bool:
        """Whether a forward or a backward is running."""
        return bool(self._borrowed) or _compat.in_backward()

    def need(self, bucket: ParameterBucket) -> None:
        """Make a bucket available, and start what comes after it."""
        if bucket.is_resident:
            bucket.wait()
            return
        order = self._orders[self._phase()]
        order.use(bucket.layout.index)
        self._start(bucket)
        bucket.wait()
        if self._overlap_comm:
            upcoming = order.next_other(bucket.layout.index)
            if upcoming is not None:
                self._start(self.buckets[upcoming])

    def settle(self) -> None:
        """Give back what was read outside of any step, keeping what was written to it there."""
        opened, self._opened = self._opened, []
        for bucket in opened:
            if bucket.status is ParamStatus.AVAILABLE:
                bucket.keep_written_values()
                self._give_back(bucket)

    def before_update(self, bucket: ParameterBucket) -> None:
        """The bucket's shard is about to change: nothing may travel, no full copy may stay."""
        self.settle()
        if bucket.is_resident:
            bucket.wait()
            if bucket.was_written():
                bucket.keep_written_values()
        else:
            self._give_back(bucket)

    def on_gradients_complete(self, index: int) -> None:
        """Backward is through with a bucket."""
        self._release_unused([self.buckets[index]])

    def on_backward_end(self) -> None:
        """Backward has ended."""
        self._orders["backward"].restart()
        self.release_all()

    def release_all(self) -> None:
        """Give back everything that no running unit uses."""
        if self._is_held:
            return
        for bucket in self.buckets.values():
            if not bucket.is_resident and not self._users[bucket.layout.index]:
                self._give_back(bucket)

    def forget_buckets(self) -> None:
        """The buckets are dissolved; nothing is left to coordinate."""
        self.buckets = {}
        self._bucket_of = {}

    def abort(self, timeout: timedelta) -> None:
        """Forget the step under way after an error; no new transfer is started."""
        self._users.clear()
        self._borrowed.clear()
        self._opened.clear()
        self._is_held = False
        for order in self._orders.values():
            order.restart()
        for bucket in self.buckets.values():
            try:
                if bucket.status is ParamStatus.INFLIGHT:
                    bucket.wait(timeout)
                if not bucket.is_resident:
                    self._give_back(bucket)
            except Exception:  # a peer that is gone; the error that brought us here is raised
                continue

    def _phase(self) -> str:
        if _compat.in_backward():
            return "backward"
        return "train" if torch.is_grad_enabled() else "eval"

    def _start(self, bucket: ParameterBucket) -> None:
        if bucket.status is ParamStatus.NOT_AVAILABLE:
            bucket.begin_unshard(key=bucket.layout.index)

    def _release_unused(self, buckets: Sequence[ParameterBucket]) -> None:
        if self._is_held:
            return
        next_use = self._orders[self._phase()].next_use()
        for bucket in buckets:
            index = bucket.layout.index
            is_borrowed = any(bucket in frame for frame in self._borrowed)
            if bucket.is_resident or self._users[index] or is_borrowed or index == next_use:
                continue
            if bucket.status is ParamStatus.AVAILABLE:
                self._give_back(bucket)

    def _give_back(self, bucket: ParameterBucket) -> None:
        if bucket.status is ParamStatus.INFLIGHT:
            bucket.wait()
        if bucket.status is ParamStatus.AVAILABLE:
            if bucket.was_written():
                bucket.keep_written_values()
            bucket.reshard()
