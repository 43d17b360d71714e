"""Every private name of torch and Lightning that the project uses, each once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

__all__ = ["RemovableHandle", "in_backward", "queue_backward_callback", "scaler_found_inf"]


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run a function when the backward under way has computed all its gradients."""
    Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def in_backward() -> bool:
    """Whether the caller runs inside a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def scaler_found_inf(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> dict[torch.device, torch.Tensor]:
    """The scaler's marks of non-finite gradients, by device; to be changed in place."""
    states: dict[str, Any] = scaler._per_optimizer_states[id(optimizer)]
    found: dict[torch.device, torch.Tensor] = states["found_inf_per_device"]
    return found


def trainer_accelerator(trainer: Any) -> Any:
    """The accelerator that a Trainer was made with, whatever its strategy says now."""
    return trainer._accelerator_connector.accelerator


def is_wrapped(optimizer: Any) -> bool:
    """Whether this is Lightning's wrapper around an optimizer, which pretends to be of its class."""
    return "_optimizer" in vars(optimizer) and "_strategy" in vars(optimizer)


def is_mock_optimizer(optimizer: Any) -> bool:
    """Whether Lightning made this optimizer because the user returned none."""
    from lightning.pytorch.core.optimizer import _MockOptimizer

    return isinstance(optimizer, _MockOptimizer)
