"""The operators in float64, by fused_moe.reference and autograd, on rows in expert order; and the
comparison."""

import torch
from cases import LAYOUTS, Case, assert_near

from fused_moe import reference


def check(found: torch.Tensor, exact: torch.Tensor, roundings: int = 1, atol: float = 1e-4) -> None:
    """In norm, row by row, and element by element, so that one wrong element among thousands of rows
    shows. What `found` has past the last row is zeros."""
    num_rows = exact.size(0)
    assert_near(found[:num_rows], exact)
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found[:num_rows].double(), exact, rtol=roundings * eps, atol=atol)
    assert not found[num_rows:].count_nonzero()


def grouped_mm(a, b, offsets) -> torch.Tensor:
    return reference.grouped_mm(a[: int(offsets[-1])].double(), b.double(), offsets=offsets)


def wgrad(a, b, offsets) -> torch.Tensor:
    """(E, M, N): what grouped_mm(b, weight) gives the weight for the gradient a."""
    weight = a.new_zeros(offsets.size(0), a.size(1), b.size(1), dtype=torch.float64, requires_grad=True)
    out = reference.grouped_mm(b.double(), weight, offsets=offsets)
    return torch.autograd.grad(out, weight, a.double())[0]


def joined(first, second, dim: int = 1):
    """w1 and w3, or their biases, as one tensor of float64."""
    parts = [t.double() for t in (first, second) if t is not None]
    return torch.cat(parts, dim) if parts else None


def linear(rows, weight, bias, offsets) -> torch.Tensor:
    out = reference.grouped_mm(rows, weight, offsets=offsets)
    if bias is None:
        return out
    return out + bias.repeat_interleave(offsets.diff(prepend=offsets.new_zeros(1)).long(), 0)


def activated(case: Case, h: torch.Tensor) -> torch.Tensor:
    """a of h, whose columns are as the layout says."""
    name, gated, *_ = LAYOUTS[case.layout]
    if not gated:
        gate, up = h, None
    elif name == "interleaved":
        gate, up = h[:, 0::2], h[:, 1::2]
    else:
        gate, up = h.chunk(2, 1)
    return reference.activate(gate, up, activation=case.activation, alpha=1.702, limit=case.limit)


def up_gate(case: Case, rows, up: dict, offsets) -> tuple[torch.Tensor, torch.Tensor]:
    """h and a."""
    h = linear(rows.double(), joined(up["w1"], up["w3"]), joined(up["b1"], up["b3"]), offsets)
    return h, activated(case, h)


def down_dgrad(case: Case, dout, h, scores, down: dict, offsets) -> tuple[torch.Tensor, ...]:
    """dh, a_scaled and dscores of each row: the gradients of s (a w2^T + b2) at dout, of each row s."""
    h = h.double().requires_grad_()
    s = scores.double().requires_grad_()
    a = activated(case, h)
    bias = None if down["b2"] is None else down["b2"].double()
    out = s[:, None] * linear(a, down["w2"].double(), bias, offsets)
    dh, dscores = torch.autograd.grad(out, (h, s), dout.double())
    return dh, (s[:, None] * a).detach(), dscores
