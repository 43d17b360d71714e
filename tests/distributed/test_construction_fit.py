"""Trainer and configure_model at stage 3: the same training, less memory, any order of calls."""

from __future__ import annotations

import gc
import re
import resource
from contextlib import contextmanager
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader

import lightning_zero.partition
from lightning_zero import ZeroStrategy, load_state_dict_streamed
from lightning_zero.params.bucket import is_placeholder
from lightning_zero.params.sliced import owner_of
from tests.helpers.builders import GPT, Residual
from tests.helpers.models import equal, trainer, weights
from tests.helpers.spawn import run_ranks

VOCAB, WIDTH = 40, 16


def gpt(folder):
    return GPT(WIDTH, VOCAB)


def half_frozen(folder):
    net = GPT(WIDTH, VOCAB)
    net.blocks[0].requires_grad_(False)
    net.position.requires_grad_(False)
    return net


class Vision(nn.Module):
    """Convolution, batch norm, weight norm, a spectral norm, and a mask of whole numbers."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCAB, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.mix = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.head = parametrizations.spectral_norm(nn.Linear(WIDTH, VOCAB))
        self.shift = nn.Parameter(torch.randint(3, (WIDTH,)), requires_grad=False)

    def forward(self, tokens):
        x = self.norm(self.conv(self.token(tokens).transpose(1, 2))).transpose(1, 2)
        return self.head(self.mix(x + self.shift))


def vision(folder):
    return Vision()


class Layers(nn.Module):
    """Only modules that can reset themselves."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Residual(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens):
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def layers(folder):
    if folder is None:  # one rank alone, in the order in which modules of the meta device are reset
        torch.manual_seed(11)
        net = Layers()
        torch.manual_seed(11)
        for module in net.modules():
            if hasattr(module, "reset_parameters") and module is not net.head:
                module.reset_parameters()
        return net
    with torch.device("meta"):
        return Layers()


def streamed(folder):
    net = GPT(WIDTH, VOCAB)
    if folder is None:
        net.load_state_dict(saved_weights())
    else:
        load_state_dict_streamed(net, Path(folder) / "weights.pt")
    return net


def saved_weights():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(77)
        return GPT(WIDTH, VOCAB).state_dict()


MAKERS = (gpt, half_frozen, vision, layers, streamed)


class Tokens(pl.LightningModule):
    """Learns random tokens; with a folder, its net is built in ``configure_model``."""

    def __init__(self, make, folder=None):
        super().__init__()
        self.make, self.folder, self.net = make, folder, None
        self.losses, self.seen = [], []
        if folder is None:
            self.net = make(None)

    def configure_model(self):
        if self.net is None:
            self.net = self.make(self.folder)

    def dataloader(self, seed):
        generator = torch.Generator().manual_seed(seed + self.global_rank)
        return DataLoader(torch.randint(VOCAB, (5, 2, 8), generator=generator), batch_size=None)

    def train_dataloader(self):
        return self.dataloader(100)

    def test_dataloader(self):
        return self.dataloader(200)

    def training_step(self, batch, index):
        loss = F.cross_entropy(self.net(batch).flatten(0, 1), batch.flatten())
        self.losses.append(loss.item())
        return loss

    test_step = training_step

    def configure_optimizers(self):
        self.seen.append(owner_of(self) is not None)
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Partly(Tokens):
    """A head that is built in ``__init__``, and is there on all ranks, with values of its own."""

    def __init__(self, make, folder=None):
        pl.LightningModule.__init__(self)
        self.make, self.folder, self.net = make, folder, None
        self.losses, self.seen = [], []
        self.scale = nn.Parameter(torch.randn(VOCAB))
        self.out = nn.Linear(VOCAB, VOCAB)
        if folder is None:
            self.configure_model()

    def configure_model(self):
        if self.net is None:
            self.net = nn.Sequential(self.make(self.folder), self.out)
            self.shift = nn.Parameter(torch.randn(VOCAB))

    def training_step(self, batch, index):
        logits = self.net(batch) * self.scale + self.shift
        loss = F.cross_entropy(logits.flatten(0, 1), batch.flatten())
        self.losses.append(loss.item())
        return loss


def fit_both(make, folder, world_size, bucket_numel, kind=Tokens, **options):
    """A fit of the model built whole, and one of it built sharded by ranks of other seeds."""
    torch.manual_seed(11)
    with torch.device("cpu"), _dtype(options.get("precision")):
        plain = kind(make)
    trainer(ZeroStrategy(3, bucket_numel=bucket_numel), world_size, **options).fit(plain)
    torch.manual_seed(11 + dist.get_rank())
    late = kind(make, folder)
    trainer(ZeroStrategy(3, bucket_numel=bucket_numel), world_size, **options).fit(late)
    return {
        "sharded when optimizers are made": (plain.seen, late.seen) == ([False], [True]),
        "losses": plain.losses == late.losses and len(plain.losses) == 5,
        "weights": equal(weights(plain), weights(late)),
        "whole after": not any(is_placeholder(p) for p in late.parameters()),
    }


@contextmanager
def _dtype(precision):
    """The default dtype in which Lightning lets a model be built."""
    before = torch.get_default_dtype()
    wanted = {"bf16-true": torch.bfloat16, "64-true": torch.float64}
    torch.set_default_dtype(wanted.get(precision, before))
    yield
    torch.set_default_dtype(before)


def fit_all(folder, world_size, bucket_numel):
    given = (folder, world_size, bucket_numel)
    found = {make.__name__: fit_both(make, *given) for make in MAKERS}
    found["partly"] = fit_both(gpt, *given, kind=Partly)
    found["bf16-true"] = fit_both(layers, *given, precision="bf16-true")
    found["64-true"] = fit_both(gpt, *given, precision="64-true")
    return found


@pytest.mark.parametrize(("world_size", "bucket_numel"), [(2, 300), (4, None)])
def test_fit_equals_that_of_the_model_built_whole(world_size, bucket_numel, tmp_path):
    torch.save(saved_weights(), tmp_path / "weights.pt")
    for found in run_ranks(fit_all, world_size, str(tmp_path), world_size, bucket_numel):
        for name, facts in found.items():
            assert all(facts.values()), (name, facts)


# Orders of calls.


def calls(folder, fits):
    """Fit, test, fit again, save; ``fits`` says whether the whole model fits into memory."""
    if not fits:
        lightning_zero.partition.fits_everywhere = lambda *_: False
    found = {}
    for late in (False, True):
        torch.manual_seed(11)
        module = Tokens(gpt, folder if late else None)
        options = {"enable_checkpointing": False, "default_root_dir": folder}
        first = trainer(ZeroStrategy(3, bucket_numel=300), 2, **options)
        first.fit(module)
        if late:
            found["sharded after fit"] = owner_of(module) is not None
            found["by name"] = bool(module.net.norm.weight.isfinite().all())
        path = f"{folder}/{late}-{fits}.ckpt"
        first.save_checkpoint(path)
        saved = torch.load(path, weights_only=True)
        first.test(module, verbose=False)
        first.fit_loop.epoch_progress.reset()
        first.fit_loop.max_epochs = 2
        first.fit(module)
        second = trainer(ZeroStrategy(3), 2, **options)
        second.test(module, verbose=False)
        with second.strategy.full_params():
            found[late] = weights(module), module.losses, saved
        fresh = Tokens(gpt, folder if late else None)
        third = trainer(ZeroStrategy(3), 2, **options)
        third.test(fresh, ckpt_path=path, verbose=False)
        fourth = trainer(ZeroStrategy(1), 2, **options)  # another stage takes the sharded model
        fourth.test(fresh, ckpt_path=path, verbose=False)
        found[late] += (fresh.losses[:5], fresh.losses[5:])
        bare = Tokens(gpt, folder if late else None)
        if late:
            bare.configure_model()
        bare.load_state_dict(saved["state_dict"])
        found[f"loads {late}"] = equal(weights(bare), saved["state_dict"])
    plain, plain_losses, plain_saved, plain_tests, plain_again = found.pop(False)
    late, late_losses, late_saved, late_tests, late_again = found.pop(True)
    found["weights"] = equal(plain, late)
    found["losses"] = plain_losses == late_losses and len(plain_losses) == 25
    found["saved weights"] = equal(plain_saved["state_dict"], late_saved["state_dict"])
    states = [s["optimizer_states"][0]["state"] for s in (plain_saved, late_saved)]
    found["saved states"] = all(
        torch.equal(states[0][n][key], states[1][n][key]) for n in states[0] for key in states[0][n]
    )
    found["tests"] = plain_tests == late_tests and len(late_tests) == 5
    found["tests at another stage"] = plain_again == late_again == late_tests
    return found


@pytest.mark.parametrize("fits", [True, False])
def test_calls_in_any_order(fits, tmp_path):
    for found in run_ranks(calls, 2, str(tmp_path), fits):
        assert found.pop("sharded after fit") is not fits
        assert all(found.values()), found


# The whole model fits into no process.

BIG_WIDTH, BIG_DEPTH = 1024, 72
BIG_NUMEL = BIG_WIDTH * (BIG_WIDTH + 1)  # of a layer


class Big(pl.LightningModule):
    """Weights of 288 MiB, in layers of 4 MiB; one layer in two is trained with momentum."""

    def __init__(self, path=None, save_path=None):
        super().__init__()
        self.net, self.path, self.save_path = None, path, save_path

    def configure_model(self):
        if self.net is None:
            self.net = nn.Sequential(*[nn.Linear(BIG_WIDTH, BIG_WIDTH) for _ in range(BIG_DEPTH)])

    def on_train_start(self):
        if self.path is not None:  # once more, while it is trained
            strategy = self.trainer.strategy
            strategy.load_model_state_dict(strategy.load_checkpoint(self.path))

    def on_train_end(self):
        if self.save_path is not None:  # while its gradients are in memory
            self.trainer.save_checkpoint(self.save_path)

    def train_dataloader(self):
        data = torch.randn(2, 1, BIG_WIDTH, generator=torch.Generator().manual_seed(1))
        return DataLoader(data, batch_size=None)

    def training_step(self, batch, index):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        groups = [
            {"params": list(self.net[0::2].parameters()), "momentum": 0.9},
            {"params": list(self.net[1::2].parameters())},
        ]
        return torch.optim.SGD(groups, lr=1e-3)


def used_nbytes():
    """What counts against RLIMIT_DATA."""
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"VmData:\s+(\d+) kB", text)[1]) * 1024


def limit_memory(spare_nbytes):
    """Let this process have so much more memory than it has now."""
    gc.collect()
    limit = used_nbytes() + spare_nbytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))


def build_whole(spare_nbytes):
    limit_memory(spare_nbytes)
    try:
        Big().configure_model()
    except (MemoryError, RuntimeError) as error:
        return str(error)
    return "fits"


def big_strategy():
    return ZeroStrategy(3, bucket_numel=BIG_NUMEL, prefetch={"prefetch_numel": 0})


def fit_and_save(path, spare_nbytes):
    """After everything that does not belong to the model was loaded."""
    runner = trainer(big_strategy(), 4)
    runner.fit(Tokens(gpt))
    runner.fit_loop.max_epochs = 2
    limit_memory(spare_nbytes)
    torch.manual_seed(5 + dist.get_rank())
    module = Big(save_path=path)
    runner.fit(module)
    assert owner_of(module) is not None  # it does not fit whole, so it is sharded again
    assert runner.global_step == 7


def fit_sharded(path, spare_nbytes):
    """Fit, save, load and go on with so much memory, but for the file, which is mapped."""
    fit_and_save(path, spare_nbytes)
    limit_memory(spare_nbytes + Path(path).stat().st_size)
    runner = trainer(big_strategy(), 4, max_epochs=3, limit_train_batches=1)
    runner.fit(Big(path), ckpt_path=path)
    assert runner.global_step == 8
    limit_memory(spare_nbytes // 4)
    runner.save_checkpoint(path + "2")


def test_a_model_that_fits_into_no_process(tmp_path):
    full_nbytes = BIG_DEPTH * BIG_NUMEL * 4
    spare_nbytes = int(0.875 * full_nbytes)  # two quarters are weights and gradients, 1/8 momentum
    assert run_ranks(build_whole, 1, 2 * full_nbytes) == ["fits"]
    assert re.search("memory|allocate", run_ranks(build_whole, 1, spare_nbytes)[0])
    path = str(tmp_path / "big.ckpt")
    run_ranks(fit_sharded, 4, path, spare_nbytes)
    torch.manual_seed(5)
    expected = Big()
    expected.configure_model()
    optimizer = expected.configure_optimizers()
    batches = list(expected.train_dataloader())
    for saved_to, used in ((path, batches), (path + "2", batches[:1])):
        for batch in used:
            expected.training_step(batch, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        saved = torch.load(saved_to, weights_only=True, mmap=True)
        assert saved["state_dict"].keys() == expected.state_dict().keys()
        for name, value in expected.state_dict().items():
            assert torch.allclose(saved["state_dict"][name], value, rtol=0, atol=1e-6), name
        states = saved["optimizer_states"][0]["state"]
        kept = {n: s["momentum_buffer"] for n, s in optimizer.state_dict()["state"].items()}
        kept = {n: value for n, value in kept.items() if value is not None}
        assert len(kept) == BIG_DEPTH
        for number, value in kept.items():
            assert torch.allclose(states[number]["momentum_buffer"], value, rtol=0, atol=1e-6)


# An error in configure_model.


class Faulty(Tokens):
    """Fails when its net has been built."""

    def configure_model(self):
        super().configure_model()
        raise ValueError("the configuration names no such model")


class Untrained(Tokens):
    """Fails when its net is sharded."""

    def configure_optimizers(self):
        raise ValueError("no such optimizer")


def faulty(folder):
    module = Faulty(gpt, folder)
    try:
        trainer(ZeroStrategy(3, bucket_numel=300), 2).fit(module)
    except ValueError as error:
        first = str(error)
    module.__class__ = Tokens  # the user mends it, and goes on with the same object
    try:
        trainer(ZeroStrategy(3), 2).fit(module)
    except RuntimeError as error:
        second = str(error)
    module.net = None
    trainer(ZeroStrategy(3), 2).fit(module)
    other = Untrained(gpt, folder)
    try:
        trainer(ZeroStrategy(3), 2).fit(other)
    except ValueError as error:
        third = str(error)
    other.__class__ = Tokens
    trainer(ZeroStrategy(3), 2).fit(other)
    return first, second, third, len(module.losses), len(other.losses)


def test_error_in_configure_model(tmp_path):
    for first, second, third, *steps in run_ranks(faulty, 2, str(tmp_path)):
        assert first == "the configuration names no such model"
        assert "'net.position' has no values" in second
        assert third == "no such optimizer"
        assert steps == [5, 5]
