"""Parameters that a user sees whole for a while, and what was done to them meanwhile.

[Note: all or nothing]
What is written in a scope is kept at its end, or not at all: if that was not asked for, if the
ranks do not agree, if the scope ends with an error. Parameters that come and go are undone by
letting them go, since the shards have the old values. Those that were whole before the scope stay
whole after it, so a copy of their values is kept until then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from lightning_zero.params.bucket import ParameterBucket, ParamStatus
from lightning_zero.params.dense import dense_stride, fingerprint, flatten, same_bits


class Part(ABC):
    """Parameters whose values come, go and are kept together, see [Note: all or nothing].

    Args:
        label: What errors call it, the same on all ranks.
        parameters: The parameters.
    """

    def __init__(self, label: str, parameters: Sequence[nn.Parameter]) -> None:
        self.label = label
        self.parameters = list(parameters)
        self._state: list[tuple[int, int]] = []
        self._copy: Tensor | None = None

    def remember(self) -> None:
        """Take what stands in the parameters now as their values before the scope."""
        self._state = [(p._version, p.data_ptr()) for p in self.parameters]

    def is_changed(self) -> bool:
        """Whether anything was written since, be it through ``param.data``."""
        state = [(p._version, p.data_ptr()) for p in self.parameters]
        return state != self._state or self._has_other_values()

    @abstractmethod
    def _has_other_values(self) -> bool:
        """Whether values differ from those before, in the memory that they had."""

    @abstractmethod
    def take_in(self) -> None:
        """Have what was assigned to ``param.data`` where the values are.

        Raises:
            RuntimeError: A parameter was given another shape or dtype.
        """

    @property
    @abstractmethod
    def values(self) -> Tensor:
        """The values as they are now, to be read and written."""

    @abstractmethod
    def named_values(self) -> dict[str, Tensor]:
        """The values of each parameter, 1-D."""

    def fingerprint(self) -> int:
        """A number that changes with any of the values."""
        return fingerprint(flatten(self.values, dense_stride(self.values)))

    @abstractmethod
    def drop_writes(self) -> None:
        """Take off what was assigned to ``param.data``; other values are going to be written."""

    @abstractmethod
    def keep(self) -> None:
        """What stands in the parameters are their values from now on."""

    @abstractmethod
    def undo(self) -> None:
        """Have the values from before the scope again; without any transfer."""


class BucketPart(Part):
    """The parameters of one bucket.

    Args:
        bucket: The bucket; whether it is whole now tells whether it stays so.
        let_go: Frees a bucket that comes and goes.
        is_watched: Whether somebody will ask if it was changed.
    """

    def __init__(
        self,
        bucket: ParameterBucket,
        let_go: Callable[[ParameterBucket], None],
        is_watched: bool,
    ) -> None:
        super().__init__(str(bucket), bucket.parameters)
        self.bucket = bucket
        self._let_go = let_go
        self._is_watched = is_watched
        self._stays = bucket.is_resident or bucket.status is ParamStatus.AVAILABLE
        self._has_older_writes = False
        self._fingerprint = 0

    def remember(self) -> None:
        """See the base class."""
        if self._stays:
            self._has_older_writes = self.bucket.was_written()
            self.bucket.take_assigned_values()
            self._copy = self.bucket.flat.clone()
        elif self._is_watched:
            self._fingerprint = fingerprint(self.bucket.flat)
        super().remember()

    def _has_other_values(self) -> bool:
        if self._copy is not None:
            return not same_bits(self.bucket.flat, self._copy)
        return fingerprint(self.bucket.flat) != self._fingerprint

    def take_in(self) -> None:
        """See the base class."""
        self.bucket.take_assigned_values()

    @property
    def values(self) -> Tensor:
        """See the base class."""
        return self.bucket.flat

    def named_values(self) -> dict[str, Tensor]:
        """See the base class."""
        slots = self.bucket.layout.slots
        return {slot.fqn: self.bucket.flat[slot.offset : slot.end] for slot in slots}

    def drop_writes(self) -> None:
        """See the base class."""
        self.bucket.forget_writes()

    def keep(self) -> None:
        """See the base class."""
        self.bucket.keep_written_values()

    def undo(self) -> None:
        """See the base class."""
        if self.bucket.status is not ParamStatus.AVAILABLE:  # the step was aborted meanwhile
            return
        self.bucket.forget_writes(self._has_older_writes)
        if not self._stays:
            self._let_go(self.bucket)
        elif self._copy is not None:
            self.bucket.flat.copy_(self._copy)


class WholePart(Part):
    """A parameter that is in no bucket: frozen, at the stages that keep all parameters.

    Args:
        name: Its full name.
        parameter: The parameter.
    """

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        super().__init__(repr(name), [parameter])
        self._name, self._parameter = name, parameter
        self._data = parameter.data

    def remember(self) -> None:
        """See the base class."""
        super().remember()
        self._data = self._parameter.data
        self._copy = self._data.clone()

    def _has_other_values(self) -> bool:
        return self._copy is None or not same_bits(_flat(self._data), _flat(self._copy))

    def take_in(self) -> None:
        """See the base class."""
        found, before = self._parameter.data, self._data
        if found.shape != before.shape or found.dtype != before.dtype:
            raise RuntimeError(
                f"{self._name!r} was replaced by a tensor of shape {tuple(found.shape)} and"
                f" {found.dtype}, but it has shape {tuple(before.shape)} and {before.dtype}"
            )

    @property
    def values(self) -> Tensor:
        """See the base class."""
        return self._parameter.data

    def named_values(self) -> dict[str, Tensor]:
        """See the base class."""
        return {self._name: _flat(self._parameter.data)}

    def drop_writes(self) -> None:
        """See the base class."""
        self._parameter.data = self._data

    def keep(self) -> None:
        """See the base class."""

    def undo(self) -> None:
        """See the base class."""
        self._parameter.data = self._data
        if self._copy is not None:
            self._data.copy_(self._copy)


def _flat(tensor: Tensor) -> Tensor:
    return flatten(tensor, dense_stride(tensor))
