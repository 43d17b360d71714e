"""When buckets are gathered and given back: literal orders of events at stage 3."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zero.params.bucket import ParamStatus
from tests.helpers.single import running, sgd

DEPTH = 3


class Recorder:
    """A stack of layers, one bucket each, with all that happens to them."""

    def __init__(self, engine):
        self.engine, self.events, self.most_available = engine, [], 0
        for bucket in engine.buckets:
            index = bucket.layout.index
            bucket.begin_unshard = self._noting(f"gather {index}", bucket.begin_unshard)
            bucket.reshard = self._noting(f"free {index}", bucket.reshard)
        for index, layer in enumerate(engine.module):
            layer.register_forward_pre_hook(lambda *_, index=index: self._note(f"run {index}"))

    def _noting(self, event, run):
        def noted(*args, **options):
            self._note(event)
            return run(*args, **options)

        return noted

    def _note(self, event):
        self.events.append(event)
        held = [b for b in self.engine.buckets if b.status is not ParamStatus.NOT_AVAILABLE]
        self.most_available = max(self.most_available, len(held))

    def taken(self):
        events, self.events = self.events, []
        return events


@pytest.fixture(params=[True, False], ids=["overlap", "no overlap"])
def overlap(request):
    return request.param


@pytest.fixture
def recorded(overlap):
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(DEPTH)))
    with running(module, [sgd(module)], 3, bucket_numel=1, overlap_comm=overlap) as engine:
        assert len(engine.buckets) == DEPTH
        yield Recorder(engine)


ON_DEMAND = [
    *["gather 0", "run 0", "free 0"],
    *["gather 1", "run 1", "free 1"],
    *["gather 2", "run 2", "free 2"],
]
AHEAD = [
    *["gather 0", "gather 1", "run 0", "free 0"],
    *["gather 2", "run 1", "free 1"],
    *["run 2", "free 2"],
]


def test_first_forward_gathers_on_demand_and_the_next_ones_ahead(recorded, overlap):
    x = torch.ones(2, 4)
    recorded.engine.module(x)
    assert recorded.taken() == ON_DEMAND
    for _ in range(2):
        recorded.engine.module(x)
        assert recorded.taken() == (AHEAD if overlap else ON_DEMAND)


def test_evaluation_has_an_order_of_its_own(recorded, overlap):
    x = torch.ones(2, 4)
    recorded.engine.module(x)
    recorded.taken()
    with torch.no_grad():
        recorded.engine.module(x)
        assert recorded.taken() == ON_DEMAND
        recorded.engine.module(x)
        assert recorded.taken() == (AHEAD if overlap else ON_DEMAND)


def test_backward_gathers_in_its_own_order_and_frees_what_is_through(recorded, overlap):
    """The first layer's weight is not read in backward: its input needs no gradient."""
    found = []
    for _ in range(2):
        loss = recorded.engine.module(torch.ones(2, 4)).sum()
        recorded.taken()
        recorded.engine.backward(loss)
        found.append(recorded.taken())
    assert found[0] == ["gather 2", "free 2", "gather 1", "free 1"]
    # The forward has kept what backward begins with, as far as prefetching would hold it anyway.
    assert found[1] == (["free 2", "free 1"] if overlap else ["free 2", "gather 1", "free 1"])


def test_at_most_one_bucket_is_held_besides_the_one_in_use(recorded, overlap):
    for _ in range(3):
        recorded.engine.backward(recorded.engine.module(torch.ones(2, 4)).sum())
    assert recorded.most_available <= (2 if overlap else 1)


def test_module_that_raises_gives_its_bucket_back(recorded):
    module = recorded.engine.module
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            module(torch.ones(2, 5))
        statuses = {bucket.status for bucket in recorded.engine.buckets}
        assert statuses == {ParamStatus.NOT_AVAILABLE}
