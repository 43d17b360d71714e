"""Copies between a device and host memory: what they copy, what they count, who waits for them."""

from __future__ import annotations

import pytest
import torch

from lightning_zero.memory.link import CpuLink, Staging, make_link
from tests.helpers.late_link import LateLink

CPU = torch.device("cpu")


@pytest.fixture(
    params=[
        "cpu",
        "late",
        pytest.param("accelerator", marks=pytest.mark.gpu),
        pytest.param("unpinned", marks=pytest.mark.gpu),
    ]
)
def link(request):
    if request.param == "late":
        return LateLink(CPU)
    if request.param == "cpu":
        return make_link(CPU)
    if not torch.accelerator.is_available():
        pytest.skip("no accelerator")
    device = torch.device(torch.accelerator.current_accelerator().type, 0)
    return make_link(device, pin_memory=request.param == "accelerator")


def test_the_device_tells_the_link():
    assert isinstance(make_link(CPU, pin_memory=True), CpuLink)


def test_host_memory_is_zero_and_on_the_host(link):
    found = link.zeros(7, torch.bfloat16)
    assert (found.shape, found.dtype, found.device) == ((7,), torch.bfloat16, CPU)
    assert not found.any()
    assert link.zeros(0, torch.float32).numel() == 0


@pytest.mark.parametrize("dtypes", [("float32",) * 2, ("bfloat16", "float32"), ("float32", "half")])
def test_copies_reach_their_target_in_its_dtype_and_are_counted(link, dtypes):
    here, there = (getattr(torch, name) for name in dtypes)
    values = torch.randn(33).to(here)
    up, back = torch.zeros(33, dtype=there, device=link.device), link.zeros(33, here)
    link.to_device(values, up).wait()
    link.to_host(up, back).wait_on_host()
    assert torch.equal(up.cpu(), values.to(there))
    assert torch.equal(back, values.to(there).to(here))
    assert (link.to_device_nbytes, link.to_host_nbytes) == (33 * here.itemsize, 33 * there.itemsize)


def test_work_given_to_the_device_after_a_wait_sees_the_copy(link):
    source = link.zeros(100_000, torch.float32).fill_(2.0)
    target = torch.zeros(100_000, device=link.device)
    transfers = [link.to_device(source, target) for _ in range(3)]
    transfers[-1].wait()
    assert target.mul(3).sum().item() == 600_000.0
    for transfer in transfers:  # may be waited for in any order, and again
        transfer.wait_on_host()
        transfer.wait()


def test_staging_is_used_again_only_when_its_copy_is_done(link):
    staging = Staging(link, count=2)
    targets = [torch.zeros(10, device=link.device) for _ in range(5)]
    places = set()
    transfers = []
    for number, target in enumerate(targets):
        taken = staging.take(10, torch.float32)
        places.add(taken.data_ptr())
        taken.fill_(number + 1.0)
        transfers.append(staging.send(taken, target))
    for transfer in transfers:
        transfer.wait()
    assert [target.mean().item() for target in targets] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert len(places) == 2


def test_staging_grows_to_what_is_asked_for(link):
    staging = Staging(link, count=1)
    for numel, dtype in ((4, torch.float32), (9, torch.float32), (3, torch.bfloat16), (3, None)):
        taken = staging.take(numel, dtype or torch.float32)
        assert (taken.numel(), taken.dtype) == (numel, dtype or torch.float32)
        target = torch.zeros(numel, dtype=taken.dtype, device=link.device)
        taken.fill_(numel)
        staging.send(taken, target).wait()
        assert torch.equal(target.cpu(), torch.full((numel,), float(numel), dtype=taken.dtype))
