"""A self-check proves a right training right, finds what is wrong in a wrong one, and goes."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn

from lightning_zero import ShardGroups, ZeroEngine, ZeroOptions, ZeroStrategy
from lightning_zero import engine as engine_module
from lightning_zero.grads.reducer import GradientReducer
from lightning_zero.observe.watch import UNWATCHED
from lightning_zero.self_check import Kind, SelfCheck
from lightning_zero.self_check import check as check_module
from tests.helpers import models
from tests.helpers.models import Language, Tokens, equal, trainer, weights
from tests.helpers.spawn import run_ranks

STAGES = (0, 1, 2, 3)
SHARDED = (1, 2, 3)
STEPS = 3
CORRUPT = "model.blocks.1.up.weight"


class Metrics(DummyLogger):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def log_metrics(self, metrics, step=None):
        self.kept |= metrics


class Branching(Language):
    """Rank 1 never uses the last block, and no rank the second; weights are used by name."""

    def training_step(self, batch, index):
        model = self.model
        x = (model.token(batch) + model.position) * model.scale
        x = model.blocks[0](x)
        if self.global_rank == 0:
            x = model.blocks[2](x)
        x = nn.functional.linear(model.norm(x), model.token.weight)
        return nn.functional.cross_entropy(x.flatten(0, 1), batch.flatten())


class Players(Language):
    """Two optimizers in manual optimization, one of which steps every other time."""

    def __init__(self, **options):
        super().__init__(**options)
        self.automatic_optimization = False

    def configure_optimizers(self):
        blocks = list(self.model.blocks.parameters())
        rest = [p for p in self.model.parameters() if all(p is not block for block in blocks)]
        return [torch.optim.AdamW(blocks, lr=1e-2), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]

    def training_step(self, batch, index):
        first, second = self.optimizers()
        for optimizer in (first, second) if index % 2 else (first,):
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.model(batch))
            self.manual_backward(self.model(batch.flip(0)))
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            self.untoggle_optimizer(optimizer)


class Writing(Language):
    """Weights are written to as users may: in scopes, and in place in a step and between steps."""

    def on_train_batch_start(self, batch, index):
        strategy = self.trainer.strategy
        with strategy.full_params(writeback=True), torch.no_grad():
            self.model.position.mul_(0.5)

    def training_step(self, batch, index):
        with torch.no_grad():
            self.model.head.weight.clamp_(-0.05, 0.05)
        return super().training_step(batch, index)

    def on_train_batch_end(self, outputs, batch, index):
        with torch.no_grad():
            self.model.norm.weight.add_(0.25)


class Thawing(Language):
    """A block comes into training before the second batch, and is frozen at first."""

    def on_train_batch_start(self, batch, index):
        if index == 1:
            self.model.blocks[1].requires_grad_(True)


class Injecting(Callback):
    """Does something wrong before the second batch."""

    def __init__(self, inject):
        self.inject = inject

    def on_train_batch_start(self, trainer, module, batch, index):
        if index == 1:
            self.inject(trainer.strategy.engine, dist.get_rank())


def fit(stage, module, self_check=STEPS, options=None, ckpt_path=None, **trainer_options):
    """What a self-check says: report, warnings, metrics; and what the training came to."""
    strategy = ZeroStrategy(stage, self_check=self_check, **(options or {}))
    logger = Metrics()
    fitted = trainer(strategy, dist.get_world_size(), **{"logger": logger, **trainer_options})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted.fit(module, ckpt_path=ckpt_path)
    return {
        "report": strategy.self_check_report,
        "warnings": [str(w.message) for w in caught if "self_check" in str(w.message)],
        "metrics": logger.kept,
        "weights": weights(module),
        "losses": module.losses,
    }


def resumed(stage, folder):
    """A fit that goes on with the states of another one."""
    save = ModelCheckpoint(folder, filename=f"{stage}", save_top_k=-1)
    options = {"enable_checkpointing": True, "callbacks": [save]}
    fit(stage, Language(steps=2), self_check=None, **options)
    return fit(stage, Language(steps=5), ckpt_path=f"{folder}/{stage}.ckpt", max_epochs=2)


def right(folder):
    """Trainings in which nothing is wrong, at each stage."""
    tf = {"with_scheduler": True, "make_optimizer": models.two_groups}
    small = {"bucket_numel": 3000}
    return {
        "plain": {s: fit(s, Language(steps=4, **tf), options=small) for s in STAGES},
        "unchecked": {s: fit(s, Language(steps=4, **tf), None, small) for s in STAGES},
        "tied": {s: fit(s, Language(steps=2, tied=True, frozen=True), 5) for s in SHARDED},
        "branching": {
            s: fit(s, Branching(steps=4), options=small, **clipped(0.01, "value")) for s in SHARDED
        },
        "writing": {s: fit(s, Writing(steps=4)) for s in SHARDED},
        "resumed": {s: resumed(s, folder) for s in SHARDED},
        "bf16": {s: fit(s, Language(steps=4), precision="bf16-true") for s in SHARDED},
        "fp16": {s: fit(s, Language(steps=4), precision="16-mixed") for s in SHARDED},
        "norm": {
            s: fit(s, Language(steps=8), **clipped(0.5, "norm"), accumulate_grad_batches=2)
            for s in SHARDED
        },
        "bf16 norm": {
            s: fit(
                s,
                Language(steps=8),
                **clipped(0.5, "norm"),
                accumulate_grad_batches=2,
                precision="bf16-true",
            )
            for s in SHARDED
        },
        "players": {s: fit(s, Players(steps=7)) for s in SHARDED},
        "part": {s: in_part(s) for s in SHARDED},
        "thawing": {s: fit(s, Thawing(steps=4, frozen=True)) for s in SHARDED},
    }


def clipped(limit, algorithm):
    return {"gradient_clip_val": limit, "gradient_clip_algorithm": algorithm}


def in_part(stage):
    with mock.patch.object(check_module, "MAX_NBYTES", 60_000):
        return fit(stage, Language(steps=4), **clipped(0.5, "norm"))


def corrupt_shard(engine, rank):
    (weight,) = [p for p, name in engine.names.items() if name == CORRUPT]
    piece = engine.table.piece(weight)
    if piece is not None and piece.piece.param_offset:  # the last part of it
        piece.tensor.data.view(-1)[0] += 1.0


def corrupt_state(engine, rank):
    if rank == 0:
        (optimizer,) = engine._optimizers
        state = next(iter(optimizer.state.values()))
        state["exp_avg"].view(-1)[0] += 1.0


class Stale:
    """Gathers that bring an old value of one element to rank 1."""

    def __init__(self, inner):
        self.inner, self.rank, self.world_size = inner, inner.rank, inner.world_size
        self.old = None

    def all_gather(self, flat, shard, key):
        self.flat, self.handle = flat, self.inner.all_gather(flat, shard, key)
        return self

    def wait(self, timeout=None):
        self.handle.wait(timeout)
        with torch.no_grad():
            if self.old is not None and self.rank == 1:
                self.flat[0] = self.old
            self.old = float(self.flat[0])


def make_stale(engine, rank):
    bucket = engine.buckets[0]
    bucket._gathers = Stale(bucket._gathers)


class Dropping(GradientReducer):
    """What rank 1 has for the first parameter never arrives."""

    def _collect(self, bucket, slot, parameter):
        if bucket.layout.index == 0 and slot == 0 and self._collectives.rank == 1:
            parameter.grad.zero_()
        super()._collect(bucket, slot, parameter)


def wrong():
    """Trainings with faults."""
    found = {}
    for name, inject in [
        ("corrupt shard", corrupt_shard),
        ("corrupt state", corrupt_state),
        ("stale", make_stale),
    ]:
        found[name] = {s: fit(s, Language(steps=4), callbacks=[Injecting(inject)]) for s in SHARDED}
    with mock.patch.object(engine_module, "GradientReducer", Dropping):
        found["dropping"] = {s: fit(s, Language(steps=4)) for s in SHARDED}
    return found


def in_a_bare_loop(stage):
    """The engine alone; nothing of the check is left after its last step."""
    model = models.TinyGPT()
    optimizer = models.adamw(model)
    engine = ZeroEngine(model, [optimizer], ZeroOptions(stage=stage), ShardGroups.create())
    check = SelfCheck(engine, [optimizer], steps=2)
    gone = [weakref.ref(copy.weight) for copy in check._copies.values()]
    for batch in Tokens(dist.get_rank(), 4):
        engine.backward(model(batch))
        engine.step(optimizer)
        optimizer.zero_grad()
    gc.collect()
    is_gone = not any(ref() is not None for ref in gone) and engine.watch is UNWATCHED
    engine.close()
    return check.report, is_gone and engine.coordinator.watch is UNWATCHED


class Locked(torch.optim.SGD):
    """Has an attribute that cannot be copied."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.lock = threading.Lock()


def with_a_lock():
    try:
        fit(1, Language(lambda module: Locked(module.parameters(), lr=0.1)))
    except ValueError as error:
        return str(error)
    return ""


def on_two_ranks(folder):
    dist.init_process_group("gloo")
    bare = {s: in_a_bare_loop(s) for s in SHARDED}
    return right(folder) | wrong() | {"bare": bare, "locked": with_a_lock()}


def on_three_ranks():
    dist.init_process_group("gloo")
    options = {**clipped(0.5, "norm"), "accumulate_grad_batches": 2}
    return {
        "three": {s: fit(s, Language(steps=4), options={"bucket_numel": 3000}) for s in SHARDED},
        "three norm": {s: fit(s, Language(steps=8), **options) for s in SHARDED},
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(on_two_ranks, 2, str(tmp_path_factory.mktemp("runs")))


@pytest.fixture(scope="module")
def three():
    return run_ranks(on_three_ranks, 3)


def check_right(found, bound=0.0):
    report = found["report"]
    assert not found["warnings"], found["warnings"]
    assert not report.faults
    assert set(report.largest) == set(Kind)
    for kind, difference in report.largest.items():
        assert difference.relative <= (bound if kind is Kind.GRADIENTS else 0.0), str(report)


@pytest.mark.parametrize("stage", STAGES)
def test_plain_training_is_equal_bit_for_bit_and_says_so(ranks, stage):
    for rank, found in enumerate(ranks):
        checked, unchecked = found["plain"][stage], found["unchecked"][stage]
        check_right(checked)
        report = checked["report"]
        assert report.steps == STEPS
        assert report.is_exact
        assert len(report.watched) == report.total == 24
        text = str(report)
        assert "all 24 parameters (14,140 elements)" in text
        assert text.count("0.0: equal bit for bit") == 3
        assert checked["losses"] == unchecked["losses"]
        assert equal(checked["weights"], unchecked["weights"])
        assert unchecked["report"] is None
        logged = {name: v for name, v in checked["metrics"].items() if "self_check" in name}
        assert logged == (report.metrics() if rank == 0 else {})
        assert logged.get("zero/self_check_gradients", 0.0) == 0.0


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("case", ["tied", "branching", "writing", "resumed", "bf16", "thawing"])
def test_what_sums_in_one_order_is_equal_bit_for_bit(ranks, case, stage):
    for found in ranks:
        check_right(found[case][stage])


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize(
    ("case", "bound"), [("norm", 1e-6), ("players", 1e-6), ("fp16", 1e-6), ("bf16 norm", 2**-6)]
)
def test_other_orders_of_sums_differ_by_rounding(ranks, case, bound, stage):
    for found in ranks:
        check_right(found[case][stage], bound)


@pytest.mark.parametrize("stage", SHARDED)
def test_three_ranks_differ_by_rounding(three, stage):
    for found in three:
        check_right(found["three"][stage], 1e-6)
        check_right(found["three norm"][stage], 1e-6)


@pytest.mark.parametrize("stage", SHARDED)
def test_large_model_is_watched_in_part(ranks, stage):
    for found in ranks:
        check_right(found["part"][stage], 1e-6)
        report = found["part"][stage]["report"]
        assert 0 < report.watched_numel < report.total_numel / 2
        assert f"{len(report.watched)} of 24 parameters" in str(report)
        assert "the norm of gradients is the engine's" in str(report)


@pytest.mark.parametrize("stage", SHARDED)
def test_what_comes_into_training_later_is_left_alone(ranks, stage):
    for found in ranks:
        report = found["thawing"][stage]["report"]
        assert len(report.watched) == 18
        assert "came into training meanwhile are not compared" in str(report)


@pytest.mark.parametrize("stage", SHARDED)
def test_short_fit_reports_what_it_has(ranks, stage):
    for found in ranks:
        report = found["tied"][stage]["report"]
        assert (report.steps, report.wanted_steps) == (2, 5)
        assert "training ended before step 5" in str(report)


@pytest.mark.parametrize("stage", SHARDED)
def test_resumed_states_are_the_replicas(ranks, stage):
    for found in ranks:
        assert found["resumed"][stage]["report"].steps == STEPS


@pytest.mark.parametrize("stage", SHARDED)
def test_bare_loop_and_nothing_is_left(ranks, stage):
    for found in ranks:
        report, is_gone = found["bare"][stage]
        assert report.is_exact
        assert report.steps == 2
        assert is_gone


def told(ranks, case, stage):
    """The warnings of all ranks, which are the same."""
    reports = [found[case][stage]["report"] for found in ranks]
    texts = [found[case][stage]["warnings"] for found in ranks]
    assert texts[0] == texts[1]
    assert reports[0].faults == reports[1].faults
    return reports[0], " ".join(texts[0])


@pytest.mark.parametrize("stage", SHARDED)
def test_corrupt_element_of_a_shard_is_named(ranks, stage):
    report, text = told(ranks, "corrupt shard", stage)
    assert set(report.faults) == {Kind.USED, Kind.STEPPED}
    for kind in report.faults:
        assert report.faults[kind].parameter == CORRUPT
        assert report.faults[kind].absolute == pytest.approx(1.0, abs=0.01)  # it decays
    assert f"{CORRUPT!r} in step 2" in text


@pytest.mark.parametrize("stage", SHARDED)
def test_corrupt_optimizer_state_is_named(ranks, stage):
    report, text = told(ranks, "corrupt state", stage)
    assert set(report.faults) == {Kind.STEPPED}
    assert "weights after the step differ" in text
    assert "in step 2" in text


@pytest.mark.parametrize("stage", SHARDED)
def test_stale_gather_is_named_with_its_rank(ranks, stage):
    report, text = told(ranks, "stale", stage)
    assert set(report.faults) == {Kind.USED}
    assert report.faults[Kind.USED].rank == 1
    assert "weights that modules use differ" in text
    assert "on rank 1" in text
    assert "rank 0" not in text


@pytest.mark.parametrize("stage", SHARDED)
def test_dropped_gradient_is_named(ranks, stage):
    report, text = told(ranks, "dropping", stage)
    assert set(report.faults) == {Kind.GRADIENTS}
    first = report.watched[0]
    assert report.faults[Kind.GRADIENTS].parameter == first
    assert f"{first!r} in step 1" in text
    assert report.largest[Kind.GRADIENTS].relative > 0.1


def test_optimizer_that_cannot_be_copied_is_refused(ranks):
    for found in ranks:
        assert "self_check cannot copy Locked" in found["locked"]
        assert "train without self_check" in found["locked"]


@pytest.mark.parametrize("value", [-1, 1.5, True, "3"])
def test_wrong_number_of_steps_is_refused(value):
    with pytest.raises(ValueError, match="self_check must be a number of optimizer steps"):
        ZeroStrategy(self_check=value)
