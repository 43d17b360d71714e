"""Builds: once for all ranks of a machine, whatever happens to one, and never in silence."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import warnings

import pytest
import torch

from lightning_zero.ops import adam_step_, quantize_blocks, sum_of_squares
from lightning_zero.ops.build import build, built_file, last_error
from lightning_zero.ops.libraries import HOST_LIBRARY
from lightning_zero.ops.loader import NativeLibrary
from lightning_zero.ops.sources import (
    DEVICE,
    DEVICE_FLAGS,
    HOST,
    BuildError,
    LibrarySources,
    digest,
    source_folder,
)
from tests.helpers.spawn import run_ranks
from tests.ops.pieces import random_pieces

SOURCE = "columns_host.cpp"  # includes nothing of torch, and compiles in a second
NVCC = shutil.which("nvcc")

needs_compiler = pytest.mark.usefixtures("native")


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small library of its own folder."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "root"))
    return LibrarySources(f"small_{tmp_path.name}", (SOURCE,), is_for_device=False)


def compiler_that_counts(tmp_path, is_broken):
    """A compiler that notes what it compiles, and the file it notes it in."""
    calls, script = tmp_path / "calls", tmp_path / "c++"
    end = "; echo 'x.cpp:1: error: broken on purpose'; exit 1" if is_broken else ""
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *{SOURCE}*) echo x >> {calls}{end};; esac\n'
        f'exec {shutil.which("c++")} "$@"\n'
    )
    script.chmod(0o755)
    return script, calls


def build_in_threads(library, count=2):
    """What each of some builders at once returned or raised; locks tell them apart as processes."""
    found = []

    def run():
        try:
            found.append(build(library))
        except BuildError as error:
            found.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@needs_compiler
def test_one_of_many_builds_and_the_others_take_it(library, tmp_path, monkeypatch):
    script, calls = compiler_that_counts(tmp_path, is_broken=False)
    monkeypatch.setenv("CXX", str(script))
    assert build_in_threads(library, 3) == [built_file(library)] * 3
    assert len(calls.read_text().split()) == 1
    assert build(library) == built_file(library)
    assert len(calls.read_text().split()) == 1
    assert last_error(library) is None
    assert [path.name for path in built_file(library).parent.iterdir()] == [f"{library.name}.so"]


@needs_compiler
def test_failure_of_one_is_that_of_those_who_waited(library, tmp_path, monkeypatch):
    script, calls = compiler_that_counts(tmp_path, is_broken=True)
    monkeypatch.setenv("CXX", str(script))
    found = build_in_threads(library)
    assert len(calls.read_text().split()) == 1
    assert len({str(error) for error in found}) == 1
    assert "the compiler failed: x.cpp:1: error: broken on purpose" in str(found[0])
    assert str(found[0]) == last_error(library)
    assert not built_file(library).exists()
    calls.unlink()
    with pytest.raises(BuildError, match="broken on purpose"):  # who comes later tries anew
        build(library)
    assert len(calls.read_text().split()) == 1


@needs_compiler
def test_builder_that_is_killed_does_not_stop_the_others(library):
    folder = built_file(library).parent
    folder.mkdir(parents=True)
    lock = folder.with_suffix(".lock")
    code = (
        "import fcntl, sys, time\n"
        "lock = open(sys.argv[1], 'w')\n"
        "fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with open(lock) as mine, pytest.raises(BlockingIOError):
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        threading.Timer(0.2, holder.kill).start()
        assert build(library).is_file()


def test_missing_compiler_is_named(library, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler \(/nowhere/c\+\+\); install g\+\+"):
        build(library)


@needs_compiler
def test_folder_that_cannot_be_written_is_named(library, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/dev/null/cache")
    with pytest.raises(BuildError, match="cannot be written: .*set TORCH_EXTENSIONS_DIR"):
        build(library)


def test_what_is_built_for_something_else_is_another_folder(monkeypatch):
    found = {digest.__wrapped__(HOST), digest.__wrapped__(DEVICE)}
    monkeypatch.setenv("CXX", "clang++")
    found.add(digest.__wrapped__(HOST))
    monkeypatch.setattr(torch, "__version__", "0.0")
    found.add(digest.__wrapped__(HOST))
    assert len(found) == 4


def test_library_that_cannot_be_built_is_told_once(library, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/c++")
    native = NativeLibrary(library, "it all takes longer", on_load=pytest.fail)
    with pytest.warns(UserWarning, match=r"it all takes longer, because .* no C\+\+ compiler"):
        assert not native.is_there()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not native.is_there()


def test_reference_is_taken_without_a_word_where_it_is_asked_for(library, monkeypatch):
    monkeypatch.setenv("LIGHTNING_ZERO_OPS", "reference")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not NativeLibrary(library, "", on_load=pytest.fail).is_there()
    monkeypatch.setenv("LIGHTNING_ZERO_OPS", "fast")
    with pytest.raises(ValueError, match="LIGHTNING_ZERO_OPS=fast: must be one of"):
        NativeLibrary(library, "", on_load=pytest.fail).is_there()


def use_ops_without_a_compiler(folder):
    """In a process that has not tried the library yet: plain PyTorch steps, after one warning."""
    assert HOST_LIBRARY.is_loaded is None
    os.environ |= {"CXX": "/nowhere/c++", "TORCH_EXTENSIONS_DIR": folder}
    pieces = random_pieces([5, 6], torch.bfloat16, torch.bfloat16, has_undo=True)
    before = pieces.clone()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for count in (1, 2):
            pieces.step(adam_step_, count)
        assert torch.isfinite(sum_of_squares(pieces.grads))
        packed, _ = quantize_blocks(torch.ones(3), 4, 2)
    assert packed.numel() == 2
    assert torch.equal(pieces.copies[0], pieces.masters[0].bfloat16())
    assert not torch.equal(pieces.masters[0], before.masters[0])
    return [str(warning.message) for warning in told]


def test_ops_work_where_nothing_can_be_built(tmp_path):
    (told,) = run_ranks(use_ops_without_a_compiler, 1, str(tmp_path))
    assert ["native code is not built" in text for text in told] == [True]


def test_ops_of_a_loaded_library_are_left_for_the_reference(monkeypatch):
    monkeypatch.setattr(HOST_LIBRARY, "is_loaded", False)
    assert sum_of_squares([torch.full((4,), 3.0)]).item() == 36.0


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize("kernel", [name for name in DEVICE.files if name.endswith(".cu")])
def test_kernels_are_accepted_by_the_compiler_of_devices(kernel, tmp_path):
    """Without a header of torch, so in a second."""
    out = tmp_path / "kernel.ptx"
    command = [NVCC, "-ptx", *DEVICE_FLAGS, "-Werror", "all-warnings", "-arch=sm_80", "-o", out]
    done = subprocess.run(
        [*map(str, command), str(source_folder() / kernel)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert ".entry" in out.read_text()


def test_kernels_are_free_of_torch():
    folder = source_folder()
    kernels = [*HOST.files, *DEVICE.files]
    for name in [name for name in kernels if not name.startswith("bindings")]:
        text = (folder / name).read_text()
        assert "torch/" not in text
        assert "ATen/" not in text
