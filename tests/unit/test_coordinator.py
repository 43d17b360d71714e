"""When buckets are gathered and given back: literal orders of events at stage 3."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zero.params.bucket import ParamStatus
from tests.helpers.single import running, sgd

DEPTH = 4


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
    *["gather 3", "run 3", "free 3"],
]
AHEAD = [
    *["gather 0", "gather 1", "gather 2", "run 0", "free 0"],
    *["gather 3", "run 1", "free 1"],
    *["run 2", "free 2"],
    *["run 3", "free 3"],
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
    assert found[0] == ["gather 3", "free 3", "gather 2", "free 2", "gather 1", "free 1"]
    # The forward has kept what backward begins with, as far as prefetching would hold it anyway.
    ahead = ["free 3", "free 2", "free 1"]
    on_demand = ["free 3", "gather 2", "free 2", "gather 1", "free 1"]
    assert found[1] == (ahead if overlap else on_demand)


def test_at_most_two_buckets_are_held_besides_the_one_in_use(recorded, overlap):
    for _ in range(3):
        recorded.engine.backward(recorded.engine.module(torch.ones(2, 4)).sum())
    assert recorded.most_available <= (3 if overlap else 1)


def test_module_that_raises_gives_its_bucket_back(recorded):
    module = recorded.engine.module
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            module(torch.ones(2, 5))
        statuses = {bucket.status for bucket in recorded.engine.buckets}
        assert statuses == {ParamStatus.NOT_AVAILABLE}


def recorded_stack(depth, **prefetch):
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth)))
    options = {"bucket_numel": 1, "prefetch": prefetch}
    return module, running(module, [sgd(module)], 3, **options)


def test_what_is_used_last_goes_first_when_the_bound_is_reached():
    """Four layers, room for three, all of them to be kept: the first is needed last in backward."""
    numel = 32  # a layer of 20, padded to 64 bytes
    module, engine_of = recorded_stack(4, max_live_numel=3 * numel, reuse_distance_numel=10**6)
    with engine_of as engine:
        assert {bucket.layout.padded_numel for bucket in engine.buckets} == {numel}
        recorder = Recorder(engine)
        for _ in range(2):
            recorder.taken()
            loss = module(torch.ones(2, 4).requires_grad_()).sum()
            forward = recorder.taken()
            engine.backward(loss)
            backward = recorder.taken()
        assert [event for event in forward if event.startswith("gather")] == [
            *["gather 0", "gather 1", "gather 2", "gather 3"]
        ]
        assert [event for event in forward if event.startswith("free")] == ["free 0"]
        assert forward.index("free 0") < forward.index("gather 3")
        # Layers 3 to 1 are still there; layer 0 comes into the room that one of them leaves.
        assert [event for event in backward if event.startswith("gather")] == ["gather 0"]
        assert recorder.most_available == 3


def test_prefetch_goes_as_far_as_it_is_told():
    for prefetch_numel, ahead in ((1, 1), (32, 1), (64, 2), (95, 2), (96, 3), (10**6, 4)):
        module, engine_of = recorded_stack(5, prefetch_numel=prefetch_numel)
        with engine_of as engine:
            recorder = Recorder(engine)
            for _ in range(2):
                recorder.taken()
                module(torch.ones(2, 4))
                events = recorder.taken()
            first = events[: events.index("run 0")]
            assert first == [f"gather {index}" for index in range(ahead + 1)], prefetch_numel
