"""Where a bucket takes the values of its parameters from, and where they go at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_zero.params.dense import dense_stride, flatten
from lightning_zero.plan.layout import Slot


class Values(Protocol):
    """Holder of the values of parameters that are in no bucket."""

    def stride(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Strides of a dense copy of a parameter that keeps its memory order."""

    def fill(
        self, slots: Sequence[Slot], parameters: Sequence[nn.Parameter], out: Tensor, begin: int
    ) -> None:
        """Write a part of a bucket; its parameters belong to the bucket from now on.

        To be called on all ranks, for each bucket once.

        Args:
            slots: Places of the parameters in the bucket.
            parameters: The parameters.
            out: 1-D, receives elements ``[begin, begin + len(out))`` of the bucket.
            begin: See ``out``.
        """

    def give_back(self, parameter: nn.Parameter, view: Tensor) -> None:
        """Take a parameter back from a bucket that ends.

        Args:
            parameter: The parameter.
            view: Its full value, a view of the bucket.
        """


class WholeValues:
    """Parameters are whole on every rank: ordinary tensors."""

    def stride(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """See :class:`Values`."""
        return dense_stride(parameter)

    def fill(
        self, slots: Sequence[Slot], parameters: Sequence[nn.Parameter], out: Tensor, begin: int
    ) -> None:
        """See :class:`Values`."""
        for slot, parameter in zip(slots, parameters, strict=True):
            first, last = max(begin, slot.offset), min(begin + out.numel(), slot.end)
            if first < last:
                flat = flatten(parameter, slot.stride)
                out[first - begin : last - begin].copy_(
                    flat[first - slot.offset : last - slot.offset]
                )

    def give_back(self, parameter: nn.Parameter, view: Tensor) -> None:
        """See :class:`Values`."""
        parameter.data = view.clone(memory_format=torch.preserve_format)


WHOLE = WholeValues()
