"""Collectives per backend, chosen by measurement. The only file that names torch's collectives.

[Note: pairwise transfers]
Gloo's ``reduce_scatter_tensor`` moves twice the bytes it needs and its collectives of one group run
one after another. Here each rank sends every other rank exactly the shard that this rank owns, with
all receives posted before the sends, and sums what arrives itself, in rank order. Bytes on the wire
are the least possible, both directions of a link are busy, and the sum does not depend on who
computes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.api import Collectives, Done, Handle

BROADCAST_CHUNK_NBYTES = 25 * 2**20
KEYS_PER_GENERATION = 2**16
GENERATIONS = 2**14

# torch 2.13 renames the two; older releases only know the long names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def choose_collectives(group: dist.ProcessGroup | None) -> Collectives:
    """Pick the fastest primitives for the backend of a group.

    Args:
        group: A process group, or None for a single process that has none.
    """
    if group is None or group.size() == 1:
        return SingleProcess()
    if dist.get_backend(group) == "gloo":
        return PairwiseCollectives(group)
    return NativeCollectives(group)


class SingleProcess(Collectives):
    """A group of one rank: nothing to send."""

    def __init__(self) -> None:
        super().__init__(rank=0, world_size=1)

    def all_gather(self, flat: Tensor, shard: Tensor, key: int) -> Handle:
        """See the base class."""
        return Done()

    def scratch_numel(self, flat_numel: int) -> int:
        """See the base class."""
        return 0

    def reduce_scatter(
        self, flat: Tensor, out: Tensor, accumulate: bool, key: int, scratch: Tensor
    ) -> Handle:
        """See the base class."""
        if accumulate:
            out.add_(flat)
        else:
            out.copy_(flat)
        return Done()

    def all_reduce(self, flat: Tensor) -> Handle:
        """See the base class."""
        return Done()

    def agree(self, values: Tensor) -> None:
        """See the base class."""

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """See the base class."""

    def gather(self, shard: Tensor, key: int) -> Tensor | None:
        """See the base class."""
        return shard

    def gather_objects(self, value: Any) -> list[Any] | None:
        """See the base class."""
        return [value]

    def exchange_objects(self, value: Any, what: str = "") -> list[Any]:
        """See the base class."""
        return [value]

    def advance(self) -> None:
        """See the base class."""


class _Works:
    """Handle of several point-to-point or collective works."""

    def __init__(self, works: list[Any], keep: tuple[Tensor, ...] = ()) -> None:
        self._works = works
        self._keep = keep  # buffers that the backend still reads or writes

    def wait(self, timeout: timedelta | None = None) -> None:
        for work in self._works:
            if timeout is None:
                work.wait()
            else:
                work.wait(timeout)
        self._works, self._keep = [], ()


class _GroupCollectives(Collectives):
    """What both kinds of backends share: small agreements, start-up and checkpoint transfers."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(rank=group.rank(), world_size=group.size())
        self._group = group
        self._generation = 0
        self._rank_zero = dist.get_global_rank(group, 0)

    def end(self) -> None:
        """See the base class."""
        dist.destroy_process_group(self._group)

    def all_reduce(self, flat: Tensor) -> Handle:
        """See the base class."""
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        self.sent_nbytes += 2 * flat.nbytes * (self.world_size - 1) // self.world_size
        return _Works([work], (flat,))

    def agree(self, values: Tensor) -> None:
        """See the base class."""
        with self._meeting("agree on a number"):
            dist.all_reduce(values, group=self._group)

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """See the base class."""
        sender = dist.get_global_rank(self._group, source)
        for chunk in _chunks(tensors):
            joined = self._on_wire(torch.cat([tensor.reshape(-1) for tensor in chunk]))
            with self._meeting(f"take values from rank {source}"):
                dist.broadcast(joined, sender, group=self._group)
            parts = torch.split(joined, [tensor.numel() for tensor in chunk])
            for tensor, part in zip(chunk, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    def gather(self, shard: Tensor, key: int) -> Tensor | None:
        """See the base class."""
        shard = self._on_wire(shard.contiguous())
        if self.rank != 0:
            with self._meeting("bring shards to rank 0, as for a checkpoint"):
                dist.send(shard, self._rank_zero, group=self._group, tag=self._tag(key))
            self.sent_nbytes += shard.nbytes
            return None
        flat = shard.new_empty(self.world_size * shard.numel())
        parts = flat.view(self.world_size, shard.numel())
        parts[0].copy_(shard)
        for peer in range(1, self.world_size):
            source = dist.get_global_rank(self._group, peer)
            with self._meeting("bring shards to rank 0, as for a checkpoint"):
                dist.recv(parts[peer], source, group=self._group, tag=self._tag(key))
        return flat

    def gather_objects(self, value: Any) -> list[Any] | None:
        """See the base class."""
        found: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        with self._meeting("tell rank 0 what they hold, as for a checkpoint"):
            dist.gather_object(value, found, dst=self._rank_zero, group=self._group)
        return found

    def exchange_objects(self, value: Any, what: str = "") -> list[Any]:
        """See the base class."""
        found: list[Any] = [None] * self.world_size
        with self._meeting(what or "tell each other what they hold"):
            dist.all_gather_object(found, value, group=self._group)
        return found

    def advance(self) -> None:
        """See the base class."""
        self._generation = (self._generation + 1) % GENERATIONS

    @contextmanager
    def _meeting(self, what: str) -> Iterator[None]:
        """Say which rank waited for what, where the backend only says that time is over."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} waited for the other ranks to {what}, and one of them has"
                " failed, or did not take part in time. Every rank has to make this call: take it"
                f" out of `if rank == 0` ({type(error).__name__}: {error})"
            ) from error

    def _on_wire(self, tensor: Tensor) -> Tensor:
        """The tensor where the backend can send it: what is offloaded has to come to the device."""
        is_on_host = tensor.device.type == "cpu" and torch.accelerator.is_available()
        if self.is_host_side or not is_on_host:
            return tensor
        return tensor.to(torch.device(torch.accelerator.current_device_index()))

    def _tag(self, key: int) -> int:
        if not 0 <= key < KEYS_PER_GENERATION:
            raise AssertionError(f"transfer key {key} is outside of 0..{KEYS_PER_GENERATION - 1}")
        return self._generation * KEYS_PER_GENERATION + key


class NativeCollectives(_GroupCollectives):
    """The backend's own collectives: NCCL and every accelerator backend with tensor collectives."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.is_host_side = False

    def all_gather(self, flat: Tensor, shard: Tensor, key: int) -> Handle:
        """See the base class."""
        work = _all_gather_single(flat, shard, group=self._group, async_op=True)
        self.sent_nbytes += shard.nbytes * (self.world_size - 1)
        return _Works([work], (flat, shard))

    def scratch_numel(self, flat_numel: int) -> int:
        """See the base class."""
        return flat_numel // self.world_size

    def reduce_scatter(
        self, flat: Tensor, out: Tensor, accumulate: bool, key: int, scratch: Tensor
    ) -> Handle:
        """See the base class."""
        own = scratch if accumulate or out.dtype != flat.dtype else out
        work = _reduce_scatter_single(own, flat, group=self._group, async_op=True)
        self.sent_nbytes += out.numel() * flat.element_size() * (self.world_size - 1)
        return _NativeReduction(work, flat, own, out, accumulate)


class _NativeReduction:
    """Handle that moves the backend's result to where it was asked for."""

    def __init__(
        self, work: Any, flat: Tensor, received: Tensor, out: Tensor, accumulate: bool
    ) -> None:
        self._work, self._flat, self._received = work, flat, received
        self._out, self._accumulate = out, accumulate

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._work.wait()
        else:
            self._work.wait(timeout)
        if self._accumulate:
            self._out.add_(self._received)
        elif self._received is not self._out:
            self._out.copy_(self._received)


class PairwiseCollectives(_GroupCollectives):
    """Point-to-point transfers, see [Note: pairwise transfers]."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        # Each rank begins with its right neighbour, so that no rank is everybody's first.
        order = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        self._peers = [(peer, dist.get_global_rank(group, peer)) for peer in order]

    def all_gather(self, flat: Tensor, shard: Tensor, key: int) -> Handle:
        """See the base class."""
        tag, numel = self._tag(key), shard.numel()
        works = [
            dist.irecv(flat[peer * numel : (peer + 1) * numel], source, group=self._group, tag=tag)
            for peer, source in self._peers
        ]
        works += [dist.isend(shard, to, group=self._group, tag=tag) for _, to in self._peers]
        self.sent_nbytes += shard.nbytes * len(self._peers)
        return _Works(works, (flat, shard))

    def scratch_numel(self, flat_numel: int) -> int:
        """See the base class."""
        return flat_numel // self.world_size * (self.world_size - 1)

    def reduce_scatter(
        self, flat: Tensor, out: Tensor, accumulate: bool, key: int, scratch: Tensor
    ) -> Handle:
        """See the base class."""
        tag, numel = self._tag(key), out.numel()
        staging = scratch.view(self.world_size - 1, numel)
        received = {peer: staging[step] for step, (peer, _) in enumerate(self._peers)}
        works = [
            dist.irecv(received[peer], source, group=self._group, tag=tag)
            for peer, source in self._peers
        ]
        works += [
            dist.isend(flat[peer * numel : (peer + 1) * numel], to, group=self._group, tag=tag)
            for peer, to in self._peers
        ]
        self.sent_nbytes += numel * flat.element_size() * len(self._peers)
        received[self.rank] = flat[self.rank * numel : (self.rank + 1) * numel]
        summands = [received[peer] for peer in range(self.world_size)]
        return _PairwiseReduction(_Works(works, (flat,)), summands, out, accumulate)


class _PairwiseReduction:
    """Handle that sums what has arrived, in rank order."""

    def __init__(
        self, works: _Works, summands: list[Tensor], out: Tensor, accumulate: bool
    ) -> None:
        self._works, self._summands, self._out = works, summands, out
        self._accumulate = accumulate

    def wait(self, timeout: timedelta | None = None) -> None:
        self._works.wait(timeout)
        out, summands = self._out, self._summands
        if self._accumulate:
            total = torch.add(summands[0], summands[1])
            for summand in summands[2:]:
                total.add_(summand)
            out.add_(total)
        elif out.dtype == summands[0].dtype:
            torch.add(summands[0], summands[1], out=out)
            for summand in summands[2:]:
                out.add_(summand)
        else:  # sum in the wider of the two dtypes
            wide = torch.promote_types(out.dtype, summands[0].dtype)
            total = summands[0].to(wide, copy=True)
            for summand in summands[1:]:
                total.add_(summand)
            out.copy_(total)
        self._summands = []


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of one dtype and device of about BROADCAST_CHUNK_NBYTES."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for members in by_kind.values():
        chunk: list[Tensor] = []
        held = 0
        for tensor in members:
            if chunk and held + tensor.nbytes > BROADCAST_CHUNK_NBYTES:
                yield chunk
                chunk, held = [], 0
            chunk.append(tensor)
            held += tensor.nbytes
        if chunk:
            yield chunk
