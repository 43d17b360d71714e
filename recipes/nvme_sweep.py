"""How long a sweep over states on a disk takes, and how long it has to.

python recipes/nvme_sweep.py                        1 GiB in the folder for temporary files
python recipes/nvme_sweep.py --folder /local/nvme --mib 8192 --region-mib 64 --passes 0 1 20

A sweep reads and writes every byte, while a consumer goes over each region so many times. What it
has to take is the longer of the two: the bytes by the measured speed of reads and writes together,
and the passes. These are also measured alone, in memory: where cores are few, they are slower
beside a disk. Everything is measured in turns, for the disk may serve others, too.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_zero.memory.disk_speed import DiskSpeed, measure_disk_speed
from lightning_zero.memory.run_folder import RunFolder
from lightning_zero.memory.state_file import StateFile, aligned_buffer
from lightning_zero.memory.window import Window

MIB = 2**20
BEYOND_CACHES_NBYTES = 256 * MIB


def compute(memory: Tensor, passes: int) -> None:
    """Go over a region as an optimizer does over its states."""
    values = memory.view(torch.float32)
    for _ in range(passes):
        values.mul_(0.999).add_(1e-3)


def seconds(regions: Iterable[tuple[int, Tensor]], passes: int) -> tuple[float, float]:
    """How long it takes to compute on all regions as they come, and to compute of that."""
    compute_s, begin_s = 0.0, time.perf_counter()
    for _, memory in regions:
        compute_begin_s = time.perf_counter()
        compute(memory, passes)
        compute_s += time.perf_counter() - compute_begin_s
    return time.perf_counter() - begin_s, compute_s


def main() -> None:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--region-mib", type=int, default=32)
    parser.add_argument("--buffers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--passes", type=int, nargs="+", default=[0, 1, 10])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = RunFolder(options.folder, rank=0)
    count = max(1, options.mib // options.region_mib)
    file = StateFile(folder.path / "sweep.states", [options.region_mib * MIB] * count)
    window = Window(file, buffer_count=options.buffers, threads=options.threads)
    kept = max(options.buffers, BEYOND_CACHES_NBYTES // file.largest_nbytes)
    buffers = [aligned_buffer(file.largest_nbytes, pin=False).zero_() for _ in range(kept)]
    in_memory = [(index, buffers[index % kept]) for index in range(count)]
    speeds: list[DiskSpeed] = [measure_disk_speed(file, threads=options.threads)]
    found: dict[int, list[tuple[float, ...]]] = {passes: [] for passes in options.passes}
    for _ in range(options.rounds):
        for passes, figures in found.items():
            alone_s, _ = seconds(in_memory, passes)
            sweep_s, compute_s = seconds(window.sweep(range(count)), passes)
            speeds.append(measure_disk_speed(file, threads=options.threads))
            # The disk just before and just after this sweep.
            disk_s = sum(speed.sweep_s(file.nbytes) for speed in speeds[-2:]) / 2
            figures.append((alone_s, compute_s, disk_s, sweep_s, sweep_s / max(disk_s, compute_s)))
    for closed in (window, file, folder):
        closed.close()
    read, write, both = (
        median(getattr(speed, f"{kind}_nbytes_per_s") / MIB for speed in speeds)
        for kind in ("read", "write", "both")
    )
    table = Table(
        title=f"{file.nbytes / MIB:.0f} MiB in {count} regions, {window.nbytes / MIB:.0f} MiB of "
        f"buffers, O_DIRECT {'on' if file.is_direct else 'off'}. "
        f"MiB/s: read {read:.0f}, write {write:.0f}, both together {both:.0f}"
    )
    headings = ("passes", "alone s", "in the sweep s", "disk alone s", "sweep s")
    for heading in (*headings, "sweep / longer one", "range"):
        table.add_column(heading, justify="right")
    for passes, figures in found.items():
        *times, ratio = (median(column) for column in zip(*figures, strict=True))
        ratios = [figure[-1] for figure in figures]
        table.add_row(
            str(passes),
            *(f"{time_s:.3f}" for time_s in times),
            f"{ratio:.2f}",
            f"{min(ratios):.2f}-{max(ratios):.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
