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
"""See ``_code``."""


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

    def meet(self, what: str, slices: Sequence[Slice] = ()) -> list[bool]:
        """Make sure that all ranks are at the same point.

        Args:
            what: What is to follow.
            slices: What it is done to.

        Returns:
            For each slice, whether all ranks cut it from the same values.

        Raises:
            RuntimeError: The ranks are at different points; on all ranks.
        """
        place = _code((what, [(known.serial, *known.shape) for known in slices]))
        values = _code([known.digest for known in slices])
        mine = torch.tensor(
            [place, place**2, values, values**2], dtype=torch.float64, device=self._device
        )
        sums = mine.clone()
        self._collectives.agree(sums)
        is_same = (sums == self.world_size * mine).tolist()
        if not all(is_same[:2]):
            self._refuse(what, slices)
        if all(is_same):
            return [True] * len(slices)
        every = self._collectives.exchange_objects([known.digest for known in slices])
        return [len(set(digests)) == 1 for digests in zip(*every, strict=True)]

    def _refuse(self, what: str, slices: Sequence[Slice]) -> None:
        names = ", ".join(str(known) for known in slices[:3])
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

    def tell(self, text: str) -> list[str]:
        """What every rank has to say, for all ranks to read."""
        return [str(theirs) for theirs in self._collectives.exchange_objects(text)]

    def on_all_ranks(self, serials: Iterable[int]) -> set[int]:
        """Which of these serials every rank has named."""
        mine = set(serials)
        return mine.intersection(*self._collectives.exchange_objects(mine))

    def make_whole(self, slices: Sequence[Slice]) -> None:
        """Make parameters whole that are sliced on some ranks at least."""
        equal = self.meet("read", slices)
        flats = []
        for known in slices:
            own = known.own_values(self.rank, self.world_size)
            flat = own.new_empty(self.world_size * own.numel(), device=self._place(own))
            flat.view(self.world_size, -1)[self.rank].copy_(own)
            flats.append(flat)
        transfers = [self._start(flat, key) for key, flat in enumerate(flats)]
        for known, flat, transfer, was_equal in zip(slices, flats, transfers, equal, strict=True):
            self._wait(transfer, known)
            known.join(flat, was_equal)

    def take(self, slots: Sequence[Slot], slices: Sequence[Slice], begin: int, end: int) -> Tensor:
        """Bring sliced parameters into a bucket, in one transfer.

        Args:
            slots: Places of the parameters in the bucket.
            slices: The parameters, of one dtype and device; they are the bucket's from now on.
            begin: First element of the bucket that this rank wants.
            end: One past the last one.

        Returns:
            1-D [end - begin], zero between the parameters.
        """
        self.meet("lay into a bucket", slices)
        lengths = [known.length(self.world_size) for known in slices]
        own = slices[0].own_values(self.rank, self.world_size)
        joined = own.new_empty(self.world_size, sum(lengths), device=self._place(own))
        device = own.device
        del own  # each slice is freed when it has been copied
        parts = torch.split(joined, lengths, dim=1)
        for known, part in zip(slices, parts, strict=True):
            part[self.rank].copy_(known.release(self.rank, self.world_size))
        self._wait(self._start(joined.view(-1), 0), slices[0])
        out = joined.new_zeros(end - begin, device=device)
        for slot, part, length in zip(slots, parts, lengths, strict=True):
            first, last = max(begin, slot.offset), min(end, slot.end)
            cursor = first - begin
            for rank, at, count in cut_at_slices(first - slot.offset, last - slot.offset, length):
                out[cursor : cursor + count].copy_(part[rank, at : at + count])
                cursor += count
        return out

    def gather_on_first(self, known: Slice) -> Tensor | None:
        """The whole parameter on the CPU of rank 0, a view of a flat one; None on other ranks."""
        own = known.own_values(self.rank, self.world_size)
        flat = self._collectives.gather(own.to(self._place(own)), key=0)
        return None if flat is None else flat.cpu().as_strided(known.shape, known.stride)

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


def _code(value: object) -> float:
    """A number whose square, summed over the ranks, is exact in float64."""
    return float(zlib.crc32(repr(value).encode()) % MEETING_CODES)
