"""Models of the transformers library, random weights: from the second step on all comes ahead."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD

from lightning_zero import ShardGroups, ZeroEngine, ZeroOptions
from tests.helpers.spawn import run_ranks

pytest.importorskip("transformers")

STEPS = 3
SMALL = {"vocab_size": 40}


def gpt2():
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(**SMALL, n_embd=16, n_layer=3, n_head=2, n_positions=16)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return AutoModelForCausalLM.from_config(config)


def llama():
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        **SMALL, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2
    )
    return AutoModelForCausalLM.from_config(config)


def t5():
    from transformers import AutoModelForSeq2SeqLM, T5Config

    config = T5Config(**SMALL, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
    config.dropout_rate = 0.0
    config.decoder_start_token_id = config.pad_token_id = 0
    return AutoModelForSeq2SeqLM.from_config(config)


def bert():
    from transformers import AutoModelForMaskedLM, BertConfig

    config = BertConfig(
        **SMALL, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2
    )
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return AutoModelForMaskedLM.from_config(config)


MODELS = {f.__name__: f for f in (gpt2, llama, t5, bert)}


def batch(rank, step):
    return torch.randint(2, 40, (2, 7), generator=torch.Generator().manual_seed(10 * step + rank))


def made(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    model.train()
    return model, SGD(model.parameters(), lr=0.1)


def one_process(name, world_size):
    model, optimizer = made(name)
    parameters = list(model.parameters())
    for step in range(STEPS):
        per_rank = []
        for rank in range(world_size):
            tokens = batch(rank, step)
            loss = model(input_ids=tokens, labels=tokens).loss
            grads = torch.autograd.grad(loss, parameters, allow_unused=True)
            per_rank.append([None if grad is None else grad / world_size for grad in grads])
        for parameter, (first, second) in zip(parameters, zip(*per_rank, strict=True), strict=True):
            parameter.grad = None if first is None else first + second
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def trained():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = ShardGroups.create(timedelta(seconds=20))
    found = {}
    for name in MODELS:
        model, optimizer = made(name)
        options = ZeroOptions(stage=3, bucket_numel=1500)
        engine = ZeroEngine(model, [optimizer], options, groups)
        report = engine.coordinator.passes.report
        on_access = []
        for step in range(STEPS):
            tokens = batch(rank, step)
            engine.backward(model(input_ids=tokens, labels=tokens).loss)
            engine.step(optimizer)
            optimizer.zero_grad()
            on_access.append(report.fetched_on_access)
        counts = dict(engine.coordinator.passes.tracers["training step"].counts)
        buckets = len(engine.buckets)
        engine.close()
        expected = one_process(name, 2)
        gap = max((p - expected[k]).abs().max().item() for k, p in model.named_parameters())
        found[name] = counts, on_access, buckets, gap
    return found


def test_trace_is_complete_and_numbers_are_those_of_one_process():
    for found in run_ranks(trained, 2):
        for name, (counts, on_access, buckets, gap) in found.items():
            assert counts == {"record": 1, "complete": STEPS - 1}, name
            assert len(set(on_access)) == 1, (name, on_access)  # none after the first step
            assert buckets > 3, name
            assert gap == 0, (name, gap)
