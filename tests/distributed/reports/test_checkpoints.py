"""Checkpoints: other strategies, frozen weights, and what they cost."""

from __future__ import annotations

import os

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.optim import lr_scheduler

from lightning_zero import ZeroStrategy
from lightning_zero.cli import main
from tests.helpers.cells import STAGES, TIMEOUT_S, AtMost, Cases, every_cell
from tests.helpers.models import weights
from tests.helpers.small import Small, adamw, linear, mlp, noise, parameter, sgd, square

CASES = Cases("checkpoints")


# A21: under another strategy. Other numbers of ranks: tests/distributed/test_restore_matrix.py.


class Scheduled(Small):
    """AdamW with a scheduler by step; the step decides about the data."""

    def __init__(self):
        super().__init__(square, noise(1, 5), adamw(0.05), net=mlp())
        self.data = [rows * 3 for rows in self.data]
        self.loss = lambda m, x: square(m, (m.index + 1) * x)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Counter(Callback):
    """A callback with a state."""

    count = 0

    def on_train_batch_end(self, *_):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def strategies():
    """Whoever is to go on."""
    return {"ddp": DDPStrategy()} | {
        f"stage {stage}": ZeroStrategy(stage, timeout=TIMEOUT_S) for stage in STAGES
    }


def gone_on(user, **options):
    """Three steps, saved; then three more under every strategy."""
    saver = user.trainer(callbacks=[Counter()], strategy=user.strategy(**options))
    saver.fit(Scheduled())
    path = user.folder / "three.ckpt"
    saver.save_checkpoint(path)
    if options:
        saver.strategy.barrier()
        if user.rank == 0:
            assert main(["consolidate", str(path), str(user.folder / "one.ckpt")]) == 0
        saver.strategy.barrier()
    found = {}
    for name, strategy in strategies().items():
        source = user.folder / "one.ckpt" if options and name == "ddp" else path
        counter, module = Counter(), Scheduled()
        player = user.trainer(strategy, callbacks=[counter], max_epochs=2)
        player.fit(module, ckpt_path=source)
        rate = player.optimizers[0].param_groups[0]["lr"]
        found[name] = [*weights(module).values(), counter.count, player.global_step, rate]
    return found


def uninterrupted(user):
    """Six steps under DDP."""
    counter, module = Counter(), Scheduled()
    player = user.trainer(callbacks=[counter], max_epochs=2)
    player.fit(module)
    rate = player.optimizers[0].param_groups[0]["lr"]
    end = [*weights(module).values(), counter.count, player.global_step, rate]
    return dict.fromkeys(strategies(), end)


def resume(name, title, tolerance, **options):
    def run(user):
        chosen = options.get("chosen", {})
        return uninterrupted(user) if user.stage is None else gone_on(user, **chosen)

    ranks = options.get("ranks", 2)
    CASES.add("A21", name, title, run, tolerance=tolerance, ranks=ranks)


resume("everywhere", "Saved here, continued at every stage and by DDP", 0.0)
resume("everywhere_on_one", "The same with one rank", 0.0, ranks=1)
resume("everywhere_on_three", "The same with three ranks", 1e-6, ranks=3)
resume(
    "everywhere_from_a_folder",
    "The same from a sharded checkpoint",
    0.0,
    chosen={"checkpoint": "sharded"},
)


@CASES("A21")
def from_the_middle_of_an_epoch(user):
    """Continued after two of three batches, from a checkpoint of ModelCheckpoint."""
    keeper = ModelCheckpoint(user.folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    player = user.trainer(callbacks=[keeper])
    player.fit(Scheduled())
    player = user.trainer()
    player.fit(module := Scheduled(), ckpt_path=user.folder / "step=2.ckpt")
    return weights(module) | {"steps": player.global_step, "epoch": player.current_epoch}


# A22: frozen weights and buffers.


def half_frozen(seed):
    """A frozen layer, a batch norm and a trained layer."""
    layers = [linear(4, 4, seed=seed), nn.BatchNorm1d(4), linear(4, 4, seed=seed + 1)]
    layers[0].requires_grad_(False)
    module = Small(square, noise(3, 6, 4), sgd(0.1), net=nn.Sequential(*layers))
    module.eval_data = noise(1, 6, 4, seed=8)
    return module


def restored(user, **options):
    """What a model with other random weights has after reading the checkpoint."""
    player = user.trainer(limit_val_batches=0, strategy=user.strategy(**options))
    player.fit(half_frozen(0))
    player.save_checkpoint(user.folder / "half.ckpt")
    module = half_frozen(50)
    user.trainer(strategy=user.strategy(**options)).validate(
        module, ckpt_path=user.folder / "half.ckpt"
    )
    return weights(module) | {"seen": module.seen}


@CASES("A22")
def into_another_model(user):
    """Frozen weights and statistics come back in a model with other random weights."""
    return restored(user)


@CASES("A22", ranks=1)
def into_another_model_on_one_rank(user):
    """The same on one rank."""
    return restored(user)


@CASES("A22")
def from_a_folder(user):
    """The same from a sharded checkpoint."""
    return restored(user) if user.stage is None else restored(user, checkpoint="sharded")


@CASES("A22")
def into_a_plain_module(user):
    """The file has full shapes, and a plain module loads it strictly."""
    player = user.trainer(limit_val_batches=0)
    player.fit(half_frozen(0))
    player.save_checkpoint(user.folder / "half.ckpt")
    state = torch.load(user.folder / "half.ckpt", weights_only=False)["state_dict"]
    plain = half_frozen(50)
    plain.load_state_dict(state, strict=True)
    return weights(plain)


# A23: mostly frozen models.

WIDTH = 100


def adapted():
    """Nine tenths are frozen."""
    frozen = [linear(WIDTH, WIDTH, seed=k).requires_grad_(False) for k in range(9)]
    net = nn.Sequential(*frozen, linear(WIDTH, WIDTH, seed=9))
    return Small(square, noise(3, WIDTH), adamw(0.01), net=net)


@CASES("A23", {"frozen": 0, "missing": 9, "share": AtMost(0.35), "is right": True, "gap": 0.0})
def without_frozen_weights(user):
    """``exclude_frozen_parameters``: a small file that loads on top of the base, and resumes."""
    chosen = {"strategy": user.strategy(exclude_frozen_parameters=True)}
    player = user.trainer(**chosen)
    player.fit(module := adapted())
    path = user.folder / "adapter.ckpt"
    player.save_checkpoint(path)
    state = torch.load(path, weights_only=False)["state_dict"]
    base = adapted()
    answer = base.load_state_dict(state, strict=False)
    resumed = adapted()
    resumed.strict_loading = False
    last = user.strategy(exclude_frozen_parameters=True)
    user.trainer(strategy=last, max_epochs=2).fit(resumed, ckpt_path=path)
    whole = adapted()
    user.trainer(max_epochs=2).fit(whole)
    whole_nbytes = sum(p.numel() * p.element_size() for p in module.parameters())
    return {
        "frozen": sum(name != "net.9.weight" for name in state),
        "missing": len(answer.missing_keys),
        "share": os.path.getsize(path) / whole_nbytes,
        "is right": torch.equal(base.net[9].weight, module.net[9].weight),
        "gap": (resumed.net[9].weight - whole.net[9].weight).abs().max().item(),
    }


class Weighing(Small):
    """Bytes that the dict of a checkpoint alone keeps alive."""

    extra_nbytes = 0

    def on_save_checkpoint(self, checkpoint):
        own = {p.untyped_storage().data_ptr() for p in self.parameters()}
        found = {
            value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
            for value in checkpoint["state_dict"].values()
        }
        self.extra_nbytes = sum(n for pointer, n in found.items() if pointer not in own)


@CASES("A23", {"others": AtMost(0.01)})
def only_rank_0_holds_the_whole(user):
    """While a file is saved, only rank 0 holds tensors for it."""
    base = adapted()
    module = Weighing(square, base.data, base.make_optimizer, net=base.net)
    player = user.trainer()
    player.fit(module)
    player.save_checkpoint(user.folder / "one.ckpt")
    whole_nbytes = sum(p.numel() * p.element_size() for p in module.parameters())
    share = module.extra_nbytes / whole_nbytes
    return {"others": share if user.rank else 0.0}


@CASES("A23", {"names": ["a"], "a": -1.0, "b": 5.0})
def without_frozen_weights_of_one_bucket(user):
    """Frozen and trained parameters of a module that has both itself."""
    module = Small(
        lambda m, x: m.a * m.b / 5,
        optimizer=sgd(1.0),
        a=0.0,
        b=parameter(5.0, requires_grad=False),
    )
    player = user.trainer(strategy=user.strategy(exclude_frozen_parameters=True))
    player.fit(module)
    player.save_checkpoint(user.folder / "one.ckpt")
    state = torch.load(user.folder / "one.ckpt", weights_only=False)["state_dict"]
    return weights(module) | {"names": [*state]}


@every_cell(CASES)
def test_case(outcomes, cell):
    outcomes.check(cell)
