"""Checkpoints, plugins and names as Lightning's users know them from DDP."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_zero import ZeroStrategy
from tests.helpers.cells import Cases, OnSomeRank, PerRank, every_cell
from tests.helpers.models import weights
from tests.helpers.small import Small, adamw, linear, mlp, noise, product, sgd, square

CASES = Cases("files, plugins and names")
ROW = "files"


def usual(steps=3, **options):
    """A small network with Adam, and data for evaluation."""
    options = {"eval_data": noise(2, 5, seed=3), **options}
    return Small(square, noise(steps, 5), adamw(0.05), net=mlp(), **options)


def read(path):
    return torch.load(path, weights_only=False, map_location="cpu")


# What a file holds.


@CASES(ROW)
def layout(user):
    """Keys, order, shapes and numbers of a file are those of DDP's."""
    player = user.trainer()
    player.fit(usual())
    player.save_checkpoint(user.folder / "one.ckpt")
    file = read(user.folder / "one.ckpt")
    (optimizer,) = file["optimizer_states"]
    states = optimizer["state"]
    return {
        "keys": sorted(file),
        "names": list(file["state_dict"]),
        "numbers": [group["params"] for group in optimizer["param_groups"]],
        "states": [[str(number), *sorted(states[number])] for number in states],
        "values": [state[key] for state in states.values() for key in sorted(state)],
        "progress": str(file["loops"]["fit_loop"]["epoch_loop.batch_progress"]),
        "version": file["pytorch-lightning_version"],
    }


@CASES(ROW, {"whole": True})
def whole_on_rank_0(user):
    """In ``on_save_checkpoint`` while training, rank 0 has all values, as the plain module has."""

    class Looking(Small):
        def on_save_checkpoint(self, checkpoint):
            held = checkpoint["state_dict"]
            names = list(usual().state_dict())
            self.is_whole = list(held) == names and all(v.isfinite().all() for v in held.values())

        def on_train_batch_end(self, *_):
            self.trainer.save_checkpoint(user.folder / "one.ckpt")

    module = Looking(square, noise(3, 5), adamw(), net=mlp())
    user.fit(module)
    return {"whole": bool(module.is_whole) or user.rank > 0}


@CASES(ROW)
def weights_alone(user):
    """``save_weights_only``: no optimizer in it; it tests and predicts as the model did."""
    player = user.trainer()
    player.fit(usual())
    player.save_checkpoint(user.folder / "one.ckpt", weights_only=True)
    module = usual()
    last = user.trainer()
    last.test(module, ckpt_path=user.folder / "one.ckpt")
    last.predict(module, ckpt_path=user.folder / "one.ckpt")
    return {"keys": sorted(read(user.folder / "one.ckpt")), "seen": module.seen}


@CASES(ROW, error="optimizer")
def weights_alone_cannot_resume(user):
    """A fit cannot go on from weights alone: an error on all ranks."""
    player = user.trainer()
    player.fit(usual())
    player.save_checkpoint(user.folder / "one.ckpt", weights_only=True)
    return user.fit(usual(), ckpt_path=user.folder / "one.ckpt", max_epochs=2)


@CASES(ROW, {"note": 7, "extra": 1.5, "gone": False})
def changed_by_hooks(user):
    """What ``on_save_checkpoint`` adds and removes is what is written, and read."""

    class Noting(Small):
        note = None

        def on_save_checkpoint(self, checkpoint):
            checkpoint["note"] = 7
            checkpoint["state_dict"]["extra"] = torch.tensor(1.5)
            checkpoint["state_dict"].pop("gone", None)

        def on_load_checkpoint(self, checkpoint):
            self.note = checkpoint["note"]
            checkpoint["state_dict"]["gone"] = torch.zeros(1)
            self.extra = checkpoint["state_dict"].pop("extra")

    def make():
        return Noting(product, w=0.0, gone=3.0, optimizer=lambda m: torch.optim.SGD([m.w], lr=1.0))

    player = user.trainer()
    player.fit(make())
    player.save_checkpoint(user.folder / "one.ckpt")
    module = make()
    user.fit(module, ckpt_path=user.folder / "one.ckpt", max_epochs=2)
    is_in_file = "gone" in read(user.folder / "one.ckpt")["state_dict"]
    return {"note": module.note, "extra": module.extra, "gone": is_in_file}


class Strange:
    """Nothing that a checkpoint may hold without a word."""


class Configured(Small):
    """Built in ``configure_model`` from its hyperparameters."""

    def __init__(self, width, options):
        super().__init__(square, noise(2, width), adamw(), eval_data=noise(2, width, seed=3))
        self.save_hyperparameters()
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = mlp(self.hparams.width)


@CASES(ROW)
def loaded_from_checkpoint(user):
    """``load_from_checkpoint`` of a module with hyperparameters and ``configure_model``."""
    player = user.trainer()
    player.fit(Configured(5, Strange()))
    player.save_checkpoint(user.folder / "one.ckpt")
    module = Configured.load_from_checkpoint(user.folder / "one.ckpt", weights_only=False)
    return weights(module)


@CASES(ROW, error="weights_only|weights only|Weights only")
def objects_in_a_file(user):
    """Objects in a file are not read unless one says so: an error on all ranks, as by DDP."""
    player = user.trainer()
    player.fit(Configured(5, Strange()))
    player.save_checkpoint(user.folder / "one.ckpt")
    user.trainer().test(Configured(5, None), ckpt_path=user.folder / "one.ckpt", weights_only=True)
    return {}


@CASES(ROW)
def objects_in_a_file_are_asked_for(user):
    """And are read where one does."""
    player = user.trainer()
    player.fit(Configured(5, Strange()))
    player.save_checkpoint(user.folder / "one.ckpt")
    module = Configured(5, None)
    user.trainer(max_epochs=2).fit(module, ckpt_path=user.folder / "one.ckpt", weights_only=False)
    return weights(module)


@CASES(ROW)
def compiled_names(user):
    """A compiled part has its plain name in the file, which a plain module reads."""
    module = usual()
    module.net[2] = torch.compile(module.net[2], backend="eager")
    player = user.trainer()
    player.fit(module)
    player.save_checkpoint(user.folder / "one.ckpt")
    file = read(user.folder / "one.ckpt")["state_dict"]
    return {name.replace("_orig_mod.", ""): value for name, value in file.items()}


# ModelCheckpoint.


class Scored(Small):
    """A score with its best in the second epoch."""

    def validation_step(self, batch, index):
        score = float((self.current_epoch - 1) ** 2 + self.global_rank)
        self.log("score", score, sync_dist=True)


def kept(user, **options):
    keeper = ModelCheckpoint(user.folder, monitor="score", filename="{epoch}", **options)
    module = Scored(square, noise(2, 5), adamw(), net=mlp(), eval_data=[[1.0]])
    player = user.trainer(max_epochs=4, callbacks=[keeper])
    player.fit(module)
    tested = usual()
    player.test(tested, ckpt_path="best")
    return {
        "files": sorted(path.name for path in user.folder.iterdir()),
        "best": Path(keeper.best_model_path).name,
        "score": float(keeper.best_model_score),
        "seen": tested.seen,
    }


@CASES(ROW)
def best_two_and_last(user):
    """The two best and the last are kept, the rest is removed; ``test`` takes the best."""
    return kept(user, save_top_k=2, save_last=True)


@CASES(ROW)
def best_and_a_link(user):
    """``save_last="link"``."""
    return kept(user, save_top_k=1, save_last="link")


@CASES(ROW)
def best_folders(user):
    """The same with sharded checkpoints: folders are kept, removed and tested alike."""
    if user.stage is not None:
        user.strategy_options = {"checkpoint": "sharded"}
    return kept(user, save_top_k=2, save_last=True)


@CASES(ROW)
def one_path_again_and_again(user):
    """One path that is saved to after each step holds the last."""

    class Saving(Small):
        def on_train_batch_end(self, *_):
            self.trainer.save_checkpoint(user.folder / "one.ckpt")

    user.fit(Saving(square, noise(3, 5), adamw(), net=mlp()))
    file = read(user.folder / "one.ckpt")
    return {**file["state_dict"], "steps": file["global_step"]}


# What is there already.


def saved_over(user, first, second):
    """Save twice to one path."""
    path = user.folder / "one.ckpt"
    for form in (first, second):
        player = user.trainer(user.strategy(checkpoint=form))
        player.fit(module := usual())
        player.save_checkpoint(path)
        player.strategy.barrier()
    tested = usual()
    user.trainer().test(tested, ckpt_path=path)
    direct = usual()
    direct.load_state_dict(module.state_dict())
    with torch.no_grad():
        rows = direct.eval_data[user.rank]
        wanted = [square(direct, row).item() for row in rows]
    return {"is a file": path.is_file(), "right": tested.seen == wanted}


FORMS = ("consolidated", "sharded")
NOT_OVER = "cannot take the place of a folder"
for first in FORMS:
    for second in FORMS:
        CASES.add(
            ROW,
            f"{second}_over_{first}",
            f"A {second} checkpoint in the place of a {first} one",
            lambda user, first=first, second=second: saved_over(user, first, second),
            {"is a file": second == "consolidated", "right": True},
            error=NOT_OVER if (first, second) == FORMS[::-1] else None,
        )


@CASES(ROW, error=NOT_OVER)
def over_a_foreign_folder(user):
    """A folder that is no checkpoint is left alone: an error on all ranks."""
    (user.folder / "one.ckpt").mkdir(exist_ok=True)
    (user.folder / "one.ckpt" / "thesis.txt").touch()
    player = user.trainer()
    player.fit(usual())
    player.save_checkpoint(user.folder / "one.ckpt")
    return {}


@CASES(ROW, error="nowhere.ckpt")
def path_that_does_not_exist(user):
    """An unknown path is an error on all ranks, in fit."""
    return user.fit(usual(), ckpt_path=user.folder / "nowhere.ckpt")


@CASES(ROW, error="nowhere.ckpt")
def path_that_does_not_exist_in_test(user):
    """And in test."""
    user.trainer().test(usual(), ckpt_path=user.folder / "nowhere.ckpt")
    return {}


@CASES(ROW, {"told": OnSomeRank(1), "seen": PerRank([[1.0, 0.0], [0.0, 0.0]])})
def another_number_of_optimizers(user):
    """State of one optimizer for two: the first goes on by name, the second starts, as is told."""

    class Two(Small):
        automatic_optimization = False

        def configure_optimizers(self):
            halves = self.net[0].parameters(), self.net[2].parameters()
            return [torch.optim.Adam(half) for half in halves]

        def on_train_start(self):
            for optimizer, layer in zip(self.optimizers(), (self.net[0], self.net[2]), strict=True):
                state = self.trainer.strategy.optimizer_state(optimizer)["state"]
                self.seen.append(float(state[0]["step"]) if state else 0.0)
                assert layer.weight.shape == (5, 5)

    player = user.trainer()
    player.fit(usual(steps=1))
    player.save_checkpoint(user.folder / "one.ckpt")
    module = Two(square, noise(1, 5), net=mlp())
    user.trainer(max_epochs=2).fit(module, ckpt_path=user.folder / "one.ckpt")
    return {"told": user.said("state of 1 optimizer"), "seen": module.seen}


# Plugins and names.


class Watching(TorchCheckpointIO):
    """A user's own plugin: knows no remote storage, but keeps what it was asked for."""

    def __init__(self, folder):
        self.folder, self.asked = folder, []

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.asked.append([str(path), str(storage_options)])
        super().save_checkpoint(checkpoint, self.folder / "here.ckpt")


@CASES(ROW, {"asked": PerRank([[["gs://bucket/a/one.ckpt", "{'speed': 1}"]], []]), "there": True})
def plugin_and_remote_path(user):
    """A CheckpointIO of one's own gets the path as it is, and ``storage_options``."""
    plugin = Watching(user.folder)
    player = user.trainer(plugins=[plugin])
    player.fit(usual())
    player.save_checkpoint("gs://bucket/a/one.ckpt", storage_options={"speed": 1})
    return {"asked": plugin.asked, "there": (user.folder / "here.ckpt").is_file()}


@CASES(ROW)
def written_in_a_thread(user):
    """AsyncCheckpointIO: every file has the weights of its own step."""
    keeper = ModelCheckpoint(user.folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    user.fit(usual(), callbacks=[keeper], plugins=[AsyncCheckpointIO()])
    paths = sorted(user.folder.iterdir()) if user.rank == 0 else ()  # the others do not wait
    files = {path.stem: read(path) for path in paths}
    return {
        f"{name} {key}": value
        for name, file in files.items()
        for key, value in file["state_dict"].items()
    }


@CASES(ROW, {"kind": True, "numel": 7, "w": -2.5, "asked": PerRank([1, 0])})
def own_name(user):
    """A name of one's own in the registry, with arguments, beside a plugin."""
    StrategyRegistry.register(
        "mine", ZeroStrategy, override=True, stage=user.stage, bucket_numel=7, timeout=8
    )
    plugin = Watching(user.folder)
    player = user.trainer("mine", plugins=[plugin])
    player.fit(module := Small(product, [[1.0], [4.0]], w=0.0))
    player.save_checkpoint(user.folder / "one.ckpt")
    StrategyRegistry.remove("mine")
    strategy = player.strategy
    return {
        "kind": type(strategy) is ZeroStrategy,
        "numel": strategy.options.bucket_numel,
        "w": module.w,
        "asked": len(plugin.asked),
    }


class Forgetful(ZeroStrategy):
    """A subclass that leaves the optimizer's state where it is."""

    lightning_restore_optimizer = False


class ForgetfulDDP(DDPStrategy):
    lightning_restore_optimizer = False


@CASES(ROW)
def optimizer_is_not_restored(user):
    """A subclass with ``lightning_restore_optimizer = False`` begins with a fresh optimizer."""
    player = user.trainer()
    player.fit(usual())
    player.save_checkpoint(user.folder / "one.ckpt")
    strategy = ForgetfulDDP() if user.stage is None else Forgetful(user.stage, timeout=8)
    player = user.trainer(strategy, max_epochs=2)
    player.fit(module := usual(), ckpt_path=user.folder / "one.ckpt")
    return weights(module)


@CASES(ROW, tolerance=1e-6)
def metrics_of_a_reloaded_model(user):
    """``test`` gives the same before and after a reload, by manual optimization, too."""

    class Manual(Small):
        automatic_optimization = False

        def training_step(self, batch, index):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(square(self, batch))
            optimizer.step()

    found = {}
    for kind, options in ((Small, {"accumulate_grad_batches": 2}), (Manual, {})):
        first, second = (
            kind(square, noise(3, 5), adamw(), net=mlp(), eval_data=noise(2, 5, seed=3))
            for _ in range(2)
        )
        player = user.trainer(limit_val_batches=0, **options)
        player.fit(first)
        player.save_checkpoint(user.folder / f"{kind.__name__}.ckpt")
        player.test(first)
        user.trainer().test(second, ckpt_path=user.folder / f"{kind.__name__}.ckpt")
        found[kind.__name__] = first.seen
        found[f"{kind.__name__} again"] = [
            a == b for a, b in zip(first.seen, second.seen, strict=True)
        ]
    return found


@CASES(ROW)
def engine_in_fit_only(user):
    """The module is its old self after a fit: no hooks, plain containers, whole weights."""
    module = Small(square, noise(2, 5), sgd(0.1), net=mlp(), lin=linear(2, 2))
    before = describe(module)
    user.fit(module)
    return {"same": describe(module) == before, **weights(module)}


def describe(module):
    """Everything that is installed on a module and its parameters."""
    found = []
    for part in module.modules():
        hooks = (part._forward_hooks, part._forward_pre_hooks, part._state_dict_pre_hooks)
        found.append([type(part).__name__, type(part._parameters).__name__, *map(len, hooks)])
    for name, p in module.named_parameters():
        extra = sorted(vars(p)) if hasattr(p, "__dict__") else []
        found.append([name, list(p.shape), p.is_leaf, list(p.stride()), *extra])
    return found


@every_cell(CASES)
def test_case(outcomes, cell):
    outcomes.check(cell)
