"""Running averages of what is trained, kept by each rank for its own pieces."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

K = TypeVar("K", bound=Hashable)

AverageFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""New average of an average, a value, and the number of values averaged so far (0-dim, int64)."""


def averaged_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the average of values: in 16 bit, small changes would be rounded away."""
    return torch.promote_types(dtype, torch.float32)


class RunningAverage(Generic[K]):
    """Averages of tensors, each under a key of its own.

    Args:
        function: Computes the new average, element by element, so that it does not matter which
            elements a rank has.
    """

    def __init__(self, function: AverageFunction) -> None:
        self._function = function
        self.n_averaged = 0
        """Values that each average is made of."""
        self.values: dict[K, Tensor] = {}
        """The averages, fp32 or more precise."""

    def join(self, present: Mapping[K, Tensor]) -> None:
        """Begin averages of what is new, as if it had been what it is now all the time.

        Args:
            present: Floating tensors, before they change for the first time.
        """
        for key, value in present.items():
            if self.n_averaged and key not in self.values:
                self.values[key] = value.detach().to(averaged_dtype(value.dtype), copy=True)

    def update(self, present: Mapping[K, Tensor]) -> None:
        """Take in one more value of each tensor; the first one is the average itself.

        Args:
            present: Floating tensors. One with a new key has an average from now on.
        """
        with torch.no_grad():
            for key, value in present.items():
                self._update(key, value.detach())
        self.n_averaged += 1

    def _update(self, key: K, value: Tensor) -> None:
        known = self.values.get(key)
        if known is None:
            self.values[key] = value.to(averaged_dtype(value.dtype), copy=True)
            return
        if self.n_averaged == 0:
            known.copy_(value)
            return
        count = torch.tensor(self.n_averaged, device=known.device)
        known.copy_(self._function(known, value.to(known.dtype), count))
