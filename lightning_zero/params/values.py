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

    def take(
        self, slots: Sequence[Slot], parameters: Sequence[nn.Parameter], begin: int, end: int
    ) -> Tensor:
        """Elements ``[begin, end)`` of a bucket; its parameters belong to the bucket from now on.

        To be called on all ranks, for each bucket once.

        Args:
            slots: Places of the parameters in the bucket.
            parameters: The parameters, of one dtype and device.
            begin: First element, counted in the bucket.
            end: One past the last element.

        Returns:
            1-D [end - begin], zero between the parameters.
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

    def take(
        self, slots: Sequence[Slot], parameters: Sequence[nn.Parameter], begin: int, end: int
    ) -> Tensor:
        """See :class:`Values`."""
        out = parameters[0].data.new_zeros(end - begin)
        self.write(slots, parameters, out, begin)
        return out

    def write(
        self, slots: Sequence[Slot], parameters: Sequence[nn.Parameter], out: Tensor, begin: int
    ) -> None:
        """Write whole parameters into ``out``, which holds a bucket from ``begin`` on."""
        for slot, parameter in zip(slots, parameters, strict=True):
            first, last = max(begin, slot.offset), min(begin + out.numel(), slot.end)
            if first < last:
                flat = flatten(parameter, slot.stride)[first - slot.offset : last - slot.offset]
                out[first - begin : last - begin].copy_(flat)

    def give_back(self, parameter: nn.Parameter, view: Tensor) -> None:
        """See :class:`Values`."""
        parameter.data = view.clone(memory_format=torch.preserve_format)


WHOLE = WholeValues()
