"""The wrapper of a training loader, as far as one process can see it."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_zero import ShardGroups
from lightning_zero.batches import EvenBatches, EvenLoader, StatefulEvenLoader, even_loader

CPU = torch.device("cpu")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Loader:
    """What some libraries have instead of a DataLoader."""

    def __init__(self, count):
        self.count, self.loaded = count, None

    def __iter__(self):
        return iter(range(self.count))

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.loaded = state


@pytest.fixture
def batches():
    opened = EvenBatches()
    opened.begin(ShardGroups.create().control, CPU)
    return opened


def test_one_rank_keeps_its_loader(batches):
    loader = DataLoader(Stream())
    assert batches.wrap(loader) is loader
    assert batches.wrap(even_loader(loader, batches, None, True)) is loader


@pytest.mark.parametrize("is_guarded", [False, True])
def test_wrapper_gives_the_batches_of_the_loader_and_no_more(batches, is_guarded):
    loader = even_loader(DataLoader(range(4), batch_size=None), batches, 4, is_guarded)
    for _ in range(2):
        given = iter(loader)
        assert list(given) == [0, 1, 2, 3]
        assert next(given, "ended") == "ended"
    assert len(loader) == 4


def test_known_length_cuts_the_loader(batches):
    loader = even_loader(DataLoader(range(4), batch_size=None), batches, 3, False)
    assert list(loader) == [0, 1, 2]
    assert len(loader) == 3


def test_unknown_length_is_no_length(batches):
    loader = even_loader(DataLoader(range(4), batch_size=None), batches, None, True)
    with pytest.raises(TypeError, match="not known on every rank"):
        len(loader)


def test_closed_wrapper_is_the_loader(batches):
    loader = even_loader(DataLoader(range(4), batch_size=None), batches, 3, True)
    batches.end()
    assert list(loader) == [0, 1, 2, 3]
    assert len(loader) == 4


def test_wrapper_is_lazy_about_nothing(batches):
    """Workers start and random numbers are drawn when they would be without it."""
    loader = even_loader(DataLoader(Stream(), batch_size=None), batches, None, True)
    torch.manual_seed(0)
    expected = torch.rand(2)[1]
    torch.manual_seed(0)
    DataLoader(Stream()).__iter__()
    drawn = torch.rand(1)
    torch.manual_seed(0)
    iter(loader)
    assert torch.rand(1) == drawn != expected


def test_attributes_are_those_of_the_loader(batches):
    inner = DataLoader(range(4), batch_size=2)
    loader = even_loader(inner, batches, None, True)
    assert loader.sampler is inner.sampler
    assert loader.batch_size == 2
    assert not hasattr(loader, "no_such_attribute")
    loader.worker_init_fn = print
    assert inner.worker_init_fn is print
    loader.kept = 3
    assert inner.kept == 3
    del loader.kept
    assert not hasattr(inner, "kept")
    assert loader.description == "DataLoader of range"


def test_copies_still_know_their_loader(batches):
    batches.end()
    loader = even_loader(DataLoader(range(4), batch_size=None), batches, 3, False)
    for copied in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert list(copied) == [0, 1, 2, 3]


def test_state_is_found_in_the_class_where_the_loader_has_one(batches):
    inner = Loader(3)
    loader = even_loader(inner, batches, None, True)
    assert isinstance(loader, StatefulEvenLoader)
    for name in ("state_dict", "load_state_dict"):
        assert inspect.getattr_static(loader, name)
    assert loader.state_dict() == {"count": 3}
    loader.load_state_dict({"count": 5})
    assert inner.loaded == {"count": 5}
    stateless = even_loader(DataLoader(Stream()), batches, None, True)
    assert type(stateless) is EvenLoader
    assert not hasattr(stateless, "state_dict")


def test_batches_are_agreed_about_only_in_a_fit():
    with pytest.raises(AssertionError, match="only while a fit is under way"):
        EvenBatches().wrap(DataLoader(Stream()))


@pytest.mark.parametrize("uneven", ["join", None, True])
def test_choice_is_checked(uneven):
    with pytest.raises(ValueError, match=r"must be 'stop' or 'error', got") as error:
        EvenBatches(uneven)
    assert repr(uneven) in str(error.value)
