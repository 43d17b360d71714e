"""Slices of single parameters, and which parameters may be whole while a model is built.

[Note: slice]
Buckets are planned when the model is complete. Until then a parameter is kept as *slices*: its
dense memory order is cut evenly over W ranks, the last slices may be shorter or empty. A slice is
not a shard: it belongs to one parameter, and lives from its construction until its bucket is made.

[Note: construction peak]
A rank may hold its part of the model and the largest bucket B: the capacity of buckets, or the
largest module. Building a model needs one module at a time, so no more is whole together than the
largest module so far, the tensor that is about to be made included, or a quarter of the capacity.
The rest of B is for what cannot be foreseen: a slice next to the parameter it is cut from, a
parameter that a loop variable still holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator

from lightning_zero.plan.layout import default_bucket_numel

TOLERANCE = 16
"""A bias that comes to the largest weight would drive it out: a sixteenth more may be whole."""


def slice_numel(numel: int, world_size: int) -> int:
    """Elements of the longest slice of a parameter."""
    return -(-numel // world_size)


def slice_range(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """First and one past the last element of a rank's slice, in the parameter's dense order."""
    length = slice_numel(numel, world_size)
    return min(numel, rank * length), min(numel, (rank + 1) * length)


def cut_at_slices(begin: int, end: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Cut a range of a parameter where its slices meet.

    Args:
        begin: First element, in the parameter's dense order.
        end: One past the last element.
        length: Elements of a slice.

    Yields:
        Rank, first element within that rank's slice, and elements.
    """
    while begin < end:
        rank, first = divmod(begin, length)
        count = min(end - begin, length - first)
        yield rank, first, count
        begin += count


class WholeParameters:
    """Which parameters are whole: those of the modules that were used last.

    All ranks that build a model make the same calls, so they agree on every answer. A *group* is
    what belongs to one module; its members leave together.

    Args:
        bucket_numel: Capacity of a bucket in elements; None for the default of the model's size.
    """

    def __init__(self, bucket_numel: int | None) -> None:
        self._capacity_numel = bucket_numel
        self._seen_numel = 0
        self._largest_numel = 0
        self.numel = 0
        """Elements that are whole."""
        self._numel: dict[Hashable, int] = {}
        self._group: dict[Hashable, Hashable] = {}
        self._groups: OrderedDict[Hashable, list[Hashable]] = OrderedDict()

    def __contains__(self, member: Hashable) -> bool:
        return member in self._numel

    def saw(self, numel: int) -> None:
        """A parameter of so many elements has come into being."""
        self._seen_numel += numel

    def use(self, member: Hashable, numel: int, group: Hashable) -> None:
        """A parameter is whole, and used with a group from now on."""
        if member in self._numel:
            self.drop(member)
        self._numel[member] = numel
        self.numel += numel
        self._group[member] = group
        self._groups.setdefault(group, []).append(member)
        self._groups.move_to_end(group)
        together = sum(self._numel[other] for other in self._groups[group])
        self._largest_numel = max(self._largest_numel, together)

    def drop(self, member: Hashable) -> None:
        """A parameter is whole no more."""
        self.numel -= self._numel.pop(member)
        group = self._group.pop(member)
        self._groups[group].remove(member)
        if not self._groups[group]:
            del self._groups[group]

    def clear(self) -> list[Hashable]:
        """Take out all; least recently used groups first."""
        left = [member for group in self._groups.values() for member in group]
        for member in left:
            self.drop(member)
        return left

    def leaving(self, incoming_numel: int, keep: Hashable = None) -> list[Hashable]:
        """Take out who has to go before so many elements come; see [Note: construction peak].

        Args:
            incoming_numel: Elements that will be whole in addition.
            keep: A group that stays in any case.

        Returns:
            The members that left, least recently used groups first.
        """
        limit = self._limit_numel(incoming_numel)
        left: list[Hashable] = []
        while self._numel and self.numel + incoming_numel > limit:
            oldest = next((group for group in self._groups if group != keep), None)
            if oldest is None:
                break
            for member in list(self._groups[oldest]):
                self.drop(member)
                left.append(member)
        return left

    def _limit_numel(self, incoming_numel: int) -> int:
        capacity = self._capacity_numel or default_bucket_numel(self._seen_numel)
        module_numel = max(capacity // 4, self._largest_numel, incoming_numel)
        return module_numel + module_numel // TOLERANCE
