"""Two hosts: two network namespaces with an address each, joined by one cable, under torchrun."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.limits import HANG_S
from tests.helpers.models import Language, difference, equal, weights
from tests.helpers.programs import finish, run, started
from tests.helpers.spawn import free_port

HOSTS = (0, 1)
KINDS = ("ddp", "0", "1", "2", "3")

SCRIPT = """
import sys
from pathlib import Path

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning_zero import ZeroStrategy
from tests.helpers.models import Language, trainer, weights

torch.set_num_threads(1)


def main(folder, num_nodes, devices, *kinds):
    for kind in kinds:
        strategy = DDPStrategy() if kind == "ddp" else ZeroStrategy(int(kind), timeout=40)
        module = Language(steps=4)
        user = trainer(strategy, int(devices), num_nodes=int(num_nodes))
        user.fit(module)
        user.save_checkpoint(Path(folder, f"{kind}.ckpt"))
        ranks = user.world_size, user.num_nodes, user.local_rank, user.node_rank
        kept = {"weights": weights(module), "losses": module.losses, "ranks": ranks}
        torch.save(kept, Path(folder, f"{kind}-{user.global_rank}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture
def two_hosts() -> Iterator[list[str]]:
    """Names of two namespaces with addresses 10.77.0.1 and .2, unique to this process."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command `ip` (iproute2)")
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    names = [f"zero{host}p{os.getpid()}" for host in HOSTS]
    cables = [f"z{host}p{os.getpid()}" for host in HOSTS]  # at most 15 characters
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(_remove, name)
            ip("link", "add", cables[0], "netns", names[0], "type", "veth",
               "peer", "name", cables[1], "netns", names[1])  # fmt: skip
            for host, (name, cable) in enumerate(zip(names, cables, strict=True)):
                ip("-n", name, "link", "set", cable, "name", "cable0")
                ip("-n", name, "address", "add", f"10.77.0.{host + 1}/24", "dev", "cable0")
                ip("-n", name, "link", "set", "cable0", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"cannot make network namespaces here: {error.stderr.decode().strip()}")
        yield names
    left = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)
    assert not [name for name in names if name in left.stdout.split()]


def _remove(name: str) -> None:
    """A namespace takes its end of the cable along, and so the cable."""
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=20)


def torchrun(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *arguments]


def test_two_hosts_train_as_one(two_hosts, tmp_path):
    """Bit for bit, DDP included, and the checkpoints are the same."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    logs = [tmp_path / f"host{host}" for host in HOSTS]
    with contextlib.ExitStack() as stack:
        processes = []
        for host, name in enumerate(two_hosts):
            command = torchrun(
                "--nnodes=2",
                "--nproc-per-node=1",
                f"--node-rank={host}",
                "--master-addr=10.77.0.1",
                "--master-port=29511",
                f"--local-addr=10.77.0.{host + 1}",
            )
            command = ["ip", "netns", "exec", name, *command, str(script), str(two), "2", "1"]
            context = started([*command, *KINDS], logs[host], GLOO_SOCKET_IFNAME="cable0")
            processes.append(stack.enter_context(context))
        for process, log in zip(processes, logs, strict=True):
            finish(process, log)
    command = torchrun("--nproc-per-node=2", f"--master-port={free_port()}")
    run([*command, str(script), str(one), "1", "2", *KINDS], tmp_path / "log")

    assert difference(load(one, "ddp", 0)["weights"], weights(Language(steps=4))) > 1e-3
    for kind in KINDS:
        for rank in (0, 1):
            found, expected = load(two, kind, rank), load(one, kind, rank)
            assert found["ranks"] == (2, 2, 0, rank)
            assert expected["ranks"] == (2, 1, rank, 0)
            assert found["losses"] == expected["losses"]
            assert equal(found["weights"], expected["weights"])
            assert equal(found["weights"], load(one, "ddp", 0)["weights"])
        saved, expected = (torch.load(f / f"{kind}.ckpt", weights_only=False) for f in (two, one))
        assert equal(saved["state_dict"], expected["state_dict"])


def load(folder: Path, kind: str, rank: int) -> dict:
    return torch.load(folder / f"{kind}-{rank}.pt")


def test_a_host_that_goes_ends_the_other(two_hosts, tmp_path):
    """The cable is cut in the middle of training: an error on both hosts, in bounded time."""
    script = tmp_path / "train.py"
    script.write_text(
        SCRIPT.replace("timeout=40", "timeout=6").replace("Language(steps=4)", "Endless()").replace(
            "def main(",
            "class Endless(Language):\n"
            "    def __init__(self):\n"
            "        super().__init__(steps=100_000)\n\n"
            "    def on_train_batch_end(self, *_):\n"
            "        Path(sys.argv[1], f'rank{self.global_rank}').touch()\n\n\n"
            "def main(",
        )
    )  # fmt: skip
    logs = [tmp_path / f"host{host}" for host in HOSTS]
    with contextlib.ExitStack() as stack:
        processes = []
        for host, name in enumerate(two_hosts):
            variables = {
                "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": "29512",
                "NODE_RANK": str(host),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "2",
                "GLOO_SOCKET_IFNAME": "cable0",
            }
            command = ["ip", "netns", "exec", name, sys.executable, str(script), str(tmp_path)]
            context = started([*command, "2", "1", "3"], logs[host], **variables)
            processes.append(stack.enter_context(context))
        wait_for([tmp_path / f"rank{host}" for host in HOSTS], processes, logs)
        ip("-n", two_hosts[1], "link", "set", "cable0", "down")
        for process, log in zip(processes, logs, strict=True):
            with pytest.raises(AssertionError, match="exit code"):
                finish(process, log, timeout_s=40)


def wait_for(paths: list[Path], processes: list[subprocess.Popen], logs: list[Path]) -> None:
    import time

    deadline = time.monotonic() + HANG_S
    while not all(path.exists() for path in paths):
        for process, log in zip(processes, logs, strict=True):
            assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, [log.read_text()[-2000:] for log in logs]
        time.sleep(0.05)
