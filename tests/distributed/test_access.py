"""Whole parameters, gradients and optimizer state on several ranks, compared with DDP's."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_zero import (
    ParamStatus,
    ShardGroups,
    ZeroEngine,
    ZeroOptions,
    ZeroStrategy,
    full_grad,
    full_optimizer_state,
    full_params,
    param_status,
)
from tests.helpers.models import Language, TinyGPT, Tokens, difference, equal, fused_adamw
from tests.helpers.models import trainer as make_trainer
from tests.helpers.pair import assigned, in_place, listed, past_autograd
from tests.helpers.spawn import run_ranks

STAGES = (0, 1, 2, 3)
SETTINGS = {
    **{f"stage {stage}": {"stage": stage} for stage in STAGES},
    "whole tensors": {"stage": 2, "shard_by": "tensor"},
    "collective": {"stage": 3, "gather_by": "collective"},
    "persistent": {"stage": 3, "prefetch": {"persistent_numel": 100}},
}
STEPS = 2
Found = dict[str, Any]


class Uneven(nn.Module):
    """Layers that all ranks, one rank or no rank uses, and a frozen one."""

    is_uneven = True

    def __init__(self) -> None:
        super().__init__()
        self.gpt = TinyGPT(depth=2, tied=True)
        self.idle = nn.Linear(3, 5)
        self.sometimes = nn.Linear(7, 3)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        loss = self.gpt(tokens) + self.frozen.weight.sum() * 0.0
        if dist.get_rank() == 1 and self.is_uneven:
            loss = loss + self.sometimes(torch.ones(2, 7, dtype=loss.dtype)).square().mean()
        return loss


def make_model() -> Uneven:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Uneven()


def values(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters as they are."""
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def raised(run: Callable[[], Any]) -> str:
    """Kind and text of the error that a function raises."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@contextmanager
def open_engine(setting: dict[str, Any], groups: ShardGroups) -> Any:
    model = make_model()
    optimizer = fused_adamw(model)
    engine = ZeroEngine(model, [optimizer], ZeroOptions(bucket_numel=3000, **setting), groups)
    yield engine, model, optimizer
    engine.close()


def plain_run() -> tuple[list[dict[str, Tensor | None]], dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of each step, weights and optimizer state of DDP."""
    model = make_model()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer, data = fused_adamw(model), Tokens(dist.get_rank(), STEPS)
    grads = []
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped(data[step]).backward()
        grads.append(
            {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        )
        optimizer.step()
    states = {
        f"{name} {key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    return grads, values(model), states


def distance(found: Tensor | None, expected: Tensor | None) -> float:
    """Infinite if one of the two is None."""
    if found is None or expected is None:
        return 0.0 if found is expected else float("inf")
    return difference({"": found}, {"": expected})


def whole_tensors() -> Found:
    """Everything that a user can ask for during two steps, as distances from DDP."""
    dist.init_process_group("gloo")
    groups = ShardGroups.create()
    expected_grads, expected_weights, expected_states = plain_run()
    data = Tokens(dist.get_rank(), STEPS)
    found: Found = {}
    for name, setting in SETTINGS.items():
        if name == "collective":  # needs ranks that run the same modules
            continue
        with open_engine(setting, groups) as (engine, model, optimizer):
            token = listed(model, "gpt.token.weight")
            grads = []
            early = full_optimizer_state(token, "exp_avg")
            for step in range(STEPS):
                engine.backward(model(data[step]))
                for n, p in model.named_parameters():
                    grads.append(distance(full_grad(p), expected_grads[step][n]))
                if step == 0:
                    engine.step(optimizer)
                    optimizer.zero_grad()
                    cleared = full_grad(token)
            is_none = [n for n, p in model.named_parameters() if full_grad(p) is None]
            engine.step(optimizer)
            states = {
                key: full_optimizer_state(listed(model, key.split()[0]), key.split()[1])
                for key in expected_states
            }
            with full_params(model):
                weights = values(model)
            found[name] = {
                "grads": max(grads),
                "none": is_none,
                "early": [early, cleared],
                "states": max(distance(states[key], expected_states[key]) for key in states),
                "weights": difference(weights, expected_weights),
                "unknown": raised(lambda token=token: full_optimizer_state(token, "momentum")),
                "idle": full_optimizer_state(listed(model, "idle.weight"), "exp_avg"),
                "frozen": full_optimizer_state(listed(model, "frozen.weight"), "exp_avg"),
            }
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_whole_tensors_are_those_of_ddp(world_size: int) -> None:
    bound = 0.0 if world_size == 2 else 1e-6  # DDP's ring adds in another order
    for found in run_ranks(whole_tensors, world_size):
        for name, got in found.items():
            assert got["grads"] <= bound, (name, got)
            assert got["states"] <= bound, (name, got)
            assert got["weights"] <= bound, (name, got)
            assert got["none"] == ["idle.weight", "idle.bias", "frozen.weight", "frozen.bias"], name
            assert got["early"] == [None, None]
            assert "'gpt.token.weight' has no optimizer state 'momentum'" in got["unknown"]
            assert got["idle"] is None
            assert got["frozen"] is None


def half_masters() -> Found:
    """bfloat16 with fp32 master weights: what is asked for equals what a checkpoint holds."""
    dist.init_process_group("gloo")
    groups = ShardGroups.create()
    found: Found = {}
    for stage in STAGES:
        model = make_model().bfloat16()
        optimizer = fused_adamw(model)
        options = ZeroOptions(stage=stage, bucket_numel=3000)
        engine = ZeroEngine(model, [optimizer], options, groups)
        engine.backward(model(Tokens(dist.get_rank(), 1)[0]))
        engine.clip_grad_norm_(optimizer, 0.1)
        names = [n for n, p in model.named_parameters() if p.requires_grad]
        clipped = {n: full_grad(listed(model, n)) for n in names}
        norm = torch.stack([g.norm() for g in clipped.values() if g is not None]).norm().item()
        engine.step(optimizer)
        asked = [full_optimizer_state(listed(model, n), "master_weight") for n in names]
        saved = engine.optimizer_state_dict(optimizer)["state"]
        engine.close()
        if groups.rank == 0:
            order = {p: i for i, p in enumerate(optimizer.param_groups[0]["params"])}
            own = dict(model.named_parameters())
            held = [saved[order[own[n]]].get("master_weight") for n in names]
        else:
            held = asked
        pairs = zip(asked, held, strict=True)
        found[stage] = {
            "norm": norm,
            "dtypes": {g.dtype for g in clipped.values() if g is not None},
            "equal": all(a.dtype == torch.float32 and torch.equal(a, b) for a, b in pairs),
            "sum": sum(a.double().sum().item() for a in asked),
        }
    return found


def test_master_weights_are_those_of_a_checkpoint() -> None:
    ranks = run_ranks(half_masters, 2)
    for stage in STAGES:
        for found in ranks:
            assert found[stage]["equal"], stage
            assert found[stage]["norm"] == pytest.approx(0.1, rel=1e-4)
            assert found[stage]["dtypes"] == {torch.float32}
        assert ranks[0][stage]["sum"] == ranks[1][stage]["sum"]


WRITES = (in_place, past_autograd, assigned)
NAMES = ("gpt.blocks.0.up.weight", "frozen.weight", "gpt.scale")


def writing() -> Found:
    """Writes in scopes; each must leave the same on all ranks: what was kept, or what was there."""
    dist.init_process_group("gloo")
    groups = ShardGroups.create()
    rank = dist.get_rank()
    found: Found = {}

    def write(run: Callable[..., None], value: float, **options: Any) -> Callable[[], None]:
        def inside() -> None:
            with full_params(model, **options):
                for name in NAMES:
                    run(listed(model, name), value)

        return inside

    def fail() -> None:
        with full_params(model, writeback=True):
            for name in NAMES:
                in_place(listed(model, name), 5.0 + rank)
            raise KeyError("mine")

    def other_scope() -> None:
        with full_params(model.gpt if rank else model, writeback=True):
            pass

    def nested_dispute() -> None:
        with full_params(model, writeback=True):
            in_place(listed(model, NAMES[0]), 6.0)
            with full_params(model.frozen, writeback=True):
                in_place(listed(model, NAMES[1]), 6.0 + rank)

    def note(what: str, run: Callable[[], Any]) -> None:
        error = raised(run)
        now = values_in(model)
        shown = [now[name].unique().tolist() for name in NAMES]
        notes[what] = error, "all as before" if equal(now, start) else shown

    for setting in SETTINGS:
        with open_engine(SETTINGS[setting], groups) as (engine, model, optimizer):
            is_collective = setting == "collective"
            model.is_uneven = not is_collective
            start = values_in(model)
            notes: Found = {}
            for run in WRITES:
                note(f"dispute {run.__name__}", write(run, 5.0 + rank, writeback=True))
                note(f"refused {run.__name__}", write(run, 5.0))
            note("failed", fail)
            if not is_collective:  # would wait for the parameters that one rank does not ask for
                note("other scope", other_scope)
            note("nested dispute", nested_dispute)
            note("other ranks", write(in_place, 5.0, from_rank=rank))
            note("no rank", lambda: full_params(model, from_rank=dist.get_world_size()).__enter__())
            note("other grad", lambda: full_grad(listed(model, NAMES[0] if rank else NAMES[2])))
            for value, run in enumerate(WRITES, 1):
                note(f"rank {run.__name__}", write(run, 10.0 * value + rank, from_rank=1))
                note(f"all {run.__name__}", write(run, 10.0 * value, writeback=True))
            status = [param_status(p) for p in model.parameters()]
            alone = None
            if rank == 0 and not is_collective:  # reading needs nobody
                with full_params(model):
                    alone = [listed(model, name).unique().tolist() for name in NAMES]
            engine.backward(model(Tokens(rank, 1)[0]))
            if rank == 0:
                model.zero_grad()
            half = raised(lambda: full_grad(listed(model, NAMES[0])))
            optimizer.zero_grad()
            state = engine.module_state_dict()
            found[setting] = {
                "notes": notes,
                "status": status,
                "alone": alone,
                "half": half,
                "saved": [state[name].unique().tolist() for name in NAMES] if state else None,
            }
    return found


def values_in(model: nn.Module) -> dict[str, Tensor]:
    with full_params(model):
        return values(model)


@pytest.mark.parametrize("world_size", [2, 3])
def test_writes_are_kept_on_all_ranks_or_on_none(world_size: int) -> None:
    ranks = run_ranks(writing, world_size)
    groups = " from ".join(f"rank(s) [{rank}]" for rank in range(world_size))
    texts = {
        "dispute": "the ranks have written different values, so nothing was kept: ",
        "refused": "without writeback=True",
        "failed": "KeyError: 'mine'",
        "other scope": "enter the same scopes on all ranks",
        "nested dispute": f"'frozen.weight' differs on {groups}",
        "other ranks": "enter the same scopes on all ranks",
        "no rank": f"from_rank must be a rank of 0 to {world_size - 1}",
        "other grad": "make the same calls on all ranks",
    }
    for rank, found in enumerate(ranks):
        for setting, got in found.items():
            notes, where = got["notes"], (setting, rank, got)
            for what, (error, kept) in notes.items():
                kind, _, how = what.partition(" ")
                if kind in ("rank", "all"):
                    value = 10.0 * (1 + [run.__name__ for run in WRITES].index(how))
                    assert error == "no error", where
                    assert kept == [[value + (kind == "rank")]] * 3, where
                else:
                    assert texts.get(what, texts.get(kind, "?")) in error, (what, *where)
                    assert kept == "all as before", (what, *where)
                if kind == "dispute":
                    for name in NAMES:
                        assert f"{name!r} differs on {groups}" in error, where
                    assert error.count("differs") == len(NAMES), where
            last = [[30.0]] * 3
            assert got["alone"] == (last if rank == 0 and setting != "collective" else None)
            assert "was cleared on rank(s) [0] only" in got["half"], where
            assert got["saved"] == (last if rank == 0 else None), where
            assert set(got["status"]) <= set(ParamStatus)
            is_away = ParamStatus.NOT_AVAILABLE in got["status"]
            assert is_away == (SETTINGS[setting]["stage"] == 3), where


def alone_in_trouble(stage: int) -> tuple[str, float]:
    """One rank fails in a scope whose writes were to be kept, and the other waits for it."""
    timeout = timedelta(seconds=4)
    dist.init_process_group("gloo", timeout=timeout)
    groups = ShardGroups.create(timeout)
    model = make_model()
    engine = ZeroEngine(model, [fused_adamw(model)], ZeroOptions(stage=stage), groups)

    def fail() -> None:
        with full_params(model, writeback=True):
            if groups.rank == 0:
                raise KeyError("mine")

    began_s = time.monotonic()
    answer = raised(fail), time.monotonic() - began_s
    if groups.rank == 0:  # it lives on, so that nobody is told by its end
        time.sleep(8)
    engine.abandon()
    return answer


@pytest.mark.parametrize("stage", [1, 3])
def test_nobody_waits_longer_than_the_timeout_for_a_rank_that_failed(stage: int) -> None:
    (first, _), (text, took_s) = run_ranks(alone_in_trouble, 2, stage)
    assert first == "KeyError: 'mine'"
    assert "rank 1 waited for the other ranks to leave full_params(writeback=True)" in text
    assert took_s < 8


# In the hooks of Lightning, where the same code runs with DDP.


class Asking(Language):
    """Asks for everything in every hook."""

    def __init__(self) -> None:
        super().__init__(steps=4, tied=True)
        self.seen: list[tuple[str, Tensor | None]] = []

    def note(self, where: str, value: Tensor | None) -> None:
        self.seen.append((where, None if value is None else value.detach().clone()))

    def parameter(self, name: str) -> nn.Parameter:
        return dict(self.model.named_parameters())[name]

    def note_weights(self, where: str) -> None:
        with full_params(self.model.blocks):
            for name, parameter in self.model.blocks.named_parameters():
                self.note(f"{where} {name}", parameter)

    def note_grads(self, where: str) -> None:
        for name, parameter in self.named_parameters():
            self.note(f"{where} {name}", full_grad(parameter))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.note_weights("before forward")
        loss = super().training_step(batch, index)
        self.note_weights("after forward")
        return loss

    def on_after_backward(self) -> None:
        self.note_weights("after backward")
        self.note_grads("after backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note_grads("before step")
        with full_params(self.model.norm, writeback=True), torch.no_grad():
            self.model.norm.weight.mul_(0.5)

    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
        self.clip_gradients(optimizer, 0.01, "value")
        self.note_grads("clipped")

    def on_train_batch_end(self, *_: Any) -> None:
        self.note_weights("after step")
        for key in ("exp_avg", "step"):
            value = self.state_of(self.parameter("token.weight"), key)
            self.note(f"after step {key}", value)
        with full_params(self, writeback=True):
            self.parameter("blocks.0.up.weight").data.clamp_(-0.1, 0.1)
        self.note_weights("clamped")

    def state_of(self, parameter: nn.Parameter, key: str) -> Any:
        if isinstance(self.trainer.strategy, ZeroStrategy):
            return full_optimizer_state(parameter, key)
        return self.optimizers().optimizer.state[parameter][key]

    def on_validation_start(self) -> None:
        self.note_weights("validation")

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.note_weights("validation step")
        super().validation_step(batch, index)

    def on_validation_epoch_end(self) -> None:
        with full_params(self.model.head, writeback=True), torch.no_grad():
            self.model.head.weight.add_(0.001)
        self.note_weights("validated")


def asked(precision: str) -> dict[str, Any]:
    runs = {}
    for name, make in {
        "ddp": lambda: DDPStrategy(),
        **{str(stage): lambda stage=stage: ZeroStrategy(stage) for stage in STAGES},
        "collective": lambda: ZeroStrategy(3, gather_by="collective", bucket_numel=2000),
    }.items():
        module = Asking()
        options: dict[str, Any] = {"limit_val_batches": 1, "val_check_interval": 2}
        if precision == "16-mixed":
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
            options["plugins"] = MixedPrecision(precision, "cpu", scaler)
        else:
            options["precision"] = precision
        run: pl.Trainer = make_trainer(make(), 2, **options)
        run.fit(module)
        runs[name] = module.seen
    reference = runs.pop("ddp")
    places = [where for where, _ in reference]
    answers: dict[str, Any] = {"places": len(places)}
    for name, seen in runs.items():
        if [where for where, _ in seen] != places:
            answers[name] = "other places"
            continue
        pairs = zip(seen, reference, strict=True)
        answers[name] = [
            where for (where, found), (_, expected) in pairs if not _same(found, expected)
        ]
    return answers


def _same(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_every_hook_sees_what_ddp_shows(precision: str) -> None:
    for answers in run_ranks(asked, 2, precision):
        assert answers.pop("places") > 300
        assert answers == {name: [] for name in [*map(str, STAGES), "collective"]}


class Built(Language):
    """Constructed sharded, and asked for before any engine has it."""

    def configure_model(self) -> None:
        if hasattr(self, "net"):
            return
        torch.manual_seed(1)
        self.net = TinyGPT(depth=2)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> Any:
        if self.trainer.strategy.strategy_name == "zero":
            status = [param_status(p) for p in self.net.blocks.parameters()]
            lost = raised(lambda: full_params(self.net.blocks.parameters()).__enter__())
            sent = raised(lambda: full_params(self.net, from_rank=0).__enter__())
            with full_params([self.net.blocks, self.net.norm], writeback=True):
                shown = values(self.net.blocks)
                in_place(listed(self.net.blocks[0], "up.weight"), 0.25)
            self.answers = {"status": set(status), "lost": lost, "sent": sent, "shown": shown}
        return fused_adamw(self)

    def on_train_start(self) -> None:
        with full_params(self.net):
            self.answers["kept"] = self.net.blocks[0].up.weight.unique().tolist()


def built() -> Found:
    module = Built(steps=1)
    make_trainer(ZeroStrategy(3), 2).fit(module)
    torch.manual_seed(1)
    expected = values(TinyGPT(depth=2).blocks)
    return {**module.answers, "shown": equal(module.answers["shown"], expected)}


def test_a_model_that_is_built_sharded_is_shown_before_training() -> None:
    for found in run_ranks(built, 2):
        assert found["status"] == {ParamStatus.NOT_AVAILABLE}
        assert "give the module, not its parameters" in found["lost"]
        assert "so nobody sends them" in found["sent"]
        assert found["shown"]
        assert found["kept"] == [0.25]
