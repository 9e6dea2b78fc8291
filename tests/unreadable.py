"""Wrong arguments of all operators, with all tensors in memory that must not be read or written. An operator
that runs anything before its error, even a copy, ends this process with a signal.

test_raw_operators.py runs it. It prints each operator, argument and what is planted there before the call,
and at last each argument that was never refused."""

import ctypes
import mmap

import torch
from cases import BF16, Case, operator_calls
from torch.utils._pytree import tree_leaves, tree_map

ops = torch.ops.fused_moe
NUM_BYTES = 1 << 24
# No operator takes these: of layouts, activations, formats, and of other choices and sizes.
NUMBERS = (-1, 99)


def unreadable_memory() -> mmap.mmap:
    memory = mmap.mmap(-1, NUM_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(NUM_BYTES), 0):
        raise OSError("mprotect has failed")
    return memory


MEMORY = unreadable_memory()


def unreadable(args: tuple) -> tuple:
    """The arguments, their tensors in that memory."""

    def twin(t):
        if not torch.is_tensor(t) or not t.numel():
            return t
        extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        return torch.frombuffer(MEMORY, dtype=t.dtype, count=extent).as_strided(t.shape, t.stride())

    return tree_map(twin, args)


def wrong_tensors(t: torch.Tensor) -> dict[str, torch.Tensor]:
    """Others than t, by what is wrong. Not the device: there may be no other one with kernels."""
    wrong = {
        f"size {i}": t.new_zeros([*t.shape[:i], n + 1, *t.shape[i + 1 :]]) for i, n in enumerate(t.shape)
    }
    wrong["dimensions"] = t.unsqueeze(0).contiguous()
    if t.dim() > 1:
        wrong["strides"] = t.mT.contiguous().mT
    for dtype in (torch.float64, torch.int32):
        if t.dtype != dtype:
            wrong[str(dtype)] = torch.zeros(t.shape, dtype=dtype)
    return wrong


def wrong_values(value) -> dict:
    if torch.is_tensor(value):
        return wrong_tensors(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return {str(number): number for number in NUMBERS}
    if not isinstance(value, (list, tuple)):
        return {}
    wrong = {f"without {i}": [*value[:i], *value[i + 1 :]] for i in range(len(value))}
    for i, member in enumerate(value):
        others = wrong_values(member).items()
        wrong |= {f"{i}: {how}": [*value[:i], other, *value[i + 1 :]] for how, other in others}
    return wrong


def raises(name: str, args: tuple) -> bool:
    try:
        getattr(ops, name)(*args)
    except RuntimeError as error:
        assert "expected" in str(error), (name, error)
        return True
    return False


def main() -> None:
    torch.manual_seed(0)
    accepted, refused = set(), set()
    for name, calls in operator_calls(Case(13, 16, 8, 5, 3, BF16, bias=True), "cpu").items():
        arguments = [a.name for a in getattr(ops, name).default._schema.arguments]
        for call in calls:
            # An operand in other strides is copied before the others are checked.
            call = tree_map(lambda t: t.contiguous().clone() if torch.is_tensor(t) else t, call)
            for i, value in enumerate(call):
                if any(map(torch.is_tensor, tree_leaves(value))):
                    accepted.add((name, arguments[i]))
                for how, wrong in wrong_values(value).items():
                    planted = *call[:i], wrong, *call[i + 1 :]
                    if not raises(name, planted):
                        continue  # the argument may be so
                    refused.add((name, arguments[i]))
                    print(name, arguments[i], how, flush=True)
                    assert raises(name, unreadable(planted)), "the error depends on values"
    for name, argument in sorted(accepted - refused):
        print("not refused:", name, argument)


if __name__ == "__main__":
    main()
