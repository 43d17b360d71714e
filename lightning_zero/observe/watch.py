"""The interface through which the engine shows weights and gradients; nobody looks by default."""

from __future__ import annotations

from torch.optim import Optimizer


class StepWatch:
    """Looks at what steps are made of, and changes nothing. The base of those who do.

    All but ``on_use`` are calls of all ranks together.
    """

    def on_use(self, bucket: int) -> None:
        """The parameters of a bucket are there, and are about to be used.

        Args:
            bucket: Index of the bucket.
        """

    def on_gradients(self, optimizer: Optimizer, generation: int) -> None:
        """The averaged gradients of an optimizer are complete, and about to be used or changed.

        Args:
            optimizer: The user's optimizer, with parameters in its groups.
            generation: Another number after another backward, the same on all ranks.
        """

    def on_norm_clipped(
        self, optimizer: Optimizer, max_norm: float, norm_type: float, scale: float
    ) -> None:
        """The gradients of an optimizer were multiplied, so that their norm is bounded."""

    def on_value_clipped(self, optimizer: Optimizer, clip_value: float) -> None:
        """The gradients of an optimizer were clamped."""

    def on_scaled(self, optimizer: Optimizer, factor: float) -> None:
        """The gradients of an optimizer were multiplied, to undo the scale of the loss."""


UNWATCHED = StepWatch()
