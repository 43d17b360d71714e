"""Compares a graph with its single process, in ranks of its own, and makes a failing one small."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero import ShardGroups
from tests.helpers.graphs.runs import Record, train_alone, train_sharded
from tests.helpers.graphs.spec import Graph, Op, Plan, When
from tests.helpers.limits import HANG_S
from tests.helpers.spawn import RanksFailed, run_ranks

BOUND = 1e-12
"""Largest difference, relative to the larger of 1 and the largest value, where sums have no one
order: float64 rounds at 2e-16, and a few steps carry that on."""
PATIENCE_S = 20.0
"""How long a rank waits for another one within a graph; a hang ends as an error after it."""


@dataclass(frozen=True)
class Failure:
    """A graph that does not train as a single process does."""

    graph: Graph
    problems: tuple[str, ...]
    is_broken: bool
    """A rank raised, so that the graphs after it were not tried."""

    def __str__(self) -> str:
        return "\n".join([str(self.graph), *(f"  - {line}" for line in self.problems[:8])])


def compare(graph: Graph, found: Record, expected: Record) -> list[str]:
    """What differs, in words; nothing if all is equal."""
    problems = []
    if len(found.losses) != len(expected.losses):
        problems.append(f"{len(found.losses)} losses instead of {len(expected.losses)}")
    pairs = [
        (f"loss {i}", torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))
        for i, (a, b) in enumerate(zip(found.losses, expected.losses, strict=False))
    ]
    for step, seen in enumerate(found.gradients):
        for name, gradient in seen.items():
            wanted = expected.gradients[step][name]
            if wanted is not None and gradient is not None and wanted.shape != gradient.shape:
                wanted = _piece(wanted, *found.places[name], gradient.numel())
            pairs.append((f"step {step}, gradient of {name}", gradient, wanted))
    last = graph.plan.steps - 1
    for step, weights in found.weights.items():
        when = "state dict" if step < 0 else f"step {step}"
        pairs += [
            (f"{when}, weight {name}", weight, expected.weights[last if step < 0 else step][name])
            for name, weight in weights.items()
        ]
    for what, a, b in pairs:
        if b is not None and not bool(b.double().isfinite().all()):
            raise AssertionError(f"graph {graph.seed} does not stay finite: {what}")
        gap = _gap(a, b)
        if gap > (0.0 if graph.is_exact else BOUND):
            problems.append(f"{what} differs by {gap:.3g}")
    return problems


def _piece(gradient: Tensor, stride: tuple[int, ...], offset: int, numel: int) -> Tensor:
    dense = torch.empty_strided(gradient.shape, stride, dtype=gradient.dtype).copy_(gradient)
    return dense.as_strided((gradient.numel(),), (1,))[offset : offset + numel]


def _gap(a: Tensor | None, b: Tensor | None) -> float:
    """Largest difference; infinite where only one is there, or something is not a number."""
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if torch.equal(a, b):
        return 0.0
    gap = ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1)).item()
    return math.inf if math.isnan(gap) else max(gap, sys.float_info.min)


Train = Callable[[Graph, ShardGroups], Record]


def check_here(graph: Graph, groups: ShardGroups, train: Train) -> tuple[list[str], bool]:
    """Compare on this rank: problems, and whether it raised."""
    expected = train_alone(graph)
    try:
        found = train(graph, groups)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error}".replace("\n", " ")
        return [f"{text} ({where.filename}:{where.lineno})"], True
    return compare(graph, found, expected[groups.rank]), False


def check_on_rank(
    graphs: Sequence[Graph], stop: bool, train: Train, patience_s: float
) -> list[Failure]:
    """Check graphs one after another on the ranks of this process group."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=3 * patience_s))
    patience = timedelta(seconds=patience_s)
    failures = []
    groups = ShardGroups.create(patience)
    for graph in graphs:
        sys.stdout.write(f"graph {graph.seed}\n")
        answers = _answers(graph, groups, train)
        if all(_is_refusal(found) for found, _ in answers):
            groups = ShardGroups.create(patience)  # nothing of the step that raised is left in them
            graph = _without_bound(graph)
            answers = _answers(graph, groups, train)
        problems = tuple(
            f"rank {r}: {line}" for r, (found, _) in enumerate(answers) for line in found
        )
        if problems:
            failures.append(Failure(graph, problems, any(broken for _, broken in answers)))
            if stop or failures[-1].is_broken:
                break
    return failures


def _answers(graph: Graph, groups: ShardGroups, train: Train) -> list[tuple[list[str], bool]]:
    """What all ranks found."""
    answers: list[tuple[list[str], bool]] = [([], False)] * graph.ranks
    dist.all_gather_object(answers, check_here(graph, groups, train))
    return answers


def _is_refusal(problems: list[str]) -> bool:
    """Whether the bound on live elements is too small, which a plan cannot know before."""
    return any("larger max_live_numel" in line for line in problems)


def _without_bound(graph: Graph) -> Graph:
    prefetch = {k: v for k, v in graph.options["prefetch"].items() if k != "max_live_numel"}
    return dataclasses.replace(graph, options={**graph.options, "prefetch": prefetch})


def check(
    graphs: Sequence[Graph],
    timeout_s: float = HANG_S,
    *,
    stop: bool = False,
    train: Train = train_sharded,
    patience_s: float = PATIENCE_S,
) -> list[Failure]:
    """Check graphs, all for the same number of ranks, on fresh ranks.

    Args:
        graphs: They come one after another.
        timeout_s: For all of them.
        stop: Stop at the first failure; else at the first one that leaves ranks broken.
        train: Trains a graph with the engine.
        patience_s: How long a rank waits for another one within a graph.
    """
    arguments = (graphs, stop, train, patience_s)
    try:
        return run_ranks(check_on_rank, graphs[0].ranks, *arguments, timeout_s=timeout_s)[0]
    except RanksFailed as error:  # a rank that died, or a wait that nothing ends
        lines = str(error).splitlines()
        begun = [line.split()[1] for line in lines if line.startswith("graph ")]
        last = next((g for g in graphs if begun and str(g.seed) == begun[-1]), graphs[0])
        return [Failure(last, (str(error),), True)]


def shrink(failure: Failure, budget_s: float, train: Train = train_sharded) -> Failure:
    """Look for a smaller graph that fails, too."""
    deadline = time.monotonic() + budget_s
    while time.monotonic() < deadline:
        variants = sorted(smaller(failure.graph), key=Graph.size)
        limit_s = max(deadline - time.monotonic(), PATIENCE_S + 10)
        found = check(variants, limit_s, stop=True, train=train) if variants else []
        if not found:
            break
        failure = found[0]
    return failure


def smaller(graph: Graph) -> Iterator[Graph]:
    """Variants with less in them."""
    for path, ops in graph.programs.items():
        first = int(graph.plan.is_direct and not path)  # which gives each rank a gradient
        kept = ops[:first]
        for shorter in [(), *_shorter(ops[first:])]:
            if kept + shorter != ops:
                yield dataclasses.replace(graph, programs=graph.programs | {path: kept + shorter})
    for field in ("ties", "hooks"):
        if getattr(graph, field):
            yield dataclasses.replace(graph, **{field: ()})
    for name, default in dataclasses.asdict(Plan(steps=1)).items():
        if getattr(graph.plan, name) != default and not (name == "steps" and graph.plan.steps == 1):
            plan = dataclasses.replace(graph.plan, **{name: default})
            yield dataclasses.replace(graph, plan=plan)
    if graph.plan.steps > 2:
        yield dataclasses.replace(graph, plan=dataclasses.replace(graph.plan, steps=2))
    for name in graph.options.keys() - {"stage"}:
        options = {key: value for key, value in graph.options.items() if key != name}
        yield dataclasses.replace(graph, options=options)


def _shorter(ops: tuple[Op, ...]) -> Iterator[tuple[Op, ...]]:
    half = len(ops) // 2
    if half > 1:
        yield from (ops[:half], ops[half:])
    for i, op in enumerate(ops):
        before, after = ops[:i], ops[i + 1 :]
        yield before + after
        for part in (op.inner, op.other):
            if part:
                yield before + part + after
        if op.when != When() and op.kind != "branch":
            yield (*before, dataclasses.replace(op, when=When()), *after)
        if op.count > 1:
            yield (*before, dataclasses.replace(op, count=1), *after)
