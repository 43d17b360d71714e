"""Builds a native library once for all processes of this machine."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_zero.ops.sources import (
    DEVICE_FLAGS,
    HOST_FLAGS,
    BuildError,
    LibrarySources,
    build_folder,
    device_architectures,
    missing_tool,
    search_path,
    source_folder,
)

BUILD_TIMEOUT_S = 900.0
LOG = "build.log"


def built_file(library: LibrarySources) -> Path:
    """Where the library is once it is built; whole whenever it is there."""
    return build_folder(library) / f"{library.name}.so"


def build(library: LibrarySources) -> Path:
    """Build a library, unless it is built already, and say where it is.

    Ranks of one machine may call this at once: one of them builds, the others wait for it and take
    what it made, or its failure. The lock goes with the process that holds it, however that ends.

    Args:
        library: What to build.

    Returns:
        The shared library's file.

    Raises:
        BuildError: A tool is missing, the folder cannot be written, or the compiler failed.
    """
    file = built_file(library)
    if file.is_file():
        return file
    problem = missing_tool(library)
    if problem:
        raise BuildError(problem)
    asked_s = time.time()
    try:
        with _alone(file.parent):
            if file.is_file():
                return file
            _raise_failure_of_others(file.parent / LOG, asked_s)
            _compile(library, file)
    except OSError as error:
        raise BuildError(
            f"the library cannot be written: {error}; set TORCH_EXTENSIONS_DIR to a folder that can"
        ) from error
    return file


def last_error(library: LibrarySources) -> str | None:
    """Why the compiler last failed on these very sources; None if it did not."""
    log = build_folder(library) / LOG
    return _first_error(log.read_text(), log) if log.is_file() else None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _raise_failure_of_others(log: Path, asked_s: float) -> None:
    """What failed while this process waited would fail again."""
    if log.is_file() and log.stat().st_mtime >= asked_s:
        raise BuildError(_first_error(log.read_text(), log))


def _compile(library: LibrarySources, file: Path) -> None:
    """Compile in a folder of our own; the result appears at once, or not at all."""
    log = file.parent / LOG
    with tempfile.TemporaryDirectory(dir=file.parent, prefix="building-") as folder:
        command = [sys.executable, "-P", str(Path(__file__).with_name("compile.py"))]
        command.append(json.dumps(_options(library, folder)))
        environment = {**os.environ, "PATH": search_path()}
        if library.is_for_device:
            environment.setdefault("TORCH_CUDA_ARCH_LIST", ";".join(device_architectures()))
        try:
            done = subprocess.run(
                command,
                env=environment,
                check=False,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=BUILD_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"the compiler did not end within {BUILD_TIMEOUT_S:.0f} s") from error
        made = Path(folder) / f"{library.name}.so"
        if done.returncode or not made.is_file():
            log.write_text(done.stdout)
            raise BuildError(_first_error(done.stdout, log))
        shutil.move(made, file.with_suffix(".new"))
        os.replace(file.with_suffix(".new"), file)
    log.unlink(missing_ok=True)


def _options(library: LibrarySources, folder: str) -> dict[str, object]:
    """Arguments of torch's ``cpp_extension.load``."""
    sources = source_folder()
    return {
        "name": library.name,
        "sources": [str(sources / name) for name in library.files],
        "extra_cflags": list(HOST_FLAGS),
        "extra_cuda_cflags": list(DEVICE_FLAGS),
        "extra_ldflags": ["-fopenmp"],
        "build_directory": folder,
        "with_cuda": library.is_for_device,
        "is_python_module": False,
    }


def _first_error(output: str, log: Path) -> str:
    """The line to read first of what a compiler printed, and where the others are."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line] or lines[-1:] or ["without a word"]
    return f"the compiler failed: {errors[0]} (all of it: {log})"
