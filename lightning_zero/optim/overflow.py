"""Gradients that are not finite: where they are, how often, and what the user is told."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch.optim import Optimizer

from lightning_zero.plan.wording import some

OnNonfinite = Literal["step", "skip", "error"]
"""What happens to a step whose gradients are not finite."""

LOUD_AFTER = 10
"""Such steps in a row that are worth a warning, and again at ten times as many."""
MIN_SCALE = torch.finfo(torch.float32).tiny
"""The smallest normal loss scale: with less, its reciprocal overflows, and no step can follow."""


@dataclass(frozen=True, slots=True)
class NonfiniteGradients:
    """Where gradients are not finite, the same on all ranks. False if all are finite."""

    ranks: tuple[int, ...] = ()
    """Ranks on which they arose; empty if only a sum over ranks and micro-batches is not finite."""

    names: tuple[str, ...] = ()
    """Parameters whose averaged gradients are not finite, in model order."""

    def __bool__(self) -> bool:
        return bool(self.names)

    def __str__(self) -> str:
        if not self:
            return "nowhere"
        plural = "s" if len(self.ranks) > 1 else ""
        ranks = f"on rank{plural} {', '.join(map(str, self.ranks))}"
        return f"{ranks if self.ranks else 'in a sum of finite gradients'}, in {some(self.names)}"


class NonfiniteSteps:
    """Counts steps whose gradients were not finite, and says what is to be told of them.

    One is told, and then 10, 100, ... in a row of one optimizer.
    """

    def __init__(self) -> None:
        self.count = 0
        """Such steps so far."""
        self._in_a_row: MutableMapping[Optimizer, int] = weakref.WeakKeyDictionary()

    def in_a_row(self, optimizer: Optimizer) -> int:
        """Such steps of an optimizer since its last one with finite gradients."""
        return self._in_a_row.get(optimizer, 0)

    def end_row(self, optimizer: Optimizer) -> None:
        """The gradients of a step were finite."""
        self._in_a_row[optimizer] = 0

    def add(self, optimizer: Optimizer) -> bool:
        """Note a step; True if it is one of many in a row, and it is time to say so."""
        self.count += 1
        number = self._in_a_row[optimizer] = self.in_a_row(optimizer) + 1
        return number % LOUD_AFTER == 0 and _is_power_of_ten(number // LOUD_AFTER)

    def is_taken(
        self, optimizer: Optimizer, step: int, where: NonfiniteGradients, action: OnNonfinite
    ) -> bool:
        """Whether a step without loss scaling goes ahead; warns if it is time to.

        Every rank warns: each rank's log says why it trains no more.

        Args:
            optimizer: The optimizer.
            step: Number of the optimizer step.
            where: Where its gradients are not finite, if they are not.
            action: What happens then.

        Raises:
            RuntimeError: They are not finite, and that is an error.
        """
        if not where:
            self.end_row(optimizer)
            return True
        text = self.taken(optimizer, step, where, action)
        if action == "error":
            raise RuntimeError(text)
        if text:
            warnings.warn(text, stacklevel=3)
        return action == "step"

    def taken(
        self, optimizer: Optimizer, step: int, where: NonfiniteGradients, action: OnNonfinite
    ) -> str:
        """Note a step without loss scaling whose gradients are not finite.

        Args:
            optimizer: The optimizer.
            step: Number of the optimizer step.
            where: Where its gradients are not finite.
            action: What happens to it.

        Returns:
            A warning, empty if it is not the time for one.
        """
        is_loud = self.add(optimizer)
        if not is_loud and self.count > 1 and action != "error":
            return ""
        row = self._row_of(optimizer) if is_loud else ""
        told = f"step {step}: gradients are not finite. They arose {where}.{row}"
        look = "Look at the data and the loss of these ranks, or lower the learning rate."
        if action == "error":
            return f"{told} {look}"
        if action == "skip":
            return f"{told} All ranks skip the step: weights and optimizer state stay. {look}"
        return (
            f"{told} The optimizer steps with them, as under DDP, and the weights are likely to be"
            f' lost. {look} ZeroStrategy(nonfinite_gradients="skip") skips such steps, "error" ends'
            " the run."
        )

    def scaled(
        self, optimizer: Optimizer, step: int, scale: float, where: NonfiniteGradients
    ) -> tuple[str, bool]:
        """Note a step that the loss scaler has skipped. A few are how it finds its scale.

        Args:
            optimizer: The optimizer.
            step: Number of the optimizer step.
            scale: Loss scale that it was made with.
            where: Where its gradients are not finite.

        Returns:
            What to tell the user, empty if nothing; and whether that is a warning.
        """
        is_loud = self.add(optimizer)
        if not is_loud and self.count > 1:
            return "", False
        arose = f"They arose {where}." if where else "They overflow when the scale is taken out."
        told = (
            f"step {step} was skipped on all ranks: gradients are not finite at loss scale"
            f" {scale:g}. {arose}"
        )
        if not is_loud:
            return f"{told} The scale is halved; more skips are counted, not told.", False
        return (
            f"{told}{self._row_of(optimizer)} The weights do not change any more. Look at the data"
            " and the loss, lower the learning rate, or train with bf16-mixed.",
            True,
        )

    def _row_of(self, optimizer: Optimizer) -> str:
        return f" That makes {self.in_a_row(optimizer)} steps in a row ({self.count} in all)."


def check_action(action: OnNonfinite, has_scaler: bool) -> None:
    """Whether an action has an effect.

    Args:
        action: What happens to a step whose gradients are not finite.
        has_scaler: Losses are scaled, and the scaler decides.

    Raises:
        ValueError: It has none.
    """
    if has_scaler and action != "step":
        raise ValueError(
            f"nonfinite_gradients={action!r} has no effect with a loss scaler"
            " (precision='16-mixed'), which skips the steps whose gradients are not finite:"
            " remove it"
        )


def check_scale(scale: float, step: int, where: NonfiniteGradients) -> None:
    """End a run whose loss scale has been halved until nothing is left; the same on all ranks.

    Args:
        scale: The scale for the next step.
        step: Number of the optimizer step that was skipped.
        where: Where its gradients were not finite.

    Raises:
        RuntimeError: No later step can be taken.
    """
    if scale < MIN_SCALE:
        raise RuntimeError(
            f"step {step}: the loss scale has fallen to {scale:g}, and gradients are still not"
            f" finite ({where if where else 'in the division by the scale'}): the loss itself is"
            " not. Look at the data and the loss, lower the learning rate, or train with"
            " bf16-mixed."
        )


def _is_power_of_ten(value: int) -> bool:
    while value >= 10 and value % 10 == 0:
        value //= 10
    return value == 1
