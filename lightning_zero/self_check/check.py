"""A user's own proof: the first steps of a training beside an unsharded replica.

[Note: three comparisons]
A replica that steps with its own averages would drift from the run wherever sums have another
order (three ranks, accumulation): Adam makes a whole step of a gradient that is noise. So a step is
checked link by link, each of which has an exact bound:

1. what modules use is what the owners of the shards have, bit for bit;
2. what the optimizer steps with is the plain average of all ranks' gradients, clipped the same way,
   up to the rounding of the sums;
3. the optimizer, stepping whole parameters with whole states and these gradients, makes the weights
   that the owners have.

Where 2 is equal bit for bit, the replica is plain data-parallel training. Where 2 is wrong, the
replica goes on with the plain average.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero import _compat
from lightning_zero._compat import RemovableHandle
from lightning_zero.engine import ZeroEngine
from lightning_zero.observe.watch import UNWATCHED, StepWatch
from lightning_zero.optim.pieces import parameters_of
from lightning_zero.self_check.average import PlainAverages
from lightning_zero.self_check.copies import Copy, Owners, choose, partitioned
from lightning_zero.self_check.findings import Findings, Kind, Report, merged, warning
from lightning_zero.self_check.twin import Twin, take_states

MAX_NBYTES = 256 * 2**20
"""Memory of a rank for the replica; a larger model is watched in part."""

WEIGHT_ROUNDINGS = 4
"""Roundings per step by which vector instructions may differ at the ends of a tensor."""


class SelfCheck(StepWatch):
    """Watches the first optimizer steps of an engine, see [Note: three comparisons].

    To be made on all ranks together, before the first of these steps; it takes itself off after the
    last, and changes no number of the training.

    Args:
        engine: The engine.
        optimizers: Its optimizers.
        steps: How many optimizer steps are compared.
        on_report: Called on all ranks with the result.
        max_nbytes: Most memory of a rank for the replica; None for 256 MiB.

    Raises:
        ValueError: An optimizer cannot be copied.
    """

    def __init__(
        self,
        engine: ZeroEngine,
        optimizers: list[Optimizer],
        steps: int,
        on_report: Callable[[Report], None] | None = None,
        max_nbytes: int | None = None,
    ) -> None:
        self.report: Report | None = None
        """The result, once there is one."""
        self._engine, self._wanted_steps, self._on_report = engine, steps, on_report
        self._control = engine.groups.control
        self._findings = Findings(engine.groups.rank)
        self._faults: dict[Kind, Any] = {}
        self._notes: dict[str, None] = {}
        self._copies = {copy.parameter: copy for copy in choose(engine, max_nbytes or MAX_NBYTES)}
        self._owners = Owners(engine.table, self._control)
        trained = [copy for copy in self._copies.values() if copy.is_trained]
        self._averages = PlainAverages(trained, engine.table, self._owners, self._control)
        self._begin_copies(trained)
        self._twins: dict[Optimizer, Twin] = {}
        self._steps: dict[Optimizer, int] = {}
        self._generations: dict[Optimizer, int] = {}
        self._given: dict[Copy, Tensor] = {}
        self._misled: set[Copy] = set()
        self._trained_count = len(engine.table.place)
        self._handles: list[RemovableHandle] = []
        self.is_over = False
        """Whether nothing is watched any more."""
        for optimizer in optimizers:
            self._follow(optimizer)
        self._kept = {index: b.times_kept for index, b in engine.coordinator.buckets.items()}
        engine.watch = engine.coordinator.watch = self

    def finish(self) -> None:
        """Report what was compared so far, and watch no more; for all ranks to call."""
        if self.is_over:
            return
        self._tell()
        every = self._control.exchange_objects(self._findings.largest, "end a self-check")
        whole = list(partitioned(self._engine))
        self.report = Report(
            steps=max(self._steps.values(), default=0),
            wanted_steps=self._wanted_steps,
            watched=[copy.name for copy in self._copies.values()],
            total=len(whole),
            watched_numel=sum(copy.slot.numel for copy in self._copies.values()),
            total_numel=sum(parameter.numel() for _, _, parameter in whole),
            world_size=self._engine.groups.world_size,
            largest=merged(every),
            faults=self._faults,
            notes=list(self._notes),
        )
        self.close()
        if self._on_report is not None:
            self._on_report(self.report)

    def close(self) -> None:
        """Watch no more, without a word to other ranks, and free the replica."""
        if self._engine.watch is self:
            self._engine.watch = self._engine.coordinator.watch = UNWATCHED
        for handle in self._handles:
            handle.remove()
        self._handles, self.is_over = [], True
        self._averages.close()
        self._copies, self._twins, self._given = {}, {}, {}
        if self._findings.untold:
            warnings.warn(warning([self._findings.untold]), stacklevel=2)
            self._findings.untold = {}

    # As a watch of the engine.

    def on_use(self, bucket: int) -> None:
        """See the base class."""
        is_training = torch.is_grad_enabled() or _compat.in_backward()
        if not is_training:
            return
        found = self._engine.coordinator.buckets[bucket]
        is_written = found.was_written() or self._kept.get(bucket) != found.times_kept
        self._kept[bucket] = found.times_kept
        with torch.no_grad():
            for parameter in found.parameters:
                copy = self._copies.get(parameter)
                if copy is None or self._has_thawed(copy):
                    continue
                values, seen = copy.values(), copy.shaped(copy.seen)
                if is_written and not torch.equal(values, seen):
                    copy.follow(copy.flat(values))
                    continue
                self._findings.note(Kind.USED, values, seen, (copy.name, self._step_now()))

    def on_gradients(self, optimizer: Optimizer, generation: int) -> None:
        """See the base class."""
        if optimizer not in self._twins:
            if not self._holds_parameters(optimizer):
                return
            self._follow(optimizer)  # it was not handed over, or later
        twin = self._twins[optimizer]
        if self._generations[optimizer] == generation:
            return
        if self._steps[optimizer] >= self._wanted_steps:
            self.finish()
            return
        self._generations[optimizer] = generation
        self._drop_thawed()
        twin.note_groups(optimizer)
        with torch.no_grad():
            self._averages.settle(twin.copies())

    def on_norm_clipped(
        self, optimizer: Optimizer, max_norm: float, norm_type: float, scale: float
    ) -> None:
        """See the base class."""
        twin = self._twins.get(optimizer)
        if twin is None:
            return
        with torch.no_grad():
            if twin.is_whole(optimizer):
                self._averages.clip_norm(twin.copies(), max_norm, norm_type)
                return
            self._averages.scale(twin.copies(), scale)
            self._notes["the norm of gradients is the engine's: it is one of all parameters"] = None

    def on_value_clipped(self, optimizer: Optimizer, clip_value: float) -> None:
        """See the base class."""
        twin = self._twins.get(optimizer)
        if twin is not None:
            self._averages.clamp(twin.copies(), clip_value)

    def on_scaled(self, optimizer: Optimizer, factor: float) -> None:
        """See the base class."""
        twin = self._twins.get(optimizer)
        if twin is not None:
            self._averages.scale(twin.copies(), factor)

    # Around the optimizer's own step, while its groups name pieces.

    def _before_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        twin = self._twins.get(optimizer)
        if twin is None or self._holds_parameters(optimizer):
            return
        self._steps[optimizer] += 1
        twin.before_step(optimizer)
        copies = twin.copies()
        if not copies:
            return
        self._averages.drop_cleared(copies)
        with torch.no_grad():
            self._follow_writes(copies)
            found = self._owners.whole(copies, lambda piece: piece.tensor.grad)
            has_grad = self._who_has_gradients(copies)
            self._given = {
                copy: gradient
                for copy in copies
                if (gradient := self._checked(copy, found[copy], copy in has_grad)) is not None
            }

    def _checked(self, copy: Copy, found: Tensor, has_grad: bool) -> Tensor | None:
        """The gradient for the replica: the engine's, unless it is wrong."""
        expected = self._averages.final(copy)
        place = (copy.name, self._step_now(before=0))
        if has_grad != (expected is not None):
            nothing = torch.full_like(found, float("nan"))  # absent is not zero
            given = nothing if expected is None else expected
            self._findings.note(Kind.GRADIENTS, found if has_grad else nothing, given, place)
            self._misled.add(copy)
            return expected
        if expected is None:
            return None
        rounding = self._averages.rounding(copy)
        is_right = self._findings.note(Kind.GRADIENTS, found, expected, place, rounding)
        if is_right:
            return found
        self._misled.add(copy)
        return expected

    def _after_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        twin = self._twins.get(optimizer)
        if twin is None or self._holds_parameters(optimizer):
            return
        twin.step(self._given, *args[1:], **options)
        self._given = {}
        copies = twin.copies()
        with torch.no_grad():
            found = self._owners.whole(copies, lambda piece: piece.tensor)
            for copy in copies:
                weight = copy.flat(copy.weight)
                largest = float(torch.linalg.vector_norm(weight.float(), float("inf")))
                eps = torch.finfo(weight.dtype).eps
                explained = WEIGHT_ROUNDINGS * self._steps[optimizer] * eps * largest
                if copy in self._misled:  # the replica has other gradients
                    explained = float("inf")
                place = (copy.name, self._step_now(before=0))
                self._findings.note(Kind.STEPPED, found[copy], weight, place, explained)
                copy.seen = found[copy].to(copy.parameter.dtype)
        self._tell()

    def _begin_copies(self, trained: list[Copy]) -> None:
        with torch.no_grad():
            masters = self._owners.whole(trained, lambda piece: piece.tensor)
            for copy, values in masters.items():
                copy.begin(values)
            frozen = [copy for copy in self._copies.values() if not copy.is_trained]
            with self._engine.full_params([copy.parameter for copy in frozen]):
                for copy in frozen:
                    copy.begin(copy.flat(copy.values()))

    def _follow(self, optimizer: Optimizer) -> None:
        """Step the replica as this optimizer steps; for all ranks to call."""
        twin = self._twins[optimizer] = Twin(optimizer, self._copies)
        self._steps[optimizer], self._generations[optimizer] = 0, -1
        twin.note_groups(optimizer)
        take_states(twin, optimizer, self._engine)
        self._handles.append(optimizer.register_step_pre_hook(self._before_step))
        self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def _holds_parameters(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer names parameters of the model: not within a step of the engine."""
        return any(parameter in self._engine.names for parameter in parameters_of(optimizer))

    def _has_thawed(self, copy: Copy) -> bool:
        """Whether a parameter has come into training since the check began."""
        return not copy.is_trained and copy.parameter in self._engine.table

    def _drop_thawed(self) -> None:
        """What has come into training meanwhile has no copy of its state, and is left alone."""
        if len(self._engine.table.place) > self._trained_count:
            self._notes["parameters that came into training meanwhile are not compared"] = None
        for copy in [copy for copy in self._copies.values() if self._has_thawed(copy)]:
            del self._copies[copy.parameter]

    def _step_now(self, before: int = 1) -> int:
        return max(self._steps.values(), default=0) + before

    def _follow_writes(self, copies: list[Copy]) -> None:
        """What users have written to weights since they were last used is followed."""
        written = 0
        for index, bucket in self._engine.coordinator.buckets.items():
            written += self._kept.get(index) != bucket.times_kept
            self._kept[index] = bucket.times_kept
        if not self._sum([float(written)])[0]:
            return
        for copy, values in self._owners.whole(copies, lambda piece: piece.tensor).items():
            copy.follow(values)

    def _who_has_gradients(self, copies: list[Copy]) -> set[Copy]:
        """Parameters whose pieces the optimizer steps, on any rank."""
        pieces = [self._engine.table.piece(copy.parameter) for copy in copies]
        mine = [float(piece is not None and piece.tensor.grad is not None) for piece in pieces]
        return {copy for copy, count in zip(copies, self._sum(mine), strict=True) if count}

    def _tell(self) -> None:
        """All ranks warn of what one of them has found, once for each kind."""
        if not self._sum([float(len(self._findings.untold))])[0]:
            return
        every = self._control.exchange_objects(self._findings.untold, "tell of differences")
        self._findings.untold = {}
        news = [{k: v for k, v in there.items() if k not in self._faults} for there in every]
        if not any(news):
            return
        warnings.warn(warning(news), stacklevel=2)
        for there in news:
            for kind, difference in there.items():
                self._faults.setdefault(kind, difference)

    def _sum(self, values: list[float]) -> list[float]:
        summed = torch.tensor(values, dtype=torch.float64, device=self._engine.device)
        self._control.agree(summed)
        return list(summed.tolist())
