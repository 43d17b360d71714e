"""Runs the chosen cells of a module of cases once, before its tests look at them."""

from __future__ import annotations

import pytest

from tests.helpers.crew import run_cells


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """What was observed in the cells that are to be tested."""
    module = request.module
    items = [item for item in request.session.items if item.module is module]
    chosen = [item.callspec.params["cell"] for item in items if "cell" in item.fixturenames]
    folder = tmp_path_factory.mktemp(module.__name__.rpartition(".")[2])
    return run_cells(module.__name__, module.CASES, chosen, folder)
