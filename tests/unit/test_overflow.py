"""What is told of steps that are skipped, and when."""

from lightning_zero.optim.overflow import LOUD_AFTER, SkippedSteps

WHERE = [[], ["a.weight", "b", "c", "d", "e", "f", "g"]]


def test_the_first_skip_is_told_and_the_next_few_are_only_counted():
    skips = SkippedSteps()
    text, is_warning = skips.skipped(7, 65536.0, WHERE)
    assert not is_warning
    assert "step 7 was skipped on all ranks" in text
    assert "loss scale 65536" in text
    assert "in rank 1's part of a.weight, b, c, d, e and 2 more" in text
    assert "rank 0" not in text
    assert skips.skipped(8, 32768.0, WHERE) == ("", False)
    assert (skips.count, skips.in_a_row) == (2, 2)


def test_a_frozen_run_is_a_warning_ever_more_seldom():
    skips = SkippedSteps()
    warned = []
    for number in range(1, 100 * LOUD_AFTER + 1):
        text, is_warning = skips.skipped(0, 1.0, WHERE)
        if is_warning:
            assert f"{number} steps in a row" in text
            warned.append(number)
    assert warned == [LOUD_AFTER, 10 * LOUD_AFTER, 100 * LOUD_AFTER]


def test_an_update_ends_a_row_but_not_the_count():
    skips = SkippedSteps()
    for _ in range(3):
        for _ in range(LOUD_AFTER - 1):
            assert not skips.skipped(0, 1.0, WHERE)[1]
        skips.stepped()
    assert (skips.count, skips.in_a_row) == (3 * (LOUD_AFTER - 1), 0)
