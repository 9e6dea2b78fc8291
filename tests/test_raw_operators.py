"""Raw operators on the CPU with ids, counts, offsets and maps that lead outside: an error, and nothing is
written. tests/cuda/test_misuse.py has the same for CUDA, where they are clamped. On any device an operand
whose storage was freed or shrunk is an error."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import BF16, F32, Case, operator_calls
from planting import INT_MAX, INT_MIN, Guarded, calls_of, integer_arguments, planted, replaced, wrong_values
from torch.utils._pytree import tree_leaves

import fused_moe

ops = torch.ops.fused_moe
CASE = Case(13, 16, 8, 5, 3, bias=True)
OPERATORS = dict(sorted(operator_calls(CASE, "cpu").items()))
ARGUMENTS = sorted(
    {
        (name, label)
        for name, calls in OPERATORS.items()
        for args in calls
        for label in integer_arguments(name, args)
    }
)
# What no call of an operator reads: the CPU makes its own schedules, and up_dgrad gathers nothing.
UNREAD = {("up_dgrad", "row_token"), ("up_dgrad", "row_slot"), ("up_dgrad", "token_row")}
UNREAD |= {(name, label) for name, label in ARGUMENTS if label == "schedule" or name == "fp8_up_weights"}
# What may have any value: others than an expert's are remote, and a number of tokens is clamped.
ANY_VALUE = {
    ("route_plan", "ids"),
    ("experts_out", "ids"),
    ("route_plan", "expert_map"),
    ("sum_peers", "index"),
}
ANY_VALUE |= {("route_plan_dropped", name) for name in ("ids", "expert_map")}
ANY_VALUE |= {("route", name) for name in ("given_ids", "num_tokens")}
ANY_VALUE |= {(op, n) for op in ("experts", "experts_out") for n in ("ids", "expert_map", "num_tokens")}


def tensors(value) -> list[torch.Tensor]:
    return [t for t in tree_leaves(value) if torch.is_tensor(t)]


def results_of(name: str, args: tuple) -> list[torch.Tensor]:
    """What the call returns, and what it may have written."""
    results = tensors(getattr(ops, name)(*args))
    return results + [t for t in tensors(args) if t.is_floating_point()]


def same_bits(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))
@pytest.mark.parametrize("name, label", [a for a in ARGUMENTS if a not in ANY_VALUE])
def test_wrong_integers_are_errors(cpu, drawn_calls, name, label, dtype):
    """One wrong element is an error and no argument is written, or this call does not read it and gives the
    same bits. The values near the range come first: what they read outside is still mapped."""
    case = Case(13, 16, 8, 5, 3, dtype, bias=True)
    num_errors = 0
    for call in calls_of(name, drawn_calls(case)[name]):
        wrong = integer_arguments(name, call).get(label)
        if wrong is None:
            continue
        for where, value in wrong_values(case, label).items():
            guard = Guarded(elements=1024)
            args = guard.all_of(planted(call, label, wrong, value))
            before = [t.clone() for t in tensors(args)]
            try:
                found = results_of(name, args)
            except RuntimeError as error:
                assert "ids and maps in range" in str(error)
                assert same_bits(tensors(args), before), f"an argument is written, {where}: {value}"
                num_errors += 1
            else:
                right = results_of(name, guard.all_of(call))
                assert same_bits(found, right), f"no error, {where}: {value}"
            assert guard.are_intact()
    assert (num_errors > 0) == ((name, label) not in UNREAD)


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_ids_out_of_range_are_remote(cpu, dtype):
    """route_plan takes any ids: those outside [0, E) have no row, as -1 has none."""
    ids = CASE.ids(cpu, dtype)
    for value in (CASE.num_experts, INT_MAX, INT_MIN, torch.iinfo(dtype).min, torch.iinfo(dtype).max):
        remote, wrong = ids.clone(), ids.clone()
        remote[3:5, 1:] = -1
        wrong[3:5, 1:] = value
        assert same_bits(ops.route_plan(wrong, CASE.num_experts), ops.route_plan(remote, CASE.num_experts))


@pytest.mark.parametrize("experts, top_k", [(1025, 2), (40, 33)], ids=("experts", "top_k"))
def test_route_backward_has_the_limits_of_route(device, experts, top_k):
    """A warp of the CUDA kernel has 1024 logits, and a lane for each of 32 slots."""
    logits, dscores = torch.randn(4, experts, device=device), torch.randn(4, top_k, device=device)
    ids = torch.zeros(4, top_k, dtype=torch.int32, device=device)
    with pytest.raises(RuntimeError, match="fused_moe::route_backward: expected"):
        ops.route_backward(dscores, logits, ids, 0, False, 1.0, 1e-20)


# What forward only keeps for backward, whose operator checks it.
KEPT = {("experts_down", "h")}
KEPT |= {("fp8_down", name) for name in ("h", "link_scale", "link_t", "link_t_scale", "x_scale")}


def test_wrong_arguments_are_errors_before_anything_runs(cpu):
    """A wrong shape, dtype, layout or number in any place of any call: an error before a tensor is read or
    written. On any device the operators check alike, before they begin to launch."""
    program = [sys.executable, str(Path(__file__).with_name("unreadable.py"))]
    run = subprocess.run(program, capture_output=True, text=True)
    lines = run.stdout.splitlines()
    assert run.returncode == 0, f"{run.returncode} after {lines[-1:]}: {run.stderr}"
    planted = {tuple(line.split()[:2]) for line in lines if not line.startswith("not refused: ")}
    assert {name for name, _ in planted} == {*OPERATORS}
    assert {tuple(line.split()[2:]) for line in lines if line.startswith("not refused: ")} == KEPT


def cut(t: torch.Tensor, num_bytes: int, offset: int = 0) -> torch.Tensor:
    """The same values from an offset on, in a separate storage that was shrunk afterwards."""
    extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    storage = t.new_empty(offset + extent)
    copy = storage.as_strided(t.shape, t.stride(), offset).copy_(t)
    assert num_bytes < storage.nbytes
    storage.untyped_storage().resize_(num_bytes)
    return copy


@pytest.mark.quick
@pytest.mark.parametrize("name", OPERATORS)
def test_freed_and_shrunk_storage(drawn_calls, name):
    """Every tensor of every call: freed, one byte too short, and shrunk behind an offset."""
    for call in drawn_calls(CASE)[name]:
        first = {id(t): i for i, argument in reversed([*enumerate(call)]) for t in tensors(argument)}
        for t in filter(torch.numel, tensors(call)):
            expected = f"{name}: expected the storage of argument {first[id(t)]}, a tensor of shape"
            for num_bytes, offset in ((0, 0), (t.nbytes - 1, 0), (t.nbytes, 3)):
                short = cut(t.detach(), num_bytes, offset)
                with pytest.raises(RuntimeError, match=expected):
                    getattr(ops, name)(*replaced(call, t, short))


@pytest.mark.parametrize("with_gradients", (False, True))
@pytest.mark.parametrize("name", ("x", "w1", "w2", "w3", "b1", "b2", "b3", "scores", "ids"))
def test_experts_of_freed_storage(device, name, with_gradients):
    """As FSDP leaves a weight outside of forward and backward: an error, as torch.mm's, not a crash."""
    inputs = {**CASE.inputs(device), "ids": CASE.ids(device)}
    if with_gradients:
        inputs = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in inputs.items()}
    with torch.no_grad() if not with_gradients else torch.enable_grad():
        inputs[name].untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="expected the storage of argument"):
            fused_moe.fused_experts(**inputs)


@pytest.mark.parametrize("name", ("x", "w1", "w2", "w3"))
def test_storage_freed_before_backward(device, name):
    inputs = {n: t.requires_grad_() for n, t in CASE.inputs(device).items()}
    out = fused_moe.fused_experts(**inputs, ids=CASE.ids(device))
    inputs[name].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="expected the storage of argument"):
        out.sum().backward()


@pytest.mark.parametrize("num_bytes", (0, 8))
def test_freed_ids_and_maps(device, num_bytes):
    """What checks read on the CPU."""
    ids, expert_map = torch.zeros(5, 2, dtype=torch.int32, device=device), torch.arange(4).int().to(device)
    for t in (ids, expert_map):
        t.untyped_storage().resize_(num_bytes)
    with pytest.raises(RuntimeError, match="storage"):
        fused_moe.route(torch.randn(5, 8, device=device), 2, ids=ids)
    with pytest.raises(RuntimeError, match="storage"):
        fused_moe.route_plan(torch.zeros(5, 2, dtype=torch.int32, device=device), 4, expert_map)
