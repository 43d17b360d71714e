"""Several optimizers, groups, schedulers, and optimizers that need whole tensors."""

from __future__ import annotations

import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.optim import lr_scheduler

from tests.helpers.cells import Cases, every_cell
from tests.helpers.models import weights
from tests.helpers.small import Small, linear, mlp, noise, square

CASES = Cases("optimizers, groups and schedulers")


# A15: two optimizers.


class Players(Small):
    """g wants ``d(g(x))`` high, d wants it low and ``d(2x)`` high."""

    automatic_optimization = False

    def __init__(self, batches=2, **options):
        layers = {"g": linear(1, 1, 1.0), "d": linear(1, 1, 1.0)}
        super().__init__(lambda m, x: x, [[1.0] * batches], **layers)
        self.options = {"lr": 0.1, **options}

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), **self.options) for part in (self.g, self.d)]

    def training_step(self, batch, index):
        first, second = self.optimizers()
        with self.playing(first):
            self.move(first, -self.d(self.g(batch)))
        with self.playing(second):
            self.move(second, self.d(self.g(batch).detach()) - self.d(2 * batch))

    def playing(self, optimizer):
        return optimizer.toggle_model()

    def move(self, optimizer, loss):
        optimizer.zero_grad()
        self.manual_backward(loss.sum())
        optimizer.step()


def by_formula(batches, momentum=0.0):
    """The gradient of g is -d, that of d is g - 2."""
    g = d = 1.0
    g_moment = d_moment = 0.0
    for _ in range(batches):
        g_moment = momentum * g_moment - d
        g -= 0.1 * g_moment
        d_moment = momentum * d_moment + g - 2
        d -= 0.1 * d_moment
    return {"g.weight": g, "d.weight": d}


@CASES("A15", {"g.weight": 1.209, "d.weight": 1.1691}, tolerance=1e-6)
def two_players(user):
    """Two optimizers in turn, each moves its own weights only."""
    return user.fit(Players())


@CASES("A15", lambda: {**by_formula(4, 0.9), "states": 2}, tolerance=1e-6)
def two_players_resumed(user):
    """With momentum: both states are saved, and both come back."""
    player = user.trainer()
    player.fit(Players(momentum=0.9))
    player.save_checkpoint(user.folder / "two.ckpt")
    module = Players(momentum=0.9)
    trained = user.fit(module, ckpt_path=user.folder / "two.ckpt", max_epochs=2)
    file = torch.load(user.folder / "two.ckpt", weights_only=False)
    return trained | {"states": len(file["optimizer_states"])}


@CASES("A15", lambda: by_formula(2), ranks=3, tolerance=1e-6)
def two_players_toggled(user):
    """With ``toggle_optimizer``, on three ranks."""

    class Toggling(Players):
        def training_step(self, batch, index):
            first, second = self.optimizers()
            for optimizer in (first, second):
                self.toggle_optimizer(optimizer)
                score = self.d(self.g(batch))
                if optimizer is first:
                    self.move(optimizer, -score)
                else:
                    self.move(optimizer, self.d(self.g(batch).detach()) - self.d(2 * batch))
                self.untoggle_optimizer(optimizer)

    return user.fit(Toggling())


@CASES("A15")
def seldom_and_often(user):
    """The second optimizer steps at every second batch only; both clip by norm; Adam."""

    class Uneven(Players):
        def configure_optimizers(self):
            return [torch.optim.Adam(part.parameters(), lr=0.1) for part in (self.g, self.d)]

        def training_step(self, batch, index):
            first, second = self.optimizers()
            with self.playing(first):
                self.move(first, -self.d(self.g(batch)))
            if index % 2:
                with self.playing(second):
                    self.move(second, self.d(self.g(batch).detach()) - self.d(2 * batch))

    return user.fit(Uneven(batches=5))


# A20: groups and schedulers.


def two_rates(module):
    return torch.optim.SGD([{"params": [module.a], "lr": 0.1}, {"params": [module.b], "lr": 1.0}])


def total(module, batch):
    return module.a + module.b


@CASES("A20", {"a": -0.1, "b": -1.0})
def learning_rates(user):
    """Two groups with rates of their own."""
    return user.fit(Small(total, optimizer=two_rates, a=0.0, b=0.0))


@CASES("A20", {"a": 0.89, "b": 0.90})
def decays(user):
    """Two groups with decays of their own."""

    def groups(module):
        pairs = zip(module.parameters(), (0.1, 0.0), strict=True)
        decayed, other = ({"params": [p], "weight_decay": decay} for p, decay in pairs)
        return torch.optim.AdamW([decayed, other], lr=0.1)

    return user.fit(Small(total, optimizer=groups, a=1.0, b=1.0))


class Scheduled(Small):
    """With a scheduler, stepped as Lightning is told to."""

    schedule = staticmethod(lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda k: 0.5**k))
    told = {"interval": "step"}

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": self.schedule(optimizer), **self.told}]


@CASES("A20", {"a": -0.15, "b": -1.5, "rates": [0.025, 0.25], "seen": [[0.1, 0.05], [1.0, 0.5]]})
def one_scheduler_step_for_each_step(user):
    """A scheduler steps once per optimizer step; LearningRateMonitor shows both groups."""
    monitor = LearningRateMonitor("step")
    player = user.trainer(
        accumulate_grad_batches=2,
        callbacks=[monitor],
        logger=CSVLogger(user.folder),
        log_every_n_steps=1,
    )
    player.fit(module := Scheduled(total, [[1.0] * 4], two_rates, a=0.0, b=0.0))
    seen = [list(dict.fromkeys(rates)) for rates in monitor.lrs.values()]
    rates = player.lr_scheduler_configs[0].scheduler.get_last_lr()
    return {**weights(module), "rates": rates, "seen": seen}


def interleaved():
    def groups(module):
        biases = [p for p in module.parameters() if p.dim() == 1]
        matrices = [p for p in module.parameters() if p.dim() == 2]
        return torch.optim.SGD(
            [{"params": biases, "lr": 0.5}, {"params": matrices}], lr=0.05, momentum=0.9
        )

    return Small(square, noise(4, 5), groups, net=mlp())


@CASES("A20")
def groups_interleaved(user):
    """Groups that take turns in the order of parameters."""
    return user.fit(interleaved())


@CASES("A20", ranks=3, tolerance=1e-6, zero={"bucket_numel": 10})
def groups_interleaved_on_three_ranks(user):
    """The same with small buckets on three ranks."""
    return user.fit(interleaved())


def cyclic(optimizer):
    """Changes the momentum of each group, too."""
    return lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=8)


@CASES("A20")
def momentum_schedule(user):
    """OneCycleLR, which sets rates and momenta of both groups."""

    class Cyclic(Scheduled):
        schedule = staticmethod(cyclic)

    module = Cyclic(square, noise(4, 5), interleaved().make_optimizer, net=mlp())
    return user.fit(module, max_epochs=2)


@CASES("A20")
def plateau(user):
    """ReduceLROnPlateau on a metric of all ranks."""

    class Plateau(Scheduled):
        schedule = staticmethod(
            lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.25, patience=0)
        )
        told = {"monitor": "watched"}

        def validation_step(self, batch, index):
            self.log("watched", float(self.global_rank), sync_dist=True)

    module = Plateau(square, noise(2, 5), interleaved().make_optimizer, net=mlp())
    module.eval_data = [[1.0]]
    player = user.trainer(max_epochs=3)
    player.fit(module)
    return weights(module) | {"rate": player.optimizers[0].param_groups[0]["lr"]}


# A27: optimizers that need whole tensors.


class Normalized(torch.optim.Optimizer):
    """Moves each parameter by ``lr`` along its gradient."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])
        return loss


def normalized():
    loss = lambda m, x: m.w * torch.tensor([3.0, 4.0])  # noqa: E731
    return Small(loss, optimizer=lambda m: Normalized(m.parameters()), w=[0.0, 0.0])


WHOLE = {"shard_by": "tensor"}


@CASES("A27", {"w": [-0.6, -0.8]}, zero=WHOLE)
def normalized_update(user):
    """An optimizer of one's own that divides by the norm, with ``shard_by="tensor"``."""
    return user.fit(normalized())


@CASES("A27", error="Normalized.*shard_by='tensor'")
def normalized_update_on_slices(user):
    """The same without: refused at set-up, by name."""
    return user.fit(normalized())


def factored(make):
    net = nn.Sequential(linear(6, 5, seed=1), nn.Tanh(), linear(5, 3, seed=2))
    return Small(square, noise(4, 6), lambda m: make(m.parameters()), net=net)


def adafactor(parameters):
    return torch.optim.Adafactor(parameters, lr=0.1)


def muon(parameters):
    return torch.optim.Muon(parameters, lr=0.1)


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)


for make in (adafactor, muon):
    name = make.__name__.capitalize()
    run = lambda user, make=make: user.fit(factored(make))  # noqa: E731
    CASES.add("A27", make.__name__, f"{name} with whole tensors", run, zero=WHOLE)
    CASES.add(
        "A27",
        f"{make.__name__}_on_slices",
        f"{name} without them is refused at set-up",
        run,
        error=f"{name}.*shard_by='tensor'",
    )
CASES.add(
    "A27",
    "lbfgs",
    "LBFGS, which runs the closure several times, is refused at set-up",
    lambda user: user.fit(factored(lbfgs)),
    error="LBFGS",
)


@every_cell(CASES)
def test_case(outcomes, cell):
    outcomes.check(cell)
