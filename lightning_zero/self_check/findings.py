"""What a self-check has found, and how it is told."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_TOLD = 4
"""Differences that a warning names."""


class Kind(enum.Enum):
    """What is compared."""

    USED = "weights that modules use"
    """Full parameters in forward and backward, with what their owners have."""

    GRADIENTS = "averaged gradients"
    """What the optimizer steps with, after clipping, with the plain average over all ranks."""

    STEPPED = "weights after the step"
    """Shards, with what the same optimizer makes of whole parameters, states and gradients."""


_CAUSES = {
    Kind.USED: (
        "modules do not see what the owners of the shards have. Either weights came wrong, or"
        " something has written to them past the optimizer (`param.data`)."
    ),
    Kind.GRADIENTS: (
        "the optimizer is not given the average of all ranks' gradients. Either they were reduced"
        " wrong, or something other than `clip_gradients` has changed them after backward."
    ),
    Kind.STEPPED: (
        "the optimizer makes other weights of pieces than of whole parameters. Either it is not"
        " element-wise (use shard_by='tensor'), or weights or states were changed past it."
    ),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference of two tensors of one parameter."""

    absolute: float
    """Largest absolute difference of two elements; inf where only one of them is a number."""

    scale: float
    """Largest absolute value of the replica's tensor."""

    parameter: str
    """Name of the parameter."""

    step: int
    """Number of the optimizer step since the check began, from 1."""

    rank: int
    """Rank that has found it."""

    @property
    def relative(self) -> float:
        """Absolute difference per scale."""
        if not self.absolute:
            return 0.0
        return self.absolute / self.scale if self.scale else math.inf

    def __str__(self) -> str:
        return f"{self.absolute:.3g} (relative {self.relative:.3g}), {self.place}"

    @property
    def place(self) -> str:
        """Where it is."""
        return f"{self.parameter!r} in step {self.step} on rank {self.rank}"


@dataclass(slots=True)
class Findings:
    """What one rank has found."""

    rank: int
    largest: dict[Kind, Difference] = field(default_factory=dict)
    """Of each kind that was compared, the largest relative difference."""

    untold: dict[Kind, Difference] = field(default_factory=dict)
    """Of each kind the first difference that has no explanation, until it is told."""

    def note(
        self,
        kind: Kind,
        found: Tensor,
        expected: Tensor,
        place: tuple[str, int],
        explained: float = 0.0,
    ) -> bool:
        """Compare two tensors.

        Args:
            kind: What they are.
            found: The engine's, of any shape and dtype.
            expected: The replica's, of the same.
            place: Name of the parameter, and number of the step.
            explained: Largest absolute difference that rounding explains.

        Returns:
            Whether the difference has an explanation.
        """
        absolute, scale = largest_difference(found, expected)
        seen = Difference(absolute, scale, *place, self.rank)
        if kind not in self.largest or seen.relative > self.largest[kind].relative:
            self.largest[kind] = seen
        is_fault = absolute > explained
        if is_fault:
            self.untold.setdefault(kind, seen)
        return not is_fault


def largest_difference(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Largest absolute difference of two tensors, and the largest value of the second.

    NaN equals NaN; what is a number in one tensor only differs by inf.
    """
    if torch.equal(found, expected):
        return 0.0, 0.0
    differs = (found != expected) & ~(found.isnan() & expected.isnan())
    if not bool(differs.any()):
        return 0.0, 0.0
    gaps = (found[differs].double() - expected[differs].double()).abs()
    finite = torch.where(expected.isfinite(), expected, 0)
    scale = float(finite.double().abs().max())
    return float(torch.where(gaps.isnan(), math.inf, gaps).max()), scale


def warning(faults: Iterable[Mapping[Kind, Difference]]) -> str:
    """What all ranks are told of differences that rounding does not explain.

    Args:
        faults: Of each rank.
    """
    told = []
    for kind in Kind:
        places = [found[kind] for found in faults if kind in found]
        if places:
            named = "; ".join(f"{place}" for place in places[:MAX_TOLD])
            told.append(f"{kind.value} differ by {named}: {_CAUSES[kind]}")
    return "self_check: " + " ".join(told)


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a self-check, the same on all ranks."""

    steps: int
    """Optimizer steps that were compared, of the optimizer that has stepped most."""

    wanted_steps: int
    """Steps that were to be compared."""

    watched: Sequence[str]
    """Names of the parameters that were compared, in model order."""

    total: int
    """Parameters that are partitioned."""

    watched_numel: int
    """Elements that were compared."""

    total_numel: int
    """Elements that are partitioned."""

    world_size: int
    """Ranks."""

    largest: Mapping[Kind, Difference]
    """The largest difference of each kind, over all ranks; without kinds never compared."""

    faults: Mapping[Kind, Difference]
    """Of each kind the first difference that rounding does not explain; empty if all is well."""

    notes: Sequence[str] = ()
    """What limits the result."""

    @property
    def is_exact(self) -> bool:
        """Whether all that was compared is equal to the last bit."""
        return all(not difference.absolute for difference in self.largest.values())

    def metrics(self) -> dict[str, float]:
        """Largest relative differences for a logger."""
        found = {
            f"zero/self_check_{kind.name.lower()}": difference.relative
            for kind, difference in self.largest.items()
        }
        return {"zero/self_check_steps": float(self.steps), **found}

    def __str__(self) -> str:
        head = (
            f"self_check: {self.steps} step(s) beside an unsharded replica on {self.world_size}"
            f" rank(s), {self._coverage()}"
        )
        if self.steps < self.wanted_steps:
            head += f"; training ended before step {self.wanted_steps}"
        lines = [head]
        for kind in Kind:
            found = self.largest.get(kind)
            if found is None:
                said = "not compared"
            elif not found.absolute:
                said = "0.0: equal bit for bit"
            else:
                said = f"{found}" + (" - NOT EXPLAINED" if kind in self.faults else "")
            lines.append(f"  {kind.value:<26}{said}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def _coverage(self) -> str:
        if len(self.watched) == self.total:
            return f"all {self.total} parameters ({self.total_numel:,} elements)"
        share = self.watched_numel / max(self.total_numel, 1)
        return (
            f"{len(self.watched)} of {self.total} parameters ({share:.1%} of the"
            f" elements, {self.watched[0]!r} to {self.watched[-1]!r})"
        )


def merged(every: Sequence[Mapping[Kind, Difference]]) -> dict[Kind, Difference]:
    """The largest difference of each kind over all ranks."""
    found: dict[Kind, Difference] = {}
    for kind in Kind:
        of_kind = [there[kind] for there in every if kind in there]
        if of_kind:
            found[kind] = max(of_kind, key=lambda difference: difference.relative)
    return found
