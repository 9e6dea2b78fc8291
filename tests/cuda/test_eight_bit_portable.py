"""int8 rows times int8 weights on the sm80 tier, against a loop in float64 over the same codes."""

import pytest
import torch
from cases import ACTIVATIONS, BF16, F32, F64, assert_as_good, poisoned
from gpu_cases import HALF_DTYPES, draw_ids, launches, ops
from test_quantized import random_weight

from fused_moe import QuantizedWeight, reference
from fused_moe import ops as codes

pytestmark = pytest.mark.gpu

# tokens, K, E, D, F, routing: tiles of few rows and the usual ones; fewer k-tiles than stages and more; tails
# of rows, of k, of columns; an expert of several tiles, experts without rows.
SHAPES = {
    "one token": (1, 1, 1, 16, 16, "random"),
    "two rows each": (16, 2, 16, 272, 48, "random"),
    "few rows, cut": (70, 2, 10, 208, 80, "one"),
    "few rows, a long k": (30, 2, 6, 2608, 144, "random"),
    "16 rows each": (64, 2, 8, 128, 320, "random"),
    "17 rows": (17, 1, 1, 64, 128, "random"),
    "128 rows": (128, 1, 1, 144, 64, "random"),
    "129 rows": (129, 1, 1, 1040, 336, "random"),
    "one expert has all": (200, 2, 5, 256, 96, "one"),
    "many rows": (700, 3, 4, 320, 208, "random"),
    "no slot has an expert": (33, 2, 4, 64, 32, "none"),
    "some slots have none": (300, 2, 3, 96, 112, "sentinels"),
}
LAYOUTS = ("separate", "halves", "interleaved", "ungated")
ALPHA, LIMIT = 1.3, 0.9


@pytest.fixture(autouse=True)
def sm80(tier):
    """Weights that are made under it are not tiled."""
    tier("portable")


def draw_weight(E: int, n: int, k: int, scale_of: int, device) -> QuantizedWeight:
    """With products of order one. scale_of 0: a scale per row, 1: one per matrix."""
    w = random_weight("int8", E, n, k, device, scale_of)
    return QuantizedWeight(w.data, w.scale * (3 / k**0.5), None, format="int8", shape=w.shape)


def draw(shape: str, layout: str, scale_of: int, dtype, device, bias=False) -> dict:
    """Arguments of both functions below."""
    tokens, top_k, E, D, F, routing = SHAPES[shape]
    rows = F if layout in ("separate", "ungated") else 2 * F
    separate = layout == "separate"
    w1, w2, w3 = (draw_weight(E, n, k, scale_of, device) for n, k in ((rows, D), (D, F), (F, D)))
    biases = {"b1": torch.randn(E, rows), "b3": torch.randn(E, F), "b2": torch.randn(E, D)}
    biases = {n: b.to(device, dtype) if bias and (separate or n != "b3") else None for n, b in biases.items()}
    return {
        "x": torch.randn(tokens, D).to(device, dtype),
        "w1": w1,
        "w2": w2,
        "w3": w3 if separate else None,
        **biases,
        "scores": torch.rand(tokens, top_k).to(device),
        "ids": draw_ids(routing, tokens, top_k, E, device),
        "layout": layout,
        "activation": "gelu" if layout == "ungated" else "silu",
    }


def experts(
    x,
    w1,
    w2,
    w3,
    b1,
    b3,
    b2,
    scores,
    ids,
    layout,
    activation,
    score_on_input=False,
    smooth1=None,
    smooth2=None,
) -> torch.Tensor:
    lists = [[w.data, w.scale] if w else [] for w in (w1, w3, w2)]
    for i, smooth in ((0, smooth1), (2, smooth2)):
        lists[i] += [] if smooth is None else [smooth]
    number = codes.UNGATED if layout == "ungated" else codes.LAYOUTS[layout]
    settings = (number, codes.ACTIVATION_CODES[activation], [ALPHA, LIMIT])
    rest = (score_on_input, [w2.code] * 3, b1, b3, b2, None, None, None, True)
    with poisoned(), torch.no_grad():
        out, *_ = ops.experts(x, *lists, scores, ids, *settings, *[None] * 6, False, *rest)
    return out


def quantized(rows: torch.Tensor, rounds: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and scales (R, 1), of rows of float32; not rounded, for what codes err."""
    peak = rows.abs().amax(1, keepdim=True)
    scale = torch.where(peak == 0, 1, peak / 127)
    row_codes = rows * (1 / scale)
    return row_codes.round() if rounds else row_codes, scale


def product(rows: torch.Tensor, w: QuantizedWeight, e: int, bias, acc) -> torch.Tensor:
    """Rows of float32 times an expert's weight, both in codes."""
    row_codes, scale = quantized(rows, rounds=acc == F32)
    sums = row_codes.double() @ w.data[e].double().mT
    out = sums.to(acc) * (scale.to(acc) * w.scale[e].to(acc).mT)
    return out if bias is None else out + bias[e].to(acc)


def loop(
    x, w1, w2, w3, b1, b3, b2, scores, ids, layout, activation, score_on_input=False, smooth1=None,
    smooth2=None, acc=F64,
) -> torch.Tensor:  # fmt: skip
    """Expert by expert, in `acc`. In float32 rows become codes, y and the result are rounded; in float64 they
    do not, since an element near the middle of two codes may become either."""
    out = torch.zeros(x.shape, dtype=acc, device=x.device)
    for e in range(w2.shape[0]):
        token, slot = (ids == e).nonzero(as_tuple=True)
        score = scores[token, slot].unsqueeze(1)
        rows = x[token].float()
        if score_on_input:
            rows = (rows * score).to(x.dtype).float()
        if not len(rows):
            continue
        rows = rows if smooth1 is None else rows * (1 / smooth1[e])
        gate, up = product(rows, w1, e, b1, acc), None
        if layout == "halves":
            gate, up = gate.chunk(2, 1)
        elif layout == "interleaved":
            gate, up = gate[:, 0::2], gate[:, 1::2]
        elif layout == "separate":
            up = product(rows, w3, e, b3, acc)
        a = reference.activate(gate, up, activation=activation, alpha=ALPHA, limit=LIMIT)
        a = a.to(x.dtype).float()
        y = product(a if smooth2 is None else a * (1 / smooth2[e]), w2, e, b2, acc)
        y = y if acc == F64 else y.to(x.dtype).to(acc)
        out.index_add_(0, token, y if score_on_input else score.to(acc) * y)
    return out if acc == F64 else out.to(x.dtype)


def check(call: dict) -> None:
    found = experts(**call)
    assert_as_good({"out": found}, {"out": loop(**call, acc=F32)}, {"out": loop(**call)})


@HALF_DTYPES
@pytest.mark.parametrize("scale_of", (0, 1), ids=("scale per row", "scale per matrix"))
@pytest.mark.parametrize("shape", SHAPES)
def test_experts(device, shape, scale_of, dtype):
    for layout in LAYOUTS:
        for bias in (False, True):
            check(draw(shape, layout, scale_of, dtype, device, bias))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", ("two rows each", "one expert has all"))
def test_every_activation(device, shape, activation):
    for layout in LAYOUTS:
        check({**draw(shape, layout, 0, BF16, device, True), "activation": activation})


@HALF_DTYPES
@pytest.mark.parametrize("shape", ("two rows each", "many rows", "some slots have none"))
def test_rows_of_their_own(device, shape, dtype):
    """Inputs that are multiplied by scores, or divided by an expert's smooth1, are quantised row by row."""
    call = draw(shape, "halves", 0, dtype, device)
    E, D, F = call["w2"].shape[0], call["x"].size(1), call["w2"].shape[2]
    smooth1, smooth2 = (torch.rand(E, n).add(0.5).to(device) for n in (D, F))
    check({**call, "score_on_input": True})
    check({**call, "smooth1": smooth1, "smooth2": smooth2})
    check({**call, "smooth1": smooth1, "score_on_input": True})


@HALF_DTYPES
@pytest.mark.parametrize("tokens", (2, 17), ids=("few rows", "many rows"))
def test_exact_sums(device, tokens, dtype):
    """Codes of 127 and -127 cancel in partial sums of 2^25, of which float32 would lose bits."""
    D, F = 4096, 128
    data = torch.zeros(1, F, D, dtype=torch.int8, device=device)
    data[..., :2047], data[..., 2047:4094], data[0, :, -1] = 127, -127, torch.arange(-64, 64)
    x = torch.full((tokens, D), 127.0, dtype=dtype, device=device)
    x[:, -1] = 1
    call = {
        **draw("17 rows", "ungated", 0, dtype, device),
        "x": x,
        "w1": QuantizedWeight(
            data, torch.full((1, 1, 1), 1 / 32, device=device), None, format="int8", shape=(1, F, D)
        ),
        "w2": draw_weight(1, D, F, 0, device),
        "scores": torch.ones(tokens, 1, device=device),
        "ids": torch.zeros(tokens, 1, dtype=torch.int64, device=device),
        "activation": "relu",
    }
    check(call)


@HALF_DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_any_batch(device, layout, dtype):
    """A token has the same bits alone, among few and among many."""
    whole = draw("many rows", layout, 0, dtype, device, bias=True)
    expected = experts(**whole)
    for tokens in (1, 2, 3, 5, 20, 22, 100, 699):
        part = {n: whole[n][:tokens] for n in ("x", "scores", "ids")}
        assert torch.equal(experts(**{**whole, **part}), expected[:tokens])


@HALF_DTYPES
@pytest.mark.parametrize("shape", ("two rows each", "many rows"))
def test_nan_and_zeros_stay_in_their_token(device, shape, dtype):
    call = draw(shape, "separate", 0, dtype, device)
    expected = experts(**call)
    call["x"][3, 5], call["x"][6] = torch.nan, 0
    found = experts(**call)
    assert found[3].isnan().all() and not found[6].any()
    others = [t for t in range(len(found)) if t not in (3, 6)]
    assert torch.equal(found[others], expected[others])


@HALF_DTYPES
def test_which_kernels_run(device, dtype):
    for shape, tile in {
        "two rows each": "FewRowsTile",
        "16 rows each": "FewRowsTile",
        "17 rows": "TensorTile",
    }.items():
        call = draw(shape, "separate", 0, dtype, device)
        found = launches(lambda: experts(**call))  # noqa: B023
        for name in ("eight_bit_up_gate_kernel", "eight_bit_mm_kernel"):
            mine = [kernel for kernel in found if name in kernel]
            assert len(mine) == 1 and tile in mine[0] and "CodePair" in mine[0], found
        assert not any("dequantize" in kernel for kernel in found), found


@pytest.mark.sanitizer
def test_under_the_sanitizer(device):
    for shape in ("one token", "two rows each", "17 rows", "some slots have none"):
        for layout in LAYOUTS:
            check(draw(shape, layout, 1, BF16, device, True))
