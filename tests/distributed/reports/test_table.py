"""The page of users' reports says what the tests say."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

from tests.distributed.reports.rows import ELSEWHERE, ROWS, all_cases
from tests.distributed.reports.table import PAGE, ROOT, page
from tests.helpers.cells import STAGES


def test_the_page_is_as_the_tests_are():
    assert PAGE.read_text() == page(), "run `make report-table` if this is as it should be"


def test_tests_elsewhere_exist():
    for _, test, _ in ELSEWHERE:
        path, _, name = test.partition("::")
        tree = ast.parse((ROOT / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


LINKED = re.compile(r"\[`(\w+)`\]\(((?:\.\./)?tests/\S+\.py)\)")


def test_links_of_the_readme_lead_to_tests():
    """The table of what one can do, and every other link to a test by its name."""
    links = LINKED.findall((ROOT / "README.md").read_text())
    assert len(links) > 40
    own = {name: {case.name for case in cases} for name, cases in all_cases().items()}
    for name, path in links:
        tree = ast.parse((ROOT / path).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in functions | own.get(Path(path).stem, set()), (name, path)


def test_every_row_has_a_test_at_every_stage():
    own = [case for cases in all_cases().values() for case in cases]
    found = Counter((case.row, stage) for case in own for stage in case.stages)
    found.update((row, stage) for row, _, stages in ELSEWHERE for stage in stages)
    assert {(row, stage) for row in ROWS for stage in STAGES} <= found.keys()
