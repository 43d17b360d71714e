"""Ranks that do different things at the same time: never a wait without end."""

from __future__ import annotations

import os
import signal
import time

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.helpers.cells import AtMost, Cases, OnSomeRank, PerRank, every_cell
from tests.helpers.models import equal, weights
from tests.helpers.small import Small, adamw, linear, mlp, noise, product, sgd, square

CASES = Cases("ranks that do different things")


# A01: a module is called another number of times on each rank.


def calling(counts, steps=1):
    """Rank r calls the layer ``counts[r]`` times, in the next step ``counts[r + 1]``."""

    def loss(module, batch):
        count = counts[(module.global_rank + module.index) % len(counts)]
        return sum((module.head(batch) for _ in range(count)), module.still.sum() * 0)

    data = [[1.0] * steps]
    return Small(loss, data, sgd(0.1), head=linear(1, 1, 0.0), still=1.0)


@CASES("A01", {"head.weight": -0.2})
def once_and_three_times(user):
    """A layer is called once on rank 0 and three times on rank 1."""
    return user.fit(calling((1, 3)))


@CASES("A01", {"head.weight": -0.1})
def never_and_twice(user):
    """A layer is not called at all on rank 0, twice on rank 1."""
    return user.fit(calling((0, 2)))


@CASES("A01", {"head.weight": -0.2}, ranks=3)
def on_three_ranks(user):
    """One, three and two calls on three ranks."""
    return user.fit(calling((1, 3, 2)))


@CASES("A01", {"head.weight": -0.2})
def in_a_window(user):
    """The ranks change roles between the two micro-batches of a step."""
    return user.fit(calling((1, 3), steps=2), accumulate_grad_batches=2)


# A02: parameters without a gradient.


def sometimes(used, optimizer, steps=4):
    """``dead`` takes part in the loss at the steps ``used``."""

    def loss(module, batch):
        return module.w.sum() + (module.dead.sum() if module.index in used else 0.0)

    return Small(loss, [[1.0] * steps], optimizer, w=[1.0, 1.0], dead=[1.0, 1.0])


@CASES("A02", {"dead": 1.0}, tolerance=1e-12)
def never_used(user):
    """A weight that nobody uses is not decayed."""
    return user.fit(sometimes((), adamw(), steps=1))


@CASES("A02", {"dead": 1.0}, tolerance=1e-12, ranks=1)
def never_used_on_one_rank(user):
    """The same with one rank."""
    return user.fit(sometimes((), adamw(), steps=2))


@CASES("A02", {"dead": 0.7811}, tolerance=1e-4)
def on_some_steps(user):
    """A weight is used in the first and third of four steps only."""
    return user.fit(sometimes((0, 2), adamw()))


@CASES("A02")
def momentum_on_some_steps(user):
    """The same with momentum, which a zero gradient would let run on."""
    return user.fit(sometimes((0, 2), sgd(0.1, momentum=0.9)))


@CASES("A02")
def in_one_micro_batch(user):
    """A weight is used in one micro-batch of each window only."""
    return user.fit(sometimes((1, 2), adamw()), accumulate_grad_batches=2)


@CASES("A02", {"a": -0.5, "b": -0.5})
def another_on_each_rank(user):
    """Each rank uses a weight of its own."""
    return user.fit(Small(lambda m, x: m.b if m.global_rank else m.a, a=0.0, b=0.0))


@CASES("A02", {"a": -1 / 3, "b": -2 / 3}, ranks=3)
def another_on_each_of_three(user):
    """Two of three ranks use one weight, the third another."""
    return user.fit(Small(lambda m, x: m.b if m.global_rank else m.a, a=0.0, b=0.0))


def skipping(steps=4, **options):
    def loss(module, batch):
        x = module.first(batch)
        x = module.middle(x) if batch.sum() > 0 else x
        return module.last(x).square().mean()

    layers = {name: linear(4, 4, seed=k) for k, name in enumerate(("first", "middle", "last"))}
    return Small(loss, noise(steps, 4, seed=3), sgd(0.1), **layers, **options)


@CASES("A02")
def skipped_by_data(user):
    """A layer in the middle is skipped where the data say so."""
    return user.fit(skipping())


# A03: experts.


def experts(top=2, steps=3, count=4, **options):
    """Rank r and step i choose ``top`` of the first three experts; the last is left alone."""

    def loss(module, batch):
        first = module.index + module.global_rank
        chosen = [module.experts[(first + k) % (count - 1)] for k in range(top)]
        return sum(expert(batch).square().mean() for expert in chosen)

    layers = nn.ModuleList(linear(3, 3, seed=k) for k in range(count))
    return Small(loss, noise(steps, 3), sgd(0.1), experts=layers, **options)


@CASES("A03")
def routed_apart(user):
    """Experts that change with rank and step; one is chosen by nobody."""
    module = experts()
    last = module.experts[3].weight.detach().clone()
    trained = user.fit(module)
    return trained | {"last is untouched": torch.equal(trained["experts.3.weight"], last)}


@CASES("A03")
def routed_and_validated(user):
    """Each step is followed by a validation in which each rank asks other experts."""

    def evaluate(module, batch):
        return module.experts[3 * module.global_rank](batch)

    module = experts(evaluate=evaluate, eval_data=noise(2, 3, seed=5))
    return user.fit(module, val_check_interval=1) | {"seen": module.seen}


@CASES("A03", ranks=3, tolerance=1e-6)
def routed_on_three_ranks(user):
    """Three ranks, one expert each."""
    return user.fit(experts(top=1, count=5))


@CASES("A03", tolerance=1e-6)
def routed_in_windows(user):
    """Two micro-batches to a step, Adam, clipping by norm."""
    module = experts(steps=4)
    module.make_optimizer = adamw(0.01)
    return user.fit(module, accumulate_grad_batches=2, gradient_clip_val=0.1)


# A04: data that end at different times.


class Stream(IterableDataset):
    """Rows whose number nobody knows in advance."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter([torch.tensor([row]) for row in self.rows])


class Streaming(Small):
    """Reads its data as streams."""

    def train_dataloader(self):
        return DataLoader(Stream(self.data[self.global_rank]), batch_size=None)

    def val_dataloader(self):
        rows = self.eval_data[self.global_rank] if self.eval_data else []
        return DataLoader(Stream(rows), batch_size=None) if rows else []


@CASES("A04", {"w": -5.0, "steps": 2, "said": OnSomeRank(1)})
def uneven_training(user):
    """Three batches on rank 0, two on rank 1: both stop after two, and it is said once."""
    module = Streaming(product, [[1.0, 2.0, 9.0], [3.0, 4.0]], w=0.0)
    player = user.trainer()
    player.fit(module)
    said = user.said(r"rank 1.*(no more|run out|ran out|none left|end)")
    return weights(module) | {"steps": player.global_step, "said": said}


@CASES("A04", {"w": -5.0, "steps": 2}, ranks=3)
def uneven_on_three_ranks(user):
    """Three, two and two batches."""
    module = Streaming(product, [[1.0, 2.0, 9.0], [3.0, 4.0], [2.0, 3.0]], w=0.0)
    player = user.trainer()
    player.fit(module)
    return weights(module) | {"steps": player.global_step}


@CASES("A04", {"w": -2.5, "steps": 1})
def uneven_in_windows(user):
    """Two micro-batches to a step: what is left over on one rank makes no step."""
    module = Streaming(product, [[1.0, 2.0, 9.0], [3.0, 4.0]], w=0.0)
    player = user.trainer(accumulate_grad_batches=2)
    player.fit(module)
    return weights(module) | {"steps": player.global_step}


@CASES("A04", error="rank 1", zero={"uneven_batches": "error"})
def uneven_as_an_error(user):
    """The same as an error on all ranks, where a user asks for one."""
    return user.fit(Streaming(product, [[1.0, 2.0, 9.0], [3.0, 4.0]], w=0.0))


@CASES("A04", {"w": -5.0, "seen": PerRank([[0.0, 0.0, 0.0], [0.0]])})
def uneven_validation(user):
    """Three batches of validation on rank 0, one on rank 1; the model runs in each."""
    module = Streaming(
        product,
        [[1.0, 2.0], [3.0, 4.0]],
        evaluate=lambda m, x: m.s * x,
        eval_data=[[1.0, 1.0, 1.0], [1.0]],
        w=0.0,
        s=0.0,
    )
    return user.fit(module) | {"seen": module.seen}


@CASES("A04", {"ended": True, "soon": AtMost(10.0)}, timeout_s=1.5)
def interrupted(user):
    """Ctrl-C while rank 1 hangs in its step and rank 0 waits for it."""
    (user.folder / f"{user.rank}.pid").write_text(str(os.getpid()))

    def loss(module, batch):
        begins_s.append(time.monotonic())
        while module.index == 1 and module.global_rank == 1:
            pids = [int(path.read_text()) for path in user.folder.glob("*.pid")]
            time.sleep(0.2)
            for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
                os.kill(pid, signal.SIGINT)
        return module.w * batch

    begins_s: list[float] = []
    try:
        user.fit(Small(loss, [[1.0] * 3], w=0.0))
        has_ended = False
    except (SystemExit, KeyboardInterrupt):
        has_ended = True
    return {"ended": has_ended, "soon": time.monotonic() - begins_s[-1]}


# A05: forwards of different length.


def generate(module, batch):
    """A loop that ends after 3 calls on rank 0, and later on others."""
    for _ in range(3 + 2 * module.global_rank):
        batch = module.net(batch)
    return batch


def generating(steps=3):
    """Trains as usual, generates in evaluation."""
    data = {"evaluate": generate, "eval_data": noise(1, 5, seed=7)}
    return Small(square, noise(steps, 5), sgd(0.1), net=mlp(), **data)


@CASES("A05")
def in_validation(user):
    """Generation of different length after each step; training goes on as if there were none."""
    module, without = generating(), generating()
    trained = user.fit(module, val_check_interval=1)
    same = equal(trained, user.fit(without, limit_val_batches=0))
    return trained | {"seen": module.seen, "same": same}


@CASES("A05")
def in_predict(user):
    """Generation of different length in predict, without any training."""
    return {"predicted": [float(value) for value in user.trainer().predict(generating())]}


@CASES("A05", ranks=3, tolerance=1e-6)
def in_validation_of_three(user):
    """Three lengths on three ranks, with autocast."""
    module = generating()
    trained = user.fit(module, val_check_interval=1, precision="bf16-mixed")
    return trained | {"seen": module.seen}


@CASES("A05")
def in_training(user):
    """Generation of different length within the training step, before the loss."""

    def loss(module, batch):
        with torch.no_grad():
            start = generate(module, batch)
        return module.net(start).square().mean()

    return user.fit(Small(loss, noise(3, 5), sgd(0.1), net=mlp()))


# A06: rank 0 alone.


class OnRankZero(Small):
    """Rank 0 alone does something after each step."""

    def on_train_batch_end(self, *_):
        if self.trainer.is_global_zero:
            self.act()

    def act(self):
        self.seen.append(sum(value.norm().item() for value in self.state_dict().values()))


@CASES("A06")
def reading_on_rank_zero(user):
    """Rank 0 alone reads ``state_dict()`` and norms after each step."""
    module = OnRankZero(square, noise(3, 5), sgd(0.1), net=mlp())
    return user.fit(module) | {"seen": module.seen}


@CASES("A06")
def forward_on_rank_zero(user):
    """Rank 0 alone runs the model after each step, as a profiler does."""

    class Profiling(OnRankZero):
        def act(self):
            with torch.no_grad():
                self.seen.append(self.net(torch.ones(5)).sum().item())

    module = Profiling(square, noise(3, 5), sgd(0.1), net=mlp())
    return user.fit(module) | {"seen": module.seen}


@CASES("A06", error=r"save_checkpoint|rank", timeout_s=1.5)
def saving_on_rank_zero(user):
    """``if trainer.is_global_zero: trainer.save_checkpoint(...)`` is an error on all ranks."""

    class Saving(OnRankZero):
        def act(self):
            self.trainer.save_checkpoint(user.folder / "one.ckpt")

    return user.fit(Saving(square, noise(3, 5), sgd(0.1), net=mlp()))


def saving(user, **options):
    """Weights of a run that saves after each step, and whether it changed anything."""
    keeper = ModelCheckpoint(user.folder, every_n_train_steps=1, save_top_k=-1)
    module, other = (Small(square, noise(3, 5), adamw(), net=mlp()) for _ in range(2))
    trained = user.fit(module, callbacks=[keeper], **options)
    user.strategy()
    without = user.fit(other)
    files = len([path for path in user.folder.iterdir() if path.suffix == ".ckpt"])
    return trained | {"same": equal(trained, without), "files": files}


@CASES("A06")
def saving_every_step(user):
    """``ModelCheckpoint`` after each step changes nothing."""
    return saving(user)


@CASES("A06")
def saving_folders_every_step(user):
    """The same with sharded checkpoints, which are written while training goes on."""
    if user.stage is None:
        return saving(user)
    return saving(user, strategy=user.strategy(checkpoint="sharded"))


@every_cell(CASES)
def test_case(outcomes, cell):
    outcomes.check(cell)
