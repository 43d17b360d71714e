"""Parts that stay in fp32 in a bf16 run train as under DDP, where the casts stand in the model."""

from __future__ import annotations

import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy, full_params
from lightning_zero.fabric import ZeroStrategy as FabricZeroStrategy
from lightning_zero.params.sliced import owner_of
from tests.helpers.models import Tokens, equal, trainer, weights
from tests.helpers.spawn import run_ranks

STAGES = (0, 1, 2, 3)
VOCAB, WIDTH, STEPS = 61, 24, 5
LOW = torch.bfloat16
KEPT = [nn.LayerNorm, "net.router", "Rotations"]


class Rotations(nn.Module):
    """Angles of positions; at 257 bf16 cannot tell one from the next."""

    def __init__(self):
        super().__init__()
        self.register_buffer("start", torch.tensor(257.0))
        self.register_buffer("inv_freq", 1.0 / 100.0 ** (torch.arange(WIDTH) / WIDTH))
        self.register_buffer("count", torch.tensor(7))

    def forward(self, x):
        angles = torch.outer(self.start + torch.arange(x.shape[-2]), self.inv_freq)
        return x * angles.cos()


class Net(nn.Module):
    """With ``by_hand``, the casts that the strategy is to make."""

    def __init__(self, by_hand=False):
        super().__init__()
        self.token = nn.Embedding(VOCAB, WIDTH)
        self.rotations = Rotations()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 31)
        self.router = nn.Sequential(nn.Linear(31, 31), nn.Softmax(-1))
        self.head = nn.Linear(31, VOCAB)
        self.by_hand = by_hand
        if by_hand:
            for low in (self.token, self.up, self.head):
                low.to(LOW)

    def forward(self, tokens):
        x = self.call(self.rotations, self.token(tokens))
        x = self.up(self.call(self.norm, x))
        return self.head(x * self.call(self.router, x))

    def call(self, module, x):
        return module(x.float()).to(LOW) if self.by_hand else module(x)


class Parts(pl.LightningModule):
    def __init__(self, by_hand=False, is_late=False):
        super().__init__()
        self.is_late, self.net = is_late, None
        self.losses, self.was_sliced = [], False
        if not is_late:
            self.net = self.make(by_hand)

    def make(self, by_hand=False):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return Net(by_hand)

    def configure_model(self):
        if self.net is None:
            torch.manual_seed(3)
            self.net = Net()

    def train_dataloader(self):
        return DataLoader(Tokens(self.trainer.global_rank, STEPS), batch_size=None)

    test_dataloader = train_dataloader

    def training_step(self, batch, index):
        loss = F.cross_entropy(self.net(batch).flatten(0, 1), batch.flatten())
        self.losses.append(loss.item())
        return loss

    test_step = training_step

    def configure_optimizers(self):
        self.was_sliced = owner_of(self) is not None
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


def zero(stage, **options):
    return trainer(
        ZeroStrategy(stage, keep_fp32=KEPT, bucket_numel=700, **options), 2, precision="bf16-true"
    )


def fabric_run(strategy, precision, by_hand=False):
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision=precision)
    fabric.launch()
    with torch.random.fork_rng(devices=[]), fabric.init_module():
        torch.manual_seed(3)
        net = Net(by_hand)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for batch in Tokens(fabric.global_rank, STEPS):
        loss = F.cross_entropy(model(batch).float().flatten(0, 1), batch.flatten())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    with full_params(net):
        trained = weights(net)
    if not by_hand:
        fabric.strategy.release(model)
    hooks = sum(len(m._forward_pre_hooks) for m in net.modules())
    return trained, loss.item(), hooks


def runs(folder):
    warnings.simplefilter("error", UserWarning)  # no buffer is cast
    by_hand = Parts(by_hand=True)
    trainer(DDPStrategy(), 2).fit(by_hand)
    found = {"ddp": (weights(by_hand), by_hand.losses)}
    for stage in STAGES:
        module = Parts()
        zero(stage, master_weights=False).fit(module)
        found[stage, "low"] = weights(module), module.losses
        module, late = Parts(), Parts(is_late=True)
        fit = zero(stage)
        fit.fit(module)
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())
        trained, losses = weights(module), list(module.losses)
        path = Path(folder) / f"{stage}.ckpt"
        fit.save_checkpoint(path)
        zero(stage).fit(late)
        found[stage, "master"] = trained, losses, hooks
        found[stage, "late"] = weights(late), late.losses, late.was_sliced
        read = Parts()
        zero(stage).test(read, ckpt_path=path, verbose=False)
        fit.test(module, verbose=False)
        found[stage, "read"] = weights(read), read.losses == module.losses[STEPS:]
    found["fabric ddp"] = fabric_run(FabricDDPStrategy(), "32-true", by_hand=True)
    for stage in STAGES:
        strategy = FabricZeroStrategy(
            stage, keep_fp32=[nn.LayerNorm, "router", "Rotations"], master_weights=False
        )
        found[stage, "fabric"] = fabric_run(strategy, "bf16-true")
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(runs, 2, str(tmp_path_factory.mktemp("kept")))


@pytest.mark.parametrize("stage", STAGES)
def test_training_equals_ddp_with_the_casts_in_the_model_bit_for_bit(ranks, stage):
    for found in ranks:
        expected, losses = found["ddp"]
        trained, found_losses = found[stage, "low"]
        assert found_losses == losses
        assert equal(trained, expected)
        assert {n: v.dtype for n, v in trained.items()} == {n: v.dtype for n, v in expected.items()}


@pytest.mark.parametrize("stage", STAGES)
def test_parts_stay_as_they_are_with_master_weights_and_nothing_is_left_behind(ranks, stage):
    for found in ranks:
        trained, losses, hooks = found[stage, "master"]
        assert trained["net.rotations.start"] == 257.0
        assert trained["net.rotations.inv_freq"].dtype == torch.float32
        assert trained["net.rotations.count"].dtype == torch.int64
        assert trained["net.norm.weight"].dtype == torch.float32
        assert trained["net.up.weight"].dtype == LOW
        assert equal(trained, found[0, "master"][0])
        assert losses == found[0, "master"][1]
        assert hooks == 0


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_built_late_has_the_same_parts(ranks, stage):
    for found in ranks:
        trained, losses, was_sliced = found[stage, "late"]
        assert was_sliced == (stage == 3)
        assert losses == found[stage, "master"][1]
        assert equal(trained, found[stage, "master"][0])


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_has_the_parts_in_fp32(ranks, stage):
    for found in ranks:
        read, tests_alike = found[stage, "read"]
        assert tests_alike
        assert equal(read, found[stage, "master"][0])


@pytest.mark.parametrize("stage", STAGES)
def test_a_fabric_keeps_the_same_parts(ranks, stage):
    for found in ranks:
        trained, loss, hooks = found[stage, "fabric"]
        assert equal(trained, found["fabric ddp"][0])
        assert loss == found["fabric ddp"][1]
        dtypes = {f"net.{name}": value.dtype for name, value in trained.items()}
        assert dtypes == {name: value.dtype for name, value in found["ddp"][0].items()}
        assert hooks == 0
