"""Raw operators on the CPU with ids, counts, offsets and maps that lead outside: an error, and nothing is
written. tests/cuda/test_misuse.py has the same for CUDA, where they are clamped."""

import pytest
import torch
from cases import BF16, F32, Case, operator_calls
from planting import INT_MAX, INT_MIN, Guarded, calls_of, integer_arguments, planted, wrong_values
from torch.utils._pytree import tree_leaves

ops = torch.ops.fused_moe
CASE = Case(13, 16, 8, 5, 3, bias=True)
ARGUMENTS = sorted(
    {
        (name, label)
        for name, calls in operator_calls(CASE, "cpu").items()
        for args in calls
        for label in integer_arguments(name, args)
    }
)
# What no call of an operator reads: the CPU makes schedules of its own, and up_dgrad gathers nothing.
UNREAD = {("up_dgrad", "row_token"), ("up_dgrad", "row_slot"), ("up_dgrad", "token_row")}
UNREAD |= {(name, label) for name, label in ARGUMENTS if label == "schedule"}
# What may have any value: others than an expert's are remote, and a number of tokens is clamped.
ANY_VALUE = {
    ("route_plan", "ids"),
    ("experts", "ids"),
    ("experts_out", "ids"),
    ("quantized_experts", "ids"),
    ("route_plan", "expert_map"),
    ("experts", "expert_map"),
}
ANY_VALUE |= {(op, name) for op in ("route", "routed_experts") for name in ("given_ids", "num_tokens")}


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
def test_wrong_integers_are_errors(cpu, name, label, dtype):
    """One wrong element is an error and no argument is written, or this call does not read it and gives the
    same bits. The values near the range come first: what they read outside is still mapped."""
    case = Case(13, 16, 8, 5, 3, dtype, bias=True)
    num_errors = 0
    for call in calls_of(name, case, cpu):
        wrong = integer_arguments(name, call).get(label)
        if wrong is None:
            continue
        for where, value in wrong_values(case, label).items():
            guard = Guarded(elements=1024)
            args, right = guard.all_of(planted(call, label, wrong, value)), guard.all_of(call)
            before = [t.clone() for t in tensors(args)]
            try:
                found = results_of(name, args)
            except RuntimeError as error:
                assert "ids and maps in range" in str(error)
                assert same_bits(tensors(args), before), f"an argument is written, {where}: {value}"
                num_errors += 1
            else:
                assert same_bits(found, results_of(name, right)), f"no error, {where}: {value}"
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
        ops.route_backward(dscores, logits, ids, 0, False, 1.0)
