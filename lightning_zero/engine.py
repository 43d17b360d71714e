"""Builds the rooms of a stage and orders them within a step.

The engine knows nothing of Lightning: it also drives a bare loop::

    engine = ZeroEngine(model, [optimizer], ZeroOptions(stage=2), groups)
    for batch in data:
        loss = model(batch)
        engine.backward(loss)
        engine.clip_grad_norm_(optimizer, 1.0)
        engine.step(optimizer)
        optimizer.zero_grad()
    engine.close()
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero import _compat
from lightning_zero.checkpoint import consolidated, restored
from lightning_zero.comm import ShardGroups, ShardReads
from lightning_zero.comm.reads import OwnReads
from lightning_zero.config import ZeroOptions
from lightning_zero.grads.reducer import GradientReducer
from lightning_zero.held import HeldParameters, Wanted, parameters_in
from lightning_zero.host_room import check_host_room
from lightning_zero.measured import measure_states
from lightning_zero.memory.host import give_freed_memory_back, keep_freed_memory
from lightning_zero.memory.measure import ModelStateBytes
from lightning_zero.memory.pool import BufferPool
from lightning_zero.observe.recorder import SILENT, Recorder
from lightning_zero.observe.watch import UNWATCHED, StepWatch
from lightning_zero.optim.agreement import GradientAgreement
from lightning_zero.optim.pieces import PieceTable
from lightning_zero.optim.places import Places
from lightning_zero.optim.raw_steps import RawSteps
from lightning_zero.params.bucket import ParameterBucket, ParamStatus
from lightning_zero.params.buffers import BufferSync
from lightning_zero.params.sliced import watch_again
from lightning_zero.partition import (
    broadcast_module,
    check_model,
    check_optimizers,
    fits_whole,
    grow,
    partition,
)
from lightning_zero.prefetch.coordinator import ParameterCoordinator
from lightning_zero.prefetch.hooks import ModuleHooks, SavedTensors
from lightning_zero.trained import TrainedPieces
from lightning_zero.trained_set import TrainedSet, check_stepped, in_model_order
from lightning_zero.whole import WholeTensors

ABORT_TIMEOUT = timedelta(seconds=5)
"""How long an abort waits for transfers under way; their buffers are given up after it."""


class ZeroEngine:
    """Trains a module with its states partitioned over ranks.

    To be made on all ranks together, with modules and optimizers that are equal in structure. The
    values of rank 0 are those that are trained.

    Args:
        module: The model on its device; its parameters become views of buckets until ``close``.
        optimizers: The user's optimizers over parameters of the module, not stepped yet. Empty for
            evaluation.
        options: What to shard.
        groups: Collectives over the ranks that share the states.
        broadcast: Give all ranks the values of rank 0 first; False if they have them already.
        recorder: Told of what happens when.

    Raises:
        ValueError: An optimizer or a parameter cannot be used.
        RuntimeError: A parameter has lost its values in an earlier error.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        options: ZeroOptions,
        groups: ShardGroups,
        *,
        broadcast: bool = True,
        recorder: Recorder = SILENT,
    ) -> None:
        self.module = module
        self.options = options
        self.groups = groups
        self._policy = options.policy
        self._optimizers = list(optimizers)
        self.names = {parameter: name for name, parameter in module.named_parameters()}
        """Name of each parameter of the model."""
        check_model(module, optimizers, options, groups.world_size)
        if broadcast:
            broadcast_module(module, groups)
        check_host_room(self.names, optimizers, options, groups, self.device)
        self._recorder = recorder
        self.watch: StepWatch = UNWATCHED
        """Is shown the gradients of each step."""
        self._shards: ShardReads = OwnReads()
        if self._policy.shards_parameters:
            self._shards = groups.reads(options.gather_by)
        has_copies = options.master_weights is not False
        self._places = Places(
            options.offload, self.device, has_copies, options.wire_dtype, groups.control
        )
        parts = partition(module, options, groups, self._shards, self._places.make_home)
        self._buckets = parts.buckets
        self._slices = parts.slices
        self.coordinator = ParameterCoordinator(
            parts.buckets, self._shards, options.prefetch_options, options.overlap_comm, recorder
        )
        self.table = PieceTable(self._places.masters(parts.trainable(), optimizers))
        self.updater = self._places.updater(self.table)
        """Decides where and when this rank's pieces are stepped."""
        self._reducer = GradientReducer(
            [master.gradients for master in self.table.masters],
            groups.gradients,
            BufferPool(self.device),
            is_scattered=self._policy.shards_optimizer,
            overlap_comm=options.overlap_comm,
            recorder=recorder,
            on_complete=self.coordinator.on_gradients_complete,
            on_finish=self.coordinator.release_all,
        )
        self._agreement = GradientAgreement(
            self._reducer, self.table, groups.gradients, self._policy.shards_optimizer
        )
        self.held = HeldParameters(self.names, self.coordinator, groups.control)
        self.whole = WholeTensors(
            self.names, self._optimizers, self.table, self._agreement, groups.control
        )
        self.trained = TrainedPieces(self.table, self.coordinator, self.held, self._publish)
        self._trained_set: TrainedSet | None = None
        self._buffer_sync: BufferSync | None = None
        if optimizers:
            self._trained_set = TrainedSet(module, self.names, self.table, groups.control)
            self._buffer_sync = BufferSync(module, groups.control)
        if optimizers and self.device.type == "cpu":
            # What was built sharded, and was not made whole, does not fit into memory whole.
            (keep_freed_memory if parts.slices is None else give_freed_memory_back)()
        self._saved_tensors = SavedTensors(self.coordinator)
        self._hooks: ModuleHooks | None = ModuleHooks(
            module, parts.units, self.coordinator, self.step_scope
        )
        self._traced_buckets = _traced(self.module, self._buckets)
        self.coordinator.release_all()
        self._shards.open({b.layout.index: b.shard for b in self._buckets if not b.is_resident})
        self._raw_steps = RawSteps(self)
        _open_engines.add(self)

    # One step, in the order of its calls.

    @contextmanager
    def step_scope(self) -> Iterator[None]:
        """Everything that runs inside is one forward, with its loss, or one of evaluation."""
        is_outermost = not self.coordinator.is_in_step
        if is_outermost and torch.is_grad_enabled():
            self._follow_trained_set()
        buffers = self._buffer_sync if is_outermost else None
        if buffers is not None:
            buffers.before_forward()
        whole = self._hooks.of_whole_forward if self._hooks is not None else ()
        with self._saved_tensors.forward_scope(whole):
            yield
        if buffers is not None:
            buffers.after_forward(torch.is_grad_enabled() and self._reducer.synchronises)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside are not the last of an accumulation window.

        Stages 0 and 1 collect their gradients in full and reduce them once per window. Stages 2 and
        3 reduce every backward, since whole gradients are what they save.
        """
        if self._policy.shards_gradients:
            with self.updater.accumulating():
                yield
            return
        synchronises, self._reducer.synchronises = self._reducer.synchronises, False
        try:
            yield
        finally:
            self._reducer.synchronises = synchronises

    @contextmanager
    def backward_scope(self) -> Iterator[None]:
        """Backward calls inside count as one; their gradients are averaged when it ends."""
        span = self._recorder.begin("backward")
        with self._reducer.backward_scope():
            yield
        self._recorder.end(span)
        self._follow_trained_set()

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Compute gradients of a loss and average them over the ranks.

        Args:
            loss: Scalar loss of this rank's batch.
            **options: As for ``Tensor.backward``.
        """
        with self.backward_scope():
            loss.backward(**options)  # type: ignore[no-untyped-call]

    def grad_norm(self, optimizer: Optimizer | None = None, norm_type: float = 2.0) -> float:
        """Norm of the averaged gradients over all ranks; to be called on all ranks.

        Args:
            optimizer: Count only its parameters; None for all trainable parameters.
            norm_type: p of the p-norm, or inf.
        """
        return self._agreement.total_norm(optimizer, norm_type)

    def clip_grad_norm_(
        self,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> float:
        """Scale an optimizer's gradients so that their norm over all ranks is at most ``max_norm``.

        Returns:
            The norm before clipping.

        Raises:
            RuntimeError: ``error_if_nonfinite``, and the norm is not finite; on all ranks.
        """
        norm = self._agreement.total_norm(optimizer, norm_type)
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(
                f"the norm of the gradients is {norm}, so they cannot be scaled to {max_norm}: look"
                " at the data and the loss, or let them be with error_if_nonfinite=False"
            )
        # In fp32 as torch.nn.utils.clip_grad_norm_ does, so that both scale by the same number.
        scale = torch.clamp(max_norm / (torch.tensor(norm) + 1e-6), max=1.0)
        self.watch.on_gradients(optimizer, self._reducer.generation)
        for piece in self.table.pieces_of(optimizer):
            piece.scale_grad(scale)
        self.watch.on_norm_clipped(optimizer, max_norm, norm_type, float(scale))
        return norm

    def clip_grad_value_(self, optimizer: Optimizer, clip_value: float) -> None:
        """Clamp the averaged gradients of an optimizer to ``[-clip_value, clip_value]``."""
        self._agreement.used()
        self.watch.on_gradients(optimizer, self._reducer.generation)
        for piece in self.table.pieces_of(optimizer):
            piece.grad.clamp_(-clip_value, clip_value)
        self.watch.on_value_clipped(optimizer, clip_value)

    @contextmanager
    def pieces(self, optimizer: Optimizer) -> Iterator[None]:
        """While inside, an optimizer names this rank's pieces, with their averaged gradients."""
        check_stepped(optimizer, self.table, self.names)
        used = self._agreement.used()
        self.watch.on_gradients(optimizer, self._reducer.generation)
        self.updater.bring_together(optimizer)
        with self.table.swapped(optimizer, used):
            yield

    def step(self, optimizer: Optimizer, run: Callable[[], Any] | None = None) -> Any:
        """Step this rank's pieces and send the new values on their way; for all ranks to call.

        Args:
            optimizer: The optimizer to step.
            run: Performs the step; None for ``optimizer.step``.

        Returns:
            What ``run`` returned.
        """
        with self.stepping(optimizer), torch.no_grad():
            return (run or optimizer.step)()

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Scope of :meth:`step`, in which the optimizer is to be stepped."""
        self.held.check_left("an optimizer step was called")
        self._follow_trained_set()
        buckets = [master.parameters for master in self.table.masters_of(optimizer)]
        digest = self.coordinator.end_step()
        for bucket in buckets:
            self.coordinator.before_update(bucket)
        used = self._agreement.used()
        check_stepped(optimizer, self.table, self.names)
        with self.coordinator.residency.update("optimizer step", digest) as digests:
            self.watch.on_gradients(optimizer, self._reducer.generation)
            with self.updater.stepping(optimizer, used):
                yield
        self.coordinator.passes.compare(digests)
        self._publish(buckets)

    def abort_step(self) -> None:
        """Leave a step that has raised: nothing is sent, the gradients of the step are lost."""
        self._raw_steps.abort()
        self._reducer.abort(ABORT_TIMEOUT)
        self.coordinator.abort(ABORT_TIMEOUT)
        self._agreement.forget()
        self.held.forget()

    # Around steps.

    def full_params(
        self, wanted: Wanted | None = None, writeback: bool = False, from_rank: int | None = None
    ) -> AbstractContextManager[None]:
        """While inside, parameters are whole; to be entered and left on all ranks.

        See :func:`lightning_zero.full_params`.

        Args:
            wanted: A module, a parameter, or an iterable of both; None for the whole model.
            writeback: Keep what was written to parameters; every rank must write the same values.
            from_rank: Keep what this rank has written.

        Raises:
            RuntimeError: Something was written that cannot be kept.
        """
        parameters = None if wanted is None else parameters_in(wanted)
        return self.held.scope(parameters, self.held.chosen(writeback, from_rank))

    def module_state_dict(self, module: nn.Module | None = None) -> dict[str, Any]:
        """State dict of the model, or of a part of it, on rank 0; empty on other ranks.

        See :func:`lightning_zero.checkpoint.consolidated.module_state_dict`.
        """
        with self.sharded_state_dict():
            return consolidated.module_state_dict(
                self.module if module is None else module, self._buckets, self.groups.control
            )

    @contextmanager
    def sharded_state_dict(self) -> Iterator[None]:
        """Inside, ``state_dict()`` has placeholders, and brings nothing in."""
        self.coordinator.visits.settle()
        for bucket in self._buckets:
            if bucket.status is ParamStatus.NOT_AVAILABLE:
                bucket.check_untouched()
        with self.coordinator.visits.left_alone():
            yield

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Inside, ``load_state_dict`` may load weights, the same on all ranks, module by module."""
        with self.held.loading():
            yield
        for master in self.table.masters:
            master.refresh()

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """State dict of an optimizer on rank 0, also after ``close``.

        See :func:`lightning_zero.checkpoint.consolidated.optimizer_state_dict`.
        """
        return consolidated.optimizer_state_dict(
            optimizer, self.table, self.groups.control, self.names
        )

    def load_optimizer_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Take this rank's pieces from a full state dict, the same on all ranks.

        See :func:`lightning_zero.checkpoint.restored.load_optimizer_state_dict`.
        """
        known = restored.claimed(optimizer, self.table, state_dict, self.names)
        if known:  # frozen now, but not for good: its state is kept for when it is unfrozen
            self._adopt(known, has_state=True)
        self.updater.bring_together(optimizer)
        self.updater.take_state(optimizer, state_dict)
        restored.load_optimizer_state_dict(
            optimizer, self.table, state_dict, self.names, is_speaker=self.groups.rank == 0
        )

    def close(self) -> None:
        """Give the module its parameters back, whole; to be called on all ranks.

        A model that was constructed sharded is sharded afterwards where it would not fit into the
        memory of each rank. Pieces of the optimizer state stay with the optimizers, so that a
        checkpoint can still be written.
        """
        if self._hooks is None:
            return
        self._reducer.close()  # frees the gradients, before more is taken
        if self.updater.is_late:  # training ends with the values of all updates it has begun
            buckets = [master.parameters for master in self.table.masters]
            for bucket in buckets:
                self.coordinator.before_update(bucket)
            with self.coordinator.residency.update("the end of training"):
                self.updater.settle()
            self._publish(buckets)
        slices = self._slices
        if slices is None or fits_whole(self._buckets, self.groups):
            with self.coordinator.held(self._buckets):
                self._shards.close()
                self._take_off()
                for bucket in self._buckets:
                    bucket.restore_parameters()
                self.coordinator.forget(self._buckets)
        else:  # bucket by bucket, so that no more than one of them is whole
            for bucket in self._buckets:
                with self.coordinator.held([bucket]):
                    bucket.restore_parameters(slices)
                    self.coordinator.forget([bucket])
            self._shards.close()
            self._take_off()
            watch_again(slices, self.module)
        self._buckets = []
        self.table.release()
        self._places.close()

    def abandon(self) -> None:
        """Take the engine off the module without any transfer, after an error.

        Sharded parameters are whole again where one rank holds all of them and can read them, else
        they stay NaN.
        """
        if self._hooks is None:
            return
        self.abort_step()
        self._shards.abandon()
        self._take_off()
        if all(bucket.layout.world_size == 1 for bucket in self._buckets):
            for bucket in self._buckets:
                with suppress(RuntimeError):  # of a damaged file nothing comes back
                    bucket.restore_from_shard()
            self.coordinator.forget(self._buckets)
            self._buckets = []
        self._places.close()

    @property
    def agreement(self) -> GradientAgreement:
        """What the ranks agree on about the gradients, between backward and step."""
        return self._agreement

    @property
    def is_open(self) -> bool:
        """Whether the module is still partitioned."""
        return self._hooks is not None

    @property
    def buckets(self) -> Sequence[ParameterBucket]:
        """Buckets of parameters in model order."""
        return self._buckets

    def measure(self) -> ModelStateBytes:
        """Bytes of model states alive on this rank now, see :func:`.measured.measure_states`."""
        with self.coordinator.visits.left_alone():  # listing them would bring them in
            parameters = list(self.module.parameters())
        return measure_states(parameters, self._buckets, self.table, self._optimizers)

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        parameter = next(iter(self.names), None)  # listing the module's would bring them in
        return parameter.device if parameter is not None else torch.device("cpu")

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The user's optimizers."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Train with these from now on; to be set on all ranks.

        Raises:
            ValueError: An optimizer cannot be used.
        """
        with self.coordinator.visits.left_alone():
            known = self.names.keys() | set(self.module.parameters())
        check_optimizers(optimizers, known, self.options, self.groups.world_size)
        self._optimizers[:] = optimizers
        control = self.groups.control
        self._trained_set = self._trained_set or TrainedSet(
            self.module, self.names, self.table, control
        )
        self._buffer_sync = self._buffer_sync or BufferSync(self.module, control)

    def _follow_trained_set(self) -> None:
        """Partition what came into training since the last look, see [Note: when it is seen]."""
        found = {} if self._trained_set is None else self._trained_set.newcomers()
        if found:
            self._adopt(found)

    def _adopt(self, found: Mapping[nn.Parameter, str], has_state: bool = False) -> None:
        """Partition parameters that were frozen or missing; for all ranks to call.

        Args:
            found: Parameters by name.
            has_state: They are partitioned for training even if they are frozen.
        """
        if self._trained_set is None or self._hooks is None:
            raise AssertionError("an engine without optimizers trains nothing")
        with self.coordinator.visits.left_alone():
            self._trained_set.take_in(found, self._optimizers, self.options)
            trained = {p for p in found if p.requires_grad or has_state}
            new = [p for p in found if self.coordinator.bucket_of(p) is None]
            self.groups.control.broadcast([p.data for p in new])
            wanted = {p for p in new if p in trained or self._policy.shards_parameters}
            place = self.options, self.groups, self._shards, self._places.make_home
            units, buckets = grow(self.module, wanted, *place, first_index=len(self._buckets))
            self._buckets += buckets
            known = {master.parameters for master in self.table.masters}
            touched = [b for b in self._buckets if not trained.isdisjoint(b.parameters)]
            thawed = [bucket for bucket in touched if bucket not in known]
            with self.coordinator.residency.update("newly trained parameters"):
                self.coordinator.add(buckets, thawed)
                self._shards.extend({b.layout.index: b.shard for b in buckets if not b.is_resident})
            self.table.add(self._places.masters(thawed, self._optimizers))
            gradients = [master.gradients for master in self.table.masters]
            self._reducer.follow(in_model_order(gradients, self.names))
            self._agreement.ask_again()
            self._hooks.follow(units)
            self._traced_buckets = _traced(self.module, self._buckets)
            self._buffer_sync = BufferSync(self.module, self.groups.control)
            self._trained_set.note()
        self.coordinator.release_all()

    def _publish(self, updated: Sequence[ParameterBucket]) -> None:
        """Stages 1 and 2: start to bring the new shards together; their next use waits."""
        self.groups.parameters.advance()
        for bucket in updated:
            if bucket.is_resident and bucket.layout.world_size > 1:
                bucket.begin_unshard(key=bucket.layout.index)
                if not self.options.overlap_comm or bucket in self._traced_buckets:
                    bucket.wait()

    def _take_off(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        if self._trained_set is not None:
            self._trained_set.close()
        _open_engines.discard(self)
        self._raw_steps.close()
        self._reducer.close()


def _traced(module: nn.Module, buckets: Iterable[ParameterBucket]) -> set[ParameterBucket]:
    """Buckets that traced code reads from: its reads are not seen, so none may be in flight."""
    compiled = _compat.compiled_modules(module)
    traced = {parameter for outer in compiled for parameter in outer.parameters()}
    return {bucket for bucket in buckets if not traced.isdisjoint(bucket.parameters)}


_open_engines: weakref.WeakSet[ZeroEngine] = weakref.WeakSet()


def engine_of(parameter: nn.Parameter) -> ZeroEngine | None:
    """The open engine that has a parameter; None if there is none."""
    return next((engine for engine in list(_open_engines) if parameter in engine.names), None)
