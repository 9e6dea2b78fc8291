"""Rules that the programs of benchmarks/ share: routings, records, floors, kernels of a profile, tables."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fused_moe

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="not in a checkout")

# --- routings and records -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "exact, found, error",
    [(1.0, 1.0, 0), (1.0, 1.1, 0.1), (1e-17, 1e-6, 1e-6), (1e-17, 0.1, 0.1), (1e-6, 1.1e-6, 0.1)],
    ids=["right", "wrong", "all cancel, rounding", "all cancel, wrong", "not all cancel"],
)
def test_errors_are_relative(load, exact, found, error):
    """To the exact tensor, or, where all of its terms cancel, to them."""
    ours = load("common").Error()
    ours.add("dgate", torch.full((4,), found), torch.full((4,), exact), terms=torch.ones(4))
    if error < 1e-5:
        assert ours.check("K = 1", "fp32") == pytest.approx(error, rel=1e-3)
        return
    with pytest.raises(SystemExit, match=r"K = 1 fp32: wrong before it is fast: dgate 1\.0e-01"):
        ours.check("K = 1", "fp32")


def test_integers_are_equal(load):
    """One that is not ends the program, beside results that are right."""
    error = load("common").Error()
    error.add("scores", torch.ones(3), torch.ones(3))
    error.add_equal("ids", torch.arange(3), torch.arange(3))
    assert error.check("route", "fp32") == 0
    error.add_equal("ids", torch.arange(3), torch.tensor([0, 2, 1]))
    with pytest.raises(SystemExit, match=r"wrong before it is fast: scores 0\.0e\+00, ids inf"):
        error.check("route", "fp32")


@pytest.mark.parametrize("wrong", (None, "own tokens", "padding"))
def test_padding_of_a_batch(load, wrong):
    """It is zeros, and own tokens have the output of their own batch."""
    bench, common, local_tokens = load("bench_decode"), load("common"), load("local_tokens")
    case = bench.Case(common.layer_sizes("7,8,2,64,32"), bench.Setup(dtype="fp32"))
    ours = bench.find_experts(case.setup, "")["ours"]

    def experts(x, w, scores, ids):
        out = ours(x, w, scores, ids)
        if len(x) == 7 and wrong:
            out[2 if wrong == "own tokens" else 3] += 1
        return out

    error = local_tokens.Batch(case, experts, case.weights).error(3)
    if wrong is None:
        assert error.check("7 tokens", "fp32") < 1e-5
        return
    with pytest.raises(SystemExit, match=f"7 tokens fp32: wrong before it is fast.*{wrong} ([1-9]|inf)"):
        error.check("7 tokens", "fp32")


def test_records_of_a_key_are_replaced(load, run):
    """Those from before the schedule had the default one. --append keeps the others of a file."""
    common = load("common")
    new = dict.fromkeys(common.KEY, "same") | {"schedule": "default"}
    old = {name: value for name, value in new.items() if name != "schedule"}
    other = new | {"schedule": "order=linear"}
    assert common.merge([old, other], [new | {"time_us": 3}]) == [new | {"time_us": 3}, other]
    flags = ("--shape", "24,8,2,64,32", "--dtype", "fp32", "--append", "--what")
    assert len(run("bench_kernels", *flags, "route")) == 1
    assert [r["what"] for r in run("bench_kernels", *flags, "permute")] == ["route", "permute"]


def test_a_schedule_is_in_the_record(load, monkeypatch):
    """The flag's sets FUSED_MOE_SCHEDULE, which a GPU's record has and the CPU's has not."""
    common = load("common")
    monkeypatch.setattr(common, "machine", lambda device: {})
    gpu = SimpleNamespace(device="cuda", tier="hopper")
    assert common.record(gpu)["schedule"] == "default"
    common.set_schedule(gpu, order="linear", experts=None, tails="off")
    assert os.environ["FUSED_MOE_SCHEDULE"] == common.record(gpu)["schedule"] == "order=linear,tails=off"
    assert common.record(SimpleNamespace(device="cpu", tier="cpu"))["schedule"] == "default"


def test_a_commit_without_git(load, monkeypatch):
    monkeypatch.delenv("COMMIT", raising=False)
    monkeypatch.setenv("PATH", "")
    assert load("common").machine("cpu")["commit"] == "unknown"
    monkeypatch.setenv("COMMIT", "abc")
    assert load("common").machine("cpu")["commit"] == "abc"


def test_routings_are_what_their_names_say(load):
    common, row_counts = load("common"), load("bench_gemm").row_counts
    sizes = common.Sizes(4096, 16, 2, 64, 32)
    rows = {}
    for name in ("balanced", "random", "worst", "one-each"):
        _, ids = fused_moe.route(common.routing_logits(name, sizes, "cpu"), 2)
        rows[name] = ids.flatten().bincount(minlength=16)
    assert rows["balanced"].tolist() == [512] * 16
    assert (rows["random"] / 512 - 1).abs().max() < 0.25
    assert rows["worst"].tolist() == [4096] * 2 + [0] * 14
    assert rows["one-each"].tolist() == [4089] * 2 + [1] * 14
    first = common.routing_logits("zipf:1", sizes, "cpu").argmax(-1).bincount(minlength=16)
    share = 1 / torch.arange(1, 17)
    assert torch.allclose(first / 4096, share / share.sum(), atol=0.03)
    logits = torch.randn(50, 8)
    x, gate = common.tokens_and_gate(logits, 32)
    torch.testing.assert_close(x @ gate.T, logits, rtol=0, atol=1e-4)
    assert row_counts("balanced", 10, 4).tolist() == [3, 3, 2, 2]
    assert row_counts("best", 160, 10).tolist() == [20] * 8 + [0] * 2
    assert row_counts("worst", 160, 4).tolist() == [1, 1, 1, 157]
    assert row_counts("one-each", 160, 10).tolist() == [*[20] * 6, 19, 19, 1, 1]
    assert row_counts("one-each", 32768, 64).tolist() == [4089] * 8 + [1] * 56


def test_random_weights(load):
    """All of a norm, with the tails that their names say."""
    bench, common = load("bench_quantised"), load("common")
    torch.manual_seed(0)
    largest = {}
    for kind in bench.VALUES:
        weights = bench.random_weights(kind, common.Sizes(1, 8, 2, 512, 256), torch.float32, "cpu")
        assert [tuple(w.shape) for w in weights] == [(8, 256, 512), (8, 512, 256), (8, 256, 512)]
        for w in weights:
            assert w.norm() == pytest.approx((w.numel() / w.size(2)) ** 0.5, rel=1e-4)
        scaled = weights[0] * 512**0.5
        largest[kind] = scaled.abs().max().item()
        if kind == "outliers":
            norms = scaled.square().mean((0, 1)).sort().values
            assert norms[-5] > 300 * norms[-6]
    assert largest["gaussian"] < 6 and largest["student t"] > 20


@pytest.mark.parametrize("gated", (True, False))
def test_weights_of_few_tokens(load, gated):
    """Layers take turns, each with its own routing; a peer has gate and up as one."""
    bench, common = load("bench_decode"), load("common")
    case = bench.Case(common.layer_sizes("3,8,2,64,32"), bench.Setup(gated=gated, init="uniform", stride=72))
    seen = []
    case.run(lambda x, w, scores, ids: seen.append((w.w1.data_ptr(), ids.data_ptr())))
    assert len(seen) == 2 and all(len(set(pointers)) == 2 for pointers in zip(*seen, strict=True))
    w = case.weights[0]
    parts = [w.w1, w.w3] if gated else [w.w1]
    assert torch.equal(w.w13, torch.cat(parts, dim=1)) and w.w13.shape == (8, 32 * len(parts), 64)
    assert case.expert_bytes == (len(parts) + 1) * 64 * 32 * 2 and case.x.stride() == (72, 1)
    assert case.flops_of_a_call == 2 * (len(parts) + 1) * 3 * 2 * 64 * 32
    assert sum(a.size(0) * b.numel() * 2 for a, b in case.dense_gemms) == case.flops_of_a_call


def test_prompts_are_ragged(load):
    """From a sixteenth of the longest to all of it, the same in every run."""
    random_prompts = load("bench_continuous_batching").random_prompts
    prompts = random_prompts(200, 64)
    lengths = {len(prompt) for prompt in prompts}
    assert (min(lengths), max(lengths)) == (4, 64) and len(lengths) > 40
    assert prompts == random_prompts(200, 64)


def test_a_request_that_ends_early_is_not_timed(load):
    bench = load("bench_continuous_batching")
    pytest.importorskip("transformers")
    out = SimpleNamespace(generated_tokens=[5], error="no room", created_time=0.0, timestamps=[1.0])
    model = SimpleNamespace(generate_batch=lambda *args, **settings: {"a": out})
    options = SimpleNamespace(device="cpu", prompt=4, cuda_graphs=False)
    with pytest.raises(SystemExit, match=r"expected 2 tokens of each request, found \[1\]; \{'no room'\}"):
        bench.serve(model, [[1, 2]], 2, options)


def test_dense_gemms_in_8_bits(load):
    """A layer's FLOPs, and the products of the e4m3 codes, rounded once."""
    common, T, K, D, F = load("common"), 16, 2, 64, 32
    gemms = common.dense_gemms(common.Sizes(T, 4, K, D, F), dtype=torch.bfloat16)
    assert sum(2 * a.numel() * b.size(1) for a, b in gemms) == 6 * T * K * D * F
    for found, operands in zip(common.dense_in_8_bits(gemms)(), gemms, strict=True):
        a, b = (t.to(torch.float8_e4m3fn).double() for t in operands)
        torch.testing.assert_close(found.double(), a @ b, rtol=2**-8, atol=1e-3)


# --- floors -------------------------------------------------------------------------------------------


def test_floors_have_the_flops_of_whole_tiles(load, monkeypatch):
    """And the kernels' bytes: with a clock that counts, and a copy of no cost or of all, a floor is what it
    does."""
    floors, bench_layer, common = load("floors"), load("bench_layer"), load("common")
    case = bench_layer.Case(common.layer_sizes("512,2,2,256,256"), "random", "fp32", "cpu")
    assert case.counts == [512, 512]
    copied = [1e-9]

    def flops_of(clock, runs, repeats):
        found = {}
        for name, run in runs.items():
            with FlopCounterMode(display=False) as counter:
                run()
            found[name] = counter.get_total_flops() or copied[0]
        return found

    def by_kind():
        return floors.by_kind(case.sizes, case.settings, case.counts, case.dense_gemms, 1)

    monkeypatch.setattr(common, "times", flops_of)
    monkeypatch.setattr(floors, "MIB", 1)
    T, E, K, D, F = case.sizes
    up, down = 4 * T * K * D * F, 2 * T * K * D * F
    exact = {"up_gate": up, "down": down, "down_dgrad": down, "wgrad_down": down}
    exact |= {"up_dgrad": up, "wgrad_up": up}  # no tile is cut: dense's own FLOPs
    assert {kind: floor.us / 1e6 for kind, floor in by_kind().items() if floor.bound == "dense"} == exact
    assert sum(exact.values()) == case.flops("forward_backward")
    copied[0] = 2 * 1024 * 1e9  # a byte takes 1e9 s: every floor is its bytes
    found = by_kind()
    R, w = T * K, E * D * F
    elements = {
        "up_gate": T * D + 2 * w + R * 3 * F,
        "down": R * F + w + R * D,
        "down_dgrad": T * D + w + R * 5 * F,
        "wgrad_down": R * F + T * D + w,
        "up_dgrad": R * 2 * F + 2 * w + R * D,
        "wgrad_up": R * 2 * F + T * D + 2 * w,
        "unpermute": (R + T) * D,
    }
    assert {kind: found[kind].us / 1e15 / 4 for kind in elements} == pytest.approx(elements)
    assert all(floor.bound == "copy" for floor in found.values())
    assert set(found) <= set(load("profiling").ORDER)


@pytest.mark.parametrize(
    "counts, swapped, plain, sums",
    [([0, 1, 8, 9, 64], 8 + 8 + 32 + 64, 4 * 128, 4 * 64), ([65, 128, 129], 512, 512, 128 + 128 + 192)],
)
def test_floors_count_the_rows_of_tiles(load, counts, swapped, plain, sums):
    """And their columns: in grouped_mm and down_dgrad a last half tile is cheaper. Without the L2 cache a
    gather reads tokens again."""
    floors, common = load("floors"), load("common")
    sizes = common.Sizes(sum(counts), len(counts), 1, 320, 100)
    found = floors.gemms(sizes, common.Settings(), counts, sizes.num_tokens * 320, backward=True)
    assert {kind: gemm.flops // 2 for kind, gemm in found.items()} == {
        "up_gate": swapped * 256 * 320,
        "down": swapped * 384 * 128,
        "down_dgrad": plain * 128 * 320,
        "wgrad_down": sums * 256 * 384,
        "up_dgrad": swapped * 384 * 256,
        "wgrad_up": sums * 256 * 384,
    }
    case = sizes, common.Settings(), counts, sizes.num_tokens * 320, 2
    only_flops = floors.layer_us(*case, 1.0, 1e30, backward=True)  # every byte in no time
    assert only_flops == sum(gemm.flops for gemm in found.values())
    only_bytes = floors.layer_us(*case, 1e30, 2.0, backward=True)
    moved = sum(floors.bytes_moved(sizes, 2).values()) + 2 * sum(gemm.elements for gemm in found.values())
    assert only_bytes == moved / 2 > floors.layer_us(*case, 1e30, 2.0, backward=False)
    twice = sizes._replace(top_k=2), common.Settings(), [2 * n for n in counts]
    small_cache, large_cache = (floors.gemms(*twice, size, backward=True) for size in (1, 10**9))
    read_again = {kind: gemm.elements - large_cache[kind].elements for kind, gemm in small_cache.items()}
    gathered = dict.fromkeys(("up_gate", "down_dgrad", "wgrad_down", "wgrad_up"), sizes.num_tokens * 320)
    assert read_again == {"down": 0, "up_dgrad": 0} | gathered
    plain_experts = floors.gemms(sizes, common.Settings(gated=False), counts, 1, backward=False)
    assert plain_experts["up_gate"].flops // 2 == swapped * 256 * 320 and len(plain_experts) == 2


def test_the_floor_of_8_bits(load):
    """Half of 16 bits' time at twice the rate; half of the bytes but for x and y. Published rates are of
    their shapes alone."""
    floors, common, published = load("floors"), load("common"), load("bench_eight_bits").PUBLISHED
    sizes, counts = common.Sizes(512, 4, 2, 256, 128), [256] * 4
    rest = (common.USUAL, counts, 1 << 62)
    moved = floors.bytes_moved(sizes, 2, backward=False)
    combine = moved["unpermute"] + moved["schedule"]
    # 2 TKD(2F) and 2 TKFD: tiles are whole
    flops = 6 * 1024 * 256 * 128
    assert floors.experts_us(sizes, *rest, (2, 2), 1.0, 1e30) == pytest.approx(flops)
    assert floors.experts_us(sizes, *rest, (1, 2), 2.0, 1e30) == pytest.approx(flops / 2)
    x, w, a, y = 512 * 256, 4 * 3 * 256 * 128, 1024 * 128, 1024 * 256
    assert floors.experts_us(sizes, *rest, (2, 2), 1e30, 1.0) == 2 * (x + w + 2 * a + y) + combine
    assert floors.experts_us(sizes, *rest, (1, 2), 1e30, 1.0) == (x + w + 2 * a + 2 * y) + 3 * x + combine
    for shape, rate in (("8192,32,6,4096,2048", 757), ("dsv4-pro-8ranks", 818), ("olmoe", None)):
        sizes = common.layer_sizes(shape)
        assert published.get((sizes.num_tokens, *sizes[2:])) == rate


@pytest.mark.parametrize("dense, reads", ((1.9, True), (2.1, False)))
def test_the_floor_of_few_tokens(load, dense, reads):
    """The bytes of the experts that have tokens; the dense GEMM's time only where it does more than read."""
    bench, common = load("bench_decode"), load("common")
    case = bench.Case(common.layer_sizes("4,8,2,64,32"), bench.Setup(routing="one"))
    assert case.bytes_of_a_call == 2 * 3 * 64 * 32 * 2  # all tokens have the same two of eight experts
    assert case.flops_of_a_call == 6 * 4 * 2 * 64 * 32
    source = torch.ones(1000)  # read in 4 s: a byte takes a millisecond
    operands = sum(b.nbytes for _, b in case.dense_gemms)
    seconds = {"read": 4.0, "dense": dense * operands / 1e3}
    found = bench.floor_of(case, case.bytes_of_a_call, source, seconds, ours=100.0)
    floor = max(case.bytes_of_a_call / 1e3, 0 if reads else seconds["dense"])
    assert (found["floor_us"], found["floor_ratio"]) == pytest.approx((floor * 1e6, floor / 100), abs=1e-3)


# --- kernels of a profile -----------------------------------------------------------------------------

QUACK = "kernel_cutlass_kernel_quackgemm_"
# One step's kernels as the profiler names them, ours and SonicMoE's, in order; their kinds
STEPS = {
    "ours": [
        ("router_logits_kernel<bf16>", "router GEMMs"),
        ("fused_moe::route_kernel<float, 4>", "route"),
        ("void fused_moe::(anonymous namespace)::count_kernel(Sort)", "schedule"),
        ("up_gate_kernel<Config>", "up_gate"),
        ("grouped_mm_kernel<Config>", "down"),
        ("unpermute_kernel<bf16>", "unpermute"),
        ("down_dgrad_kernel<Config>", "down_dgrad"),
        ("dscores_kernel", "dscores"),
        ("wgrad_kernel<Config>", "wgrad_down"),
        ("route_backward_kernel<float, 4>", "route_backward"),
        ("nvjet_tst_64x8", "router GEMMs"),
        ("grouped_mm_kernel<Config>", "up_dgrad"),
        ("wgrad_kernel<Config>", "wgrad_up"),
        ("unpermute_kernel<bf16>", "unpermute_dx"),
        ("vectorized_elementwise_kernel<4, CUDAFunctor_add>", "add"),
        ("direct_copy_kernel_cuda", "rest"),
    ],
    "SonicMoE's": [
        ("kernel_cutlass_kernel_sonicmoefunctionaltopkSoftmax_Over_TopK_object", "route"),
        (f"{QUACK}actGemmGatedSm90_object_at", "up_gate"),
        (f"{QUACK}default_epiGemmDefaultSm90_obje", "down"),
        ("token_gather_sum_kernel", "unpermute"),
        (f"{QUACK}dactGemmDGatedSm90_object_at", "down_dgrad"),
        (f"{QUACK}default_epiGemmDefaultSm90_obje", "wgrad_down"),
        (f"{QUACK}default_epiGemmDefaultSm90_obje", "up_dgrad"),
        (f"{QUACK}default_epiGemmDefaultSm90_obje", "wgrad_up"),
        ("token_gather_sum_kernel", "unpermute_dx"),
    ],
    "out of order: no telling which is up_dgrad": [("grouped_mm_kernel", "grouped_mm")] * 3,
    "two launches each": [("wgrad_kernel", kind) for kind in ("wgrad_down",) * 2 + ("wgrad_up",) * 2],
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_kernels_of_a_step_by_kind(load, step):
    """Each kind's mean over two steps, beside its floor; and the whole step with its power."""
    profiling, floor = load("profiling"), load("floors").Floor(10, "dense")
    us, launches = {}, []
    for i, (_, kind) in enumerate(step):
        us[kind] = us.get(kind, 0) + 2**i + 1
    launches = [
        profiling.Launch(name, 2**i + 2 * later) for later in (0, 1) for i, (name, _) in enumerate(step)
    ]
    *found, whole = profiling.measured(launches, {"up_gate": floor}, {"watts": 690.5})
    assert {r["what"]: r["time_us"] for r in found} == us
    assert sum(r["launches"] for r in found) == whole["launches"] == len(step)
    assert (whole["what"], whole["time_us"], whole["watts"]) == ("step", sum(us.values()), 690.5)
    for r in found:
        has_floor = r["what"] == "up_gate"
        assert r.get("gap_us") == (us["up_gate"] - 10 if has_floor else None)
        assert r.get("bound") == ("dense" if has_floor else None)


def test_time_that_kernels_share_counts_once(load):
    """A dependent launch starts under the kernel before it; the last but one is over before that one."""
    kernels = [("spin_kernel", 0, 10), ("a", 8, 12), ("b", 11, 20), ("c", 13, 15), ("d", 25, 26)]
    launches = load("profiling").without_overlap(reversed(kernels))
    assert launches == [("a", 2), ("b", 8), ("c", 0), ("d", 1)]


@pytest.mark.parametrize("longest, gaps", ((0.5, 0), (2, 2), (5, 2), (6, 8)))
def test_gaps_between_kernels(load, longest, gaps):
    """They take 2 and 6; "c" is over before "b", at whose end the next gap begins."""
    kernels = [("a", 0, 10), ("b", 12, 20), ("c", 13, 15), ("d", 26, 27)]
    assert load("profiling").short_gaps(reversed(kernels), longest) == gaps


def test_launches_of_a_call(load, monkeypatch, capsys):
    """Each is counted over all calls, and shared by their number."""
    bench, common, profiling = load("bench_decode"), load("common"), load("profiling")
    case = bench.Case(common.layer_sizes("3,8,2,64,32"), bench.Setup(dtype="fp32"))
    names = ("up_gate", "down", "up_gate", "down", "memset")
    found = [profiling.Launch(name, us) for us, name in enumerate(names, 1)]
    monkeypatch.setattr(profiling, "launches", lambda step, steps: found)
    bench.list_kernels(case, {"ours": lambda *args: None}, "small")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "small, ours: 2.5 launches, 7.5 µs"
    rows = ["1.00 3.0 µs down", "0.50 2.5 µs memset", "1.00 2.0 µs up_gate"]
    assert [" ".join(line.split()) for line in lines[1:]] == rows
    monkeypatch.setattr(bench, "host_seconds", lambda run: 1e-5)
    assert bench.on_host({"ours": None, "torch": None, "vllm_invariant": None}, number=2) == {
        "launches": 2.5,
        "host_us": 5,
        "peer_launches": {"torch": 2.5, "vllm_invariant": 2.5},
        "peer_host_us": {"torch": 5, "vllm_invariant": 5},
    }


def test_power_is_of_the_last_third(load, monkeypatch):
    profiling = load("profiling")
    event = type("Event", (), {"record": lambda self: None, "synchronize": lambda self: time.sleep(0.002)})
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    start = time.perf_counter()
    monkeypatch.setattr(profiling, "board", lambda: (600 if time.perf_counter() > start + 0.3 else 100, 1500))
    steps = []
    found = profiling.power(lambda: steps.append(time.perf_counter()), seconds=0.6, period=0.005)
    each = (steps[-1] - steps[0]) / len(steps)
    assert (found["watts"], found["sm_mhz"]) == (600, 1500)
    assert found["joules"] == pytest.approx(600 * each, rel=0.2)
    monkeypatch.setattr(profiling, "board", lambda: None)
    nothing = {"watts": None, "sm_mhz": None, "joules": None}
    assert profiling.power(lambda: None, seconds=0.05, period=0.005) == nothing


class Block(torch.nn.Module):
    """A single GEMM, and a layer with two GEMMs, one of them a shared expert's."""

    def __init__(self):
        super().__init__()
        self.own, self.moe = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
        self.moe.shared_experts = torch.nn.Linear(8, 8, bias=False)
        self.moe.register_forward_hook(lambda moe, args, out: out + moe.shared_experts(args[0]))

    def forward(self, x):
        return x + self.moe(self.own(x))


@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
def test_kernels_are_attributed_to_layers(load, tmp_path, again):
    """The GEMMs in a CPU trace, as if each had launched a kernel."""
    profiled = load("moe_profile")
    blocks = [Block(), Block()]
    marks = profiled.Marks([block.moe for block in blocks], blocks)
    x = torch.randn(4, 8, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            out = x
            for block in blocks:
                out = checkpoint(block, out, use_reentrant=False) if again else block(out)
            out.mm(torch.ones(8, 1)).sum().backward()
    marks.remove()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    gemms = [e for e in events if e["name"] == "aten::mm"]
    for i, e in enumerate(gemms):
        launch = {"ph": "X", "args": {"correlation": i}, "dur": 0.001}
        events.append(launch | {"cat": "cuda_runtime", "name": "launch", "tid": e["tid"], "ts": e["ts"]})
        events.append(launch | {"cat": "kernel", "name": "mm", "tid": 7, "ts": 100 * i, "dur": 10})
    nccl = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel", "tid": 8, "ts": 105, "dur": 10}
    found = profiled.by_part([*events, nccl], marks.nodes, steps=2)
    each = 2 * (4 if again else 3) * 10  # two blocks; forward, backward twice, and perhaps forward again
    assert found["moe_us"] == found["shared_experts_us"] == each
    assert found["rest_us"] == each + 20  # the last GEMM's backward has only the input's gradient
    assert (found["communication_us"], found["moe_communication_us"], found["without_launch_us"]) == (5, 0, 5)
    assert found["busy_us"] == 3 * each + 20 + 2.5
    assert found["kernels"] == [["mm", each, each / 10]]


# --- tables and pictures ------------------------------------------------------------------------------


def test_committed_records_make_tables_and_pictures(load, tmp_path, capsys):
    """Layers, decoding, engines, trainers. Curves and a profile are made up."""
    files = sorted(RESULTS.glob("*.json"))
    load("table").main([*map(str, files)])
    text = capsys.readouterr().out
    for said in ("against SonicMoE", "against vLLM", "more by", "fused_moe's loss over it", "| lm-head |"):
        assert said in " ".join(text.split()), said
    every = [r for r in load("common").read(*files) if r["shape"] and r["gpu"] != "none"]
    shapes = {r["bench"]: r["shape"] for r in reversed(every)}  # the first of each program
    path, pictures = tmp_path / "records.json", tmp_path / "pictures"
    chosen = [r for r in every if r["shape"] == shapes[r["bench"]] and r["bench"] != "linear"]
    layer = next(r for r in every if r["bench"] == "layer")
    trainer = next(r for r in every if r["bench"] == "torchtitan") | {"losses": [3.0, 2.0, 1.5]}
    steps = ("ours", "step", 20), ("ours", "up_gate", 12), ("sonicmoe", "step", 22), ("dense", "step", 15)
    profile = [layer | {"bench": "profile", "layer": n, "what": w, "time_us": us} for n, w, us in steps]
    path.write_text(json.dumps([*chosen, trainer, *profile]))
    load("plot").main([str(path), "-o", str(pictures)])
    names = {"roofline", "ratios", "speedups", "losses", "profile", "decode", "serving"}
    assert {picture.stem for picture in pictures.iterdir()} == names
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures.iterdir())


def test_a_page_holds_the_committed_results(load, tmp_path):
    """Each table between its two marks, which --check compares."""
    table, page, real = load("table"), tmp_path / "page.md", ROOT / "docs" / "performance.md"
    table.main(["--page", str(real), "--check"])
    assert [name for _, name, _ in table.PLACE.findall(real.read_text())] == [*table.PAGE]
    begin, end = "<!-- performance: cpu -->", "<!-- performance: end -->"
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    with pytest.raises(SystemExit, match="out of date"):
        table.main(["--page", str(page), "--check"])
    table.main(["--page", str(page)])
    table.main(["--page", str(page), "--check"])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "layer_cpu.json), e5ca915 of " in text and "| cpu-32-experts, fp32 |" in text
    for wrong in ("no marks\n", f"<!-- performance: nothing -->\n{end}\n"):
        page.write_text(wrong)
        with pytest.raises(SystemExit, match="expected places <!-- performance: NAME -->"):
            table.main(["--page", str(page)])
    with pytest.raises(SystemExit):
        table.main([])


def test_sonicmoe_in_several_runs(load, monkeypatch, tmp_path):
    """The table of layers has the lowest ratio of each shape's runs and names them. A shape may have none."""
    table = load("table")
    records = [r for r in json.loads((RESULTS / "layer_h200.json").read_text()) if r["mode"] == "queued"]
    (tmp_path / "layer_h200.json").write_text(json.dumps(records))
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    text = table.page_layers()
    assert ". SonicMoE 0.1.2.post1, QuACK 0.4.1, tiles " in text and "The lowest" not in text
    first = [
        r | {"commit": "1234567", "about_sonicmoe": "QuACK 0.6.5"} for r in records if r["shape"] == "olmoe"
    ]
    runs = [r | {"ratio_to_sonicmoe": value} for r in first for value in (1.25, 1.125, 1.5)]
    (tmp_path / "sonicmoe_h200.json").write_text(json.dumps(runs))
    text = table.page_layers()
    assert ". QuACK 0.6.5. The lowest of its ratios" in text and "1234567 of 2026-11-24" in text
    rows = {line.split(" | ")[0]: line.split(" | ") for line in text.splitlines() if line.startswith("| ")}
    assert rows["| olmoe"][4] == "1.12x, 1.12x" and rows["| qwen3-30b"][4] == ""


def test_single_calls_stand_beside_queued_ones(load):
    """But only those of the same run."""
    common = load("common")
    queued = dict.fromkeys((*common.KEY, "gpu", "cpu", "torch", "commit", "date"), "same") | {
        "mode": "queued"
    }
    single, another = queued | {"mode": "eager"}, queued | {"mode": "eager", "commit": "another"}
    merged = common.eager_beside_queued([queued, single, another])
    assert merged == [queued | {"eager": single}, another]


SONICMOE = {"peer": "sonicmoe", "ratio_to_sonicmoe": 1.125, "peak_mib_sonicmoe": 4321.0}
TITAN = {"shape": "16B6, batch 4", "local_batch_size": 4, "peak_mib": 2048}
GENERATED = {"bench": "continuous_batching", "shape": "olmoe", "layers": 12, "prompt": 512, "tokens": 8}
GENERATED |= {"default_experts": "grouped_mm", "tokens_per_s": 3000.4, "tokens_per_s_default": 2000}
GENERATED |= {
    "first_token_ms": 20,
    "first_token_ms_default": 25,
    "first_token_ratio": 1.25,
    "peer_ratio": 1.5,
}
ENGINE = {"bench": "vllm", "shape": "olmoe, prompt 5", "batch": 2, "tokens": 2, "same_bits": True}
ENGINE |= {"first_token_ms": 12.5, "tokens_per_s": 2000, "backends": ["TRITON MoE backend"], "tiles": None}
SERVED = "model | its own experts | requests | first token, ms | faster by | tokens/s | more by"
# A table: the function that makes it, what its records have, and its rows
TABLES = {
    "gains": (
        "gains",
        [
            {"schedule": "default", "dense_ratio": 0.8},
            {"schedule": "order=column", "dense_ratio": 0.6},
            {"schedule": "order=linear,tails=off", "dense_ratio": 1.0},
        ],
        "shape | routing | dtype | what | default against dense | order=column | order=linear, tails=off",
        "24, 8, 2, 64, 32 | random | bf16 | down | 0.80 | 0.75x | 1.25x",
    ),
    "gains over nothing": ("gains", [{"schedule": "order=column", "dense_ratio": 0.6}]),
    "layers, single calls beside queued ones": (
        "tables",
        [
            {"bench": "layer", "mode": "queued", "time_us": 5000} | SONICMOE,
            {"bench": "layer", "time_us": 7000, "ratio_to_sonicmoe": 1.25, "torch_ratio": 2.5},
        ],
        "T, E, K, D, F | what | µs | MiB at SonicMoE's peak | against SonicMoE | eager, one layer",
        "24, 8, 2, 64, 32 | down | 5000 | 4321 | 1.12x | 7000 µs, 1.25x SonicMoE, 2.50x PyTorch",
    ),
    "few tokens, a peer left out of some, and another GPU": (
        "tables",
        [
            {"bench": "decode", "tokens": 5, "floor_ratio": 0.5, "ratio_to_vllm": 1.5},
            {"bench": "decode", "tokens": 9, "floor_ratio": 0.6, "ratio_to_vllm_invariant": 2.25},
            {"bench": "decode", "tokens": 7, "gpu": "NVIDIA H100", "launches": 3},
        ],
        "T, E, K, D, F | what | of the floor | against vLLM | against vLLM's batch-invariant tile",
        "5, 8, 2, 64, 32 | down | 0.50 | 1.50x |",
        "9, 8, 2, 64, 32 | down | 0.60 | | 2.25x",
        "T, E, K, D, F | what | launches",
        "7, 8, 2, 64, 32 | down | 3",
    ),
    "training, of fewer steps and out of memory": (
        "training",
        [
            TITAN | {"what": what, "steps": steps, "tokens_per_second": rate, "final_loss": loss}
            for what, steps, rate, loss in (
                *(("fused_moe", 40, 3000, 2.0), ("grouped_mm", 40, 2000, 2.0), ("loop", 20, 1000, 3.0)),
            )
        ]
        + [
            {"shape": "16B6, batch 8", "local_batch_size": 8, "what": "loop", "steps": 40, "failed": "memory"}
        ],
        "model | local batch | layer | steps | tokens/s per GPU | fused_moe's over it | MiB at the peak |"
        " final loss | fused_moe's loss over it",
        "16B6 | 4 | fused_moe | 40 | 3,000 | | 2,048 | 2.0000 |",
        "16B6 | 4 | grouped_mm | 40 | 2,000 | 1.50x | 2,048 | 2.0000 | 1.0000",
        "16B6 | 4 | loop | 20 | 1,000 | 3.00x | 2,048 | 3.0000 |",
        "16B6 | 8 | loop | 40 | memory | | | |",
    ),
    "continuous batching": (
        "tables",
        [GENERATED, GENERATED | {"mode": "graphs", "tokens": 64}],
        SERVED,
        "olmoe, 12 layers, bf16, prompts up to 512 | grouped_mm | 8 | 20.0 against 25.0 | 1.25x |"
        " 3,000 against 2,000 | 1.50x",
        "olmoe, 12 layers, bf16, prompts up to 512, CUDA graphs | grouped_mm | 64 | 20.0 against 25.0 |"
        " 1.25x | 3,000 against 2,000 | 1.50x",
    ),
    "engines": (
        "tables",
        [
            ENGINE | {"what": "stock", "tiles": ["a.json"], "first_token_ms": 25, "same_bits": False},
            ENGINE | {"what": "fused_moe_codes", "peer": "stock", "first_token_ratio": 2, "peer_ratio": 1},
            ENGINE | {"what": "fused_moe", "failed": "1"},
        ],
        f"{SERVED} | same bits alone and among others",
        "olmoe, prompt 5, 16-bit activations | TRITON, tuned tiles | 2 | 12.5 against 25.0 | 2.00x |"
        " 2,000 against 2,000 | 1.00x | yes against no",
        "olmoe, prompt 5, fused_moe | | 2 | failed | failed | | |",
    ),
    "a profile": (
        "profile",
        [
            {"layer": "ours", "what": "up_gate", "time_us": 501, "floor_us": 450, "launches": 1},
            {"layer": "sonicmoe", "what": "up_gate", "time_us": 521, "launches": 1},
            {"layer": "sonicmoe", "what": "down", "time_us": 56, "launches": 1},
            {
                "layer": "dense",
                "what": "step",
                "time_us": 1901,
                "watts": 690.5,
                "sm_mhz": 1500,
                "joules": 1.5,
            },
        ],
        "shape | kernel | launches | µs | floor | gap | floor / µs | SonicMoE, µs",
        "24,8,2,64,32 | up_gate | 1 | 501 | 450 | 51 | 0.90 | 521",
        "24,8,2,64,32 | down | | | | | | 56",
        "shape | layer | µs of kernels | W | SM MHz | J per step",
        "24,8,2,64,32 | dense | 1901 | 690 | 1500 | 1.50",
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_rows_of_tables(load, name):
    table, common, (function, found, *expected) = load("table"), load("common"), TABLES[name]
    said = {"shape": "24,8,2,64,32", "routing": "random", "tier": "hopper", "schedule": "default"}
    said |= {"mode": "eager", "dtype": "bf16", "what": "down", "gpu": "NVIDIA H200", "torch": "2.13.0"}
    said |= {"cpu": "a", "threads": 1, "commit": "b", "date": "2026-11-27"}
    said |= {"bench": "profile" if function == "profile" else "gemm", "about_sonicmoe": "two tiles"}
    text = getattr(table, function)([dict.fromkeys(common.FIELDS) | said | r for r in found])
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|--")]
    rows = [" | ".join(cell.strip() for cell in line.split("|")[1:-1]) for line in lines]
    assert [" ".join(row.split()) for row in rows] == expected
    if function == "tables":
        assert text.startswith("NVIDIA H200, PyTorch 2.13.0, hopper, ") and "two tiles." in text
    assert expected or text == "no GEMM was measured on the default schedule and on another"
