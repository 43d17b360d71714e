"""Adam on the host against the bandwidth of memory, and against other ways to do the same.

python recipes/host_adam.py                       33 M elements, 1 and 2 threads
python recipes/host_adam.py --numel 67108864 --threads 1 2 4 --rounds 20

One step has fp32 master weights and states, bf16 gradients and a bf16 copy: 28 bytes an element
must move. The bound is the better of two ways to move just these bytes, in the same run. All cases
take turns, so that what else the machine does meets all of them; the fastest round of each counts.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from lightning_zero.ops import adam_step_

STEP_NBYTES = 28
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
SWEEPS = """
#include <cstdint>
extern "C" void sweep(float* __restrict a, float* __restrict b, float* __restrict c,
                      const uint16_t* __restrict from, uint16_t* __restrict to, int64_t n) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n; ++i) { a[i] = -a[i]; b[i] = -b[i]; c[i] = -c[i]; to[i] = from[i]; }
}
"""


class Bench:
    """The tensors of a step, and every way to make or to bound it."""

    def __init__(self, numel: int, sweep: ctypes.CDLL) -> None:
        self.numel, self._sweep = numel, sweep
        self.states = [torch.zeros(numel) for _ in range(3)]
        self.states[0].normal_()
        self.moved = [state.clone() for state in self.states]
        self.grad, self.copy = torch.randn(numel).bfloat16(), torch.zeros(numel).bfloat16()
        self.undo = torch.zeros(3, numel)
        self.parameter = torch.nn.Parameter(self.states[0].clone())
        self.parameter.grad = self.grad.float()
        self.fused = torch.optim.AdamW([self.parameter], fused=True, **SETTINGS)
        self.fused.step()

    def cases(self) -> dict[str, Callable[[], object]]:
        found: dict[str, Callable[[], object]] = {
            "bound: one loop": self.move_at_once,
            "bound: a loop each": self.move_apart,
            "adam_step_": self.ours,
            "adam_step_ with undo (40 B)": lambda: self.ours((self.undo,)),
            "torch fused, fp32": self.fused.step,
            "cast + torch fused + cast": self.cast,
        }
        return found | self.deepspeed()

    def move_at_once(self) -> None:
        tensors = (*self.moved, self.grad, self.copy)
        addresses = (ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)
        self._sweep.sweep(*addresses, ctypes.c_int64(self.numel))

    def move_apart(self) -> None:
        for tensor in self.moved:
            tensor.neg_()
        self.copy.copy_(self.grad)

    def ours(self, undo: tuple[torch.Tensor, ...] = ()) -> None:
        lists = ([state] for state in self.states)
        options = {"decoupled": True, "copies": [self.copy], "undo": undo}
        adam_step_(*lists, [self.grad], [3.0], **options, **SETTINGS)

    def cast(self) -> None:
        self.parameter.grad.copy_(self.grad)
        self.fused.step()
        self.copy.copy_(self.parameter.detach())

    def deepspeed(self) -> dict[str, Callable[[], object]]:
        try:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            weight = torch.nn.Parameter(self.copy.clone())
            weight.grad = self.grad.clone()
            optimizer = DeepSpeedCPUAdam([weight], adamw_mode=True, **SETTINGS)
            optimizer.step()
        except Exception as error:  # not installed, or its op does not build
            Console(stderr=True).print(f"DeepSpeedCPUAdam is left out: {error}", markup=False)
            return {}
        return {"DeepSpeedCPUAdam, bf16": optimizer.step}


def compiled_sweep(folder: Path) -> ctypes.CDLL:
    """A loop over all streams of a step, without its arithmetic."""
    source, library = folder / "sweep.cpp", folder / "sweep.so"
    source.write_text(SWEEPS)
    flags = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
    subprocess.run(["c++", *flags, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def fastest_s(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The fastest round of each case; all of them take turns."""
    found = dict.fromkeys(cases, float("inf"))
    for _ in range(rounds):
        for name, case in cases.items():
            begin_s = time.perf_counter()
            case()
            found[name] = min(found[name], time.perf_counter() - begin_s)
    return found


def main() -> None:
    """Measure every case with each number of threads, and print a table for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--numel", type=int, default=33_000_000)
    parser.add_argument("--threads", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments.numel, compiled_sweep(Path(folder)))
    cases = bench.cases()
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        found = fastest_s(cases, arguments.rounds)
        bound_s = min(s for name, s in found.items() if name.startswith("bound"))
        table = Table(title=f"{arguments.numel:,} elements, {threads} thread(s)")
        for heading in ("", "ms", "GB/s of 28 B", "of the bound"):
            table.add_column(heading, justify="right" if heading else "left")
        for name, step_s in found.items():
            rate = arguments.numel * STEP_NBYTES / step_s / 1e9
            table.add_row(name, f"{step_s * 1e3:.1f}", f"{rate:.1f}", f"{bound_s / step_s:.2f}")
        Console().print(table)


if __name__ == "__main__":
    main()
