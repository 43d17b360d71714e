"""Folders as DeepSpeed's ZeRO writes them, made from a whole model and its optimizer.

Whatever is between or behind the values of parameters is a NaN here: it must never be read.
"""

from __future__ import annotations

import contextlib
import enum
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

VOCAB, WIDTH = 7, 5
HALF = (torch.float16, torch.bfloat16)


class Odd(pl.LightningModule):
    """Odd sizes, tied and frozen weights, buffers of two types, and two parameter groups.

    Args:
        with_scalar: DeepSpeed takes no parameters without dimensions or elements.
        batches: Training steps of an epoch.
    """

    def __init__(self, with_scalar: bool = True, batches: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.token = nn.Embedding(VOCAB, WIDTH)
            self.up = nn.Linear(WIDTH, 3)
            self.still = nn.Linear(3, WIDTH)
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)
            self.scale = nn.Parameter(torch.tensor(1.5) if with_scalar else torch.tensor([1.5]))
            self.register_buffer("seen", torch.tensor([3, 4]))
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("passing", torch.ones(2), persistent=False)
            self.nothing = nn.Parameter(torch.zeros(0 if with_scalar else 1, 4))
        self.still.requires_grad_(False)
        self.head.weight = self.token.weight
        self.batches = batches
        self.lowest_step = -1

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.still(torch.tanh(self.up(self.token(tokens))))
        self.seen += 1
        self.mean.copy_(0.9 * self.mean + 0.1 * hidden.detach().mean(0))
        found = self.head(self.norm(hidden) * self.scale).float()
        return F.cross_entropy(found, tokens) + self.nothing.sum()

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        if index == 0:
            self.lowest_step = self.trainer.global_step
        return self(tokens)

    def train_dataloader(self) -> Any:
        return DataLoader(batches_of(self.trainer.global_rank, self.batches), batch_size=None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.02},
        ]
        return torch.optim.AdamW(groups, lr=0.01)


def batches_of(rank: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(VOCAB, (4,), generator=generator) for _ in range(count)]


def trained(steps: int = 3, **options: Any) -> tuple[Odd, torch.optim.Optimizer]:
    """A model after some steps on one rank."""
    module = Odd(**options)
    optimizer = module.configure_optimizers()
    for tokens in batches_of(0, steps):
        optimizer.zero_grad()
        module(tokens).backward()
        optimizer.step()
    return module, optimizer


@dataclass
class Layout:
    """How a run was set up."""

    stage: int
    world_size: int
    copies: torch.dtype = torch.float32
    """Of the module's weights."""
    alignment: int = 1
    """Parameters start at multiples of it (stages 1, 2)."""
    round_robin: bool = False
    sub_group_numel: int = 10**9
    """A flat group of stage 3 is full from this size on."""
    is_padded: bool = False
    """fp32 slices keep the zeros, and no stage is told, as DeepSpeed's bf16 optimizer does it."""
    client: dict[str, Any] = field(default_factory=dict)
    legacy: bool = False
    """The file format of before torch 1.6."""
    prefix: str = ""
    tag: str = "global_step3"

    def write(
        self,
        folder: Path,
        module: Odd,
        optimizer: torch.optim.Optimizer,
        edit: Callable[[str, dict[str, Any]], None] = lambda name, content: None,
    ) -> Path:
        """Write a folder with all files, each of them edited before; give it back."""
        place = folder / self.tag
        place.mkdir(parents=True)
        (folder / "latest").write_text(self.tag)
        names = {parameter: name for name, parameter in module.named_parameters()}
        groups = self._flat_groups(optimizer)
        with _classes_of_deepspeed() as classes:
            for rank in range(self.world_size):
                zero = self._zero_state(rank, optimizer, groups, classes)
                config = {"zero_optimization": {"round_robin_gradients": self.round_robin}}
                content = {"optimizer_state_dict": zero, "ds_config": config, "ds_version": "0"}
                edit(self.optimizer_file(rank), content)
                self._save(content, place / self.optimizer_file(rank))
                if rank == 0 or self.stage == 3:
                    model = self._model_state(rank, module, groups, names)
                    edit(self.model_file(rank), model)
                    self._save(model, place / self.model_file(rank))
        return folder

    def optimizer_file(self, rank: int) -> str:
        return f"{self.prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"

    def model_file(self, rank: int) -> str:
        start = f"zero_pp_rank_{rank}_" if self.stage == 3 else ""
        return f"{start}mp_rank_00_model_states.pt"

    def _save(self, content: dict[str, Any], path: Path) -> None:
        torch.save(content, path, _use_new_zipfile_serialization=not self.legacy)

    def _flat_groups(self, optimizer: torch.optim.Optimizer) -> list[tuple[int, list[Any]]]:
        """Number of the parameter group, and parameters, of each flat group."""
        found = []
        for index, group in enumerate(optimizer.param_groups):
            parameters = list(group["params"])
            if self.round_robin:
                ranks = range(self.world_size)
                parameters = [p for rank in ranks for p in parameters[rank :: self.world_size]]
            if self.stage < 3:
                found.append((index, parameters))
                continue
            found.append((index, []))
            for parameter in parameters:
                if sum(p.numel() for p in found[-1][1]) >= self.sub_group_numel:
                    found.append((index, []))
                found[-1][1].append(parameter)
        return found

    def _gaps(self, parameters: list[Any]) -> list[int]:
        """Elements between a parameter and the next one."""
        gaps, end = [], 0
        for parameter in parameters:
            gaps.append(-(end + parameter.numel()) % self.alignment)
            end += parameter.numel() + gaps[-1]
        return [*gaps[:-1], 0]

    def _slice(self, rank: int, values: list[Tensor], gaps: list[int], is_lean: bool) -> Tensor:
        """What a rank has of a flat group."""
        nan = torch.tensor([torch.nan])
        if self.stage == 3:
            return torch.cat([self._own(rank, value) for value in values])
        runs = [torch.cat([v.flatten(), nan.expand(g)]) for v, g in zip(values, gaps, strict=True)]
        flat = torch.cat(runs)
        slice_numel = -(-flat.numel() // (2 * self.world_size)) * 2
        padded = torch.cat([flat, nan.expand(slice_numel * self.world_size - flat.numel())])
        begin, end = rank * slice_numel, (rank + 1) * slice_numel
        return (flat if is_lean else padded)[begin:end].clone()

    def _own(self, rank: int, value: Tensor) -> Tensor:
        """A rank's slice of one parameter (stage 3)."""
        slice_numel = -(-value.numel() // self.world_size)
        missing = slice_numel * self.world_size - value.numel()
        filled = torch.cat([value.detach().flatten(), torch.full((missing,), torch.nan)])
        return filled.view(self.world_size, -1)[rank].clone()

    def _zero_state(
        self, rank: int, optimizer: torch.optim.Optimizer, groups: Any, classes: Any
    ) -> dict[str, Any]:
        gaps = [self._gaps(parameters) for _, parameters in groups]
        masters = [
            self._slice(rank, [p.detach() for p in parameters], gap, not self.is_padded)
            for (_, parameters), gap in zip(groups, gaps, strict=True)
        ]
        state = {}
        for number, (_, parameters) in enumerate(groups):
            of_group = {}
            for key, value in optimizer.state[parameters[0]].items():
                if key == "step":
                    of_group[key] = value.clone()
                    continue
                values = [optimizer.state[p][key] for p in parameters]
                of_group[key] = self._slice(rank, values, gaps[number], is_lean=False)
            state[number] = of_group
        param_groups = [
            {**group, "params": [n for n, (owner, _) in enumerate(groups) if owner == index]}
            for index, group in enumerate(optimizer.param_groups)
        ]
        inner = {"state": state, "param_groups": param_groups}
        scaler = classes.LossScaler()
        scaler.cur_scale = 1.0
        told = {"loss_scaler": scaler, "dynamic_loss_scale": False, "overflow": False}
        if self.stage == 3:
            told |= {"optimizer_state_dict": inner, "fp32_flat_groups": masters}
            told |= {"partition_count": self.world_size}
        else:
            told |= {"base_optimizer_state": inner, "single_partition_of_fp32_groups": masters}
            told |= {"partition_count": [self.world_size] * len(groups)}
            told |= {"param_slice_mappings": [OrderedDict(a=classes.fragment_address(3, 0))]}
            if self.alignment > 1:
                told |= {"param_alignment_paddings": gaps}
        if not self.is_padded:
            told |= {"zero_stage": classes.ZeroStageEnum(self.stage)}
        return told

    def _model_state(self, rank: int, module: Odd, groups: Any, names: Any) -> dict[str, Any]:
        buffers = [n for n, _ in module.named_buffers() if n in module.state_dict()]
        entries = OrderedDict()
        for name, value in module.state_dict().items():
            if name in buffers:
                entries[name] = value.clone()
            else:
                entries[name] = value.to(self.copies) if self.stage < 3 else self._empty()
        frozen = {
            n: p.detach().clone() for n, p in module.named_parameters() if not p.requires_grad
        }
        parts = {n: self._own(rank, v) if self.stage == 3 else v for n, v in frozen.items()}
        is_kept = self.stage > 1
        return {
            "module": entries,
            "buffer_names": buffers,
            "optimizer": None,
            "param_shapes": [OrderedDict((names[p], p.shape) for p in ps) for _, ps in groups],
            "frozen_param_shapes": {n: v.shape for n, v in frozen.items()} if is_kept else None,
            "frozen_param_fragments": parts if is_kept else None,
            "shared_params": {"head.weight": "token.weight"} if rank == 0 else {},
            "lr_scheduler": None,
            "skipped_steps": 0,
            "global_steps": 3,
            "global_samples": 12,
            "dp_world_size": self.world_size,
            "mp_world_size": 1,
            "ds_config": {},
            "ds_version": "0",
            **self.client,
        }

    def _empty(self) -> Tensor:
        return torch.empty(0, dtype=self.copies)


@contextlib.contextmanager
def _classes_of_deepspeed() -> Iterator[Any]:
    """Classes under DeepSpeed's names, for as long as files are written."""

    class ZeroStageEnum(int, enum.Enum):
        optimizer_states = 1
        gradients = 2
        weights = 3

    class LossScaler:
        pass

    @dataclass
    class fragment_address:  # noqa: N801
        numel: int
        start: int

    owners = {
        "deepspeed.runtime.zero.config": ZeroStageEnum,
        "deepspeed.runtime.fp16.loss_scaler": LossScaler,
        "deepspeed.utils.tensor_fragment": fragment_address,
    }
    before = dict(sys.modules)
    for path, kind in owners.items():
        kind.__module__, kind.__qualname__ = path, kind.__name__
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules[".".join(parts[:end])] = types.ModuleType(".".join(parts[:end]))
        setattr(sys.modules[path], kind.__name__, kind)
    try:
        yield types.SimpleNamespace(**{kind.__name__: kind for kind in owners.values()})
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
            del sys.modules[name]
        sys.modules.update({n: m for n, m in before.items() if n.split(".")[0] == "deepspeed"})
