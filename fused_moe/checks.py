"""The checks of the public functions, before an operator runs.

A failed one raises TypeError (type or dtype) or ValueError (shape, device or value). The message names the
argument, what was expected and what was found, as the caller passed it. They run on every call, so a right
call is told from a wrong one by few comparisons, and who is wrong is looked for afterwards.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from . import ops as _ops
from .activation import ACTIVATIONS, CONSTANTS
from .overlap import overlaps_itself, share_memory
from .plan import Plan

if TYPE_CHECKING:
    Device = torch.device | str | int | None

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
IDS = (torch.int32, torch.int64)  # of experts
GIVEN_IDS = (*INTEGERS, torch.uint16)  # of a choice made before
DEVICES = ("cpu", "meta", *(["cuda"] if _ops.HAS_CUDA_KERNELS else []))


def fail(error: type[Exception], fn: str, expected: str, found: object) -> NoReturn:
    """Raises a failed check's error. A message formatted before would make sizes static in torch.compile."""
    if isinstance(found, Tensor):
        found = "Tensor"  # its values may be many, and on a GPU
    raise error(f"{fn}: expected {expected}, found {found}")


# --- numbers and words ------------------------------------------------------------------------------------


def check_int(fn: str, name: str, value) -> None:
    """Checks for an integer; a bool is none. While torch.jit traces, sizes are tensors."""
    if type(value) is int or (torch.jit.is_tracing() and isinstance(value, Tensor)):
        return
    if isinstance(value, bool) or not isinstance(value, (Integral, torch.SymInt)):
        fail(TypeError, fn, f"{name} to be an int", _described(value))


def check_real(fn: str, name: str, value, finite: bool = True) -> None:
    """Checks for a number that is not NaN; an infinite one passes unless `finite`."""
    if type(value) is not float and (
        isinstance(value, bool) or not isinstance(value, (Real, torch.SymInt, torch.SymFloat))
    ):
        fail(TypeError, fn, f"{name} to be a number", _described(value))
    if not (-math.inf < value < math.inf if finite else value == value):  # type: ignore[operator]
        fail(ValueError, fn, f"{name} to be a finite number" if finite else f"{name} to be a number", value)


def check_bool(fn: str, name: str, value) -> None:
    if not isinstance(value, bool):
        fail(TypeError, fn, f"{name} to be True or False", _described(value))


def check_choice(fn: str, name: str, value, choices) -> None:
    if not (isinstance(value, str) and value in choices):
        found = value if isinstance(value, Tensor) else repr(value)
        fail(ValueError, fn, f"{name} to be one of {sorted(choices)}", found)


def check_group(fn: str, group) -> None:
    """Checks a group of ranks, or None. Ranks outside a group have an int in its place."""
    if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        fail(TypeError, fn, "group to be a ProcessGroup that this rank is in", type(group).__name__)


def check_factory(fn: str, device, dtype) -> None:
    """Checks what a constructor passes on to torch.empty."""
    if device is not None and not isinstance(device, torch.device):
        try:
            torch.device(device)
        except (TypeError, RuntimeError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            fail(kind, fn, "device to be None or one that PyTorch knows", _described(device))
    if dtype is not None and dtype not in FLOATING:
        fail(TypeError, fn, f"dtype to be None or {_names(FLOATING)}", dtype)


def _described(value) -> str:
    """A value of the wrong type: the type, and what is short enough to be recognised."""
    text = "" if value is None or isinstance(value, Tensor) else f" {value!r}"
    return type(value).__name__ + (text if len(text) <= 40 else "")


# --- tensors ----------------------------------------------------------------------------------------------


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_tensor(fn: str, name: str, value, dim: int, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(value, Tensor):
        fail(TypeError, fn, f"{name} to be a tensor", type(value).__name__)
    if value.dtype not in dtypes:
        fail(TypeError, fn, f"{name} of dtype {_names(dtypes)}", value.dtype)
    if value.dim() != dim:
        fail(ValueError, fn, f"{name} of {dim} dimensions", f"shape {tuple(value.shape)}")


def check_stored(fn: str, name: str, value, dim: int, dtypes: tuple[torch.dtype, ...]) -> None:
    """Checks for a tensor that PyTorch's operators convert, as one of a checkpoint: dense, and not empty."""
    check_tensor(fn, name, value, dim, dtypes)
    if value.layout != torch.strided:
        fail(TypeError, fn, f"{name} to be a dense tensor", f"layout {value.layout}")
    if value.numel() == 0:
        fail(ValueError, fn, f"{name} of sizes >= 1", tuple(value.shape))


def check_input(fn: str, name: str, value, dim: int, dtypes: tuple[torch.dtype, ...] = FLOATING) -> None:
    """Checks for a tensor on a device that this build has kernels for."""
    check_tensor(fn, name, value, dim, dtypes)
    has_kernels = value.is_cpu or (value.is_cuda and "cuda" in DEVICES)  # a device's name takes longer
    if not has_kernels and value.device.type not in DEVICES:
        kernels = f"{name} on a device that this build has kernels for ({', '.join(DEVICES)})"
        advice = "" if value.device.type != "cuda" else f"; {_ops.HOW_TO_BUILD_CUDA}"
        fail(ValueError, fn, kernels, f"{value.device}{advice}")


def check_tokens(fn: str, x, D: int) -> None:
    """Checks the input (..., D) of a layer."""
    if not isinstance(x, Tensor):
        fail(TypeError, fn, f"x to be a tensor of shape (..., D) with D = {D}", type(x).__name__)
    if x.dtype not in FLOATING:
        fail(TypeError, fn, f"x of dtype {_names(FLOATING)}", x.dtype)
    if x.dim() < 1 or x.size(-1) != D:
        fail(ValueError, fn, f"x of shape (..., D) with D = {D}", tuple(x.shape))


def check_plain(fn: str, name: str, weight) -> None:
    """Checks for a tensor or parameter that is neither sharded nor of another subclass."""
    if type(weight) not in (Tensor, torch.nn.Parameter):
        expected = f"{name} to be a plain parameter, as before ExpertParallel and fully_shard"
        fail(TypeError, fn, expected, type(weight).__name__)


def check_shape(fn: str, name: str, value: Tensor, letters: str, shape: tuple) -> None:
    if value.shape != shape:
        fail(ValueError, fn, f"{name} of shape ({letters}) = {tuple(shape)}", tuple(value.shape))


def check_device(fn: str, name: str, value: Tensor, like_name: str, like: Tensor) -> None:
    if value.device != like.device:
        fail(ValueError, fn, f"{name} on {like_name}'s device {like.device}", value.device)


def check_on_meta(fn: str, x: Tensor, *parameters: Tensor | None) -> None:
    """Checks a linear layer of PyTorch, which returns memory that nothing has written if x or its weight is
    on meta and the other is not."""
    for p in parameters:
        if p is not None and (p.device.type == "meta") != (x.device.type == "meta"):
            fail(ValueError, fn, f"x on the parameters' device {p.device}", x.device)


def check_like(fn: str, name: str, value: Tensor, like_name: str, like: Tensor) -> None:
    """Checks for the same device, and for the same dtype unless autocast casts both."""
    check_device(fn, name, value, like_name, like)
    if value.dtype == like.dtype:
        return
    if not is_autocast_enabled(like):
        fail(TypeError, fn, f"{name} of {like_name}'s dtype {like.dtype}", value.dtype)
    if torch.float64 in (value.dtype, like.dtype):
        expected = f"{name} of {like_name}'s dtype {like.dtype}, because autocast does not cast float64"
        fail(TypeError, fn, expected, value.dtype)


def _is_like(x: Tensor, value, shape: tuple[int, ...]) -> bool:
    """Whether value has this shape, and x's dtype and device."""
    return (
        isinstance(value, Tensor)
        and value.dtype == x.dtype
        and value.device == x.device
        and value.shape == shape
    )


def is_autocast_enabled(x: Tensor) -> bool:
    if not torch._C._is_any_autocast_enabled():  # a device's name takes longer
        return False
    device = x.device.type
    return device in ("cpu", "cuda") and torch.is_autocast_enabled(device)


def _can_read(x: Tensor) -> bool:
    """Whether x's values can be looked at. On a GPU that would synchronise; its kernels never access rows
    outside of the tensors."""
    return x.device.type == "cpu" and has_memory(x)


def has_memory(x: Tensor) -> bool:
    """Inside of torch.compile and torch.func a tensor may have none."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or type(x) not in (Tensor, torch.nn.Parameter)
        or x.is_meta
    )


def check_one_gradient(fn: str, out: Tensor) -> None:
    """Lets backward raise RuntimeError where it gets many gradients of out at once. Collectives have no rule
    for such batches, and would mix them up."""

    def check(dout: Tensor) -> None:
        functorch = torch._C._functorch
        if functorch.is_legacy_batchedtensor(dout) or functorch.is_batchedtensor(dout):
            many = "many, by is_grads_batched=True or vmap"
            fail(RuntimeError, fn, "one gradient of out in a backward pass", many)

    if out.requires_grad and not torch.compiler.is_compiling():
        out.register_hook(check)


def check_storage(fn: str, name: str, x: Tensor) -> None:
    """Raises RuntimeError where x's memory was freed or shrunk, as operators do. PyTorch would read past
    its end."""
    if not has_memory(x) or x.numel() == 0:
        return
    last = x.storage_offset() + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    needed, found = (last + 1) * x.itemsize, x.untyped_storage().nbytes()
    if found < needed:
        fail(
            RuntimeError,
            fn,
            f"the storage of {name} to hold {needed} bytes",
            f"{found}: it was freed or shrunk",
        )


# --- routing ----------------------------------------------------------------------------------------------


def is_mixed(x: Tensor, weight: Tensor) -> bool:
    """Whether a float32 router is beside a 16-bit x."""
    return weight.dtype == torch.float32 and x.dtype in (torch.bfloat16, torch.float16)


def check_router(fn: str, x: Tensor, weight, bias) -> None:
    """Checks weight (E, D) and bias (E,) against x (T, D). Both have x's dtype, or are float32."""
    check_tensor(fn, "weight", weight, 2, FLOATING)
    num_experts, width = weight.shape
    check_shape(fn, "weight", weight, "E, D", (num_experts, x.size(1)))
    if not 1 <= num_experts <= 1024:
        fail(ValueError, fn, "weight of 1 to 1024 experts", num_experts)
    if width < 1:
        fail(ValueError, fn, "weight of D >= 1", tuple(weight.shape))
    mixed = is_mixed(x, weight)
    if mixed:
        check_device(fn, "weight", weight, "x", x)
    else:
        check_like(fn, "weight", weight, "x", x)
    if bias is not None:
        check_tensor(fn, "bias", bias, 1, FLOATING)
        check_shape(fn, "bias", bias, "E", (num_experts,))
        check_like(fn, "bias", bias, *(("weight", weight) if mixed else ("x", x)))


def check_routing(
    fn: str,
    num_experts: int,
    top_k: int,
    score_func: str,
    num_expert_groups,
    num_limited_groups,
    group_score="top2",
    route_norm=False,
    route_scale=1.0,
    route_norm_eps=1e-20,
) -> None:
    """Checks E, K and the groups against each other, for `route` and for the module's constructor."""
    check_choice(fn, "score_func", score_func, _ops.SCORE_FUNCS)
    check_choice(fn, "group_score", group_score, _ops.GROUP_SCORES)
    check_int(fn, "num_experts", num_experts)
    check_int(fn, "top_k", top_k)
    check_bool(fn, "route_norm", route_norm)
    check_real(fn, "route_scale", route_scale)
    check_real(fn, "route_norm_eps", route_norm_eps)
    if route_norm_eps < 0:
        fail(ValueError, fn, "route_norm_eps >= 0", route_norm_eps)
    if not 1 <= num_experts <= 1024:
        fail(ValueError, fn, "1 to 1024 experts", num_experts)
    most = min(num_experts, 32)
    if not 1 <= top_k <= most:
        why = ", the number of experts" if most == num_experts else ""
        fail(ValueError, fn, f"top_k from 1 to {most}{why}", top_k)
    if num_expert_groups is None and num_limited_groups is None:
        return
    for name, number in (
        ("num_expert_groups", num_expert_groups),
        ("num_limited_groups", num_limited_groups),
    ):
        if number is not None:
            check_int(fn, name, number)
    if num_expert_groups is None or num_limited_groups is None:
        both = "num_expert_groups and num_limited_groups together"
        fail(ValueError, fn, both, (num_expert_groups, num_limited_groups))
    if num_expert_groups < 1 or num_experts % num_expert_groups:
        fail(ValueError, fn, f"num_expert_groups to divide the {num_experts} experts", num_expert_groups)
    if not 1 <= num_limited_groups <= num_expert_groups:
        fail(ValueError, fn, f"num_limited_groups from 1 to {num_expert_groups}", num_limited_groups)
    reach = num_limited_groups * (num_experts // num_expert_groups)
    if top_k > reach:
        fail(ValueError, fn, f"top_k within the {reach} experts of the kept groups", top_k)


def check_num_tokens(fn: str, num_tokens, like_name: str, like: Tensor) -> None:
    """Checks for an integer on like's device. Its value is clamped there."""
    if not isinstance(num_tokens, Tensor):
        fail(TypeError, fn, "num_tokens to be a tensor of one integer", _described(num_tokens))
    check_tensor(fn, "num_tokens", num_tokens, num_tokens.dim(), (torch.int32, torch.int64))
    if num_tokens.numel() != 1:
        fail(ValueError, fn, "num_tokens of one element", f"shape {tuple(num_tokens.shape)}")
    check_device(fn, "num_tokens", num_tokens, like_name, like)


def check_given_ids(
    fn: str, ids, num_tokens: Tensor | None, like_name: str, like: Tensor, num_experts: int, top_k: int
) -> Tensor:
    """Checks ids (T, K), for like's T tokens, that are scored instead of a choice, and where they can be read
    those of tokens that are no padding. Returns them in a dtype that kernels read."""
    check_tensor(fn, "ids", ids, 2, GIVEN_IDS)
    check_shape(fn, "ids", ids, "T, K", (like.size(0), top_k))
    check_device(fn, "ids", ids, like_name, like)
    if ids.dtype == torch.uint16:
        ids = ids.int()
    if num_tokens is None:
        check_range(fn, "ids", ids, -1, num_experts - 1)
    elif _can_read(num_tokens):
        check_range(fn, "ids", ids[: max(int(num_tokens), 0)], -1, num_experts - 1)
    return ids


def check_expert_map(fn: str, expert_map, ids: Tensor, num_experts: int) -> None:
    check_tensor(fn, "expert_map", expert_map, 1, (torch.int32,))
    if expert_map.size(0) < 1:
        fail(ValueError, fn, "expert_map of at least one expert", tuple(expert_map.shape))
    check_device(fn, "expert_map", expert_map, "ids", ids)
    check_range(fn, "expert_map", expert_map, -1, num_experts - 1)


def check_range(fn: str, name: str, values: Tensor, low: int, high: int) -> None:
    """Checks integers where they can be read."""
    if not _can_read(values):
        return
    values.unsqueeze(0)  # raises if its storage was freed or shrunk: a comparison would read it
    if values.numel() == 0:
        return
    least, most = values.aminmax()
    if low <= int(least) and int(most) <= high:
        return
    limits = torch.iinfo(values.dtype)  # a comparison wraps numbers beyond them
    outside = (values < max(low, limits.min)) | (values > min(high, limits.max))
    where = outside.nonzero()[0].tolist()
    found = int(values[tuple(where)])
    fail(ValueError, fn, f"{name} from {low} to {high}", f"{name}{where} = {found}")


def check_num_experts(fn: str, num_experts: int) -> None:
    check_int(fn, "num_experts", num_experts)
    if num_experts < 1:
        fail(ValueError, fn, "num_experts >= 1", num_experts)


def check_ids(fn: str, ids, x: Tensor) -> None:
    check_tensor(fn, "ids", ids, 2, IDS)
    num_tokens, top_k = ids.shape
    if num_tokens != x.size(0):
        fail(ValueError, fn, f"ids for x's {x.size(0)} tokens", tuple(ids.shape))
    if top_k < 1:
        fail(ValueError, fn, "ids with at least one slot", tuple(ids.shape))
    check_device(fn, "ids", ids, "x", x)


def check_scores(fn: str, scores, ids: Tensor) -> None:
    check_tensor(fn, "scores", scores, 2, FLOATING)
    check_shape(fn, "scores", scores, "T, K", ids.shape)
    if scores.device != ids.device:
        fail(ValueError, fn, f"scores on {ids.device}", scores.device)


def check_shared(fn: str, shared, shared_gate, like_name: str, like: Tensor, shape: tuple) -> None:
    """Checks shared (T, D) and shared_gate (T,) or (T, 1). Either may be None."""
    if shared is None:
        if shared_gate is not None:
            fail(ValueError, fn, "shared_gate only beside shared", "shared_gate without shared")
        return
    if not _is_like(like, shared, shape):
        check_tensor(fn, "shared", shared, 2, FLOATING)
        check_shape(fn, "shared", shared, "T, D", shape)
        check_like(fn, "shared", shared, like_name, like)
    if shared_gate is None:
        return
    column = isinstance(shared_gate, Tensor) and shared_gate.dim() == 2
    check_tensor(fn, "shared_gate", shared_gate, 2 if column else 1, FLOATING)
    T = shape[0]
    check_shape(fn, "shared_gate", shared_gate, "T, 1" if column else "T", (T, 1) if column else (T,))
    check_device(fn, "shared_gate", shared_gate, like_name, like)


def check_out(fn: str, out, x: Tensor, shape: tuple, inputs: tuple) -> None:
    """Checks a tensor for the result of inputs. Some inputs may be None."""
    dtype = x.dtype
    if is_autocast_enabled(x) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
    check_tensor(fn, "out", out, 2, (dtype,))
    check_shape(fn, "out", out, "T, D", shape)
    check_device(fn, "out", out, "x", x)
    if not out.is_contiguous():
        fail(ValueError, fn, "a contiguous out", f"strides {out.stride()}")
    if out.requires_grad and torch.is_grad_enabled():
        fail(ValueError, fn, "out that requires no gradient itself", "requires_grad=True")
    given = [t for t in inputs if t is not None]
    if not all(map(has_memory, (out, *given))):
        return
    storage = out.untyped_storage().data_ptr()
    if any(t.untyped_storage().data_ptr() == storage and share_memory(out, t) for t in given):
        fail(ValueError, fn, "out that shares no memory with another argument", "one that does")


# --- rows of experts --------------------------------------------------------------------------------------


def check_counts(fn: str, counts: Tensor, num_rows: int) -> None:
    """Checks the values of counts where they can be read."""
    if _can_read(counts):
        values = counts.tolist()
        if min(values) < 0 or sum(values) > num_rows:
            fail(ValueError, fn, f"counts >= 0 that sum to at most the {num_rows} rows given", values)


def check_offsets(fn: str, offsets: Tensor, num_rows: int) -> None:
    """Checks the values of offsets where they can be read."""
    if not _can_read(offsets):
        return
    ends = offsets.tolist()
    if ends == sorted(ends) and 0 <= ends[0] and ends[-1] <= num_rows:
        return
    for e, (end, before) in enumerate(zip(ends, [0, *ends], strict=False)):
        if not before <= end <= num_rows:
            expected = f"offsets that rise from 0 to at most the {num_rows} rows given"
            fail(ValueError, fn, expected, f"offsets[{e}] = {end} after {before}")


def check_plan(fn: str, plan) -> None:
    """Checks for a plan that has row maps."""
    if not isinstance(plan, Plan):
        fail(TypeError, fn, "plan to be a fused_moe.Plan", type(plan).__name__)
    if plan.token_row is None:
        fail(ValueError, fn, "a plan made from ids", "a plan made from counts")
    if not all(map(torch.is_tensor, plan)):
        kinds = ", ".join(type(value).__name__ for value in plan)
        fail(TypeError, fn, "a plan as route_plan makes it, of tensors", kinds)


def check_plan_of_rows(fn: str, plan, rows: Tensor) -> None:
    check_plan(fn, plan)
    if plan.row_slot.size(0) != rows.size(0):
        fail(ValueError, fn, f"rows (R, D) of the plan's {plan.row_slot.size(0)} rows", tuple(rows.shape))
    if plan.offsets.device != rows.device:
        fail(ValueError, fn, f"plan on {rows.device}", plan.offsets.device)


def check_plan_of_ids(fn: str, plan, ids: Tensor, num_experts: int) -> None:
    check_plan(fn, plan)
    if plan.token_row.shape != ids.shape:
        of_ids = f"the plan of these ids, of shape (T, K) = {tuple(ids.shape)}"
        fail(ValueError, fn, of_ids, f"a plan of {tuple(plan.token_row.shape)}")
    if plan.counts.size(0) != num_experts:
        fail(ValueError, fn, f"a plan of E = {num_experts} experts", plan.counts.size(0))
    if plan.offsets.device != ids.device:
        fail(ValueError, fn, f"plan on {ids.device}", plan.offsets.device)


def check_max_rows(fn: str, max_rows, dropped_rows, ids: Tensor, plan=None) -> None:
    if max_rows is None:
        if dropped_rows is not None:
            fail(ValueError, fn, "no dropped_rows without max_rows", "one")
        return
    check_int(fn, "max_rows", max_rows)
    if max_rows < 1:
        fail(ValueError, fn, "max_rows >= 1", max_rows)
    if plan is not None:
        fail(ValueError, fn, "max_rows without plan, which is made with it", "both")
    if dropped_rows is not None:
        check_tensor(fn, "dropped_rows", dropped_rows, 0, (torch.int64,))
        check_device(fn, "dropped_rows", dropped_rows, "ids", ids)


# --- experts ----------------------------------------------------------------------------------------------


def check_activation(fn: str, activation: str, alpha, limit) -> None:
    check_choice(fn, "activation", activation, ACTIVATIONS)
    check_real(fn, "alpha", alpha)
    check_real(fn, "limit", limit, finite=False)
    if activation == "situ":
        for name, value in (("alpha", alpha), ("limit", limit)):
            if not 0 < value < math.inf:
                fail(ValueError, fn, f"a finite {name} > 0 with activation 'situ'", value)
    elif activation in CONSTANTS and limit < 0:
        fail(ValueError, fn, f"limit >= 0 with activation {activation!r}", limit)


def check_layout(fn: str, layout: str, score_on: str = "output") -> None:
    check_choice(fn, "layout", layout, _ops.LAYOUTS)
    check_choice(fn, "score_on", score_on, ("input", "output"))


def check_experts(
    fn: str, x_name: str, x: Tensor, w1, w2, w3, b1, b2, b3, layout: str, transposed: bool
) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Checks the weights and returns w1 (E, H, D), w2 (E, D, F), w3 (E, F, D) as views, and the layout."""
    check_bool(fn, "transposed", transposed)
    packed = layout != "separate"
    if not packed and not transposed and _fit_plainly(x, w1, w2, w3, b1, b2, b3):
        return w1, w2, w3, _ops.UNGATED if w3 is None else _ops.LAYOUTS[layout]
    pairs = layout == "interleaved" and isinstance(w1, Tensor) and w1.dim() == 4 and not transposed
    check_tensor(fn, "w1", w1, 4 if pairs else 3, FLOATING)
    stored = (w1, w2, w3)
    if pairs:
        if w1.size(2) != 2:
            fail(ValueError, fn, "w1 of shape (E, F, 2, D)", tuple(w1.shape))
        w1 = w1.flatten(1, 2)
    check_tensor(fn, "w2", w2, 3, FLOATING)
    if w3 is not None:
        if packed:
            fail(ValueError, fn, f"no w3 with layout {layout!r}, which packs it in w1", "w3")
        check_tensor(fn, "w3", w3, 3, FLOATING)
    if transposed:
        w1, w2, w3 = w1.mT, w2.mT, None if w3 is None else w3.mT
    E, D, F = w2.shape
    width = 2 * F if packed else F
    fits = x.size(1) == D and tuple(w1.shape) == (E, width, D)
    if not fits or (w3 is not None and tuple(w3.shape) != (E, F, D)):
        _fail_shapes(fn, x_name, x, stored, (b1, b2, b3), packed, transposed)
    if E < 1 or D < 1 or F < 1:
        fail(ValueError, fn, "E, D, F >= 1", f"w2 of shape {tuple(stored[1].shape)}")
    biases = (("b1", b1, "2F" if packed else "F", width), ("b2", b2, "D", D), ("b3", b3, "F", F))
    for name, bias, letter, size in biases:
        if bias is not None:
            check_tensor(fn, name, bias, 2, FLOATING)
            check_shape(fn, name, bias, f"E, {letter}", (E, size))
    if b3 is not None and w3 is None:
        fail(ValueError, fn, "b3 only beside w3", "b3 without w3")
    for name, value in (("w1", w1), ("w2", w2), ("w3", w3), ("b1", b1), ("b2", b2), ("b3", b3)):
        if value is not None:
            check_like(fn, name, value, x_name, x)
    code = _ops.UNGATED if not packed and w3 is None else _ops.LAYOUTS[layout]
    return w1, w2, w3, code


def _fit_plainly(x: Tensor, w1, w2, w3, b1, b2, b3) -> bool:
    """Whether all is right with weights of layout "separate", not transposed, and biases, beside x."""
    if not (isinstance(w1, Tensor) and isinstance(w2, Tensor) and w2.dim() == 3 and w2.numel() > 0):
        return False
    E, D, F = w2.shape
    dtype, device = x.dtype, x.device
    if w1.dtype != dtype or w2.dtype != dtype or w1.device != device or w2.device != device:
        return False
    up = (E, F, D)
    if x.size(1) != D or w1.shape != up:
        return False
    if w3 is not None and not _is_like(x, w3, up):
        return False
    if b1 is b2 is b3 is None:
        return True
    fit = (b1 is None or _is_like(x, b1, (E, F))) and (b2 is None or _is_like(x, b2, (E, D)))
    return fit and (b3 is None or (w3 is not None and _is_like(x, b3, (E, F))))


def _fail_shapes(fn: str, x_name: str, x: Tensor, stored, biases, packed: bool, transposed: bool) -> None:
    """Names the tensor that disagrees with most of the others about E, D or F. In a tie w1 is right about E,
    x about D, and w2 about F."""
    shapes = {f"w{i}": tuple(w.shape) for i, w in enumerate(stored, 1) if w is not None}

    def sizes(name: str, transposed: bool) -> tuple[int, int, int]:
        """E, F and D, from a weight's shape."""
        E, *rows, D = shapes[name]
        if len(rows) == 2:
            return E, rows[0], D
        F, D = (D, rows[0]) if transposed != (name == "w2") else (rows[0], D)
        return E, F // 2 if packed and name == "w1" else F, D

    def check(name: str, E: int, F: int, D: int, advice: str = "") -> None:
        H = ("2F", 2 * F) if packed else ("F", F)
        sides: tuple[tuple[str, int], ...]
        sides = {"w1": (H, ("D", D)), "w2": (("D", D), ("F", F)), "w3": (("F", F), ("D", D))}[name]
        if len(shapes[name]) == 4:
            sides = ("F", F), ("2", 2), ("D", D)
        letters, shape = zip(("E", E), *(reversed(sides) if transposed else sides), strict=True)
        if shapes[name] != shape:
            how = " with transposed=True" if transposed else ""
            expected = f"{name} of shape ({', '.join(letters)}) = {shape}{how}"
            fail(ValueError, fn, expected, f"{shapes[name]}{advice}")

    others = [sizes(name, not transposed) for name in shapes]
    if others.count(others[0]) == len(others) and others[0][2] == x.size(1):
        check("w1", *others[0], f"; all weights fit transposed={not transposed}")
    told = {name: sizes(name, transposed) for name in shapes}
    matrices = [b for b in biases if isinstance(b, Tensor) and b.dim() == 2]
    E = _most([*(e for e, _, _ in told.values()), *(b.size(0) for b in matrices)])
    D = _most([x.size(1), *(d for _, _, d in told.values())])
    check_shape(fn, x_name, x, "T, D" if x_name == "x" else "R, D", (x.size(0), D))

    def hidden(name: str) -> int:
        """F, also of a weight whose sides are swapped."""
        _, other_F, other_D = sizes(name, not transposed)
        return other_F if told[name][2] != D and other_D == D else told[name][1]

    F = _most([hidden(name) for name in ("w2", "w1", "w3") if name in shapes])
    for name in shapes:
        check(name, E, F, D)


def _most(values: list):
    """The most frequent one, the first of several."""
    return max(values, key=values.count)


def _check_own_memory(fn: str, main_grads, weights) -> None:
    """Checks that no main_grad shares memory with itself, another one, or a weight."""
    if torch.compiler.is_compiling():
        return
    names = ("main_grads[0]", "main_grads[1]", "main_grads[2]", "w1", "w2", "w3")
    found = [
        (name, x, x.untyped_storage().data_ptr())
        for name, x in zip(names, (*main_grads, *weights), strict=True)
        if x is not None and has_memory(x)
    ]
    for i, (name, grad, storage) in enumerate(found):
        if name[0] == "w":
            return
        if overlaps_itself(grad):
            fail(ValueError, fn, f"{name} whose elements do not overlap", f"strides {grad.stride()}")
        for other_name, other, other_storage in found[i + 1 :]:
            if storage == other_storage and share_memory(grad, other):
                fail(ValueError, fn, f"{name} in memory of its own", f"memory shared with {other_name}")


def check_main_grads(fn: str, main_grads, x_name: str, x: Tensor, weights: tuple, transposed: bool) -> tuple:
    """Checks main_grads against w1, w2 and w3 as stored. Returns the main_grad arguments of experts_up and of
    experts_down: views of shape (E, out, in), or empty tuples."""
    if main_grads is None:
        return (), ()
    if not isinstance(main_grads, (tuple, list)):
        fail(TypeError, fn, "main_grads to be a tuple, of w1, w2 and w3", type(main_grads).__name__)
    if len(main_grads) != 3:
        fail(ValueError, fn, "main_grads of w1, w2 and w3", f"{len(main_grads)} of them")
    if all(grad is None for grad in main_grads):
        return (), ()
    views = [None, None, None]
    for i, (grad, w) in enumerate(zip(main_grads, weights, strict=True)):
        if grad is None:
            continue
        name, weight = f"main_grads[{i}]", f"w{i + 1}"
        if w is None:
            fail(ValueError, fn, f"{name} only beside {weight}", f"{name} without {weight}")
        if x.dtype == torch.float64:
            expected = f"{x_name} of dtype float32 or bfloat16 or float16 with main_grads"
            fail(TypeError, fn, expected, x.dtype)
        check_tensor(fn, name, grad, w.dim(), (torch.float32,))
        check_shape(fn, name, grad, f"{weight}'s", w.shape)
        check_device(fn, name, grad, x_name, x)
        if grad.requires_grad:
            fail(ValueError, fn, f"{name} that requires no gradient itself", "requires_grad=True")
        if grad.dim() == 4:
            if grad.size(1) > 1 and grad.stride(1) != 2 * grad.stride(2):
                fail(ValueError, fn, f"{name} that can be viewed as (E, 2F, D)", f"strides {grad.stride()}")
            grad = grad.flatten(1, 2)
        views[i] = grad.mT if transposed else grad
    _check_own_memory(fn, main_grads, weights)
    w1, w2, w3 = views
    return () if w1 is None and w3 is None else (w1, w3), () if w2 is None else (w2,)
