"""torchrun starts ranks again, as many or fewer, and they go on from the newest checkpoint."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_zero.checkpoint.valid import check_checkpoint
from lightning_zero.cli import main
from tests.helpers.crash import STEPS, Wide, hidden, step_of, uninterrupted, visible
from tests.helpers.limits import HANG_S
from tests.helpers.models import difference, equal, trainer, weights
from tests.helpers.programs import finish, started
from tests.helpers.spawn import free_port, run_ranks

SCRIPT = """
import os
import shutil
import sys
import time
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint.valid import newest_valid
from tests.helpers.crash import STEPS, Wide
from tests.helpers.models import trainer, weights

torch.set_num_threads(1)


class Steady(Wide):
    def on_train_batch_start(self, *_):
        time.sleep(0.02)


def main(folder):
    folder = Path(folder)
    rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    (folder / f"pid{rank}-{os.environ['WORLD_SIZE']}-{restarts}").write_text(str(os.getpid()))
    newest = newest_valid(folder / "saved")
    if newest is not None and rank == "0":
        shutil.copytree(newest, folder / "origin.ckpt")  # the next saves may replace it
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    keeper = ModelCheckpoint(
        folder / "saved", filename="{step}", every_n_train_steps=2, save_top_k=2,
        monitor="step", mode="max", save_last=True, enable_version_counter=False,
    )
    user = trainer(
        ZeroStrategy(3, checkpoint="sharded", timeout=20),
        devices,
        num_nodes=int(os.environ["WORLD_SIZE"]) // devices,
        callbacks=[keeper],
        enable_checkpointing=True,
        max_steps=STEPS,
        max_epochs=-1,
    )
    module = Steady()
    user.fit(module, ckpt_path=newest)
    kept = {
        "losses": module.losses, "weights": weights(module), "ranks": user.world_size,
        "restarts": int(restarts),
    }
    torch.save(kept, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
"""

APART = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Else ranks that torchrun starts again find the addresses of those that were killed."""


def torchrun(script: Path, folder: Path, *arguments: str) -> list[str]:
    script.write_text(SCRIPT)
    folder.mkdir()
    return [sys.executable, "-m", "torch.distributed.run", *arguments, str(script), str(folder)]


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + HANG_S
    while not is_so():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {HANG_S} s")
        time.sleep(0.01)


def has_saved(folder: Path) -> bool:
    return any((folder / "saved" / f"step={step}.ckpt").exists() for step in range(6, STEPS))


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def assert_whole(folder: Path) -> None:
    assert {"last.ckpt", f"step={STEPS}.ckpt"} <= {path.name for path in visible(folder)}
    assert all(check_checkpoint(path) == "" for path in visible(folder))
    assert hidden(folder) == []


def test_a_rank_that_is_killed_is_started_again(tmp_path):
    """All ranks start anew, and end as if nothing had happened."""
    expected = run_ranks(uninterrupted, 2)
    folder = tmp_path / "run"
    command = torchrun(
        tmp_path / "train.py", folder, "--standalone", "--nproc-per-node=2", "--max-restarts=2"
    )
    with started(command, tmp_path / "log", **APART) as process:
        wait_until(lambda: has_saved(folder), "the first checkpoints")
        os.kill(int((folder / "pid1-2-0").read_text()), signal.SIGKILL)
        finish(process, tmp_path / "log")
    for rank in (0, 1):
        found, whole = torch.load(folder / f"{rank}.pt"), expected[rank][3]
        assert (found["ranks"], found["restarts"]) == (2, 1)
        assert 0 < min(found["losses"]) < max(found["losses"]) == STEPS - 1
        assert all(loss == whole["losses"][step] for step, loss in found["losses"].items())
        assert equal(found["weights"], whole["weights"])
    assert_whole(folder / "saved")


def resumed(checkpoint: Path) -> dict[str, Any]:
    """DDP from a checkpoint to the end."""
    user = trainer(DDPStrategy(), 1, max_steps=STEPS, max_epochs=-1)
    user.fit(module := Wide(), ckpt_path=checkpoint)
    return {"losses": module.losses, "weights": weights(module)}


def test_a_node_that_goes_leaves_the_other_training(tmp_path):
    """From two ranks to one, which goes on from the last sharded checkpoint as DDP does."""
    folder, port = tmp_path / "run", free_port()
    command = torchrun(
        tmp_path / "train.py",
        folder,
        "--nnodes=1:2",
        "--nproc-per-node=1",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-conf=last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=2",
    )
    with started(command, tmp_path / "log0", **APART) as staying:
        wait_until(lambda: listens(port), "the list of nodes")  # the first node keeps it
        with started(command, tmp_path / "log1", **APART) as going:
            wait_until(lambda: has_saved(folder), "the first checkpoints")
            ranks = {(folder / f"pid{rank}-2-0").read_text() for rank in (0, 1)}
            node = psutil.Process(going.pid)
            node_and_rank = [node, *node.children(recursive=True)]
            assert ranks & {str(process.pid) for process in node_and_rank}
            for process in node_and_rank:
                process.kill()
            finish(staying, tmp_path / "log0")
    found = torch.load(folder / "0.pt")
    assert found["ranks"] == 1
    assert_whole(folder / "saved")

    origin = folder / "origin.ckpt"
    assert min(found["losses"]) == step_of(origin) >= 4
    assert main(["consolidate", str(origin), str(tmp_path / "one.ckpt")]) == 0
    (expected,) = run_ranks(resumed, 1, tmp_path / "one.ckpt")
    assert found["losses"].keys() == expected["losses"].keys()
    for step, loss in expected["losses"].items():
        assert found["losses"][step] == pytest.approx(loss, rel=1e-6)
    assert difference(found["weights"], expected["weights"]) <= 1e-6
