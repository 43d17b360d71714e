"""Steps that are skipped because gradients were not finite, and what the user is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from lightning_zero.optim.pieces import PieceTable

LOUD_AFTER = 10
"""Skipped steps in a row that are worth a warning, and again at ten times as many."""
MAX_NAMED = 5
"""Parameters of a rank that a message names."""

Where = Sequence[Sequence[str]]
"""Names of parameters with non-finite gradients, by rank."""


class SkippedSteps:
    """Counts skipped steps. A few are how loss scaling finds its scale; many are a frozen run."""

    def __init__(self) -> None:
        self.count = 0
        """Steps skipped so far."""
        self.in_a_row = 0
        """Steps skipped since the last update."""

    def stepped(self) -> None:
        """The weights were updated."""
        self.in_a_row = 0

    def skipped(self, step: int, scale: float, where: Where) -> tuple[str, bool]:
        """Note a skipped step.

        Args:
            step: Number of the optimizer step.
            scale: Loss scale that it was made with.
            where: See :data:`Where`.

        Returns:
            What to tell the user, empty if nothing; and whether that is a warning.
        """
        self.count += 1
        self.in_a_row += 1
        is_frozen = self.in_a_row >= LOUD_AFTER and _is_power_of_ten(self.in_a_row // LOUD_AFTER)
        is_frozen = is_frozen and self.in_a_row % LOUD_AFTER == 0
        if not is_frozen and self.count > 1:
            return "", False
        found = "; ".join(
            f"in rank {r}'s part of {_some(names)}" for r, names in enumerate(where) if names
        )
        text = (
            f"step {step} was skipped on all ranks: gradients are not finite at loss scale"
            f" {scale:g} ({found})."
        )
        if not is_frozen:
            return (
                f"{text} The scale is halved; skips that come again are counted, not told.",
                False,
            )
        return (
            f"{text} That makes {self.in_a_row} steps in a row ({self.count} in all): the weights"
            " do not change any more. Look at the data and the loss, lower the learning rate, or"
            " train with bf16-mixed.",
            True,
        )


def nonfinite_names(
    optimizer: Optimizer, table: PieceTable, names: Mapping[nn.Parameter, str]
) -> list[str]:
    """Names of an optimizer's parameters whose gradients are not finite in this rank's pieces.

    Args:
        optimizer: With its pieces in place of parameters (``PieceTable.swapped``).
        table: This rank's pieces.
        names: Name of each parameter.
    """
    here = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    found = []
    for parameter, name in names.items():
        piece = table.piece(parameter)
        if piece is None or id(piece.tensor) not in here or piece.tensor.grad is None:
            continue
        if not bool(piece.tensor.grad.isfinite().all()):
            found.append(name)
    return found


def _is_power_of_ten(value: int) -> bool:
    while value >= 10 and value % 10 == 0:
        value //= 10
    return value == 1


def _some(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
