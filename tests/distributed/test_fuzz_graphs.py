"""500 random module graphs train with the engine as they do in a single process.

Replay one with ``python -m tests.helpers.graphs SEED [RANKS]``.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from tests.helpers.graphs import Graph, check, random_graph, shrink
from tests.helpers.graphs.modules import LAYERS, OPS, STYLES
from tests.helpers.graphs.runs import train_sharded
from tests.helpers.graphs.spec import Hook, Node, Op, Plan

# Seeds of one chunk, and its ranks.
CHUNKS = [
    *((range(first, first + 70), 2) for first in range(0, 420, 70)),
    *((range(first, first + 40), 3) for first in range(420, 500, 40)),
]


def graphs_of(seeds, ranks):
    return [random_graph(seed, ranks) for seed in seeds]


@pytest.mark.parametrize(
    ("seeds", "ranks"), CHUNKS, ids=[f"{seeds[0]}-{seeds[-1]}, {n} ranks" for seeds, n in CHUNKS]
)
def test_random_graphs_equal_a_single_process(seeds, ranks):
    failures = check(graphs_of(seeds, ranks))
    if failures:
        smallest = shrink(failures[0], budget_s=20)
        every = ", ".join(str(failure.graph.seed) for failure in failures)
        pytest.fail(f"graphs {every}\n{failures[0]}\n\nmade smaller:\n{smallest}", pytrace=False)


def nodes(node: Node):
    yield node
    for child in node.children:
        yield from nodes(child)


def test_the_graphs_hold_what_they_are_to_test():
    graphs = [graph for seeds, ranks in CHUNKS for graph in graphs_of(seeds, ranks)]
    assert len(graphs) == 500
    assert graphs[:20] == graphs_of(range(20), 2)
    uses = Counter(kind for graph in graphs for kind in {op.kind for op in graph.ops()})
    assert min(uses[kind] for kind in OPS) >= 40, uses
    layers = Counter(kind for graph in graphs for kind in {n.kind for n in nodes(graph.tree)})
    assert min(layers[kind] for kind in LAYERS) >= 40, layers
    styles = Counter(style for graph in graphs for style in {n.style for n in nodes(graph.tree)})
    assert min(styles[style] for style in STYLES) >= 40, styles
    whens = Counter(kind for graph in graphs for kind in {op.when.kind for op in graph.ops()})
    assert min(whens[kind] for kind in ("never", "step", "rank", "both", "data")) >= 40, whens
    stages = Counter(graph.options["stage"] for graph in graphs)
    assert stages[3] >= 300, stages
    assert min(stages[1], stages[2]) >= 40, stages
    assert sum(graph.diverges and graph.options["stage"] == 3 for graph in graphs) >= 120
    assert sum(graph.is_exact for graph in graphs) >= 300
    for has in (
        lambda graph: graph.ties,
        lambda graph: graph.hooks,
        lambda graph: graph.plan.forwards > 1,
        lambda graph: graph.plan.extra_forwards,
        lambda graph: graph.plan.backwards > 1,
        lambda graph: graph.plan.losses == "two",
        lambda graph: graph.plan.clears != "none",
        lambda graph: graph.plan.optimizers > 1,
        lambda graph: graph.reentrant and any(op.kind == "recompute" for op in graph.ops()),
        lambda graph: "shard_by" in graph.options,
        lambda graph: "prefetch" in graph.options,
        lambda graph: "leaf_modules" in graph.options,
        lambda graph: any(node.is_frozen for node in nodes(graph.tree)),
    ):
        assert sum(bool(has(graph)) for graph in graphs) >= 40


# That it finds what it is to find.

PLAIN = Graph(
    seed=7,
    tree=Node("block", (Node("linear"), Node("norm"), Node("raw"))),
    programs={"": (Op("call", "c0"), Op("call", "c1"), Op("dropout"), Op("call", "c2"))},
    plan=Plan(steps=2, forwards=2),
    options={"stage": 3, "bucket_numel": 10, "overlap_comm": True},
)


def train_wrongly(graph, groups):
    """Doubles a gradient on one rank where the graph has a dropout."""
    if groups.rank == 1 and any(op.kind == "dropout" for op in graph.ops()):
        hook = Hook("parameter", "c0.weight", "c0.bias")
        graph = dataclasses.replace(graph, hooks=(*graph.hooks, hook))
    return train_sharded(graph, groups)


def train_with_one_backward_more(graph, groups):
    if groups.rank == 1:
        graph = dataclasses.replace(graph, plan=dataclasses.replace(graph.plan, backwards=2))
    return train_sharded(graph, groups)


def test_a_wrong_gradient_is_found_and_the_graph_made_small():
    assert not check([PLAIN], 40)
    (failure,) = check([PLAIN], 40, train=train_wrongly)
    text = "\n".join(failure.problems)
    assert "step 0, gradient of c0.weight differs by" in text
    assert "gradient of c1.weight" not in text.split("step 1")[0]
    smallest = shrink(failure, 30, train=train_wrongly).graph
    assert [op.kind for op in smallest.ops() if op.kind != "call"] == ["dropout"]
    assert smallest.size() < PLAIN.size()
    assert smallest.plan == Plan(steps=1)


def test_a_hang_is_a_failure_that_names_the_graph():
    graphs = [dataclasses.replace(PLAIN, seed=seed) for seed in (8, 9)]
    (failure,) = check(graphs, 60, train=train_with_one_backward_more, patience_s=2)
    assert failure.graph.seed == 8
    assert failure.is_broken
    assert "rank 0" in str(failure)
