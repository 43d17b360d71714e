"""Options: what is accepted, and that each error names the value and the remedy."""

from __future__ import annotations

import pytest
import torch

from lightning_zero.config import ZeroOptions


def test_defaults_shard_everything():
    options = ZeroOptions()
    assert (options.stage, options.shard_by, options.overlap_comm) == (3, "element", True)
    assert options.bucket_numel is None
    assert options.master_weights is None
    assert options.wire_dtype is None


@pytest.mark.parametrize("stage", [-1, 4, True, False, "3", None, 1.5])
def test_stage_outside_of_0_to_3_is_refused(stage):
    with pytest.raises(ValueError, match=f"stage must be 0, 1, 2 or 3, got {stage!r}"):
        ZeroOptions(stage=stage)


@pytest.mark.parametrize("bucket_numel", [0, -5, 1.0, "1000", True])
def test_bucket_numel_that_is_no_positive_count_is_refused(bucket_numel):
    with pytest.raises(ValueError, match="bucket_numel must be a positive number of elements"):
        ZeroOptions(bucket_numel=bucket_numel)


@pytest.mark.parametrize("name", ["overlap_comm", "master_weights"])
@pytest.mark.parametrize("value", ["yes", 1, 0])
def test_switch_that_is_no_bool_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be True or False, got {value!r}"):
        ZeroOptions(**{name: value})


def test_overlap_comm_cannot_be_left_open():
    with pytest.raises(ValueError, match="overlap_comm must be True or False, got None"):
        ZeroOptions(overlap_comm=None)


@pytest.mark.parametrize("shard_by", ["row", "", None])
def test_unknown_sharding_is_refused(shard_by):
    with pytest.raises(ValueError, match="shard_by must be 'element' or 'tensor'"):
        ZeroOptions(shard_by=shard_by)


def test_sharding_by_tensor_at_stage_0_is_refused():
    with pytest.raises(ValueError, match="shard_by='tensor' has no effect at stage 0"):
        ZeroOptions(stage=0, shard_by="tensor")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharding_by_tensor_is_accepted_where_something_is_sharded(stage):
    assert ZeroOptions(stage=stage, shard_by="tensor").shard_by == "tensor"


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ("float32", torch.float32),
        ("fp32", torch.float32),
        ("float16", torch.float16),
        ("fp16", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("bf16", torch.bfloat16),
        ("float64", torch.float64),
        ("torch.bfloat16", torch.bfloat16),
        (torch.float32, torch.float32),
    ],
)
def test_reduce_dtype_is_taken_by_name_or_as_dtype(value, dtype):
    assert ZeroOptions(reduce_dtype=value).wire_dtype is dtype


@pytest.mark.parametrize("value", ["int8", "half precision", torch.int64, torch.complex64, 32])
def test_reduce_dtype_that_is_not_floating_is_refused(value):
    with pytest.raises(ValueError, match="reduce_dtype must be a floating dtype or one of"):
        ZeroOptions(reduce_dtype=value)


def test_reduce_dtype_set_later_is_checked_when_it_is_used():
    options = ZeroOptions()
    options.reduce_dtype = "bf16"
    assert options.wire_dtype is torch.bfloat16
