"""Train a byte-level GPT on real text with any ZeRO stage.

python recipes/pretrain.py stage=3 overlap=off model=tiny   one training
python recipes/pretrain.py -m stage=0,1,2,3                 a sweep, with one table at the end
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import hydra
import lightning as L
import torch
import torch.nn.functional as F
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from omegaconf import DictConfig
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from gpt import GPT
from report import BitsPerByte, Report
from sweep import print_comparison, quote_stage, run_job_in_own_process
from text import TextData


class Pretraining(L.LightningModule):
    """Next-byte prediction: an ordinary LightningModule, nothing in it knows about ZeRO.

    Args:
        gpt: The model.
        lr: Highest learning rate, after the warm-up.
        weight_decay: Decay of the matrices; vectors (biases, norms) are not decayed.
        warmup_steps: Optimizer steps until the learning rate is reached.
    """

    def __init__(self, gpt: GPT, lr: float, weight_decay: float, warmup_steps: int) -> None:
        super().__init__()
        self.gpt = gpt
        self.bits_per_byte = BitsPerByte()
        self.validation_curve: list[tuple[int, float]] = []  # optimizer step, bits per byte
        self._lr, self._weight_decay, self._warmup_steps = lr, weight_decay, warmup_steps

    def _loss(self, tokens: Tensor) -> Tensor:
        logits = self.gpt(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, tokens: Tensor, batch_index: int) -> Tensor:
        """Return the mean cross entropy of one batch, [B, T + 1] bytes, in nats."""
        loss = self._loss(tokens)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, tokens: Tensor, batch_index: int) -> None:
        """Add one batch of held-out text to the metric."""
        self.bits_per_byte.update(self._loss(tokens), tokens[:, 1:].numel())

    def on_validation_epoch_end(self) -> None:
        """Compute the metric over all ranks (also before the first step)."""
        value = self.bits_per_byte.compute()
        self.bits_per_byte.reset()
        self.log("bits_per_byte", value, prog_bar=True, sync_dist=True)
        self.validation_curve.append((self.trainer.global_step, float(value)))

    def configure_optimizers(self) -> dict[str, object]:
        """AdamW with two parameter groups; linear warm-up, then cosine."""
        matrices = [p for p in self.parameters() if p.dim() > 1]
        vectors = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(
            groups, lr=self._lr, betas=(0.9, 0.95), weight_decay=self._weight_decay, fused=True
        )
        steps, warmup = self.trainer.max_steps, self._warmup_steps
        linear = LinearLR(optimizer, start_factor=0.1, total_iters=warmup)
        cosine = CosineAnnealingLR(optimizer, max(1, steps - warmup), eta_min=self._lr / 10)
        scheduler = SequentialLR(optimizer, [linear, cosine], milestones=[warmup])
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def train(cfg: DictConfig) -> None:
    """Train once; Lightning starts the other ranks.

    Args:
        cfg: The composed configuration.
    """
    L.seed_everything(cfg.seed)
    folder = Path(HydraConfig.get().runtime.output_dir)
    options = dict(cfg.trainer)
    if options["devices"] == "auto" and not torch.accelerator.is_available():
        options["devices"] = 2  # the CPU has no ranks of its own to count
    batches = options["max_steps"] * options["accumulate_grad_batches"]
    trainer = L.Trainer(
        **options,
        strategy=hydra.utils.instantiate(cfg.strategy, _convert_="all"),
        val_check_interval=max(1, batches // cfg.validations),
        check_val_every_n_epoch=None,
        callbacks=[
            Report(folder, list(HydraConfig.get().overrides.task), cfg.sample_bytes),
            TQDMProgressBar(refresh_rate=5),
            ModelCheckpoint(folder / "checkpoints", every_n_train_steps=cfg.save_every),
        ],
        logger=False,
        default_root_dir=folder,
    )
    model = Pretraining(GPT(**cfg.model), **cfg.optimizer)
    data = TextData(**cfg.data, context=cfg.model.context)
    trainer.fit(model, data, ckpt_path=cfg.ckpt_path)


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg: DictConfig) -> None:
    """Train, or run one job of a sweep."""
    for message in (".*does not have many workers.*", ".*LeafSpec.* is deprecated.*"):
        warnings.filterwarnings("ignore", message)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        run_job_in_own_process(__file__)
    else:
        train(cfg)


if __name__ == "__main__":
    sys.argv[1:] = [quote_stage(argument) for argument in sys.argv[1:]]
    try:
        main()
    finally:
        print_comparison()
