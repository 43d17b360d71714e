"""The same code on CUDA and NCCL: all GPUs of the machine, one rank each."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_zero import ZeroStrategy
from tests.distributed.test_precision_table import NAME as PRECISION_TABLE
from tests.distributed.test_precision_table import measure_all, table
from tests.helpers import readme
from tests.helpers.models import Language, difference, equal, weights
from tests.helpers.spawn import run_ranks

GPUS = torch.cuda.device_count()
STAGES = (0, 1, 2, 3)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device"),
]


def fit(strategy, precision, **options):
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=GPUS,
        strategy=strategy,
        precision=precision,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        limit_val_batches=0,
        deterministic=True,
        **options,
    )
    module = Language(steps=8)
    torch.cuda.reset_peak_memory_stats()
    trainer.fit(module)
    return module.losses, weights(module), torch.cuda.max_memory_allocated()


def all_strategies(precision, options):
    found = {"ddp": fit(DDPStrategy(), precision, **options)}
    for stage in STAGES:
        found[stage] = fit(ZeroStrategy(stage, bucket_numel=3000), precision, **options)
    return found


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_stages_equal_ddp(precision):
    bound = 0.0 if GPUS <= 2 and precision == "32-true" else 1e-2 if "mixed" in precision else 1e-6
    for found in run_ranks(all_strategies, GPUS, precision, {}, timeout_s=240):
        for stage in STAGES:
            assert difference(found[stage][1], found["ddp"][1]) <= bound, stage


def test_clipping_and_accumulation():
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    for found in run_ranks(all_strategies, GPUS, "32-true", options, timeout_s=240):
        for stage in STAGES:
            assert difference(found[stage][1], found["ddp"][1]) <= 1e-5, stage


def overlap_on_and_off():
    return [
        fit(ZeroStrategy(stage, overlap_comm=overlap), "32-true")[1]
        for stage in STAGES
        for overlap in (True, False)
    ]


def test_overlap_does_not_change_a_bit():
    for found in run_ranks(overlap_on_and_off, GPUS, timeout_s=240):
        for with_overlap, without in zip(found[::2], found[1::2], strict=True):
            assert equal(with_overlap, without)


def half_precision():
    return {stage: fit(ZeroStrategy(stage), "bf16-true")[1] for stage in STAGES}


def test_bf16_true_is_the_same_at_every_stage():
    for found in run_ranks(half_precision, GPUS, timeout_s=240):
        assert all(equal(found[stage], found[0]) for stage in STAGES) or GPUS > 2


def test_dtypes_are_those_of_the_readme():
    """Measured on CUDA, where fp16 with loss scaling is Lightning's own choice."""
    for found in run_ranks(measure_all, GPUS, "gpu", GPUS, timeout_s=240):
        assert table(found) == readme.written(PRECISION_TABLE)
