"""Random graphs from a seed."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
from torch import nn

from tests.helpers.graphs.modules import CONTAINERS, LAYERS, STYLES, build
from tests.helpers.graphs.spec import WIDTH, Graph, Hook, Node, Op, Plan, When

MAX_MODULES = 14
MAX_CALLS = 120
"""Layers that one training calls on a rank."""
LISTINGS = ("parameters", "named", "by_module")
READINGS = ("", "", "", "detach", "clone", "slice", "flat")
TWICE_DIFFERENTIABLE = {"linear", "unbiased", "norm", "normed", "convolved", "raw", "listed"}


def random_graph(seed: int, ranks: int = 2) -> Graph:
    """The graph of a seed: always the same one."""
    return _Generator(seed, ranks).graph()


class _Generator:
    def __init__(self, seed: int, ranks: int) -> None:
        self.rng = random.Random(seed)
        self.seed, self.ranks = seed, ranks
        self.stage = self.rng.choices((3, 2, 1), (70, 15, 15))[0]
        self.may_diverge = self.chance(0.5)
        self.is_double = self.chance(0.6)
        self.losses = self.rng.choices(("one", "two", "scoped"), (70, 15, 15))[0]
        self.reentrant = self.chance(0.3)
        # A nested backward ends like one of its own, and all ranks must have as many of them.
        has_plain_backwards = not (self.reentrant and self.may_diverge)
        self.is_direct = self.losses != "scoped" and has_plain_backwards and self.chance(0.3)
        if self.losses == "scoped" or self.reentrant:  # sums are compared within 1e-12
            self.is_double = True
        self.may_narrow = self.is_double and not self.reentrant and self.losses != "scoped"
        self.modules_left = MAX_MODULES

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def graph(self) -> Graph:
        tree = self._node(self.rng.randint(1, 4), "block")
        graph = Graph(
            self.seed,
            tree,
            {},
            is_double=self.is_double,
            reentrant=self.reentrant,
            ranks=self.ranks,
            has_late_hooks=self.chance(0.5),
        )
        self._look_at(graph)
        graph = dataclasses.replace(graph, ties=self._ties())
        self._look_at(graph)
        self.hooks = self._hooks()
        blocks = [
            (path, module) for path, module in self.root.named_modules() if hasattr(module, "style")
        ]
        graph = dataclasses.replace(graph, hooks=self.hooks)
        while True:  # repeated calls of blocks that repeat calls grow fast
            programs = {path: self._program(module, path == "") for path, module in blocks}
            plan = self._plan(dataclasses.replace(graph, programs=programs))
            calls = self._calls(programs, "") * plan.forwards * plan.backwards * plan.steps
            if calls <= MAX_CALLS:
                break
        graph = dataclasses.replace(graph, programs=programs, plan=plan)
        return dataclasses.replace(graph, options=self._options(graph))

    def _calls(self, programs: dict[str, tuple[Op, ...]], path: str) -> int:
        """About how many layers a forward of a module calls."""
        if self.kind_of[path] != "block":
            prefix = path + "."
            return max(1, sum(leaf.startswith(prefix) for leaf in self.leaves))
        found = 0
        for op in (op for top in programs[path] for op in top.walk()):
            child = op.child[1:] if op.child.startswith("/") else f"{path}.{op.child}".strip(".")
            is_call = op.child not in ("", "own", "all") and child in self.kind_of
            found += op.count * self._calls(programs, child) if is_call else 1
        return found

    # The tree.

    def _node(self, depth: int, kind: str | None = None) -> Node:
        self.modules_left -= 1
        if kind is None:
            is_leaf = depth == 0 or self.modules_left <= 0 or self.chance(0.3)
            kind = self.rng.choice(list(LAYERS) if is_leaf else CONTAINERS)
        if kind in LAYERS:
            return Node(
                kind,
                is_frozen=self.chance(0.1),
                is_narrow=self.may_narrow and self.chance(0.15),
            )
        if kind == "block":
            children = [self._node(depth - 1) for _ in range(self.rng.randint(1, 4))]
            return Node(kind, tuple(children), style=self.rng.choice(STYLES))
        # What is called one after another returns plain tensors.
        children = [self._plain_node(depth - 1) for _ in range(self.rng.randint(1, 3))]
        return Node(kind, tuple(children))

    def _plain_node(self, depth: int) -> Node:
        if depth > 0 and self.modules_left > 0 and self.chance(0.3):
            return self._node(depth, self.rng.choice(CONTAINERS[1:]))
        return self._node(0, self.rng.choice(list(LAYERS)))

    def _look_at(self, graph: Graph) -> None:
        """Note names and shapes of what the tree is made of."""
        self.root, _ = build(dataclasses.replace(graph, hooks=()))
        self.parameters = dict(self.root.named_parameters())
        self.names = list(self.parameters)
        self.trained = [name for name in self.names if self.parameters[name].requires_grad]
        self.is_direct = self.is_direct and bool(self.trained)
        self.kind_of = dict(_walk(graph.tree, ""))
        self.kind_of.update(
            (replaced, self.kind_of[kept]) for kept, replaced in graph.ties if kept in self.kind_of
        )
        self.leaves = [path for path, kind in self.kind_of.items() if kind in LAYERS]

    def _ties(self) -> tuple[tuple[str, str], ...]:
        """Parameters, and whole layers, that stand at two places."""
        ties = []
        for _ in range(self.rng.choice((0, 0, 1, 2))):
            kept, replaced = self.rng.choice(self.names), self.rng.choice(self.names)
            a, b = self.parameters[kept], self.parameters[replaced]
            is_like = a.shape == b.shape and a.dtype == b.dtype
            if is_like and kept != replaced and "original" not in kept + replaced:
                ties.append((kept, replaced))
        if len(self.leaves) > 1 and self.chance(0.15):
            kept, replaced = self.rng.sample(self.leaves, 2)
            if not any(name.startswith(replaced + ".") for tie in ties for name in tie):
                ties.append((kept, replaced))
        return tuple(ties)

    def _hooks(self) -> tuple[Hook, ...]:
        found = []
        for _ in range(self.rng.choice((0, 0, 1, 2))):
            kind = self.rng.choice(("before", "after", "backward", "parameter"))
            path = self.rng.choice(self.leaves)
            if kind == "parameter":
                if not self.trained:
                    continue
                path = self.rng.choice(self.trained)
            found.append(Hook(kind, path, self._name()))
        return tuple(found)

    # Programs.

    def _name(self) -> str:
        return self.rng.choice(self.names)

    def _when(self, probability: float = 0.2) -> When:
        if not self.chance(probability):
            return When()
        kinds = ["never", "step"]
        if self.may_diverge:
            kinds += ["rank", "both", "data"]
        kind = self.rng.choice(kinds)
        return When(kind, self.rng.randrange({"step": 3, "rank": self.ranks}.get(kind, 2)))

    def _program(self, block: nn.Module, is_root: bool) -> tuple[Op, ...]:
        children = [name for name, _ in block.named_children()]
        path = next(p for p, module in self.root.named_modules() if module is block)
        ops = [
            dataclasses.replace(self._call(name), when=self._when())
            for name in children
            if self.chance(0.85)
        ]
        ops += [self._op(children, path, depth=2) for _ in range(self.rng.randint(0, 4) + is_root)]
        self.rng.shuffle(ops)
        if is_root and self.is_direct:  # backward without any parameter is nothing to hook into
            ops.insert(0, Op("read", names=(self.rng.choice(self.trained),)))
        return tuple(ops)

    def _call(self, child: str) -> Op:
        if self.may_diverge and self.chance(0.1):
            return Op("call", child, how="rank")
        return Op("call", child, count=self.rng.choice((1, 1, 1, 2, 3)))

    def _op(self, children: list[str], path: str, depth: int) -> Op:
        kinds = ["call", "read", "read", "hold", "pair", "penalty", "in_place", "quiet", "late"]
        kinds += ["dropout", "joined", "far"]
        if depth:
            kinds += ["recompute", "recompute", "branch"]
        if not self.reentrant:
            kinds.append("slope")
        kind = self.rng.choice(kinds)
        child = self.rng.choice(children)
        when = self._when()
        if kind == "call":
            return dataclasses.replace(self._call(child), when=when)
        if kind == "far":
            return Op("call", "/" + self.rng.choice(self.leaves), when=when)
        if kind in ("read", "late"):
            return Op(kind, names=(self._name(),), how=self.rng.choice(READINGS), when=when)
        if kind == "hold":
            return Op(kind, child, (self._name(),), self.rng.choice(READINGS), when=when)
        if kind == "joined":
            return Op(kind, names=tuple(self._name() for _ in range(3)), when=when)
        if kind == "penalty":
            reach = self.rng.choice(("own", "all"))
            return Op(kind, reach, how=self.rng.choice(LISTINGS), when=when)
        if kind == "pair":
            return self._pair(when)
        if kind == "in_place":
            return self._in_place(child, path, when)
        if kind == "slope":
            return self._slope(children, path, when)
        if kind == "recompute":
            return Op(kind, inner=self._ops(children, path, depth - 1), when=when)
        if kind == "branch":
            sides = [self._ops(children, path, depth - 1) for _ in range(2)]
            return Op(kind, when=self._when(1.0), inner=sides[0], other=sides[1])
        return Op(kind, child if kind == "quiet" else "", when=when)

    def _ops(self, children: list[str], path: str, depth: int) -> tuple[Op, ...]:
        return tuple(self._op(children, path, depth) for _ in range(self.rng.randint(1, 2)))

    def _pair(self, when: When) -> Op:
        dtype = torch.float64 if self.is_double else torch.float32
        square = [
            name
            for name, p in self.parameters.items()
            if p.shape == (WIDTH, WIDTH) and p.dtype == dtype
        ]
        if not square:
            return Op("dropout", when=when)
        return Op("pair", names=(self.rng.choice(square), self.rng.choice(square)), when=when)

    def _in_place(self, child: str, path: str, when: When) -> Op:
        layer = self.root.get_submodule(f"{path}.{child}" if path else child)
        hooked = [self.root.get_submodule(h.path) for h in self.hooks if h.kind == "backward"]
        is_direct = isinstance(layer, nn.Linear) and layer not in hooked
        return Op("in_place", child, how="direct" if is_direct else "", when=when)

    def _slope(self, children: list[str], path: str, when: When) -> Op:
        """A penalty on a gradient needs layers that can be differentiated twice."""
        prefix = f"{path}." if path else ""
        smooth = [c for c in children if self.kind_of[prefix + c] in TWICE_DIFFERENTIABLE]
        if smooth:
            return Op("slope", self.rng.choice(smooth), how="penalty", when=when)
        return Op("slope", self.rng.choice(children), how="plain", when=when)

    # Training.

    def _plan(self, graph: Graph) -> Plan:
        rng = self.rng
        backwards = rng.choice((1, 1, 1, 2))
        has_no_sync = backwards == 2 and self.chance(0.5)
        is_rounded = self.reentrant or self.losses == "scoped"
        if has_no_sync and self.stage == 1 and self.may_diverge:  # some gradients come later
            is_rounded = True
            has_no_sync = self.is_double and not _has_narrow(graph.tree)
        may_diverge_outside = self.may_diverge and self.chance(0.3)
        evaluations = tuple(rng.choice((0, 0, 0, 1, 2)) for _ in range(self.ranks))
        return Plan(
            steps=rng.choice((2, 3, 3, 4)),
            forwards=rng.choice((1, 1, 1, 2, 3)),
            extra_forwards=int(may_diverge_outside),
            backwards=backwards,
            losses=self.losses,
            is_direct=self.is_direct,
            has_no_sync=has_no_sync,
            evaluations=evaluations if may_diverge_outside else evaluations[:1],
            clears=rng.choices(("none", "zeros", "never"), (70, 20, 10))[0],
            clip_value=rng.choice((None, None, None, 1e-2)),
            writes=self.chance(0.1),
            watches=self.chance(0.3),
            # AdamW divides by numbers that may be nothing but rounding.
            optimizer="sgd" if is_rounded else rng.choice(("sgd", "adamw")),
            optimizers=rng.choice((1, 1, 1, 2)),
            alternates=self.chance(0.5),
        )

    def _options(self, graph: Graph) -> dict[str, Any]:
        rng = self.rng
        options: dict[str, Any] = {"stage": self.stage, "overlap_comm": self.chance(0.7)}
        if self.chance(0.9):
            options["bucket_numel"] = rng.choice((1, 10, 40, 70, 100, 150, 250, 400, 1000))
        if self.chance(0.2):
            options["shard_by"] = "tensor"
        if self.stage != 3:
            return options
        prefetch: dict[str, Any] = {}
        if self.chance(0.5):
            prefetch["prefetch_numel"] = rng.choice((0, 1, 50, 200, 10**6))
            if not options["overlap_comm"]:
                prefetch["prefetch_numel"] = 0
        if self.chance(0.3):
            prefetch["reuse_distance_numel"] = rng.choice((1, 60, 300, 10**6))
        if self.chance(0.3):
            prefetch["persistent_numel"] = rng.choice((1, 6, 36, 10**6))
            if self.chance(0.5):
                prefetch["persistent_total_numel"] = rng.choice((0, 10, 100))
        if not graph.diverges and self.chance(0.3):  # may be too little, then it is refused
            needed = sum(-(-p.numel() // 64) * 64 for p in self.parameters.values())
            prefetch["max_live_numel"] = int(needed * rng.choice((0.6, 0.8, 1.0, 1.5)))
        if prefetch:
            options["prefetch"] = prefetch
        if not graph.diverges and self.chance(0.5):
            options["gather_by"] = rng.choice(("one_sided", "collective"))
        paths = [path for path, _ in self.root.named_modules() if path]
        if self.chance(0.2):
            options["leaf_modules"] = [rng.choice(paths)]
        return options


def _has_narrow(node: Node) -> bool:
    return node.is_narrow or any(_has_narrow(child) for child in node.children)


def _walk(node: Node, path: str) -> list[tuple[str, str]]:
    """Path and kind of every module of a tree."""
    found = [(path, node.kind)]
    for index, child in enumerate(node.children):
        prefix = f"{path}." if path else ""
        if node.kind in ("module_list", "module_dict"):
            prefix += "parts."
        name = str(index) if node.kind in ("sequential", "module_list") else f"c{index}"
        found += _walk(child, prefix + name)
    return found
