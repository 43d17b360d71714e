"""The recipe that measures a sweep over states on a disk."""

import os
import re
import runpy
import sys
from pathlib import Path

import torch

RECIPE = Path(__file__).parents[2] / "recipes" / "nvme_sweep.py"


def test_measures_sweeps_and_their_bound_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    small = ["--mib", "8", "--region-mib", "1", "--rounds", "2", "--passes", "0", "3"]
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", [str(RECIPE), *small, "--folder", str(tmp_path)])
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(RECIPE), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    said = " ".join(printed.split())
    assert "8 MiB in 8 regions, 4 MiB of buffers" in said
    assert re.search(r"MiB/s: read \d+, write \d+, both together \d+", said)
    rows = [line.split("│") for line in printed.splitlines() if line.count("│") > 4]
    found = {cells[1].strip(): [float(cell) for cell in cells[2:-2]] for cells in rows}
    assert list(found) == ["0", "3"]
    assert all(len(figures) == 5 for figures in found.values())
    for _, compute_s, disk_s, sweep_s, ratio in found.values():
        assert sweep_s >= compute_s
        assert disk_s > 0
        assert ratio > 0
    assert found["3"][1] > found["0"][1]
    assert os.listdir(tmp_path) == []
