"""What the CUDA tests share: row counts, operands, checks, calls of all GEMMs, captured graphs, streams."""

import re
from dataclasses import replace

import exact
import pytest
import torch
from cases import (
    BF16,
    F16,
    F32,
    F64,
    LAYOUTS,
    ROUTINGS,
    Case,
    assert_same_bits,
    make_ids,
    poisoned,
    score_dtype,
    weight_shapes,
)

import fused_moe
from fused_moe import QuantizedWeight, fused_experts
from fused_moe import ops as codes

ops = torch.ops.fused_moe

ALL_DTYPES = pytest.mark.parametrize("dtype", (F32, BF16, F16, F64), ids=("f32", "bf16", "f16", "f64"))
FAST_DTYPES = pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=("f32", "bf16", "f16"))
HALF_DTYPES = pytest.mark.parametrize("dtype", (BF16, F16), ids=("bf16", "f16"))

# Rows of an expert about every tile height, warpgroup height and threshold between full and skinny experts.
BOUNDARIES = (
    193, 0, 1, 64, 7, 257, 8, 63, 0, 65, 127, 16, 128,
    255, 9, 129, 191, 192, 17, 256, 0, 383, 32, 385, 15, 384,
)  # fmt: skip
COUNTS = {
    "boundaries": BOUNDARIES,
    "one row each": (1,) * 300,
    "all rows to one": (0,) * 5 + (1500,) + (0,) * 3,
    "1024 experts": tuple(i * 7919 % 11 for i in range(1024)),
    "one active among 1024": (0,) * 700 + (200,) + (0,) * 323,
    "no rows": (0,) * 16,
}
# The same of tiles of few rows: about their heights, 16 and 64, and wgmma's N in them; a plan's full tile.
FEW_ROWS = (33, 0, 1, 64, 7, 130, 17, 8, 63, 0, 65, 16, 31, 9, 15, 32)
# Height of a tile -> counts for which it is chosen, also with 200 spare rows.
FEW_ROWS_OF = {16: FEW_ROWS + (0,) * 334, 64: FEW_ROWS + (0,) * 32}
HEIGHTS = pytest.mark.parametrize("height", FEW_ROWS_OF, ids=lambda height: f"{height} rows")
OTHER_COUNTS = pytest.mark.parametrize("name", [name for name in COUNTS if name != "boundaries"])
UNPAIRED_LAYOUTS = [name for name in LAYOUTS if name != "pairs"]


def calls_during(name: str, run) -> tuple[int, int, str]:
    """How many calls of an operator the sm90 and the sm80 tier had, and the last reason, in words."""
    index = codes.FACTS["operators"].index(name)
    before = ops.cuda_calls(index).tolist()
    run()
    after = ops.cuda_calls(index).tolist()
    return after[0] - before[0], after[1] - before[1], codes.FACTS["reasons"][after[-1]]


def launches(run) -> list[str]:
    """The names of the kernels and memsets of a call."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]


def few_rows_tiles(run) -> list[tuple[int, ...]]:
    """(rows, subtiles of 64 columns) of each GEMM with tiles of few rows: FewRowsConfig's last arguments, in
    any spelling."""
    pattern = r"FewRowsConfig.*?(?:false|true|\(bool\)\d|Lb\dE)\D+(\d+)\D+(\d+)"
    found = (re.search(pattern, name) for name in launches(run))
    return [tuple(map(int, match.groups())) for match in found if match]


def assert_equal(found: torch.Tensor, expected: torch.Tensor, what) -> None:
    """All bits, also the signs of zeros."""
    bits = torch.int16 if found.itemsize == 2 else torch.int32
    differ = found.view(bits) != expected.view(bits)
    assert found.shape == expected.shape and not differ.any(), f"{what}: {differ.sum()} differ"


def copies(results: dict) -> dict:
    return {n: t.clone() for n, t in results.items()}


def capture(fn):
    """fn() recorded as a CUDA graph, after a warm-up on a side stream. Returns the graph and fn's result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            fn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fn()
    return graph, result


def check_replays(run, case: Case, device, draw, inputs: dict, dout, ids) -> None:
    """run() of these tensors, recorded once: replayed on what draw(case) gives for every routing."""
    graph, recorded = capture(run)
    for seed, routing in enumerate((*ROUTINGS, "random")):
        other = replace(case, routing=routing, seed=seed)
        for name, value in draw(other, device).items():
            if value is not None:
                inputs[name].copy_(value)
        dout.copy_(other.dout(device))
        ids.copy_(other.ids(device))
        graph.replay()
        found = copies(recorded)
        assert_same_bits(found, run())


def beside_other_work(device, times: int = 5):
    """Each time kernels of another stream are running beside what the caller launches next."""
    noise, other = torch.randn(1024, 1024, device=device), torch.cuda.Stream(device)
    other.wait_stream(torch.cuda.current_stream())
    for _ in range(times):
        with torch.cuda.stream(other):
            for _ in range(20):
                noise = noise @ noise / 32
        yield
    torch.cuda.synchronize()


def check_at_once(device, runs, repeats: int, cycles: int) -> None:
    """Each run on a separate stream, all at once, again and again: they give the bits of each alone."""
    alone = [run() for run in runs]
    streams = [torch.cuda.Stream(device) for _ in runs]
    torch.cuda.synchronize()
    for _ in range(repeats):
        together = []
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)  # all queues fill before any runs
        for stream, run in zip(streams, runs, strict=True):
            with torch.cuda.stream(stream):
                together.append(run())
        torch.cuda.synchronize()
        for found, expected in zip(together, alone, strict=True):
            assert_same_bits(found, expected)


def needs_memory(device, gib: int) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    if free < gib << 30:
        pytest.skip(f"needs {gib} GiB of free device memory, found {free / 2**30:.1f} GiB")


# --- operands -------------------------------------------------------------------------------------


def draw_rows(counts, width, dtype, device, spare=0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows for all experts, NaN in `spare` more, and their cumulative ends."""
    rows = torch.randn(sum(counts) + spare, width).to(device, dtype)
    rows[sum(counts) :] = torch.nan
    return rows, torch.tensor(counts).cumsum(0).int().to(device)


def draw_weights(num_experts, width_out, width_in, dtype, device) -> torch.Tensor:
    return (torch.randn(num_experts, width_out, width_in) / width_in**0.5).to(device, dtype)


def draw_ids(routing: str, tokens: int, top_k: int, num_experts: int, device) -> torch.Tensor:
    """make_ids, of another seed in every call."""
    seed = int(torch.randint(2**31, ()))
    return make_ids(routing, tokens, top_k, num_experts, seed).contiguous().to(device)


def draw(case: Case, device) -> tuple[tuple, dict]:
    """(x, w1, w2, w3, scores, ids) of fused_experts and its other arguments, drawn on the device: there
    large weights take no time."""
    E, D, F = case.num_experts, case.dim, case.hidden

    def normal(shape, fan_in=1):
        return (torch.randn(shape, device=device) / fan_in**0.5).to(case.dtype)

    shapes = weight_shapes(case.layout, E, D, F, case.bias)
    biases = {n: normal(shape) for n, shape in shapes.items() if n[0] == "b" and shape}
    weights = [normal(shapes[n], shapes[n][-1]) if shapes[n] else None for n in ("w1", "w2", "w3")]
    if LAYOUTS[case.layout][3]:
        weights = [w if w is None else w.mT.contiguous() for w in weights]
    scores = torch.rand(case.tokens, case.top_k, dtype=score_dtype(case.dtype), device=device)
    ids = draw_ids(case.routing, case.tokens, case.top_k, E, device)
    return (normal((case.tokens, D)), *weights, scores, ids), {**case.options, **biases}


def with_scales(w: QuantizedWeight, dtype, **options) -> QuantizedWeight:
    """The weight with scales of this dtype, if its format leaves that open. So has the weight, if
    it is one of 16 bits: int4's tiles have kernels."""
    scale = w.scale if w.format in ("fp8_block", "mxfp4") else w.scale.to(dtype)
    options["dtype"] = dtype if dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
    return QuantizedWeight(w.data, scale, w.zero, format=w.format, shape=w.shape, **options)


def ids_of(counts, device) -> torch.Tensor:
    """Two experts per token, in any order, that add up to these counts; -1 where one is left over."""
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    ids = torch.cat([ids, ids.new_full((2 + len(ids) % 2,), -1)])
    return ids[torch.randperm(len(ids))].view(-1, 2).int().to(device)


def plan_of(counts, num_rows: int, device) -> fused_moe.Plan:
    return fused_moe.plan_from_counts(torch.tensor(counts, device=device), num_rows)


def settings_of(case: Case) -> dict:
    """The operators' layout, activation and constants."""
    layout, gated, *_ = LAYOUTS[case.layout]
    return {
        "layout": codes.LAYOUTS[layout] if gated else codes.UNGATED,
        "activation": codes.ACTIVATION_CODES[case.activation],
        "constants": [1.702, case.limit],
    }


def with_idle_experts(weights, num_experts: int) -> torch.Tensor:
    """Weights or biases of num_experts experts: the given ones, then NaN for experts without rows."""
    num_idle = num_experts - weights.size(0)
    return torch.cat([weights, weights.new_full((num_idle, *weights.shape[1:]), torch.nan)])


def weights_of(case: Case, device, num_experts=None) -> tuple[dict, dict]:
    """{w1, w3, b1, b3} and {w2, b2} as the operators take them, of the case's experts and idle ones."""
    _, _, pairs, transposed = LAYOUTS[case.layout]
    E = num_experts or case.num_experts
    w = {n: t if t is None else with_idle_experts(t, E) for n, t in case.weights(device).items()}
    for name in ("w1", "w2", "w3"):
        if transposed and w[name] is not None:
            w[name] = w[name].mT
    if pairs:
        w["w1"] = w["w1"].flatten(1, 2)
    return {n: w[n] for n in ("w1", "w3", "b1", "b3")}, {n: w[n] for n in ("w2", "b2")}


def wgrad_operands(counts, widths, dtype, device):
    """(arguments of ops.wgrad, both operands' rows in expert order): either side gathered, or none, NaN
    past the last row."""
    num_rows, tokens = sum(counts), 500
    (a, offsets), (b, _) = (draw_rows(counts, width, dtype, device, spare=70) for width in widths)
    row_token = torch.randint(tokens, (num_rows + 70,), dtype=torch.int32).to(device)
    row_token[num_rows:] = -1
    x = [torch.randn(tokens, width).to(device, dtype) for width in widths]
    a_rows, b_rows = a[:num_rows], b[:num_rows]
    gathered = [t[row_token[:num_rows].long()] for t in x]
    yield {"a": a, "b": b, "offsets": offsets}, (a_rows, b_rows)
    yield {"a": a, "b": x[1], "offsets": offsets, "b_row_token": row_token}, (a_rows, gathered[1])
    yield {"a": x[0], "b": b, "offsets": offsets, "a_row_token": row_token}, (gathered[0], b_rows)


def check_gemm(a, b, offsets) -> torch.Tensor:
    """grouped_mm of operands as they are stored, on poisoned memory, against float64."""
    with poisoned():
        out = ops.grouped_mm(a=a, b=b, offsets=offsets)
    exact.check(out, exact.grouped_mm(a, b, offsets))
    return out


def check_own_plan(arguments: tuple, options: dict) -> None:
    """fused_experts, which makes a plan in its own way, has the bits of a call whose plan is given: in
    poisoned memory, and in memory that held NaN."""
    plan = fused_moe.route_plan(arguments[-1], arguments[1].shape[0])
    expected = fused_experts(*arguments, plan=plan, **options)
    with poisoned():
        found = fused_experts(*arguments, **options)
    assert torch.equal(found, expected)
    out = torch.full_like(expected, torch.nan)
    fused_experts(*arguments, out=out, **options)
    assert torch.equal(out, expected)


def every_gemm(dtype, device, dim=400, hidden=520, experts=32, tokens=4096, top_k=4):
    """A function that calls every GEMM on a skewed routing, by default with more tiles than the GPU has
    SMs, and the ids that it reads."""
    case = Case(dim=dim, hidden=hidden, num_experts=experts, dtype=dtype, bias=True)
    (up, _), settings = weights_of(case, device), settings_of(case)
    w2 = draw_weights(experts, dim, hidden, dtype, device)
    x = torch.randn(tokens, dim).to(device, dtype)
    scores = torch.rand(tokens, top_k, device=device)
    ids = (torch.rand(tokens, top_k) ** 3 * experts).int().to(device)

    def run() -> dict:
        plan = fused_moe.route_plan(ids, experts)
        offsets = plan.offsets[1:]
        h, a = ops.up_gate(x=x, **up, plan=plan.tensors, **settings)
        dh, a_scaled, dscores = ops.down_dgrad(
            dout=x, w2=w2, b2=None, h=h, scores=scores, plan=plan.tensors, **settings
        )
        return {
            "h": h,
            "a": a,
            "out": ops.grouped_mm(a=a, b=w2, offsets=offsets),
            "dh": dh,
            "a_scaled": a_scaled,
            "dscores": dscores,
            "dx_rows": ops.up_dgrad(
                dh=dh, w1=up["w1"], w3=up["w3"], plan=plan.tensors, layout=settings["layout"]
            ),
            "dw1": ops.wgrad(a=dh, b=x, offsets=offsets, b_row_token=plan.row_token),
            "dw2": ops.wgrad(a=x, b=a_scaled, offsets=offsets, a_row_token=plan.row_token),
        }

    return run, ids


ROWS = {"h", "a", "out", "dh", "a_scaled", "dx_rows"}  # results of every_gemm that have rows past the last


def training_step(module, x, dout):
    """A function that runs a module forward and backward: its output and every gradient."""
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}

    def step() -> dict:
        leaf = x.detach().requires_grad_()
        out = module(leaf)
        grads = torch.autograd.grad(out, [leaf, *parameters.values()], dout)
        return {"out": out.detach(), **dict(zip(["dx", *parameters], grads, strict=True))}

    return step
