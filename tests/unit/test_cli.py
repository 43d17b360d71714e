"""The `lightning-zero` command."""

from __future__ import annotations

import pytest
import torch

from lightning_zero import __version__
from lightning_zero.cli import main


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")


def rows(text):
    """Cells of the table's rows, by stage."""
    cells = ([cell.strip() for cell in line.strip("│┃ ").split("│")] for line in text.splitlines())
    return {row[0]: row[1:] for row in cells if len(row) == 5 and row[0].isdigit()}


def test_plan_prints_gib_of_all_stages(capsys):
    assert main(["plan", "--numel", "1073741824", "--world-size", "4"]) == 0
    assert rows(capsys.readouterr().out) == {
        "0": ["2.000", "2.000", "12.000", "16.000"],
        "1": ["2.000", "2.000", "3.000", "7.000"],
        "2": ["2.000", "0.500", "3.000", "5.500"],
        "3": ["0.500", "0.500", "3.000", "4.000"],
    }


def test_plan_takes_fp32_and_scientific_notation(capsys):
    assert main(["plan", "--numel", "2e9", "--world-size", "1", "--precision", "32-true"]) == 0
    out = capsys.readouterr().out
    assert "2,000,000,000 parameters on 1 rank(s)" in out
    assert rows(out)["3"] == ["7.451", "7.451", "14.901", "29.802"]


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.strip() == f"lightning-zero {__version__}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: command"),
        (["plan", "--numel", "10"], "--world-size"),
        (["plan", "--world-size", "2"], "--numel"),
        (["plan", "--numel", "0", "--world-size", "2"], "must be at least 1, got 0"),
        (["plan", "--numel", "10", "--world-size", "-1"], "must be at least 1, got -1"),
        (["plan", "--numel", "many", "--world-size", "1"], "--numel"),
        (["plan", "--numel", "9", "--world-size", "1", "--precision", "8"], "invalid choice"),
    ],
)
def test_wrong_arguments_end_with_usage(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_doctor_says_what_is_built_for_what_and_why_not(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out
    assert torch.backends.cpu.get_cpu_capability() in out
    assert "not built: there is no C++ compiler (/nowhere/c++)" in out
    assert str(tmp_path) in out
    monkeypatch.setenv("LIGHTNING_ZERO_OPS", "reference")
    assert main(["doctor"]) == 0
    assert "not used: LIGHTNING_ZERO_OPS=reference is set" in capsys.readouterr().out


def test_build_that_cannot_be_says_why(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert main(["build-ops"]) == 1
    assert "lightning-zero build-ops: there is no C++ compiler" in capsys.readouterr().err
