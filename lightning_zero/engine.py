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

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero import _compat
from lightning_zero.comm import ShardGroups
from lightning_zero.config import ZeroOptions
from lightning_zero.grads.bucket import GradientBucket
from lightning_zero.grads.reducer import GradientReducer
from lightning_zero.memory.measure import ModelStateBytes, storage_nbytes
from lightning_zero.memory.pool import BufferPool
from lightning_zero.optim import geometry
from lightning_zero.optim.agreement import GradientAgreement
from lightning_zero.optim.pieces import MasterShard, PieceTable, parameters_of
from lightning_zero.params.bucket import ParameterBucket, ParamStatus, is_placeholder
from lightning_zero.params.buffers import BufferSync
from lightning_zero.params.units import Unit, module_units
from lightning_zero.plan.layout import (
    BucketLayout,
    ParameterSpec,
    default_bucket_numel,
    plan_buckets,
)
from lightning_zero.prefetch.coordinator import ParameterCoordinator
from lightning_zero.prefetch.hooks import ModuleHooks, forward_scope

ALIGN_NBYTES = 64
ABORT_TIMEOUT = timedelta(seconds=5)
"""How long an abort waits for transfers under way; their buffers are given up after it."""


@dataclass(frozen=True, slots=True)
class StagePolicy:
    """What a stage shards. The only place where a stage is a number."""

    shards_optimizer: bool
    shards_gradients: bool
    shards_parameters: bool

    @classmethod
    def of(cls, stage: int) -> StagePolicy:
        """Policy of stage 0, 1, 2 or 3."""
        return cls(stage >= 1, stage >= 2, stage >= 3)


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
    ) -> None:
        self.module = module
        self.options = options
        self.groups = groups
        self._policy = StagePolicy.of(options.stage)
        self._optimizers = list(optimizers)
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._check()
        broadcast_module(module, groups)
        self._buckets = self._make_buckets()
        self.coordinator = ParameterCoordinator(
            self._buckets, options.overlap_comm, self._refresh_master
        )
        gradients = self._make_gradients()
        self.table = PieceTable(
            [
                MasterShard(parameters, bucket, options.master_weights is not False)
                for parameters, bucket in gradients
            ]
        )
        self._reducer = GradientReducer(
            [bucket for _, bucket in gradients],
            groups.gradients,
            BufferPool(self.device),
            is_scattered=self._policy.shards_optimizer,
            overlap_comm=options.overlap_comm,
            on_complete=self.coordinator.on_gradients_complete,
            on_finish=self.coordinator.on_backward_end,
        )
        self._agreement = GradientAgreement(
            self._reducer, self.table, groups.gradients, self._policy.shards_optimizer
        )
        self._buffer_sync = BufferSync(module, groups.control) if optimizers else None
        self._hooks: ModuleHooks | None = ModuleHooks(
            module, self._units, self.coordinator, self.step_scope
        )
        traced = {p for outer in _compat.compiled_modules(module) for p in outer.parameters()}
        # Reads inside of traced code are not seen, so nothing may be in flight there.
        self._traced_buckets = {b for b in self._buckets if not traced.isdisjoint(b.parameters)}
        self.coordinator.release_all()

    # One step, in the order of its calls.

    @contextmanager
    def step_scope(self) -> Iterator[None]:
        """Everything that runs inside is one forward, with its loss, or one of evaluation."""
        buffers = None if self.coordinator.is_in_step() else self._buffer_sync
        if buffers is not None:
            buffers.before_forward()
        with forward_scope(self.coordinator):
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
            yield
            return
        synchronises, self._reducer.synchronises = self._reducer.synchronises, False
        try:
            yield
        finally:
            self._reducer.synchronises = synchronises

    def backward_scope(self) -> AbstractContextManager[None]:
        """Backward calls inside count as one; their gradients are averaged when it ends."""
        return self._reducer.backward_scope()

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
        self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0
    ) -> float:
        """Scale an optimizer's gradients so that their norm over all ranks is at most ``max_norm``.

        Returns:
            The norm before clipping.
        """
        norm = self._agreement.total_norm(optimizer, norm_type)
        # In fp32 as torch.nn.utils.clip_grad_norm_ does, so that both scale by the same number.
        scale = torch.clamp(max_norm / (torch.tensor(norm) + 1e-6), max=1.0)
        for piece in self.table.pieces_of(optimizer):
            grad = piece.grad
            grad.mul_(scale.to(grad.device))
        return norm

    def clip_grad_value_(self, optimizer: Optimizer, clip_value: float) -> None:
        """Clamp the averaged gradients of an optimizer to ``[-clip_value, clip_value]``."""
        self._agreement.used()
        for piece in self.table.pieces_of(optimizer):
            piece.grad.clamp_(-clip_value, clip_value)

    @contextmanager
    def pieces(self, optimizer: Optimizer) -> Iterator[None]:
        """While inside, an optimizer names this rank's pieces, with their averaged gradients."""
        self._check_trained_set(optimizer)
        with self.table.swapped(optimizer, self._agreement.used()):
            yield

    def step(self, optimizer: Optimizer, run: Callable[[], Any] | None = None) -> Any:
        """Step this rank's pieces and send the new values on their way; for all ranks to call.

        Args:
            optimizer: The optimizer to step.
            run: Performs the step; None for ``optimizer.step``.

        Returns:
            What ``run`` returned.
        """
        masters = self.table.masters_of(optimizer)
        for master in masters:
            self.coordinator.before_update(master.parameters)
        with torch.no_grad(), self.pieces(optimizer):
            result = (run or optimizer.step)()
        for master in masters:
            master.store()
            master.drop_step_grad()
        self._publish([master.parameters for master in masters])
        return result

    def abort_step(self) -> None:
        """Leave a step that has raised: nothing is sent, the gradients of the step are lost."""
        self._reducer.abort(ABORT_TIMEOUT)
        self.coordinator.abort(ABORT_TIMEOUT)
        self._agreement.forget()

    # Around steps.

    @contextmanager
    def full_params(
        self, module: nn.Module | None = None, writeback: bool = False
    ) -> Iterator[None]:
        """While inside, parameters are whole; to be entered and left on all ranks.

        Args:
            module: Part of the model whose parameters are wanted; None for the whole model.
            writeback: Keep what was written to parameters; every rank must write the same values.
        """
        wanted = {self.coordinator.bucket_of(p) for p in (module or self.module).parameters()}
        buckets = [bucket for bucket in self._buckets if bucket in wanted]
        with self.coordinator.held(buckets):
            yield
            for bucket in buckets if writeback else ():
                bucket.keep_written_values()
                self._refresh_master(bucket)

    def _refresh_master(self, bucket: ParameterBucket) -> None:
        for master in self.table.masters:
            if master.parameters is bucket:
                master.refresh()

    def settle(self) -> None:
        """Let no parameter be open that was read outside of a step; before states are gathered."""
        self.coordinator.settle()
        for bucket in self._buckets:
            if bucket.status is ParamStatus.NOT_AVAILABLE:
                bucket.check_untouched()

    def close(self) -> None:
        """Give the module its parameters back, whole; to be called on all ranks.

        Pieces of the optimizer state stay with the optimizers, so that a checkpoint can still be
        written.
        """
        if self._hooks is None:
            return
        with self.coordinator.held(self._buckets):
            self._take_off()
            for bucket in self._buckets:
                bucket.restore_parameters()
            self._buckets = []
            self.coordinator.forget_buckets()
        self.table.release()

    def abandon(self) -> None:
        """Take the engine off the module without any transfer, after an error.

        Sharded parameters are whole again where one rank holds all of them, else they stay NaN.
        """
        if self._hooks is None:
            return
        self.abort_step()
        self._take_off()
        if self._shard_world_size == 1:
            for bucket in self._buckets:
                bucket.restore_from_shard()
            self._buckets = []
            self.coordinator.forget_buckets()

    @property
    def is_open(self) -> bool:
        """Whether the module is still partitioned."""
        return self._hooks is not None

    @property
    def buckets(self) -> Sequence[ParameterBucket]:
        """Buckets of parameters in model order."""
        return self._buckets

    def name_of(self, parameter: nn.Parameter) -> str:
        """Fully qualified name of a parameter of the module."""
        return self._names.get(parameter, "<not in the module>")

    def measure(self) -> ModelStateBytes:
        """Bytes of model states alive on this rank now, each storage counted once."""
        states = [
            value
            for optimizer in self._optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        copies = [master.tensor for master in self.table.masters if master.has_copy]
        grads = [bucket.held_shard_grad() for bucket in self._reducer.buckets]
        local = [p.grad for p in self.table.place if p.grad is not None]
        parameters = [p.data for p in self.module.parameters()]
        shards = [bucket.shard for bucket in self._buckets]
        return ModelStateBytes(
            parameters_nbytes=storage_nbytes([*parameters, *shards]),
            gradients_nbytes=storage_nbytes([*local, *(g for g in grads if g is not None)]),
            optimizer_nbytes=storage_nbytes([*states, *copies]),
        )

    # Construction.

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        parameter = next(self.module.parameters(), None)
        return parameter.device if parameter is not None else torch.device("cpu")

    def _check(self) -> None:
        shard_by = self.options.shard_by if self._shard_world_size > 1 else "none"
        for optimizer in self._optimizers:
            geometry.check_optimizer(optimizer, shard_by)
            strangers = [p.shape for p in parameters_of(optimizer) if p not in self._names]
            if strangers:
                raise ValueError(
                    f"{type(optimizer).__name__} holds {len(strangers)} parameter(s) that are"
                    f" not in the model (shapes {[tuple(shape) for shape in strangers[:5]]}):"
                    " they would never be averaged over the ranks. Register them in the model."
                )
        if self._policy.shards_parameters and _compat.compiled_modules(self.module):
            raise ValueError(
                "stage 3 cannot train a module that torch.compile has compiled: its parameters are"
                " not there while it is traced. Use stage 1 or 2, or do not compile."
            )
        for parameter, name in self._names.items():
            if isinstance(parameter, nn.UninitializedParameter):
                raise ValueError(
                    f"{name!r} has no shape yet (a lazy module): run a dummy batch in `setup` or"
                    " `configure_model`, so that it can be partitioned"
                )
            if parameter.is_complex():
                raise ValueError(
                    f"{name!r} is complex ({parameter.dtype}), which ZeroStrategy cannot partition:"
                    " store it as a real tensor (torch.view_as_real) or use strategy='ddp'"
                )

    def _check_trained_set(self, optimizer: Optimizer) -> None:
        strays = [
            self.name_of(p)
            for p in parameters_of(optimizer)
            if p.requires_grad and p not in self.table
        ]
        if strays:
            raise RuntimeError(
                f"{type(optimizer).__name__} is to train {strays[:5]}, which were frozen or missing"
                " when training was set up: they are not partitioned, and would not"
                " be averaged over the ranks. Let them require gradients from the start"
                " (requires_grad_(True) before trainer.fit), or call trainer.fit again."
            )

    @property
    def _shard_world_size(self) -> int:
        return self.groups.world_size if self._policy.shards_optimizer else 1

    def _make_buckets(self) -> list[ParameterBucket]:
        wanted = {
            parameter
            for parameter in self._names
            if parameter.requires_grad or self._policy.shards_parameters
        }
        total = sum(parameter.numel() for parameter in wanted)
        bucket_numel = self.options.bucket_numel or default_bucket_numel(total)
        self._units = module_units(self.module, bucket_numel)
        by_fqn = {
            fqn: (unit, parameter)
            for unit, module_unit in enumerate(self._units)
            for fqn, parameter in module_unit.parameters
            if parameter in wanted
        }
        specs = [_spec(fqn, parameter, unit) for fqn, (unit, parameter) in by_fqn.items()]
        item_nbytes = min((p.element_size() for p in wanted), default=4)
        layouts = plan_buckets(
            specs,
            world_size=self._shard_world_size,
            bucket_numel=bucket_numel,
            align_numel=ALIGN_NBYTES // item_nbytes,
            shard_by=self.options.shard_by,
        )
        return [
            ParameterBucket(
                layout,
                [by_fqn[slot.fqn][1] for slot in layout.slots],
                self.groups.parameters,
                is_resident=not self._policy.shards_parameters,
            )
            for layout in layouts
        ]

    def _make_gradients(self) -> list[tuple[ParameterBucket, GradientBucket]]:
        return [
            (
                bucket,
                GradientBucket(
                    bucket.layout,
                    bucket.parameters,
                    bucket.rank,
                    self.options.wire_dtype or bucket.dtype,
                ),
            )
            for bucket in self._buckets
            if bucket.parameters[0].requires_grad
        ]

    def _publish(self, updated: Sequence[ParameterBucket]) -> None:
        """Stages 1 and 2: start to bring the new shards together; their next use waits."""
        self.groups.parameters.advance()
        if self._shard_world_size == 1:
            return
        for bucket in updated:
            if bucket.is_resident:
                bucket.begin_unshard(key=bucket.layout.index)
                if not self.options.overlap_comm or bucket in self._traced_buckets:
                    bucket.wait()

    def _take_off(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        self._reducer.close()


def broadcast_module(module: nn.Module, groups: ShardGroups) -> None:
    """Give all ranks the parameters and buffers of rank 0.

    Raises:
        RuntimeError: A parameter has lost its values in an earlier error.
    """
    for name, parameter in module.named_parameters():
        if is_placeholder(parameter):
            raise RuntimeError(
                f"{name!r} has no values: training of this model ended with an error while its"
                " parameters were sharded over the ranks. Make the model anew, or load a"
                " checkpoint into a new one."
            )
    tensors = [parameter.data for parameter in module.parameters()]
    groups.control.broadcast(tensors + [buffer.data for buffer in module.buffers()])


def _spec(fqn: str, parameter: nn.Parameter, unit: int) -> ParameterSpec:
    kind = (parameter.dtype, parameter.device, parameter.requires_grad)
    return ParameterSpec(fqn, tuple(parameter.shape), _dense_stride(parameter), kind, unit)


def _dense_stride(parameter: nn.Parameter) -> tuple[int, ...]:
    """Strides of a dense copy of a parameter that keeps its memory order (channels last)."""
    dense = torch.empty_like(
        parameter, device="meta", memory_format=torch.preserve_format, requires_grad=False
    )
    return tuple(dense.stride())


__all__ = ["Unit", "BucketLayout", "ZeroEngine", "ZeroOptions", "broadcast_module"]
