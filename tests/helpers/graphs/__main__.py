"""Replay one graph: ``python -m tests.helpers.graphs SEED [RANKS]``."""

from __future__ import annotations

import sys

from tests.helpers.graphs import check, random_graph, shrink


def main() -> int:
    """Check the graph of a seed, and show a smaller one if it fails."""
    seed, *ranks = map(int, sys.argv[1:])
    graph = random_graph(seed, *ranks)
    sys.stdout.write(f"{graph}\n")
    failures = check([graph])
    if not failures:
        sys.stdout.write("equal to a single process\n")
        return 0
    sys.stdout.write(f"\n{failures[0]}\n\nmaking it smaller ...\n{shrink(failures[0], 60)}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
