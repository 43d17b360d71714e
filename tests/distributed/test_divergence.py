"""Stage 3 where ranks run different modules: results of one process, and errors in bounded time."""

from __future__ import annotations

import copy
import gc
import time
import warnings
from datetime import timedelta

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.optim import SGD

from lightning_zero import ShardGroups, ZeroEngine, ZeroOptions, ZeroStrategy
from tests.helpers.models import trainer
from tests.helpers.spawn import run_ranks

WIDTH, DEPTH, STEPS = 6, 5, 4


class Branches(nn.Module):
    """Layers of which a rank runs some, some of them often; each layer is a bucket."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.extra = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, plan):
        for index in plan:
            x = torch.tanh(self.layers[index](x))
        return x


def batch(rank, step):
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)) + rank


PLANS = {
    "other lengths": lambda rank, step: [0, 1, 2] if rank == 0 else [0, 1, 2, 3, 4],
    "other orders": lambda rank, step: [0, 1, 2, 3] if (rank + step) % 2 else [3, 2, 1, 0],
    "other counts": lambda rank, step: [2] * (1 + 2 * rank) + [4],
    "nothing in common": lambda rank, step: [2 * rank % DEPTH, (2 * rank + 1) % DEPTH],
    "another each step": lambda rank, step: [(rank + step) % DEPTH, (2 * step + rank) % DEPTH],
    "one rank runs nothing": lambda rank, step: [] if rank == 1 else [0, 1, 2, 3, 4],
}


def loss_of(model, plan, rank, step, uses_extra):
    x = batch(rank, step).requires_grad_()  # so that backward reads the first weight, too
    loss = model(x, plan).square().mean()
    # The last bucket's gradient is missing on the other ranks until the very end of backward.
    return loss + model.extra.sum() * 0.1 if uses_extra else loss


def oracle(name, world_size):
    """One process that averages the gradients of all ranks."""
    model = Branches()
    optimizer = SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        parameters = list(model.parameters())
        totals = [torch.zeros_like(p) for p in parameters]
        for rank in range(world_size):
            loss = loss_of(model, PLANS[name](rank, step), rank, step, rank == 0)
            grads = torch.autograd.grad(loss, parameters, allow_unused=True)
            for total, grad in zip(totals, grads, strict=True):
                if grad is not None:
                    total += grad / world_size
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = total
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def diverging():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    groups = ShardGroups.create(timedelta(seconds=20))
    found = {}
    for name, plan in PLANS.items():
        for is_overlapped in (True, False):
            options = ZeroOptions(stage=3, bucket_numel=1, overlap_comm=is_overlapped)
            model = Branches()
            optimizer = SGD(model.parameters(), lr=0.5)
            engine = ZeroEngine(model, [optimizer], options, groups)
            for step in range(STEPS):
                engine.backward(loss_of(model, plan(rank, step), rank, step, rank == 0))
                engine.step(optimizer)
                optimizer.zero_grad()
                with torch.no_grad():  # a forward of different length on each rank
                    for _ in range(rank * 2):
                        model(batch(rank, step), [0, 1])
                    if rank == world_size - 1:  # and one that only the last rank makes
                        model(batch(rank, step), [4, 3])
                        assert all(v.isfinite().all() for v in model.state_dict().values())
            engine.close()
            expected = oracle(name, world_size)
            gap = max(
                (got - want).abs().max().item()
                for got, want in zip(model.parameters(), expected, strict=True)
            )
            found[name, is_overlapped] = gap
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_may_run_different_modules(world_size):
    """Two ranks: bit for bit. Three: the sum is made in another order."""
    for found in run_ranks(diverging, world_size):
        assert len(found) == 2 * len(PLANS)
        assert max(found.values()) <= (0 if world_size == 2 else 1e-6), found


def one_stays_away():
    """Rank 1 makes no step; what rank 0 says, and when."""
    dist.init_process_group("gloo")
    model = Branches()
    optimizer = SGD(model.parameters(), lr=0.5)
    groups = ShardGroups.create(timedelta(seconds=2))
    engine = ZeroEngine(model, [optimizer], ZeroOptions(stage=3, bucket_numel=1), groups)
    loss = loss_of(model, [0, 1], dist.get_rank(), 0, False)
    dist.barrier()
    begin_s = time.monotonic()
    text = ""
    if dist.get_rank() == 0:
        try:
            engine.backward(loss)
        except RuntimeError as error:
            text = str(error)
    took_s = time.monotonic() - begin_s
    dist.barrier()
    engine.abandon()
    return text, took_s


def test_backward_that_another_rank_does_not_make_is_an_error_that_names_the_bucket():
    (text, took_s), _ = run_ranks(one_stays_away, 2)
    assert "rank 0 could not average the gradients of bucket" in text
    assert "layers" in text or "extra" in text
    assert took_s < 8


def one_writes():
    """Rank 0 alone writes to a weight; both ranks must hear of it."""
    dist.init_process_group("gloo")
    model = Branches()
    optimizer = SGD(model.parameters(), lr=0.5)
    groups = ShardGroups.create(timedelta(seconds=2))
    engine = ZeroEngine(model, [optimizer], ZeroOptions(stage=3, bucket_numel=1), groups)
    if dist.get_rank() == 0:
        model.layers[0].weight.data[0, 0] = 7.0
    try:
        engine.backward(loss_of(model, [0, 1], dist.get_rank(), 0, False))
        engine.step(optimizer)
    except RuntimeError as error:
        return str(error)
    finally:
        engine.abandon()
    return "nothing"


def test_write_on_one_rank_alone_is_an_error_on_all():
    texts = run_ranks(one_writes, 2)
    assert "writing to weights of bucket" in texts[0], texts
    assert all("rank" in text for text in texts), texts


class Views(nn.Module):
    """Hands out views of its weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.keeper = nn.Linear(WIDTH, WIDTH)
        self.giver = Giver()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        weight = self.giver()
        x = self.keeper(x)
        return self.last(x @ weight).square().mean()


class Giver(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self):
        return self.weight.t()[:, :]


def views_outlive_their_buckets():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = ShardGroups.create(timedelta(seconds=20))
    model, plain = Views(), Views()
    optimizer, plain_optimizer = SGD(model.parameters(), 0.1), SGD(plain.parameters(), 0.1)
    engine = ZeroEngine(model, [optimizer], ZeroOptions(stage=3, bucket_numel=1), groups)
    held = []
    for step in range(4):
        x = batch(0, step)
        held.append((model.giver.weight.detach(), plain.giver.weight.detach().clone()))
        engine.backward(model(x))
        engine.step(optimizer)
        optimizer.zero_grad()
        plain(x).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        gc.collect()
    are_kept = [torch.equal(ours, theirs) for ours, theirs in held]
    copied = copy.deepcopy(model.state_dict()) if rank == 0 else {}
    engine.close()
    theirs = plain.state_dict()
    same = all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())
    return are_kept, same, all(torch.equal(v, theirs[n]) for n, v in copied.items())


def test_views_of_weights_outlive_their_buckets():
    """With the same batch on both ranks, so that one process gives the same numbers."""
    for are_kept, same, copied in run_ranks(views_outlive_their_buckets, 2):
        assert are_kept == [True] * 4
        assert same
        assert copied


def traced(order_of):
    """Modes of each step of a model whose order of layers changes, and what is said about it."""
    dist.init_process_group("gloo")
    groups = ShardGroups.create(timedelta(seconds=20))
    model = Branches()
    optimizer = SGD(model.parameters(), lr=0.5)
    engine = ZeroEngine(model, [optimizer], ZeroOptions(stage=3, bucket_numel=1), groups)
    report = engine.coordinator.passes.report
    tracer = engine.coordinator.passes.tracers["training step"]
    history = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for plan in order_of:
            before = tracer.counts.copy()
            demanded = report.fetched_on_demand
            engine.backward(loss_of(model, plan, dist.get_rank(), 0, False))
            engine.step(optimizer)
            optimizer.zero_grad()
            (mode,) = {m for m in (tracer.counts - before) if m != "switch"}
            history.append((mode, report.fetched_on_demand - demanded))
    engine.close()
    texts = [str(w.message) for w in told if "recorded order" in str(w.message)]
    return history, texts, report.metrics()


def test_events_of_a_changing_order():
    long, short = [0, 1, 2], [0, 2]
    orders = [long, long, short, short, long, short, long, short]
    found = run_ranks(traced, 2, orders)
    for rank, (history, texts, metrics) in enumerate(found):
        assert [mode for mode, _ in history] == [
            *["record", "complete"],
            "invalid",  # short is new
            *["complete", "complete", "complete", "complete", "complete"],
        ]
        assert history[1][1] == 1  # the first bucket of a step has nothing to hide behind
        assert metrics["zero/trace_invalidations"] == 1
        assert len(texts) == (1 if rank == 0 else 0)
    (text,) = found[0][1]
    assert "expected forward of 'layers.1' (bucket 2)" in text
    assert "found forward of 'layers.2' (bucket 3)" in text


class Skipping(pl.LightningModule):
    """Leaves a layer out on one batch of five."""

    def __init__(self):
        super().__init__()
        self.model = Branches()
        self.counts = []

    def training_step(self, batch, index):
        return self.model(batch, [0, 2] if index == 3 else [0, 1, 2]).square().mean()

    def on_train_batch_end(self, *_):
        self.counts.append(self.trainer.strategy.trace_counts["zero/trace_invalidations"])

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(5, 2, WIDTH), batch_size=None)

    def configure_optimizers(self):
        return SGD(self.parameters(), lr=0.1)


def skipping_fit(folder):
    module, logger = Skipping(), CSVLogger(folder)
    fit = trainer(ZeroStrategy(3, bucket_numel=1), 2, logger=logger)
    fit.fit(module)
    logger.finalize("success")
    return module.counts, fit.strategy.trace_counts


def test_counts_of_the_trace_are_logged_when_they_change(tmp_path):
    found = run_ranks(skipping_fit, 2, str(tmp_path))
    for counts, afterwards in found:
        # A step ends with its optimizer step; the count is there at its end.
        assert counts == [0, 0, 0, 1, 1]
        assert afterwards == {}
    (file,) = tmp_path.rglob("metrics.csv")
    header, *rows = file.read_text().splitlines()
    logged = [dict(zip(header.split(","), row.split(","), strict=True)) for row in rows]
    assert [row["zero/trace_invalidations"] for row in logged] == ["1.0"]
    assert logged[0]["step"] == "4"
