"""Fabric's side of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.precision import (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    FSDPPrecision,
    HalfPrecision,
    Precision,
    TransformerEnginePrecision,
    XLAPrecision,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.checks import check_backend, check_started_ranks, warn_of_idle_options
from lightning_zero.comm.groups import DEFAULT_TIMEOUT
from lightning_zero.config import (
    GatherBy,
    StartMethod,
    ZeroOptions,
    on_nonfinite_of,
    patterns_of,
    register_stages,
    start_method_of,
    timedelta_of,
)
from lightning_zero.engine import ZeroEngine, engine_of
from lightning_zero.fabric.checkpointing import CheckpointingStrategy
from lightning_zero.fabric.loans import LOANS
from lightning_zero.fabric.models import ZeroModule
from lightning_zero.fabric.precision import ZeroHalfPrecision
from lightning_zero.fabric.steps import StepGuard
from lightning_zero.held import parameters_in
from lightning_zero.optim.overflow import NonfiniteSteps, OnNonfinite
from lightning_zero.optim.pieces import parameters_of
from lightning_zero.params.kept import check_has_effect
from lightning_zero.params.units import LeafModule
from lightning_zero.partition import construction, construction_of_any
from lightning_zero.plan.layout import ShardBy
from lightning_zero.plan.offload import Offloaded
from lightning_zero.plan.prefetch import PrefetchOptions
from lightning_zero.plan.zenflow import ZenFlowConfig, check_epochs

OTHERS_PRECISION = (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    FSDPPrecision,
    TransformerEnginePrecision,
    XLAPrecision,
)
"""Plugins that change modules or steps in ways of their own."""


class ZeroStrategy(CheckpointingStrategy):
    """Data parallelism with model states partitioned over the ranks (ZeRO), for Fabric.

    Behaves like Fabric's ``DDPStrategy``. Every ``fabric.setup`` has states of its own, so several
    models may be trained, each with any number of optimizers.

    Args:
        stage: 0 shards nothing (plain data parallelism), 1 shards optimizer state, 2 also
            gradients, 3 also parameters.
        overlap_comm: As for :class:`lightning_zero.ZeroStrategy`, like all up to ``zenflow``.
        bucket_numel: Capacity of a bucket in elements.
        master_weights: Step an fp32 copy of parameters of lower precision (``bf16-true``).
        reduce_dtype: Dtype in which gradients travel and are summed.
        shard_by: ``"element"``, or ``"tensor"`` for optimizers that need whole parameters.
        prefetch: Stage 3: how much of the parameters may be in memory and how early they come.
        gather_by: Stage 3: ``"one_sided"``, ``"collective"`` or ``"auto"``.
        leaf_modules: Stage 3: modules whose parameters travel as a whole.
        offload_optimizer: Stages 1 to 3: ``"cpu"``, ``"nvme"`` or an ``OffloadConfig``.
        offload_parameters: Stage 3: the same for shards of parameters.
        nvme_path: With ``"nvme"``: a folder on a fast local disk.
        zenflow: With ``offload_optimizer="cpu"``: a ``ZenFlowConfig`` or a dict of its fields.
            Nobody tells when an epoch begins: say ``steps_per_epoch``, or
            ``select_strategy="step"``.
        keep_fp32: With ``bf16-true`` and ``16-true``: modules that stay in fp32 and compute in it,
            as for ``leaf_modules``, and parameters and buffers by name, or ending of a name.
        nonfinite_gradients: What happens to a step whose gradients are not finite on any rank:
            ``"step"`` warns and steps, as DDP does, ``"skip"`` leaves the step out on all ranks,
            ``"error"`` raises on all of them. With fp16, the loss scaler skips.
        checkpoint: ``"consolidated"`` is one ordinary file, gathered on rank 0; ``"sharded"`` a
            folder that all ranks write at once.
        timeout: Longest wait for another rank, as a timedelta or in seconds.
        start_method: How ranks are started: ``"popen"``, ``"spawn"``, ``"fork"``, ``"forkserver"``.
        process_group_backend: As for Fabric's ``DDPStrategy``.
        accelerator: As for Fabric's ``DDPStrategy``.
        parallel_devices: As for Fabric's ``DDPStrategy``.
        cluster_environment: As for Fabric's ``DDPStrategy``.
        checkpoint_io: As for Fabric's ``DDPStrategy``.
        precision: As for Fabric's ``DDPStrategy``.

    Raises:
        ValueError: An option is out of range, or has no effect at this stage.

    Source:
        ZeRO (arXiv:1910.02054).
    """

    def __init__(
        self,
        stage: int = 3,
        *,
        overlap_comm: bool = True,
        bucket_numel: int | None = None,
        master_weights: bool | None = None,
        reduce_dtype: torch.dtype | str | None = None,
        shard_by: ShardBy = "element",
        prefetch: PrefetchOptions | Mapping[str, Any] | None = None,
        gather_by: GatherBy = "auto",
        leaf_modules: Sequence[LeafModule] = (),
        offload_optimizer: Offloaded = None,
        offload_parameters: Offloaded = None,
        nvme_path: str | Path | None = None,
        zenflow: ZenFlowConfig | Mapping[str, Any] | None = None,
        keep_fp32: Sequence[LeafModule] = (),
        nonfinite_gradients: OnNonfinite = "step",
        checkpoint: Literal["consolidated", "sharded"] = "consolidated",
        timeout: timedelta | float | None = DEFAULT_TIMEOUT,
        start_method: StartMethod = "popen",
        process_group_backend: str | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
    ) -> None:
        self.options = ZeroOptions(
            stage=stage,
            overlap_comm=overlap_comm,
            bucket_numel=bucket_numel,
            master_weights=master_weights,
            reduce_dtype=reduce_dtype,
            shard_by=shard_by,
            prefetch=prefetch,
            gather_by=gather_by,
            leaf_modules=leaf_modules,
            offload_optimizer=offload_optimizer,
            offload_parameters=offload_parameters,
            nvme_path=nvme_path,
            zenflow=zenflow,
        )
        check_epochs(self.options.offload.zenflow)
        self._keep_fp32 = patterns_of("keep_fp32", keep_fp32)
        self._guard = StepGuard(on_nonfinite_of(nonfinite_gradients))
        super().__init__(
            checkpoint,
            checkpoint_io,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timedelta_of(timeout),
            start_method=start_method_of(start_method),
        )
        self._backward_sync_control = BackwardSync()  # type: ignore[assignment]  # by its method

    # Attaching to a Fabric.

    @property
    @override
    def precision(self) -> Precision:
        return super().precision

    @precision.setter
    def precision(self, plugin: Precision | None) -> None:
        if isinstance(plugin, OTHERS_PRECISION):
            raise ValueError(
                f"ZeroStrategy does not support the precision plugin {type(plugin).__name__}."
                " Supported: precision='32-true', '64-true', '16-true', 'bf16-true', '16-mixed',"
                " 'bf16-mixed'."
            )
        self._guard.check(plugin)
        if plugin is not None and self._keep_fp32 and not isinstance(plugin, ZeroHalfPrecision):
            check_has_effect(self._keep_fp32, plugin.precision)
            if isinstance(plugin, HalfPrecision):
                plugin = ZeroHalfPrecision(plugin.precision, self._keep_fp32)
        self._precision = plugin

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        register_stages(cls, strategy_registry)

    @override
    def setup_environment(self) -> None:
        check_started_ranks(self.cluster_environment, self.num_nodes, self.num_processes)
        super().setup_environment()

    # Setting up.

    @override
    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        usual = super().module_init_context(empty_init)
        with usual, construction_of_any(self.options, self._shard_groups(), self.root_device):
            yield

    @override
    def module_to_device(self, module: nn.Module) -> None:
        tensors = [*module.parameters(), *module.buffers()]
        if any(tensor.is_meta for tensor in tensors):
            with construction(module, self.options, self._shard_groups(), self.root_device):
                pass  # what is on the meta device is made, and initializes itself
        super().module_to_device(module)

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]  # not DDP's
        return self._set_up(module, [])

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        models = self._models.holding_parameters_of(optimizer)
        if len(models) != 1:
            found = "none" if not models else f"{len(models)}"
            raise ValueError(
                f"{type(optimizer).__name__} has parameters of {found} of the modules that were set"
                " up, and an optimizer trains one. Set up the module first, or both together:"
                " `model, optimizer = fabric.setup(model, optimizer)`. Modules that share an"
                " optimizer can be set up as one, in an nn.ModuleDict."
            )
        models[0].add_optimizers([optimizer])
        return optimizer

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any | None = None
    ) -> tuple[nn.Module, list[Optimizer], Any | None]:
        return self._set_up(module, optimizers), optimizers, scheduler

    def _set_up(self, module: nn.Module, optimizers: list[Optimizer]) -> ZeroModule:
        self._check_new(module)
        if any(p.is_meta for optimizer in optimizers for p in parameters_of(optimizer)):
            raise ValueError(
                "an optimizer has parameters on the meta device, which are others now that the"
                " model has memory: set up the model first, `model = fabric.setup_module(model)`,"
                " then make the optimizer and set it up, `fabric.setup_optimizers(optimizer)`"
            )
        check_backend(self.process_group_backend, self.root_device.type)
        groups = LOANS.lend(self._timeout)
        engine = ZeroEngine(module, optimizers, self.options, groups)
        LOANS.keep(engine, groups)
        model = ZeroModule(module, engine)
        self._models.add(model)
        warn_of_idle_options(engine)
        return model

    def _check_new(self, module: nn.Module) -> None:
        taken = [p for p in parameters_in(module) if engine_of(p) is not None]
        if isinstance(module, ZeroModule) or taken:
            raise RuntimeError(
                f"{type(module).__name__} was set up already, or shares {len(taken)} parameter(s)"
                " with a module that was: each parameter has one place. Use what fabric.setup()"
                " has returned; set up modules that share parameters as one, in an"
                " nn.ModuleDict; or give a module back first: fabric.strategy.release(module)."
            )

    def engine(self, module: nn.Module) -> ZeroEngine:
        """The engine of a model: bytes of its states, norms, traces.

        Args:
            module: What ``fabric.setup`` has returned or was given.

        Raises:
            ValueError: It was not set up.
        """
        return self._model(module).engine

    def release(self, module: nn.Module) -> None:
        """Give a module its parameters back, whole on every rank, and its optimizers' states up.

        To be called on all ranks. The module may be set up again, or leave Fabric.

        Args:
            module: What ``fabric.setup`` has returned or was given.

        Raises:
            ValueError: It was not set up.
        """
        model = self._model(module)
        model.close()
        LOANS.take_back(model.engine)
        if isinstance(self.precision, ZeroHalfPrecision):
            self.precision.release(model.module)
        for optimizer in model.engine.optimizers:
            optimizer.state.clear()  # pieces, which are nothing to an optimizer of whole parameters

    @override
    def teardown(self) -> None:
        for model in self._models:
            model.close()
            LOANS.take_back(model.engine)
        LOANS.take_back(self)
        self._groups = None
        super().teardown()

    def _model(self, module: nn.Module) -> ZeroModule:
        inner = map(self._models.with_module, module.modules())
        found = next((model for model in inner if model is not None), None)
        if found is None:
            raise ValueError(
                f"{type(module).__name__} was not set up, or was released: call"
                " `fabric.setup(module, ...)` first"
            )
        return found

    # One step.

    @property
    def nonfinite_steps(self) -> NonfiniteSteps:
        """Steps whose gradients were not finite; those that loss scaling has skipped."""
        return self._guard.nonfinite

    @override
    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Step this rank's pieces; the closure runs before."""
        engine = self._engine_of(optimizer)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        is_taken = self._guard.is_taken(self.precision, engine, optimizer)
        step = self.precision.optimizer_step
        result = engine.step(optimizer, lambda: step(optimizer, **kwargs) if is_taken else None)
        return result if closure is None else loss

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        engine = self._engine_of(optimizer)
        self._guard.unscale(self.precision, engine, optimizer)
        norm = engine.clip_grad_norm_(
            optimizer, float(max_norm), float(norm_type), error_if_nonfinite
        )
        return torch.tensor(norm, device=engine.device)

    @override
    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float
    ) -> None:
        engine = self._engine_of(optimizer)
        self._guard.unscale(self.precision, engine, optimizer)
        engine.clip_grad_value_(optimizer, float(clip_val))

    def _engine_of(self, optimizer: Optimizer) -> ZeroEngine:
        model = self._models.with_optimizer(optimizer)
        if model is None:
            raise RuntimeError(
                f"this {type(optimizer).__name__} was not set up, or its model was released: call"
                " `fabric.setup(model, optimizer)` first"
            )
        return model.engine


class BackwardSync:
    """What ``fabric.no_backward_sync`` asks."""

    def no_backward_sync(
        self, module: nn.Module, enabled: bool = True
    ) -> AbstractContextManager[None]:
        """Backwards inside are not the last of an accumulation window.

        Args:
            module: A model that was set up.
            enabled: False for the last one.

        Raises:
            TypeError: It was not set up.
        """
        if not isinstance(module, ZeroModule):
            raise TypeError(
                f"no_backward_sync() takes what fabric.setup() returns, got {type(module).__name__}"
            )
        return module.engine.no_sync() if enabled else nullcontext()


__all__ = ["ZeroStrategy"]
