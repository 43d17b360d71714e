"""Typed options of the engine, checked when they are made."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lightning_zero.optim.overflow import OnNonfinite
from lightning_zero.params.units import LeafModule
from lightning_zero.plan.layout import ShardBy
from lightning_zero.plan.offload import NVME_PATH_VARIABLE, Offloaded, OffloadPlan
from lightning_zero.plan.prefetch import PrefetchOptions
from lightning_zero.plan.zenflow import ZenFlowConfig

GatherBy = Literal["auto", "one_sided", "collective"]
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]

STAGES = (0, 1, 2, 3)
NAMED: dict[str, dict[str, Any]] = {
    "zero_stage_1": {"stage": 1},
    "zero_stage_2": {"stage": 2},
    "zero_stage_3": {"stage": 3},
    "zero_stage_2_offload": {"stage": 2, "offload_optimizer": "cpu"},
    "zero_stage_3_offload": {
        "stage": 3,
        "offload_optimizer": "cpu",
        "offload_parameters": "cpu",
    },
    "zero_stage_3_nvme": {
        "stage": 3,
        "offload_optimizer": "nvme",
        "offload_parameters": "nvme",
    },
}
"""Strategies that are chosen by name."""
_DTYPE_NAMES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float64": torch.float64,
}


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


@dataclass(kw_only=True, slots=True)
class ZeroOptions:
    """What the engine shards, and how.

    Raises:
        ValueError: A value is out of range, or has no effect at this stage.
    """

    stage: int = 3
    """0 shards nothing (as DDP), 1 optimizer state, 2 also gradients, 3 also parameters."""

    overlap_comm: bool = True
    """Let transfers travel while the model computes."""

    bucket_numel: int | None = None
    """Capacity of a bucket in elements; None for about a twelfth of the model, at most 6 Mi."""

    master_weights: bool | None = None
    """Step an fp32 copy of parameters of lower precision; None for yes."""

    reduce_dtype: torch.dtype | str | None = None
    """Dtype in which gradients travel and are summed; None for that of the parameters."""

    shard_by: ShardBy = "element"
    """``"element"``, or ``"tensor"`` for optimizers that need whole parameters."""

    prefetch: PrefetchOptions | Mapping[str, Any] | None = None
    """Stage 3: what is fetched ahead and kept. A mapping holds the fields of the class."""

    gather_by: GatherBy = "auto"
    """Stage 3: how full parameters come together. ``"one_sided"``: a rank reads the shards of the
    others without a call of theirs, so ranks may run different modules. ``"collective"``: all ranks
    call together. ``"auto"``: collective where the backend is NCCL, else one-sided."""

    leaf_modules: Sequence[LeafModule] = ()
    """Stage 3: modules whose parameters travel as a whole, whatever runs inside of them. Classes,
    names of classes, full names of modules, or endings of full names (``".experts"``)."""

    offload_optimizer: Offloaded = None
    """Stages 1 to 3: where master weights, optimizer states and shard gradients live and are
    stepped: ``"cpu"``, ``"nvme"``, an :class:`OffloadConfig` or its fields; None for the device."""

    offload_parameters: Offloaded = None
    """Stage 3: where shards of parameters live between their uses, as for ``offload_optimizer``.
    The optimizer's states follow to the host if nothing is said about them."""

    nvme_path: str | Path | None = None
    """With ``"nvme"``: a folder on a fast local disk; None for that of the environment."""

    zenflow: ZenFlowConfig | Mapping[str, Any] | None = None
    """With ``offload_optimizer="cpu"``: step important columns on the device at every step and the
    rest less often, a :class:`ZenFlowConfig` or its fields."""

    def __post_init__(self) -> None:
        if isinstance(self.stage, bool) or self.stage not in STAGES:
            raise ValueError(
                f"stage must be 0, 1, 2 or 3, got {self.stage!r}: 0 is plain data parallelism, 1"
                " shards optimizer state, 2 also gradients, 3 also parameters"
            )
        if self.shard_by not in ("element", "tensor"):
            raise ValueError(f"shard_by must be 'element' or 'tensor', got {self.shard_by!r}")
        if self.shard_by == "tensor" and self.stage == 0:
            raise ValueError(
                "shard_by='tensor' has no effect at stage 0, which shards nothing: remove it, or"
                " choose stage 1, 2 or 3"
            )
        if self.bucket_numel is not None and (
            isinstance(self.bucket_numel, bool)
            or not isinstance(self.bucket_numel, int)
            or self.bucket_numel < 1
        ):
            raise ValueError(
                f"bucket_numel must be a positive number of elements, got {self.bucket_numel!r}"
            )
        for name in ("overlap_comm", "master_weights"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "master_weights" and value is None):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        self.reduce_dtype = _floating_dtype(self.reduce_dtype)
        self._check_stage_three()
        self._check_offload()

    def _check_offload(self) -> None:
        plan = self.offload
        if plan.optimizer is not None and not self.policy.shards_optimizer:
            raise ValueError(
                f"offload_optimizer needs stage 1, 2 or 3, got stage {self.stage}: where nothing is"
                " sharded, every rank of a host would keep and step all states there"
            )
        if plan.steps_ahead and not self.policy.shards_gradients:
            raise ValueError(
                f"super_offload needs stage 2 or 3, got stage {self.stage}, which keeps whole"
                " gradients until the last backward of a step: choose stage 2, or remove"
                " super_offload"
            )
        if plan.parameters is not None and not self.policy.shards_parameters:
            raise ValueError(
                f"offload_parameters needs stage 3, got stage {self.stage}, which keeps all"
                " parameters on the device: choose stage 3, or offload_optimizer alone"
            )
        if plan.optimizer is not None and self.master_weights is False:
            raise ValueError(
                "master_weights=False has no effect with offload_optimizer: the host steps a copy"
                " in fp32 anyway. Remove one of the two."
            )

    def _check_stage_three(self) -> None:
        if self.gather_by not in ("auto", "one_sided", "collective"):
            raise ValueError(
                f"gather_by must be 'auto', 'one_sided' or 'collective', got {self.gather_by!r}"
            )
        given = {
            "prefetch": self.prefetch is not None,
            "gather_by": self.gather_by != "auto",
            "leaf_modules": bool(self.leaf_modules),
        }
        if not self.policy.shards_parameters:
            for name in (name for name, is_given in given.items() if is_given):
                raise ValueError(
                    f"{name} has no effect at stage {self.stage}, which keeps all parameters in"
                    " memory: remove it, or choose stage 3"
                )
        options = self.prefetch_options
        if not self.overlap_comm and options.prefetch_numel:
            raise ValueError(
                f"prefetch_numel={options.prefetch_numel} has no effect with overlap_comm=False,"
                " which fetches each bucket when it is needed: remove one of the two"
            )
        self.leaf_modules = patterns_of("leaf_modules", self.leaf_modules)

    @property
    def prefetch_options(self) -> PrefetchOptions:
        """``prefetch`` as an object."""
        if self.prefetch is None:
            return PrefetchOptions()
        if isinstance(self.prefetch, PrefetchOptions):
            return self.prefetch
        try:
            return PrefetchOptions(**self.prefetch)
        except TypeError as error:
            known = list(PrefetchOptions.__dataclass_fields__)
            raise ValueError(
                f"prefetch must hold some of {known}, got {self.prefetch!r} ({error})"
            ) from error

    @property
    def offload(self) -> OffloadPlan:
        """``offload_optimizer``, ``offload_parameters`` and ``nvme_path``, resolved."""
        place = self.nvme_path, os.environ.get(NVME_PATH_VARIABLE)
        return OffloadPlan.of(self.offload_optimizer, self.offload_parameters, *place, self.zenflow)

    @property
    def policy(self) -> StagePolicy:
        """What the stage shards."""
        return StagePolicy.of(self.stage)

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """``reduce_dtype`` as a dtype."""
        return _floating_dtype(self.reduce_dtype)


def _floating_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    if value is None:
        return None
    found = _DTYPE_NAMES.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(
            f"reduce_dtype must be a floating dtype or one of {sorted(_DTYPE_NAMES)}, got {value!r}"
        )
    return found


def patterns_of(option: str, value: Sequence[LeafModule]) -> tuple[LeafModule, ...]:
    """Patterns that choose modules, see :func:`lightning_zero.params.units.module_units`.

    Args:
        option: Name of the option.
        value: As the user gave it.

    Raises:
        ValueError: It is no list of classes of modules and names.
    """
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if not is_list or not all(
        leaf if isinstance(leaf, str) else isinstance(leaf, type) and issubclass(leaf, nn.Module)
        for leaf in value
    ):
        raise ValueError(f"{option} must be a list of module classes and names, got {value!r}")
    return tuple(value)


def timedelta_of(value: timedelta | float | None) -> timedelta | None:
    """A time that is given as such, or in seconds.

    Raises:
        ValueError: It is not positive, or no number.
    """
    if value is None or isinstance(value, timedelta):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ValueError(
            f"timeout must be a timedelta or a positive number of seconds, got {value!r}"
        )
    return timedelta(seconds=value)


def on_nonfinite_of(value: str) -> OnNonfinite:
    """What happens to a step whose gradients are not finite.

    Raises:
        ValueError: There is no such choice.
    """
    for action in ("step", "skip", "error"):
        if value == action:
            return action
    raise ValueError(f"nonfinite_gradients must be 'step', 'skip' or 'error', got {value!r}")


def register_stages(strategy: Any, registry: Any) -> None:
    """Register a strategy by names: ``zero_stage_1``, ``zero_stage_3_offload`` and so on.

    Args:
        strategy: The class.
        registry: One of Lightning's two.
    """
    module = strategy.__module__.removesuffix(".strategy")
    for name, options in NAMED.items():
        registry.register(
            name,
            strategy,
            description=f"ZeRO stage {options['stage']}, see {module}.{strategy.__name__}",
            override=True,
            **options,
        )


def start_method_of(value: str) -> StartMethod:
    """A way to start ranks.

    Raises:
        ValueError: There is no such way.
    """
    for method in ("popen", "spawn", "fork", "forkserver"):
        if value == method:
            return method
    raise ValueError(
        f"start_method must be 'popen', 'spawn', 'fork' or 'forkserver', got {value!r}"
    )
