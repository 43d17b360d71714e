"""Native ops: their faces, their references in plain PyTorch, and how they are built."""

from lightning_zero.ops.adam import adam_step_, adam_step_undo_
from lightning_zero.ops.adam_columns import adam_columns_step_
from lightning_zero.ops.columns import gather_columns, scatter_columns_
from lightning_zero.ops.quantize import dequantize_blocks, quantize_blocks
from lightning_zero.ops.sums import column_importance, column_words, sum_of_squares

__all__ = [
    "adam_columns_step_",
    "adam_step_",
    "adam_step_undo_",
    "column_importance",
    "column_words",
    "dequantize_blocks",
    "gather_columns",
    "quantize_blocks",
    "scatter_columns_",
    "sum_of_squares",
]
