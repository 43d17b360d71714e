"""torch.compile at every stage: equal losses, and no compilation after the first steps."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_zero import ZeroStrategy
from tests.helpers.models import Language, difference, trainer, weights
from tests.helpers.spawn import run_ranks


class Counting:
    """A backend that runs the graph as it is, and counts how often it was asked to."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        self.count += 1
        return aot_eager(graph, inputs)


class Counted(Language):
    def __init__(self, backend, **options):
        super().__init__(**options)
        self.backend, self.compiled = backend, []

    def on_train_batch_end(self, *_):
        self.compiled.append(self.backend.count)


def wrapped_blocks(module, backend):
    for index, block in enumerate(module.model.blocks):
        module.model.blocks[index] = torch.compile(block, backend=backend)
    return module


def blocks_in_place(module, backend):
    for block in module.model.blocks:
        block.compile(backend=backend)
    return module


def wrapped_model(module, backend):
    module.model = torch.compile(module.model, backend=backend)
    return module


def whole(module, backend):
    return torch.compile(module, backend=backend)


def nothing(module, backend):
    return module


WAYS = {f.__name__: f for f in (wrapped_blocks, blocks_in_place, wrapped_model, whole)}
STAGES = {
    "wrapped_blocks": (1, 2, 3),
    "whole": (1, 2, 3),
    "blocks_in_place": (3,),
    "wrapped_model": (3,),
}


def fitted(strategy, way, **options):
    torch.compiler.reset()
    backend = Counting()
    module = Counted(backend, steps=5)
    fit = trainer(strategy, 2, limit_val_batches=1, val_check_interval=2, **options)
    fit.fit(way(module, backend))
    names = {name.replace("_orig_mod.", ""): value for name, value in weights(module).items()}
    return module.losses, module.val_losses, names, module.compiled


def compiled_fits(way):
    expected = fitted(DDPStrategy(), WAYS[way] if way == "whole" else nothing)
    return expected, {
        stage: fitted(ZeroStrategy(stage, bucket_numel=1000), WAYS[way]) for stage in STAGES[way]
    }


@pytest.mark.parametrize("way", WAYS)
def test_compiled_modules_train_as_eager_ones(way):
    for (losses, val_losses, trained, usual), found in run_ranks(compiled_fits, 2, way):
        for stage, (got, got_val, got_trained, compiled) in found.items():
            assert got == pytest.approx(losses, rel=1e-5), (stage, got, losses)
            assert got_val == pytest.approx(val_losses, rel=1e-5), stage
            assert difference(got_trained, trained) <= 1e-5, stage
            assert compiled[0] > 0, stage
            if way == "whole":  # the step keeps its losses in a list, which is new each time
                assert compiled == usual, (stage, compiled, usual)
            else:
                assert compiled[-1] == compiled[2], (stage, compiled)  # after one validation


def live_in_forward(way):
    """Most buckets that are whole at once in a forward."""
    # Nothing is kept or fetched for backward: what is there at the end was not released.
    lean = {"prefetch_numel": 0, "reuse_distance_numel": 0}
    strategy = ZeroStrategy(3, bucket_numel=1000, prefetch=lean)
    seen = []

    class Looking(Counted):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            residency = strategy.engine.coordinator.residency
            total = sum(bucket.layout.padded_numel for bucket in residency.buckets.values())
            seen.append(residency.live_numel / total)
            return loss

    module = Looking(Counting(), steps=3)
    trainer(strategy, 2).fit(WAYS[way](module, module.backend))
    return seen[-1]


def test_wrappers_are_released_one_by_one():
    """At the end of the forward little is there; what is compiled from within is all there."""
    assert max(run_ranks(live_in_forward, 2, "wrapped_blocks")) < 0.7
    assert min(run_ranks(live_in_forward, 2, "blocks_in_place")) > 0.7
