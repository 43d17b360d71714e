"""Lightning's side of the engine: ``Trainer(strategy=ZeroStrategy(stage=3))``."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero import _compat
from lightning_zero.access import full_params
from lightning_zero.batches import EvenBatches, UnevenBatches
from lightning_zero.callbacks import SelfChecks, StepObserver, TraceLog
from lightning_zero.checkpointing import CheckpointingStrategy
from lightning_zero.checks import (
    check_backend,
    check_callbacks,
    check_form,
    check_started_ranks,
    warn_of_idle_options,
)
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
from lightning_zero.engine import ZeroEngine
from lightning_zero.held import Wanted
from lightning_zero.memory.measure import ModelStateBytes
from lightning_zero.observe.recorder import Recorder
from lightning_zero.optim.overflow import OnNonfinite
from lightning_zero.params.bucket import explain_refused_write
from lightning_zero.params.units import LeafModule
from lightning_zero.partition import broadcast_module, construction
from lightning_zero.plan.layout import ShardBy
from lightning_zero.plan.offload import Offloaded
from lightning_zero.plan.prefetch import PrefetchOptions
from lightning_zero.plan.zenflow import ZenFlowConfig
from lightning_zero.precision import ZeroPrecision, zero_precision
from lightning_zero.self_check import Report

GRADIENT_AWAY = (
    "If this was a gradient: it is spread over the ranks. Clip with `self.clip_gradients(...)`, and"
    " scale losses with Trainer(precision='16-mixed'), not with a GradScaler of your own."
)
WRITE_IN_STEP = (
    " If this was a parameter: at stage 3 its values are only there while a step runs. Write to it"
    " in the step, or inside `with trainer.strategy.full_params(module, writeback=True):`."
)


SAVE_GRACE = timedelta(seconds=30)
"""How long a run that ends with an error waits for a checkpoint that is being written."""


class ZeroStrategy(CheckpointingStrategy):
    """Data parallelism with model states partitioned over the ranks (ZeRO).

    Behaves like ``DDPStrategy``: any LightningModule, optimizer, scheduler and callback, and
    ordinary checkpoints that every strategy, stage and number of ranks reads.

    Args:
        stage: 0 shards nothing (plain data parallelism), 1 shards optimizer state, 2 also
            gradients, 3 also parameters.
        overlap_comm: Let transfers travel while the model computes.
        bucket_numel: Capacity of a bucket in elements: what travels in one transfer, and the unit
            of buffers. None for about a twelfth of the model, at most 6 Mi elements.
        master_weights: Step an fp32 copy of parameters of lower precision (``bf16-true``). None for
            yes where there are such parameters.
        reduce_dtype: Dtype in which gradients travel and are summed, such as ``"float32"``. None
            for the dtype of the parameters.
        shard_by: ``"element"`` cuts parameters anywhere; ``"tensor"`` keeps each parameter whole on
            one rank, for optimizers that need whole matrices or norms (Muon, Adafactor, LAMB).
        prefetch: Stage 3: how much of the parameters may be in memory and how early they come, a
            :class:`PrefetchOptions` or a dict of its fields.
        gather_by: Stage 3: ``"one_sided"`` lets ranks run different modules, ``"collective"`` needs
            them in step; ``"auto"`` is collective with NCCL, else one-sided.
        leaf_modules: Stage 3: modules whose parameters travel as a whole: classes, names of
            classes, names of modules, or endings of names.
        offload_optimizer: Stages 1 to 3: ``"cpu"`` keeps master weights, optimizer states and shard
            gradients in host memory and steps them there, ``"nvme"`` streams the states from files;
            an :class:`OffloadConfig`, or a dict of its fields, says more. None for the device.
        offload_parameters: Stage 3: the same for shards of parameters, between their uses. The
            optimizer follows to the host.
        nvme_path: With ``"nvme"``: a folder on a fast local disk. None for that of the environment,
            ``LIGHTNING_ZERO_NVME_PATH``.
        zenflow: With ``offload_optimizer="cpu"``: step the important columns of weights on the
            device at every step, and the rest on the host once in several steps, a
            :class:`ZenFlowConfig` or a dict of its fields.
        keep_fp32: With ``bf16-true`` and ``16-true``: modules that stay in fp32 and compute in it,
            as for ``leaf_modules``, and parameters and buffers by name, or ending of a name.
        nonfinite_gradients: What happens to a step whose gradients are not finite on any rank:
            ``"step"`` warns and steps, as DDP does, ``"skip"`` leaves the step out on all ranks,
            ``"error"`` raises on all of them. With fp16, the loss scaler skips.
        uneven_batches: What happens where ranks run out of training batches at different times:
            ``"stop"`` ends the epoch on all ranks when the first has none left, ``"error"`` raises.
        wall_clock_breakdown: Print and log for each step how long forward and backward submit, wait
            and compute, and say at the end what bounds them.
        timeline: Folder to which each rank writes a timeline of its first 20 steps, for Perfetto.
        self_check: Compare this many first optimizer steps of a fit with an unsharded replica, and
            report the largest differences: of a small model in all parameters, of a large one in
            the first. None or 0 for none.
        checkpoint: ``"consolidated"`` is one ordinary file, gathered on rank 0; ``"sharded"`` a
            folder that all ranks write at once, while training goes on.
        exclude_frozen_parameters: Leave parameters that are not trained out of checkpoints; one
            loads on top of the base model.
        timeout: Longest wait for another rank, as a timedelta or in seconds.
        start_method: How ranks are started: ``"popen"``, ``"spawn"``, ``"fork"``, ``"forkserver"``.
        process_group_backend: As for ``DDPStrategy``.
        accelerator: As for ``DDPStrategy``.
        parallel_devices: As for ``DDPStrategy``.
        cluster_environment: As for ``DDPStrategy``.
        checkpoint_io: As for ``DDPStrategy``.
        precision_plugin: As for ``DDPStrategy``.

    Raises:
        ValueError: An option is out of range, or has no effect at this stage.

    Source:
        ZeRO (arXiv:1910.02054).
    """

    strategy_name = "zero"

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
        uneven_batches: UnevenBatches = "stop",
        wall_clock_breakdown: bool = False,
        timeline: str | Path | None = None,
        self_check: int | None = None,
        checkpoint: Literal["consolidated", "sharded"] = "consolidated",
        exclude_frozen_parameters: bool = False,
        timeout: timedelta | float | None = DEFAULT_TIMEOUT,
        start_method: StartMethod = "popen",
        process_group_backend: str | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
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
        self._policy = self.options.policy
        self._keep_fp32 = patterns_of("keep_fp32", keep_fp32)
        self._on_nonfinite = on_nonfinite_of(nonfinite_gradients)
        self._batches = EvenBatches(uneven_batches)
        self._observer = StepObserver(wall_clock_breakdown, timeline)
        self._self_checks = SelfChecks(self_check, self.options.offload.zenflow)
        self._trace_log = TraceLog()
        super().__init__(
            checkpoint,
            exclude_frozen_parameters,
            checkpoint_io,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timedelta_of(timeout),
            start_method=start_method_of(start_method),
        )

    # Attaching to a Trainer.

    @property
    def engine(self) -> ZeroEngine | None:
        """The engine of the fit or evaluation under way; None outside, and where none is needed."""
        return self._engine

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None
        if plugin is not None:
            self._precision_plugin = zero_precision(plugin)
            self._precision_plugin.take_options(self._on_nonfinite, self._keep_fp32)

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        return super().optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        _compat.set_optimizers(self, optimizers)
        if self._engine is not None:  # replaced while training
            plain = [_compat.plain_optimizer(optimizer) for optimizer in optimizers]
            self._engine.optimizers = _real(plain)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        register_stages(cls, strategy_registry)

    @override
    def setup_environment(self) -> None:
        check_started_ranks(self.cluster_environment, self.num_nodes, self.num_processes)
        module = self.lightning_module
        trainer = None if module is None else _compat.trainer_of(module)
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            # Before callbacks are set up, which may copy the whole model.
            check_callbacks(trainer, self._policy.shards_parameters, self._excludes_frozen)
        super().setup_environment()

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        groups = self._shard_groups()
        with construction(self.lightning_module, self.options, groups, self.root_device):
            yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._check_owner(trainer)
        check_form(self._checkpoint, self.checkpoint_io)
        accelerator, module = self.accelerator, self.lightning_module
        if accelerator is None or module is None:
            raise RuntimeError(
                "ZeroStrategy.setup() was called before a Trainer and a model were set"
            )
        accelerator.setup(trainer)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        self.model = module
        if is_fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        check_backend(self.process_group_backend, self.root_device.type)
        groups = self._shard_groups()
        broadcast_module(self.model, groups)
        if is_fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if is_fitting:
            self._begin_training(self._observer.open(trainer, self.root_device))
        elif self._policy.shards_parameters:
            self._engine = ZeroEngine(self.model, [], self.options, groups, broadcast=False)

    def _begin_training(self, recorder: Recorder) -> None:
        if self.model is None or self._groups is None:
            raise AssertionError("training begins after setup")
        optimizers = [_compat.plain_optimizer(optimizer) for optimizer in self.optimizers]
        engine = ZeroEngine(
            self.model,
            _real(optimizers),
            self.options,
            self._groups,
            broadcast=False,
            recorder=recorder,
        )
        self._engine = self._optimizer_engine = engine
        self._self_checks.open(_compat.trainer_of(self.lightning_module), engine, _real(optimizers))
        if isinstance(self._precision_plugin, ZeroPrecision):
            self._precision_plugin.engine = engine
        warn_of_idle_options(engine)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        module = self.lightning_module
        trainer = None if module is None else _compat.trainer_of(module)
        if trainer is None or not trainer.training:  # evaluation may differ between ranks
            return dataloader
        self._batches.begin(self._shard_groups().control, self.root_device)
        return self._batches.wrap(dataloader, trainer.limit_train_batches)

    @override
    def teardown(self) -> None:
        self._batches.end()
        self._observer.close()
        self._self_checks.close()
        engine, self._engine = self._engine, None
        module = self.lightning_module
        trainer = None if module is None else _compat.trainer_of(module)
        is_broken = trainer is None or trainer.state.status == TrainerStatus.INTERRUPTED
        if is_broken:
            self._groups = None  # ranks may have stopped at different calls of these
        if engine is not None:
            if is_broken:
                engine.abandon()  # other ranks may be gone: nothing may wait for them
            else:
                engine.close()
        if isinstance(self._precision_plugin, ZeroPrecision):
            self._precision_plugin.engine = None
        super().teardown()
        try:
            self._form.finish(SAVE_GRACE if is_broken else None)
        except RuntimeError as error:
            if not is_broken:
                raise
            rank_zero_warn(str(error))  # the error that ended the run is the one to raise
        self._let_groups_rest()

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._engine is not None:
            self._engine.abort_step()
            is_away = self._policy.shards_parameters
            explain_refused_write(exception, GRADIENT_AWAY + WRITE_IN_STEP * is_away)

    # One step.

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and self._engine is not None:
            self._engine.updater.begin_epoch()
        self._observer.on_batch_start()
        self._self_checks.on_batch_start()
        self._log_trace()

    @override
    def on_validation_start(self) -> None:
        self._observer.pause()

    @override
    def on_train_end(self) -> None:
        self._self_checks.on_train_end()
        self._observer.on_train_end(self.barrier)
        self._log_trace()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step_scope(), self._observer.manual_step():
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step_scope():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step_scope():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step_scope():
            return super().predict_step(*args, **kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self._engine.no_sync() if self._engine is not None else nullcontext():
            yield

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        with self._observer.automatic_step():
            return super().optimizer_step(
                _compat.plain_optimizer(optimizer), closure, model, **kwargs
            )

    def grad_norm(self, norm_type: float = 2.0) -> float:
        """Norm of the averaged gradients over all parameters and ranks, before any later clipping.

        To be called on all ranks, between backward and step (``on_before_optimizer_step``).
        """
        return self._running_engine("grad_norm").grad_norm(norm_type=norm_type)

    def full_params(
        self,
        module_or_params: Wanted | None = None,
        writeback: bool = False,
        from_rank: int | None = None,
    ) -> AbstractContextManager[None]:
        """While inside, parameters have their full values; to be entered and left on all ranks.

        See :func:`lightning_zero.full_params`.

        Args:
            module_or_params: A module, a parameter, or an iterable of both; None for the whole
                model.
            writeback: Keep what is written; all ranks must write the same values.
            from_rank: Keep what this rank writes.
        """
        wanted = self.lightning_module if module_or_params is None else module_or_params
        return full_params(() if wanted is None else wanted, writeback, from_rank)

    def measure_model_states(self) -> ModelStateBytes:
        """Bytes of parameters, gradients and optimizer state alive on this rank now."""
        return self._running_engine("measure_model_states").measure()

    @property
    def self_check_report(self) -> Report | None:
        """What the self-check of the latest fit has found; None before, and without one."""
        return self._self_checks.report

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank has sent for gradients and parameters in all runs so far."""
        now = 0 if self._groups is None else self._groups.sent_nbytes
        return self._rested_nbytes + now

    @property
    def trace_counts(self) -> dict[str, float]:
        """Stage 3: how often passes have left the trace, and how buckets came; empty outside a fit.

        Logged with the Trainer's loggers whenever another pass has left its trace.
        """
        if self._engine is None or not self._policy.shards_parameters:
            return {}
        return self._engine.coordinator.passes.report.metrics()

    def _log_trace(self) -> None:
        module, counts = self.lightning_module, self.trace_counts
        if module is not None and counts:
            self._trace_log.log(_compat.trainer_of(module), counts)

    # Checks.

    def _step_scope(self) -> AbstractContextManager[None]:
        return nullcontext() if self._engine is None else self._engine.step_scope()

    def _check_owner(self, trainer: pl.Trainer) -> None:
        if self._engine is not None or _compat.trainer_accelerator(trainer) is not self.accelerator:
            raise RuntimeError(
                "this ZeroStrategy is used by two Trainers at once: it holds the partitioned states"
                " of one. Give each Trainer a ZeroStrategy object of its own."
            )


def _real(optimizers: list[Optimizer]) -> list[Optimizer]:
    """Without the stand-in for `configure_optimizers` that returned None."""
    return [optimizer for optimizer in optimizers if not _compat.is_mock_optimizer(optimizer)]


__all__ = ["ZeroStrategy"]
