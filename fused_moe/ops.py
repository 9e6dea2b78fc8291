"""torch.ops.fused_moe.*: loads the library and registers the Python half of its operators.

csrc/torch/library.cpp has the schemas. This file has each operator's fake kernel (shapes and dtypes for
torch.compile), its autograd formula and its autocast rule. They read arguments by the schema's names. An
autograd formula calls operators only, so it can be traced. Gradients that are not needed are not computed:
the coarse backward operators take one flag per gradient and return an empty tensor in its place. All
operators are functional except those named *_accumulate, which add a weight gradient to a float32 buffer,
experts_out, which writes its result into a tensor that is given, and route_plan_dropped, which adds to a
count.

Names and shapes are those of csrc/fused_moe.h. `plan` is the list of tensors of a Plan, `constants` the
activation's [alpha, limit]. `offsets` of grouped_mm, wgrad and bias_grad are (E,) cumulative ends, as
torch._grouped_mm's offs.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from . import widths
from .activation import ACTIVATIONS
from .main_grad import compiled_autograd_key, is_asked, less_unasked
from .namespace import NAMESPACE
from .plan import Plan

SCORE_FUNCS = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2}
GROUP_SCORES = {"top2": 0, "max": 1}
LAYOUTS = {"separate": 0, "halves": 1, "interleaved": 2}
UNGATED = 3  # layout "separate" without w3
TILE = 64  # rows, and columns, of a tile of a quantised weight
ACTIVATION_CODES = {name: code for code, name in enumerate(ACTIVATIONS)}

HOW_TO_BUILD_CUDA = "this build has no CUDA kernels: put nvcc on PATH or set CUDA_HOME, and build it again"

LIBRARY = Path(__file__).with_name("_ops.so")
if not LIBRARY.exists():
    raise ImportError(
        f"fused_moe is not built: {LIBRARY} is missing. Build it in that checkout with `make build`; or, if "
        "fused_moe is installed, start Python in another folder"
    )
torch.ops.load_library(str(LIBRARY))

ops = getattr(torch.ops, NAMESPACE)
FACTS = json.loads(ops.facts())  # build, tiers, capabilities, reasons, operators, constants
HAS_CUDA_KERNELS = torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::experts_up", "CUDA")
TIERS = (*reversed(FACTS["tiers"]), "auto")  # what FUSED_MOE_TIER may be
# Where an operator writes a view of an input, inductor added the input's storage offset twice: seen in 2.11.
WRITES_BESIDE_VIEWS = torch.__version__ < (2, 13)  # type: ignore[operator]
_library = torch.library.Library(NAMESPACE, "IMPL")
_nodes: dict[OpOverload, Callable] = {}  # operator -> apply of its autograd node
_refusals: dict[
    OpOverload, Callable
] = {}  # operator that refuses gradients -> function that raises if its arguments require one
# The dispatch keys that a thread includes by itself. Functorch, tracing and dispatch modes include more.
_OWN_KEYS = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
).raw_repr()


def unknown_tier() -> str:
    """What is wrong with FUSED_MOE_TIER, which only CUDA tensors ask for; empty if nothing is."""
    asked = os.environ.get("FUSED_MOE_TIER") or "auto"
    return "" if asked in TIERS else f"expected FUSED_MOE_TIER to be {' or '.join(TIERS)}, found {asked}"


if unknown_tier():
    warnings.warn(f"fused_moe: {unknown_tier()}; calls with CUDA tensors will fail", stacklevel=2)


# --- registration -------------------------------------------------------------------------------------
#
# The rules that torch.library.register_autograd and register_autocast would make, without their schema
# lookup for every argument of every call. That lookup takes a third of a small step's time.


class Schema:
    """An operator, and its arguments by name."""

    def __init__(self, name: str):
        self.name, self.op = name, getattr(ops, name).default
        arguments = self.op._schema.arguments
        defaults = [a.default_value for a in arguments if a.has_default_value()]
        named = namedtuple(name, [a.name for a in arguments], defaults=defaults)  # type: ignore[misc]
        self.named: Callable = named
        self.position = {a.name: i for i, a in enumerate(arguments)}
        self.written = [a.name for a in arguments if a.is_write]
        self.lists = [i for i, a in enumerate(arguments) if str(a.type) == "List[Tensor]"]


def _register(
    name: str, *, fake, backward=None, setup_context=None, autocast: tuple[str, ...] = (), keeps: str = ""
):
    """Registers the Python half of an operator. Without `backward` a gradient through it raises.

    fake(args) and setup_context(ctx, args, output) get the arguments as a named tuple. backward(ctx, need,
    *grads) returns {argument: gradient}; need.<argument> tells whether its gradient is needed. `keeps` is an
    argument that is True wherever autograd records the call, whatever the caller said.
    """
    schema = Schema(name)
    _register_fake(schema, fake)
    _register_vmap(schema)
    rule = _autograd_rule(schema, backward or _no_backward(name), setup_context, keeps)
    _library.impl(name, rule, "Autograd", with_keyset=True)
    _register_autocast(schema, autocast)


def _register_integers(name: str, *, fake):
    """As _register, for an operator on integers. They require no gradient, so it has no autograd rule."""
    schema = Schema(name)
    _register_fake(schema, fake)
    _register_vmap(schema)
    _register_writes(schema)


def _register_accumulate(name: str, *, fake):
    """Registers an operator that adds to main_grads."""
    _register_refusing(
        name,
        fake=fake,
        message=f"{name} cannot be differentiated: expected main_grads in a backward that is not recorded "
        "itself, found create_graph=True, torch.func.grad, or a direct call in grad mode",
    )


def _register_refusing(name: str, *, fake, message: str, autocast: tuple[str, ...] = ()):
    """As _register, for an operator that raises where autograd would record the call: no node sees the
    tensors of a list, or what is written, so the graph would be cut silently."""
    schema = Schema(name)
    _register_fake(schema, fake)
    _register_vmap(schema)

    def refuse(args):
        refuse_tangents(name, args)
        if torch.is_grad_enabled():
            listed = [t for i in schema.lists if i < len(args) for t in args[i]]
            if torch._C._any_requires_grad(*args, *listed):
                raise RuntimeError(f"fused_moe: {message}")

    _refusals[schema.op] = refuse

    def rule(keyset, *args):
        refuse(args)
        return _below_autograd(schema.op, keyset, args)

    _library.impl(name, rule, "Autograd", with_keyset=True)
    _register_writes(schema)
    _register_autocast(schema, autocast)


def _register_writes(schema: Schema):
    """Autograd is told of what is written, so that it raises where the values before it were saved."""

    def new_version(keyset, *args):
        by_name = schema.named(*args)
        for tensor in (getattr(by_name, name) for name in schema.written):
            if tensor is not None:
                torch.autograd.graph.increment_version(tensor)
        return schema.op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)

    if schema.written:
        _library.impl(schema.name, new_version, "ADInplaceOrView", with_keyset=True)


def _register_fake(schema: Schema, fake):
    def by_name(*args, **kwargs):
        args = schema.named(*args, **kwargs)
        _refuse_mixed(schema.name, args)
        return fake(args)

    torch.library.register_fake(f"{NAMESPACE}::{schema.name}", by_name)


def _refuse_mixed(name: str, args) -> None:
    """Raises where one tensor is on meta and another is not, as in a layer that was loaded in part. PyTorch
    calls the fake kernel then, whose results are memory that nothing has written."""
    found = {}  # whether on meta -> an argument
    for argument, value in zip(args._fields, args, strict=True):
        for x in pytree.tree_leaves(value):
            if isinstance(x, Tensor):
                found[x.device.type == "meta"] = f"{argument} on {x.device}"
    if len(found) == 2:
        raise ValueError(
            f"fused_moe: {name} expected all tensors or none on meta, found {found[True]}, {found[False]}"
        )


def _register_vmap(schema: Schema):
    """Under vmap an operator is called once per sample. PyTorch's own fallbacks do not see batched tensors
    in lists, and a plan is a list."""

    def loop(batch_size, dims, leaves, spec):
        def sample(i):
            return [x if d is None else x.select(d, i) for x, d in zip(leaves, dims, strict=True)]

        if batch_size == 0:
            raise ValueError(f"fused_moe: expected vmap of {schema.name} over at least one sample, found 0")
        results = [schema.op(*pytree.tree_unflatten(sample(i), spec)) for i in range(batch_size)]
        return pytree.tree_map(
            lambda *samples: None if samples[0] is None else torch.stack(samples), *results
        )

    def rule(info, in_dims, *args):
        leaves, spec = pytree.tree_flatten(args)
        stacked = loop(info.batch_size, pytree.tree_leaves(in_dims), leaves, spec)
        return stacked, None if stacked is None else pytree.tree_map(lambda _: 0, stacked)

    def older_rule(*args):
        leaves, spec = pytree.tree_flatten(args)
        levels = [_older_vmap_level(x) for x in leaves]
        level = max(levels)
        dims = [0 if x_level == level else None for x_level in levels]
        leaves = [x if d is None else _unbatched(x, level) for x, d in zip(leaves, dims, strict=True)]
        stacked = loop(leaves[dims.index(0)].size(0), dims, leaves, spec)
        return pytree.tree_map_only(Tensor, lambda x: torch._add_batch_dim(x, 0, level), stacked)

    torch.library.register_vmap(f"{NAMESPACE}::{schema.name}", rule, lib=_library)
    _library.impl(schema.name, older_rule, "Batched")


# autograd.grad(is_grads_batched=True) and vectorize=True of autograd.functional use an older vmap than
# torch.func's. Each of its nested calls has a level, 1 for the outermost.
_OLDER_VMAP = cast(torch._C.DispatchKey, torch._C._parse_dispatch_key("Batched"))
_OLDER_VMAP_LEVELS = range(63, 0, -1)


def _older_vmap_level(x) -> int:
    """The level of the innermost call that batches x; 0 if none does."""
    if not isinstance(x, Tensor) or not torch._C._dispatch_keys(x).has(_OLDER_VMAP):
        return 0
    return next((level for level in _OLDER_VMAP_LEVELS if _unbatched(x, level).size(0)), 1)


def _unbatched(x: Tensor, level: int) -> Tensor:
    """x with its samples of this level in dimension 0, which has size 0 if there are none."""
    return torch._remove_batch_dim(x, level, 0, 0)


def refuse_tangents(name: str, args):
    """Raises where forward-mode differentiation would get a tangent of zeros."""
    if forward_ad._current_level < 0:
        return
    for x in pytree.tree_leaves(args):
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"fused_moe: {name} has no forward-mode derivative (torch.func.jvp, jacfwd, forward_ad). "
                "Use reverse mode (backward, torch.func.vjp, jacrev), or fused_moe.reference"
            )


def _below_autograd(op, keyset, args):
    """keyset: the dispatcher's, or None outside of a dispatch."""
    try:
        with torch._C._AutoDispatchBelowAutograd():
            if keyset is None:
                return op(*args)
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)
    except RuntimeError as error:
        _raise_out_of_memory(error)
        raise


def _raise_out_of_memory(error: RuntimeError) -> None:
    """Raises torch.OutOfMemoryError if that is what `error` was where PyTorch threw it: what a library on the
    stable ABI throws arrives as RuntimeError. PyTorch before 2.13 does not pass the reason on, so an error of
    the device that came before is looked for first."""
    if "fused_moe::allocation" not in str(error) or "out of memory" not in str(error):
        return
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()
    raise torch.OutOfMemoryError(str(error)) from None


def _autograd_rule(schema: Schema, backward, setup_context, keeps: str = ""):
    op, named, position = schema.op, schema.named, schema.position

    def forward(ctx, *args):
        *args, keyset = args
        if keeps:
            args[position[keeps]] = True
        if torch._C._are_functorch_transforms_active():
            with torch.enable_grad():  # for the transforms outside of this one; a node runs without grad mode
                output = _below_autograd(op, keyset, args)
        else:
            output = _below_autograd(op, keyset, args)
        if setup_context is not None:
            setup_context(ctx, named(*args), output)
        return tuple(output) if isinstance(output, list) else output  # autograd does not look into lists

    def by_position(ctx, *grads):
        result = [None] * len(ctx.needs_input_grad)
        for name, grad in backward(ctx, named(*ctx.needs_input_grad[:-1]), *grads).items():
            result[position[name]] = grad
        return tuple(result)

    members = {"forward": forward, "backward": by_position, "_compiled_autograd_key": compiled_autograd_key}
    members = {name: staticmethod(member) for name, member in members.items()}
    # Not a torch.autograd.Function, which handles torch.func's transforms: the dispatcher has done so before
    # this rule.
    node: Any = type(schema.name, (torch.autograd.function._SingleLevelFunction,), members)
    _nodes[op] = apply = node.apply

    def rule(keyset, *args):
        refuse_tangents(schema.name, args)
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
            return _below_autograd(op, keyset, args)
        if not torch._C._are_functorch_transforms_active():
            return apply(*args, keyset)
        with enable_single_level_autograd_function():  # the dispatcher is at one level of torch.func here
            return apply(*args, keyset)

    return rule


def _no_backward(name: str):
    def backward(*_):
        if name.endswith(("_backward", "_dgrad", "_accumulate")):
            raise RuntimeError(
                f"fused_moe: {name} cannot be differentiated: double backward is not supported"
            )
        raise RuntimeError(f"fused_moe: {name} has no gradient")

    return backward


class _Undifferentiable(torch.autograd.Function):
    """(what, number of results, *results, *inputs) -> results."""

    generate_vmap_rule = True

    @staticmethod
    def forward(what: str, number: int, *tensors: Tensor | None):
        return tuple(None if t is None else t.view_as(t) for t in tensors[:number])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.what = inputs[0]

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            f"fused_moe: {ctx.what} cannot be differentiated: double backward is not supported"
        )


def undifferentiable(what: str, results: tuple, *inputs: Tensor | None) -> tuple:
    """The results of a backward pass, which depend on the inputs. If the pass itself is recorded
    (create_graph), differentiating the results raises: terms would be missing, since autograd does not see
    all that the pass reads."""
    if not torch.is_grad_enabled():
        return results
    return _Undifferentiable.apply(what, len(results), *results, *inputs)


def _register_autocast(schema: Schema, names: tuple[str, ...]):
    for device in ("CPU", "CUDA") if names else ():
        _library.impl(schema.name, _autocast_rule(schema, device, names), f"Autocast{device}")


def _autocast_rule(schema: Schema, device: str, names: tuple[str, ...]):
    """Casts the floating inputs `names` as autocast does for linear; of lists those that are float weights,
    which have one tensor. float64 is not cast. The last arguments, where they have their defaults, are not
    passed."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device}"))
    positions = [schema.position[name] for name in names]

    def cast(value, dtype):
        if isinstance(value, Tensor):
            return value if value.dtype == torch.float64 else value.to(dtype)
        return [cast(w, dtype) for w in value] if value and len(value) == 1 else value

    def rule(*args):
        dtype = torch.get_autocast_dtype(device.lower())
        args = list(args)
        for i in positions:
            if i < len(args):
                args[i] = cast(args[i], dtype)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return schema.op(*args)

    return rule


def is_recording() -> bool:
    """Whether autograd may record what is called. torch.jit.trace checks a graph by tracing again without
    grad mode, so what it traces does not depend on that."""
    return torch.is_grad_enabled() or (torch.jit.is_tracing() and not torch.is_inference_mode_enabled())


def run(op, *args):
    """op(*args) in less time on the host: without grad mode straight to the kernel, in grad mode straight to
    the autograd node, or to the kernel if no argument requires a gradient. Only a plain call is taken past
    the dispatcher: anything that wants to see it before autograd (autocast, torch.func, tracing, modes,
    __torch_function__) does."""
    if torch.compiler.is_compiling():
        return op(*args)
    if not torch.is_grad_enabled() and forward_ad._current_level < 0:
        return _below_autograd(op, None, args)
    if not _is_plain(args):
        return op(*args)
    node, refuse = _nodes.get(op), _refusals.get(op)
    if refuse:
        refuse(args)
    elif torch._C._any_requires_grad(*args):
        return node(*args, None) if node else op(*args)
    return _below_autograd(op, None, args)


def reshaped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A fresh result in the caller's shape. To autograd it is no view, as nn.Linear's is none: a write in
    place to a view drops the hook by which FSDP2 fetches the weights for backward. Elsewhere it is one, which
    takes the host half the time, and as torch.jit.trace wants it, whose sizes are tensors."""
    if torch.jit.is_tracing() or not torch.is_grad_enabled():
        return x.view(shape)
    return _unsafe_view(x, shape)


_unsafe_view = torch.ops.aten._unsafe_view.default


def _is_plain(args) -> bool:
    return (
        torch._C._dispatch_tls_local_include_set().raw_repr() == _OWN_KEYS
        and forward_ad._current_level < 0
        and not torch._C._is_any_autocast_enabled()
        and not torch._C._has_torch_function(args)
    )


# --- shapes -------------------------------------------------------------------------------------------


def score_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the scores of x: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _has_row_maps(plan: list[Tensor]) -> bool:
    return len(plan) > 2 or plan[1].dim() == 2


def _num_rows(x: Tensor, plan: list[Tensor]) -> int:
    if len(plan) > 2:
        return plan[3].size(0)
    return plan[1].numel() if _has_row_maps(plan) else x.size(0)


def _slots(x: Tensor, plan: list[Tensor]) -> tuple[int, ...]:
    """T and K. Without row maps x has one row per token."""
    return tuple(plan[-1].shape) if _has_row_maps(plan) else (x.size(0), 1)


def _widths(rows: int, layout: int) -> tuple[int, int]:
    """F, and the width H of h, of w1 (E, rows, D)."""
    if layout in (LAYOUTS["halves"], LAYOUTS["interleaved"]):
        return rows // 2, rows
    return rows, rows if layout == UNGATED else 2 * rows


def _needed(need: bool, like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """A new tensor; an empty one if it is not needed."""
    return like.new_empty(shape if need else (0,), dtype=dtype or like.dtype)


def _grad_like(need: bool, w: Tensor | None, like: Tensor) -> Tensor:
    """A new tensor with w's shape and strides; an empty one if it is not needed."""
    if not need:
        return like.new_empty(0)
    assert w is not None
    return torch.empty_like(w)


# --- routing ------------------------------------------------------------------------------------------


def _router_logits_fake(args):
    x = args.x
    return x.new_empty(x.size(0), args.weight.size(0), dtype=score_dtype(x))


def _router_logits_setup(ctx, args, output):
    ctx.x_dtype = args.x.dtype
    ctx.save_for_backward(args.x if ctx.needs_input_grad[1] else None, args.weight)


def _router_logits_backward(ctx, need, dlogits):
    x, weight = ctx.saved_tensors
    needs = (need.x, need.weight, need.bias)
    of_x = (dlogits.to(ctx.x_dtype), weight.to(ctx.x_dtype))
    grads = router_gradients(dlogits, *of_x, x, weight, *needs)
    return dict(zip(("x", "weight", "bias"), grads, strict=True))


def router_gradients(
    dlogits: Tensor, rounded: Tensor, narrow: Tensor, x: Tensor | None, weight: Tensor, need_x, need_weight,
    need_bias,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """dx, dweight and dbias, each None if it is not needed. GEMMs multiply `rounded` and `narrow`, dlogits
    and weight in x's dtype. A float32 weight beside a 16-bit x has a gradient of float32 operands."""
    dx = run(ops.router_dgrad.default, rounded, narrow) if need_x else None
    return dx, *parameter_gradients(dlogits, rounded, x, weight, need_weight, need_bias)


def parameter_gradients(
    dlogits: Tensor, rounded: Tensor, x: Tensor | None, weight: Tensor, need_weight, need_bias
) -> tuple[Tensor | None, Tensor | None]:
    """dweight and dbias, as `router_gradients`."""
    dweight = None
    if need_weight:
        assert x is not None
        dweight = rounded.mT @ x if weight.dtype == x.dtype else _wide_matmul(dlogits.mT, x.to(weight.dtype))
    return dweight, dlogits.sum(0).to(weight.dtype) if need_bias else None


def _wide_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in their dtype. torch.compile traces backward under the forward's autocast, which would round."""
    if not torch._C._is_any_autocast_enabled():
        return a @ b
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def _router_dgrad_fake(args):
    return args.dlogits.new_empty(args.dlogits.size(0), args.weight.size(1))


def _router_dgrad_setup(ctx, args, output):
    ctx.save_for_backward(args.dlogits, args.weight)


def _router_dgrad_backward(ctx, need, ddx):
    dlogits, weight = ctx.saved_tensors
    ddlogits = run(ops.router_logits.default, ddx, weight, None) if need.dlogits else None
    return {
        "dlogits": ddlogits if ddlogits is None else ddlogits.to(dlogits.dtype),
        "weight": dlogits.mT @ ddx if need.weight else None,
    }


def _route_fake(args):
    logits = args.logits
    scores = logits.new_empty(logits.size(0), args.top_k, dtype=score_dtype(logits))
    return scores, torch.empty_like(scores, dtype=torch.int32)


def _route_setup(ctx, args, output):
    ctx.settings = (args.score_func, args.route_norm, args.route_scale, args.route_norm_eps)
    ctx.set_materialize_grads(False)  # or every backward fills zeros for the ids
    ctx.save_for_backward(args.logits, output[1], args.expert_scale)


def _route_backward(ctx, need, dscores, _):
    if dscores is None:
        return {}
    logits, ids, expert_scale = ctx.saved_tensors
    grads = route_gradients(dscores, logits, ids, ctx.settings, expert_scale, need.logits, need.expert_scale)
    # without expert_scale a call may not have the argument
    return {n: g for n, g in zip(("logits", "expert_scale"), grads, strict=True) if g is not None}


def route_gradients(
    dscores: Tensor, logits: Tensor, ids: Tensor, settings: tuple, expert_scale: Tensor | None, need_logits,
    need_scale,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """dlogits and the gradient of expert_scale, each None if it is not needed. `settings` are score_func to
    route_norm_eps."""
    args = (dscores, logits, ids, *settings, expert_scale)
    return (
        run(ops.route_backward.default, *args) if need_logits else None,
        scale_gradient(dscores, logits, ids, settings) if need_scale else None,
    )


def scale_gradient(dscores: Tensor, logits: Tensor, ids: Tensor, settings: tuple) -> Tensor:
    """The gradient (E,) of expert_scale: of the chosen experts' scores without it, summed in the order of
    the slots, with the same bits in every run."""
    top_k, num_experts = ids.size(1), logits.size(1)
    scores, _ = run(ops.route.default, logits, None, top_k, *settings, 0, 0, 0, ids)
    plan = route_plan(ids, num_experts)
    assert plan.row_slot is not None
    rows = (dscores * scores).reshape(-1, 1).index_select(0, plan.row_slot.clamp_min(0))
    return run(ops.bias_grad.default, rows, plan.offsets[1:]).squeeze(1)


def _route_backward_fake(args):
    return torch.empty_like(args.logits, memory_format=torch.contiguous_format)


def schedule_words(num_experts: int) -> int:
    """The length of the tile schedule: fused_moe_schedule_words of csrc/schedule.h."""
    return FACTS["constants"]["HEAD_WORDS"] + 4 * num_experts


def _route_plan_fake(args):
    def new(*shape):
        return args.ids.new_empty(shape, dtype=torch.int32)

    (T, K), E = args.ids.shape, args.num_experts
    R = T * K if args.max_rows is None else min(args.max_rows, T * K)
    return new(E), new(E + 1), new(schedule_words(E)), new(R), new(R), new(T, K)


def _count_plan_fake(args):
    def new(*shape):
        return args.counts.new_empty(shape, dtype=torch.int32)

    E = args.counts.size(0)
    return new(E), new(E + 1), new(schedule_words(E))


_register(
    "router_logits",
    fake=_router_logits_fake,
    backward=_router_logits_backward,
    setup_context=_router_logits_setup,
    autocast=("x", "weight", "bias"),
)
_register(
    "router_dgrad",
    fake=_router_dgrad_fake,
    backward=_router_dgrad_backward,
    setup_context=_router_dgrad_setup,
)
_register("route", fake=_route_fake, backward=_route_backward, setup_context=_route_setup)
_register("route_backward", fake=_route_backward_fake)
_register_integers("route_plan", fake=_route_plan_fake)
_register_integers("route_plan_dropped", fake=_route_plan_fake)
_register_integers("count_plan", fake=_count_plan_fake)


# --- rows: permute and unpermute are each other's adjoint; pad's is pad -------------------------------


def _pad_fake(args):
    return args.x.new_empty(args.x.size(0), args.a, args.b, args.c)


def _pad_setup(ctx, args, output):
    ctx.sizes = args.x.shape[1:]
    ctx.set_materialize_grads(False)


def _pad_backward(ctx, need, dout):
    return {} if dout is None else {"x": run(ops.pad.default, dout, *ctx.sizes)}


def _permute_fake(args):
    return args.x.new_empty(_num_rows(args.x, args.plan), args.x.size(1))


def _permute_setup(ctx, args, output):
    ctx.save_for_backward(*args.plan)


def _permute_backward(ctx, need, drows):
    return {"x": run(ops.unpermute.default, drows, None, ctx.saved_tensors)}


def _unpermute_fake(args):
    return args.rows.new_empty(_slots(args.rows, args.plan)[0], args.rows.size(1))


def _unpermute_setup(ctx, args, output):
    needs_scores = args.scores is not None and ctx.needs_input_grad[1]
    rows = args.rows if needs_scores else None
    ctx.save_for_backward(rows, args.scores, *_saved_shared(ctx, args), *args.plan)


def _unpermute_backward(ctx, need, dout):
    rows, scores, shared, shared_gate, *plan = ctx.saved_tensors
    grads = shared_gradients(need, dout, shared, shared_gate)
    if scores is None:
        return grads | ({"rows": run(ops.permute.default, dout, plan)} if need.rows else {})
    if not (need.rows or need.scores):
        return grads
    drows, dscores = run(ops.unpermute_backward.default, dout, rows, scores, plan, need.rows, need.scores)
    return grads | {"rows": drows if need.rows else None, "scores": dscores if need.scores else None}


def _sum_peers_fake(args):
    return args.rows[0].new_empty(args.index.size(0), args.rows[0].size(1))


def _unpermute_backward_fake(args):
    dout, plan = args.dout, args.plan
    drows = _needed(args.need_drows, dout, _num_rows(dout, plan), dout.size(1))
    return drows, _needed(args.need_dscores, dout, *_slots(dout, plan), dtype=score_dtype(dout))


def _saved_shared(ctx, args) -> tuple[Tensor | None, Tensor | None]:
    """What the gradients of a combine's last two arguments, shared and shared_gate, need."""
    need = type(args)(*ctx.needs_input_grad[:-1])  # a caller may leave both out
    shared = args.shared if need.shared_gate else None
    return shared, args.shared_gate if need.shared or need.shared_gate else None


def shared_gradients(need, dout, shared, shared_gate) -> dict:
    """{"shared", "shared_gate": their gradients} where needed. Without a gate shared's is dout."""
    if need.shared and shared_gate is None:
        return {"shared": dout}
    if not (need.shared or need.shared_gate):
        return {}
    args = (dout, shared, shared_gate, need.shared, need.shared_gate)
    dshared, dgate = run(ops.shared_backward.default, *args)
    grads = {"shared": dshared} if need.shared else {}
    return grads | ({"shared_gate": dgate} if need.shared_gate else {})


def _shared_backward_fake(args):
    dout, gate = args.dout, args.shared_gate
    return (
        _needed(args.need_dshared, dout, *dout.shape),
        _needed(args.need_dshared_gate, gate, *gate.shape),
    )


_register("pad", fake=_pad_fake, backward=_pad_backward, setup_context=_pad_setup)
_register("permute", fake=_permute_fake, backward=_permute_backward, setup_context=_permute_setup)
_register("unpermute", fake=_unpermute_fake, backward=_unpermute_backward, setup_context=_unpermute_setup)
_register_refusing(
    "sum_peers", fake=_sum_peers_fake, message="sum_peers cannot be differentiated: its rows are other ranks'"
)
_register("unpermute_backward", fake=_unpermute_backward_fake)
_register("shared_backward", fake=_shared_backward_fake)


# --- grouped GEMMs: the gradients of grouped_mm and wgrad are grouped_mm and wgrad --------------------


def _grouped_mm_fake(args):
    return args.a.new_empty(args.a.size(0), args.b.size(1))


def _grouped_mm_setup(ctx, args, output):
    ctx.shape = widths.shape_of(args.b)
    ctx.save_for_backward(args.a, *widths.saved(ctx, args.b), args.offsets)


def _grouped_mm_backward(ctx, need, dout):
    a, b, offsets = ctx.saved_tensors
    E, out, width = ctx.shape
    a, dout = widths.with_shape(a, (a.size(0), width)), widths.with_shape(dout, (a.size(0), out))
    grads = {"b": run(ops.wgrad.default, dout, a, offsets) if need.b else None}
    if need.a:
        (b,) = widths.restored(ctx, b)
        grads["a"] = run(ops.grouped_mm.default, dout, widths.with_shape(b.mT, (E, width, out)), offsets)
    return grads | ({"bias": run(ops.bias_grad.default, dout, offsets)} if need.bias else {})


def quantized_sizes(data: Tensor) -> tuple[int, int, int]:
    """E, out and in, of codes (E, out, in), in bytes (E, out, in / 2), or tiles (E, out / 64, in / 64, B)."""
    if data.dim() == 4:
        return data.size(0), TILE * data.size(1), TILE * data.size(2)
    return data.size(0), data.size(1), data.size(2) * (2 if data.dtype == torch.uint8 else 1)


def _quantized_mm_fake(args):
    _, rows, cols = quantized_sizes(args.data)
    return args.a.new_empty(args.a.size(0), cols if args.transposed else rows)


def _quantized_mm_setup(ctx, args, output):
    ctx.settings = (args.format, not args.transposed)
    packed, transposed = (args.data, args.scale, args.zero), (args.data_t, args.scale_t, args.zero_t)
    ctx.save_for_backward(*packed, args.offsets, *transposed)


FROZEN = "fused_moe: quantised weights are frozen: their codes and scales have no gradient"


def _quantized_mm_backward(ctx, need, dout):
    if need.data or need.scale or need.data_t or need.scale_t:
        raise RuntimeError(FROZEN)
    saved = ctx.saved_tensors  # once: each access unpacks all, which activation checkpointing allows one time
    grads = {}
    if need.a:
        grads["a"] = run(ops.quantized_mm.default, dout, *saved[:4], *ctx.settings, *saved[4:])
    if need.bias:
        grads["bias"] = run(ops.bias_grad.default, dout, saved[3])
    return grads


def _wgrad_fake(args):
    return args.a.new_empty(args.offsets.size(0), args.a.size(1), args.b.size(1))


def _wgrad_setup(ctx, args, output):
    ctx.gathered = args.a_row_token is not None or args.b_row_token is not None
    ctx.save_for_backward(args.a, args.b, args.offsets)


def _wgrad_backward(ctx, need, dw):
    if ctx.gathered:
        _no_backward("wgrad with a gathered operand")()
    a, b, offsets = ctx.saved_tensors
    return {
        "a": run(ops.grouped_mm.default, b, dw, offsets) if need.a else None,
        "b": run(ops.grouped_mm.default, a, dw.mT, offsets) if need.b else None,
    }


def _bias_grad_fake(args):
    return args.rows.new_empty(args.offsets.size(0), args.rows.size(1))


_register(
    "grouped_mm",
    fake=_grouped_mm_fake,
    backward=_grouped_mm_backward,
    setup_context=_grouped_mm_setup,
    autocast=("a", "b", "bias"),
)
_register(
    "quantized_mm",
    fake=_quantized_mm_fake,
    backward=_quantized_mm_backward,
    setup_context=_quantized_mm_setup,
    autocast=("a", "bias"),
)
_register("wgrad", fake=_wgrad_fake, backward=_wgrad_backward, setup_context=_wgrad_setup)
_register_accumulate("wgrad_accumulate", fake=lambda args: None)
_register("bias_grad", fake=_bias_grad_fake)


# --- the activation, of experts that are composed of grouped GEMMs ------------------------------------


def _activate_fake(args):
    rows, width = args.h.shape
    is_packed = args.layout in (LAYOUTS["halves"], LAYOUTS["interleaved"])
    return args.h.new_empty(rows, width // 2 if is_packed else width)


def _activate_setup(ctx, args, output):
    ctx.settings = (args.layout, args.activation, args.constants)
    ctx.save_for_backward(args.h, args.up)


def _activate_backward(ctx, need, da):
    h, up = ctx.saved_tensors
    dh, dup = run(ops.activate_backward.default, da, h, up, *ctx.settings)
    return {"h": dh if need.h else None, "up": dup if need.up else None}


def _activate_backward_fake(args):
    h, up = args.h, args.up
    return h.new_empty(h.shape), h.new_empty(0 if up is None else up.shape)


_register("activate", fake=_activate_fake, backward=_activate_backward, setup_context=_activate_setup)
_register("activate_backward", fake=_activate_backward_fake)


# --- experts: the layer's two autograd nodes, and finer operators for composition and tests -----------
#
# experts_up saves x, experts_down saves h. `a` has no gradient: the backward of experts_down recomputes it
# from h and returns dh as the gradient of h. So h is freed between the two backward nodes.
#
# A main_grad is an argument of forward, so that backward can reach it. It is not a saved tensor, because
# autograd checks their versions: one micro-batch's backward may write it before another's backward runs.
# `main_grad.py` says which backward passes write it.


def _up_fake(args, save_h: bool):
    num_rows = _num_rows(args.x, args.plan)
    width, h_width = _widths(args.w1.size(1), args.layout)
    return args.x.new_empty(num_rows if save_h else 0, h_width), args.x.new_empty(num_rows, width)


def _up_setup(ctx, args, output, scores=None, main_grads=(None, None)):
    ctx.layout, ctx.main_grads = args.layout, main_grads
    ctx.on_gradient = getattr(args.x, "on_gradient", None)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(args.x, *widths.saved(ctx, args.w1, args.w3), scores, *args.plan)


def _up_backward(ctx, need, dh, needs_scores: bool = False):
    """Backward of experts_up, and of up_gate, which is experts_up without scores."""
    if dh is None:
        return {}
    x, w1, w3, scores, *plan = ctx.saved_tensors
    w1, w3 = widths.restored(ctx, w1, w3)
    if any(grad is not None for grad in ctx.main_grads):
        need = less_unasked(ctx, need, w1=1, w3=2)
    of_x, of_weights = (need.x, needs_scores), (need.w1, need.w3, need.b1, need.b3)

    def gradients(of_x, of_weights):
        needs = of_x[0], *of_weights, of_x[1]
        return up_gradients((dh, x, w1, w3, scores, plan, ctx.layout, *needs), ctx.main_grads)

    if _hands_on(ctx, need):
        dx, *_, dscores = gradients(of_x, (False,) * 4)
        ctx.on_gradient(dx)
        dw1 = dw3 = db1 = db3 = None
        if any(of_weights):
            _, dw1, dw3, db1, db3, _ = gradients((False,) * 2, of_weights)
    else:
        dx, dw1, dw3, db1, db3, dscores = gradients(of_x, of_weights)
    result = weight_gradients(ctx, need, dw1, dw3)
    if need.x:
        result["x"] = dx
    if need.b1:
        result["b1"] = db1
    if need.b3:
        result["b3"] = db3
    if needs_scores:
        result["scores"] = dscores
    return result


def _hands_on(ctx, need) -> bool:
    """Whether x's gradient goes to a function, an attribute of x (exact.py), before those of the weights. A
    compiled backward has an order of its own."""
    if ctx.on_gradient is None or not need.x or torch.compiler.is_compiling():
        return False
    return is_asked(ctx.next_functions[0][0])


def up_gradients(args: tuple, main_grads: tuple, *of_router: Tensor) -> tuple[Tensor, ...]:
    """dx, dw1, dw3, db1, db3 and dscores by experts_up_backward, which takes `args`; dw1 and dw3 are added to
    main_grads. `of_router` are dlogits and gate, whose product is added to dx."""
    main1, main3 = main_grads
    if main1 is main3 is None:
        return run(ops.experts_up_backward.default, *args, *of_router)
    w1, w3, layout = args[2], args[3], args[6]
    of_weights = (args[8:10], main_grads, (w1, w3), (layout, UNGATED))
    return _accumulate(ops.experts_up_backward_accumulate.default, args, *of_weights, *of_router)


def _accumulate(op, args, needs, main_grads, operands, layouts, *more):
    """The results of an operator that adds gradients of operands to main_grads: of padded operands to padded
    copies, whose sums the main_grads get. `layouts` say how rows are padded."""
    wide = [
        widths.widened_main_grad(main_grad, operand, layout) if need else main_grad
        for need, main_grad, operand, layout in zip(needs, main_grads, operands, layouts, strict=True)
    ]
    grads = run(op, *args, *wide, *more)
    for main_grad, sums, layout in zip(main_grads, wide, layouts, strict=True):
        widths.return_main_grad(main_grad, sums, layout)
    return grads


def weight_gradients(ctx, need, dw1, dw3) -> dict:
    """Those of the up side's weights that are needed and were not added to a main_grad."""
    grads = zip(("w1", "w3"), (dw1, dw3), ctx.main_grads, strict=True)
    return {name: dw for name, dw, main_grad in grads if getattr(need, name) and main_grad is None}


def _experts_up_setup(ctx, args, output):
    _up_setup(ctx, args, output, args.scores, (args.main_grad1, args.main_grad3))


def _experts_up_backward(ctx, need, dh, _):
    return _up_backward(ctx, need, dh, need.scores)


def _experts_up_backward_fake(args):
    """For experts_up_backward and experts_up_backward_accumulate; only the latter has main_grads."""
    dh, w1, w3 = args.dh, args.w1, args.w3
    accumulates1, accumulates3 = (
        getattr(args, name, None) is not None for name in ("main_grad1", "main_grad3")
    )
    return (
        _needed(args.need_dx, args.x, *args.x.shape),
        _grad_like(args.need_dw1 and not accumulates1, w1, dh),
        _grad_like(args.need_dw3 and not accumulates3, w3, dh),
        _needed(args.need_db1, dh, *w1.shape[:2]),
        _needed(args.need_db3, dh, *w1.shape[:2]),
        _needed(args.need_dscores, dh, *_slots(args.x, args.plan), dtype=score_dtype(dh)),
    )


def _up_dgrad_fake(args):
    return args.dh.new_empty(args.dh.size(0), args.w1.size(2))


UP_INPUTS = ("x", "w1", "w3", "b1", "b3")
_register(
    "experts_up",
    fake=lambda args: _up_fake(args, args.save_h),
    backward=_experts_up_backward,
    setup_context=_experts_up_setup,
    autocast=UP_INPUTS,
)
_register("experts_up_backward", fake=_experts_up_backward_fake)
_register_accumulate("experts_up_backward_accumulate", fake=_experts_up_backward_fake)
_register(
    "up_gate",
    fake=lambda args: _up_fake(args, save_h=True),
    backward=lambda ctx, need, dh, _: _up_backward(ctx, need, dh),
    setup_context=_up_setup,
    autocast=UP_INPUTS,
)
_register("up_dgrad", fake=_up_dgrad_fake)


# --- the up side of quantised experts, of which a has the gradient, since adapters of w2 read it, too ---


def _quantized_up_fake(args):
    num_rows = _num_rows(args.x, args.plan)
    width, h_width = _widths(quantized_sizes(args.w1[0])[1], args.layout)
    return args.x.new_empty(num_rows if args.save_h else 0, h_width), args.x.new_empty(num_rows, width)


def _quantized_up_setup(ctx, args, output):
    h, _ = output
    if any(t.requires_grad for t in (*args.w1, *args.w3)):
        raise RuntimeError(FROZEN)
    need = type(args)(*ctx.needs_input_grad[:-1])
    ctx.formats, ctx.sizes = (args.format1, args.format3), (len(args.w1), len(args.w3))
    ctx.activation = (args.layout, args.activation, args.constants)
    ctx.mark_non_differentiable(h)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(args.x if need.scores else None, h, args.scores, *args.w1, *args.w3, *args.plan)


def _quantized_up_backward(ctx, need, _, da):
    if da is None:
        return {}
    x, h, scores, *rest = ctx.saved_tensors
    (size1, size3), (layout, *activation) = ctx.sizes, ctx.activation
    w1, w3, plan = rest[:size1], rest[size1 : size1 + size3], rest[size1 + size3 :]
    offsets, is_separate = plan[0][1:], layout == LAYOUTS["separate"]
    of_h = LAYOUTS["halves"] if is_separate else layout
    dh, _ = run(ops.activate_backward.default, da, h, None, of_h, *activation)
    grads = {"addend": dh} if need.addend else {}
    if need.b1 or need.b3:
        db = run(ops.bias_grad.default, dh, offsets).chunk(2 if is_separate else 1, 1)
        grads |= {name: part.contiguous() for name, part in zip(("b1", "b3"), db, strict=False)}
        grads = {name: grad for name, grad in grads.items() if getattr(need, name)}
    if not (need.x or need.scores):
        return grads
    parts = zip(dh.chunk(2, 1) if is_separate else (dh,), (w1, w3), ctx.formats, strict=False)
    dx_rows, *of_ups = (_quantized_dgrad(dy, w, offsets, format) for dy, w, format in parts)
    for rows in of_ups:
        dx_rows = dx_rows + rows
    if need.scores:
        args = (x, dx_rows, scores, plan, False, True)
        grads["scores"] = run(ops.unpermute_backward.default, *args)[1]
    if need.x:
        has_maps = _has_row_maps(plan)
        grads["x"] = run(ops.unpermute.default, dx_rows, scores, plan) if has_maps else dx_rows
    return grads


def _quantized_dgrad(dy: Tensor, w: list[Tensor], offsets: Tensor, format: int) -> Tensor:
    """dy @ w of a weight as `quantized_up` takes it."""
    packings = [w] if len(w) < 4 else [w[: len(w) // 2], w[len(w) // 2 :]]
    first, *second = ([*p, None][:3] for p in packings)
    return run(ops.quantized_mm.default, dy, *first, offsets, format, True, *(second[0] if second else ()))


_register(
    "quantized_up",
    fake=_quantized_up_fake,
    backward=_quantized_up_backward,
    setup_context=_quantized_up_setup,
    autocast=("x", "b1", "b3", "addend"),
    keeps="save_h",
)


def _experts_down_fake(args):
    return args.a.new_empty(_slots(args.a, args.plan)[0], args.w2.size(1))


def _experts_down_setup(ctx, args, output):
    ctx.activation = (args.layout, args.activation, args.constants)
    ctx.main_grad = args.main_grad2
    w2 = widths.saved(ctx, args.w2)
    ctx.save_for_backward(args.h, *w2, args.b2, args.scores, *_saved_shared(ctx, args), *args.plan)


def _experts_down_backward(ctx, need, dout):
    h, w2, b2, scores, shared, shared_gate, *plan = ctx.saved_tensors
    of_shared = shared_gradients(need, dout, shared, shared_gate)
    if of_shared and not (need.h or need.w2 or need.b2 or need.scores):
        return of_shared
    if h is None:
        raise RuntimeError("fused_moe: experts_down was given no h, so it has no gradient")
    (w2,) = widths.restored(ctx, w2)
    if ctx.main_grad is not None:
        need = less_unasked(ctx, need, w2=2)
    args = (dout, h, w2, b2, scores, plan, *ctx.activation, need.h, need.w2, need.b2, need.scores)
    dh, dw2, db2, dscores = down_gradients(args, ctx.main_grad)
    result = {}
    if need.h:
        result["h"] = dh
    if need.w2 and ctx.main_grad is None:
        result["w2"] = dw2
    if need.b2:
        result["b2"] = db2
    if need.scores:
        result["scores"] = dscores
    return result | of_shared


def down_gradients(args: tuple, main_grad: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dh, dw2, db2 and dscores by experts_down_backward, which takes `args`; dw2 is added to a main_grad."""
    if main_grad is None:
        return run(ops.experts_down_backward.default, *args)
    w2, need_dw2 = args[2], args[-3]
    of_weight = ((need_dw2,), (main_grad,), (w2,), (UNGATED,))
    return _accumulate(ops.experts_down_backward_accumulate.default, args, *of_weight)


def _experts_down_backward_fake(args):
    """For experts_down_backward and experts_down_backward_accumulate; only the latter has a main_grad."""
    dout, w2 = args.dout, args.w2
    accumulates = getattr(args, "main_grad2", None) is not None
    return (
        _needed(args.need_dh, args.h, *args.h.shape),
        _grad_like(args.need_dw2 and not accumulates, w2, dout),
        _needed(args.need_db2, dout, *w2.shape[:2]),
        _needed(args.need_dscores, dout, *_slots(dout, args.plan), dtype=score_dtype(dout)),
    )


def _down_dgrad_fake(args):
    dout, h = args.dout, args.h
    return (
        h.new_empty(h.shape),
        h.new_empty(h.size(0), args.w2.size(2)),
        dout.new_empty(_slots(dout, args.plan), dtype=score_dtype(dout)),
    )


_register(
    "experts_down",
    fake=_experts_down_fake,
    backward=_experts_down_backward,
    setup_context=_experts_down_setup,
    autocast=("a", "h", "w2", "b2", "shared"),
)
_register("experts_down_backward", fake=_experts_down_backward_fake)
_register_accumulate("experts_down_backward_accumulate", fake=_experts_down_backward_fake)
_register("down_dgrad", fake=_down_dgrad_fake)


# --- the backward of experts with keeps: both sides and the router -----------------------------------


def _experts_backward_fake(args):
    x, w1, w3, w2, logits = args.x, args.w1, args.w3, args.w2, args.logits
    grads = [x.new_empty(x.shape), logits.new_empty(logits.shape)]
    if x.dtype != logits.dtype:
        grads.append(x.new_empty(logits.shape))
    need_dw1, need_dw3, need_dw2, need_db1, need_db3, need_db2, need_dscores = args.needs
    of_weights = ((need_dw1, w1), (need_dw3, w3), (need_dw2, w2))
    grads += [torch.empty_like(w) for need, w in of_weights if need]
    of_biases = ((need_db1, w1), (need_db3, w1), (need_db2, w2))
    grads += [x.new_empty(w.shape[:2]) for need, w in of_biases if need]
    return grads + ([logits.new_empty(args.scores.shape)] if need_dscores else [])


_register("experts_backward", fake=_experts_backward_fake)


# --- FP8 training: the nodes of experts whose GEMMs multiply e4m3 by e4m3 -----------------------------
#
# csrc/torch/fp8_training.cpp says what links are, and what their gradients. What is multiplied is
# `quantized`, codes in bytes, which have no gradient: [codes, scale, codes_t, scale_t]; or [codes, scale],
# and backward makes the other two of the weights, which must have their values then. fp8_up takes w1 and w3
# for that alone, and fp8_up_weights takes x for their gradients alone, so the caller detaches those.

BLOCK = 128  # rows and columns that share a scale
WGRADS = {"fp8": 0, "bf16": 1}
AS_THEY_ARE, TRANSPOSED, BOTH_ORDERS = 1, 2, 3  # which codes and scales fp8_weight makes


def _links_t(x: Tensor, num_rows: int, num_experts: int, h_width: int, wgrad: int) -> tuple:
    """The shapes of link_t and of link_t_scale."""
    blocks, tiles = num_rows // BLOCK + num_experts, h_width // BLOCK
    if wgrad == WGRADS["fp8"]:
        return (blocks, BLOCK * h_width // x.itemsize), (blocks, tiles)
    return (num_rows, h_width), (0, tiles)


def _zeros_fake(like: Tensor, shape: tuple[int, int], dtype: torch.dtype | None = None) -> Tensor:
    return like.new_empty(1, dtype=dtype or like.dtype).expand(shape)


def _fp8_weight_fake(args):
    num_experts, rows, cols = args.w.shape
    width, h_width = _widths(rows, args.layout)
    is_made, is_transposed = args.orders & AS_THEY_ARE, args.orders & TRANSPOSED
    scales = (h_width // BLOCK, cols // BLOCK)
    return (
        _needed(is_made, args.w, num_experts, h_width, cols, dtype=torch.uint8),
        _needed(is_made, args.w, num_experts, *scales, dtype=torch.float32),
        _needed(is_transposed, args.w, num_experts, cols, h_width, dtype=torch.uint8),
        _needed(is_transposed, args.w, num_experts, *reversed(scales), dtype=torch.float32),
    )


def _transposed_codes(ctx, first: Tensor, second: Tensor | None, layout: int) -> list[Tensor]:
    """[codes_t, scale_t]: the two tensors themselves, or of the weights that they are."""
    if ctx.has_codes_t:
        assert second is not None
        return [first, second]
    return [*run(ops.fp8_weight.default, first, second, layout, TRANSPOSED)[2:]]


def _fp8_up_weights_fake(args):
    h_width = _widths(args.w1.size(1), args.layout)[1]
    num_rows = _num_rows(args.x, args.plan)
    link_t, scale = _links_t(args.x, num_rows, args.w1.size(0), h_width, args.wgrad)
    return _zeros_fake(args.x, link_t), _zeros_fake(args.x, scale, torch.float32)


def _fp8_up_weights_setup(ctx, args, output):
    ctx.settings, ctx.main_grads = (args.layout, args.wgrad), (args.main_grad1, args.main_grad3)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(args.x, args.w1, args.w3, *args.plan)


def _fp8_up_weights_backward(ctx, need, dlink_t, dlink_t_scale):
    if dlink_t is None or dlink_t_scale is None:
        return {}
    x, w1, w3, *plan = ctx.saved_tensors
    accumulates = any(grad is not None for grad in ctx.main_grads)
    if accumulates:
        need = less_unasked(ctx, need, w1=1, w3=2)
    args = (dlink_t, dlink_t_scale, x, w1, w3, plan, *ctx.settings, need.w1, need.w3)
    if accumulates:
        grads = run(ops.fp8_up_weights_backward_accumulate.default, *args, *ctx.main_grads)
    else:
        grads = run(ops.fp8_up_weights_backward.default, *args)
    return weight_gradients(ctx, need, *grads)


def _fp8_up_weights_backward_fake(args):
    """For fp8_up_weights_backward and its _accumulate; only the latter has main_grads."""
    return tuple(
        _grad_like(needs and getattr(args, main_grad, None) is None, w, args.x)
        for needs, w, main_grad in (
            (args.need_dw1, args.w1, "main_grad1"),
            (args.need_dw3, args.w3, "main_grad3"),
        )
    )


def _fp8_up_fake(args):
    x, num_rows = args.x, _num_rows(args.x, args.plan)
    width, h_width = _widths(args.w1.size(1), args.layout)
    return (
        _zeros_fake(x, (num_rows, h_width // x.itemsize)),
        _zeros_fake(x, (h_width // BLOCK, num_rows), torch.float32),
        x.new_empty(num_rows if args.save_h else 0, h_width),
        x.new_empty(num_rows, width, dtype=torch.uint8),
        x.new_empty(width // BLOCK, num_rows, dtype=torch.float32),
        x.new_empty(num_rows, dtype=torch.float32),
    )


def _fp8_up_setup(ctx, args, output):
    ctx.layout, ctx.has_codes_t = args.layout, len(args.quantized) == 4
    ctx.on_gradient = getattr(args.x, "on_gradient", None)
    ctx.mark_non_differentiable(*output[3:])  # not h, through which a recorded backward of fp8_down reaches x
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(args.x, *(args.quantized[2:] or (args.w1, args.w3)), *args.plan)


def _fp8_up_backward(ctx, need, dlink, dlink_scale, *_):
    if dlink is None or dlink_scale is None or not need.x:
        return {}
    x, first, second, *plan = ctx.saved_tensors
    codes_t = _transposed_codes(ctx, first, second, ctx.layout)
    dx = run(ops.fp8_up_backward.default, dlink, dlink_scale, x, plan, codes_t)
    if _hands_on(ctx, need):
        ctx.on_gradient(dx)
    return {"x": dx}


def _fp8_up_backward_fake(args):
    return torch.empty_like(args.x, memory_format=torch.contiguous_format)


def _fp8_down_fake(args):
    return args.link.new_empty(_slots(args.a_codes, args.plan)[0], args.w2.size(1))


def _fp8_down_setup(ctx, args, output):
    ctx.settings = (args.layout, args.activation, args.constants, args.wgrad)
    ctx.main_grad, ctx.has_codes_t = args.main_grad2, len(args.quantized) == 4
    saved = (args.h, args.x_scale, args.w2, args.scores, *(args.quantized[2:] or (None, None)))
    saved = (args.link_t_scale, *saved)  # one element, through which a recorded backward reaches w1 and w3
    ctx.save_for_backward(*saved, *_saved_shared(ctx, args), *args.plan)


def _fp8_down_backward(ctx, need, dout):
    link_t_scale, h, x_scale, w2, scores, codes_t, scale_t, shared, shared_gate, *plan = ctx.saved_tensors
    (h,) = undifferentiable("fp8_down_backward", (h,), h, link_t_scale)
    of_shared = shared_gradients(need, dout, shared, shared_gate)
    if ctx.main_grad is not None:
        need = less_unasked(ctx, need, w2=6)
    needs = (need.link or need.link_scale, need.link_t or need.link_t_scale, need.w2, need.scores)
    if not any(needs):
        return of_shared
    codes = _transposed_codes(ctx, *((codes_t, scale_t) if ctx.has_codes_t else (w2, None)), UNGATED)
    args = (dout, h, x_scale, w2, scores, plan, codes, *ctx.settings, *needs)
    if ctx.main_grad is None:
        grads = run(ops.fp8_down_backward.default, *args)
    else:
        grads = run(ops.fp8_down_backward_accumulate.default, *args, ctx.main_grad)
    dlink, dlink_scale, dlink_t, dlink_t_scale, dw2, dscores = grads
    result = {"link": dlink, "link_scale": dlink_scale} if needs[0] else {}
    if needs[1]:
        result |= {"link_t": dlink_t, "link_t_scale": dlink_t_scale}
    if need.w2 and ctx.main_grad is None:
        result["w2"] = dw2
    if need.scores:
        result["scores"] = dscores
    return result | of_shared


def _fp8_down_backward_fake(args):
    """For fp8_down_backward and fp8_down_backward_accumulate; only the latter has a main_grad."""
    dout, (num_rows, h_width) = args.dout, args.h.shape
    accumulates = getattr(args, "main_grad2", None) is not None
    link = (num_rows, h_width // dout.itemsize), (h_width // BLOCK, num_rows)
    link_t = _links_t(dout, num_rows, args.w2.size(0), h_width, args.wgrad)
    return (
        _needed(args.need_dlink, dout, *link[0]),
        _needed(args.need_dlink, dout, *link[1], dtype=torch.float32),
        _needed(args.need_dlink_t, dout, *link_t[0]),
        _needed(args.need_dlink_t, dout, *link_t[1], dtype=torch.float32),
        _grad_like(args.need_dw2 and not accumulates, args.w2, dout),
        _needed(args.need_dscores, dout, *_slots(dout, args.plan), dtype=torch.float32),
    )


_register(
    "fp8_weight",
    fake=_fp8_weight_fake,
    setup_context=lambda ctx, args, output: ctx.mark_non_differentiable(*output),
)
_register(
    "fp8_up_weights",
    fake=_fp8_up_weights_fake,
    backward=_fp8_up_weights_backward,
    setup_context=_fp8_up_weights_setup,
    autocast=("x",),
)
_register("fp8_up_weights_backward", fake=_fp8_up_weights_backward_fake)
_register_accumulate("fp8_up_weights_backward_accumulate", fake=_fp8_up_weights_backward_fake)
_register(
    "fp8_up",
    fake=_fp8_up_fake,
    backward=_fp8_up_backward,
    setup_context=_fp8_up_setup,
    autocast=("x",),
    keeps="save_h",
)
_register("fp8_up_backward", fake=_fp8_up_backward_fake)
_register(
    "fp8_down",
    fake=_fp8_down_fake,
    backward=_fp8_down_backward,
    setup_context=_fp8_down_setup,
    autocast=("shared",),
)
_register("fp8_down_backward", fake=_fp8_down_backward_fake)
_register_accumulate("fp8_down_backward_accumulate", fake=_fp8_down_backward_fake)


# --- experts without gradients ------------------------------------------------------------------------


def _experts_fake(args):
    x, num_experts = args.x, args.w1[0].size(0)
    out = x.new_empty(x.size(0), quantized_sizes(args.w2[0])[1])
    counts = x.new_empty(num_experts, dtype=torch.int32)
    if args.gate is None:
        return out, counts, []
    logits = x.new_empty(x.size(0), num_experts, dtype=score_dtype(x))
    ids = counts.new_empty(x.size(0), args.routing[0])
    if not args.keeps:
        return out, counts, [ids, logits]
    _, h_width = _widths(args.w1[0].size(1), args.layout)
    h = x.new_empty(ids.numel(), h_width)
    plan = counts.new_empty(num_experts + 1 + schedule_words(num_experts) + 3 * ids.numel())
    return out, counts, [ids, logits, logits.new_empty(ids.shape), h, plan]


NO_GRADIENT = (
    "{} has no gradient: expected no tensor that requires one, in lists neither, or torch.no_grad(), "
    "found one in grad mode. fused_moe.fused_experts and FusedMoE take gradients"
)


def _experts_out_fake(args):
    _, counts, routed = _experts_fake(args)
    return counts, *(routed or (counts.new_empty(0), args.x.new_empty(0, dtype=score_dtype(args.x))))


for _name, _fake in (("experts", _experts_fake), ("experts_out", _experts_out_fake)):
    _cast = ("x", "w1", "w3", "w2", "b1", "b3", "b2", "shared", "gate", "gate_bias")
    _register_refusing(_name, fake=_fake, message=NO_GRADIENT.format(_name), autocast=_cast)


def infer(
    x, weights, biases, scores, ids, settings: tuple, score_on_input=False, expert_map=None,
    shared=(None, None), router: tuple = (), quantized: tuple = (), out: Tensor | None = None, keeps=False,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """out, counts and routed by `experts`; with out by `experts_out`. In Python the order of the schema is
    here alone. `weights` are lists, of w1, w2 and w3, as `biases` are; `settings` are layout, activation and
    constants, `router` is gate to routing, `quantized` formats, eight_bits and power_of_two. With `keeps` the
    call is training's, and `routed` has what backward reads.
    What has its default at the end is not passed, since a None that is passed takes 0.1 µs."""
    (w1, w2, w3), (b1, b2, b3), (added, added_gate) = weights, biases, shared
    args = (x, w1, w3, w2, scores, ids, *settings, *router)
    if quantized or not (b1 is b2 is b3 is expert_map is added is added_gate is None):
        formats, *how = quantized or ([],)
        args = (*args, *(() if router else _NO_ROUTER), keeps, score_on_input, formats, b1, b3, b2)
        args = (*args, expert_map, added, added_gate, *how)
    elif score_on_input or keeps:
        args = (*args, *(() if router else _NO_ROUTER), keeps, score_on_input)
    if out is None:
        return run(_EXPERTS, *args)
    op, args = _EXPERTS_OUT, (out, *args)
    if torch.compiler.is_compiling() or not _is_plain(args):
        counts, *routed = op(*args)
        return out, counts, routed
    # As the dispatcher would, but in Python, where lists are not converted twice.
    _refusals[op](args)
    torch.autograd.graph.increment_version(out)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        counts, *routed = _below_autograd(op, None, args)
    return out, counts, routed


_EXPERTS, _EXPERTS_OUT = ops.experts.default, ops.experts_out.default
_NO_ROUTER = (None,) * 6


# --- plans --------------------------------------------------------------------------------------------


def route_plan(
    ids: Tensor,
    num_experts: int,
    expert_map: Tensor | None = None,
    max_rows: int | None = None,
    dropped_rows: Tensor | None = None,
) -> Plan:
    """As the public function, without its checks."""
    args = (ids, num_experts, expert_map, *(() if max_rows is None else (max_rows,)))
    if dropped_rows is None:
        return Plan(*_planned(ops.route_plan.default, *args))
    written = dropped_rows
    if WRITES_BESIDE_VIEWS and torch.compiler.is_compiling():
        written = torch.zeros_like(dropped_rows)
    plan = Plan(*_planned(ops.route_plan_dropped.default, *args, written))
    if written is not dropped_rows:
        dropped_rows.add_(written)
    return plan


def plan_from_counts(counts: Tensor, num_rows: int) -> Plan:
    """As the public function, without its checks."""
    rows = None
    if isinstance(num_rows, Tensor):  # torch.jit traces: an integer would be a constant of the graph
        num_rows, rows = 0, counts.new_empty(num_rows, 0)
    tensors = _planned(ops.count_plan.default, counts, num_rows, rows)
    counts, offsets, schedule = tensors
    return Plan(counts, offsets, schedule, None, None, None)


def _planned(op, *args):
    if torch.compiler.is_compiling():
        return op(*args)
    try:
        return op(*args)
    except RuntimeError as error:
        _raise_out_of_memory(error)
        raise
