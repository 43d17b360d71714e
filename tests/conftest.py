"""Guards around every test: whatever a test leaves behind is undone or fails it."""

from __future__ import annotations

import os
import threading
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
# What tools write, and what somebody may be editing while tests run.
IGNORED_FOLDERS = {"__pycache__", "build", "node_modules"}
IGNORED_SUFFIXES = {".py", ".pyc", ".md"}
CHILD_EXIT_TIMEOUT_S = 2.0

settings.register_profile("repeatable", deadline=None, database=None, derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def restore_environment():
    """Launchers and cluster environments write variables that the next test would obey."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def destroy_process_group():
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_thread_left_behind():
    before = set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t not in before and not t.daemon]
    assert not left, f"threads left behind: {left}"


@pytest.fixture(scope="session")
def known_children():
    """Before the first test; whatever a later one leaves is killed by its guard."""
    return _children()


@pytest.fixture(autouse=True)
def no_process_left_behind(known_children):
    yield
    left = [process for process in _children() - known_children if process.is_running()]
    _, alive = psutil.wait_procs(left, timeout=CHILD_EXIT_TIMEOUT_S)
    # A server that forks ranks may be started at any time, and serves all tests that follow.
    alive = [process for process in alive if process.pid not in _multiprocessing_servers()]
    names = [" ".join(_command(process)) for process in alive]
    for process in alive:
        process.kill()
    assert not names, f"processes left behind: {names}"


@pytest.fixture(scope="session")
def known_files():
    return _files(ROOT)


@pytest.fixture(autouse=True)
def no_file_left_behind(known_files):
    yield
    left = _files(ROOT) - known_files
    known_files |= left  # told once
    assert not left, f"files left behind in the repository: {sorted(left)}"


def _children() -> set[psutil.Process]:
    servers = _multiprocessing_servers()
    return {p for p in psutil.Process().children(recursive=True) if p.pid not in servers}


def _multiprocessing_servers() -> set[int | None]:
    return {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return [str(process.pid)]


def _files(folder: Path) -> set[str]:
    found = set()
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not _is_ignored_folder(name)]
        found.update(
            os.path.join(where, name)
            for name in files
            if not name.startswith(".") and os.path.splitext(name)[1] not in IGNORED_SUFFIXES
        )
    return found


def _is_ignored_folder(name: str) -> bool:
    return name.startswith(".") or name in IGNORED_FOLDERS or name.endswith(".egg-info")
