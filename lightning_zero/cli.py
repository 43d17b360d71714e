"""The ``lightning-zero`` command."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_zero.__about__ import __version__
from lightning_zero.checkpoint.consolidate import consolidate
from lightning_zero.checkpoint.deepspeed import import_deepspeed
from lightning_zero.checkpoint.valid import check_checkpoint, newest_valid
from lightning_zero.ops.doctor import findings
from lightning_zero.ops.libraries import build_all
from lightning_zero.plan.memory import Offload, model_state_nbytes

GIB = 2**30


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Words after the command's name; None for those of the process.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(prog="lightning-zero", description="ZeRO for Lightning.")
    parser.add_argument("--version", action="version", version=f"lightning-zero {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="bytes of model states per rank, for each stage")
    plan.add_argument("--numel", type=_numel, required=True, help="parameters, such as 13e9")
    plan.add_argument("--world-size", type=_positive, required=True, help="ranks")
    plan.add_argument(
        "--precision",
        choices=("32-true", "mixed"),
        default="mixed",
        help="fp32 throughout, or 16-bit parameters with fp32 master weights (default)",
    )
    plan.add_argument(
        "--offload",
        choices=("cpu", "params"),
        help="keep optimizer and gradients in host memory, or parameters, too (stage 3)",
    )
    one_file = commands.add_parser("consolidate", help="one file from a sharded checkpoint")
    one_file.add_argument("folder", type=Path, help="the sharded checkpoint")
    one_file.add_argument("file", type=Path, help="checkpoint, or weights if .safetensors")
    one_file.add_argument(
        "--trust", action="store_true", help="make any object in it, which may run code"
    )
    imported = commands.add_parser("import-deepspeed", help="one file from DeepSpeed's ZeRO")
    imported.add_argument("folder", type=Path, help="with the file 'latest', or of one tag")
    imported.add_argument("file", type=Path, help="checkpoint to write")
    imported.add_argument(
        "--trust", action="store_true", help="make any object in it, which may run code"
    )
    checked = commands.add_parser("check", help="whether a checkpoint is whole; which is newest")
    checked.add_argument("path", type=Path, help="a checkpoint, or a folder with checkpoints in it")
    commands.add_parser("build-ops", help="compile the native ops now, not at their first use")
    commands.add_parser("doctor", help="which native ops are built here, for what, and why not")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "build-ops":
            for file in build_all():
                Console().print(str(file), markup=False, highlight=False, soft_wrap=True)
            return 0
        if chosen.command == "consolidate":
            consolidate(chosen.folder, chosen.file, weights_only=not chosen.trust)
            return 0
        if chosen.command == "import-deepspeed":
            _import_deepspeed(chosen.folder, chosen.file, chosen.trust)
            return 0
        if chosen.command == "check":
            found = str(_checked(chosen.path))
            Console().print(found, markup=False, highlight=False, soft_wrap=True)
            return 0
    except (OSError, RuntimeError, ValueError, ImportError, UnpicklingError) as error:
        problem = f"lightning-zero {chosen.command}: {error}"
        Console(stderr=True).print(problem, markup=False, soft_wrap=True)
        return 1
    if chosen.command == "doctor":
        Console().print(_findings_table())
        return 0
    is_mixed = chosen.precision == "mixed"
    Console().print(_plan_table(chosen.numel, chosen.world_size, is_mixed, chosen.offload))
    return 0


def _checked(path: Path) -> Path:
    """The path, if it is a whole checkpoint, or the newest whole one in it."""
    problem = check_checkpoint(path)
    found = path if not problem else newest_valid(path)
    if found is None:
        raise RuntimeError(f"no whole checkpoint. {problem}")
    return found


def _import_deepspeed(folder: Path, file: Path, is_trusted: bool) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        import_deepspeed(folder, file, is_trusted)
    for warning in told:
        Console(stderr=True).print(
            f"lightning-zero import-deepspeed: {warning.message}", markup=False
        )


def _findings_table() -> Table:
    table = Table(title=f"lightning-zero {__version__} on this machine", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for subject, found in findings():
        table.add_row(subject, Text(found))
    return table


def _plan_table(
    numel: int, world_size: int, mixed_precision: bool, offload: Offload | None
) -> Table:
    table = Table(title=f"{numel:,} parameters on {world_size} rank(s), Adam, GiB per rank")
    headings = ("stage", "parameters", "gradients", "optimizer", "sum")
    for heading in headings if offload is None else (*headings, "in host memory"):
        table.add_column(heading, justify="right")
    first_stage = {None: 0, "cpu": 1, "params": 3}[offload]
    for stage in range(first_stage, 4):
        states = model_state_nbytes(numel, stage, world_size, mixed_precision, offload)
        nbytes = [
            states.parameters_nbytes,
            states.gradients_nbytes,
            states.optimizer_nbytes,
            states.total_nbytes,
        ]
        if states.host is not None:
            nbytes.append(states.host.total_nbytes)
        table.add_row(str(stage), *(f"{value / GIB:.3f}" for value in nbytes))
    return table


def _numel(text: str) -> int:
    return _positive(str(int(float(text))))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
