"""How a result is judged: against the reference in float64, by what the eager loop errs in the same dtype.

Each tensor errs at most 1.1 times as much as eager's, in norm, plus one rounding of the dtype. Each row (the
last dimension; of dscores each element) is held to eager's rows likewise. So in 16 bits a tensor that is
scaled by 1.02 fails, and so does one row that is lost, or one dscore: test_judging.py.

Rounding errors are random, and few of them say little about their size:

  * A run of the suite judges millions of rows, and the worst of them errs several times as much as most.
    Their elements' errors are not independent: a weight gradient's row is a sum over few tokens, each of
    which brings one error and multiplies a whole row by it. Hence a row may err by ROWS times as much.
  * In one row eager may have been lucky. A row is held to the largest of eager's own error there and of
    what eager errs on average, relative to the row's norm and to the tensor's typical row norm.
  * In a tensor of a few elements, too, eager may have been lucky, and cancellation may have left little of
    signals of order one. The fewer errors there are, the more do their norms differ: by chance alone one of
    six is ten times another once in 100,000 times. A tensor may err by SMALL / sqrt(elements) + FEW /
    elements more: 1.5 times as much where it has 100, 4.6 times where it has 6. Its rows have FEW / elements
    more: 1.1 and 3 times as much.
"""

import math

import torch

import fused_moe

F32 = torch.float32
# Slack, in units of the dtype's eps, for sums in another order; in 16 bits, where sums are float32's and only
# results are rounded, in eighths of it: LOOSE is one rounding to nearest there. STRICT is for tensors large
# enough to do without.
LOOSE, STRICT = 4.0, 0.01
ROWS, SMALL, FEW = 5.0, 4.0, 12.0
ZERO = 1e-13  # what is left of zero by cancellation, as the gradient of a single renormalised score
ZERO_ROW = 8 * torch.finfo(F32).eps  # the same of a row of signals of order one, in float32


def forward_backward(fn, inputs: dict, dout: torch.Tensor, **fixed) -> dict:
    """{"out", "dx", "dw1", ...}: what fn returns and the gradient of every tensor of `inputs`."""
    leaves = {n: t.detach().requires_grad_() for n, t in inputs.items() if t is not None}
    out = fn(**{**inputs, **leaves}, **fixed)
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    return {"out": out.detach(), **{f"d{n}": g for n, g in zip(leaves, grads, strict=True)}}


def to_double(value):
    """Dicts, tuples and tensors in float64; integers and the rest as they are."""
    if isinstance(value, dict):
        return {n: to_double(v) for n, v in value.items()}
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_float else value


def check_against_reference(name: str, inputs: dict, dout: torch.Tensor, slack=LOOSE, **fixed) -> dict:
    """Runs fused_moe.<name>, forward and backward, and judges every tensor. Returns ours."""
    fn, reference = getattr(fused_moe, name), getattr(fused_moe.reference, name)
    ours = forward_backward(fn, inputs, dout, **fixed)
    eager = forward_backward(reference, inputs, dout, **fixed)
    exact = forward_backward(reference, to_double(inputs), to_double(dout), **fixed)
    assert_as_good(ours, eager, exact, slack)
    return ours


def unit_of(dtype: torch.dtype) -> float:
    """What slack counts."""
    eps = torch.finfo(dtype).eps
    return eps / 8 if dtype.itemsize == 2 else eps


def assert_as_good(ours: dict, eager: dict, exact: dict, slack: float = LOOSE) -> None:
    """Every tensor of `ours`, and every row, is as near to `exact` as eager's: see above.

    One exception, in float32: dscores is <g, a>, where the loop takes <y, dout>, so that y is never kept.
    g sums over D, but y over F, and a relu leaves <g, a> half of the terms.
    """
    # Half-precision inputs round gradients in their own dtype, scores in float32.
    unit = slack * max(unit_of(v.dtype) for v in ours.values())
    for name, truth in exact.items():
        mine, other = ours[name], eager[name]
        assert mine.shape == truth.shape, f"{name}: {tuple(mine.shape)}, not {tuple(truth.shape)}"
        assert mine.dtype == other.dtype, f"{name}: {mine.dtype}, not {other.dtype}"
        dot = name == "dscores" and ours["out"].dtype == F32
        # In float64 eager is the truth, and errs itself where hundreds of terms cancel: db2 of three elements
        # was seen 42 eps apart.
        more = 32 if truth.dtype == mine.dtype else 1
        judge(name, mine, other, truth.double(), more * (1.5 * unit if dot else unit), 1.3 if dot else 1.1)


def judge(name: str, mine, other, truth, unit: float, factor: float) -> None:
    """One tensor. `unit`: one rounding, relative."""
    if not truth.numel():
        return
    width = 1 if name == "dscores" or truth.dim() < 2 else truth.size(-1)
    truth = truth.reshape(-1, width)
    row_norm = truth.norm(dim=1)
    row_error = (mine.double().reshape(-1, width) - truth).norm(dim=1)
    row_eager = (other.double().reshape(-1, width) - truth).norm(dim=1)
    norm, error, eager = (v.norm().item() for v in (row_norm, row_error, row_eager))
    count = max(truth.count_nonzero().item(), 1)

    size = max(norm, math.sqrt(count))  # signals are of order one: less is what cancellation has left of them
    more = SMALL / math.sqrt(count) + FEW / count
    limit = factor * eager + unit * norm + more * (factor * eager + unit * size) + ZERO
    assert error <= limit, (  # also fails for NaN
        f"{name}: error {error / (norm or 1):.3e} of its norm, allowed {limit / (norm or 1):.3e}"
    )

    num_rows = max(row_norm.count_nonzero().item(), 1)
    scale = row_norm.clamp(min=size / math.sqrt(num_rows))
    level = torch.maximum(row_eager, eager / size * scale)
    row_limit = ROWS * (1 + FEW / count) * (factor * level + unit * scale) + ZERO
    zero_row = ZERO if mine.dtype == torch.float64 else ZERO_ROW
    row_limit = row_limit.where((row_norm > 0) | (row_eager > 0), zero_row)
    wrong = ~(row_error <= row_limit)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {len(wrong)} rows of {width}; the first is row {row}, error "
            f"{row_error[row]:.3e}, allowed {row_limit[row]:.3e}, norm {row_norm[row]:.3e}"
        )


def assert_near(ours, exact, slack=LOOSE) -> None:
    """Two tensors agree to a few units of rounding of the first one's dtype."""
    assert_as_good({"value": ours}, {"value": exact.to(ours.dtype)}, {"value": exact.double()}, slack)


def assert_same_bits(first: dict, second: dict) -> None:
    """Two runs gave the same numbers, to the last bit."""
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), f"{name} differs"
