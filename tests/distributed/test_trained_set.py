"""The trained set changes while training goes on: equal to plain data parallelism by hand.

DistributedDataParallel does not average what was frozen or missing when it was set up, so the
reference is a loop that averages every gradient itself.
"""

from __future__ import annotations

import os
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from tests.helpers.models import WIDTH, TinyGPT, Tokens, difference, equal, trainer, weights
from tests.helpers.spawn import RankError, run_ranks, try_ranks

STAGES = (0, 1, 2, 3)
STEPS = 5
# Any order of two summands gives the same sum; of three it does not.
TOLERANCE_OF_THREE_RANKS = 1e-6
BUCKET_NUMEL = 2000  # several buckets, so that some hold frozen and unfrozen parameters


class Net(TinyGPT):
    """Uses what was attached to it, or to one of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(adapted)


def adapted(block: nn.Module, args: Any, out: Tensor) -> Tensor:
    return block.adapter(out) if hasattr(block, "adapter") else out


Change = Callable[[Net, int, torch.optim.Optimizer], None]


class Case(NamedTuple):
    """How a trained set begins, and how it changes."""

    change: Change
    begin: Callable[[Net], object] = lambda net: None
    make_optimizer: Callable[[Net], torch.optim.Optimizer] = lambda net: adamw(net.parameters())
    accumulate: int = 1
    max_norm: float | None = None


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def sgd(net: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05)


def of_trained(net: Net) -> torch.optim.Optimizer:
    return adamw([p for p in net.parameters() if p.requires_grad])


def freeze_block(net: Net) -> None:
    net.blocks[1].requires_grad_(False)


def freeze_all_but_head(net: Net) -> None:
    net.requires_grad_(False)
    net.head.requires_grad_(True)


def thaw(net: Net, step: int, optimizer: torch.optim.Optimizer) -> None:
    if step == 2:
        net.requires_grad_(True)


def thaw_a_part(net: Net, step: int, optimizer: torch.optim.Optimizer) -> None:
    if step == 2:
        net.blocks[1].up.weight.requires_grad_(True)
    if step == 3:
        net.blocks[1].up.bias.requires_grad_(True)


def freeze_and_thaw(net: Net, step: int, optimizer: torch.optim.Optimizer) -> None:
    net.blocks[1].requires_grad_(step in (0, 3, 4))


def thaw_into_a_group(net: Net, step: int, optimizer: torch.optim.Optimizer) -> None:
    if step == 2:
        net.blocks[1].requires_grad_(True)
        optimizer.add_param_group({"params": list(net.blocks[1].parameters()), "lr": 3e-3})


def attach_an_adapter(net: Net, step: int, optimizer: torch.optim.Optimizer) -> None:
    if step == 1:
        torch.manual_seed(50 + dist.get_rank())  # values of rank 0 count
        net.blocks[2].adapter = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        optimizer.add_param_group({"params": list(net.blocks[2].adapter.parameters())})


def attach_a_frozen_block_and_thaw_it(
    net: Net, step: int, optimizer: torch.optim.Optimizer
) -> None:
    if step == 1:
        torch.manual_seed(60 + dist.get_rank())
        net.blocks[0].adapter = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        optimizer.add_param_group({"params": list(net.blocks[0].adapter.parameters())})
    if step == 3:
        net.blocks[0].adapter.requires_grad_(True)


def replace_the_head(net: Net, step: int, optimizer: torch.optim.Optimizer) -> None:
    if step == 2:
        torch.manual_seed(70 + dist.get_rank())
        net.head = nn.Linear(WIDTH, net.head.out_features, bias=False)
        optimizer.add_param_group({"params": list(net.head.parameters())})


def drop_a_block(net: Net, step: int, optimizer: torch.optim.Optimizer) -> None:
    if step == 2:
        del net.blocks[1]


def replace_what_was_frozen(net: Net, step: int, optimizer: torch.optim.Optimizer) -> None:
    if step == 2:
        net.norm.requires_grad_(True)  # in vain: it is gone before anything is trained
        net.norm = nn.LayerNorm(WIDTH)
        optimizer.add_param_group({"params": list(net.norm.parameters())})


def at_random(seed: int) -> Change:
    """Parts are frozen and unfrozen, in any step, and one is attached, replaced or dropped."""

    def change(net: Net, step: int, optimizer: torch.optim.Optimizer) -> None:
        draw = random.Random(100 * seed + step)
        for _ in range(draw.randrange(3)):
            name = draw.choice([n for n, m in net.named_modules() if list(m.parameters())])
            net.get_submodule(name).requires_grad_(draw.random() < 0.5)
        torch.manual_seed(step + 7 * dist.get_rank())
        new: list[nn.Parameter] = []
        match draw.randrange(6):
            case 0:
                adapter = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
                net.blocks[draw.randrange(len(net.blocks))].adapter = adapter
                new = list(adapter.requires_grad_(draw.random() < 0.7).parameters())
            case 1:
                net.scale = nn.Parameter(torch.tensor(1.1))
                new = [net.scale]
            case 2:
                net.norm = nn.LayerNorm(WIDTH)
                new = list(net.norm.parameters())
            case 3 if len(net.blocks) > 2:
                del net.blocks[draw.randrange(len(net.blocks))]
        if new:
            optimizer.add_param_group({"params": new, "lr": 3e-3})
        net.head.requires_grad_(True)

    return change


CASES = {
    "thaw": Case(thaw, freeze_block),
    "thaw_most_of_it": Case(thaw, freeze_all_but_head),
    "thaw_a_part": Case(thaw_a_part, freeze_block),
    "freeze_and_thaw": Case(freeze_and_thaw),
    "thaw_into_a_group": Case(thaw_into_a_group, freeze_block, of_trained),
    "thaw_within_a_window": Case(
        lambda net, step, optimizer: thaw(net, step - 1, optimizer), freeze_block, accumulate=2
    ),
    "thaw_and_clip": Case(thaw, freeze_block, max_norm=0.05),
    "attach_an_adapter": Case(attach_an_adapter),
    "attach_a_frozen_block_and_thaw_it": Case(attach_a_frozen_block_and_thaw_it),
    "replace_the_head": Case(replace_the_head),
    "replace_what_was_frozen": Case(
        replace_what_was_frozen, lambda net: net.norm.requires_grad_(False)
    ),
    "drop_a_block": Case(drop_a_block),
    **{f"at_random_{seed}": Case(at_random(seed)) for seed in range(6)},
}
# Sums are made in another order: clipping adds norms of pieces, and stages 2 and 3 average each
# micro-batch before they add it.
NOT_TO_THE_BIT = {"thaw_and_clip": 1e-6, "thaw_within_a_window": 1e-6}


def build(case: Case) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Net()
    case.begin(net)
    return net


def reference(case: Case) -> dict[str, Tensor]:
    """Plain data parallelism: everything is averaged, whenever it began to be trained."""
    net = build(case)
    optimizer = case.make_optimizer(net)
    ranks = dist.get_world_size()
    known = set(net.parameters())
    for step, batch in enumerate(Tokens(dist.get_rank(), STEPS)):
        case.change(net, step, optimizer)
        for parameter in net.parameters():
            if parameter not in known:
                known.add(parameter)
                dist.broadcast(parameter.data, 0)
        (net(batch) / case.accumulate).backward()
        if (step + 1) % case.accumulate and step + 1 < STEPS:
            continue
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(ranks)
                dist.all_reduce(parameter.grad)
        if case.max_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), case.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return weights(net)


class Changing(pl.LightningModule):
    """Changes before a batch, or within the training step."""

    def __init__(self, case: Case, within: bool = False, steps: int = STEPS) -> None:
        super().__init__()
        self.net = build(case)
        self.case, self.within, self.steps = case, within, steps
        self.states: list[int] = []

    def train_dataloader(self) -> Any:
        return DataLoader(Tokens(self.trainer.global_rank, self.steps), batch_size=None)

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        if not self.within:
            step = index + self.trainer.current_epoch * self.steps
            self.case.change(self.net, step, self.trainer.optimizers[0])

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if self.within:
            self.case.change(self.net, index, self.trainer.optimizers[0])
        return self.net(batch)

    def on_train_batch_end(self, *args: Any) -> None:
        if isinstance(self.trainer.strategy, ZeroStrategy):
            self.states.append(self.trainer.strategy.measure_model_states().total_nbytes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.case.make_optimizer(self.net)


def fitted(case: Case, stage: int, within: bool = False, **options: Any) -> Changing:
    module = Changing(case, within)
    strategy = ZeroStrategy(stage, bucket_numel=BUCKET_NUMEL, timeout=20)
    if case.max_norm is not None:
        options["gradient_clip_val"] = case.max_norm
    started = os.environ.get("WORLD_SIZE")  # which Lightning removes when a fit has ended
    ranks = int(started) if started else dist.get_world_size()
    trainer(strategy, ranks, accumulate_grad_batches=case.accumulate, **options).fit(module)
    return module


def compare(names: list[str], stages: tuple[int, ...]) -> dict[str, list[str]]:
    """What differs, by case."""
    torch.use_deterministic_algorithms(True)
    world_size = int(os.environ["WORLD_SIZE"])
    trainer(ZeroStrategy(0), world_size).fit(Changing(CASES["thaw"], steps=1))  # makes the group
    found: dict[str, list[str]] = {}
    for name in names:
        case = CASES[name]
        expected = reference(case)
        wrong = found[name] = []
        for stage in stages:
            for within in (False, True) if name == "thaw" else (False,):
                with warnings.catch_warnings():
                    warnings.simplefilter("error", UserWarning)
                    warnings.filterwarnings("ignore", module="lightning.*")
                    module = fitted(case, stage, within)
                own = weights(module.net)
                far = difference(own, expected)
                bound = NOT_TO_THE_BIT.get(name, 0.0)
                if dist.get_world_size() > 2:
                    bound = TOLERANCE_OF_THREE_RANKS
                if far > bound or (not bound and not equal(own, expected)):
                    wrong.append(f"stage {stage}, within={within}: {far}")
    return found


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, list[str]]]:
    return run_ranks(compare, 2, list(CASES), STAGES)


@pytest.mark.parametrize("name", CASES)
def test_equals_plain_data_parallelism(two_ranks, name):
    for found in two_ranks:
        assert found[name] == []


@pytest.mark.parametrize("world_size", [1, 3])
def test_other_numbers_of_ranks(world_size):
    names = ["thaw_a_part", "attach_an_adapter", "replace_the_head"]
    for found in run_ranks(compare, world_size, names, (1, 3)):
        assert found == {name: [] for name in names}


# Saved and resumed.


def thaw_from_2(net: Net, step: int, optimizer: torch.optim.Optimizer) -> None:
    net.blocks[1].requires_grad_(step >= 2)


def resume(folder: Path) -> dict[str, tuple[bool, str]]:
    """Whether a run that was interrupted after the change ends as one that was not."""
    case = Case(thaw_from_2, freeze_block)
    found = {}
    for stage, form, then in ((1, "consolidated", 3), (3, "consolidated", 2), (3, "sharded", 3)):
        whole = fitted(case, stage, max_epochs=2)
        first = Changing(case)
        strategy = ZeroStrategy(stage, bucket_numel=BUCKET_NUMEL, checkpoint=form)
        runner = trainer(strategy, 2)
        runner.fit(first)
        path = folder / f"{stage}-{form}"
        runner.save_checkpoint(path)
        again = Changing(case)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trainer(ZeroStrategy(then, bucket_numel=900), 2, max_epochs=2).fit(
                again, ckpt_path=path
            )
        kinds = [str(w.message) for w in told if w.category.__name__ == "RestoreWarning"]
        found[f"{stage} {form} {then}"] = equal(weights(whole.net), weights(again.net)), str(kinds)
    return found


def test_state_of_what_was_unfrozen_is_saved_and_resumed(tmp_path):
    for found in run_ranks(resume, 2, tmp_path):
        for name, (is_equal, told) in found.items():
            assert is_equal, name
            assert told == "[]", name


class Thaw(BaseFinetuning):
    """Unfreezes a block in the second epoch."""

    def freeze_before_training(self, module: Changing) -> None:
        self.freeze(module.net.blocks[1])

    def finetune_function(self, module: Changing, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net.blocks[1], optimizer, lr=1e-3)


def finetune(folder: Path) -> dict[str, Any]:
    """Three epochs at each stage, and the last of them again from a checkpoint, and with DDP."""
    case = Case(lambda *_: None, make_optimizer=of_trained)
    found: dict[str, Any] = {"full": [], "resumed": []}
    for stage in STAGES:
        module, path = Changing(case), folder / f"{stage}.ckpt"
        runner = trainer(
            ZeroStrategy(stage, bucket_numel=BUCKET_NUMEL), 2, max_epochs=2, callbacks=[Thaw()]
        )
        runner.fit(module)
        runner.save_checkpoint(path)
        found["full"].append(weights(module.net))
        found["groups"] = [group["lr"] for group in runner.optimizers[0].param_groups]
        found["moments"] = len(torch.load(path)["optimizer_states"][0]["state"])
        for strategy in (ZeroStrategy(stage, bucket_numel=900), "ddp"):
            again = Changing(case)
            trainer(strategy, 2, max_epochs=3, callbacks=[Thaw()]).fit(again, ckpt_path=path)
            found["resumed"].append(weights(again.net))
    return found


def test_base_finetuning(tmp_path):
    found, _ = run_ranks(finetune, 2, tmp_path)
    assert found["groups"] == [1e-2, 1e-3]
    assert found["moments"] == len(list(Net().parameters()))
    assert all(equal(one, found["full"][0]) for one in found["full"])
    assert all(equal(one, found["resumed"][0]) for one in found["resumed"])
    before, after = weights(build(CASES["thaw"])), found["full"][0]
    assert not torch.equal(before["blocks.1.up.weight"], after["blocks.1.up.weight"])


# Other optimizers, other precisions, memory.


class Replacing(Changing):
    """Begins with one optimizer and goes on with another."""

    def on_train_start(self) -> None:
        self.trainer.strategy.optimizers = [sgd(self.net)]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert isinstance(optimizer, torch.optim.SGD)


def others() -> dict[str, Any]:
    found: dict[str, Any] = {"replaced": [], "bf16": [], "memory": {}}
    quiet = Case(lambda *_: None)
    for stage in STAGES:
        module = Replacing(quiet)
        trainer(ZeroStrategy(stage, bucket_numel=BUCKET_NUMEL), 2).fit(module)
        found["replaced"].append(weights(module.net))
        half = fitted(CASES["thaw_most_of_it"], stage, precision="bf16-true")
        found["bf16"].append(weights(half.net))
        thawed = fitted(CASES["thaw_most_of_it"], stage)
        found["memory"][stage] = thawed.states[-1], fitted(quiet, stage).states[-1]
    by_hand = Case(
        lambda *_: None, make_optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.05)
    )
    found["by hand"] = reference(by_hand)
    return found


def test_optimizer_precision_and_memory():
    found, _ = run_ranks(others, 2)
    assert all(equal(one, found["by hand"]) for one in found["replaced"])
    assert all(equal(one, found["bf16"][0]) for one in found["bf16"])
    start = build(CASES["thaw"]).blocks[1].up.weight.bfloat16()
    assert not torch.equal(found["bf16"][0]["blocks.1.up.weight"], start)
    for stage, (thawed, from_the_start) in found["memory"].items():
        assert thawed <= 1.05 * from_the_start, stage  # padding of the additional buckets


class Diverging(Changing):
    """Unfreezes a block between a forward and its backward, whose gradients are no numbers."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        if index != 2:
            return loss
        self.net.requires_grad_(True)
        return loss * float("nan")


def skip_while_thawing() -> list[bool]:
    found = []
    for stage in STAGES:
        module = Diverging(Case(lambda *_: None, freeze_block))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer(ZeroStrategy(stage, nonfinite_gradients="skip"), 2).fit(module)
        found.append(all(bool(v.isfinite().all()) for v in weights(module.net).values()))
    return found


def test_gradients_that_are_not_finite_are_seen_while_the_set_changes():
    for found in run_ranks(skip_while_thawing, 2):
        assert found == [True] * len(found)


# Mistakes.


def on_one_rank(net: Net, step: int, optimizer: torch.optim.Optimizer) -> None:
    if step == 1 and dist.get_rank() == 0:
        net.blocks[1].requires_grad_(True)


def different_on_ranks(net: Net, step: int, optimizer: torch.optim.Optimizer) -> None:
    if step == 1:
        net.blocks[1 + dist.get_rank()].requires_grad_(True)


def replace_behind_the_optimizer(net: Net, step: int, optimizer: torch.optim.Optimizer) -> None:
    if step == 1:
        net.head = nn.Linear(WIDTH, net.head.out_features, bias=False)


def attach_a_complex_one(net: Net, step: int, optimizer: torch.optim.Optimizer) -> None:
    if step == 1:
        net.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))


def optimizer_of_another_model(net: Net, step: int, optimizer: torch.optim.Optimizer) -> None:
    if step == 1:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


MISTAKES = {
    "on_one_rank": (Case(on_one_rank, freeze_block), r"newly trained parameters|average the grad"),
    "different_on_ranks": (
        Case(different_on_ranks, lambda net: net.blocks.requires_grad_(False)),
        r"rank 0: 'net.blocks.1.norm.weight'.*rank 1: 'net.blocks.2.norm.weight'",
    ),
    "replaced": (Case(replace_behind_the_optimizer), "'net.head.weight' was replaced"),
    "complex": (Case(attach_a_complex_one), "'net.turn' is complex"),
    "stranger": (Case(optimizer_of_another_model), r"shapes \[\(3,\)\] that are not in the model"),
}


def mistake(name: str) -> dict[int, str]:
    found = {}
    for stage in (1, 3):
        try:
            trainer(ZeroStrategy(stage, timeout=4), 2).fit(Changing(MISTAKES[name][0]))
            found[stage] = "nothing was said"
        except Exception as error:
            found[stage] = f"{type(error).__name__}: {error}"
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    return found


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_errors_on_every_rank(name):
    for outcome in try_ranks(mistake, 2, name):
        assert not isinstance(outcome, RankError), outcome
        for said in outcome.values():
            assert re.search(MISTAKES[name][1], said), said


def attach_without_an_optimizer() -> list[str]:
    def attach(net: Net, step: int, optimizer: torch.optim.Optimizer) -> None:
        if step == 1:
            net.blocks[0].adapter = nn.Linear(WIDTH, WIDTH)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        module = fitted(Case(attach), 3)
    assert not weights(module.net)["blocks.0.adapter.weight"].isnan().any()
    return [str(w.message) for w in told if "no optimizer steps it" in str(w.message)]


def test_what_no_optimizer_steps_is_told_once():
    first, second = run_ranks(attach_without_an_optimizer, 2)
    assert len(first) == 1
    assert "'net.blocks.0.adapter.weight'" in first[0]
    assert second == []
