"""Loss scaling where each rank has pieces of the gradients: all ranks skip the same steps."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from lightning_zero import _compat
from lightning_zero.engine import ZeroEngine
from lightning_zero.optim.overflow import NonfiniteGradients


def unscale_together(
    engine: ZeroEngine, scaler: torch.amp.GradScaler, optimizer: Optimizer
) -> NonfiniteGradients | None:
    """Unscale this rank's pieces; an overflow on one rank is one on all. For all ranks to call.

    Args:
        engine: Has the pieces.
        scaler: Scaled the losses.
        optimizer: The user's optimizer.

    Returns:
        Where gradients were not finite before they were unscaled, False if only unscaling made them
        so; None if all are finite.
    """
    with engine.pieces(optimizer):
        scaler.unscale_(optimizer)
    engine.watch.on_scaled(optimizer, 1.0 / scaler.get_scale())
    found = _compat.scaler_found_inf(scaler, optimizer)
    device = engine.device
    found.setdefault(device, torch.zeros(1, dtype=torch.float32, device=device))
    overflows = torch.zeros(1, dtype=torch.float64, device=device)
    for mark in found.values():  # one for each device that has gradients, the host included
        overflows += mark.double().reshape(1).to(device)
    engine.groups.gradients.agree(overflows)
    is_over = bool(overflows > 0)
    for mark in found.values():
        mark.fill_(float(is_over))
    return engine.agreement.nonfinite(optimizer) if is_over else None
