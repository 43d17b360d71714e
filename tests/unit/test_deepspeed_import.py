"""Folders in DeepSpeed's layout become ordinary checkpoints with the same values."""

from __future__ import annotations

import pickle
import shutil
import weakref
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from lightning_zero.checkpoint import deepspeed
from lightning_zero.checkpoint.deepspeed import (
    DeepSpeedImportWarning,
    import_deepspeed,
    read_deepspeed,
)
from lightning_zero.checkpoint.deepspeed_files import find
from lightning_zero.cli import main
from lightning_zero.memory import spool
from tests.helpers.deepspeed_folders import HALF, Layout, Odd, trained

OPTIMIZER, MODEL = "zero_pp_rank_{}_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"
LAYOUTS = {
    **{
        f"stage {stage}, {ranks} ranks": Layout(stage, ranks)
        for stage in (1, 2, 3)
        for ranks in (1, 2, 3)
    },
    "more ranks than elements of a group": Layout(1, 40),
    "more ranks than elements of a parameter": Layout(3, 6),
    "parameters aligned": Layout(2, 2, alignment=4),
    "dealt out to ranks": Layout(2, 3, round_robin=True),
    "dealt out and aligned": Layout(1, 2, round_robin=True, alignment=4),
    "sub-groups": Layout(3, 3, sub_group_numel=6),
    "bf16 copies": Layout(2, 2, copies=torch.bfloat16, prefix="bf16_"),
    "bf16 copies, sub-groups": Layout(3, 2, copies=torch.bfloat16, sub_group_numel=6),
    "bf16 optimizer": Layout(1, 2, copies=torch.bfloat16, is_padded=True, prefix="bf16_"),
    "old file format": Layout(2, 2, legacy=True),
}


@pytest.fixture(scope="module")
def truth():
    return trained()


def check(found, module, optimizer, copies=torch.float32):
    """All values are those of the model and the optimizer, to the last bit."""
    expected = module.state_dict()
    assert list(found["state_dict"]) == list(expected)
    for name, value in expected.items():
        own = found["state_dict"][name]
        assert own.dtype == value.dtype, name
        if not (copies in HALF and name.startswith("still.")):  # those may be copies
            assert torch.equal(own, value), name
    pointers = {found["state_dict"][f"{name}.weight"].data_ptr() for name in ("head", "token")}
    assert len(pointers) == 1, "tied weights are two"
    [own] = found["optimizer_states"]
    plain = optimizer.state_dict()
    assert own["param_groups"] == plain["param_groups"]
    names = {p: n for n, p in module.named_parameters()}
    assert own["param_names"] == [
        [names[p] for p in group["params"]] for group in optimizer.param_groups
    ]
    assert own["state"].keys() == plain["state"].keys()
    order = [name for group in own["param_names"] for name in group]
    for number, states in plain["state"].items():
        extra = {"master_weight"} if copies in HALF else set()
        assert own["state"][number].keys() == states.keys() | extra
        for key, value in states.items():
            assert own["state"][number][key].dtype == value.dtype
            assert torch.equal(own["state"][number][key], value), (order[number], key)
        for key in extra:
            assert torch.equal(own["state"][number][key], expected[order[number]])


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_value_is_that_of_the_run(name, truth, tmp_path):
    layout = LAYOUTS[name]
    layout.write(tmp_path / "run", *truth)
    found = read_deepspeed(tmp_path / "run")
    check(found, *truth, layout.copies)
    frozen = truth[0].still.weight
    if layout.stage == 1:  # there are only copies of them
        frozen = frozen.to(layout.copies).float()
    assert torch.equal(found["state_dict"]["still.weight"], frozen)
    assert (found["epoch"], found["global_step"], found["lr_schedulers"]) == (0, 3, [])


def test_a_file_is_the_same_and_no_two_tensors_are_in_memory(truth, tmp_path, monkeypatch):
    Layout(3, 2).write(tmp_path / "run", *truth)
    expected = read_deepspeed(tmp_path / "run")
    monkeypatch.setattr(spool, "free_nbytes", lambda: 0)
    kept = []
    copied = spool.Spool.copied
    monkeypatch.setattr(
        spool.Spool, "copied", lambda self, value: kept.append(1) or copied(self, value)
    )
    monkeypatch.setattr(spool, "IN_MEMORY", set())  # wherever tests have their files
    import_deepspeed(tmp_path / "run", tmp_path / "new" / "one.ckpt")
    assert len(kept) == 7 + 2 + 2 + 2 * 7  # trained, frozen, buffers, moments
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["one.ckpt"]
    found = torch.load(tmp_path / "new" / "one.ckpt", weights_only=True)
    assert list(found) == list(expected)
    check(found, *truth)

    alive = weakref.WeakSet()

    def keep(tensor):
        assert not alive, "an earlier tensor is still in memory"
        alive.add(tensor)
        return torch.empty_like(tensor, device="meta")

    deepspeed._read(find(tmp_path / "run"), False, keep)


@pytest.mark.parametrize("stage", [1, 3])
def test_training_goes_on_from_the_file(stage, tmp_path):
    module, optimizer = trained(3)
    Layout(stage, 2).write(tmp_path / "run", module, optimizer)
    assert main(["import-deepspeed", str(tmp_path / "run"), str(tmp_path / "one.ckpt")]) == 0
    loaded = Odd.load_from_checkpoint(tmp_path / "one.ckpt")
    assert torch.equal(loaded.up.weight, module.up.weight)

    resumed = Odd(batches=2)
    user = one_process(max_epochs=1)
    user.fit(resumed, ckpt_path=tmp_path / "one.ckpt")
    assert (resumed.lowest_step, user.global_step) == (3, 5)
    for tokens in resumed.train_dataloader():
        optimizer.zero_grad()
        module(tokens).backward()
        optimizer.step()
    for name, value in module.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def one_process(**options):
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return pl.Trainer(accelerator="cpu", devices=1, **dict.fromkeys(quiet, False), **options)


def test_what_lightning_puts_into_a_folder_comes_back(tmp_path):
    """Its strategy gives DeepSpeed all of a checkpoint but weights and optimizer states."""
    module, user = Odd(), one_process(max_epochs=1)
    user.fit(module)
    user.save_checkpoint(tmp_path / "plain.ckpt")
    plain = torch.load(tmp_path / "plain.ckpt", weights_only=True)
    client = {k: v for k, v in plain.items() if k not in ("state_dict", "optimizer_states")}
    Layout(3, 2, client=client).write(tmp_path / "run", module, user.optimizers[0])
    import_deepspeed(tmp_path / "run", tmp_path / "one.ckpt")
    found = torch.load(tmp_path / "one.ckpt", weights_only=True)
    check(found, module, user.optimizers[0])
    assert found.keys() == plain.keys()
    assert {key: found[key] for key in client} == client
    states = []
    for name in ("plain", "one"):
        resumed, user = Odd(), one_process(max_epochs=3)
        user.fit(resumed, ckpt_path=tmp_path / f"{name}.ckpt")
        assert (resumed.lowest_step, user.global_step, user.current_epoch) == (6, 9, 3)
        states.append(resumed.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def with_prefix(model):
    long = "_forward_module."
    for key in ("module", "frozen_param_shapes", "frozen_param_fragments"):
        model[key] = {long + name: value for name, value in model[key].items()}
    model["param_shapes"] = [{long + n: s for n, s in g.items()} for g in model["param_shapes"]]
    model["buffer_names"] = [long + name for name in model["buffer_names"]]
    model["shared_params"] = {long + a: long + b for a, b in model["shared_params"].items()}


def test_what_lightning_had_saved_is_there_and_its_prefix_is_not(truth, tmp_path):
    client = {
        "epoch": 4,
        "global_step": 17,
        "pytorch-lightning_version": "2.0.9",
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(0.5)}},
        "lr_schedulers": [{"last_epoch": 17}],
        "hyper_parameters": {"width": 5, "folder": Path("a")},
    }
    Layout(2, 2, client=client).write(tmp_path / "run", *truth, only(MODEL, with_prefix))
    found = read_deepspeed(tmp_path / "run")
    check(found, *truth)
    assert {key: found[key] for key in client} == client
    assert found.keys() == {*client, "state_dict", "optimizer_states"}


class Runs:
    """An object that runs code when it is read."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return exec, (f"open({str(self.file)!r}, 'w').close()",)


class Options:
    """Something of a user's."""

    def __init__(self):
        self.width = 5


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_files_does_not_run_unless_trusted(legacy, truth, tmp_path):
    mark = tmp_path / "ran"
    client = {"mine": [{"deep": Runs(mark)}], "options": Options(), "seen": 5}
    Layout(2, 2, client=client, legacy=legacy).write(tmp_path / "run", *truth)
    with pytest.warns(DeepSpeedImportWarning, match="'mine', 'options' hold objects .*--trust"):
        found = read_deepspeed(tmp_path / "run")
    check(found, *truth)
    assert found.keys().isdisjoint({"mine", "options"})
    assert found["seen"] == 5
    assert not mark.exists()
    found = read_deepspeed(tmp_path / "run", is_trusted=True)
    assert found["options"].width == 5
    assert mark.exists()
    check(found, *truth)


class Removes:
    """What nothing can stand in for."""

    def __reduce__(self):
        return __import__("os").unlink, ("/nowhere",)


def test_modules_of_the_system_are_refused(truth, tmp_path):
    Layout(1, 1, client={"mine": Removes()}).write(tmp_path / "run", *truth)
    with pytest.raises(
        pickle.UnpicklingError, match=r"code that it names: posix.unlink. .*--trust"
    ):
        read_deepspeed(tmp_path / "run")


def only(file, edit):
    """An edit of one file, or of those whose names end like this."""
    return lambda name, content: edit(content) if name.endswith(file) else None


def shorter(content):
    flat = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    flat[0] = flat[0][:-4]


def swapped_out(content):
    content["optimizer_state_dict"]["fp32_flat_groups"][0] = torch.empty(1)


def of_other_stage(content):
    content["optimizer_state_dict"]["zero_stage"] = 1


def without_stage(content):
    del content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    del content["optimizer_state_dict"]["zero_stage"]


def of_experts(content):
    content["optimizer_state_dict"]["partition_count"] = [2, 1]


def of_more_ranks(content):
    content["dp_world_size"] = 4


def without_module(content):
    content["module"] = None


EDITS = {
    "a slice is too short": (2, OPTIMIZER.format(0), shorter, "token.weight.*ranks have"),
    "weights on NVMe": (3, OPTIMIZER.format(1), swapped_out, "offload to NVMe"),
    "stages differ": (2, OPTIMIZER.format(1), of_other_stage, "not of one run.*stage 1 on 2"),
    "another optimizer": (2, OPTIMIZER.format(0), without_stage, "ZeRO stage None"),
    "experts": (2, OPTIMIZER.format(0), of_experts, r"\[2, 1\] ranks.*mixtures of experts"),
    "ranks differ": (2, MODEL, of_more_ranks, "written by 4 ranks, the optimizer files by 2"),
    "pipeline": (2, MODEL, without_module, "no entries of a module"),
}


@pytest.mark.parametrize("name", EDITS)
def test_files_that_do_not_fit_are_an_error(name, truth, tmp_path):
    stage, file, edit, message = EDITS[name]
    Layout(stage, 2).write(tmp_path / "run", *truth, only(file, edit))
    with pytest.raises(ValueError, match=message):
        read_deepspeed(tmp_path / "run")


def test_missing_and_needless_files_are_named(truth, tmp_path, capsys):
    layout = Layout(3, 3)
    run = layout.write(tmp_path / "run", *truth)
    folder = run / layout.tag

    def fails(error, message, place=run):
        with pytest.raises(error, match=message):
            read_deepspeed(place)

    for name in (layout.optimizer_file(2), layout.model_file(1)):
        (folder / name).rename(tmp_path / "away")
        fails(FileNotFoundError, rf"{name} missing.*rank")
        (tmp_path / "away").rename(folder / name)
    extra = folder / layout.optimizer_file(3)
    shutil.copy(folder / layout.optimizer_file(0), extra)
    fails(ValueError, f"by 3 ranks, but has files of 4: {extra.name}")
    extra = extra.rename(folder / f"bf16_{layout.optimizer_file(0)}")
    fails(ValueError, "more than one run")
    extra = extra.rename(folder / "layer_00-model_00-model_states.pt")
    fails(ValueError, "pipeline stages")
    extra = extra.rename(folder / "mp_rank_01_model_states.pt")
    fails(ValueError, "tensor parallelism")
    extra.unlink()
    read_deepspeed(folder)
    (folder / layout.optimizer_file(1)).write_bytes(b"PK\x03\x04 and nothing else")
    fails(ValueError, "damaged")
    (run / "latest").write_text("global_step9")
    fails(FileNotFoundError, "global_step9")
    (run / "latest").unlink()
    fails(FileNotFoundError, r"neither a file 'latest'.*\['global_step3'\]")
    fails(FileNotFoundError, "there is no folder", tmp_path / "nowhere")
    fails(NotADirectoryError, "is a file", folder / layout.model_file(0))
    (tmp_path / "plain").mkdir()
    torch.save({}, tmp_path / "plain" / MODEL)
    fails(ValueError, "without ZeRO", tmp_path / "plain")
    assert main(["import-deepspeed", str(tmp_path / "plain"), str(tmp_path / "x.ckpt")]) == 1
    assert "without ZeRO" in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "x.ckpt").exists()


def elastic(content):
    content["optimizer_state_dict"]["base_optimizer_state"] = []


def whole_matrices(content):
    states = content["optimizer_state_dict"]["base_optimizer_state"]["state"]
    states[0]["row"] = torch.zeros(3)


def without_moment(content):
    del content["optimizer_state_dict"]["base_optimizer_state"]["state"][1]["exp_avg"]


@pytest.mark.parametrize(
    ("file", "edit", "reason"),
    [
        ("optim_states.pt", elastic, "elastic kind"),
        ("optim_states.pt", whole_matrices, "'row' has not one value per element"),
        (OPTIMIZER.format(1), without_moment, "ranks hold different states"),
    ],
)
def test_weights_come_without_states_that_cannot_be_taken(file, edit, reason, truth, tmp_path):
    Layout(2, 2).write(tmp_path / "run", *truth, only(file, edit))
    with pytest.warns(DeepSpeedImportWarning, match=f"left out: .*{reason}.* are complete"):
        found = read_deepspeed(tmp_path / "run")
    assert "optimizer_states" not in found
    assert torch.equal(found["state_dict"]["up.bias"], truth[0].up.bias)


def older(name, content):
    """Steps counted by group, all flat groups in one, and a parameter that nobody trains."""
    if "model" in name:
        content["module"]["idle"] = torch.empty(0)
        return
    zero = content["optimizer_state_dict"]
    for number, group in enumerate(zero["optimizer_state_dict"]["param_groups"]):
        del zero["optimizer_state_dict"]["state"][number]["step"]
        group["step"] = 3
    zero["fp32_flat_groups"] = [torch.cat(zero["fp32_flat_groups"])]


def test_older_files_and_weights_that_are_nowhere(truth, tmp_path):
    Layout(3, 2).write(tmp_path / "run", *truth, older)
    with pytest.warns(DeepSpeedImportWarning, match="do not hold 'idle'"):
        found = read_deepspeed(tmp_path / "run")
    check(found, *truth)
