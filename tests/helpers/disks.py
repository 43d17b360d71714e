"""Small file systems, to fill."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path, nbytes: int) -> Iterator[Path]:
    """A file system of so many bytes in a new folder; skips the test where none can be made."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(place)]
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("needs root and the command `mount`, to make a small disk")
    made = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    if made.returncode:
        pytest.skip(f"cannot make a small disk here: {made.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=20)
