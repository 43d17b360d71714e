"""The ops for tensors without data, such as those that torch.compile traces with."""

from __future__ import annotations

from typing import Any

import torch

OPS = (
    "adam_step_",
    "adam_columns_step_",
    "adam_step_undo_",
    "quantize_blocks_",
    "dequantize_blocks_",
    "sum_of_squares_",
    "column_squares_",
    "column_words_",
    "gather_columns_",
    "scatter_columns_",
)


def register_fakes() -> None:
    """Tell torch what the ops return: nothing, they change what they are given."""
    for name in OPS:
        torch.library.register_fake(f"lightning_zero::{name}", _nothing)


def _nothing(*_: Any) -> None:
    """Done to tensors without data."""
