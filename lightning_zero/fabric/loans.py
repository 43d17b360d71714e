"""Process groups that models and Fabrics have, until they are gone.

[Note: groups of what is gone]
Nobody has to tell that a model or a Fabric is done with: its last name goes, on each rank in its
own time. Its groups have threads and sockets, and must not end on one rank while another one may
still use them. So whenever groups are lent, where all ranks are at the same call, they tell each
other whose owners are gone, and end what is gone on all of them. Such groups are not used again:
their owner may have gone in the middle of a step.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from datetime import timedelta

from lightning_zero.comm import ShardGroups

LEAST_COLLECTED = 16
"""So many loans may be left before the collector has to look for owners in cycles."""


class Loans:
    """Groups by owner, see [Note: groups of what is gone]. All ranks call the same in order."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._lent: dict[int, tuple[weakref.ref[object], ShardGroups]] = {}
        self._collect_at = LEAST_COLLECTED

    def lend(self, timeout: timedelta | None) -> ShardGroups:
        """Groups for a new owner, see :meth:`keep`.

        Args:
            timeout: Longest wait for another rank.
        """
        groups = ShardGroups.create(timeout)
        is_time = len(self._lent) >= self._collect_at
        if is_time:  # it takes a tenth of a second, so not each time
            gc.collect()  # owners in cycles
        if self._lent:
            gone = {number for number, (owner, _) in self._lent.items() if owner() is None}
            told = groups.control.exchange_objects(gone, "end the groups of models that are gone")
            for number in sorted(gone.intersection(*told)):
                self._lent.pop(number)[1].end()
        if is_time:
            self._collect_at = max(LEAST_COLLECTED, 2 * len(self._lent))
        return groups

    def keep(self, owner: object, groups: ShardGroups) -> None:
        """Say whose groups these are.

        Args:
            owner: Nothing else uses the groups, once it is gone.
            groups: As lent.
        """
        self._lent[next(self._numbers)] = weakref.ref(owner), groups

    def take_back(self, owner: object) -> None:
        """Let others use the groups of an owner that is done with them.

        Args:
            owner: As kept; nothing of it is under way.
        """
        for number in [number for number, (each, _) in self._lent.items() if each() is owner]:
            self._lent.pop(number)[1].rest()


LOANS = Loans()
"""Of this process."""
