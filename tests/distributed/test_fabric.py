"""Fabric: plain loops, several models and optimizers, checkpoints. Each equals Fabric's DDP."""

from __future__ import annotations

import copy
import pickle
import sys
import traceback
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import FSDPPrecision, HalfPrecision, MixedPrecision
from lightning.fabric.strategies import DDPStrategy
from torch import nn

import lightning_zero as lz
from lightning_zero.fabric import ZeroStrategy
from lightning_zero.params.sliced import owner_of
from tests.helpers.models import (
    TinyGPT,
    Tokens,
    adamw,
    difference,
    equal,
    fused_adamw,
    sgd_momentum,
    two_groups,
    weights,
)
from tests.helpers.programs import run
from tests.helpers.spawn import run_ranks

STAGES = (0, 1, 2, 3)
STEPS = 4
NORM_BOUND = 1e-6  # a norm is summed piece by piece, in another order than torch's


def ddp():
    return DDPStrategy()


def zero(stage, **options):
    return ZeroStrategy(stage, bucket_numel=3000, timeout=30, **options)


def started(strategy, **options):
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, **options)
    fabric.launch()
    return fabric


def seeded(make, *args, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make(*args, **options)


def whole(model):
    with lz.full_params(model):
        return weights(model)


_of_ddp = {}


def of_ddp(loop, *args, **options):
    """What a loop gives with Fabric's DDP; it is run once for all stages."""
    key = loop.__name__, str(args), str(options)
    if key not in _of_ddp:
        _of_ddp[key] = loop(ddp(), *args, **options)
    return _of_ddp[key]


def trained(strategy, make_optimizer, step, steps=STEPS, **options):
    """Losses and weights of a loop whose body is ``step(fabric, model, optimizer, batch)``."""
    fabric = started(strategy)
    module = seeded(TinyGPT, **options)
    model, optimizer = fabric.setup(module, make_optimizer(module))
    data = Tokens(fabric.global_rank, steps)
    losses = [step(fabric, model, optimizer, data[index], index) for index in range(steps)]
    return losses, whole(model)


# Plain loops.


def by_fabric(fabric, model, optimizer, batch, index):
    optimizer.zero_grad()
    loss = model(batch)
    fabric.backward(loss)
    optimizer.step()
    return loss.item()


def by_hand(fabric, model, optimizer, batch, index):
    loss = model(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def by_closure(fabric, model, optimizer, batch, index):
    def closure():
        optimizer.zero_grad()
        loss = model(batch)
        fabric.backward(loss)
        return loss

    return optimizer.step(closure).item()


def clipped_by_value(fabric, model, optimizer, batch, index):
    optimizer.zero_grad()
    fabric.backward(model(batch))
    assert fabric.clip_gradients(model, optimizer, clip_val=1e-3) is None
    optimizer.step()


def clipped_by_norm(fabric, model, optimizer, batch, index):
    optimizer.zero_grad()
    fabric.backward(model(batch))
    kind = float("inf") if index == 1 else 2.0
    norm = fabric.clip_gradients(model, optimizer, max_norm=0.05, norm_type=kind)
    assert norm.shape == ()
    optimizer.step()
    return norm.item()


def accumulated(fabric, model, optimizer, batch, index):
    with fabric.no_backward_sync(model, enabled=index % 2 == 0):
        loss = model(batch) / 2
        fabric.backward(loss)
    if index % 2:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


EXACT = {
    "adamw": (adamw, by_fabric, {}),
    "sgd": (sgd_momentum, by_hand, {}),
    "closure": (two_groups, by_closure, {}),
    "clip_value": (adamw, clipped_by_value, {}),
    "tied_frozen": (adamw, by_fabric, {"tied": True, "frozen": True}),
}


def exact_loops(stage, folder):
    """Names of the loops that do not equal DDP's bit for bit."""
    found = []
    for name, (make_optimizer, step, options) in EXACT.items():
        losses, expected = of_ddp(trained, make_optimizer, step, **options)
        got_losses, got = trained(zero(stage), make_optimizer, step, **options)
        if got_losses != losses or not equal(got, expected):
            found.append(name)
    return found


def bounded_loops(stage, folder):
    found = {}
    for step in (clipped_by_norm, accumulated):
        losses, expected = of_ddp(trained, adamw, step)
        got_losses, got = trained(zero(stage), adamw, step)
        gap = (torch.tensor(losses) - torch.tensor(got_losses)).abs().max().item()
        found[step.__name__] = max(gap, difference(expected, got))
    return found


# Several models, several optimizers.


def adversaries(strategy):
    """A generator and a discriminator, each with its own set-up."""
    fabric = started(strategy)
    g = seeded(nn.Sequential, *(seeded(nn.Linear, 5, 7), nn.Tanh(), seeded(nn.Linear, 7, 5)))
    d = seeded(nn.Sequential, *(seeded(nn.Linear, 5, 9), nn.Tanh(), seeded(nn.Linear, 9, 1)))
    g, g_optimizer = fabric.setup(g, adamw(g))
    d, d_optimizer = fabric.setup(d, sgd_momentum(d))
    noise = torch.Generator().manual_seed(fabric.global_rank)
    for _ in range(STEPS):
        x = torch.randn(6, 5, generator=noise)
        g_optimizer.zero_grad()
        fabric.backward(-d(g(x)).mean())
        g_optimizer.step()
        d_optimizer.zero_grad()
        fabric.backward((d(g(x).detach()) - d(2 * x)).mean())
        d_optimizer.step()
    return {**whole(g), **{f"d.{name}": value for name, value in whole(d).items()}}


def two_models(stage, folder):
    return equal(of_ddp(adversaries), adversaries(zero(stage)))


def split(strategy, in_two_calls):
    """One optimizer for the blocks, one for the rest; buffers follow rank 0."""
    fabric = started(strategy)
    module = seeded(TinyGPT)
    module.add_module("extra", nn.BatchNorm1d(4))
    blocks = list(module.blocks.parameters())
    others = [p for p in module.parameters() if not any(p is each for each in blocks)]
    make = [
        lambda: torch.optim.AdamW(blocks, lr=1e-2),
        lambda: torch.optim.SGD(others, lr=0.1, momentum=0.5),
    ]
    if in_two_calls:
        model = fabric.setup_module(module)
        first, second = fabric.setup_optimizers(*(each() for each in make))
    else:
        model, first, second = fabric.setup(module, *(each() for each in make))
    data = Tokens(fabric.global_rank, STEPS)
    for index in range(STEPS):
        model(data[index])
        noise = torch.full((3, 4), float(fabric.global_rank + index))
        noise[0] = 0
        loss = model.module(data[index]) + model.extra(noise).square().mean()
        fabric.backward(loss)
        for optimizer in (first, second) if index % 2 else (second, first):
            optimizer.step()
            optimizer.zero_grad()
    return whole(model)


def two_optimizers(stage, folder):
    return [equal(of_ddp(split, False), split(zero(stage), calls)) for calls in (False, True)]


def evaluated(stage, folder):
    """A model that is only set up to be evaluated, also by one rank more often."""
    fabric = started(zero(stage))
    module = seeded(TinyGPT)
    data = Tokens(0, 3)
    expected = [module(batch).item() for batch in data]
    model = fabric.setup(module)
    with torch.no_grad():
        return [model(batch).item() for batch in data] == expected


# Compiled models, and LightningModules.


class Counting:
    """A backend that runs the graph as it is, and counts how often it was asked to."""

    count = 0

    def __call__(self, graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        Counting.count += 1
        return aot_eager(graph, inputs)


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 60), nn.Linear(60, 60))
        self.scale = nn.Parameter(torch.ones(60))

    def forward(self, x):
        return (self.layers(x) * self.scale).square().mean()


def compiled(strategy, compile_model, **options):
    torch.compiler.reset()
    fabric = started(strategy)
    module = seeded(Pairs)
    model, optimizer = fabric.setup(compile_model(module), adamw(module), **options)
    noise, losses = torch.Generator().manual_seed(fabric.global_rank), []
    for index in range(STEPS):
        batch = torch.randn(4, 5, generator=noise)
        losses.append(by_fabric(fabric, model, optimizer, batch, index))
        if index == 1:
            Counting.count = 0
    return losses, whole(module), Counting.count


def plain(module):
    return module


def around(module):
    return torch.compile(module, backend=Counting())


def in_place(module):
    module.compile(backend=Counting())
    return module


COMPILED = {0: (), 1: ("again",), 2: (), 3: ("again", "before", "in place")}


def compiled_models(stage, folder):
    """Compiled anew by Fabric after the set-up, or before and left alone."""
    ways = {
        "again": (around, {}),
        "before": (around, {"_reapply_compile": False}),
        "in place": (in_place, {}),
    }
    found = {}
    for name, (way, options) in ways.items():
        if name not in COMPILED[stage]:
            continue
        losses, expected, _ = of_ddp(compiled, plain)
        got_losses, got, count = compiled(zero(stage), way, **options)
        found[name] = got_losses == losses and equal(got, expected) and not count
    return found


class Lightning(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = seeded(TinyGPT)

    def training_step(self, batch, index):
        penalty = sum(p.square().sum() for p in self.parameters())  # whole, since in a step
        return self.model(batch) + 0.01 * penalty


def lightning_loop(strategy):
    fabric = started(strategy)
    module = Lightning()
    model, optimizer = fabric.setup(module, adamw(module))
    data, losses = Tokens(fabric.global_rank, STEPS), []
    for index in range(STEPS):
        loss = model.training_step(data[index], index) + 0.1 * module.model.scale.square()
        optimizer.zero_grad()
        module.manual_backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses, whole(model)


def lightning_module(stage, folder):
    losses, expected = of_ddp(lightning_loop)
    got_losses, got = lightning_loop(zero(stage))
    return losses == got_losses and equal(expected, got)


# Models that come into being, and change.


def constructed(strategy):
    """Two models built in one context, with an optimizer each."""
    fabric = started(strategy)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5 + fabric.global_rank)  # the values of rank 0 count
        with fabric.init_module():
            modules = TinyGPT(depth=1, tied=True), TinyGPT(depth=1)
    are_sliced = [owner_of(module) is not None for module in modules]
    pairs = [fabric.setup(module, adamw(module)) for module in modules]
    data = Tokens(fabric.global_rank, 2)
    losses = [by_fabric(fabric, *pair, batch, 0) for batch in data for pair in pairs]
    return losses, [whole(model) for model, _ in pairs], are_sliced


def construction(stage, folder):
    losses, expected, _ = of_ddp(constructed)
    got_losses, got, are_sliced = constructed(zero(stage))
    is_equal = got_losses == losses and all(map(equal, got, expected))
    return is_equal and are_sliced == [stage == 3] * 2


def later_values(stage, folder):
    """Models that get their values after they were built: on the meta device, or from a file."""
    found = {}
    fabric, state = saved(zero(stage), f"{folder}/later{stage}", steps=1)
    expected = whole(state["model"])
    with fabric.init_module(empty_init=True):
        module = TinyGPT(tied=True)
    fabric.load(f"{folder}/later{stage}", {"model": module})
    found["file"] = equal(whole(fabric.setup(module)), expected)

    fabric = started(zero(stage))
    x = torch.ones(2, 40)
    layers = seeded(nn.Linear, 40, 50), seeded(nn.Linear, 50, 3)
    with torch.device("meta"):
        module, other = nn.Linear(40, 50), nn.Linear(4, 4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = fabric.setup_module(module)
    found["meta"] = torch.equal(model(x), layers[0](x))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(model(x).sum())
    optimizer.step()
    found["meta step"] = not torch.equal(model(x), layers[0](x))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    found["meta optimizer"] = "setup_module" in raised(
        ValueError, lambda: fabric.setup(other, optimizer)
    )
    return found


def thawed(strategy):
    """A block is frozen for two steps."""
    fabric = started(strategy)
    module = seeded(TinyGPT, frozen=True)
    block = list(module.blocks[1].parameters())
    others = [p for p in module.parameters() if p.requires_grad]
    model, optimizer = fabric.setup(module, torch.optim.SGD(others, lr=0.1, momentum=0.9))
    for index, batch in enumerate(Tokens(fabric.global_rank, STEPS)):
        if index == 2:
            module.blocks[1].requires_grad_(True)
            optimizer.add_param_group({"params": block})
        by_fabric(fabric, model, optimizer, batch, index)
    return whole(model)


def unfrozen(stage, folder):
    """Against stage 0, since DDP does not average what was frozen when it was set up."""
    key = "blocks.1.up.weight"
    got = thawed(zero(stage))
    is_moved = not torch.equal(got[key], seeded(TinyGPT).state_dict()[key])
    return is_moved and equal(got, thawed(zero(0)))


# Precision.


def in_precision(strategy, precision, bad_step=-1, max_norm=None, make=fused_adamw):
    """Losses, weights, and the Fabric of a run; a scaler by the name of 16-mixed."""
    is_scaled = precision == "16-mixed"
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if is_scaled else None
    plugin = MixedPrecision("16-mixed", "cpu", scaler) if is_scaled else None
    flag = {"plugins": plugin} if is_scaled else {"precision": precision}
    fabric = started(strategy, **flag)
    module = seeded(TinyGPT)
    model, optimizer = fabric.setup(module, make(module))
    losses = []
    for index, batch in enumerate(Tokens(fabric.global_rank, STEPS)):
        optimizer.zero_grad()
        with fabric.autocast():
            loss = model(batch)
        is_bad = index == bad_step and fabric.global_rank == 1
        fabric.backward(loss * float("inf") if is_bad else loss)
        if max_norm is not None:
            fabric.clip_gradients(model, optimizer, max_norm=max_norm, error_if_nonfinite=False)
        optimizer.step()
        losses.append(loss.item())
    return losses, whole(model), fabric, {"model": model, "optimizer": optimizer}


def precisions(stage, folder):
    found = {}
    for flag, options in (
        ("bf16-mixed", {}),
        ("64-true", {}),
        ("bf16-true", {}),
        ("16-mixed", {"bad_step": 2}),
    ):
        losses, expected, *_ = of_ddp(in_precision, flag, **options)
        is_half = flag == "bf16-true"
        strategy = zero(stage, master_weights=False) if is_half else zero(stage)
        got_losses, got, fabric, _ = in_precision(strategy, flag, **options)
        found[flag, *options] = got_losses == losses and equal(got, expected)
    scaler, steps = fabric.strategy.precision.scaler, fabric.strategy.nonfinite_steps
    found["skipped"] = scaler.get_scale() == 2.0**9 and steps.count == 1
    _, expected, *_ = of_ddp(in_precision, "16-mixed", max_norm=0.05, make=adamw)
    _, got, *_ = in_precision(zero(stage), "16-mixed", max_norm=0.05, make=adamw)
    found["clipped"] = difference(expected, got) <= NORM_BOUND
    return found


def masters(stage, folder):
    """fp32 master weights of a bf16 model: those of the bare engine, and in the file."""
    losses, got, fabric, state = in_precision(zero(stage), "bf16-true")
    module = seeded(TinyGPT).to(torch.bfloat16)
    optimizer = fused_adamw(module)
    options = lz.ZeroOptions(stage=stage, bucket_numel=3000)
    engine = lz.ZeroEngine(module, [optimizer], options, lz.ShardGroups.create())
    for batch in Tokens(fabric.global_rank, STEPS):
        optimizer.zero_grad()
        engine.backward(module(batch))
        engine.step(optimizer)
    engine.close()
    fabric.save(f"{folder}/masters{stage}", state)
    file = torch.load(f"{folder}/masters{stage}")
    master = file["optimizer"]["state"][0]["master_weight"]
    rounded = torch.equal(master.bfloat16(), file["model"]["position"])
    return equal(got, weights(module)) and rounded and master.dtype == torch.float32


def nonfinite(stage, folder):
    """What a run says whose gradients are not finite in step 1 on rank 1."""
    skipping = zero(stage, nonfinite_gradients="skip")
    _, got, fabric, _ = in_precision(skipping, "32-true", bad_step=1)
    is_finite = all(value.isfinite().all() for value in got.values())
    ending = zero(stage, nonfinite_gradients="error")
    said = raised(RuntimeError, lambda: in_precision(ending, "32-true", bad_step=1))

    def clipped():
        fabric = started(zero(stage))
        module = seeded(TinyGPT)
        model, optimizer = fabric.setup(module, adamw(module))
        fabric.backward(model(Tokens(0, 1)[0]) * float("nan"))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)

    norm = raised(RuntimeError, clipped)
    return [is_finite, skipping.nonfinite_steps.count, "rank 1" in said, "is nan" in norm]


# The life of a model, and errors.


def lives(stage, folder):
    """Copies, release, a second set-up, teardown."""
    found = {}
    fabric = started(zero(stage))
    module = seeded(TinyGPT)
    model, optimizer = fabric.setup(module, adamw(module))
    data = Tokens(fabric.global_rank, 3)
    by_fabric(fabric, model, optimizer, data[0], 0)
    with lz.full_params(model):
        twin = copy.deepcopy(model)
    with torch.no_grad():
        found["copy"] = twin(data[1]).item() == model(data[1]).item()
    found["engine"] = fabric.strategy.engine(model) is fabric.strategy.engine(module)
    expected = whole(model)
    by_fabric(fabric, model, optimizer, data[1], 0)
    found["copy stays"] = equal(weights(twin.module), expected)
    expected = whole(model)
    fabric.strategy.release(model)
    found["released"] = equal(weights(module), expected)
    model, optimizer = fabric.setup(module, optimizer.optimizer)
    by_fabric(fabric, model, optimizer, data[2], 0)
    expected = whole(model)
    found["moved"] = not equal(weights(twin.module), expected)
    fabric.strategy.teardown()
    found["torn down"] = equal(weights(module), expected)
    found["sum"] = fabric.all_reduce(torch.tensor(float(fabric.global_rank))).item() == 0.5
    found["ranks"] = fabric.all_gather(torch.tensor(fabric.global_rank)).tolist() == [0, 1]
    found["first"] = fabric.broadcast(fabric.global_rank) == 0
    return found


def errors(stage, folder):
    fabric = started(zero(stage, checkpoint="sharded"))
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)

    def sgd(*modules):
        return torch.optim.SGD([p for each in modules for p in each.parameters()], lr=0.1)

    found = {
        "another's": raised(ValueError, lambda: fabric.setup(first, sgd(second))),
        "not set up": raised(ValueError, lambda: fabric.setup_optimizers(sgd(second))),
    }
    models = {"a": fabric.setup(first), "b": fabric.setup(second)}
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    calls = {
        "both": lambda: fabric.setup_optimizers(sgd(first, second)),
        "twice": lambda: fabric.setup(first),
        "shared": lambda: fabric.setup(nn.Sequential(first, nn.Linear(3, 1)), sgd(first)),
        "stray": lambda: fabric.clip_gradients(models["a"], sgd(first), max_norm=1.0),
        "released": lambda: fabric.strategy.release(nn.Linear(1, 1)),
        "no module": lambda: fabric.save(f"{folder}/none", {"step": 1}),
        "two modules": lambda: fabric.save(f"{folder}/two", models),
        "no file": lambda: fabric.load(f"{folder}/missing"),
        "two Fabrics": lambda: Fabric(devices=2, strategy=fabric.strategy),
        "LBFGS": lambda: fabric.setup(m := nn.Linear(2, 2), torch.optim.LBFGS(m.parameters())),
        "no effect": lambda: started(zero(stage, nonfinite_gradients="skip"), plugins=scaled),
        "precision": lambda: zero(stage, precision=FSDPPrecision("bf16-mixed")),
        "form": lambda: zero(stage, checkpoint="other"),
    }
    return {**found, **{name: raised(Exception, call) for name, call in calls.items()}}


# Checkpoints.


def saved(strategy, path, steps=2):
    """A run of some steps, and what it has saved."""
    fabric = started(strategy)
    module = seeded(TinyGPT, tied=True)
    model, optimizer = fabric.setup(module, adamw(module))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    data = Tokens(fabric.global_rank, steps)
    for index in range(steps):
        by_fabric(fabric, model, optimizer, data[index], index)
        scheduler.step()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": steps}
    fabric.save(path, state)
    return fabric, state


def resumed(strategy, path):
    """Weights after two more steps from a checkpoint, and what was not asked for."""
    fabric = started(strategy)
    module = seeded(TinyGPT, tied=True)
    with torch.no_grad():
        module.scale.fill_(7.0)
    model, optimizer = fabric.setup(module, adamw(module))
    state = {"model": model, "optimizer": optimizer}
    rest = fabric.load(path, state)
    optimizer.param_groups[0]["lr"] = 5e-3
    data = Tokens(10 + fabric.global_rank, 2)
    for index in range(2):
        by_fabric(fabric, model, optimizer, data[index], index)
    return whole(model), rest


def same(a, b):
    """Whether two checkpoints hold the same, tensors to the last bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def files(stage, folder):
    """A file equals DDP's; every strategy goes on from every file."""
    path, folder_path = (f"{folder}/{name}{stage}" for name in ("zero", "folder"))
    ddp_path = f"{folder}/ddp"
    of_ddp(saved, ddp_path)
    saved(zero(stage), path)
    saved(zero(stage, checkpoint="sharded"), folder_path)
    theirs = torch.load(ddp_path)
    ours = torch.load(path)
    names = ours["optimizer"].pop("param_names")
    expected, rest = of_ddp(resumed, ddp_path)
    found = {"file": same(theirs, ours), "names": names[0][0] == "position"}
    found["folder"] = Path(folder_path, "complete.json").exists()
    for name, strategy, source in (
        ("ddp from zero", ddp(), path),  # what differs are the names
        ("zero from ddp", zero(stage), ddp_path),
        ("other stage", zero((stage + 2) % 4), path),
        ("other stage from folder", zero((stage + 1) % 4), folder_path),
    ):
        got, got_rest = resumed(strategy, source)
        found[name] = equal(got, expected) and same(got_rest, rest)
    return found


def parts_of_files(stage, folder):
    """Filters, strictness, plain state dicts, and ``load_state_dict`` of user's own."""
    path = f"{folder}/parts{stage}"
    fabric, state = saved(zero(stage), path)
    model, optimizer = state["model"], state["optimizer"]
    found = {}
    fabric.save(path + "f", {"model": model}, {"model": lambda name, _: "norm" not in name})
    names = torch.load(path + "f")["model"]
    found["filter"] = "head.weight" in names and not any("norm" in name for name in names)

    expected, before = whole(model), fabric.load(path)
    with lz.full_params(model, writeback=True):
        for p in model.parameters():
            p.data.mul_(2)
    found["not strict"] = sorted(fabric.load(path + "f", {"model": model, "x": 1}, strict=False))
    now = whole(model)
    found["loaded"] = all(
        torch.equal(now[name], expected[name] * (2 if "norm" in name else 1)) for name in now
    )
    found["strict key"] = raised(KeyError, lambda: fabric.load(path + "f", {"x": 1}))
    found["strict names"] = raised(RuntimeError, lambda: fabric.load(path + "f", {"model": model}))

    raw, raw_states = before["model"], before["optimizer"]
    if fabric.is_global_zero:
        torch.save(raw, path + "raw")
        torch.save({k: v for k, v in raw_states.items() if k != "param_names"}, path + "states")
    fabric.barrier()
    fabric.load_raw(path + "raw", model)
    found["raw"] = equal(whole(model), expected)
    optimizer.optimizer.state.clear()
    fabric.load_raw(path + "states", optimizer)
    found["raw states"] = same(states_of(optimizer), before["optimizer"]["state"])
    with lz.full_params(model, writeback=True):
        for p in model.parameters():
            p.data.mul_(2)
    model.load_state_dict(raw)
    found["own load"] = equal(whole(model), expected)
    optimizer.optimizer.state.clear()
    optimizer.load_state_dict(raw_states)
    found["own states"] = same(states_of(optimizer), before["optimizer"]["state"])
    return found


def states_of(optimizer):
    """All states, whole, by number."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        number: {key: lz.full_optimizer_state(p, key) for key in ("step", "exp_avg", "exp_avg_sq")}
        for number, p in enumerate(parameters)
    }


def raised(kind, call):
    """What a call that must fail says."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""


CHECKS = [
    exact_loops,
    bounded_loops,
    two_models,
    two_optimizers,
    evaluated,
    compiled_models,
    lightning_module,
    construction,
    later_values,
    unfrozen,
    precisions,
    masters,
    nonfinite,
    lives,
    errors,
    files,
    parts_of_files,
]


def all_checks(folder):
    """Every check at every stage, on one pair of ranks."""
    found = {}
    for stage in STAGES:
        for check in CHECKS:
            try:
                found[check.__name__, stage] = check(stage, folder)
            except Exception:
                found[check.__name__, stage] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(all_checks, 2, str(tmp_path_factory.mktemp("fabric")))


@pytest.fixture(params=STAGES)
def results(request, ranks):
    """Results of a check at one stage, one per rank."""
    return lambda check: [rank[check.__name__, request.param] for rank in ranks]


def test_plain_loops_equal_ddp_bit_for_bit(results):
    assert results(exact_loops) == [[], []]


def test_clipping_by_norm_and_accumulation_equal_ddp(results):
    for found in results(bounded_loops):
        assert max(found.values()) <= NORM_BOUND, found


def test_two_models_equal_ddp_bit_for_bit(results):
    assert results(two_models) == [True, True]


def test_two_optimizers_in_one_call_or_two_equal_ddp(results):
    assert results(two_optimizers) == [[True, True], [True, True]]


def test_model_is_set_up_for_evaluation(results):
    assert results(evaluated) == [True, True]


def test_compiled_models_equal_ddp_and_compile_once(results):
    for found in results(compiled_models):
        assert all(found.values()), found


def test_lightning_module_equals_ddp_bit_for_bit(results):
    assert results(lightning_module) == [True, True]


@pytest.mark.parametrize("check", [construction, unfrozen, masters])
def test_models_that_come_into_being_or_change(results, check):
    assert results(check) == [True, True]


@pytest.mark.parametrize("check", [later_values, precisions, lives])
def test_every_part_of(results, check):
    for found in results(check):
        assert all(found.values()), found


def test_gradients_that_are_not_finite_are_told_and_skipped(results):
    assert results(nonfinite) == [[True, 1, True, True]] * 2


SAID = {
    "another's": "not in the model",
    "not set up": "parameters of none of the modules",
    "both": "parameters of 2 of the modules",
    "twice": "was set up already",
    "shared": "shares 2 parameter",
    "stray": "this SGD was not set up",
    "released": "Linear was not set up",
    "no module": "the state has 0 modules",
    "two modules": "the state has 2 modules",
    "no file": "no such checkpoint",
    "two Fabrics": "set through ZeroStrategy class",  # Lightning's own
    "LBFGS": "cannot train with LBFGS",
    "no effect": "no effect with a loss scaler",
    "precision": "does not support the precision plugin FSDPPrecision",
    "form": "'consolidated' or 'sharded'",
}


def test_errors_say_on_all_ranks_what_to_do(results):
    for found in results(errors):
        assert found.keys() == SAID.keys()
        for name, words in SAID.items():
            assert words in found[name], (name, found[name])


def test_files_equal_those_of_ddp_and_go_on_anywhere(results):
    for found in results(files):
        assert all(found.values()), found


def test_parts_of_files_are_saved_and_loaded(results):
    for found in results(parts_of_files):
        assert found.pop("not strict") == []
        assert "has no ['x']" in found.pop("strict key")
        assert "blocks.0.norm.weight" in found.pop("strict names")
        assert all(value is True for value in found.values()), found


SCRIPT = """
import sys

import torch
from lightning.fabric import Fabric

import lightning_zero  # registers the name

fabric = Fabric(accelerator="cpu", devices=2, strategy="zero_stage_3")
fabric.launch()
module = torch.nn.Linear(3, 3)
model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=1.0))
fabric.backward(model(torch.full((1, 3), float(fabric.global_rank))).sum())
before = model.state_dict()["weight"].clone()
optimizer.step()
fabric.save(sys.argv[1], {"model": model, "before": before})
"""


def test_script_starts_by_name_and_ends_by_itself(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run([sys.executable, str(script), str(tmp_path / "file")], tmp_path / "log")
    file = torch.load(tmp_path / "file")
    moved = file["before"] - file["model"]["weight"]
    assert torch.allclose(moved, torch.full((3, 3), 0.5))  # the mean of inputs of 0 and 1


def test_strategy_goes_to_spawned_ranks():
    options = {"checkpoint": "sharded", "keep_fp32": ["norm"], "precision": HalfPrecision()}
    sent = pickle.loads(pickle.dumps(ZeroStrategy(2, start_method="spawn", **options)))
    assert sent.options.stage == 2
    assert sent.precision.precision == "16-true"
