"""Which cores of a host a rank computes on, and which its worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class CoreShare(NamedTuple):
    """Cores of one rank, ascending."""

    trainer: tuple[int, ...]
    worker: tuple[int, ...]
    is_contested: bool
    """There are fewer than two cores for each rank, so a core has more than one user."""


def share_cores(masks: Sequence[Sequence[int]], worker_share: float) -> list[CoreShare]:
    """Share the cores of a host among its ranks, and those of each with its worker.

    Ranks that may run on the same cores divide them; a core that only some of the ranks may run on
    goes to those of them that have the fewest.

    Args:
        masks: For each rank of the host, the cores that it may run on, at least one.
        worker_share: Share of a rank's cores that its worker gets, from 0 to 1; the worker and the
            trainer have at least one each.

    Returns:
        For each rank. No two of them have a core in common, nor a trainer and its worker, unless
        they are contested.
    """
    groups: dict[frozenset[int], list[int]] = {}
    for rank, mask in enumerate(masks):
        groups.setdefault(frozenset(mask), []).append(rank)
    owned: dict[frozenset[int], list[int]] = {mask: [] for mask in groups}
    every = sorted(set().union(*groups))
    for core in sorted(every, key=lambda core: sum(core in mask for mask in groups)):
        claims = [mask for mask in groups if core in mask]
        owned[min(claims, key=lambda mask: len(owned[mask]) / len(groups[mask]))].append(core)
    found: dict[int, CoreShare] = {}
    for allowed, ranks in groups.items():
        cores = sorted(owned[allowed])
        for place, rank in enumerate(ranks):
            begin, end = (len(cores) * at // len(ranks) for at in (place, place + 1))
            found[rank] = _share(cores[begin:end], sorted(allowed), worker_share)
    return [found[rank] for rank in range(len(masks))]


def _share(own: list[int], allowed: list[int], worker_share: float) -> CoreShare:
    if len(own) < 2:
        shared = tuple(own or allowed)
        return CoreShare(shared, shared, is_contested=True)
    of_worker = min(max(1, round(worker_share * len(own))), len(own) - 1)
    return CoreShare(tuple(own[:-of_worker]), tuple(own[-of_worker:]), is_contested=False)
