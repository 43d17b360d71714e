"""The picture of a timeline: the recipe writes one, another draws it."""

import subprocess
import sys

import pytest

from tests.helpers.limits import HANG_S
from tests.recipes.test_pretrain import ROOT, run_recipe

DRAW = ROOT / "recipes" / "timeline.py"


def draw(*arguments):
    command = [sys.executable, str(DRAW), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)


def test_recipe_times_its_steps_and_the_timeline_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    text_file = tmp_path / "text.txt"
    text_file.write_text("".join(f"line {i} says {i * i}\n" for i in range(2000)))
    folder = tmp_path / "timeline"
    done = run_recipe(
        "trainer=smoke",
        "model=tiny",
        "stage=3",
        "sample_bytes=4",
        "strategy.wall_clock_breakdown=true",
        f"strategy.timeline={folder}",
        f"data.path={text_file}",
        f"hydra.run.dir={tmp_path / 'run'}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("step 1 [ms]: forward ", "wall clock of 1 step(s)", "timeline of 2 of 2 rank(s)"):
        assert part in done.stdout + done.stderr
    drawn = draw(folder, "--steps", 0, 1)
    assert drawn.returncode == 0, drawn.stderr
    for rank in (0, 1):
        assert f"rank {rank}: fetching " in drawn.stdout
    picture = (folder / "timeline.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    width, height = (int.from_bytes(picture[i : i + 4], "big") for i in (16, 20))
    assert width > 1000
    assert height > 500
    missing = draw(folder, "--steps", 7, 8)
    assert missing.returncode != 0
    assert "nothing in the timeline of steps 7 to 8" in missing.stderr
