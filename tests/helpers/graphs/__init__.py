"""Random module graphs whose training is compared with a single process."""

from tests.helpers.graphs.check import Failure, check, shrink
from tests.helpers.graphs.generate import random_graph
from tests.helpers.graphs.spec import Graph

__all__ = ["Failure", "Graph", "check", "random_graph", "shrink"]
