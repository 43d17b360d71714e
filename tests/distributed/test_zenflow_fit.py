"""ZenFlow in a Trainer: epochs, accumulation and going on in the middle of one."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy, full_optimizer_state
from tests.helpers.spawn import run_ranks

BATCHES = 6


class Net(pl.LightningModule):
    """A matrix and a vector; notes the clock after each optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 5)
        self.clocks: list[list[int]] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        entry = full_optimizer_state(self.layer.weight, "zenflow")
        if entry is not None and entry["clock"] not in self.clocks:
            self.clocks.append(entry["clock"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        data = torch.randn(2 * BATCHES, 6, generator=torch.Generator().manual_seed(0))
        return DataLoader(data, 2)  # type: ignore[arg-type]  # a tensor is a dataset


def fit(
    folder: str, epochs: int, ckpt_path: Any = None, form: Any = "consolidated", **options: Any
) -> tuple[Net, Any]:
    torch.manual_seed(0)
    zenflow = {"topk_ratio": 0.4, "update_interval": 2, "select_interval": 1, **options}
    trainer = pl.Trainer(
        strategy=ZeroStrategy(stage=2, offload_optimizer="cpu", zenflow=zenflow, checkpoint=form),
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        accumulate_grad_batches=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    net = Net()
    trainer.fit(net, ckpt_path=ckpt_path)
    return net, trainer


def fits(folder: str) -> dict[str, Any]:
    """Clocks of several trainings, and whether one that goes on ends in the same weights."""
    warnings.filterwarnings("ignore")
    two, trainer = fit(folder, 2)
    trainer.save_checkpoint(f"{folder}/two.ckpt")
    whole, _ = fit(folder, 3)
    rest, _ = fit(folder, 3, f"{folder}/two.ckpt")
    _, trainer = fit(folder, 2, form="sharded")
    trainer.save_checkpoint(f"{folder}/two")
    sharded, _ = fit(folder, 3, f"{folder}/two")
    other, _ = fit(folder, 3, select_interval=2, full_warm_up_rounds=1)
    return {
        "two": two.clocks,
        "whole": whole.clocks,
        "rest": rest.clocks,
        "other": [clock[2] for clock in other.clocks],
        "is_equal": torch.equal(rest.layer.weight, whole.layer.weight),
        "is_equal_sharded": torch.equal(sharded.layer.weight, whole.layer.weight),
    }


def test_columns_are_chosen_when_an_epoch_begins_and_accumulation_is_the_trainers(tmp_path):
    (found,) = run_ranks(fits, 1, str(tmp_path))
    # Steps taken, steps that wait, epochs since columns were chosen, whether they were at all.
    first = [[1, 1, 0, 1], [2, 0, 0, 1], [3, 1, 0, 1]]
    assert found["two"] == [*first, [4, 1, 0, 1], [5, 0, 0, 1], [6, 1, 0, 1]]
    assert found["rest"] == found["whole"][5:]
    assert found["is_equal"]
    assert found["is_equal_sharded"]
    assert found["other"] == [0, 0, 0, 1, 1, 1, 0, 0, 0]
