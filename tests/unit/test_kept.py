"""Which parts of a model stay in fp32, and what happens around them."""

from __future__ import annotations

import warnings

import pytest
import torch
from lightning.fabric.plugins.precision import HalfPrecision as FabricHalfPrecision
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.pytorch.plugins.precision import HalfPrecision, Precision
from torch import nn

import lightning_zero
from lightning_zero import ZeroStrategy
from lightning_zero.params.kept import CastsAround, KeptParts
from lightning_zero.precision import zero_precision

LOW = torch.bfloat16


class Positions(nn.Module):
    """As a rotary embedding: buffers that bf16 cannot hold, no parameters."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.tensor(257.0))
        self.register_buffer("count", torch.tensor(257))
        self.seen = None

    def forward(self, x, scale=None):
        self.seen = x.dtype
        return {"shifted": (x + self.steps - 257.0, self.count), "scale": scale}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.positions = Positions()
        self.router = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 2)
        self.alpha = nn.Parameter(torch.tensor(257.0))

    def forward(self, x):
        x = self.positions(self.norm(x))["shifted"][0]
        for expert in self.experts:
            x = x + expert(x)
        return self.head(x * self.router(x).softmax(-1)) * self.alpha


def converted(*patterns, model=None):
    """A model after the plugin has converted it, its plugin, and the names that are fp32."""
    model = model or Net()
    plugin = zero_precision(HalfPrecision("bf16-true"))
    plugin.take_options("step", patterns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plugin.convert_module(model)
    high = {n for n, t in model.state_dict(keep_vars=True).items() if t.dtype == torch.float32}
    return model, plugin, high


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        (nn.LayerNorm, {"norm.weight", "norm.bias", "router.1.weight", "router.1.bias"}),
        ("LayerNorm", {"norm.weight", "norm.bias", "router.1.weight", "router.1.bias"}),
        ("router", {"router.0.weight", "router.0.bias", "router.1.weight", "router.1.bias"}),
        (".0", {"router.0.weight", "router.0.bias", "experts.0.weight", "experts.0.bias"}),
        (Positions, {"positions.steps"}),
        ("positions.steps", {"positions.steps"}),
        (".steps", {"positions.steps"}),
        ("alpha", {"alpha"}),
    ],
)
def test_a_pattern_chooses_modules_or_tensors(pattern, names):
    model, _, high = converted(pattern)
    assert high == names
    assert model.positions.count.dtype == torch.int64
    assert model.positions.steps == (257.0 if "positions.steps" in names else 256.0)


def test_what_is_kept_was_never_cast():
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.alpha.grad = torch.tensor(257.0)
    kept_objects = model.norm.weight, model.positions.steps
    converted(nn.LayerNorm, Positions, "alpha", model=model)
    assert kept_objects[0] is model.norm.weight
    assert kept_objects[1] is model.positions.steps
    for name in ("norm.weight", "positions.steps", "alpha"):
        assert torch.equal(model.state_dict()[name], before[name])
    assert model.alpha.grad == 257.0
    assert model.head.weight.dtype == LOW


def test_what_was_made_in_16_bits_is_brought_to_fp32():
    model = Net().to(LOW)
    _, _, high = converted(nn.LayerNorm, model=model)
    assert "norm.weight" in high


@pytest.mark.parametrize("is_compiled", [False, True])
def test_kept_modules_compute_in_fp32_among_others(is_compiled):
    model, plugin, _ = converted(nn.LayerNorm, Positions, "router", "experts", "alpha")
    plain = Net()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(3, 4, dtype=LOW, requires_grad=True)
    run = torch.compile(model, backend="eager", fullgraph=True) if is_compiled else model
    out = run(x)
    expected = plain(x.float())
    assert torch.allclose(out.float(), expected, rtol=0, atol=0.05 * expected.abs().max().item())
    assert model.positions.seen == torch.float32
    out.float().sum().backward()
    assert x.grad.dtype == LOW
    assert model.router[0].weight.grad.dtype == torch.float32
    plugin.teardown()
    with pytest.raises(RuntimeError, match="dtype"):
        model(x)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_outputs_of_any_nesting_are_cast_back_and_the_rest_is_left_alone():
    positions = Positions()
    casts = CastsAround([positions], LOW)
    found = positions(torch.ones(2, dtype=LOW), scale=torch.ones(1, dtype=LOW))
    assert (found["shifted"][0].dtype, found["scale"].dtype) == (LOW, LOW)
    assert found["shifted"][1] is positions.count
    casts.remove()
    assert positions(torch.ones(2))["shifted"][0].dtype == torch.float32


def test_a_list_of_modules_has_no_forward_so_its_members_are_called():
    assert KeptParts(model := Net(), ["experts"]).entries == list(model.experts)
    assert KeptParts(model, ["router", nn.LayerNorm]).entries == [model.norm, model.router]


def test_fitting_again_casts_once():
    model, plugin, _ = converted(nn.LayerNorm)
    plugin.convert_module(model)
    assert len(model.norm._forward_hooks) == 1


@pytest.mark.parametrize("pattern", ["nrom", ".nothing", nn.Conv2d, "positions.count"])
def test_what_chooses_nothing_is_an_error(pattern):
    with pytest.raises(ValueError, match="keep_fp32 names"):
        converted(pattern)


def test_the_whole_model_and_one_name_of_two_are_errors():
    with pytest.raises(ValueError, match="the whole model: use precision='32-true'"):
        converted(Net)
    model = Net()
    model.router[0].weight = model.head.weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"also stand elsewhere, as \['head.weight'\]"):
        converted("router", model=model)


def test_buffers_that_lose_their_values_are_told():
    plugin = zero_precision(HalfPrecision("bf16-true"))
    with pytest.warns(UserWarning, match=r"changed the values of 1 buffer\(s\).*positions.steps"):
        plugin.convert_module(Net())
    plugin.take_options("step", [Positions])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugin.convert_module(Net())


def test_models_are_built_in_fp32_if_a_part_is_to_stay_so():
    plugin = zero_precision(HalfPrecision("bf16-true"))
    for patterns, expected in [((), LOW), ((nn.LayerNorm,), torch.float32)]:
        plugin.take_options("step", patterns)
        with plugin.module_init_context():
            assert nn.Linear(1, 1).weight.dtype == expected


def test_no_effect_is_an_error():
    strategy = ZeroStrategy(2, keep_fp32=["norm"])
    with pytest.raises(ValueError, match=r"keep_fp32=\['norm'\] has no effect with precision='32-"):
        strategy.precision_plugin = Precision()
    with pytest.raises(ValueError, match="keep_fp32 must be a list of module classes and names"):
        ZeroStrategy(2, keep_fp32="norm")


def test_fabric_takes_it_too_and_warns_of_a_model_without_such_a_part():
    strategy = lightning_zero.fabric.ZeroStrategy(2, keep_fp32=["router", nn.Conv2d])
    with pytest.raises(ValueError, match="has no effect with precision='32-true'"):
        strategy.precision = FabricPrecision()
    strategy.precision = FabricHalfPrecision("bf16-true")
    with pytest.warns(UserWarning, match=r"Conv2d.*chooses nothing in this Net"):
        model = strategy.precision.convert_module(Net())
    assert model.router[0].weight.dtype == torch.float32
    assert model.head.weight.dtype == LOW
    with strategy.precision.module_init_context():
        assert nn.Linear(1, 1).weight.dtype == torch.float32
    with strategy.precision.forward_context():
        assert torch.ones(1).dtype == LOW
