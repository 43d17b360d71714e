"""Runs that are killed at random moments, what they leave on the disk, and how they go on.

The whole campaign: ``python -m tests.helpers.crash --kills 50``
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint.files import read_file
from lightning_zero.checkpoint.saves import ShardedSaves
from lightning_zero.checkpoint.sharded import MARKER, REST
from lightning_zero.checkpoint.stored import Part, StoredTensor
from lightning_zero.checkpoint.valid import check_checkpoint, newest_valid
from tests.helpers import spawn
from tests.helpers.limits import HANG_S
from tests.helpers.models import equal, trainer, weights

RANKS = 2
STEPS = 40
WIDTH = 256
TIMEOUT_S = 10.0
SURVIVOR_S = 3 * TIMEOUT_S
"""Longest time until a rank whose peer was killed has ended with an error."""
TRIES = 5


class Setting(NamedTuple):
    """How a run trains and saves."""

    stage: int
    form: str


SETTINGS = tuple(Setting(stage, form) for stage in (3, 1) for form in ("sharded", "consolidated"))


class Wide(pl.LightningModule):
    """Some MB of states, and data that depend on the step and the rank alone."""

    def __init__(self, begun: Path | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = nn.Sequential(
                nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
            )
        self.begun = begun
        self.losses: dict[int, float] = {}

    def train_dataloader(self) -> Any:
        return DataLoader(range(10 * STEPS), batch_size=None)

    def on_train_batch_start(self, *_: Any) -> None:
        if self.begun is not None:
            part = self.begun / f"part{self.global_rank}"
            part.write_text(str(self.global_step))
            part.rename(self.begun / f"at{self.global_rank}")

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.global_step + self.global_rank)
        x = torch.randn(4, WIDTH, generator=generator)
        loss = (self.model(x) - x).square().mean()
        self.losses[self.global_step] = loss.item()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(folder: Path, setting: Setting, ckpt_path: Path | None, begun: Path | None) -> Any:
    """One run on this rank, from a checkpoint or anew, to the last step."""
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    strategy = ZeroStrategy(setting.stage, checkpoint=setting.form, timeout=TIMEOUT_S)
    keeper = ModelCheckpoint(
        folder,
        filename="{step}",
        monitor="loss",
        save_top_k=2,
        every_n_train_steps=2,
        save_last=True,
        enable_version_counter=False,
    )
    user = trainer(
        strategy,
        RANKS,
        callbacks=[keeper],
        enable_checkpointing=True,
        max_steps=STEPS,
        max_epochs=-1,
    )
    module = Wide(begun)
    user.fit(module, ckpt_path=ckpt_path)
    return {"losses": module.losses, "weights": weights(module), "step": user.global_step}


def uninterrupted() -> dict[int, Any]:
    """The same without a kill, at each stage; to be called on ranks."""
    found = {}
    for stage in {setting.stage for setting in SETTINGS}:
        module = Wide()
        trainer(ZeroStrategy(stage, timeout=30), RANKS, max_steps=STEPS, max_epochs=-1).fit(module)
        found[stage] = {"losses": module.losses, "weights": weights(module)}
    return found


def stored(step: int) -> tuple[dict[str, Any], Callable[[], list[Part]]]:
    """A checkpoint of one tensor, whose elements are the step."""
    tensor = StoredTensor("w", torch.Size([1000]), (1,), torch.float32)
    values = torch.full((1000,), float(step))
    return {"global_step": step, "w": tensor}, lambda: [Part(tensor, 0, values)]


def save(writer: ShardedSaves, path: Path, step: int) -> None:
    writer.begin(path, *stored(step))
    writer.wait()


@dataclass
class Figures:
    """What a campaign has seen."""

    kills: int = 0
    runs: int = 0
    in_save: Counter[str] = field(default_factory=Counter)
    """Kills that fell into a save or a removal, by what was on the disk."""
    victims: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    """Kills after which a checkpoint that had been complete was not there to go on from."""
    invalid: int = 0
    """Visible names that were no whole checkpoint."""
    survivor_s: float = 0.0
    checked: int = 0
    anew: int = 0

    def add(self, other: Figures) -> None:
        """Count those of another campaign in."""
        for name in ("kills", "runs", "lost", "invalid", "checked", "anew"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.in_save += other.in_save
        self.victims += other.victims
        self.survivor_s = max(self.survivor_s, other.survivor_s)

    def __str__(self) -> str:
        return (
            f"{self.kills} kills {dict(self.victims)}, {sum(self.in_save.values())} of them in a"
            f" save {dict(self.in_save)}; {self.checked} visible checkpoints checked,"
            f" {self.invalid} not whole, {self.lost} lost, {self.anew} runs began anew; a survivor"
            f" took at most {self.survivor_s:.1f} s; {self.runs} runs reached the end"
        )


def step_of(path: Path) -> int:
    """The step at which a checkpoint was taken."""
    return int(read_file(path / REST if path.is_dir() else path)["global_step"])


def visible(folder: Path) -> list[Path]:
    """Names that a user takes for checkpoints."""
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def hidden(folder: Path) -> list[str]:
    """Names of what is not complete yet."""
    with contextlib.suppress(FileNotFoundError):
        return [name for name in os.listdir(folder) if name.startswith(".")]
    return []


def moment(folder: Path) -> str:
    """What of a save is on the disk; empty if none is under way."""
    names = hidden(folder)
    if any(name.endswith(".unfinished") for name in names):
        return "file"
    parts = [name for name in names if name.endswith(".part")]
    if any((folder / name / MARKER).exists() for name in parts):
        return "whole folder"
    if parts:
        return "part of a folder"
    return "lock" if names else ""


class Campaign:
    """Kills runs of one setting, and has each go on from the newest whole checkpoint."""

    def __init__(self, folder: Path, setting: Setting, chance: random.Random) -> None:
        self.folder, self.setting, self.chance = folder, setting, chance
        self.figures = Figures()
        self._newest_step = 0
        folder.mkdir(parents=True)

    def kill_one(self) -> None:
        """Start or go on, and kill one rank or both while they train."""
        for _ in range(TRIES):
            if self._killed():
                return
            shutil.rmtree(self.folder)  # it is at its end, or was before the moment came
            self.folder.mkdir()
            self._newest_step = 0
        raise AssertionError(f"{TRIES} runs have ended before they were to be killed")

    def finish(self) -> list[dict[str, Any]]:
        """Go on to the end; what each rank returns."""
        self.figures.runs += 1
        return spawn.run_ranks(train, RANKS, self.folder, self.setting, self.newest(), None)

    def newest(self) -> Path | None:
        """Where to go on; counted as lost if there was a newer one."""
        found = newest_valid(self.folder)
        step = 0 if found is None else step_of(found)
        self.figures.lost += step < self._newest_step
        self._newest_step = step
        return found

    def _killed(self) -> bool:
        newest = self.newest()
        if self._newest_step >= STEPS - 4:
            return False
        self.figures.anew += newest is None
        with tempfile.TemporaryDirectory(prefix="ranks") as name:
            place = Path(name)
            with self._ranks(place, newest) as ranks:
                self._wait_for_the_moment(place)
                for process in ranks:  # the moment stays while it is looked at
                    os.kill(process.pid, signal.SIGSTOP)
                if any(place.glob("*.pickle")):
                    return False
                self._look()
                victims = self.chance.choice([(0,), (1,), (0, 1)])
                self._count(victims)
                for rank in victims:
                    ranks[rank].kill()
                for rank in set(range(RANKS)) - set(victims):
                    os.kill(ranks[rank].pid, signal.SIGCONT)
                    self._await_survivor(ranks[rank], place / f"{rank}.pickle")
        self._look()
        return True

    def _count(self, victims: Sequence[int]) -> None:
        self.figures.kills += 1
        self.figures.victims["+".join(map(str, victims))] += 1
        if now := moment(self.folder):
            self.figures.in_save[now] += 1

    @contextlib.contextmanager
    def _ranks(self, place: Path, newest: Path | None) -> Iterator[Sequence[Any]]:
        port = spawn.free_port()
        args = (self.folder, self.setting, newest, place)
        processes = [
            spawn.context.Process(
                target=spawn._rank_main, args=(train, args, rank, RANKS, port, str(place), HANG_S)
            )
            for rank in range(RANKS)
        ]
        try:
            for process in processes:
                process.start()
            yield processes
        finally:
            for process in processes:
                spawn.end_rank(process)

    def _wait_for_the_moment(self, place: Path) -> None:
        """Until a step, then at any time or as soon as a save is seen."""
        step = self.chance.randrange(self._newest_step, STEPS - 1)
        deadline = time.monotonic() + HANG_S
        while min(_steps(place)) < step and not any(place.glob("*.pickle")):
            if time.monotonic() > deadline:
                raise AssertionError(f"not at step {step} after {HANG_S} s: {_logs(place)}")
            time.sleep(0.002)
        if self.chance.random() < 0.8:
            deadline = time.monotonic() + 0.5
            while not hidden(self.folder) and time.monotonic() < deadline:
                pass
        time.sleep(self.chance.choice([0.0, self.chance.uniform(0, 0.02)]))

    def _look(self) -> None:
        """All that has a visible name is whole, at any time."""
        for path in visible(self.folder):
            self.figures.checked += 1
            if problem := check_checkpoint(path):
                self.figures.invalid += 1
                print(problem)  # noqa: T201  (in the output of the test that fails)
            else:
                self._newest_step = max(self._newest_step, step_of(path))

    def _await_survivor(self, process: Any, outcome: Path) -> None:
        begin_s = time.monotonic()
        process.join(SURVIVOR_S)
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
            process.join(1.0)
            logs = _logs(outcome.parent)
            raise AssertionError(f"it waits {SURVIVOR_S} s after the other's end\n{logs}")
        self.figures.survivor_s = max(self.figures.survivor_s, time.monotonic() - begin_s)
        (told,) = pickle.loads(outcome.read_bytes())
        assert isinstance(told, spawn.RankError), told


def _steps(place: Path) -> list[int]:
    """The step at which each rank is, -1 before the first."""
    found = [-1] * RANKS
    for rank in range(RANKS):
        with contextlib.suppress(FileNotFoundError):
            found[rank] = int((place / f"at{rank}").read_text())
    return found


def _logs(place: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted(place.glob("*.log")))


def check_end(found: Sequence[Any], expected: Sequence[Any], stage: int) -> None:
    """The end of a run that was killed is that of one that was not, to the last bit."""
    for rank, (got, whole) in enumerate(zip(found, expected, strict=True)):
        whole = whole[stage]
        assert got["step"] == STEPS
        for step, loss in got["losses"].items():
            assert loss == whole["losses"][step], (rank, step)
        assert equal(got["weights"], whole["weights"]), rank


def main() -> None:
    """All kills of the campaign, in chains of a few that end with a run to the last step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--chain", type=int, default=3, help="kills before a run may end")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    chance = random.Random(chosen.seed)
    with tempfile.TemporaryDirectory(prefix="crash") as place:
        expected = spawn.run_ranks(uninterrupted, RANKS)
        total, number = Figures(), 0
        while total.kills < chosen.kills:
            setting = SETTINGS[number % len(SETTINGS)]
            campaign = Campaign(Path(place) / str(number), setting, chance)
            for _ in range(min(chosen.chain, chosen.kills - total.kills)):
                campaign.kill_one()
            check_end(campaign.finish(), expected, setting.stage)
            print(*setting, campaign.figures, flush=True)  # noqa: T201
            assert hidden(campaign.folder) == []
            total.add(campaign.figures)
            number += 1
    print(f"all: {total}")  # noqa: T201
    assert (total.lost, total.invalid) == (0, 0)


if __name__ == "__main__":
    main()
