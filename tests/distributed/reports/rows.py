"""What breaks sharded training for its users: 33 rows, and the tests of each."""

from __future__ import annotations

import importlib
from typing import NamedTuple

from tests.helpers.cells import STAGES, Cases

FOLDER = "tests/distributed/reports"
THEMES = (
    "test_divergence",
    "test_identity",
    "test_graph",
    "test_gradients",
    "test_optimizers",
    "test_precision",
    "test_checkpoints",
    "test_surface",
    "test_memory",
    "test_trained",
    "test_hooks",
    "test_files",
)


class Row(NamedTuple):
    """A kind of trouble."""

    title: str
    project: str
    """Where users have met it."""

    number: int
    """Of one of their reports, there."""


DEEPSPEED = "deepspeedai/DeepSpeed"
LIGHTNING = "Lightning-AI/pytorch-lightning"
PYTORCH = "pytorch/pytorch"

ROWS = {
    "A01": Row("A module runs another number of times on each rank", DEEPSPEED, 7998),
    "A02": Row("Parameters without a gradient: always, at times, on some ranks", DEEPSPEED, 777),
    "A03": Row("Experts that get work on some ranks only", DEEPSPEED, 4808),
    "A04": Row("Data that end on one rank first; Ctrl-C", LIGHTNING, 13498),
    "A05": Row("Generation of different length on each rank", DEEPSPEED, 8262),
    "A06": Row("Saving, reading or running on rank 0 only", DEEPSPEED, 2993),
    "A07": Row("Weights used outside of their module", DEEPSPEED, 930),
    "A08": Row("Weights made of other weights", DEEPSPEED, 1045),
    "A09": Row("Tied weights", DEEPSPEED, 3824),
    "A10": Row("Several forwards, another order, shared modules", DEEPSPEED, 5321),
    "A11": Row("Modules that take and return any container", DEEPSPEED, 1961),
    "A12": Row("Recomputed activations", DEEPSPEED, 7780),
    "A13": Row("Evaluation between training steps", "snowflakedb/ArcticTraining", 265),
    "A14": Row("fit, validate, test and predict in any order", LIGHTNING, 14993),
    "A15": Row("Several optimizers", LIGHTNING, 19773),
    "A16": Row("Accumulation of gradients", LIGHTNING, 19350),
    "A17": Row("Norms and clipping", PYTORCH, 170862),
    "A18": Row("Overflow on some ranks, or always", DEEPSPEED, 1599),
    "A19": Row("Dtypes that have to stay; fp32 masters", DEEPSPEED, 5812),
    "A20": Row("Parameter groups and schedulers", DEEPSPEED, 6873),
    "A21": Row("Resuming elsewhere: stage, strategy, number of ranks", DEEPSPEED, 2898),
    "A22": Row("Frozen weights and buffers in checkpoints", DEEPSPEED, 3090),
    "A23": Row("Size and memory of checkpoints", LIGHTNING, 20949),
    "A24": Row("What is trained changes during training", DEEPSPEED, 1767),
    "A25": Row("Initialization, shapes and summaries", DEEPSPEED, 2650),
    "A26": Row("Averages of weights", DEEPSPEED, 2056),
    "A27": Row("Optimizers that need whole tensors", DEEPSPEED, 490),
    "A28": Row("torch.compile", PYTORCH, 115484),
    "A29": Row("Memory between steps, and over many", DEEPSPEED, 5524),
    "A30": Row("Sizes of buckets and of parameters", DEEPSPEED, 6351),
    "A31": Row("States kept in host memory or in files", DEEPSPEED, 7905),
    "A32": Row("Second copies, quantized transfers, partial updates", DEEPSPEED, 7606),
    "A33": Row("Ranks started from a notebook", LIGHTNING, 6721),
}


class Elsewhere(NamedTuple):
    """A test outside of the cases that belongs to a row."""

    row: str
    test: str
    stages: tuple[int, ...] = STAGES


ELSEWHERE = tuple(
    Elsewhere(row, f"tests/distributed/{test}", *stages)
    for row, test, *stages in (
        ("A01", "test_divergence.py::test_ranks_may_run_different_modules", (3,)),
        ("A03", "test_fuzz_graphs.py::test_random_graphs_equal_a_single_process", (3,)),
        ("A04", "test_uneven_batches.py::test_trains_as_ddp_on_data_that_was_cut_before"),
        ("A04", "test_errors.py::test_ctrl_c_ends_all_ranks", (1, 3)),
        ("A07", "test_semantics.py::test_equals_ddp"),
        ("A17", "test_parity.py::test_norm_clipping_is_within_an_ulp_of_ddp"),
        ("A18", "test_precision.py::test_overflow_on_one_rank_skips_the_step_on_all"),
        ("A18", "test_precision.py::test_run_that_overflows_at_every_step_is_announced", (3,)),
        ("A18", "test_nonfinite.py::test_by_default_all_ranks_step_as_ddp_does_and_say_so"),
        (
            "A21",
            "test_restore_matrix.py"
            "::test_every_strategy_on_every_number_of_ranks_restores_everything",
        ),
        ("A22", "test_restore_contents.py::test_what_a_checkpoint_holds_comes_back"),
        ("A23", "test_checkpoint_files.py::test_a_file_is_the_same_where_memory_is_scarce", (3,)),
        (
            "A19",
            "test_keep_fp32.py::test_training_equals_ddp_with_the_casts_in_the_model_bit_for_bit",
        ),
        ("A24", "test_trained_set.py::test_equals_plain_data_parallelism"),
        ("A24", "test_trained_set.py::test_state_of_what_was_unfrozen_is_saved_and_resumed"),
        ("A24", "test_trained_set.py::test_base_finetuning"),
        ("A25", "test_construction.py::test_values_are_those_of_one_rank_alone", (3,)),
        (
            "A26",
            "test_averaging.py::test_training_validation_and_end_equal_weight_averaging_under_ddp",
        ),
        ("A28", "test_compile.py::test_compiled_modules_train_as_eager_ones"),
        ("A29", "test_memory.py::test_model_states_between_steps_equal_the_formula"),
        ("A29", "test_memory.py::test_peak_within_a_step_stays_within_the_buffer_bound"),
        ("A30", "test_parity.py::test_bucket_size_and_overlap_do_not_change_a_bit"),
        ("A33", "reports/test_launched.py::test_forked_ranks_train_the_callers_module"),
        ("A33", "test_launchers.py::test_the_callers_model_is_trained", (3,)),
        ("A33", "test_launchers.py::test_popen", (1, 3)),
    )
)


def all_cases() -> dict[str, Cases]:
    """The cases of all themes, by the name of their module."""
    return {
        name: importlib.import_module(f"tests.distributed.reports.{name}").CASES for name in THEMES
    }
