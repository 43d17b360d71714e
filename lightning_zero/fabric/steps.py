"""Whether an optimizer may step with the gradients it has; the same on all ranks."""

from __future__ import annotations

import warnings
from functools import cached_property

import torch
from lightning.fabric.plugins.precision import MixedPrecision, Precision
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_zero import _compat
from lightning_zero.engine import ZeroEngine
from lightning_zero.optim.overflow import NonfiniteSteps, OnNonfinite, check_action, check_scale
from lightning_zero.scaling import unscale_together


class StepGuard:
    """Looks at the gradients of each step, and undoes loss scaling. For all ranks to call.

    Args:
        action: What happens to a step whose gradients are not finite, without loss scaling.
    """

    def __init__(self, action: OnNonfinite) -> None:
        self._action = action
        self._number = 0

    @cached_property
    def nonfinite(self) -> NonfiniteSteps:
        """Steps whose gradients were not finite."""
        return NonfiniteSteps()

    def check(self, plugin: Precision | None) -> None:
        """Whether the action has an effect with a precision.

        Raises:
            ValueError: It has none.
        """
        check_action(self._action, plugin is not None and _scaler(plugin) is not None)

    def unscale(self, plugin: Precision, engine: ZeroEngine, optimizer: Optimizer) -> None:
        """Undo loss scaling, once per step; an overflow on one rank is one on all."""
        scaler = _scaler(plugin)
        if scaler is None or _compat.scaler_found_inf(scaler, optimizer):
            return
        where = unscale_together(engine, scaler, optimizer)
        if where is None:
            self.nonfinite.end_row(optimizer)
            return
        scale = scaler.get_scale()
        check_scale(scale * scaler.get_backoff_factor(), self._number, where)
        text, is_warning = self.nonfinite.scaled(optimizer, self._number, scale, where)
        if is_warning:  # on every rank: it is in each rank's log why that rank trains nothing
            warnings.warn(text, stacklevel=2)
        elif text:
            rank_zero_info(text)

    def is_taken(self, plugin: Precision, engine: ZeroEngine, optimizer: Optimizer) -> bool:
        """Whether the next step is taken; where a loss is scaled, its scaler decides.

        Raises:
            RuntimeError: Gradients are not finite, and that was to be an error.
        """
        number, self._number = self._number, self._number + 1
        if _scaler(plugin) is not None:
            self.unscale(plugin, engine, optimizer)
            return True
        where = engine.agreement.nonfinite(optimizer)
        return self.nonfinite.is_taken(optimizer, number, where, self._action)


def _scaler(plugin: Precision) -> torch.amp.GradScaler | None:
    return plugin.scaler if isinstance(plugin, MixedPrecision) else None
