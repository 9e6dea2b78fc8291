"""FP8 training by all bits: dh's codes against a formula, and sums of codes that are exact in any order."""

import pytest
import torch
from cases import BF16, F32, F64, LAYOUTS, Calls, Case, poisoned
from test_fp8_training import inputs_of, step

import fused_moe
from fused_moe import fused_experts
from fused_moe import ops as codes

pytestmark = pytest.mark.usefixtures("fp8")

ops = torch.ops.fused_moe


def assert_same_values(found: torch.Tensor, expected: torch.Tensor) -> None:
    """NaNs are equal, whatever their bits, and zeros."""
    assert found.shape == expected.shape
    found, expected = (t.cpu() for t in (found, expected))
    if found.dtype == torch.uint8:
        found, expected = (t.view(torch.float8_e4m3fn).float() for t in (found, expected))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def scale_of(peak: torch.Tensor) -> torch.Tensor:
    return torch.where(peak == 0, 1, (peak / torch.full_like(peak, 448)).clamp_min(2.0**-120))


def to_codes(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float8_e4m3fn).view(torch.uint8)


def row_blocks(counts):
    """(block, its rows) of each expert in turn; where its next expert's begin."""
    first = 0
    for e, count in enumerate(counts):
        for i in range(-(-count // 128)):
            yield first // 128 + e + i, slice(first + 128 * i, first + min(count, 128 * i + 128))
        first += count


COUNTS = (0, 1, 127, 128, 129, 0, 300, 5)


def ids_of_counts(counts, spare: int) -> torch.Tensor:
    """(T, 1) in any order, with -1 for `spare` tokens."""
    ids = torch.cat(
        (torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)), torch.full((spare,), -1))
    )
    return ids[torch.randperm(len(ids))].unsqueeze(1)


@pytest.mark.parametrize("layout", ("separate", "ungated"))
def test_codes_of_dh(device, layout):
    """From dh's rows, which the wgrad of 16 bits has: by rows, and by columns with the scales of x in them.
    Padding is zeros, and so are row blocks without rows and rows past the last one."""
    spare, E = 70, len(COUNTS)
    case = Case(sum(COUNTS) + spare, 256, 384, E, 1, BF16, layout=layout)
    inputs, dout = inputs_of(case, device), case.dout(device)
    dout *= torch.logspace(-9, 1, case.tokens, device=device).unsqueeze(1)
    ids = ids_of_counts(COUNTS, spare).to(device)
    R, H, blocks = case.tokens, 384 * (1 if layout == "ungated" else 2), case.tokens // 128 + E
    found = {}
    for wgrad in codes.WGRADS:
        with Calls() as calls, poisoned():
            step(fused_experts, inputs, dout, ids=ids, fp8=True, fp8_wgrad=wgrad, **case.options)
        ((_, made),) = calls.of("fp8_down_backward")
        ((_, up),) = calls.of("fp8_up")
        found[wgrad] = [t.cpu() for t in made[:4]]
        x_scale = up[5].cpu()
    by_row, row_scale, by_column, column_scale = found["fp8"]
    by_row, by_column = by_row.view(torch.uint8), by_column.view(torch.uint8)
    assert torch.equal(by_row, found["bf16"][0].view(torch.uint8))
    assert torch.equal(row_scale, found["bf16"][1]) and found["bf16"][3].shape == (0, H // 128)
    dh = found["bf16"][2].float()
    assert dh.shape == by_row.shape == (R, H)
    assert not dh[sum(COUNTS) :].count_nonzero() and dh[: sum(COUNTS)].count_nonzero() > 0.4 * dh.numel()

    peaks = dh.unflatten(1, (-1, 128)).abs().amax(-1)  # (R, H / 128)
    scale = scale_of(peaks)
    assert torch.equal(row_scale, scale.T)
    assert_same_values(by_row, to_codes(dh * (1 / scale).repeat_interleave(128, 1)))
    expected = torch.zeros(blocks, H, 128, dtype=torch.uint8)
    scales = torch.zeros(blocks, H // 128)
    for block, rows in row_blocks(COUNTS):
        of_x = x_scale[rows].unsqueeze(1)
        scales[block] = scale_of((of_x * peaks[rows]).amax(0))
        factor = of_x * (1 / scales[block])
        values = to_codes(dh[rows] * factor.repeat_interleave(128, 1))
        expected[block, :, : len(values)] = values.T
    assert torch.equal(column_scale, scales)
    assert_same_values(by_column.view(expected.shape), expected)


# --- exact sums ---------------------------------------------------------------------------------------

# Rows of each expert.
SUMS = {
    "row blocks": COUNTS,
    "one has all": (0, 0, 2500, 0),  # split
    "several are split": (700, 3, 1300, 0, 129),
    "few rows": (1, 0, 2, 0, 0, 1),
    "many experts": tuple(i * 7919 % 97 for i in range(33)),
}
NAN = 0x7F


def draw(values, *shape) -> torch.Tensor:
    return torch.tensor(values, dtype=F32)[torch.randint(len(values), shape)]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "pairs"])
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_small_integers(device, name, layout):
    """dx, dw1, dw3 and sums in main_grads are exact where codes are few and scales powers of two.
    Row blocks without rows are NaN here, and dh's padding numbers: x's are zeros. Two of four sizes: every
    one is there for each layout and for each name."""
    counts, spare, E = SUMS[name], 45, len(SUMS[name])
    stored, gated, _, transposed = LAYOUTS[layout]
    sizes = ((384, 128, BF16), (512, 384, F32), (1024, 128, BF16), (128, 256, F32))
    for D, F, dtype in sizes[(list(SUMS).index(name) + list(LAYOUTS).index(layout)) % 2 :: 2]:
        R, num_rows, H = sum(counts) + spare, sum(counts), 2 * F if gated else F
        ids = ids_of_counts(counts, spare)
        plan = fused_moe.route_plan(ids.to(device), E)
        tokens = plan.row_token[:num_rows].long().cpu()
        x = draw((0, 1, -1, 2, -2), R, D)
        x[:, 5] = 2  # its code is 448, whatever the row's scale
        x_rows = 224 * x[tokens].double()
        x *= draw((0.25, 1, 8), R, 1)
        dh, dh_t = (draw((0, 1, -1, 2, -2), *shape) for shape in ((R, H), (R // 128 + E, H, 128)))
        dh_scale, dh_t_scale = draw((1, 0.5), H // 128, R), draw((0.5, 1, 2, 4), R // 128 + E, H // 128)
        w_t, w_t_scale = draw((0, 1, -1, 2, -2), E, D, H), draw((0.5, 1, 2), E, D // 128, H // 128)

        dw, dx, first = torch.zeros(E, H, D, dtype=F64), torch.zeros(R, D, dtype=F64), 0
        is_used = torch.zeros(R // 128 + E, dtype=torch.bool)
        owner = torch.arange(E).repeat_interleave(torch.tensor(counts))
        for block, rows in row_blocks(counts):
            is_used[block] = True
            scale = dh_t_scale[block].double().repeat_interleave(128)
            of_block = dh_t[block, :, : rows.stop - rows.start].double()
            dw[owner[rows.start]] += scale[:, None] * (of_block @ x_rows[rows])
        for e, count in enumerate(counts):
            rows, first = slice(first, first + count), first + count
            wide = w_t_scale[e].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
            scaled = dh[rows].double() * dh_scale[:, rows].T.double().repeat_interleave(128, 1)
            dx[tokens[rows]] = scaled @ (w_t[e].double() * wide).T

        bytes_t = to_codes(dh_t)
        bytes_t[~is_used], dh_t_scale[~is_used] = NAN, torch.nan
        links = [to_codes(dh), dh_scale, bytes_t.flatten(1), dh_t_scale]
        dlink, dlink_scale, dlink_t, dlink_t_scale = (
            t.to(device).view(BF16) if t.dtype == torch.uint8 else t.to(device) for t in links
        )
        rows_of_w1 = F if stored == "separate" else H
        empty = [
            torch.empty((E, D, n) if transposed else (E, n, D), device=device, dtype=dtype)
            for n in (rows_of_w1, F)
        ]
        w1, w3 = (w.mT if transposed else w for w in empty)
        w3 = w3 if gated and stored == "separate" else None
        call = {
            "dlink_t": dlink_t, "dlink_t_scale": dlink_t_scale, "x": x.to(device, BF16),
            "w1": w1, "w3": w3, "plan": plan.tensors, "wgrad": 0,
            "layout": codes.LAYOUTS[stored] if gated else codes.UNGATED,
            "need_dw1": True, "need_dw3": w3 is not None,
        }  # fmt: skip
        if stored == "interleaved":
            dw = torch.stack((dw[:, :F], dw[:, F:]), 2).flatten(1, 2)
        expected = dw.split((rows_of_w1, F), 1) if w3 is not None else (dw, None)
        with poisoned():
            w_codes = [to_codes(w_t).to(device), w_t_scale.to(device)]
            found_dx = ops.fp8_up_backward(dlink, dlink_scale, call["x"], plan.tensors, w_codes)
            found = ops.fp8_up_weights_backward(**call)
        assert torch.equal(found_dx.cpu(), dx.to(BF16))
        sums = [None if w is None else torch.empty_like(w, dtype=F32).fill_(3) for w in (w1, w3)]
        with poisoned():
            ops.fp8_up_weights_backward_accumulate(**call, main_grad1=sums[0], main_grad3=sums[1])
        for i, its in enumerate(expected):
            if its is not None:
                assert torch.equal(found[i].cpu(), its.to(dtype)), f"dw of part {i}, {D}, {F}"
                assert torch.equal(sums[i].cpu(), (its + 3).to(F32)), f"sum of part {i}, {D}, {F}"


def test_sums_of_dout(device):
    """dw2 is exact where the codes of dout and of a are few. Tokens have several rows, one row, or none."""
    E, T, K = 7, 700, 3
    for D, F, dtype in ((384, 256, F32), (640, 256, BF16)):  # chunks of 128; of 256, 256 and 128 columns
        ids = torch.stack([torch.randperm(E - 1)[:K] for _ in range(T)])  # one expert has no rows
        ids[torch.rand(T, K) < 0.4] = -1
        plan = fused_moe.route_plan(ids.to(device), E)
        num_rows = int((ids >= 0).sum())
        tokens = plan.row_token[:num_rows].long().cpu()
        size = draw((0.25, 1, 8), T, 1)  # the scales of dout's rows, and the inverses of a's sizes
        dout, a = draw((0, 128, -128, 256, -256), T, D), draw((0, 128, 256), T * K, F)
        dout[:, 5], a[:, 3::128] = 448, 448  # the largest code
        a[:num_rows] /= size[tokens]
        dout *= size
        owner = ids.flatten().sort().values[-num_rows:]
        expected = torch.zeros(E, D, F, dtype=F64)
        for e in range(E):
            rows = (owner == e).nonzero().flatten()
            expected[e] = dout[tokens[rows]].double().T @ a[rows].double()
        w2 = torch.empty(E, D, F, device=device, dtype=dtype)
        call = {
            "dout": dout.to(device, BF16), "h": a.to(device, BF16), "w2": w2,
            "x_scale": torch.ones(T * K, device=device), "scores": None, "plan": plan.tensors, "wgrad": 0,
            "quantized": [
                torch.zeros(E, F, D, device=device, dtype=torch.uint8),
                torch.ones(E, F // 128, D // 128, device=device),
            ],
            "layout": codes.UNGATED, "activation": codes.ACTIVATION_CODES["relu"], "constants": [1.0, 1.0],
            "need_dw2": True, "need_dscores": False,
        }  # fmt: skip
        for need_dlink in (False, True):
            with poisoned():
                found = ops.fp8_down_backward(**call, need_dlink=need_dlink, need_dlink_t=need_dlink)
            assert torch.equal(found[4].cpu(), expected.to(dtype))
