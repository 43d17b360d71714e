"""Ranks that the caller's own process starts, as in a notebook."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import pytest

from tests.helpers.cells import STAGES
from tests.helpers.programs import run

SCRIPT = """
import json, sys
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_zero import ZeroStrategy
from tests.helpers.models import trainer
from tests.helpers.small import Small, product

torch.set_num_threads(1)


def fitted(stage, module, folder):
    strategy = ZeroStrategy(stage, start_method="fork", timeout=20)
    keeper = ModelCheckpoint(folder)
    options = {"accumulate_grad_batches": 2, "callbacks": [keeper], "enable_checkpointing": True}
    trainer(strategy, 2, **options).fit(module)
    return module.w.item(), Path(keeper.best_model_path).is_file()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = {}
    for stage in (1, 2, 3):
        module = Small(product, [[1.0, 2.0], [3.0, 4.0]], w=0.0)
        found[stage] = [fitted(stage, module, folder / f"{stage}-{k}") for k in (0, 1)]
    (folder / "found.json").write_text(json.dumps(found))
"""


@functools.cache
def found_in(folder: Path) -> dict[str, list[tuple[float, bool]]]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    run([sys.executable, str(script), str(folder)], folder / "log")
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("launched")


@pytest.mark.parametrize("stage", STAGES)
def test_forked_ranks_train_the_callers_module(folder, stage):
    """Weights and the best checkpoint are back in the caller, and a second fit goes on."""
    assert found_in(folder)[str(stage)] == [[-2.5, True], [-5.0, True]]
