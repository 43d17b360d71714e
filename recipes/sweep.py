"""Sweeps: each job in a process of its own, and one table of all jobs at the end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from rich.console import Console
from rich.table import Table

from report import MIB, RECORD_NAME, Record

JOBS: list[Path] = []
"""Output folders of the jobs run by this process, in order."""


def quote_stage(argument: str) -> str:
    """Make the choices of the config group ``stage`` strings: Hydra refuses numbers there.

    Args:
        argument: A command line argument, such as ``stage=0,3``.

    Returns:
        The argument as Hydra takes it, such as ``stage='0','3'``; others are returned unchanged.
    """
    if not re.fullmatch(r"stage=\d+(,\d+)*", argument):
        return argument
    return re.sub(r"\d+", r"'\g<0>'", argument)


def run_job_in_own_process(script: str) -> None:
    """Run one job of a sweep as if it had been started alone.

    Lightning starts the other ranks by running the same command line again, which must then
    be the one of this job and not of the sweep; and a job leaves no process group, environment
    variable or memory behind for the next one.

    Args:
        script: Path of the recipe.

    Raises:
        RuntimeError: The job failed.
    """
    job = HydraConfig.get()
    folder = Path(job.runtime.output_dir).absolute()
    JOBS.append(folder)
    command = [sys.executable, script, *job.overrides.task, f'hydra.run.dir="{folder}"']
    code = subprocess.run(command, check=False).returncode
    if code != 0 or not (folder / RECORD_NAME).exists():
        raise RuntimeError(f"the job {' '.join(job.overrides.task)} ended with exit code {code}")


def print_comparison() -> None:
    """Print one table of all jobs of the sweep; nothing without a sweep."""
    if not JOBS:
        return
    paths = [folder / RECORD_NAME for folder in JOBS]
    records = [Record(**json.loads(p.read_text())) if p.exists() else None for p in paths]
    common = set.intersection(*[set(record.overrides) for record in records if record] or [set()])
    table = Table("job", title="Comparison of the jobs", caption=" ".join(sorted(common)))
    for column in ("loss", "bits/byte", "step ms", "MiB/rank", "MiB sent/step"):
        table.add_column(column, justify="right", no_wrap=True)
    for folder, record in zip(JOBS, records, strict=True):
        if record is None:
            table.add_row(folder.name, "failed")
            continue
        own = [override for override in record.overrides if override not in common]
        table.add_row(
            " ".join(own).replace("'", ""),
            f"{record.loss:.4f}",
            f"{record.bits_per_byte:.3f}",
            f"{record.step_s * 1e3:.0f}",
            f"{record.rank_nbytes / MIB:.2f}",
            f"{record.sent_nbytes_per_step / MIB:.2f}",
        )
    console = Console()
    console.print()
    console.print(table)
