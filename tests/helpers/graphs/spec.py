"""What a random graph is made of: plain data that can be printed, pickled and made smaller."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

WIDTH, ROWS, VOCAB = 6, 3, 7
"""Every layer maps [ROWS, WIDTH] to the same shape; an embedding has VOCAB rows."""


@dataclass(frozen=True)
class Node:
    """A module of the tree; children are named c0, c1, ..."""

    kind: str
    children: tuple[Node, ...] = ()
    is_frozen: bool = False
    is_narrow: bool = False
    """float32 in a model of float64."""
    style: str = "tensor"
    """How a block packs what it returns."""

    def count(self) -> int:
        """Modules in this subtree."""
        return 1 + sum(child.count() for child in self.children)

    def __repr__(self) -> str:
        marks = "*" * self.is_frozen + "'" * self.is_narrow
        style = f":{self.style}" if self.kind == "block" and self.style != "tensor" else ""
        inner = f"({', '.join(map(repr, self.children))})" if self.children else ""
        return f"{self.kind}{marks}{style}{inner}"


@dataclass(frozen=True)
class When:
    """On which ranks and steps, or for which data, something happens."""

    kind: str = "always"
    value: int = 0

    def holds(self, rank: int, step: int, x: torch.Tensor) -> bool:
        """Whether it happens now."""
        if self.kind == "data":
            return bool(x.detach()[0, self.value % WIDTH] > 0)
        return {
            "always": True,
            "never": False,
            "step": step == self.value,
            "rank": rank == self.value,
            "both": (rank + step) % 2 == self.value,
        }[self.kind]

    @property
    def diverges(self) -> bool:
        """Whether ranks may differ in it."""
        return self.kind in ("rank", "both", "data")

    def __repr__(self) -> str:
        return self.kind if self.kind in ("always", "never") else f"{self.kind}={self.value}"


@dataclass(frozen=True)
class Op:
    """One use in a block's forward."""

    kind: str
    child: str = ""
    names: tuple[str, ...] = ()
    """Full names of parameters anywhere in the model."""
    how: str = ""
    count: int = 1
    when: When = field(default_factory=When)
    inner: tuple[Op, ...] = ()
    other: tuple[Op, ...] = ()

    def walk(self) -> Iterator[Op]:
        """This use and all in it."""
        yield self
        for op in (*self.inner, *self.other):
            yield from op.walk()

    def __repr__(self) -> str:
        words = [self.kind, self.child, self.how, *self.names]
        words += [f"x{self.count}"] * (self.count != 1)
        words += [f"[{self.when!r}]"] * (self.when.kind != "always")
        words += [f"{{{', '.join(map(repr, self.inner))}}}"] * bool(self.inner)
        words += [f"else {{{', '.join(map(repr, self.other))}}}"] * bool(self.other)
        return " ".join(word for word in words if word)


@dataclass(frozen=True)
class Hook:
    """A hook of the user on a module or a parameter, reading another parameter."""

    kind: str
    path: str
    name: str

    def __repr__(self) -> str:
        return f"{self.kind} of {self.path} reads {self.name}"


@dataclass(frozen=True)
class Plan:
    """What a training step is."""

    steps: int = 3
    forwards: int = 1
    """Forwards before one backward."""
    extra_forwards: int = 0
    """More of them on odd ranks."""
    backwards: int = 1
    """Backwards before one step."""
    losses: str = "one"
    """one; two: two losses with retain_graph; scoped: both in one backward scope."""
    is_direct: bool = False
    """Call ``loss.backward()`` instead of ``engine.backward``."""
    has_no_sync: bool = False
    evaluations: tuple[int, ...] = (0,)
    """Forwards without gradient between steps, for each rank (repeated)."""
    clears: str = "none"
    """zero_grad: none (sets to None), zeros, or never."""
    clip_value: float | None = None
    writes: bool = False
    """Clamp all weights between steps."""
    watches: bool = False
    """Compare whole weights after each step, not only at the end."""
    optimizer: str = "sgd"
    optimizers: int = 1
    alternates: bool = False
    """Step only one of the optimizers in each step."""


@dataclass(frozen=True)
class Graph:
    """A module, what its forwards do, and how it is trained and sharded."""

    seed: int
    tree: Node
    programs: dict[str, tuple[Op, ...]]
    """By the path of the block."""
    ties: tuple[tuple[str, str], ...] = ()
    """The second parameter is the first one."""
    hooks: tuple[Hook, ...] = ()
    has_late_hooks: bool = False
    """Register hooks after the engine was made."""
    is_double: bool = True
    reentrant: bool = False
    """Which kind of checkpoint recomputes."""
    ranks: int = 2
    plan: Plan = field(default_factory=Plan)
    options: dict[str, Any] = field(default_factory=dict)
    """Of ``ZeroOptions``."""

    def ops(self) -> Iterator[Op]:
        """All uses of all blocks."""
        for program in self.programs.values():
            for op in program:
                yield from op.walk()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model."""
        return torch.float64 if self.is_double else torch.float32

    @property
    def is_exact(self) -> bool:
        """Whether the order of all sums is known; else gradients may come late and add up last."""
        recomputes = self.reentrant and any(op.kind == "recompute" for op in self.ops())
        is_split = self.plan.has_no_sync and self.options["stage"] == 1 and self.diverges
        return not recomputes and not is_split and self.plan.losses != "scoped"

    @property
    def diverges(self) -> bool:
        """Whether ranks may run different modules."""
        return (
            self.plan.extra_forwards > 0
            or len(set(self.plan.evaluations)) > 1
            or any(op.when.diverges or op.how == "rank" for op in self.ops())
        )

    def size(self) -> int:
        """What a smaller variant has less of."""
        plan = self.plan
        repeats = plan.steps + plan.forwards + plan.backwards + plan.extra_forwards
        uses = sum(op.count for op in self.ops())
        return uses + len(self.ties) + len(self.hooks) + repeats + len(self.options)

    def __str__(self) -> str:
        programs = self.programs.items()
        lines = [
            f"graph {self.seed}: {self.ranks} ranks, {self.dtype}, {self.tree!r}",
            *(f"  {path or '<root>'}: {', '.join(map(repr, p))}" for path, p in programs),
            f"  ties {self.ties}, hooks {self.hooks}{' (late)' * self.has_late_hooks}",
            f"  {'reentrant' if self.reentrant else 'other'} checkpoints, {self.plan}",
            f"  {self.options}",
        ]
        return "\n".join(lines)
