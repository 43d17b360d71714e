"""What is trained changes in the middle of a fit."""

from __future__ import annotations

import torch
from lightning.pytorch.callbacks import BaseFinetuning

from tests.helpers.cells import Cases, every_cell
from tests.helpers.models import weights
from tests.helpers.small import Small, linear, parameter, sgd

CASES = Cases("what is trained changes")

# The mean over the ranks is 1 in every step.
OF_TWO = [[0.5] * 4, [1.5] * 4]
OF_THREE = [[0.5] * 4, [1.0] * 4, [1.5] * 4]


class Thawing(Small):
    """``b`` is frozen for two steps."""

    def __init__(self, data=OF_TWO, optimizer=None, steps=2):
        loss = lambda m, x: (m.a + m.b) * x  # noqa: E731
        frozen = parameter(1.0, requires_grad=False)
        super().__init__(loss, data, optimizer or sgd(0.1), a=1.0, b=frozen)
        self.steps = steps

    def on_train_batch_start(self, batch, index):
        self.b.requires_grad_(self.trainer.global_step >= self.steps)


@CASES("A24", {"a": 0.6, "b": 0.8}, tolerance=1e-6)
def unfrozen(user):
    """A parameter is unfrozen after two of four steps; ranks have other data."""
    return user.fit(Thawing())


@CASES("A24", {"a": 0.6, "b": 0.8}, tolerance=1e-6, ranks=3)
def unfrozen_on_three_ranks(user):
    """The same on three ranks."""
    return user.fit(Thawing(OF_THREE))


@CASES("A24", {"a": 0.8, "b": 0.9}, tolerance=1e-6)
def unfrozen_in_windows(user):
    """The same with two micro-batches to a step, unfrozen after the first step."""
    return user.fit(Thawing(steps=1), accumulate_grad_batches=2)


@CASES("A24", {"a": 0.2, "b": 0.4}, tolerance=1e-6)
def resumed(user):
    """Saved after the change, resumed by a module that begins with the parameter frozen."""
    player = user.trainer()
    player.fit(Thawing())
    player.save_checkpoint(user.folder / "one.ckpt")
    return user.fit(Thawing(), ckpt_path=user.folder / "one.ckpt", max_epochs=2)


class Thaw(BaseFinetuning):
    """The body is trained from the second epoch on, in a group of its own."""

    def freeze_before_training(self, module):
        self.freeze(module.body)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.body, optimizer, lr=0.1)


@CASES("A24", {"body.weight": 0.8, "head.weight": 0.6}, tolerance=1e-6)
def base_finetuning(user):
    """Lightning's BaseFinetuning adds a group in the second epoch."""
    module = Small(
        lambda m, x: m.body(x) + m.head(x),
        [rows[:2] for rows in OF_TWO],
        lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1),
        body=linear(1, 1, 1.0),
        head=linear(1, 1, 1.0),
    )
    return user.fit(module, max_epochs=2, callbacks=[Thaw()])


@CASES("A24", {"w": -0.4, "extra.weight": 0.6, "in file": 0.6}, tolerance=1e-6)
def attached(user):
    """A layer is attached when training starts: it is trained, averaged and saved."""

    class Growing(Small):
        def on_train_start(self):
            self.extra = linear(1, 1, 1.0)
            group = {"params": list(self.extra.parameters())}
            self.trainer.optimizers[0].add_param_group(group)

    player = user.trainer()
    player.fit(module := Growing(lambda m, x: m.w * x + m.extra(x), OF_TWO, sgd(0.1), w=0.0))
    player.save_checkpoint(user.folder / "one.ckpt")
    file = torch.load(user.folder / "one.ckpt", weights_only=False)["state_dict"]
    return weights(module) | {"in file": file["extra.weight"].item()}


@every_cell(CASES)
def test_case(outcomes, cell):
    outcomes.check(cell)
