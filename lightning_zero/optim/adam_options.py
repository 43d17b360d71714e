"""What Adam does in a step, as an optimizer's group says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_zero.worker.jobs import AdamOptions


def adam_options(optimizer: Optimizer, group: Mapping[str, Any], scale: float) -> AdamOptions:
    """Options of a step.

    Args:
        optimizer: Adam or AdamW.
        group: One of its groups.
        scale: What gradients are multiplied with first.
    """
    is_decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay")
    first, second = group["betas"]
    return AdamOptions(
        lr=float(group["lr"]),
        betas=(float(first), float(second)),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=bool(is_decoupled),
        maximize=bool(group["maximize"]),
        grad_scale=scale,
    )
