"""experts with eight_bits: rows and weights are multiplied as codes of 8 bits, here against a plain loop that
quantises the same way. fused_moe.reference stays without it; csrc/eight_bit.h has the arithmetic."""

import pytest
import torch
from cases import (
    ACTIVATIONS,
    BF16,
    F16,
    F32,
    F64,
    LAYOUTS,
    Case,
    arguments_of,
    assert_as_good,
)

import fused_moe
from fused_moe import ops as codes
from fused_moe.activation import activate
from fused_moe.quantized.formats import BLOCK, FORMATS, NUMBERS

pytestmark = pytest.mark.usefixtures("poison")

EVERY_FORMAT = pytest.mark.parametrize("format", ("fp8_block", "fp8", "int8"))
EVERY_DTYPE = pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=("f32", "bf16", "f16"))
STORED = [name for name in LAYOUTS if not name.endswith(".T") and name != "pairs"]
# (D, F). GPUs have multiples of 16; 208 and 704 are none of 128.
WIDTHS = ((256, 128), (208, 704))
ODD_WIDTHS = ((37, 29), (130, 257), (1, 1), (700, 3))


# --- the plain loop ---------------------------------------------------------------------------------------


def quantized(values: torch.Tensor, code: str, power_of_two: bool = False, block: int = 0) -> torch.Tensor:
    """float32 values (R, n) as codes x scales, in float64. A row, or a block of its columns, has one scale.

    By csrc/eight_bit.h: peak / largest, and no scale below 2^-120."""
    largest = 448.0 if code == "e4m3" else 127.0
    done = []
    for part in values.split(block or values.size(1), 1):
        peak = part.abs().amax(1, keepdim=True)
        scale = (peak / largest).clamp_min(2.0**-120)
        if power_of_two:
            mantissa, exponent = torch.frexp(scale)
            scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
        scale = scale.where(peak != 0, 1.0)
        code_values = part * (1 / scale)
        if code == "e4m3":
            code_values = code_values.to(torch.float8_e4m3fn).double()
        else:
            code_values = code_values.round().double()
        done.append(code_values * scale.double())
    return torch.cat(done, 1)


def decoded(data: torch.Tensor, scale: torch.Tensor, format: str) -> torch.Tensor:
    """A weight (E, out, in) in float64, not rounded."""
    if format == "fp8_block":
        _, rows, cols = data.shape
        scale = scale.repeat_interleave(BLOCK, 1)[:, :rows].repeat_interleave(BLOCK, 2)[..., :cols]
    return data.double() * scale.double()


def loop(args: dict, accum: torch.dtype, quantizes: bool = True) -> torch.Tensor:
    """The operator's out. In float32 results are rounded as the operator rounds them; in float64 nothing is,
    but what is quantised; without `quantizes` only the weights are."""

    def as_codes(rows: torch.Tensor, block: int = 0) -> torch.Tensor:
        return quantized(rows, code, power_of_two, block) if quantizes else rows

    args = {n: v.cpu() if torch.is_tensor(v) else v for n, v in args.items()}
    x, scores, power_of_two = args["x"], args["scores"], args["power_of_two"]
    (format,) = (name for name, number in NUMBERS.items() if number == args["format"])
    code = FORMATS[format].code
    w1, w2, w3 = (
        None if args[f"data{i}"] is None else decoded(args[f"data{i}"], args[f"scale{i}"], format).to(accum)
        for i in (1, 2, 3)
    )
    b1, b2, b3 = (None if args[f"b{i}"] is None else args[f"b{i}"].to(accum) for i in (1, 2, 3))
    (activation,) = (name for name, number in codes.ACTIVATION_CODES.items() if number == args["activation"])
    alpha, limit = args["constants"]
    experts = local_ids(args)
    out = torch.zeros(len(x), w2.size(1), dtype=accum)
    for e in range(len(w1)):
        tokens, slots = (experts == e).nonzero(as_tuple=True)
        score = scores[tokens, slots, None]
        rows = x[tokens].float()
        if args["score_on_input"]:
            rows, score = (rows * score).to(x.dtype).float(), torch.ones_like(score)
        if args["smooth1"] is not None:
            rows = rows * (1 / args["smooth1"][e])
        rows = as_codes(rows).to(accum)

        def linear(rows, w, b, e=e):
            return rows @ w[e].T + (0 if b is None else b[e])

        gate, up = linear(rows, w1, b1), None
        if w3 is not None:
            up = linear(rows, w3, b3)
        elif args["layout"] == codes.LAYOUTS["halves"]:
            gate, up = gate.chunk(2, 1)
        elif args["layout"] == codes.LAYOUTS["interleaved"]:
            gate, up = gate[:, 0::2], gate[:, 1::2]
        a = activate(gate, up, activation=activation, alpha=alpha, limit=limit)
        if format == "fp8_block":
            a = as_codes(a.float(), BLOCK)
        else:
            a = a.to(x.dtype).float()
            if args["smooth2"] is not None:
                a = a * (1 / args["smooth2"][e])
            a = as_codes(a)
        y = linear(a.to(accum), w2, b2)
        if accum == F32:
            y = y.to(x.dtype).to(accum)
        out.index_add_(0, tokens, y * score.to(accum))
    if args["shared"] is not None:
        gate = args["shared_gate"]
        out += args["shared"].to(accum) * (1 if gate is None else gate.to(accum).sigmoid().view(-1, 1))
    return out.to(x.dtype) if accum == F32 else out


def local_ids(args: dict) -> torch.Tensor:
    """The expert of each slot, -1 where it has none here."""
    ids, expert_map = args["ids"].cpu().long(), args["expert_map"]
    if expert_map is not None:
        is_known = (ids >= 0) & (ids < len(expert_map))
        ids = expert_map.cpu().long()[ids.where(is_known, 0)].where(is_known, -1)
    return ids.where((ids >= 0) & (ids < len(args["data1"])), -1)


# --- calls ------------------------------------------------------------------------------------------------


def make(format: str, case: Case, device, per_tensor: bool = False, **more) -> dict:
    """The operator's arguments by name, of weights that are quantised from random ones."""
    t = case.inputs(device)
    stored, gated, _, _ = LAYOUTS[case.layout]
    args = {name: t[name] for name in ("x", "scores", "b1", "b2", "b3")}
    options = {} if format == "fp8_block" else {"per_tensor": per_tensor}
    for i in (1, 2, 3):
        args[f"data{i}"] = args[f"scale{i}"] = None
        if t[f"w{i}"] is not None:
            w = fused_moe.quantize(t[f"w{i}"].float(), format, **options)
            args |= {f"data{i}": w.data, f"scale{i}": w.scale.float()}
    args |= {
        "format": NUMBERS[format],
        "ids": case.ids(device),
        "layout": codes.LAYOUTS[stored] if gated else codes.UNGATED,
        "activation": codes.ACTIVATION_CODES[case.activation],
        "constants": [1.702, case.limit],
        "score_on_input": case.score_on == "input",
        "power_of_two": False,
    }
    none = dict.fromkeys(("smooth1", "smooth2", "expert_map", "shared", "shared_gate"))
    return {**none, **args, **more}


def run(args: dict) -> tuple:
    """The operator of arguments by name, a weight being data, scale and, of w1 and w2, smooth."""
    weights = {
        f"w{i}": [
            args[f"{name}{i}"] for name in ("data", "scale", "smooth") if args.get(f"{name}{i}") is not None
        ]
        for i in (1, 3, 2)
    }
    named = {n: v for n, v in args.items() if n.rstrip("123") not in ("data", "scale", "smooth", "format")}
    named |= {"formats": [args["format"]] * 3, "eight_bits": True}
    return torch.ops.fused_moe.experts(*arguments_of("experts", **named, **weights))


def call(args: dict) -> torch.Tensor:
    """The operator's out; its counts are checked."""
    out, counts, _ = run(args)
    experts = local_ids(args)
    assert counts.dtype == torch.int32
    assert counts.tolist() == [int((experts == e).sum()) for e in range(len(args["data1"]))]
    assert out.shape == (len(args["x"]), args["data2"].size(1))
    assert out.dtype == args["x"].dtype
    return out


def check(args: dict) -> torch.Tensor:
    """Runs the operator and judges it by the loop in float32.

    An element of `a` that is near the middle of two codes may become either, here and in the loop. In 16 bits
    the rounding of results hides it. In float32 such rows err by a code's distance; they are few, and the
    others are judged. A GPU sums e4m3 with fewer bits than float32 has, which moves more elements: there the
    error is that of codes, and the loop's may not be smaller."""
    is_cuda = args["x"].is_cuda
    out, eager, exact = call(args), loop(args, F32), loop(args, F64, quantizes=not is_cuda)
    found = out.cpu()
    if found.dtype == F32 and found.numel():
        size = exact.norm(dim=1) + exact.norm() / len(exact) ** 0.5
        error, other = ((v.double() - exact).norm(dim=1) / size for v in (found, eager))
        assert (error <= 0.05).all(), f"a row errs by {error.max():.1e} of its norm"  # also fails for NaN
        near = (error <= 1e-4) & (other <= 1e-4)
        assert near.double().mean() >= 0.8, f"{int((~near).sum())} of {len(near)} rows have other codes"
        found, eager, exact = found[near], eager[near], exact[near]
    assert_as_good({"out": found}, {"out": eager}, {"out": exact})
    return out


def picking(x, scores, ids, E: int, F: int, **more) -> dict:
    """The arguments of experts that pick F columns of their rows, in int8: w1's rows and w2's have one code
    that is not zero. So every result is exactly what the codes of x and of a make it, in every tier."""
    columns = torch.randint(x.size(1), (E, F, 1), device=x.device)
    data1 = torch.zeros(E, F, x.size(1), dtype=torch.int8, device=x.device).scatter_(2, columns, 1)
    data2 = torch.eye(F, dtype=torch.int8, device=x.device).repeat(E, 1, 1)
    ones = torch.ones(E, F, 1, device=x.device)
    names = ("data3", "scale3", "b1", "b3", "b2", "smooth1", "smooth2", "expert_map", "shared", "shared_gate")
    return {
        **dict.fromkeys(names),
        **{"x": x, "scores": scores, "ids": ids, "format": NUMBERS["int8"]},
        **{"data1": data1, "scale1": ones, "data2": data2, "scale2": ones},
        **{"layout": codes.UNGATED, "activation": codes.ACTIVATION_CODES["relu"], "constants": [1.0, 1.0]},
        **{"score_on_input": False, "power_of_two": False, **more},
    }


def picked(args: dict) -> torch.Tensor:
    """What picking()'s arguments give, scores on the output being ones: all its bits."""
    args = {n: v.cpu() if torch.is_tensor(v) else v for n, v in args.items()}
    x, ids = args["x"], local_ids(args)
    (T, K), columns = ids.shape, args["data1"].argmax(2)
    experts, has_row = ids.clamp_min(0), (ids >= 0).unsqueeze(1)
    out = torch.zeros(T, columns.size(1))
    for k in range(K):
        e = experts[:, k]
        rows = x.float()
        if args["score_on_input"]:
            rows = (rows * args["scores"][:, k, None]).to(x.dtype).float()
        if args["smooth1"] is not None:
            rows = rows * (1 / args["smooth1"])[e]
        h = quantized(rows, "int8", args["power_of_two"]).float().gather(1, columns[e])
        a = h.relu().to(x.dtype).float()
        if args["smooth2"] is not None:
            a = a * (1 / args["smooth2"])[e]
        y = quantized(a, "int8", args["power_of_two"]).to(F32).to(x.dtype).float()
        out += y.where(has_row[:, :, k], 0)
    return out.to(x.dtype)


def with_dtype(device, dtype) -> None:
    if device.type == "cuda" and dtype == F32:
        pytest.skip("GPUs multiply 8 bits for inputs of 16 bits alone")


def positive(*shape, device) -> torch.Tensor:
    """Divisors from 1/2 to 2, each exact in 16 bits."""
    return 2.0 ** torch.randint(-1, 2, shape).to(device)


# --- results ----------------------------------------------------------------------------------------------


@EVERY_FORMAT
@EVERY_DTYPE
@pytest.mark.parametrize("layout", STORED)
@pytest.mark.parametrize("dim, hidden", WIDTHS)
def test_is_as_good_as_the_loop(device, format, dtype, layout, dim, hidden):
    with_dtype(device, dtype)
    for bias in (False, True):
        check(make(format, Case(65, dim, hidden, 5, 2, dtype, "sentinels", layout, bias=bias), device))


@EVERY_FORMAT
@EVERY_DTYPE
@pytest.mark.parametrize("layout", STORED)
@pytest.mark.parametrize("dim, hidden", ODD_WIDTHS)
def test_odd_widths(cpu, format, dtype, layout, dim, hidden):
    check(make(format, Case(33, dim, hidden, 5, 3, dtype, layout=layout, bias=True), cpu))


@EVERY_FORMAT
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", ("separate", "ungated"))
def test_every_activation(device, format, activation, layout):
    case = Case(48, 128, 320, 4, 2, BF16, layout=layout, activation=activation, bias=True)
    check(make(format, case, device))


@EVERY_FORMAT
@pytest.mark.parametrize("routing", ("random", "repeats", "one", "gaps", "sentinels", "none"))
def test_every_routing(device, format, routing):
    """Experts without rows, all rows of one expert, tokens without experts; more rows than a tile has."""
    for tokens in (0, 1, 300):
        check(make(format, Case(tokens, 128, 64, 6, 2, BF16, routing), device))


@EVERY_FORMAT
@EVERY_DTYPE
def test_scores_on_the_input(device, format, dtype):
    with_dtype(device, dtype)
    case = Case(48, 128, 192, 4, 3, dtype, "repeats", bias=True, score_on="input")
    args = make(format, case, device)
    assert not torch.equal(check(args), call({**args, "score_on_input": False}))


@EVERY_FORMAT
def test_scales_of_matrices(device, format):
    if format == "fp8_block":
        pytest.skip("its scales are of blocks")
    check(make(format, Case(48, 128, 192, 4, 2, BF16, bias=True), device, per_tensor=True))


@EVERY_FORMAT
@EVERY_DTYPE
def test_powers_of_two(device, format, dtype):
    """`scale_fmt: ue8m0` rounds the scales of x and a up."""
    with_dtype(device, dtype)
    args = make(format, Case(48, 256, 192, 4, 2, dtype), device, power_of_two=True)
    assert not torch.equal(check(args), call({**args, "power_of_two": False}))


@EVERY_DTYPE
@pytest.mark.parametrize("score_on", ("input", "output"))
@pytest.mark.parametrize("which", ((1,), (2,), (1, 2)), ids=("x", "a", "both"))
def test_smooth(device, dtype, score_on, which):
    with_dtype(device, dtype)
    E, D, F = 4, 128, 192
    args = make("int8", Case(48, D, F, E, 2, dtype, bias=True, score_on=score_on), device)
    plain = call(args)
    smooth = {f"smooth{i}": positive(E, D if i == 1 else F, device=device) for i in which}
    assert not torch.equal(check({**args, **smooth}), plain)


@EVERY_DTYPE
@pytest.mark.parametrize("power_of_two", (False, True))
@pytest.mark.parametrize("which", ((), (1,), (2,), (1, 2)), ids=("none", "x", "a", "both"))
def test_bits_of_codes(device, dtype, which, power_of_two):
    """Factors whose reciprocals are rounded, scores on the input too; slots that no expert here has."""
    with_dtype(device, dtype)
    T, K, E, D, F = 61, 3, 7, 208, 80
    x = torch.randn(T, D, device=device).to(dtype)
    x[5], x[9] = 0, x[9] * 1e-3
    ids = torch.randint(-1, E, (T, K), device=device)
    smooth = {f"smooth{i}": torch.rand(E, D if i == 1 else F, device=device) + 0.5 for i in which}
    for on_input in (False, True):
        scores = torch.rand(T, K, device=device) if on_input else torch.ones(T, K, device=device)
        more = {"score_on_input": on_input, "power_of_two": power_of_two, **smooth}
        args = picking(x, scores, ids, E, F, **more)
        assert torch.equal(call(args).cpu(), picked(args))


@EVERY_FORMAT
def test_another_width_of_the_output(device, format):
    """Experts in a latent space may return another width than x's."""
    args = make(format, Case(48, 128, 192, 4, 2, BF16), device)
    w2 = fused_moe.quantize(torch.randn(4, 80, 192, device=device) / 14, format)
    check({**args, "data2": w2.data, "scale2": w2.scale})


@pytest.mark.quick
@EVERY_FORMAT
def test_expert_map_and_shared_experts(device, format):
    """Ids of all ranks' experts, of which this rank has four; the rows of shared experts are added."""
    case = Case(48, 128, 192, 4, 3, BF16, bias=True)
    args = make(format, case, device)
    expert_map = torch.full((10,), -1, dtype=torch.int32)
    expert_map[torch.tensor([1, 4, 5, 9])] = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    args["ids"] = torch.randint(-2, 12, args["ids"].shape).to(args["ids"])
    args["expert_map"] = expert_map.to(device)
    shared, gate = torch.randn(48, 128).to(device, BF16), torch.randn(48).to(device)
    for added in ({}, {"shared": shared}, {"shared": shared, "shared_gate": gate}):
        check({**args, **added})


@EVERY_FORMAT
@pytest.mark.parametrize("outlier", (30.0, 300.0))
def test_outlier_channels(device, format, outlier):
    """A few channels of x are much larger than the others."""
    args = make(format, Case(64, 256, 128, 4, 2, BF16), device)
    args["x"][:, ::61] *= outlier
    check(args)


def test_smooth_divides_outliers(device):
    """With channels scaled between x and w1, int8 errs less than half as much. Its experts are linear."""
    E, D, F = 4, 256, 128
    case = Case(64, D, F, E, 2, BF16, layout="ungated", activation="relu")
    plain = make("int8", case, device)
    plain["x"][:, ::61] *= 100
    w1 = torch.randn(E, F, D, device=device) / D**0.5
    smooth1 = torch.ones(E, D, device=device)
    smooth1[:, ::61] = 32
    errors = []
    for smooth in (None, smooth1):
        w = fused_moe.quantize(w1 if smooth is None else w1 * smooth[:, None], "int8")
        args = {**plain, "data1": w.data, "scale1": w.scale, "smooth1": smooth}
        hidden = torch.einsum("td,efd->tef", args["x"].double(), w1.double()).relu()
        y = torch.einsum("tef,edf->ted", hidden, decoded(args["data2"], args["scale2"], "int8"))
        of_slots = y.gather(1, args["ids"].long()[..., None].expand(-1, -1, D))
        truth = (of_slots * args["scores"][..., None]).sum(1)
        errors.append(((check(args).double() - truth).norm() / truth.norm()).item())
    assert errors[1] < errors[0] / 2, errors


# --- rows are apart ---------------------------------------------------------------------------------------


@EVERY_FORMAT
@EVERY_DTYPE
@pytest.mark.parametrize("power_of_two", (False, True))
def test_rows_of_small_norm(device, format, dtype, power_of_two):
    """Each row has its own scale, down to what a scale can be."""
    with_dtype(device, dtype)
    small = 1e-4 if dtype == F16 else 1e-30  # f16 has no less
    case = Case(48, 128, 192, 4, 2, dtype, layout="ungated", activation="relu")
    args = make(format, case, device, power_of_two=power_of_two)
    args["x"][::3] *= small
    out, exact = check(args).cpu().double(), loop(args, F64)
    error = (out - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < 0.03, error


@EVERY_FORMAT
def test_rows_of_zeros(device, format):
    """They are zeros after experts without biases, and have scale 1 in the loop with them."""
    for bias in (False, True):
        args = make(format, Case(48, 128, 192, 4, 2, BF16, bias=bias), device)
        args["x"][3:20] = 0
        out = check(args)
        assert bias or not out[3:20].any()


@EVERY_FORMAT
@EVERY_DTYPE
@pytest.mark.parametrize("value", (float("nan"), float("inf")), ids=("nan", "inf"))
def test_nan_stays_in_its_token(device, format, dtype, value):
    with_dtype(device, dtype)
    args = make(format, Case(48, 128, 192, 4, 2, dtype, bias=True), device)
    args["x"][7] = 0
    clean = call(args)
    args["x"][7, 11] = value
    out = call(args)
    assert out[7].isnan().all()
    out[7] = clean[7]
    assert torch.equal(out, clean)


@EVERY_FORMAT
@EVERY_DTYPE
@pytest.mark.parametrize("layout", ("separate", "interleaved"))
def test_same_bits_of_a_token_in_every_batch(device, format, dtype, layout):
    with_dtype(device, dtype)
    args = make(format, Case(600, 256, 320, 4, 2, dtype, layout=layout, bias=True), device)
    out = call(args)
    for size in (1, 2, 5, 17, 70, 300):
        some = torch.randperm(600, device=device)[:size]
        part = {name: args[name][some] for name in ("x", "scores", "ids")}
        assert torch.equal(call({**args, **part}), out[some]), size


@EVERY_FORMAT
def test_same_bits_on_every_number_of_threads(cpu, threads, format):
    args = make(format, Case(130, 130, 257, 4, 2, F32, bias=True), cpu)
    found = []
    for number in (1, 2, 3):
        threads(number)
        found.append(call(args))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


# --- what raises ------------------------------------------------------------------------------------------


@EVERY_FORMAT
@pytest.mark.parametrize("name", ("x", "scores", "b1", "shared"))
def test_there_is_no_gradient(device, format, name):
    args = make(format, Case(9, 64, 64, 4, 2, BF16, bias=True), device)
    args["shared"] = torch.randn_like(args["x"])
    args[name].requires_grad_()
    with pytest.raises(RuntimeError, match="fused_moe: experts has no gradient"):
        call(args)


def wrong_arguments(device) -> dict:
    """{what is wrong: (format, the argument that is, its value)}."""

    def of(*shape, dtype=F32):
        return torch.zeros(shape, dtype=dtype, device=device)

    return {
        "x of float64": ("int8", {"x": of(9, 64, dtype=F64)}),
        "narrow x": ("int8", {"x": of(9, 48, dtype=BF16)}),
        "flat x": ("int8", {"x": of(64, dtype=BF16)}),
        "int4": ("int8", {"format": NUMBERS["int4"]}),
        "no such format": ("int8", {"format": -1}),
        "another format's codes": ("int8", {"format": NUMBERS["fp8"]}),
        "flat codes": ("int8", {"data1": of(256, 64, dtype=torch.int8)}),
        "short codes of w3": ("int8", {"data3": of(4, 48, 64, dtype=torch.int8)}),
        "codes of fewer experts": ("int8", {"data2": of(3, 64, 64, dtype=torch.int8)}),
        "narrow codes of w2": ("int8", {"data2": of(4, 64, 48, dtype=torch.int8)}),
        "short scales": ("int8", {"scale1": of(4, 48, 1)}),
        "scales of columns": ("int8", {"scale1": of(4, 1, 64)}),
        "scales of bfloat16": ("int8", {"scale1": of(4, 64, 1, dtype=BF16)}),
        "scales of rows of a format of blocks": ("fp8_block", {"scale2": of(4, 64, 1)}),
        "codes without scales": ("int8", {"scale3": None}),
        "no w3 with layout separate": ("int8", {"data3": None, "scale3": None}),
        "short bias": ("int8", {"b1": of(4, 48, dtype=BF16)}),
        "a bias of another dtype": ("int8", {"b2": of(4, 64, dtype=F16)}),
        "scores of other slots": ("int8", {"scores": of(9, 3)}),
        "ids of other tokens": ("int8", {"ids": of(8, 2, dtype=torch.int32)}),
        "narrow smooth1": ("int8", {"smooth1": of(4, 48)}),
        "smooth1 of bfloat16": ("int8", {"smooth1": of(4, 64, dtype=BF16)}),
        "smooth2 of fewer experts": ("int8", {"smooth2": of(3, 64)}),
        "smooth2 with blocks": ("fp8_block", {"smooth2": of(4, 64)}),
        "short shared": ("int8", {"shared": of(8, 64, dtype=BF16)}),
        "no such layout": ("int8", {"layout": 9}),
        "no such activation": ("int8", {"activation": 99}),
    }


@pytest.mark.parametrize("wrong", wrong_arguments("meta"))
def test_wrong_arguments(device, wrong):
    format, changed = wrong_arguments(device)[wrong]
    args = make(format, Case(9, 64, 64, 4, 2, BF16, bias=True), device)
    call(args)
    with pytest.raises(RuntimeError, match=r"fused_moe::experts: expected .+, found .+"):
        run(args | changed)
