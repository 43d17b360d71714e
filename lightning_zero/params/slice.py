"""One parameter of which every rank keeps its slice, see ``plan.slices``."""

from __future__ import annotations

import enum
import sys
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from lightning_zero import _compat
from lightning_zero.params.bucket import blanks
from lightning_zero.params.dense import checksum, dense_stride, flatten, same_bits
from lightning_zero.plan.slices import slice_numel, slice_range


class Place(enum.Enum):
    """Where the values of a parameter are."""

    WHOLE = "whole"
    """In the parameter, on every rank."""

    SLICED = "sliced"
    """In the slices; the parameter reads as NaN."""

    BUCKET = "bucket"
    """In a bucket of an engine."""


class Slice:
    """A parameter and this rank's slice of it.

    It does not keep the parameter alive: one that the user throws away takes its slice with it.

    Args:
        parameter: A parameter that is whole.
        label: What errors call it.
        serial: Number of the parameter, the same on all ranks.
    """

    def __init__(self, parameter: nn.Parameter, label: str, serial: int) -> None:
        self._parameter = TensorWeakRef(parameter)
        self.label = label
        self.serial = serial
        self.place = Place.WHOLE
        self.by_name = False
        """Whether it was last asked for by name."""
        self.turn = 0
        """When it was last used, counted in changes from one module to another."""
        self.digest = 0
        """Fingerprint of the values it was last cut from."""
        self.is_agreed = True
        """Whether all ranks cut it from the same values, as far as they have met since."""
        self._homes: list[weakref.ref[Any]] = []
        self.values: Tensor | None = None
        """The slice, 1-D, padded to the length of the longest; None unless the place is SLICED."""
        self._blank = self._blank_value = torch.empty(0)
        self._measure(parameter)

    @property
    def parameter(self) -> nn.Parameter | None:
        """The parameter; None when nobody has it any more."""
        found: nn.Parameter | None = self._parameter()
        return found

    @property
    def pointer(self) -> int:
        """Address of what stands for the parameter while it is sliced."""
        return self._blank.data_ptr()

    def length(self, world_size: int) -> int:
        """Elements of the slice."""
        return slice_numel(self.numel, world_size)

    def own_values(self, rank: int, world_size: int) -> Tensor:
        """This rank's part of the parameter as it is, 1-D, padded."""
        if self.values is not None:
            self.check_untouched()
            return self.values
        parameter = self.parameter
        if parameter is None:
            raise AssertionError(f"rank {rank}: {self} is asked for after its end")
        return self._cut_from(flatten(parameter.data, self.stride), rank, world_size)

    def add_home(self, own: dict[str, Any]) -> None:
        """The dict of a module holds the parameter, too."""
        if not any(home() is own for home in self._homes):
            self._homes.append(weakref.ref(own))

    def seal(self) -> None:
        """Take the fingerprint of the values that stand in the parameter.

        New values are taken to be the same on all ranks, until these meet again.
        """
        parameter = self.parameter
        if parameter is not None and self.place is Place.WHOLE:
            self._measure(parameter)
            found = checksum(flatten(parameter.data, self.stride))
            if found != self.digest:
                self.digest, self.is_agreed = found, True

    def cut(self, rank: int, world_size: int) -> None:
        """Keep the slice of what stands in the parameter, and let the rest go."""
        parameter = self.parameter
        if parameter is None or self.place is not Place.WHOLE:
            return
        with torch.no_grad():
            self._measure(parameter)
            self.values = self._cut_from(flatten(parameter.data, self.stride), rank, world_size)
            self._show_blank(parameter)
        self.place = Place.SLICED

    def join(self, flat: Tensor, was_equal: bool) -> None:
        """Make the parameter whole.

        Args:
            flat: 1-D, all slices end to end; it becomes the parameter's memory.
            was_equal: Whether all ranks had cut their slices from the same values.
        """
        parameter = self.parameter
        if not was_equal:  # a mixture, which is no error if it is written over now
            self.digest, self.is_agreed = checksum(flat[: self.numel]), False
        if parameter is None or self.place is not Place.SLICED:
            return
        parameter.data = flat.to(parameter.device).as_strided(self.shape, self.stride)
        self.place, self.values = Place.WHOLE, None

    def release(self, rank: int, world_size: int) -> Tensor:
        """The slice, for a bucket that has the parameter from now on."""
        values = self.own_values(rank, world_size)
        self.place, self.values = Place.BUCKET, None
        return values

    def overwrite(self, values: Tensor, rank: int, world_size: int) -> None:
        """Give the parameter new values, the same on all ranks, without any transfer.

        Args:
            values: Of the parameter's shape, any dtype.
            rank: This rank.
            world_size: Ranks that have slices.
        """
        parameter = self.parameter
        with torch.no_grad():
            if self.values is None:
                if parameter is not None:
                    parameter.data.copy_(values)
                return
            self.check_untouched()
            begin, end = slice_range(self.numel, world_size, rank)
            self.values[: end - begin].copy_(flatten(values, self.stride)[begin:end])
        self.digest, self.is_agreed = 0, True

    def follow(self, rank: int, world_size: int) -> None:
        """Do to the slice what was done to the parameter while it was away.

        ``module.to(...)`` converts the NaN that stands for the parameter. Anything else that stands
        there are new values.
        """
        parameter = self.parameter
        if parameter is None or self.values is None:
            return
        if parameter.data_ptr() == self._blank.data_ptr() and parameter.shape == self.shape:
            return
        if parameter.shape == self.shape and self._is_converted(parameter):
            self.values = self.values.to(device=parameter.device, dtype=parameter.dtype)
            self._show_blank(parameter)
        else:
            self.place, self.values = Place.WHOLE, None
            self.cut(rank, world_size)

    def is_held(self) -> bool:
        """Whether somebody besides its modules has the parameter in hand now."""
        parameter = self.parameter
        if parameter is None:
            return False
        known = sum(
            value is parameter
            for home in self._homes
            if (own := home()) is not None
            for value in dict.values(own)
        )
        return sys.getrefcount(parameter) > known + _REFERENCES

    def is_aliased(self) -> bool:
        """Whether somebody holds a view of the whole parameter."""
        parameter = self.parameter
        return parameter is not None and _compat.storage_users(parameter) > _STORAGE_USERS

    def check_untouched(self) -> None:
        """Make sure that nobody has written to a parameter that is not there.

        Raises:
            RuntimeError: Somebody has; it would be lost.
        """
        if not same_bits(self._blank, self._blank_value):
            raise RuntimeError(
                f"{self} was written to while its values were spread over the ranks, so the write"
                " is lost. Take the parameter from its module right before it is written to"
                " (module.weight), and do not keep it in a variable or list meanwhile."
            )

    def _is_converted(self, parameter: nn.Parameter) -> bool:
        if parameter.is_floating_point():
            is_short = parameter.element_size() == 1  # for which torch has no isnan
            return bool((parameter.float() if is_short else parameter).isnan().all())
        return parameter.device != self._blank.device and bool(
            (parameter == self._blank_value.to(parameter.device)).all()
        )

    def _measure(self, parameter: nn.Parameter) -> None:
        self.shape, self.numel = parameter.shape, parameter.numel()
        self.stride = dense_stride(parameter)

    def _cut_from(self, flat: Tensor, rank: int, world_size: int) -> Tensor:
        begin, end = slice_range(self.numel, world_size, rank)
        mine = flat.new_zeros(self.length(world_size))
        mine[: end - begin].copy_(flat[begin:end])
        return mine

    def _show_blank(self, parameter: nn.Parameter) -> None:
        self._blank = blanks(1, parameter)
        self._blank_value = self._blank.clone()
        parameter.data = self._blank.expand(self.shape)

    def __str__(self) -> str:
        return f"parameter {self.label} {tuple(self.shape)}"


def is_sliceable(parameter: Any) -> bool:
    """Whether every rank may keep a slice of a parameter: plain, dense, of more than one value."""
    return (
        isinstance(parameter, nn.Parameter)
        and not isinstance(parameter, nn.UninitializedParameter)
        and type(parameter.data) is Tensor
        and parameter.layout is torch.strided
        and not (parameter.is_meta or parameter.is_complex() or parameter.is_quantized)
        and parameter.numel() > 1
    )


_REFERENCES = 2
"""Python's references to a parameter while it is asked for them: a variable and the argument."""
_STORAGE_USERS = 2
"""Users of the memory of a parameter that nobody holds a view of: itself and the one who asks."""
