"""Collects gradients during backward and averages them over the ranks, bucket by bucket.

[Note: one order]
Reductions leave in one fixed order of buckets, whatever order the gradients of this rank come in,
and at the end of backward the rest leaves with zeros. So ranks that use different parameters still
make the same calls, and nobody has to be told which parameters are unused.

[Note: late gradients]
A gradient that comes after its bucket has left (a second backward within one scope, a nested
backward), or that was collected without synchronisation, stays in ``param.grad``. All ranks learn
of it in the agreement before the optimizer step, and reduce once more.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero import _compat
from lightning_zero.comm.api import Collectives, Handle
from lightning_zero.grads.bucket import GradientBucket
from lightning_zero.grads.homes import Landing
from lightning_zero.memory.link import Transfer
from lightning_zero.memory.pool import BufferPool
from lightning_zero.observe.recorder import SILENT, Recorder, Span

MAX_IN_FLIGHT = 2
"""Buckets whose reduction may be under way while the next one is collected.

With one, a slow link has nothing to do while compute fills the next. More would hide no more, and
fewer buffers are fewer pages that the system has to hand out.
"""


class GradientReducer:
    """Averages gradients over ranks, each rank keeping its shard.

    Args:
        buckets: In model order; reductions leave from last to first.
        collectives: Group of the reductions.
        pool: Collection buffers.
        is_scattered: Each rank receives its shard of the sum; else all receive the whole sum.
        overlap_comm: Let reductions travel while backward goes on.
        recorder: Told of each reduction.
        on_complete: Called with a bucket's index once all its gradients of a backward have come.
        on_finish: Called when a backward has ended.
    """

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        collectives: Collectives,
        pool: BufferPool,
        *,
        is_scattered: bool,
        overlap_comm: bool,
        recorder: Recorder = SILENT,
        on_complete: Callable[[int], None],
        on_finish: Callable[[], None],
    ) -> None:
        self.buckets: list[GradientBucket] = []
        self._place: dict[GradientBucket, int] = {}
        self._collectives = collectives
        self._pool = pool
        self._is_scattered = is_scattered
        self._max_in_flight = MAX_IN_FLIGHT if overlap_comm else 0
        self._recorder = recorder
        self._on_complete = on_complete
        self._on_finish = on_finish
        self._in_flight: deque[_Reduction] = deque()
        self._leaving: deque[tuple[Transfer, list[Tensor], GradientBucket | None]] = deque()
        self._arriving: list[GradientBucket] = []
        """Buckets whose gradients are on their way to the host."""
        self._next = -1
        self._scope_depth = 0
        self._is_running = False
        self.synchronises = True
        """Whether gradients are reduced; while False they collect in ``param.grad``."""
        self.generation = 0
        """Counts backwards; what was agreed about gradients holds within one generation."""
        self._hooks: list[_compat.NodeHandle | _compat.RemovableHandle] = []
        self.follow(buckets)

    def follow(self, buckets: Sequence[GradientBucket]) -> None:
        """Watch all parameters of these buckets that require gradients; not within a backward.

        Args:
            buckets: All buckets, those that were there before included, in model order.
        """
        self.buckets = list(buckets)
        self._place = {bucket: place for place, bucket in enumerate(self.buckets)}
        self._next = len(self.buckets) - 1
        for bucket in self.buckets:
            for slot, parameter in enumerate(bucket.parameters):
                if parameter.requires_grad and slot not in bucket.watched:
                    bucket.watched.add(slot)
                    self._hooks += self._watch(bucket, slot, parameter)

    @contextmanager
    def backward_scope(self) -> Iterator[None]:
        """Everything that runs inside is one backward: reductions are finished when it ends."""
        self._scope_depth += 1
        try:
            yield
        finally:
            self._scope_depth -= 1
        if not self._scope_depth:
            self.finish()

    def finish(self) -> None:
        """Send what has not left yet, wait for all reductions and show the result."""
        self._is_running = False
        self.generation += 1
        self._on_finish()
        if not self.synchronises:
            return
        while self._next >= 0:
            self._launch(self.buckets[self._next])
        while self._in_flight:
            self._retire()
        self._reuse(leave=0)
        self._arriving.clear()
        for bucket in self.buckets:
            bucket.home.settle(bucket)
            bucket.show_faces()
        self._next = len(self.buckets) - 1
        self._collectives.advance()
        self._pool.clear()

    def has_unreduced(self) -> bool:
        """Whether this rank holds gradients that no reduction has taken."""
        return any(bucket.has_unreduced() for bucket in self.buckets)

    def nonfinite(self) -> tuple[Tensor | None, Tensor | None]:
        """Whether a gradient of this rank, and a sum over the ranks, was not finite.

        Returns:
            0-d bool tensors on the gradients' device; None where none can have been.
        """
        noted = zip(*(bucket.spreads() for bucket in self.buckets), strict=True)
        own, summed = (
            (_any_nonfinite(spreads) for spreads in noted) if self.buckets else (None,) * 2
        )
        return own, summed

    def forget_nonfinite(self) -> None:
        """What is noted from now on is of later gradients."""
        for bucket in self.buckets:
            bucket.forget_spreads()

    def reduce_unreduced(self) -> None:
        """One more round for gradients that came late; to be called on all ranks together."""
        synchronises, self.synchronises = self.synchronises, True
        for bucket in reversed(self.buckets):
            for slot, parameter in enumerate(bucket.parameters):
                if bucket.is_unreduced(slot):
                    self._collect(bucket, slot, parameter)
        self.finish()
        self.synchronises = synchronises

    def abort(self, timeout: timedelta) -> None:
        """Forget the backward under way after an error; no new transfer is started."""
        while self._in_flight:
            try:
                self._in_flight.popleft().handle.wait(timeout)
            except Exception:  # a peer that is gone; the error that brought us here is raised
                continue
        for bucket in self.buckets:
            bucket.drop()
        self._leaving.clear()
        self._arriving.clear()
        self._next = len(self.buckets) - 1
        self._is_running = False
        self._scope_depth = 0
        self._pool.clear()

    def close(self) -> None:
        """Stop watching the parameters, and take what hangs on them off."""
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        for bucket in self.buckets:
            bucket.take_faces_off()

    def _watch(
        self, bucket: GradientBucket, slot: int, parameter: nn.Parameter
    ) -> Iterator[_compat.NodeHandle | _compat.RemovableHandle]:
        # Nodes of the graph hold their hooks where no collector looks: what those keep alive stays.
        reducer, own = weakref.ref(self), weakref.ref(bucket)

        def before() -> None:
            if (bucket := own()) is not None:
                bucket.note_face(slot)

        def after(parameter: nn.Parameter) -> None:
            this, bucket = reducer(), own()
            if this is not None and bucket is not None:
                this._on_gradient(bucket, slot, parameter)

        yield _compat.before_gradient(parameter, before)
        yield _compat.after_gradient(parameter, after)

    def _on_gradient(self, bucket: GradientBucket, slot: int, parameter: nn.Parameter) -> None:
        if not self._is_running:
            self._is_running = True
            if not self._scope_depth:
                _compat.queue_backward_callback(self.finish)
        if not self.synchronises:
            bucket.used.add(slot)
            return
        has_left = self._place[bucket] > self._next or slot in bucket.arrived
        if has_left:  # see [Note: late gradients]
            bucket.used.add(slot)
            return
        self._collect(bucket, slot, parameter)

    def _collect(self, bucket: GradientBucket, slot: int, parameter: nn.Parameter) -> None:
        grad = parameter.grad
        if grad is None:
            raise AssertionError(f"{bucket.layout.slots[slot].fqn} has no gradient to collect")
        if bucket.buffer is None:
            self._open(bucket)
        bucket.put(slot, grad, 1.0 / self._collectives.world_size)
        parameter.grad = None
        if bucket.is_complete():
            if bucket.is_full():
                self._on_complete(bucket.layout.index)
            while self._next >= 0 and self.buckets[self._next].is_complete():
                self._launch(self.buckets[self._next])

    def _open(self, bucket: GradientBucket) -> None:
        bucket.buffer = self._pool.take(bucket.layout.padded_numel, bucket.wire_dtype)

    def _launch(self, bucket: GradientBucket) -> None:
        """Start the reduction of the next bucket in order."""
        if bucket.buffer is None:
            self._open(bucket)
        bucket.fill_rest()
        bucket.note_spread()
        accumulate = bucket.prepare_shard_grad()
        buffer = bucket.buffer
        if buffer is None:
            raise AssertionError("a bucket was launched without a buffer")
        self._next -= 1
        while len(self._in_flight) >= max(self._max_in_flight, 1):
            self._retire()
        landing = bucket.home.landing(bucket, accumulate, self._pool)
        span = self._recorder.begin("reduce", bucket.layout.index, buffer.numel())
        if self._is_scattered:
            scratch_numel = self._collectives.scratch_numel(buffer.numel())
            scratch = self._pool.take(scratch_numel, bucket.wire_dtype)
            handle = self._collectives.reduce_scatter(
                buffer, landing.out, landing.accumulate, bucket.layout.index, scratch
            )
            self._in_flight.append(_Reduction(bucket, handle, scratch, span, landing))
        else:
            summed = self._collectives.all_reduce(buffer)
            handle = _WholeSum(summed, buffer, landing.out, landing.accumulate)
            self._in_flight.append(_Reduction(bucket, handle, None, span, landing))
        if not self._max_in_flight:
            self._retire()

    def _retire(self) -> None:
        """Wait for the oldest reduction and recycle its buffers."""
        reduction = self._in_flight.popleft()
        layout = reduction.bucket.layout
        waiting = self._recorder.begin("reduce_wait", layout.index, layout.padded_numel)
        try:
            reduction.handle.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self._collectives.rank} could not average the gradients of"
                f" {reduction.bucket.layout}: another rank has failed, or did not run a backward"
                f" in this step and did not take part in time ({type(error).__name__}: {error})"
            ) from error
        self._recorder.end(waiting)
        self._recorder.end(reduction.span)
        transfer = reduction.bucket.home.take(reduction.bucket, reduction.landing)
        buffers = [b for b in (reduction.bucket.buffer, reduction.scratch) if b is not None]
        if reduction.landing.is_borrowed:
            buffers.append(reduction.landing.out)
        reduction.bucket.buffer = None
        self._arriving = [b for b in (*self._arriving, reduction.bucket) if not b.home.look(b)]
        if transfer is not None:
            joining = reduction.bucket if reduction.landing.joins else None
            self._leaving.append((transfer, buffers, joining))
            self._reuse(leave=1)
            return
        for buffer in buffers:
            self._pool.give(buffer)

    def _reuse(self, leave: int) -> None:
        """Recycle buffers that gradients have left for the host, but for so many of the last."""
        while len(self._leaving) > leave:
            transfer, buffers, joining = self._leaving.popleft()
            transfer.wait()
            if joining is not None:  # so that no more than two wait beside their gradients
                joining.home.settle(joining)
            for buffer in buffers:
                self._pool.give(buffer)


def _any_nonfinite(spreads: Iterable[Tensor | None]) -> Tensor | None:
    noted = [spread for spread in spreads if spread is not None]
    return torch.stack(noted).isfinite().logical_not().any() if noted else None


class _Reduction(NamedTuple):
    """A reduction under way, and the memory that it uses."""

    bucket: GradientBucket
    handle: Handle
    scratch: Tensor | None
    span: Span
    landing: Landing


class _WholeSum:
    """Handle that moves an all-reduced buffer to where the gradient lives."""

    def __init__(self, inner: Handle, summed: Tensor, out: Tensor, accumulate: bool) -> None:
        self._inner, self._summed, self._out, self._accumulate = inner, summed, out, accumulate

    def wait(self, timeout: timedelta | None = None) -> None:
        self._inner.wait(timeout)
        if self._accumulate:
            self._out.add_(self._summed)
        else:
            self._out.copy_(self._summed)
