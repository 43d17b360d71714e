"""Models of the transformers library that are made or loaded in ``configure_model``."""

from __future__ import annotations

import os

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lightning_zero import ShardGroups, ZeroEngine, ZeroOptions, ZeroStrategy, full_params
from lightning_zero.params.bucket import is_placeholder
from lightning_zero.partition import construction
from tests.helpers.models import equal, trainer, weights
from tests.helpers.peak import counted_peak
from tests.helpers.spawn import run_ranks

pytest.importorskip("transformers")

VOCAB, WIDTH = 400, 128
COMMON = {"vocab_size": VOCAB}


def configurations():
    from transformers import BertConfig, GPT2Config, LlamaConfig, MixtralConfig, T5Config

    llama = {
        **COMMON,
        "hidden_size": WIDTH,
        "intermediate_size": 3 * WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return {
        "llama": LlamaConfig(**llama),
        "llama_tied": LlamaConfig(**llama, tie_word_embeddings=True),
        "gpt2": GPT2Config(**COMMON, n_embd=WIDTH, n_layer=3, n_head=4, n_positions=64),
        "bert": BertConfig(
            **COMMON,
            hidden_size=WIDTH,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=3 * WIDTH,
        ),
        "t5": T5Config(**COMMON, d_model=WIDTH, d_kv=32, d_ff=3 * WIDTH, num_layers=2, num_heads=4),
        "mixtral": MixtralConfig(**{**llama, "num_hidden_layers": 2}, num_local_experts=4),
    }


def make(name, folder):
    """A new model, or with a folder one that is read from there."""
    from transformers import AutoModel

    if folder is None:
        return AutoModel.from_config(configurations()[name])
    return AutoModel.from_pretrained(folder)


def one_model(name, folder, groups, file_numel):
    torch.manual_seed(5)
    expected = weights(make(name, folder))
    torch.manual_seed(5 + groups.rank)
    root = nn.Module()
    options = ZeroOptions(stage=3)
    with counted_peak() as peak, construction(root, options, groups, torch.device("cpu")):
        root.net = make(name, folder)
    numels = [p.numel() for p in root.parameters()]
    sliced = all(is_placeholder(p) for p in root.parameters())
    with full_params(root):
        is_equal = equal(weights(root.net), expected)
    engine = ZeroEngine(root, [], options, groups)
    bucket = max(bucket.layout.padded_numel for bucket in engine.buckets)
    engine.close()
    excess = peak.nbytes / 4 - file_numel - sum(numels) / groups.world_size
    return is_equal, sliced, excess / bucket


def all_models(folder):
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    dist.init_process_group("gloo")
    groups = ShardGroups.create()
    found = {}
    for name in configurations():
        place = f"{folder}/{name}"
        if groups.rank == 0:
            torch.manual_seed(1)
            make(name, None).save_pretrained(place)
        dist.barrier()
        file_numel = os.path.getsize(f"{place}/model.safetensors") / 4  # is mapped, and counted
        found[name, "made"] = one_model(name, None, groups, 0)
        found[name, "read"] = one_model(name, place, groups, file_numel)
    return found


def test_models_are_equal_and_never_whole(tmp_path):
    for found in run_ranks(all_models, 2, str(tmp_path)):
        for which, (is_equal, sliced, excess) in found.items():
            assert is_equal, which
            assert sliced, which
            # One more module may be in hand while the library loops over all parameters.
            assert excess <= 2, (which, excess)


class Language(pl.LightningModule):
    """Trains a model of the library."""

    def __init__(self, name, folder, is_late):
        super().__init__()
        self.name_of_model, self.folder, self.net = name, folder, None
        self.losses = []
        if not is_late:
            self.configure_model()

    def configure_model(self):
        if self.net is None:
            self.net = make(self.name_of_model, self.folder).train()

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(self.global_rank)
        return DataLoader(torch.randint(VOCAB, (3, 2, 9), generator=generator), batch_size=None)

    def training_step(self, batch, index):
        loss = self.net(input_ids=batch).last_hidden_state.square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fits(folder):
    found = {}
    for name in ("llama", "mixtral"):
        modules = []
        for is_late in (False, True):
            torch.manual_seed(3)
            module = Language(name, f"{folder}/{name}", is_late)
            trainer(ZeroStrategy(3), 2).fit(module)
            modules.append(module)
        plain, late = modules
        found[name] = plain.losses == late.losses and equal(weights(plain), weights(late))
    return found


def test_fit_of_a_model_that_was_read_sharded(tmp_path):
    for name in ("llama", "mixtral"):
        torch.manual_seed(1)
        make(name, None).save_pretrained(tmp_path / name)
    for found in run_ranks(fits, 2, str(tmp_path)):
        assert all(found.values()), found
