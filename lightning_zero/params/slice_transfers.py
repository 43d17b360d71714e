"""Transfers of slices; all ranks make the same ones, and find out when they do not."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_zero.comm import Collectives, Handle
from lightning_zero.params.slice import Slice
from lightning_zero.plan.layout import Slot
from lightning_zero.plan.slices import cut_at_slices

MEETING_CODES = 2**20
"""Codes whose squares, summed over ranks, are exact in float64."""


class SliceTransfers:
    """Brings slices together.

    Args:
        collectives: Group over which parameters are cut.
        device: Where transfers are made, if not where the slices are.
    """

    def __init__(self, collectives: Collectives, device: torch.device) -> None:
        self.rank, self.world_size = collectives.rank, collectives.world_size
        self._collectives = collectives
        self._device = device

    def meet(self, what: str, slices: Iterable[Slice] = ()) -> None:
        """Make sure that all ranks are at the same point.

        Raises:
            RuntimeError: They are not; on all ranks.
        """
        here = list(slices)
        place = repr((what, [known.serial for known in here]))
        code = float(zlib.crc32(place.encode()) % MEETING_CODES)
        sums = torch.tensor([code, code * code], dtype=torch.float64, device=self._device)
        self._collectives.agree(sums)
        if sums.tolist() == [code * self.world_size, code * code * self.world_size]:
            return
        names = ", ".join(str(known) for known in here[:3])
        every = self._collectives.exchange_objects(f"{what} {names}".strip())
        told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(every))
        raise RuntimeError(
            f"the ranks do different things where they must run the same code ({told}). While a"
            " model is built (configure_model), and outside of steps while it is sharded, all ranks"
            " have to make the same modules, and to read the same weights in the same order."
        )

    def compare(self, values: dict[str, int]) -> list[str]:
        """Names whose numbers are not the same on all ranks; the same answer on all ranks."""
        code = zlib.crc32(repr(sorted(values.items())).encode())
        if len(set(self._collectives.exchange_objects(code))) == 1:
            return []
        every = self._collectives.exchange_objects(values)
        names = dict.fromkeys(name for theirs in every for name in theirs)
        return [name for name in names if len({theirs.get(name) for theirs in every}) > 1]

    def on_all_ranks(self, serials: Iterable[int]) -> set[int]:
        """Which of these serials every rank has named."""
        mine = set(serials)
        return mine.intersection(*self._collectives.exchange_objects(mine))

    def make_whole(self, slices: Sequence[Slice]) -> None:
        """Make parameters whole that are sliced on some ranks at least."""
        self.meet("read", slices)
        flats = []
        for known in slices:
            own = known.own_values(self.rank, self.world_size)
            flat = own.new_empty(self.world_size * own.numel(), device=self._place(own))
            flat.view(self.world_size, -1)[self.rank].copy_(own)
            flats.append(flat)
        transfers = [self._start(flat, key) for key, flat in enumerate(flats)]
        for known, flat, transfer in zip(slices, flats, transfers, strict=True):
            self._wait(transfer, known)
            known.join(flat)

    def lay_down(
        self, slots: Sequence[Slot], slices: Sequence[Slice], out: Tensor, begin: int
    ) -> None:
        """Write sliced parameters into a part of a bucket, in one transfer.

        Args:
            slots: Places of the parameters in the bucket.
            slices: The parameters; they are the bucket's from now on.
            out: 1-D, receives elements ``[begin, begin + len(out))`` of the bucket.
            begin: See ``out``.
        """
        self.meet("lay into a bucket", slices)
        lengths = [known.length(self.world_size) for known in slices]
        joined = out.new_empty(self.world_size, sum(lengths), device=self._place(out))
        parts = torch.split(joined, lengths, dim=1)
        for known, part in zip(slices, parts, strict=True):
            part[self.rank].copy_(known.release(self.rank, self.world_size))
        self._wait(self._start(joined.view(-1), 0), slices[0])
        for slot, part, length in zip(slots, parts, lengths, strict=True):
            first, last = max(begin, slot.offset), min(begin + out.numel(), slot.end)
            cursor = first - begin
            for rank, at, count in cut_at_slices(first - slot.offset, last - slot.offset, length):
                out[cursor : cursor + count].copy_(part[rank, at : at + count])
                cursor += count

    def gather_on_first(self, known: Slice) -> Tensor | None:
        """The whole parameter on the CPU of rank 0; None on other ranks."""
        own = known.own_values(self.rank, self.world_size)
        flat = self._collectives.gather(own.to(self._place(own)), key=0)
        return None if flat is None else flat.cpu().as_strided(known.shape, known.stride).clone()

    def _start(self, flat: Tensor, key: int) -> Handle:
        """Start to fill a flat tensor whose own part is there; as bytes, for any dtype."""
        wire = flat.view(torch.uint8)
        return self._collectives.all_gather(wire, wire.view(self.world_size, -1)[self.rank], key)

    def _wait(self, transfer: Handle, known: Slice) -> None:
        try:
            transfer.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} could not gather {known}: another rank has failed, or does not"
                f" build the same model ({type(error).__name__}: {error})"
            ) from error

    def _place(self, tensor: Tensor) -> torch.device:
        return tensor.device if self._collectives.is_host_side else self._device
