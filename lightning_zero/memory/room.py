"""How much memory is free for this process."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_zero.comm import Collectives

_LIMITS = {"RLIMIT_AS": "VmSize", "RLIMIT_DATA": "VmData"}
"""Limits of a process, and what /proc/self/status calls its use of them."""
_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
"""Limit of a group, its use, details, and which of them is given up first; in versions 2 and 1."""


def fits_everywhere(nbytes: int, device: torch.device, collectives: Collectives) -> bool:
    """Whether every rank has so many bytes free; the same answer on all ranks.

    Args:
        nbytes: Bytes that each rank would allocate.
        device: Where; host memory is shared with the other ranks of a host.
        collectives: Group of the ranks.
    """
    mine = (socket.gethostname(), _free_on_host(), min(_free_in_limits(), _free_on(device)))
    every = collectives.exchange_objects(mine)
    hosts = [host for host, _, _ in every]
    return all(
        nbytes <= own_free and nbytes * hosts.count(host) <= host_free
        for host, host_free, own_free in every
    )


class Shortage(NamedTuple):
    """A host whose ranks need more memory than it has free."""

    host: str
    ranks: int
    """Ranks there."""

    needed_nbytes: int
    """Bytes that its ranks, or the one with the least room, would take."""

    free_nbytes: int
    """Bytes that are free for them."""

    is_limited: bool
    """It is a limit of one process that is too low, not the memory of the host."""


def shortage(nbytes: int, collectives: Collectives) -> Shortage | None:
    """The first host that has not the memory its ranks are going to take; the same on all ranks.

    Args:
        nbytes: Bytes of host memory that this rank is going to take.
        collectives: Group of the ranks.
    """
    mine = (socket.gethostname(), nbytes, _free_on_host(), _free_in_limits())
    every = collectives.exchange_objects(mine)
    for host in dict.fromkeys(host for host, *_ in every):
        there = [row for row in every if row[0] == host]
        needed, free = sum(row[1] for row in there), min(row[2] for row in there)
        if needed > free:
            return Shortage(host, len(there), needed, free, is_limited=False)
        for _, own_nbytes, _, own_free in there:
            if own_nbytes > own_free:
                return Shortage(host, len(there), own_nbytes, own_free, is_limited=True)
    return None


def free_nbytes() -> int:
    """Bytes of host memory that this process may still take, if no other one takes any."""
    return min(_free_on_host(), _free_in_limits())


def _free_on_host(proc: Path = Path("/proc"), cgroup: Path = _CGROUP) -> int:
    """Bytes that all processes here together may still take."""
    free = [_nbytes_in(proc / "meminfo").get("MemAvailable", sys.maxsize)]
    for limit, used, stat, idle in _CGROUP_FILES:
        try:
            allowed = int((cgroup / limit).read_text())
            taken = int((cgroup / used).read_text())
        except (OSError, ValueError):  # no such group, or no limit ("max")
            continue
        free.append(allowed - taken + _nbytes_idle(cgroup / stat, idle))
    return min(free)


def _nbytes_idle(path: Path, name: str) -> int:
    """Bytes of files that a group has in memory, and that go when others need it."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return 0
    return sum(int(value) for key, value in words if key == name)


def _free_in_limits() -> int:
    """Bytes until a limit that was set for this process (ulimit)."""
    try:
        import resource
    except ImportError:  # no such limits here
        return sys.maxsize
    used = _nbytes_in(Path("/proc/self/status"))
    free = [sys.maxsize]
    for limit, name in _LIMITS.items():
        allowed = resource.getrlimit(getattr(resource, limit))[0]
        if allowed != resource.RLIM_INFINITY:
            free.append(allowed - used.get(name, 0))
    return min(free)


def _free_on(device: torch.device) -> int:
    if device.type == "cpu":
        return sys.maxsize
    accelerator: Any = torch.get_device_module(device)
    cached = accelerator.memory_reserved(device) - accelerator.memory_allocated(device)
    return int(accelerator.mem_get_info(device)[0] + cached)


def _nbytes_in(path: Path) -> dict[str, int]:
    """What a file of /proc says in kB, in bytes."""
    try:
        lines = path.read_text().splitlines()
    except OSError:  # not on Linux
        return {}
    words = [line.split() for line in lines]
    return {w[0].rstrip(":"): int(w[1]) * 1024 for w in words if len(w) == 3 and w[2] == "kB"}
