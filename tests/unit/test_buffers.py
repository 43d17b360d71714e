"""Buffers are broadcast before the forwards before which plain data parallelism does it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zero.comm.collectives import choose_collectives
from lightning_zero.params.buffers import BufferSync


class RankZero(type(choose_collectives(None))):
    """Stands for a group whose rank 0 holds ones everywhere."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def broadcast(self, tensors):
        self.calls += 1
        for tensor in tensors:
            tensor.fill_(1)


@pytest.fixture
def module():
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))


def test_first_forward_takes_the_buffers_of_rank_0(module):
    module[0].running_mean.fill_(5.0)
    BufferSync(module, RankZero()).before_forward()
    assert torch.equal(module[0].running_mean, torch.ones(3))
    assert module[0].num_batches_tracked == 1


@pytest.mark.parametrize("is_last_of_window", [True, False])
def test_next_broadcast_follows_a_synchronised_backward(module, is_last_of_window):
    collectives = RankZero()
    sync = BufferSync(module, collectives)
    sync.before_forward()
    sync.after_forward(has_synchronised_backward=is_last_of_window)
    sync.before_forward()
    assert collectives.calls == (2 if is_last_of_window else 1)


def test_buffer_that_was_replaced_is_the_one_that_is_sent(module):
    sync = BufferSync(module, RankZero())
    module[0].running_mean = torch.full((3,), 9.0)
    sync.before_forward()
    assert torch.equal(module[0].running_mean, torch.ones(3))


def test_broadcast_is_no_change_that_autograd_complains_about(module):
    collectives = RankZero()
    module.register_buffer("factor", torch.full((3,), 2.0))
    x = torch.ones(3, requires_grad=True)
    loss = (x * module.factor).sum()
    BufferSync(module, collectives).before_forward()
    loss.backward()
    assert collectives.calls == 1


def test_module_without_buffers_sends_nothing():
    collectives = RankZero()
    BufferSync(nn.Linear(2, 2), collectives).before_forward()
    assert collectives.calls == 0
