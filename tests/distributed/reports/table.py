"""``make report-table`` runs the tests of all rows and writes ``docs/user-reports.md``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.reports.rows import ELSEWHERE, FOLDER, ROWS, THEMES, all_cases
from tests.helpers.cells import STAGES

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "user-reports.md"
HEAD = """# What breaks sharded training, and what happens here

Users of sharded training have reported 33 kinds of trouble with it. Each row is one of them, with
a link to one report; each has tests at stages 1 to 3: the situation of the report, and neighbours
of it (other containers, dtypes, numbers of ranks, accumulation). A number counts tests that
observe what is right: the number that follows by arithmetic, or what DDP gives. *Refused* is an
error on every rank that says why and what to do; *not offered* is an option that does not exist
yet, and that the constructor does not take. `make report-table` runs the tests and writes this
page.

"""


class Entry:
    """What a row has at a stage."""

    def __init__(self) -> None:
        self.counts = {"right": 0, "refused": 0, "not offered": 0}
        self.failed: list[str] = []

    def add(self, kind: str, test: str, has_passed: Callable[[str], bool]) -> None:
        if has_passed(test):
            self.counts[kind] += 1
        else:
            self.failed.append(test.rpartition("::")[2])

    def __str__(self) -> str:
        parts = [f"{count} {kind}" for kind, count in self.counts.items() if count]
        if not self.counts["right"] and not self.counts["refused"] and not self.failed:
            parts = ["not offered"] if self.counts["not offered"] else ["-"]
        return ", ".join([*parts, *(f"**fails: {test}**" for test in self.failed)])


def page(has_passed: Callable[[str], bool] = lambda test: True) -> str:
    """The page, given which tests have passed."""
    entries = {row: {stage: Entry() for stage in STAGES} for row in ROWS}
    lists: dict[str, list[str]] = {row: [] for row in ROWS}
    for name, cases in all_cases().items():
        for case in cases:
            if case.row not in ROWS:
                continue
            link = f"[`{case.name}`](../{FOLDER}/{name}.py)"
            lists[case.row].append(f"- {case.title} ({link})")
            for stage in case.stages:
                kind = "refused" if case.error_at(stage) else "right"
                kind = kind if case.is_offered else "not offered"
                test = f"{FOLDER}/{name}.py::test_case[{case.id}-{stage}]"
                entries[case.row][stage].add(kind, test, has_passed)
    for row, test, *rest in ELSEWHERE:
        (stages,) = rest
        path, _, name = test.partition("::")
        told = name.removeprefix("test_").replace("_", " ")
        at = "" if stages == STAGES else f", stage {' and '.join(map(str, stages))}"
        lists[row].append(f"- {told[0].upper()}{told[1:]}{at} ([`{name}`](../{path}))")
        for stage in stages:
            entries[row][stage].add("right", test, has_passed)
    lines = ["| | situation | " + " | ".join(f"stage {stage}" for stage in STAGES) + " |"]
    lines.append("|---" * (2 + len(STAGES)) + "|")
    for row, (title, _, _) in ROWS.items():
        cells = " | ".join(str(entries[row][stage]) for stage in STAGES)
        lines.append(f"| [{row}](#{row.lower()}) | {title} | {cells} |")
    for row, (title, project, number) in ROWS.items():
        link = f"https://github.com/{project}/issues/{number}"
        lines += ["", f"### {row}", "", f"{title}: [{project}#{number}]({link}).", "", *lists[row]]
    return HEAD + "\n".join(lines) + "\n"


class Results:
    """A plugin of pytest that keeps which tests have passed."""

    def __init__(self) -> None:
        self.passed: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed[report.nodeid] = self.passed.get(report.nodeid, True) and report.passed

    def has_passed(self, test: str) -> bool:
        """Whether a test has passed with all its parameters."""
        names = [name for name in self.passed if name == test or name.startswith(f"{test}[")]
        return bool(names) and all(self.passed[name] for name in names)


def write() -> int:
    """Run everything and write the page; 1 if a test has failed."""
    results = Results()
    tests = [f"{FOLDER}/{name}.py" for name in THEMES]
    tests += dict.fromkeys(test for _, test, _ in ELSEWHERE)
    pytest.main(["-q", "-p", "no:cacheprovider", *tests], plugins=[results])
    text = page(results.has_passed)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text)
    return int(text != page())


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.distributed.reports.table --write")
    sys.exit(write())
