"""Adam in one pass: against torch's optimizers, on any memory, and what is put back."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from lightning_zero.ops import adam_step_, adam_step_undo_
from lightning_zero.ops.adam_reference import adam_step_reference_, adam_step_undo_reference_
from tests.ops.pieces import BASE, Pieces, random_pieces

SIZES = [1, 3, 8, 511, 512, 513, 1000]
FORMATS = [torch.float32, torch.bfloat16, torch.float16]
HAS_FMA = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")

pytestmark = pytest.mark.usefixtures("native")


def assert_near(found: Pieces, expected: Pieces, tolerance=2.0**-22):
    """All lists alike, up to the rounding of a few elements that torch does one by one."""
    for item in fields(Pieces):
        pairs = zip(getattr(found, item.name), getattr(expected, item.name), strict=True)
        for one, other in pairs:
            low = one.dtype in (torch.bfloat16, torch.float16)
            torch.testing.assert_close(one, other, rtol=2.0**-8 if low else tolerance, atol=1e-9)


@pytest.mark.skipif(not HAS_FMA, reason="torch itself rounds products on such a processor")
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("beta1", [0.9, 0.3])
def test_hundred_steps_are_those_of_torch_to_the_last_bit(decoupled, weight_decay, beta1):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(4096))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    settings = {"lr": 1e-2, "betas": (beta1, 0.99), "weight_decay": weight_decay}
    optimizer = kind([parameter], fused=True, **settings)
    ours = random_pieces([4096], torch.float32)
    ours.masters[0].copy_(parameter.detach())
    for state in (ours.exp_avgs[0], ours.exp_avg_sqs[0]):
        state.zero_()
    for count in range(1, 101):
        parameter.grad = torch.randn(4096)
        ours.grads = [parameter.grad]
        optimizer.step()
        ours.step(adam_step_, count, decoupled=decoupled, **settings)
        assert torch.equal(ours.masters[0], parameter)
    assert torch.equal(ours.exp_avgs[0], optimizer.state[parameter]["exp_avg"])
    assert torch.equal(ours.exp_avg_sqs[0], optimizer.state[parameter]["exp_avg_sq"])


@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize("copy_dtype", [None, *FORMATS])
@pytest.mark.parametrize("grad_dtype", FORMATS)
def test_step_of_odd_pieces_is_that_of_the_reference(grad_dtype, copy_dtype, is_aligned):
    pieces = random_pieces(SIZES, grad_dtype, copy_dtype, has_undo=True, is_aligned=is_aligned)
    expected = pieces.clone()
    for count in range(1, 4):
        pieces.step(adam_step_, count, grad_scale=0.37)
        expected.step(adam_step_reference_, count, grad_scale=0.37)
        assert_near(pieces, expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"maximize": True},
        {"maximize": True, "decoupled": False, "grad_scale": 3.0},
        {"betas": (0.0, 0.0)},
        {"betas": (0.5, 0.9), "eps": 1e-3},
        {"lr": 0.0},
        {"weight_decay": 0.0, "decoupled": False},
    ],
    ids=str,
)
def test_settings_mean_what_they_mean_to_the_reference(settings):
    pieces = random_pieces(SIZES, torch.bfloat16, torch.bfloat16)
    expected = pieces.clone()
    pieces.step(adam_step_, **settings)
    expected.step(adam_step_reference_, **settings)
    assert_near(pieces, expected)


def test_error_is_at_most_twice_that_of_plain_pytorch():
    """Against the same steps in double precision."""
    torch.manual_seed(1)
    start = torch.randn(3001)
    exact = torch.nn.Parameter(start.double())
    plain = torch.nn.Parameter(start.clone())
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    optimizers = [torch.optim.AdamW([p], foreach=False, **settings) for p in (exact, plain)]
    ours = Pieces([start.clone()], [torch.zeros(3001)], [torch.zeros(3001)], [])
    for count in range(1, 101):
        gradient = torch.randn(3001).bfloat16()
        exact.grad, plain.grad = gradient.double(), gradient.float()
        for optimizer in optimizers:
            optimizer.step()
        ours.grads = [gradient]
        ours.step(adam_step_, count, **settings)
    errors = [(found - exact).abs().max().item() for found in (ours.masters[0], plain.detach())]
    assert 0 < errors[0] <= 2 * errors[1]


def test_threads_do_not_change_the_result():
    numels = [100_001, 1, 0, 77, 50_000]
    pieces = random_pieces(numels, torch.bfloat16, torch.bfloat16, has_undo=True)
    alone = pieces.clone()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone.step(adam_step_)
        torch.set_num_threads(3)
        pieces.step(adam_step_)
    finally:
        torch.set_num_threads(threads)
    for name, tensors in vars(alone).items():
        assert all(map(torch.equal, tensors, getattr(pieces, name)))


def test_steps_of_pieces_are_counted_apart():
    together = random_pieces([64, 64], torch.float32)
    single = together.clone()
    lists = (together.masters, together.exp_avgs, together.exp_avg_sqs, together.grads)
    adam_step_(*lists, [1.0, 7.0], **BASE)
    for i, count in enumerate((1, 7)):
        of_one = {name: tensors[i : i + 1] for name, tensors in vars(single).items()}
        Pieces(**of_one).step(adam_step_, count)
    assert all(map(torch.equal, together.masters, single.masters))


@pytest.mark.parametrize("function", [adam_step_, adam_step_reference_])
def test_memory_in_another_order_is_stepped_as_it_lies(function):
    pieces = random_pieces([2 * 3 * 4 * 5], torch.float32, torch.bfloat16)
    flat = pieces.clone()
    as_images = {
        name: [t.view(2, 4, 5, 3).permute(0, 3, 1, 2) for t in tensors]
        for name, tensors in vars(pieces).items()
    }
    assert as_images["masters"][0].is_contiguous(memory_format=torch.channels_last)
    Pieces(**as_images).step(function)
    flat.step(function)
    assert torch.equal(pieces.masters[0], flat.masters[0])
    assert torch.equal(pieces.copies[0], flat.copies[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_sixteen_bit_gradient_is_taken_exactly(dtype):
    """With betas of zero the average is the gradient."""
    patterns = torch.arange(2**16).to(torch.uint16).view(dtype)
    pieces = random_pieces([2**16], torch.float32)
    pieces.exp_avgs[0].zero_()
    pieces.grads = [patterns]
    pieces.step(adam_step_, betas=(0.0, 0.0))
    finite = patterns.isfinite()
    assert torch.equal(pieces.exp_avgs[0][finite], patterns[finite].float())
    assert pieces.exp_avgs[0][~finite].isnan().all()  # zero times infinity
    assert pieces.masters[0][~finite].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_are_rounded_as_torch_rounds(dtype):
    """Weights of random bits, and around every boundary of the dtype; lr of zero keeps them."""
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2**17,)).int().view(torch.float32)
    values = torch.arange(2**16).to(torch.uint16).view(dtype).float()
    halves = (values + values.roll(1)) / 2
    above, below = (halves.nextafter(torch.full_like(halves, x)) for x in (1e38, -1e38))
    master = torch.cat([bits, values, halves, above, below, -halves])
    pieces = random_pieces([len(master)], torch.float32, dtype)
    pieces.masters = [master]
    pieces.step(adam_step_, lr=0.0, weight_decay=0.0)
    expected = master.to(dtype)
    is_nan = expected.isnan()
    assert torch.equal(pieces.copies[0].isnan(), is_nan)
    assert torch.equal(pieces.copies[0][~is_nan], expected[~is_nan])


@pytest.mark.parametrize("undo", [adam_step_undo_, adam_step_undo_reference_])
@pytest.mark.parametrize("copy_dtype", [None, *FORMATS])
def test_undone_step_leaves_no_trace(copy_dtype, undo):
    pieces = random_pieces(SIZES, torch.bfloat16, copy_dtype, has_undo=True)
    before = pieces.clone()
    pieces.step(adam_step_)
    assert not torch.equal(pieces.masters[0], before.masters[0])
    undo(pieces.masters, pieces.exp_avgs, pieces.exp_avg_sqs, pieces.undo, pieces.copies)
    for name in ("masters", "exp_avgs", "exp_avg_sqs"):
        assert all(map(torch.equal, getattr(pieces, name), getattr(before, name)))
    for copy, master in zip(pieces.copies, before.masters, strict=bool(copy_dtype)):
        assert torch.equal(copy, master.to(copy_dtype))


def test_autograd_notices_that_weights_have_changed():
    pieces = random_pieces([8], torch.float32)
    weight = pieces.masters[0].requires_grad_()
    loss = weight.square().sum()
    pieces.step(adam_step_)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_pieces_are_no_work():
    adam_step_([], [], [], [], [], **BASE)
    adam_step_undo_([], [], [], [])


def broken(**changed):
    def change(pieces):
        for name, value in changed.items():
            setattr(pieces, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (broken(grads=[]), "grads has 0 tensors and masters has 1"),
        (broken(grads=[torch.zeros(7)]), r"grads\[0\] .* does not lie in memory as masters\[0\]"),
        (broken(grads=[torch.zeros(8).double()]), r"grads\[0\] is torch.float64: must be"),
        (broken(grads=[torch.zeros(16)[::2]]), "has gaps or overlaps"),
        (broken(grads=[torch.zeros(1).expand(8)]), "has gaps or overlaps"),
        (broken(masters=[torch.zeros(8).half()]), r"masters\[0\] is torch.float16"),
        (broken(copies=[torch.zeros(8).long()]), r"copies\[0\] is torch.int64"),
        (broken(undo=[torch.zeros(8, 3)]), r"undo\[0\] has shape \(8, 3\)"),
        (broken(grads=[torch.zeros(8, device="meta")]), "is on meta and masters"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(change, message):
    pieces = random_pieces([8], torch.float32)
    change(pieces)
    with pytest.raises(ValueError, match=message):
        pieces.step(adam_step_)


def test_weights_in_another_order_than_gradients_are_refused():
    pieces = random_pieces([12], torch.float32)
    pieces.masters = [pieces.masters[0].view(3, 4).t()]
    pieces.grads = [pieces.grads[0].view(4, 3)]
    with pytest.raises(ValueError, match="does not lie in memory as"):
        pieces.step(adam_step_)


def test_counts_begin_at_one():
    with pytest.raises(ValueError, match=r"a step count is 0\.0"):
        random_pieces([8], torch.float32).step(adam_step_, 0)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_step_passes_the_checks_of_torch_for_ops(grad_dtype):
    pieces = random_pieces([5, 6], grad_dtype, torch.bfloat16, has_undo=True)
    numbers = (1e-3, 0.9, 0.999, 1e-8, 0.1, True, False, 1.0)
    lists = (pieces.masters, pieces.exp_avgs, pieces.exp_avg_sqs)
    torch.library.opcheck(
        torch.ops.lightning_zero.adam_step_.default,
        (*lists, pieces.grads, [1.0, 2.0], *numbers, pieces.copies, pieces.undo),
    )
    torch.library.opcheck(
        torch.ops.lightning_zero.adam_step_undo_.default, (*lists, pieces.undo, pieces.copies)
    )
