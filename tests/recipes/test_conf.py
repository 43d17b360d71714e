"""The shipped configuration: every choice of every group composes, and builds a strategy."""

from pathlib import Path

import hydra
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lightning_zero import ZeroStrategy

CONF = Path(__file__).parents[2] / "conf"
CHOICES = sorted(path.relative_to(CONF).with_suffix("").parts for path in CONF.glob("*/*.yaml"))


def compose_overrides(*overrides):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_choice_composes_and_builds_a_strategy(group, choice):
    cfg = compose_overrides(f"{group}='{choice}'", "data.path=README.md")
    assert not OmegaConf.missing_keys(cfg)
    strategy = hydra.utils.instantiate(cfg.strategy, _convert_="all")
    assert isinstance(strategy, ZeroStrategy)


def test_groups_are_the_documented_ones():
    groups = {group for group, _ in CHOICES}
    assert groups == {
        *("stage", "overlap", "offload", "zenflow"),
        *("checkpoint", "model", "data", "trainer"),
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stage_group_sets_the_stage(stage):
    cfg = compose_overrides(f"stage='{stage}'")
    assert cfg.strategy.stage == stage
    assert hydra.utils.instantiate(cfg.strategy).options.stage == stage


@pytest.mark.parametrize(("choice", "value"), [("on", True), ("off", False)])
def test_overlap_group_sets_overlap_comm(choice, value):
    assert compose_overrides(f"overlap={choice}").strategy.overlap_comm is value


def test_values_are_plain():
    for path in CONF.glob("*/*.yaml"):
        assert "_target_" not in path.read_text(), path


def test_trainer_choices_share_the_default():
    default = compose_overrides().trainer
    for choice in ("cpu", "gpu", "smoke"):
        assert set(compose_overrides(f"trainer={choice}").trainer) == set(default)


@pytest.mark.parametrize(
    ("choice", "optimizer", "parameters"),
    [
        ("none", None, None),
        ("cpu", ("cpu", 1.0), None),
        ("twin", ("cpu", 0.5), None),
        ("super", ("cpu", 1.0), None),
        ("params", ("cpu", 1.0), ("cpu", 1.0)),
        ("nvme", ("nvme", 1.0), ("nvme", 1.0)),
    ],
)
def test_offload_group_sets_what_leaves_the_device(choice, optimizer, parameters):
    cfg = compose_overrides(f"offload={choice}", "stage='3'")
    plan = hydra.utils.instantiate(cfg.strategy, _convert_="all").options.offload
    for config, expected in ((plan.optimizer, optimizer), (plan.parameters, parameters)):
        assert (config and (config.device, config.ratio)) == expected


def test_offload_group_steps_during_backward():
    cfg = compose_overrides("offload=super", "stage='2'")
    plan = hydra.utils.instantiate(cfg.strategy, _convert_="all").options.offload
    assert plan.steps_ahead
    assert plan.optimizer.worker_share == 0.8


@pytest.mark.parametrize(("choice", "interval"), [("off", None), ("topk", 4), ("auto", "auto")])
def test_zenflow_group_sets_what_is_stepped_when(choice, interval):
    cfg = compose_overrides(f"zenflow='{choice}'", "stage='2'")
    plan = hydra.utils.instantiate(cfg.strategy, _convert_="all").options.offload
    assert (plan.zenflow and plan.zenflow.update_interval) == interval
    assert (plan.optimizer is None) == (interval is None)
