"""The recipe as a user starts it: in a process of its own, from the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.limits import HANG_S

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "pretrain.py"


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} says {i * i}\n" for i in range(2000)))
    return path


def run_recipe(*arguments):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, str(RECIPE), *map(str, arguments)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def test_two_steps_train_report_and_save(tmp_path, text_file):
    folder = tmp_path / "run"
    done = run_recipe(
        "trainer=smoke",
        "model=tiny",
        "stage=3",
        "offload=params",
        "sample_bytes=8",
        "trainer.accumulate_grad_batches=2",
        f"data.path={text_file}",
        f"hydra.run.dir={folder}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("generated text", "Model states per rank: stage 3, 2 ranks", "(step 2)"):
        assert part in done.stdout
    record = json.loads((folder / "record.json").read_text())
    assert record["stage"] == 3
    assert record["world_size"] == 2
    assert 0 < record["bits_per_byte"] < 9
    assert record["sent_nbytes_per_step"] > 0
    assert Path(record["checkpoint"]).is_file()


def test_sweep_ends_with_one_comparison(tmp_path, text_file):
    done = run_recipe(
        "-m",
        "stage=0,3",
        "trainer=smoke",
        "trainer.gradient_clip_val=null",  # the norm may differ in its last bit
        "model=tiny",
        "sample_bytes=4",
        f"data.path={text_file}",
        f"hydra.sweep.dir={tmp_path / 'sweep'}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Comparison of the jobs") == 1
    table = done.stdout.split("Comparison of the jobs")[1]
    rows = [line for line in table.splitlines() if "stage=" in line and "│" in line]
    assert len(rows) == 2
    records = [json.loads((tmp_path / "sweep" / job / "record.json").read_text()) for job in "01"]
    assert [record["stage"] for record in records] == [0, 3]
    assert records[0]["loss"] == records[1]["loss"]  # bit for bit
    assert records[1]["rank_nbytes"] < records[0]["rank_nbytes"]


def test_failed_job_is_shown_and_fails_the_sweep(tmp_path):
    done = run_recipe(
        "-m",
        "stage=2",
        "trainer=smoke",
        "model=tiny",
        f"data.path={tmp_path / 'nowhere'}",
        f"hydra.sweep.dir={tmp_path / 'sweep'}",
    )
    assert done.returncode != 0
    assert "failed" in done.stdout
    assert "nowhere" in done.stderr
