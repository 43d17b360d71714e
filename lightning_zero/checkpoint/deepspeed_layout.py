"""What the files of a DeepSpeed checkpoint hold, and where in them a parameter is.

[Note: flat groups]
Each rank writes fp32 weights and optimizer states as 1-D tensors, one for each of its flat groups;
names and shapes are in another file, in the order of the flat tensor.

stages 1, 2   One flat group per parameter group: its parameters end to end, then zeros up to a
              multiple of twice the ranks, cut into equal slices. The zeros are in the states, but
              not in the weights. With ``parameter_alignment`` there are zeros between parameters,
              and with ``round_robin_gradients`` another order.
stage 3       Each parameter is cut for itself, into slices of the same size, the last ones filled
              up. One flat group is a run of such slices, for part of a parameter group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint import deepspeed_files
from lightning_zero.checkpoint.deepspeed_files import Folder, StandIn
from lightning_zero.plan import wording

State = dict[str, Any]

SLICED_PARAMETERS = 3
"""The stage that cuts each parameter for itself."""
MAX_NAMED = 8
"""Names that a message lists."""

# Files.


@dataclass(frozen=True)
class Run:
    """What is in the files of a checkpoint; tensors are mapped."""

    folder: Folder
    optimizers: list[State]
    """ZeRO's own state of each rank."""
    models: list[State]
    """Module states: of each rank at stage 3, else one."""
    config: State
    zero_stage: int

    @property
    def model(self) -> State:
        """Of rank 0."""
        return self.models[0]

    @property
    def world_size(self) -> int:
        """Ranks that wrote it."""
        return len(self.optimizers)

    @property
    def is_sliced(self) -> bool:
        """Each parameter was cut for itself."""
        return self.zero_stage >= SLICED_PARAMETERS

    @classmethod
    def read(cls, folder: Folder, is_trusted: bool) -> Run:
        """Read the files of all ranks, and compare them.

        Raises:
            FileNotFoundError: A rank's file is missing.
            ValueError: They are of different runs, or of a kind that cannot be put together.
        """
        first = folder.any_optimizer_file
        zero = _zero_state(first, deepspeed_files.read(first, is_trusted))
        zero_stage, world_size = _stage_of(first, zero), _ranks_of(first, zero)
        optimizers: list[State] = []
        config: State = {}
        for path in folder.optimizer_files(world_size):
            content = deepspeed_files.read(path, is_trusted)
            zero = _zero_state(path, content)
            found = _stage_of(path, zero), _ranks_of(path, zero)
            if found != (zero_stage, world_size):
                raise ValueError(
                    f"the files in {folder.path} are not of one run: {first.name} is of stage"
                    f" {zero_stage} on {world_size} ranks, {path.name} of stage {found[0]} on"
                    f" {found[1]}. Keep those of one run."
                )
            optimizers.append(zero)
            told = content.get("ds_config")
            config = told if isinstance(told, dict) else config
        is_sliced = zero_stage >= SLICED_PARAMETERS
        paths = folder.model_files(world_size, is_sliced)
        models = [_model_state(path, is_trusted, world_size) for path in paths]
        return cls(folder, optimizers, models, config, zero_stage)

    def zero_option(self, name: str) -> Any:
        """An option of ZeRO that the run had; None if the files do not tell."""
        options = self.config.get("zero_optimization")
        return options.get(name) if isinstance(options, dict) else None


def _zero_state(path: Path, content: State) -> State:
    zero = content.get("optimizer_state_dict")
    if not isinstance(zero, dict):
        raise ValueError(f"{path} has no 'optimizer_state_dict': it is not one of DeepSpeed's")
    if "ds_zero_partition_groups" in zero:
        raise ValueError(
            f"{path} holds experts of a mixture that were spread over ranks, which cannot be put"
            " together here. Export it with the framework that wrote it."
        )
    return zero


def _stage_of(path: Path, zero: State) -> int:
    found = zero.get("zero_stage")
    if found is None and "single_partition_of_fp32_groups" in zero:
        return 1  # DeepSpeed's bf16 optimizer, which does not say so
    if isinstance(found, StandIn) and found.arguments:
        found = found.arguments[0]
    if not isinstance(found, int) or int(found) not in (1, 2, 3):
        raise ValueError(
            f"{path} is of ZeRO stage {found!r}; only those of stages 1, 2 and 3 can be put"
            f" together. It holds {sorted(map(str, zero))[:MAX_NAMED]}."
        )
    return int(found)


def _ranks_of(path: Path, zero: State) -> int:
    counts = zero.get("partition_count")
    each = set(counts if isinstance(counts, (list, tuple)) else [counts])
    found = each.pop() if len(each) == 1 else None
    if not isinstance(found, int):
        raise ValueError(
            f"{path}: its parameter groups were spread over {counts} ranks. Groups with different"
            " numbers of ranks (mixtures of experts) cannot be put together here."
        )
    return found


def _model_state(path: Path, is_trusted: bool, world_size: int) -> State:
    model = deepspeed_files.read(path, is_trusted)
    module, shapes = model.get("module"), model.get("param_shapes")
    if not isinstance(module, dict) or not isinstance(shapes, (list, tuple)):
        raise ValueError(
            f"{path} has no entries of a module with the shapes of its trained parameters: it was"
            " written without an optimizer of ZeRO, or in pipeline stages."
        )
    found = model.get("dp_world_size", world_size)
    if found != world_size:
        raise ValueError(
            f"the files in {path.parent} are not of one run: {path.name} was written by {found}"
            f" ranks, the optimizer files by {world_size}. Keep those of one run."
        )
    return model


# Flat groups.


@dataclass(frozen=True)
class FlatGroup:
    """Parameters that are end to end; see [Note: flat groups]."""

    shapes: Mapping[str, torch.Size]
    """In the order in which they are there."""
    paddings: Sequence[int]
    """Zeros behind each."""
    masters: list[Tensor]
    """fp32 weights of each rank, 1-D."""

    def __post_init__(self) -> None:
        problem = self.problem(self.masters)
        if problem:
            raise ValueError(problem)

    @cached_property
    def begins(self) -> dict[str, int]:
        """Where each parameter begins, in elements."""
        numels = [s.numel() + n for s, n in zip(self.shapes.values(), self.paddings, strict=True)]
        return dict(zip(self.shapes, accumulate(numels, initial=0), strict=False))

    @property
    def numel(self) -> int:
        """Elements up to the end of the last parameter."""
        return sum(shape.numel() for shape in self.shapes.values()) + sum(self.paddings)

    def problem(self, slices: Sequence[Tensor]) -> str:
        """Why slices cannot be those of this group; empty if they can.

        Args:
            slices: Of each rank, 1-D.
        """
        found = [tensor.numel() for tensor in slices]
        ranks = len(slices)
        unit = 2 * ranks
        for slice_numel in {math.ceil(self.numel / unit) * 2, math.ceil(self.numel / ranks)}:
            ends = [max(0, min(slice_numel, self.numel - r * slice_numel)) for r in range(ranks)]
            if all(n in (end, slice_numel) for n, end in zip(found, ends, strict=True)):
                return ""
        return _wrong_size(self.shapes, found, f"together {self.numel}, and zeros at the end")

    def is_elementwise(self, values: Sequence[Any]) -> bool:
        """Whether the ranks' values of a state have one entry for each element of their slices."""
        is_flat = all(isinstance(value, Tensor) and value.dim() == 1 for value in values)
        return is_flat and not self.problem(values)

    def pieces(self, slices: Sequence[Tensor], name: str) -> Iterator[Tensor]:
        """The runs of elements that are a parameter's, in order."""
        begin = self.begins[name]
        end = begin + self.shapes[name].numel()
        edges = list(accumulate((tensor.numel() for tensor in slices), initial=0))
        for tensor, first, last in zip(slices, edges, edges[1:], strict=False):
            if max(begin, first) < min(end, last):
                yield tensor[max(begin, first) - first : min(end, last) - first]


class SlicedGroup(FlatGroup):
    """The same at stage 3, where each parameter has slices of its own."""

    @cached_property
    def begins(self) -> dict[str, int]:
        """Where each parameter's slice begins, on every rank."""
        numels = [math.ceil(s.numel() / len(self.masters)) for s in self.shapes.values()]
        return dict(zip(self.shapes, accumulate(numels, initial=0), strict=False))

    def problem(self, slices: Sequence[Tensor]) -> str:
        """See the base class."""
        found = [tensor.numel() for tensor in slices]
        slice_numel = sum(math.ceil(s.numel() / len(slices)) for s in self.shapes.values())
        if all(n == slice_numel for n in found):
            return ""
        return _wrong_size(self.shapes, found, f"{slice_numel} on each rank")

    def pieces(self, slices: Sequence[Tensor], name: str) -> Iterator[Tensor]:
        """See the base class."""
        begin = self.begins[name]
        yield from sliced([tensor[begin:] for tensor in slices], self.shapes[name])


def sliced(starts: Sequence[Tensor], shape: torch.Size) -> Iterator[Tensor]:
    """A parameter's slices, without what fills the last ones up.

    Args:
        starts: Of each rank, 1-D, beginning with the rank's slice.
        shape: Of the parameter.
    """
    slice_numel, left = math.ceil(shape.numel() / len(starts)), shape.numel()
    for start in starts:
        yield start[: min(slice_numel, left)]
        left -= min(slice_numel, left)


def joined(pieces: Iterable[Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """One tensor of runs of its elements.

    Args:
        pieces: 1-D, of any dtype, in order.
        shape: Of the result.
        dtype: Of the result.

    Raises:
        ValueError: There are more or fewer elements than in the shape.
    """
    whole = torch.empty(shape, dtype=dtype)
    flat, end = whole.view(-1), 0
    for piece in pieces:
        begin, end = end, end + piece.numel()
        if end <= flat.numel():
            flat[begin:end].copy_(piece)
    if end != flat.numel():
        raise ValueError(f"there are {end} elements of a tensor of shape {tuple(shape)}")
    return whole


def _wrong_size(shapes: Mapping[str, Any], found: list[int], expected: str) -> str:
    return (
        f"the parameters {some(shapes)} cannot be put together: the ranks have {found} elements"
        f" of them, but their shapes make {expected}. Either files are of different runs, or ranks"
        " held more than one slice (MiCS), or the values are in files of their own (offload to"
        " NVMe): let DeepSpeed load the checkpoint and save it without that."
    )


def some(names: Iterable[str]) -> str:
    """The first of some names, for a message."""
    return wording.some(map(repr, names), MAX_NAMED)


def flat_groups(run: Run) -> list[FlatGroup]:
    """All flat groups, in order.

    Raises:
        ValueError: Names and shapes do not fit what the ranks have.
    """
    shapes = [{n: torch.Size(s) for n, s in group.items()} for group in run.model["param_shapes"]]
    key = "fp32_flat_groups" if run.is_sliced else "single_partition_of_fp32_groups"
    flats = []
    for rank, zero in enumerate(run.optimizers):
        found = zero.get(key)
        if not isinstance(found, (list, tuple)) or not all(isinstance(t, Tensor) for t in found):
            raise ValueError(
                f"{run.folder.path}: the file of rank {rank} has no fp32 weights ({key!r})."
                " Checkpoints whose weights were stripped or offloaded cannot be put together."
            )
        flats.append([tensor.detach().reshape(-1) for tensor in found])
    if run.is_sliced and len(flats[0]) == 1 < len(shapes):  # older: all of them end to end
        numels = [
            sum(math.ceil(shape.numel() / run.world_size) for shape in group.values())
            for group in shapes
        ]
        if all(len(flat) == 1 and flat[0].numel() == sum(numels) for flat in flats):
            flats = [list(flat[0].split(numels)) for flat in flats]
    if any(len(flat) != len(shapes) for flat in flats):
        raise ValueError(
            f"the files in {run.folder.path} are not of one run: the model has {len(shapes)}"
            f" flat groups, the ranks have {[len(flat) for flat in flats]}"
        )
    paddings = run.optimizers[0].get("param_alignment_paddings") or [
        [0] * len(group) for group in shapes
    ]
    kind = SlicedGroup if run.is_sliced else FlatGroup
    return [
        kind(group, padding, [flat[index] for flat in flats])
        for index, (group, padding) in enumerate(zip(shapes, paddings, strict=True))
    ]
