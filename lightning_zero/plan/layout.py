"""Where every element of every parameter lives.

[Note: bucket, shard, piece]
A bucket is a run of parameters laid end to end in one flat tensor of ``padded_numel`` elements (N).
It is split into W equal shards of S = N // W elements; rank r owns elements ``[r * S, (r + 1) *
S)``. A piece is the overlap of one parameter with one shard: the unit that an optimizer steps and
that a checkpoint is cut from. All functions here work on plain integers, so that resharding to
another world size or stage is interval arithmetic that can be tested without a process group.

[Note: alignment]
Every parameter and every shard starts at a multiple of ``align_numel`` elements. Vector units and
matrix libraries then see the same alignment as in an ordinary allocation, which is one condition
for results that are equal to the last bit. The gaps are zero and belong to no piece.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

ShardBy = Literal["element", "tensor"]

MIN_BUCKET_NUMEL = 2**15
MAX_BUCKET_NUMEL = 6 * 2**20
BUCKETS_PER_MODEL = 12
"""A model is cut into about this many buckets: enough to overlap, and no buffer is large for it."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What planning has to know about one parameter."""

    fqn: str
    """Fully qualified name of the parameter."""

    shape: tuple[int, ...]
    """True shape."""

    stride: tuple[int, ...]
    """Strides of the dense memory order in which the elements are laid down."""

    kind: Hashable
    """Parameters of different kinds (dtype, device, trainable or frozen) never share a bucket."""

    unit: int
    """Index of the module unit it belongs to; buckets close between units where they can."""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one whole parameter in a bucket."""

    fqn: str
    """Fully qualified name of the parameter."""

    shape: tuple[int, ...]
    """True shape."""

    stride: tuple[int, ...]
    """Strides of the view into the flat tensor."""

    offset: int
    """First element, counted in the bucket."""

    numel: int
    """Elements, 0 allowed."""

    @property
    def end(self) -> int:
        """One past the last element, counted in the bucket."""
        return self.offset + self.numel


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one parameter that lies in one rank's shard of a bucket."""

    slot: int
    """Index of the parameter in ``BucketLayout.slots``."""

    param_offset: int
    """First element, counted in the parameter's dense memory order."""

    shard_offset: int
    """First element, counted in the rank's shard."""

    numel: int
    """Elements in the piece, at least 1."""


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """One bucket: its parameters, padding and even split over W ranks."""

    index: int
    """Position in the model-wide order of buckets."""

    kind: Hashable
    """Kind shared by all parameters of the bucket."""

    slots: tuple[Slot, ...]
    """Parameters in order of their offset."""

    padded_numel: int
    """Elements of the flat tensor (N), a multiple of W."""

    world_size: int
    """Ranks that share the bucket (W)."""

    def __str__(self) -> str:
        names = [slot.fqn for slot in self.slots]
        shown = names if len(names) <= 2 else [names[0], "...", names[-1]]
        return f"bucket {self.index} ({', '.join(shown)})"

    @property
    def shard_numel(self) -> int:
        """Elements of one shard (S)."""
        return self.padded_numel // self.world_size

    @property
    def numel(self) -> int:
        """Elements of all parameters, padding not counted."""
        return sum(slot.numel for slot in self.slots)

    def shard_range(self, rank: int) -> tuple[int, int]:
        """First and one past last element of a rank's shard."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Pieces of one rank, in order of their place in the shard."""
        begin, end = self.shard_range(rank)
        found = []
        for index, slot in enumerate(self.slots):
            first, last = max(begin, slot.offset), min(end, slot.end)
            if first < last:
                found.append(Piece(index, first - slot.offset, first - begin, last - first))
        return tuple(found)

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Ranges of the flat tensor that belong to no parameter."""
        found, cursor = [], 0
        for slot in self.slots:
            if slot.offset > cursor:
                found.append((cursor, slot.offset))
            cursor = slot.end
        if cursor < self.padded_numel:
            found.append((cursor, self.padded_numel))
        return tuple(found)


def default_bucket_numel(total_numel: int) -> int:
    """Bucket capacity for a model of ``total_numel`` elements.

    About a twelfth of the model: small models get small buffers. The upper limit is 24 MiB of fp32,
    below the size from which C allocators return every freed block to the system.
    """
    return max(MIN_BUCKET_NUMEL, min(MAX_BUCKET_NUMEL, -(-total_numel // BUCKETS_PER_MODEL)))


def plan_buckets(
    specs: Sequence[ParameterSpec],
    *,
    world_size: int,
    bucket_numel: int,
    align_numel: int,
    shard_by: ShardBy = "element",
    first_index: int = 0,
) -> tuple[BucketLayout, ...]:
    """Lay parameters into buckets.

    Args:
        specs: All parameters, each once, in model order.
        world_size: Ranks that share each bucket (W), at least 1.
        bucket_numel: Capacity in elements. A unit that is larger than the capacity gets a bucket of
            its own size. With ``shard_by="tensor"`` the capacity is per rank.
        align_numel: Parameters and shards start at multiples of this many elements.
        shard_by: ``"element"`` cuts parameters at shard borders; ``"tensor"`` puts each parameter
            whole into the shard of one rank, balanced.
        first_index: Index of the first bucket.

    Returns:
        Buckets in model order; every element of every parameter lies in exactly one piece.

    Raises:
        ValueError: ``world_size``, ``bucket_numel`` or ``align_numel`` is below 1.

    Source:
        ZeRO (arXiv:1910.02054), section 5: partitioning of model states.
    """
    for name, value in (
        ("world_size", world_size),
        ("bucket_numel", bucket_numel),
        ("align_numel", align_numel),
    ):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    capacity = bucket_numel * world_size if shard_by == "tensor" else bucket_numel
    place = _place_whole if shard_by == "tensor" else _place_end_to_end
    buckets: list[BucketLayout] = []
    for run in _runs(specs, capacity):
        slots, padded = place(run, world_size, align_numel)
        index = first_index + len(buckets)
        buckets.append(BucketLayout(index, run[0].kind, slots, padded, world_size))
    return tuple(buckets)


def _runs(specs: Sequence[ParameterSpec], capacity: int) -> Iterable[list[ParameterSpec]]:
    """Cut the parameters of each kind into runs, in order of each run's first parameter."""
    open_runs: dict[Hashable, list[ParameterSpec]] = {}
    order: list[list[ParameterSpec]] = []
    for unit in _by_unit(specs):
        for kind, members in _by_kind(unit).items():
            run = open_runs.get(kind)
            if run is None or _is_full(run, members, capacity):
                run = []
                open_runs[kind] = run
                order.append(run)
            run.extend(members)
    return order


def _is_full(run: list[ParameterSpec], members: list[ParameterSpec], capacity: int) -> bool:
    """Whether a unit opens a new bucket; a tiny leftover is not worth a collective of its own."""
    held = sum(spec.numel for spec in run)
    return held + sum(spec.numel for spec in members) > capacity and held * 8 > capacity


def _by_unit(specs: Sequence[ParameterSpec]) -> list[list[ParameterSpec]]:
    units: dict[int, list[ParameterSpec]] = {}
    for spec in specs:
        units.setdefault(spec.unit, []).append(spec)
    return list(units.values())


def _by_kind(specs: Sequence[ParameterSpec]) -> dict[Hashable, list[ParameterSpec]]:
    kinds: dict[Hashable, list[ParameterSpec]] = {}
    for spec in specs:
        kinds.setdefault(spec.kind, []).append(spec)
    return kinds


def _align(offset: int, align_numel: int) -> int:
    return -(-offset // align_numel) * align_numel


def _slot(spec: ParameterSpec, offset: int) -> Slot:
    return Slot(spec.fqn, spec.shape, spec.stride, offset, spec.numel)


def _place_end_to_end(
    run: Sequence[ParameterSpec], world_size: int, align_numel: int
) -> tuple[tuple[Slot, ...], int]:
    slots, cursor = [], 0
    for spec in run:
        slots.append(_slot(spec, cursor))
        cursor = _align(cursor + spec.numel, align_numel)
    return tuple(slots), _align(max(cursor, 1), align_numel * world_size)


def _place_whole(
    run: Sequence[ParameterSpec], world_size: int, align_numel: int
) -> tuple[tuple[Slot, ...], int]:
    """Largest first onto the emptiest rank; then the members of a rank in model order."""
    loads = [0] * world_size
    owner: dict[int, int] = {}
    for index in sorted(range(len(run)), key=lambda i: (-run[i].numel, i)):
        rank = loads.index(min(loads))
        owner[index] = rank
        loads[rank] += _align(run[index].numel, align_numel)
    shard_numel = max(*loads, align_numel) if world_size > 1 else max(loads[0], align_numel)
    cursors = [rank * shard_numel for rank in range(world_size)]
    slots = []
    for index, spec in enumerate(run):
        rank = owner[index]
        slots.append(_slot(spec, cursors[rank]))
        cursors[rank] += _align(spec.numel, align_numel)
    return tuple(sorted(slots, key=lambda slot: (slot.offset, slot.end))), shard_numel * world_size
