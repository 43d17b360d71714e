"""What the ops return for tensors without data, such as those that torch.compile traces with."""

from __future__ import annotations

from typing import Any

import torch


def register_fakes() -> None:
    """Tell torch the shapes of what the ops return; their schemas are those of a loaded library."""
    for name, fake in (
        ("adam_step_", _nothing),
        ("adam_step_undo_", _nothing),
    ):
        torch.library.register_fake(f"lightning_zero::{name}", fake)


def _nothing(*_: Any) -> None:
    """Of an op that only changes what it is given."""
