"""ZeRO for PyTorch Lightning: partitioned optimizer state, gradients and parameters.

Importing the package registers the names ``zero_stage_1``, ``zero_stage_2`` and ``zero_stage_3``,
so that ``Trainer(strategy="zero_stage_3")`` and ``Fabric(strategy="zero_stage_3")`` work.
"""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_zero import fabric
from lightning_zero.__about__ import __version__
from lightning_zero.access import (
    full_grad,
    full_optimizer_state,
    full_params,
    param_status,
    register_external_parameter,
    unregister_external_parameter,
)
from lightning_zero.averaging import ZeroEMA
from lightning_zero.checkpoint.streamed import load_state_dict_streamed
from lightning_zero.checkpoint.valid import newest_valid
from lightning_zero.comm import ShardGroups
from lightning_zero.config import ZeroOptions
from lightning_zero.engine import ZeroEngine
from lightning_zero.params.bucket import ParamStatus
from lightning_zero.plan.offload import OffloadConfig
from lightning_zero.plan.prefetch import PrefetchOptions
from lightning_zero.plan.zenflow import ZenFlowConfig
from lightning_zero.strategy import ZeroStrategy
from lightning_zero.summary import ZeroModelSummary

ZeroStrategy.register_strategies(StrategyRegistry)
fabric.ZeroStrategy.register_strategies(STRATEGY_REGISTRY)

__all__ = [
    "OffloadConfig",
    "ParamStatus",
    "PrefetchOptions",
    "ShardGroups",
    "ZenFlowConfig",
    "ZeroEMA",
    "ZeroEngine",
    "ZeroModelSummary",
    "ZeroOptions",
    "ZeroStrategy",
    "__version__",
    "fabric",
    "full_grad",
    "full_optimizer_state",
    "full_params",
    "load_state_dict_streamed",
    "newest_valid",
    "param_status",
    "register_external_parameter",
    "unregister_external_parameter",
]
