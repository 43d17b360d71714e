"""What users see: names, keywords, docstrings, registered strategies."""

from __future__ import annotations

import ast
import inspect
import re

import pytest
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import lightning_zero
from lightning_zero import ZeroStrategy
from tests.architecture.source import decorators, trees

KEYWORDS = {  # in order, with their defaults
    "stage": 3,
    "overlap_comm": True,
    "bucket_numel": None,
    "master_weights": None,
    "reduce_dtype": None,
    "shard_by": "element",
    "prefetch": None,
    "gather_by": "auto",
    "leaf_modules": (),
    "offload_optimizer": None,
    "offload_parameters": None,
    "nvme_path": None,
    "zenflow": None,
    "keep_fp32": (),
    "nonfinite_gradients": "step",
    "uneven_batches": "stop",
    "wall_clock_breakdown": False,
    "timeline": None,
    "self_check": None,
    "checkpoint": "consolidated",
    "exclude_frozen_parameters": False,
    "timeout": lightning_zero.strategy.DEFAULT_TIMEOUT,
    "start_method": "popen",
    "process_group_backend": None,
    "accelerator": None,
    "parallel_devices": None,
    "cluster_environment": None,
    "checkpoint_io": None,
    "precision_plugin": None,
}
ONLY_TRAINER = {  # of the Trainer's loop or its plugins
    "uneven_batches",
    "wall_clock_breakdown",
    "timeline",
    "self_check",
    "exclude_frozen_parameters",
    "precision_plugin",  # is called precision there
}
FABRIC_KEYWORDS = {k: v for k, v in KEYWORDS.items() if k not in ONLY_TRAINER} | {"precision": None}
KEYWORDS_OF = {ZeroStrategy: KEYWORDS, lightning_zero.fabric.ZeroStrategy: FABRIC_KEYWORDS}
both = pytest.mark.parametrize("strategy", KEYWORDS_OF, ids=["trainer", "fabric"])
FUNCTIONS = (ast.FunctionDef, ast.ClassDef)


def test_package_exports_these_names():
    assert sorted(lightning_zero.__all__) == [
        "OffloadConfig",
        "ParamStatus",
        "PrefetchOptions",
        "ShardGroups",
        "ZenFlowConfig",
        "ZeroEMA",
        "ZeroEngine",
        "ZeroModelSummary",
        "ZeroOptions",
        "ZeroStrategy",
        "__version__",
        "fabric",
        "full_grad",
        "full_optimizer_state",
        "full_params",
        "load_state_dict_streamed",
        "newest_valid",
        "param_status",
        "register_external_parameter",
        "unregister_external_parameter",
    ]
    assert all(hasattr(lightning_zero, name) for name in lightning_zero.__all__)


def test_version_is_a_release_number():
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", lightning_zero.__version__)


@both
def test_strategy_takes_exactly_the_documented_keywords(strategy):
    parameters = inspect.signature(strategy).parameters
    assert {name: p.default for name, p in parameters.items()} == KEYWORDS_OF[strategy]
    assert list(parameters) == list(KEYWORDS_OF[strategy])


@both
def test_strategy_takes_only_the_stage_by_position(strategy):
    kinds = {name: p.kind for name, p in inspect.signature(strategy).parameters.items()}
    assert kinds.pop("stage") is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert set(kinds.values()) == {inspect.Parameter.KEYWORD_ONLY}


@both
def test_strategy_documents_each_keyword(strategy):
    text = inspect.getdoc(strategy)
    text = text[text.index("Args:") : text.index("Raises:")]
    documented = re.findall(r"^    (\w+):", text, flags=re.MULTILINE)
    assert documented == list(KEYWORDS_OF[strategy])


def test_strategy_is_a_ddp_strategy():
    assert issubclass(ZeroStrategy, DDPStrategy)
    assert issubclass(lightning_zero.fabric.ZeroStrategy, FabricDDPStrategy)


NAMES = {
    "zero_stage_1": (1, None, None),
    "zero_stage_2": (2, None, None),
    "zero_stage_3": (3, None, None),
    "zero_stage_2_offload": (2, "cpu", None),
    "zero_stage_3_offload": (3, "cpu", "cpu"),
    "zero_stage_3_nvme": (3, "nvme", "nvme"),
}


@pytest.mark.parametrize("name", NAMES)
def test_registered_name_makes_a_strategy_of_its_stage(name, monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTNING_ZERO_NVME_PATH", str(tmp_path))
    stage, optimizer, parameters = NAMES[name]
    options = {"accelerator": "cpu", "devices": 1, "strategy": name}
    for registry, made, kind in (
        (StrategyRegistry, Trainer(**options, logger=False).strategy, ZeroStrategy),
        (STRATEGY_REGISTRY, Fabric(**options).strategy, lightning_zero.fabric.ZeroStrategy),
    ):
        assert name in registry.available_strategies()
        assert type(made) is kind
        assert made.options.stage == stage
        plan = made.options.offload
        assert (plan.optimizer and plan.optimizer.device) == optimizer
        assert (plan.parameters and plan.parameters.device) == parameters


def test_name_with_files_says_that_a_folder_is_missing(monkeypatch):
    monkeypatch.delenv("LIGHTNING_ZERO_NVME_PATH", raising=False)
    with pytest.raises(ValueError, match="LIGHTNING_ZERO_NVME_PATH"):
        Trainer(accelerator="cpu", devices=1, strategy="zero_stage_3_nvme", logger=False)


@pytest.mark.parametrize("registry", [StrategyRegistry, STRATEGY_REGISTRY])
def test_no_other_names_are_registered(registry):
    ours = {name for name in registry.available_strategies() if name.startswith("zero")}
    assert ours == set(NAMES)


@pytest.mark.parametrize("file", sorted(trees()))
def test_public_things_have_a_docstring(file):
    tree = trees()[file]
    assert ast.get_docstring(tree), f"{file} says nothing of itself"
    missing = [name for name, node in _public("", tree) if not _is_documented(node)]
    assert not missing, f"{file}: no docstring at {missing}"


def _public(prefix, node):
    """Public functions and classes, and the public methods of those."""
    for child in node.body:
        if isinstance(child, FUNCTIONS) and not child.name.startswith("_"):
            yield f"{prefix}{child.name}", child
            if isinstance(child, ast.ClassDef):
                yield from _public(f"{child.name}.", child)


def _is_documented(node):
    has_another_owner = bool(decorators(node) & {"override", "setter"})
    return has_another_owner or ast.get_docstring(node) is not None
