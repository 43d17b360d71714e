"""Overflow, and dtypes that have to stay."""

from __future__ import annotations

import math

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.optim import lr_scheduler

from lightning_zero import full_optimizer_state
from tests.helpers.cells import Cases, OnSomeRank, every_cell
from tests.helpers.models import weights
from tests.helpers.small import Small, linear, noise, product, sgd, square

CASES = Cases("overflow and dtypes")


# A18: overflow.


def scaled(scale=2.0**8):
    """fp16 with loss scaling, on the CPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


class Scheduled(Small):
    """Adam, and a scheduler by step."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        scheduler = lr_scheduler.StepLR(optimizer, 100)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def poisoned(steps, when, value=math.inf, kind=Small, **options):
    """Gradients of 1; on the last rank ``value`` at the steps ``when``."""

    def loss(module, batch):
        is_last = module.global_rank == module.trainer.world_size - 1
        return module.w * batch * (value if is_last and module.index in when else 1.0)

    return kind(loss, [[1.0] * steps], sgd(0.1), w=1.0, **options)


@CASES("A18", {"w": 0.6}, tolerance=1e-6)
def two_of_six_steps(user):
    """Infinite gradients on rank 1 at two of six steps: all ranks skip these."""
    return user.fit(poisoned(6, (1, 3)), **scaled())


@CASES("A18", {"w": 0.6}, tolerance=1e-6, ranks=3)
def not_a_number_on_three_ranks(user):
    """NaN gradients on one of three ranks."""
    return user.fit(poisoned(6, (1, 3), math.nan), **scaled())


@CASES("A18")
def states_stay(user):
    """Adam's state and the scheduler are after a skipped step what they are under DDP."""
    player = user.trainer(**scaled())
    player.fit(module := poisoned(6, (1, 3), kind=Scheduled))
    player.save_checkpoint(user.folder / "one.ckpt")
    file = torch.load(user.folder / "one.ckpt", weights_only=False)
    state = file["optimizer_states"][0]["state"][0]
    schedule = file["lr_schedulers"][0]
    return {
        **weights(module),
        "step": float(state["step"]),
        "exp_avg": state["exp_avg"],
        "scheduler": schedule["last_epoch"],
        "scale": file["MixedPrecision"]["scale"],
    }


@CASES("A18", {"told": OnSomeRank(True)})
def every_step(user):
    """Overflow at every step is told, the run does not only look alive."""
    user.fit(poisoned(40, range(40)), **scaled(16.0))
    return {"told": user.said("skipped|overflow|not finite") > 0}


@CASES("A18", error="loss scale", timeout_s=8)
def scale_vanishes(user):
    """When the scale has been halved to nothing, the run ends with an error on all ranks."""
    return user.fit(poisoned(200, range(200)), **scaled(2.0**-100))


# A19: dtypes.


def parts():
    """A float buffer that bf16 cannot hold, a counter, and a norm."""
    loss = lambda m, x: m.norm(m.lin(x).to(m.norm.weight.dtype)).square().mean()  # noqa: E731
    module = Small(loss, noise(2, 4), sgd(0.1), lin=linear(4, 4), norm=nn.LayerNorm(4))
    module.register_buffer("scale", torch.tensor(257.0))
    module.register_buffer("count", torch.tensor(7))
    return module


def dtypes(found):
    return {f"{name} is": str(value.dtype) for name, value in found.items()}


@CASES("A19", tolerance=1e-6)
def mixed(user):
    """bf16-mixed: parameters and buffers stay what they are."""
    found = user.fit(parts(), precision="bf16-mixed")
    return {**found, **dtypes(found), "is kept": found["scale"].item() == 257.0}


@CASES("A19", tolerance=1e-2)
def low(user):
    """bf16-true: the same is cast as under DDP."""
    found = user.fit(parts(), precision="bf16-true")
    return {**found, **dtypes(found)}


@CASES(
    "A19",
    {
        "scale": 257.0,
        "scale is": "torch.float32",
        "norm.weight is": "torch.float32",
        "lin.weight is": "torch.bfloat16",
        "count is": "torch.int64",
    },
    zero={"keep_fp32": [nn.LayerNorm, "scale"]},
)
def kept(user):
    """bf16-true with ``keep_fp32``: a norm and a buffer are never cast."""
    module = parts()
    module.loss = lambda m, x: m.norm(m.lin(x.bfloat16())).square().mean()
    found = user.fit(module, precision="bf16-true")
    return {**found, **dtypes(found)}


def adapted(kind=torch.bfloat16):
    """A frozen base of low precision and fp32 adapters."""
    base = linear(4, 4, seed=1).to(kind).requires_grad_(False)

    def loss(module, batch):
        return (module.base(batch.to(kind)).float() + module.up(module.down(batch))).square().mean()

    layers = {"down": linear(4, 2, seed=2), "up": linear(2, 4, seed=3)}
    return Small(loss, noise(3, 4), sgd(0.1), base=base, **layers)


@CASES("A19")
def adapters(user):
    """A frozen bf16 base and fp32 adapters in one model."""
    found = user.fit(adapted())
    return found | dtypes(found)


@CASES("A19", ranks=3, tolerance=1e-6)
def adapters_of_another_dtype(user):
    """A frozen fp16 base, fp32 adapters and a double head, on three ranks."""
    module = adapted(torch.float16)
    module.head = linear(4, 1).double()
    first = module.loss
    module.loss = lambda m, x: first(m, x) + m.head(x.double()).square().mean().float()
    found = user.fit(module)
    return found | dtypes(found)


def small_steps():
    return Small(product, [[1.0] * 100], sgd(1e-3), w=1.0)


@CASES("A19", {"w": 0.9}, tolerance=1e-5)
def hundred_small_steps(user):
    """100 steps of 0.001 add up with bf16 autocast."""
    return user.fit(small_steps(), precision="bf16-mixed")


@CASES("A19", {"w": 0.8984375, "master": 0.9}, tolerance=1e-5)
def hundred_small_steps_of_a_master(user):
    """And with bf16 weights, through their fp32 master."""

    class Watching(Small):
        def on_train_batch_end(self, *_):
            self.master = full_optimizer_state(self.w, "master_weight")

    module = small_steps()
    module.__class__ = Watching
    found = user.fit(module, precision="bf16-true")
    return {"w": found["w"].float(), "master": module.master}


@CASES("A19", {"w": 1.0}, zero={"master_weights": False})
def hundred_small_steps_without_a_master(user):
    """Without a master they are lost, as under DDP: that is what it is for."""
    found = user.fit(small_steps(), precision="bf16-true")
    return {"w": found["w"].float()}


@CASES("A19", tolerance=1e-12)
def double(user):
    """64-true is as exact as it can be."""
    data = [[row.double() for row in rows] for rows in noise(3, 4)]
    net = nn.Sequential(linear(4, 4, seed=1), nn.Tanh(), linear(4, 4, seed=2))
    return user.fit(Small(square, data, sgd(0.1), net=net), precision="64-true")


@every_cell(CASES)
def test_case(outcomes, cell):
    outcomes.check(cell)
