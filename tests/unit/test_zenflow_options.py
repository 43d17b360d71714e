"""Options of ZenFlow and its clock: what is refused, and which step does what."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zero import ShardGroups, ZenFlowConfig, ZeroEngine, ZeroOptions, ZeroStrategy
from lightning_zero.optim.zenflow.columns import (
    ChosenColumns,
    PieceColumns,
    columns_of,
    top_columns,
)
from lightning_zero.plan.layout import Slot
from lightning_zero.plan.zenflow import ZenFlowClock, check_epochs


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"topk_ratio": 1.1}, "topk_ratio must be a number from 0 to 1, got 1.1"),
        ({"topk_ratio": True}, "topk_ratio must be a number from 0 to 1, got True"),
        ({"topk_ratio": float("nan")}, "from 0 to 1, got nan"),
        ({"select_strategy": "steps"}, "must be 'auto', 'step' or 'epoch', got 'steps'"),
        ({"select_interval": 0}, "select_interval must be an integer of at least 1 or 'auto'"),
        ({"update_interval": "often"}, "update_interval must be an integer of at least 1"),
        ({"update_interval": 2.0}, "update_interval must be an integer of at least 1"),
        ({"full_warm_up_rounds": -1}, "full_warm_up_rounds must be an integer of at least 0"),
        ({"steps_per_epoch": 0}, "steps_per_epoch must be an integer of at least 1 or None"),
        ({"overlap_step": 1}, "overlap_step must be True or False, got 1"),
        ({"offload": None}, "offload must be True or False"),
        ({"auto_ratio": 0.5}, "auto_ratio=0.5 has no effect with update_interval=4"),
        ({"pt_reserved_cores_perc": 0.2}, "has no effect without overlap_step"),
        ({"topk_ratio": 1, "overlap_step": True}, "overlap_step has no effect with topk_ratio=1"),
        (
            {"select_strategy": "step", "steps_per_epoch": 3},
            "steps_per_epoch=3 has no effect with select_strategy='step'",
        ),
        (
            {"select_strategy": "step", "select_interval": 2},
            "select_interval=2 is shorter than update_interval=4",
        ),
    ],
)
def test_a_value_that_cannot_work_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        ZenFlowConfig(**options)
    with pytest.raises(ValueError, match=f"zenflow: .*{words}"):
        ZenFlowConfig.of(options)


def test_what_is_harmless_is_accepted():
    ZenFlowConfig(select_strategy="auto", select_interval=2)
    ZenFlowConfig(topk_ratio=1, update_interval=1)
    ZenFlowConfig(update_interval="auto", auto_ratio=0.5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zenflow": {}}, "say offload_optimizer='cpu', too, or remove zenflow"),
        ({"zenflow": {"top": 1}, "offload_optimizer": "cpu"}, "zenflow has no option 'top'"),
        ({"zenflow": True, "offload_optimizer": "cpu"}, "a ZenFlowConfig, a dict .* got True"),
        (
            {"zenflow": {}, "offload_optimizer": "nvme", "nvme_path": "/tmp"},
            "offload_optimizer='nvme' keeps them in files",
        ),
        (
            {"zenflow": {}, "offload_optimizer": "cpu", "stage": 0},
            "offload_optimizer needs stage 1, 2 or 3",
        ),
    ],
)
def test_zenflow_needs_states_in_host_memory(options, words):
    with pytest.raises(ValueError, match=words):
        _ = ZeroOptions(**options).offload


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.SGD(p, lr=1.0), "cannot do that for SGD: use torch.optim.Adam"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), r"does not know AdamW\(amsgrad=True\)"),
        (lambda p: type("Mine", (torch.optim.AdamW,), {})(p), "cannot do that for Mine"),
    ],
)
def test_other_optimizers_are_refused(make, words):
    net = nn.Linear(3, 3)
    options = ZeroOptions(stage=2, offload_optimizer="cpu", zenflow={})
    with pytest.raises(ValueError, match=words):
        ZeroEngine(net, [make(net.parameters())], options, ShardGroups.create())


def test_double_precision_is_refused():
    net = nn.Linear(3, 3, dtype=torch.float64)
    options = ZeroOptions(stage=2, offload_optimizer="cpu", zenflow={})
    with pytest.raises(ValueError, match="some parameters are fp64, which would lose precision"):
        ZeroEngine(net, [torch.optim.AdamW(net.parameters())], options, ShardGroups.create())


@pytest.mark.parametrize("options", [{}, {"update_interval": 1, "overlap_step": True}])
def test_a_self_check_has_to_have_something_to_compare_with(options):
    chosen = {"stage": 2, "offload_optimizer": "cpu", "zenflow": options}
    with pytest.raises(ValueError, match="self_check=2 compares with plain training"):
        ZeroStrategy(**chosen, self_check=2)
    ZeroStrategy(**{**chosen, "zenflow": {"update_interval": 1}}, self_check=2)


def test_somebody_has_to_tell_when_an_epoch_begins():
    with pytest.raises(ValueError, match="say steps_per_epoch=..., or select_strategy='step'"):
        check_epochs(ZenFlowConfig())
    check_epochs(ZenFlowConfig(steps_per_epoch=3))
    check_epochs(ZenFlowConfig(select_strategy="step"))
    check_epochs(None)


def turns(config: ZenFlowConfig, count: int, epoch: int | None = None) -> str:
    """Of each step: ``s`` it selects, ``u`` it updates, ``w`` it is one of warm-up."""
    clock, found = ZenFlowClock(config), []
    for step in range(count):
        if epoch is not None and step % epoch == 0:
            clock.begin_epoch()
        turn = clock.turn()
        letters = "w" * turn.is_warm_up + "s" * turn.selects + "u" * turn.updates
        found.append(letters or "-")
        clock.take(turn, turn.updates)
        again = ZenFlowClock(config)
        again.restore(clock.state())
        clock = again
    return " ".join(found)


@pytest.mark.parametrize(
    ("options", "epoch", "expected"),
    [
        ({"update_interval": 2}, 4, "s u - u s u - u"),
        ({"update_interval": 3}, 4, "s - u - s - u -"),
        ({"update_interval": 1}, 4, "su u u u su u u u"),
        ({"update_interval": 2, "select_interval": 2}, 2, "s u - u s u - u"),
        ({"update_interval": 2, "full_warm_up_rounds": 2}, 4, "wu wu s u s u - u"),
        ({"update_interval": 2, "steps_per_epoch": 4}, None, "s u - u s u - u"),
        (
            {"update_interval": 2, "select_strategy": "step", "select_interval": 3},
            None,
            "s u - s u - s u",
        ),
        ({"update_interval": "auto"}, 3, "s - - s - - s -"),
    ],
)
def test_the_clock_tells_which_step_does_what(options, epoch, expected):
    assert turns(ZenFlowConfig(**options), 8, epoch) == expected


def test_columns_are_the_input_channels_in_the_order_of_memory():
    linear = Slot("w", (3, 4), (4, 1), 0, 12)
    convolution = Slot("w", (5, 2, 3, 3), (18, 9, 3, 1), 0, 90)
    channels_last = Slot("w", (5, 2, 3, 3), (18, 1, 6, 2), 0, 90)
    assert [columns_of(slot) for slot in (linear, convolution, channels_last)] == [4, 18, 18]
    bias, scalar, empty = (
        Slot("b", (7,), (1,), 0, 7),
        Slot("s", (), (), 0, 1),
        Slot("e", (0, 3), (3, 1), 0, 0),
    )
    transposed = Slot("t", (3, 4), (1, 3), 0, 12)
    assert [columns_of(slot) for slot in (bias, scalar, empty, transposed)] == [1, 1, 1, 1]


@pytest.mark.parametrize("begin", [0, 1, 3, 4, 7])
@pytest.mark.parametrize("numel", [1, 2, 4, 5, 9, 17])
def test_pieces_are_packed_and_put_back_wherever_rows_end(begin, numel):
    matrix = torch.arange(40.0)
    flat = matrix[begin : begin + numel].clone()
    chosen = ChosenColumns(PieceColumns(4, begin, numel), torch.tensor([1, 3]), torch.device("cpu"))
    expected = flat[torch.tensor([(begin + i) % 4 in (1, 3) for i in range(numel)])]
    assert chosen.gather(flat).tolist() == expected.tolist()
    assert chosen.numel == len(expected)
    chosen.scatter_(flat, -expected)
    assert chosen.gather(flat).tolist() == (-expected).tolist()
    assert flat.abs().tolist() == matrix[begin : begin + numel].tolist()


def test_importance_of_pieces_adds_up_to_that_of_the_matrix():
    matrix = torch.randn(6, 5)
    found = sum(
        PieceColumns(5, begin, end - begin).importance(matrix.flatten()[begin:end])
        for begin, end in ((0, 3), (3, 17), (17, 30))
    )
    torch.testing.assert_close(found, matrix.double().square().sum(0))
    assert top_columns(torch.tensor([1.0, 3.0, 3.0, 0.0, 3.0]), 2).tolist() == [1, 2]
