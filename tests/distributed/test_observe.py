"""Timers and timelines of real ranks: counts that the buckets imply, an order that is possible."""

from __future__ import annotations

import csv
import json
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.observe.timers import FETCH_TIMERS, StepTimers
from tests.helpers.models import trainer
from tests.helpers.spawn import run_ranks
from tests.helpers.traces import check_trace

WIDTH, LAYERS, STEPS = 32, 4, 3
LAYER_NUMEL = WIDTH * WIDTH + WIDTH
ALL_NUMEL = LAYERS * LAYER_NUMEL


class Chain(pl.LightningModule):
    """Layers that are used one after the other, each a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.net = nn.Sequential(*layers)
        self.losses: list[float] = []
        self.timers: StepTimers | None = None
        self.fails_at = -1

    def on_train_start(self) -> None:
        self.timers = self.trainer.strategy._observer._timers

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index == self.fails_at:
            raise ArithmeticError("on all ranks")
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.net(batch)

    def train_dataloader(self) -> Any:
        data = torch.randn(STEPS, 5, WIDTH, generator=torch.Generator().manual_seed(1))
        return DataLoader(data + self.trainer.global_rank, batch_size=None)

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Messages(logging.Handler):
    """Keeps what is printed."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += record.getMessage().splitlines()


def fit(stage: int, folder: Path | None, fails_at: int = -1, **options: Any) -> dict[str, Any]:
    """Train 3 steps with a validation before and in between; observed if there is a folder."""
    module, logger, messages = Chain(), False, Messages()
    module.fails_at = fails_at
    if stage == 3:  # what is kept is the bucket whose own use comes next
        options["prefetch"] = {"reuse_distance_numel": 0}
    if folder is not None:
        logger = CSVLogger(folder, name="logs", version="")
        options |= {"wall_clock_breakdown": True, "timeline": folder / "timeline"}
    logging.getLogger("lightning.pytorch").addHandler(messages)
    user = trainer(
        ZeroStrategy(stage, bucket_numel=LAYER_NUMEL, **options),
        2,
        logger=logger,
        num_sanity_val_steps=1,
        limit_val_batches=1,
        val_check_interval=1,
    )
    with pytest.raises(ArithmeticError) if fails_at >= 0 else nullcontext():
        user.fit(module)
    logging.getLogger("lightning.pytorch").removeHandler(messages)
    found = {"losses": module.losses, "lines": messages.lines}
    if module.timers is not None:
        steps = [module.timers.first, module.timers.later]
        found["counts"] = [{k: (s.count, s.numel) for k, s in t.kinds.items()} for t in steps]
        found["later_steps"] = module.timers.later.steps
    return found


def observe_everything(folder: str) -> dict[str, Any]:
    return {
        "unobserved": fit(3, None),
        "stage 3": fit(3, Path(folder) / "3"),
        "stage 2": fit(2, Path(folder) / "2"),
        "error": fit(3, Path(folder) / "error", fails_at=2),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("observed")


@pytest.fixture(scope="module")
def ranks(folder):
    return run_ranks(observe_everything, 2, str(folder))


@pytest.fixture(scope="module")
def events(folder, ranks):
    return json.loads((folder / "3" / "timeline" / "timeline.json").read_text())["traceEvents"]


def test_observing_changes_no_number(ranks):
    for rank in ranks:
        assert len(rank["unobserved"]["losses"]) == STEPS
        assert rank["stage 3"]["losses"] == rank["unobserved"]["losses"]


def test_first_step_fetches_each_bucket_when_it_is_needed(ranks):
    """Backward does not need the weight of the first layer, whose input has no gradient."""
    behind = (LAYERS - 1, (LAYERS - 1) * LAYER_NUMEL)
    for rank in ranks:
        first, _ = rank["stage 3"]["counts"]
        assert {kind: first[kind] for kind in FETCH_TIMERS if kind in first} == {
            "forward_fetch_submit": (LAYERS, ALL_NUMEL),
            "forward_fetch_wait": (LAYERS, ALL_NUMEL),
            "forward_all_gather": (LAYERS, ALL_NUMEL),
            "backward_fetch_submit": behind,
            "backward_fetch_wait": behind,
            "backward_all_gather": behind,
        }
        assert first["release"] == (2 * LAYERS - 1, (2 * LAYERS - 1) * LAYER_NUMEL)
        assert first["reduce"] == (LAYERS, ALL_NUMEL)


def test_later_steps_fetch_ahead_what_the_buckets_imply(ranks):
    """Only the first layer is not fetched ahead.

    The last one stays for backward; the two before it are fetched again while forward still runs,
    and with four layers nothing is left to fetch in backward.
    """
    for rank in ranks:
        assert rank["stage 3"]["later_steps"] == 2
        _, later = rank["stage 3"]["counts"]
        per_step = {
            kind: (count / 2, numel / 2 / LAYER_NUMEL) for kind, (count, numel) in later.items()
        }
        assert {kind: per_step[kind] for kind in FETCH_TIMERS if kind in per_step} == {
            "forward_fetch_submit": (1, 1),
            "forward_fetch_wait": (LAYERS, LAYERS),
            "forward_prefetch_submit": (LAYERS + 1, LAYERS + 1),
            "forward_all_gather": (LAYERS + 2, LAYERS + 2),
            "backward_fetch_wait": (LAYERS - 2, LAYERS - 2),
        }
        assert per_step["release"] == (2 * LAYERS - 2, 2 * LAYERS - 2)
        assert per_step["reduce"] == (LAYERS, LAYERS)


def test_rank_0_prints_a_line_for_each_step_and_what_bounds_the_passes(ranks):
    lines = ranks[0]["stage 3"]["lines"]
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split(" [ms]: ")[0] for line in steps] == ["step 0", "step 1", "step 2"]
    for line in steps:
        parts = [part.rsplit(" ", 1) for part in line.split(" [ms]: ")[1].split(", ")]
        times = {kind: float(ms) for kind, ms in parts}
        assert list(times)[:10] == ["forward", "backward", *FETCH_TIMERS]
        assert times["forward"] > 0
        assert times["backward"] > 0
    assert "wall clock of 2 step(s) (the first is left out), rank 0, mean of a step" in lines
    for which in ("forward", "backward"):
        (verdict,) = (line for line in lines if line.startswith(f"  {which} is "))
        assert verdict.split()[2].rstrip(":") in {"submit-bound", "wait-bound", "compute-bound"}
    assert not any("step 0" in line for line in ranks[1]["stage 3"]["lines"])


def test_times_arrive_in_a_logger(folder, ranks):
    with (folder / "3" / "logs" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["zero/forward_s"]]
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    for row in rows:
        values = {kind: float(row[f"zero/{kind}_s"]) for kind in FETCH_TIMERS}
        assert all(0 <= value < 60 for value in values.values())
        assert values["forward_fetch_wait"] <= float(row["zero/forward_s"])
        assert float(row["zero/backward_s"]) > 0
    assert float(rows[0]["zero/forward_prefetch_submit_s"]) == 0
    assert float(rows[1]["zero/forward_prefetch_submit_s"]) > 0


def test_stage_2_shows_passes_and_reductions_but_no_fetches(folder, ranks):
    for rank in ranks:
        for counts, steps in zip(rank["stage 2"]["counts"], (1, 2), strict=True):
            assert not set(counts) & set(FETCH_TIMERS)
            assert counts["forward"][0] == counts["backward"][0] == steps
            assert counts["reduce"] == (steps * LAYERS, steps * ALL_NUMEL)
    assert any("forward is compute-bound" in line for line in ranks[0]["stage 2"]["lines"])
    content = json.loads((folder / "2" / "timeline" / "timeline.json").read_text())
    assert {event["cat"] for event in content["traceEvents"] if "cat" in event} >= {
        "forward",
        "backward",
        "use",
        "reduce",
    }


def test_files_are_valid_traces_of_both_ranks(folder, ranks):
    files = sorted(path.name for path in (folder / "3" / "timeline").iterdir())
    assert files == ["timeline-rank0.json", "timeline-rank1.json", "timeline.json"]
    counts = [
        check_trace(json.loads((folder / "3" / "timeline" / file).read_text())) for file in files
    ]
    assert counts[2] == counts[0] + counts[1] > 100


def test_after_an_error_whole_steps_are_summed_up_and_each_rank_has_a_timeline(folder, ranks):
    for rank in ranks:
        assert rank["error"]["later_steps"] == 1
    lines = ranks[0]["error"]["lines"]
    assert "wall clock of 1 step(s) (the first is left out), rank 0, mean of a step" in lines
    files = sorted((folder / "error" / "timeline").iterdir())
    assert [path.name for path in files] == ["timeline-rank0.json", "timeline-rank1.json"]
    assert all(check_trace(json.loads(path.read_text())) > 50 for path in files)


def of(events, rank, category, step=None, bucket=None):
    """Begin and end of some events of a rank, in microseconds, in order."""
    return sorted(
        (event["ts"], round(event["ts"] + event.get("dur", 0.0), 3))
        for event in events
        if event.get("cat") == category
        and event["pid"] == rank
        and (step is None or event["args"]["step"] == step)
        and (bucket is None or event["args"].get("bucket") == bucket)
    )


def gathers_of(events, rank, step, bucket):
    """Transfers of a bucket; what backward needs first is fetched while forward still runs."""
    kinds = ("forward_all_gather", "backward_all_gather")
    return sorted(time for kind in kinds for time in of(events, rank, kind, step, bucket))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", range(STEPS))
def test_bucket_is_fetched_before_its_use_and_released_after_it(events, rank, step):
    (backward,) = of(events, rank, "backward", step)
    for bucket in range(LAYERS):
        gathers = gathers_of(events, rank, step, bucket)
        (use,) = of(events, rank, "use", step, bucket)
        releases = [begin for begin, _ in of(events, rank, "release", step, bucket)]
        uses_behind = of(events, rank, "backward_use", step, bucket)
        assert len(gathers) == len(releases)
        assert len(uses_behind) == (bucket > 0)  # see above: not the first layer
        assert gathers[0][1] <= use[0] < use[1] <= releases[0]
        if len(gathers) == 2:
            assert releases[0] <= gathers[1][0] < gathers[1][1] <= uses_behind[0][0]
        for begin, end in uses_behind:
            assert backward[0] <= begin < end <= backward[1]
            assert releases[-1] == pytest.approx(end, abs=0.002)
        (reduce,) = of(events, rank, "reduce", step, bucket)
        assert backward[0] <= reduce[0] < reduce[1] <= backward[1]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", range(1, STEPS))
def test_next_bucket_is_on_its_way_before_a_bucket_is_used(events, rank, step):
    for bucket in range(LAYERS - 1):
        following = gathers_of(events, rank, step, bucket + 1)[0]
        (use,) = of(events, rank, "use", step, bucket)
        assert following[0] < use[0]


def test_steps_of_both_ranks_overlap_in_time(events):
    for step in range(STEPS):
        (own,), (other,) = (of(events, rank, "backward", step) for rank in (0, 1))
        assert max(own[0], other[0]) < min(own[1], other[1])


def test_validation_is_in_no_step(events):
    for rank in (0, 1):
        assert len(of(events, rank, "forward")) == STEPS
