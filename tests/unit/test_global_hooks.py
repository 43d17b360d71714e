"""Hooks of the whole process: an engine that is collected while torch runs through them."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.modules.module import (
    _global_module_registration_hooks,
    _global_parameter_registration_hooks,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_zero import ShardGroups, ZeroEngine, ZeroOptions
from tests.helpers.limits import HANG_S
from tests.helpers.single import adamw, make_model


def step():
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight], lr=1.0).step()


def register_parameter():
    nn.Module().register_parameter("weight", nn.Parameter(torch.ones(2)))


def register_module():
    nn.Module().inner = nn.Module()


RUNS = {  # what runs through hooks, and how one of them is registered
    "before a step": (step, register_optimizer_step_pre_hook),
    "after a step": (step, register_optimizer_step_post_hook),
    "parameter": (register_parameter, register_module_parameter_registration_hook),
    "module": (register_module, register_module_module_registration_hook),
}


def hooks():
    """How many there are of each kind."""
    return (
        *(len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)),
        *(len(_global_parameter_registration_hooks), len(_global_module_registration_hooks)),
    )


def dropped_engine(stage=1):
    """Leaves an engine in a cycle that only the collector finds; a reference to it."""
    model = make_model()
    engine = ZeroEngine(model, [adamw(model)], ZeroOptions(stage=stage), ShardGroups.create())
    model.cycle = [engine]
    return weakref.ref(engine)


@contextmanager
def collecting_only_when_told():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("kind", RUNS)
def test_engine_may_be_collected_while_torch_runs_through_its_hooks(kind, is_first):
    run, register = RUNS[kind]
    with collecting_only_when_told():
        before, watched, gone = hooks(), [], []

        def collect(*_):
            if watched:
                gc.collect()
                gone.append(watched[0]() is None)

        handle = register(collect) if is_first else None
        engine = dropped_engine()
        handle = handle or register(collect)
        watched.append(engine)
        try:
            run()
        finally:
            handle.remove()
        assert gone
        assert all(gone)
        run()  # what is left looks at nothing
        dropped_engine()  # hooks come, so that those of the first one go
        gc.collect()
        assert hooks() == before


def test_hooks_of_an_engine_that_is_collected_elsewhere_go_with_it():
    with collecting_only_when_told():
        before = hooks()
        dropped_engine()
        gc.collect()
        assert hooks() == before


COLLECTED_WHILE_LOOKING = """
import gc, threading, weakref
from lightning_zero._compat import innermost_frames

class Engine:
    def __init__(self):
        self.cycle = self
        weakref.finalize(self, innermost_frames)

for _ in range(8):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
for count in range(3000):  # when garbage is collected depends on what has been taken before
    gc.set_threshold(count % 60 + 1)
    Engine()
    innermost_frames()
"""


def test_an_engine_that_is_collected_while_stacks_are_looked_at_does_not_hang():
    subprocess.run([sys.executable, "-c", COLLECTED_WHILE_LOOKING], check=True, timeout=HANG_S / 5)
