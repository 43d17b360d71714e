"""The sources of the native libraries, how they are compiled, and where they go."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

# No product is fused into a sum but where the sources say so, and a root sets no error number: with
# that, loops are vectorised and every compiler gives the same bits.
HOST_FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-ffp-contract=off"),
    *("-fno-math-errno", "-fno-trapping-math", "-DAT_PARALLEL_OPENMP=1"),
)
DEVICE_FLAGS = ("-O3", "-fmad=false", "-std=c++20")
HEADERS = "*.h"
DEVICE_HEADERS = "*.cuh"


class BuildError(RuntimeError):
    """A library cannot be built here; says why and what to do."""


@dataclass(frozen=True, slots=True)
class LibrarySources:
    """What one shared library is compiled from."""

    name: str
    """Of the library, and what its folder's name begins with."""

    files: tuple[str, ...]
    """Within the folder of sources."""

    is_for_device: bool
    """Whether nvcc compiles a part of it."""


HOST = LibrarySources(
    "lightning_zero_host",
    ("bindings.cpp", "adam_host.cpp", "columns_host.cpp", "quantize_host.cpp", "sums_host.cpp"),
    is_for_device=False,
)
DEVICE = LibrarySources(
    "lightning_zero_device",
    (
        "bindings_device.cpp",
        "adam_device.cu",
        "columns_device.cu",
        "quantize_device.cu",
        "sums_device.cu",
    ),
    is_for_device=True,
)


def source_folder() -> Path:
    """The folder ``cuda/``: inside an installed package, beside it in the repository.

    Raises:
        BuildError: It is in neither place.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "cuda", package.parent / "cuda"):
        if (folder / "bindings.cpp").is_file():
            return folder
    raise BuildError(
        f"no sources of the native ops in {package / 'cuda'} or {package.parent / 'cuda'}; "
        "install lightning-zero again"
    )


@cache
def build_tools() -> Any:
    """The module of torch that builds extensions; takes a while to import, and setuptools.

    Raises:
        BuildError: It cannot be imported.
    """
    try:
        from torch.utils import cpp_extension
    except ImportError as error:
        raise BuildError(
            f"torch cannot build extensions: {error}; pip install setuptools"
        ) from error
    return cpp_extension


def build_root() -> Path:
    """Where torch keeps the extensions it builds: ``TORCH_EXTENSIONS_DIR``, or the user's cache."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or build_tools().get_default_build_root())


def build_folder(library: LibrarySources) -> Path:
    """Folder of a library that was, or is to be, built from these very sources.

    Its name ends with a digest of all that the result depends on: sources, flags, compiler, torch,
    and the processor's abilities. What was built for something else is not even looked at.
    """
    return build_root() / f"{library.name}_{digest(library)}"


@cache
def digest(library: LibrarySources) -> str:
    """Twelve hexadecimal digits of what a library depends on."""
    folder = source_folder()
    patterns = (HEADERS, DEVICE_HEADERS) if library.is_for_device else (HEADERS,)
    headers = sorted(path.name for pattern in patterns for path in folder.glob(pattern))
    found = hashlib.sha256()
    for name in (*library.files, *headers):
        found.update(name.encode() + b"\0" + (folder / name).read_bytes() + b"\0")
    words = [*HOST_FLAGS, torch.__version__, build_tools().get_cxx_compiler(), processor()]
    if library.is_for_device:
        words += [
            *DEVICE_FLAGS,
            str(torch.version.cuda),
            str(build_tools().CUDA_HOME),
            *device_architectures(),
        ]
    found.update("\0".join(words).encode())
    return found.hexdigest()[:12]


@cache
def processor() -> str:
    """What ``-march=native`` depends on, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return "\n".join([platform.machine(), platform.processor(), *told[:2]])


def device_architectures() -> list[str]:
    """Of the CUDA devices in this machine, such as ``9.0``; sorted, each once."""
    if not torch.cuda.is_available():
        return []
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return [f"{major}.{minor}" for major, minor in sorted(found)]


def search_path() -> str:
    """Where to look for programs: Python's own folder too, in which pip puts ninja."""
    return os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])


def missing_tool(library: LibrarySources) -> str | None:
    """What a build of this library needs and this machine does not have; None if all is there."""
    compiler = build_tools().get_cxx_compiler()
    if shutil.which(compiler.split()[0], path=search_path()) is None:
        return f"there is no C++ compiler ({compiler}); install g++, or set CXX"
    if shutil.which("ninja", path=search_path()) is None:
        return "there is no ninja; pip install ninja"
    if library.is_for_device and build_tools().CUDA_HOME is None:
        return "there is no nvcc; install the CUDA toolkit, or set CUDA_HOME"
    return None
