"""Native ops: their faces, their references in plain PyTorch, and how they are built."""

from lightning_zero.ops.adam import adam_step_, adam_step_undo_

__all__ = ["adam_step_", "adam_step_undo_"]
