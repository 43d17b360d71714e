"""What of a model lies on this rank: ``Trainer(callbacks=[ZeroModelSummary()])``."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_zero import _compat
from lightning_zero.shares import ModelShares, model_shares
from lightning_zero.strategy import ZeroStrategy


class ZeroModelSummary(ModelSummary):
    """Lightning's table of layers, and below it what of the model states a rank keeps.

    Bytes are those of the buckets that were made, padding included, and of the state that a trial
    step of each optimizer shows, since its own comes into being with its first step. Gradients are
    counted whole where they are collected whole (stages 0 and 1). What is offloaded is counted on
    this rank, and once more apart. What is there for a moment only
    (gathered parameters, gradients on their way) is not counted;
    ``strategy.measure_model_states()`` tells what is alive.

    Args:
        max_depth: As for ``ModelSummary``; 0 for no table of layers.
    """

    def __init__(self, max_depth: int = 1) -> None:
        super().__init__(max_depth)
        self.shares: ModelShares | None = None
        """What this rank keeps, as it was shown last."""

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        strategy = trainer.strategy
        if not isinstance(strategy, ZeroStrategy) or strategy.engine is None:
            raise ValueError(
                "ZeroModelSummary tells how ZeroStrategy spreads a model, and the Trainer has"
                f" {type(strategy).__name__}: use Lightning's ModelSummary."
            )
        optimizers = [_compat.plain_optimizer(optimizer) for optimizer in strategy.optimizers]
        self.shares = model_shares(strategy.engine, optimizers)
        rank_zero_info(str(self.shares))


__all__ = ["ZeroModelSummary"]
