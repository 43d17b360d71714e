"""The recipe that measures how long training stops for a checkpoint."""

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.limits import HANG_S

RECIPE = Path(__file__).parents[2] / "recipes" / "save_stall.py"


def test_measures_the_case_it_is_asked_for():
    small = ["--layers", "1", "--width", "32", "--saves", "2", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, RECIPE, *small, "--cases", "zero3:sharded"],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split("│") for line in done.stdout.splitlines() if line.count("│") > 4]
    found = {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in rows}
    assert list(found) == ["zero3:sharded"]
    assert found["zero3:sharded"][1] == "1.00"
    for stops_ms, _, step_ms, *grown in found.values():
        assert float(stops_ms) > 0
        assert float(step_ms) > 0
        assert len(grown) == 2
