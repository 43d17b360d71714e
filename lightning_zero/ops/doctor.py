"""What native code there is on this machine, for what, and why not."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable

import torch

from lightning_zero.ops.build import built_file, last_error
from lightning_zero.ops.loader import CHOICE, is_reference_chosen
from lightning_zero.ops.sources import (
    DEVICE,
    HOST,
    BuildError,
    LibrarySources,
    build_root,
    build_tools,
    device_architectures,
    missing_tool,
    search_path,
)


def findings() -> list[tuple[str, str]]:
    """Look at this machine, without building or changing anything.

    Returns:
        What was looked at and what was found, in words; never raises for what is missing.
    """
    return [
        ("torch", f"{torch.__version__}, for CUDA {torch.version.cuda or '(none)'}"),
        ("processor", f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"),
        ("CUDA devices", ", ".join(device_architectures()) or "none"),
        ("C++ compiler", _found(lambda: _program(build_tools().get_cxx_compiler()))),
        ("nvcc", _found(_device_compiler)),
        ("ninja", _program("ninja")),
        ("libraries in", _found(lambda: str(build_root()))),
        ("ops for the host", _found(lambda: _state(HOST))),
        ("ops for devices", _found(lambda: _state(DEVICE))),
    ]


def _state(library: LibrarySources) -> str:
    """Whether a library is built, or why it is not."""
    if is_reference_chosen():
        return f"not used: {CHOICE}=reference is set"
    if library.is_for_device and not device_architectures():
        return "not needed: there is no CUDA device"
    file = built_file(library)
    if file.is_file():
        return f"built: {file}"
    reason = missing_tool(library) or last_error(library)
    if reason:
        return f"not built: {reason}"
    return "not built yet: the first use, or lightning-zero build-ops, does it"


def _device_compiler() -> str:
    """The nvcc of the toolkit that torch has found, or the one that a shell would find."""
    home = build_tools().CUDA_HOME
    return _program(f"{home}/bin/nvcc" if home else "nvcc")


def _program(name: str) -> str:
    """Where a program is."""
    return shutil.which(name.split()[0], path=search_path()) or "none"


def _found(look: Callable[[], str]) -> str:
    """What was found, or why one cannot even look."""
    try:
        return look()
    except (BuildError, OSError, ValueError) as error:
        return f"unknown: {error}"
