"""What is alive between steps, and what is kept elsewhere."""

from __future__ import annotations

import gc
import weakref

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from tests.helpers.alive import alive_nbytes
from tests.helpers.cells import AtMost, Cases, every_cell
from tests.helpers.small import Small, adamw, linear, mlp, noise, sgd, square

CASES = Cases("memory, and what is kept elsewhere")


# A29: growth. Bytes between steps and within them: tests/distributed/test_memory.py.

WIDTH = 96


class Weighing(Small):
    """Weighs all tensors after two of its steps."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.weighed_nbytes = []

    def on_train_batch_end(self, *_):
        if self.index in (8, 28):
            gc.collect()
            self.weighed_nbytes.append(alive_nbytes())


def deep(steps, **options):
    """Layers, half of them frozen, whose first input needs no gradient."""
    layers = [linear(WIDTH, WIDTH, seed=k).requires_grad_(k % 2 == 0) for k in range(8)]
    optimizer = lambda m: torch.optim.Adam(m.parameters(), lr=1e-3)  # noqa: E731
    data = [[torch.ones(WIDTH)] * steps]
    return Weighing(square, data, optimizer, net=nn.Sequential(*layers), **options)


@CASES("A29", {"grown_nbytes": AtMost(2**12)})
def over_many_steps(user):
    """30 steps, 6 validations and 6 checkpoints: nothing grows."""
    module = deep(30, eval_data=[[torch.ones(WIDTH)]])
    keeper = ModelCheckpoint(user.folder, every_n_train_steps=5, save_top_k=1)
    user.fit(module, val_check_interval=5, callbacks=[keeper])
    early, late = module.weighed_nbytes
    return {"grown_nbytes": late - early}


@CASES("A29", {"alive": 0})
def after_training(user):
    """Nothing of the engine is alive after a fit, once the Trainer is gone."""
    player = user.trainer()
    engines = []

    class Looking(Small):
        def on_train_start(self):
            engines.append(weakref.ref(self.trainer.strategy.engine))

    player.fit(Looking(square, noise(3, 4), sgd(0.1), net=linear(4, 4)))
    del player
    gc.collect()
    return {"alive": sum(reference() is not None for reference in engines)}


@CASES("A29", {"alive": 0})
def activations(user):
    """Outputs of modules are freed with the step, whatever holds the module."""
    kept = []

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = linear(4, 4)

        def forward(self, x):
            out = torch.tanh(self.lin(x))
            kept.append(weakref.ref(out))
            return out

    user.fit(Small(square, noise(5, 4), sgd(0.1), net=nn.Sequential(Watched(), Watched())))
    gc.collect()
    return {"alive": sum(reference() is not None for reference in kept)}


# A31: states in host memory and in files.


def away(user, optimizer=None, **options):
    """Trains, goes on from its own checkpoint, and tells what is left on the device."""
    seen = {}

    class Measured(Small):
        def on_train_batch_end(self, *_):
            measure = getattr(self.trainer.strategy, "measure_model_states", None)
            if measure is not None:
                seen["optimizer_nbytes"] = measure().optimizer_nbytes

    def module():
        return Measured(square, noise(4, 5), optimizer or adamw(), net=mlp())

    saver = ModelCheckpoint(user.folder, filename="half", every_n_train_steps=2, save_top_k=-1)
    accumulated = {"gradient_clip_val": 0.1, **options}
    weights = user.fit(module(), callbacks=[saver], **accumulated)
    path = user.trainer().strategy.broadcast(str(user.folder / "half.ckpt"))
    again = user.fit(module(), ckpt_path=path, **accumulated)
    gaps = [(weights[name] - again[name]).abs().max() for name in weights]
    return {**weights, "gap": max(gaps), "on_device": seen.get("optimizer_nbytes", 0)}


CPU, BOTH = {"offload_optimizer": "cpu"}, {"offload_parameters": "cpu"}


@CASES("A31", tolerance=1e-6, zero=CPU)
def offloaded(user):
    """Optimizer and gradients in host memory, a checkpoint within."""
    return away(user)


@CASES("A31", tolerance=1e-6, zero=CPU, ranks=3)
def offloaded_on_three_ranks(user):
    """The same with momentum, on three ranks."""
    return away(user, sgd(0.1, momentum=0.9))


@CASES("A31", tolerance=1e-6, zero=CPU)
def offloaded_with_autocast(user):
    """The same with bf16 autocast."""
    return away(user, precision="bf16-mixed")


@CASES("A31", tolerance=1e-6, zero=BOTH, refused={1: "needs stage 3", 2: "needs stage 3"})
def parameters_offloaded(user):
    """Parameters in host memory, too, which is for stage 3 alone."""
    return away(user)


@CASES("A31", tolerance=1e-6)
def offloaded_to_a_folder(user):
    """The optimizer's states in files, of which none is left."""
    folder = user.folder / f"states-{user.rank}"
    folder.mkdir()
    user.strategy_options = {"offload_optimizer": "nvme", "nvme_path": folder}
    return {**away(user), "left": len(list(folder.iterdir()))}


@CASES("A31", error="nvme_path='states' has no effect", ddp={})
def a_folder_alone(user):
    """A folder and nothing to put there."""
    return away(user, user.strategy(nvme_path="states"))


FLOW = {"topk_ratio": 0.5, "update_interval": 1, "select_strategy": "step"}


@CASES("A32", tolerance=1e-6, zero=CPU | {"zenflow": FLOW})
def important_columns(user):
    """Important columns on the device, the rest on the host, a checkpoint within."""
    return {**away(user), "on_device": 0}  # they are there, and under DDP all is


# A32: options of later versions.

for name, title in {
    "hpz_group_size": "A second copy of parameters within a node",
    "quantized_weights": "Quantized transfers of parameters",
    "quantized_gradients": "Quantized transfers of gradients",
}.items():
    CASES.not_offered("A32", name, title, **{name: 2})


@every_cell(CASES)
def test_case(outcomes, cell):
    outcomes.check(cell)
