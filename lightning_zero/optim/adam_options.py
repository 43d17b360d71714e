"""Adam, as the user's optimizer says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_zero.worker.jobs import AdamOptions

AVERAGES = ("exp_avg", "exp_avg_sq")
"""Names of Adam's states that have an entry for each element."""


def check_adam(optimizer: Optimizer, option: str, what: str) -> None:
    """Refuse an optimizer that is not plain Adam or AdamW.

    Args:
        optimizer: The user's optimizer.
        option: Name of the option that needs it.
        what: What the option does and cannot do for another.

    Raises:
        ValueError: It is another one.
    """
    kind = type(optimizer)
    if kind not in (torch.optim.Adam, torch.optim.AdamW):
        raise ValueError(
            f"{option} {what} for {kind.__name__}: use torch.optim.Adam or AdamW, or remove"
            f" {option}"
        )
    if any(group["amsgrad"] for group in optimizer.param_groups):
        raise ValueError(
            f"{option} does not know {kind.__name__}(amsgrad=True): remove one of the two"
        )


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
