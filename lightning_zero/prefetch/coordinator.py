"""Brings parameters in before they are used, and gives them back.

Every read of a weight goes through here (``ZeroParameterDict``, unit hooks, saved tensors), so no
place in a model has to be registered. The first step is written down; from then on the trace tells
what to fetch ahead and what to keep (see ``plan/trace.py``).

[Note: release]
Forward: a bucket goes when the last running unit that uses it has ended, and its next use in the
trace is not near. A weight read outside of its unit's forward may be held in a local variable, so
its bucket stays until the unit that reads it, or the whole forward, ends.
Backward: a bucket goes when all its gradients have arrived, since what its layers do may be
interleaved with others; one without gradients goes when the trace does not need it soon. What
recomputed activations hold is an alias, and stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import nn

from lightning_zero import _compat
from lightning_zero.comm import ShardReads
from lightning_zero.observe.recorder import SILENT, Recorder, Span
from lightning_zero.observe.watch import UNWATCHED, StepWatch
from lightning_zero.params.bucket import ParameterBucket, ParamStatus
from lightning_zero.plan.prefetch import PrefetchOptions
from lightning_zero.prefetch.passes import EVALUATION, TRAINING, Passes
from lightning_zero.prefetch.residency import Residency
from lightning_zero.prefetch.visits import Visits

AHEAD_COUNT = 2
"""Buckets that are fetched ahead if nothing is said: over a slow link one is not enough."""


class _Frame:
    """A unit, or a whole forward, that is running."""

    def __init__(self, module: str, span: Span = None) -> None:
        self.module, self.span = module, span
        self.borrowed: list[ParameterBucket] = []


class ParameterCoordinator:
    """Decides when buckets are unsharded and resharded.

    Args:
        buckets: All buckets in model order, resident ones included.
        shards: Brings shards together, and guards changes of them.
        options: What is fetched ahead and kept.
        overlap_comm: Fetch ahead; else each bucket comes when it is needed.
        recorder: Told of what happens when.
    """

    def __init__(
        self,
        buckets: Sequence[ParameterBucket],
        shards: ShardReads,
        options: PrefetchOptions,
        overlap_comm: bool,
        recorder: Recorder = SILENT,
    ) -> None:
        self.residency = Residency((), shards, options.max_live_numel, recorder)
        self.visits = Visits(self.residency)
        self.passes = Passes({}, shards.rank)
        self._recorder = recorder
        self._options = options
        self._overlap_comm = overlap_comm
        self._bucket_of: dict[nn.Parameter, ParameterBucket] = {}
        self._coming: list[ParameterBucket] = []
        self._frozen: list[ParameterBucket] = []
        self._prefetch_numel = options.prefetch_numel if overlap_comm else 0
        self._reuse_numel = 0
        self._users: Counter[int] = Counter()
        self._frames: list[_Frame] = []
        self._is_held = False
        self.watch: StepWatch = UNWATCHED
        """Is shown each use of a bucket."""
        self.add(buckets)

    def add(
        self, buckets: Sequence[ParameterBucket], thawed: Sequence[ParameterBucket] = ()
    ) -> None:
        """There are more buckets; for all ranks to call, between passes.

        Args:
            buckets: More of them.
            thawed: Those among the earlier ones that had no gradients, and have some now.
        """
        self.visits.settle()
        self.residency.add(buckets)
        self._bucket_of.update((p, bucket) for bucket in buckets for p in bucket.parameters)
        coming = [bucket for bucket in buckets if not bucket.is_resident]
        self._coming += coming
        self._frozen = [bucket for bucket in self._frozen if bucket not in thawed]
        self._frozen += [b for b in coming if not any(p.requires_grad for p in b.parameters)]
        for bucket in coming:
            bucket.note_references()
        self.passes.restart({b.layout.index: b.layout.padded_numel for b in self._coming})
        self._reuse_numel = self._options.reuse_distance_numel or 0
        if self._options.reuse_distance_numel is None and self._overlap_comm:
            # What would be fetched ahead at once need not go; see prefetching.
            largest_numel = max((b.layout.padded_numel for b in self.buckets.values()), default=0)
            self._reuse_numel = AHEAD_COUNT * largest_numel

    @property
    def _comes_and_goes(self) -> bool:
        return bool(self._coming)

    @property
    def _counted(self) -> list[ParameterBucket]:
        """Whose references are asked for: what the bound, or backward, may give back any time."""
        return self._frozen if self._options.max_live_numel is None else self._coming

    @property
    def buckets(self) -> dict[int, ParameterBucket]:
        """All buckets by their index."""
        return self.residency.buckets

    def bucket_of(self, parameter: nn.Parameter) -> ParameterBucket | None:
        """The bucket of a parameter; None for one that is in no bucket."""
        return self._bucket_of.get(parameter)

    # A forward, and the units in it.

    @contextmanager
    def forward_scope(self) -> Iterator[None]:
        """Everything that runs inside belongs to one step; what it gathered is given back after."""
        is_outermost = not self._frames
        span = None
        if is_outermost:
            self._begin_pass()
            span = self._recorder.begin("forward")
        self._frames.append(_Frame(""))
        is_whole = False
        try:
            yield
            is_whole = True
        finally:
            frame = self._frames.pop()
            if is_outermost:
                self._recorder.end(span)
            if not _compat.in_backward():
                if is_outermost:
                    self._end_forward(is_whole)
                else:
                    self._release_unused(frame.borrowed)

    def before(self, module: str, buckets: Sequence[ParameterBucket]) -> None:
        """A unit that uses these buckets is about to run."""
        for bucket in buckets:
            self._users[bucket.layout.index] += 1
        frame = _Frame(module)
        self._frames.append(frame)
        for bucket in buckets:
            self.need(bucket, module)
        frame.span = self._recorder.begin("use", buckets[0].layout.index if buckets else -1)

    def after(self, buckets: Sequence[ParameterBucket]) -> None:
        """The unit has run, or has raised."""
        frame = self._frames.pop() if self._frames else _Frame("")
        self._recorder.end(frame.span)
        for bucket in buckets:
            self._users[bucket.layout.index] -= 1
        if not _compat.in_backward():
            self._release_unused([*buckets, *frame.borrowed])

    def on_access(self, parameter: nn.Parameter) -> None:
        """A parameter is about to be read by name."""
        bucket = self._bucket_of.get(parameter)
        if bucket is None or self._users[bucket.layout.index]:
            return
        if bucket.is_resident:
            self.need(bucket)
            return
        if not self.is_in_step:
            if not self._is_held or bucket.status is not ParamStatus.AVAILABLE:
                self.visits.bring(bucket)
            return
        if bucket.status is ParamStatus.NOT_AVAILABLE:
            self.passes.report.fetched_on_access += 1
        self.need(bucket, self.running_module)
        if self._frames and bucket not in self._frames[-1].borrowed:
            self._frames[-1].borrowed.append(bucket)

    @property
    def running_module(self) -> str:
        """Name of the unit that is running; empty for the root and outside."""
        return self._frames[-1].module if self._frames else ""

    def on_state_dict(self, parameters: Iterable[nn.Parameter]) -> None:
        """A state dict with these parameters is about to be made; this rank may be the only one."""
        if not self.visits.is_left_alone:
            for parameter in parameters:
                self.on_access(parameter)

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward is running."""
        return bool(self._frames)

    @property
    def is_in_step(self) -> bool:
        """Whether a forward or a backward is running."""
        return bool(self._frames) or _compat.in_backward()

    def need(self, bucket: ParameterBucket, module: str = "") -> None:
        """Make a bucket available to a module, and start what comes after it."""
        if bucket.is_resident:
            bucket.wait()
        else:
            self._bring(bucket, module)
        self.watch.on_use(bucket.layout.index)

    def _bring(self, bucket: ParameterBucket, module: str) -> None:
        is_backward = _compat.in_backward()
        direction = "backward" if is_backward else "forward"
        is_new = self.passes.use(module, bucket.layout.index, is_backward)
        if bucket.status is ParamStatus.AVAILABLE and not is_new:
            return
        if bucket.status is ParamStatus.NOT_AVAILABLE:
            self.passes.report.fetched_on_demand += 1
            self._make_room(bucket)
            self.residency.start(bucket, direction)
        elif bucket.status is ParamStatus.INFLIGHT:
            self.passes.report.fetched_ahead += 1
        if self._prefetch_numel != 0:
            self._prefetch(bucket, is_backward, direction)
        self.residency.wait(bucket, direction)
        if is_backward and self._frozen:
            self._release_frozen(bucket)

    # Outside of a forward.

    @contextmanager
    def held(self, buckets: Sequence[ParameterBucket]) -> Iterator[None]:
        """Buckets are available, and nothing is given back, while inside."""
        self.visits.settle()
        was_held, self._is_held = self._is_held, True
        try:
            for bucket in buckets:
                self.residency.start(bucket, "forward", is_ahead=True)
            for bucket in buckets:
                self.residency.wait(bucket)
            yield
            if not was_held:
                self.visits.settle()
        finally:
            self._is_held = was_held
            if not was_held:
                self.release_all()

    def before_update(self, bucket: ParameterBucket) -> None:
        """The bucket's shard is about to change: nothing may travel, no full copy may stay."""
        if not bucket.is_resident:
            self.residency.give_back(bucket)
            return
        bucket.wait()
        if bucket.was_written():
            bucket.keep_written_values()

    def end_step(self) -> int:
        """The optimizer is about to step; what was used so far is one pass.

        Returns:
            A number that ranks share if they have recorded the same traces.
        """
        self.visits.settle()
        if not self._frames and self.passes.end():
            self.release_all()
        return self.passes.digest()

    def on_gradients_complete(self, index: int) -> None:
        """Backward is through with a bucket."""
        self._release_unused([self.buckets[index]])

    def release_all(self) -> None:
        """Give back everything that no running unit uses."""
        if self._is_held or not self._comes_and_goes:
            return
        for bucket in self.buckets.values():
            if bucket.status is ParamStatus.NOT_AVAILABLE or self._is_in_use(bucket):
                continue
            self.residency.give_back(bucket)

    def forget(self, buckets: Iterable[ParameterBucket]) -> None:
        """Buckets are dissolved."""
        for bucket in buckets:
            self.residency.forget(bucket)
            for parameter in bucket.parameters:
                del self._bucket_of[parameter]

    def abort(self, timeout: timedelta) -> None:
        """Forget the step under way after an error; no new transfer is started."""
        self._users.clear()
        self._frames.clear()
        self.visits.drop()
        self._is_held = False
        self.passes.drop()
        for bucket in self.buckets.values():
            try:
                if not bucket.is_resident:
                    bucket.forget_writes()
                    self.residency.give_back(bucket, timeout)
                elif bucket.status is ParamStatus.INFLIGHT:
                    bucket.wait(timeout)
            except Exception:  # a peer that is gone; the error that brought us here is raised
                continue

    # Decisions.

    def _begin_pass(self) -> None:
        is_training = torch.is_grad_enabled()
        self.visits.settle()
        if self._comes_and_goes:
            if self.passes.end():
                self.release_all()
            for bucket in self._counted:
                bucket.note_references()
            self.passes.begin(TRAINING if is_training else EVALUATION)
        if is_training:
            self._recorder.step_begin()

    def _end_forward(self, is_whole: bool) -> None:
        if is_whole and self.passes.kind == TRAINING:
            self._release_unused(self.buckets.values(), is_forced=True)
            return
        if is_whole:
            self.passes.end()
        else:
            self.passes.drop()
        self.release_all()

    def _is_in_use(self, bucket: ParameterBucket) -> bool:
        if bucket.is_resident or self._is_held or self._users[bucket.layout.index]:
            return True
        if self.visits.holds(bucket):
            return True
        return any(bucket in frame.borrowed for frame in self._frames)

    def _make_room(self, bucket: ParameterBucket) -> None:
        if self.residency.max_live_numel is None:
            return
        free = (
            other
            for other in self.buckets.values()
            if other is not bucket
            and other.status is not ParamStatus.NOT_AVAILABLE
            and not self._is_in_use(other)
            and (other.status is ParamStatus.INFLIGHT or not other.is_aliased())
            and not other.is_referred
        )
        self.residency.make_room(bucket, free, self.passes.next_use)

    def _prefetch(self, current: ParameterBucket, is_backward: bool, direction: str) -> None:
        """Start what comes next, as far ahead as is wanted and as fits; what is here is no step."""
        seen = {current.layout.index}
        ahead_count = ahead_numel = 0
        for index in self.passes.upcoming(is_backward):
            if index in seen:
                continue
            seen.add(index)
            bucket = self.buckets[index]
            if bucket.status is ParamStatus.AVAILABLE:
                continue
            numel = bucket.layout.padded_numel
            ahead_numel += numel
            ahead_count += 1
            if self._is_far(ahead_count, ahead_numel):
                if bucket.home is not None:
                    bucket.home.read_ahead()
                return
            if bucket.status is ParamStatus.NOT_AVAILABLE:
                if numel > self.residency.room_numel():
                    return
                self.residency.start(bucket, direction, is_ahead=True)

    def _is_far(self, ahead_count: int, ahead_numel: int) -> bool:
        """Whether a bucket is too far ahead; the next one never is."""
        if self._prefetch_numel is None:
            return ahead_count > AHEAD_COUNT
        return ahead_count > 1 and ahead_numel > self._prefetch_numel

    def _release_unused(self, buckets: Iterable[ParameterBucket], is_forced: bool = False) -> None:
        if self._is_held or not self._comes_and_goes:
            return
        is_backward = _compat.in_backward()
        for bucket in buckets:
            if bucket.status is not ParamStatus.AVAILABLE or self._is_in_use(bucket):
                continue
            if self.passes.is_near(bucket.layout.index, self._reuse_numel, is_backward):
                continue
            if bucket.is_aliased() and not is_forced:
                continue
            self.residency.give_back(bucket)

    def _release_frozen(self, current: ParameterBucket) -> None:
        """In backward, no gradient tells when a frozen bucket is not needed any more."""
        if self.passes.tracers[TRAINING].trace is not None:
            others = [bucket for bucket in self._frozen if bucket is not current]
            self._release_unused([bucket for bucket in others if not bucket.is_referred])
