"""Other implementations of the layer, with the parameters of ours.

Each entry of PEERS builds a module from a fused_moe.FusedMoE: softmax over all experts, the K best,
renormalised; silu gate times up; no biases. torch_experts and vllm_experts are of the experts alone, and so
are those of QUANTISED_PEERS, on quantised weights. A peer that is not installed raises Unavailable with the
reason.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import version
from typing import NamedTuple

import common
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_moe import FusedMoE, Plan, permute, reference, route_plan, unpermute
from fused_moe.quantized.formats import parts

# SonicMoE's GEMMs: rows and columns of a tile, and whether two consumers take turns (ping-pong) or share a
# tile (cooperative). QuACK times the tiles that a kernel admits and keeps the fastest for each operand shape;
# over its whole list the first step of a shape takes minutes.
TILES = {
    (128, 256): "cooperative",
    (256, 128): "cooperative",
    (256, 192): "cooperative",
    (128, 192): "ping-pong",
    (128, 128): "ping-pong",
}
CLUSTER = (2, 1)

# vLLM's tile in its batch-invariant mode, whatever the number of tokens
INVARIANT_TILE = {
    "BLOCK_SIZE_M": 64,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 32,
    "GROUP_SIZE_M": 8,
    "SPLIT_K": 1,
}
VLLM_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
BLOCK = 128  # of fp8_block's scales, in both dimensions
# Marlin's name of a format's codes, and their bits
MARLIN_FORMATS = {"int4": ("uint4b8", 4), "mxfp4": ("float4_e2m1f", 4), "fp8_block": ("float8_e4m3fn", 8)}
MARLIN_BLOCKS = 4  # for which its workspace has locks, on each SM
# Humming's name of a format's codes, and what D and F have to be multiples of
HUMMING_FORMATS = {
    "int4": ("uint4", 32),
    "int8": ("uint8", 32),
    "mxfp4": ("float4e2m1", 32),
    "fp8_block": ("float8e4m3", BLOCK),
}
HUMMING_PADS = {"pad_n_to_multiple": 256, "pad_k_to_multiple": 128}  # as vLLM has it pad a layer's weights
HUMMING_LOCKS = 2048  # as in Humming's own layer
# In CUDA: its kernel of activations compiles what it is given
HUMMING_ACTIVATIONS = {
    "silu": "a / (1.f + __expf(-a))",
    "gelu": "0.5f * a * (1.f + erff(0.70710678f * a))",
    "gelu_tanh": "0.5f * a * (1.f + tanhf(0.79788456f * (a + 0.044715f * a * a * a)))",
}
# Rounding a value to e4m3 has an error of 2.6%, root mean square. The output has the error of x, through gate
# and up, and that of the hidden values. A wrong scale is off by more.
FP8_ACTIVATIONS_BOUND = 0.08


class Unavailable(Exception):
    """A peer that cannot run here."""


def route(x: Tensor, gate: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The usual router in plain PyTorch: scores (T, K) in x's dtype, ids (T, K)."""
    scores, ids = F.linear(x, gate).float().softmax(-1).topk(top_k)
    return (scores / scores.sum(-1, keepdim=True)).to(x.dtype), ids


def torch_experts(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor | None,
    scores: Tensor,
    ids: Tensor,
    *,
    activation: str = "silu",
) -> Tensor:
    """PyTorch's own path, as in torchtitan: sort, gather, torch._grouped_mm, scatter, combine.

    It uses index_select and index_copy, because the backward of plain indexing sorts again. torch._grouped_mm
    takes multiples of 8 alone; other widths are padded.
    """
    D, hidden = x.size(1), w1.size(1)
    of_D, of_hidden = (common.aligned(width) - width for width in (D, hidden))
    if of_D or of_hidden:
        x = F.pad(x, (0, of_D))
        w1, w3 = (w if w is None else F.pad(w, (0, of_D, 0, of_hidden)) for w in (w1, w3))
        w2 = F.pad(w2, (0, of_hidden, 0, of_D))
        return torch_experts(x, w1, w2, w3, scores, ids, activation=activation)[:, :D]
    by_expert, order = ids.flatten().sort(stable=True)
    experts = torch.arange(w1.size(0), dtype=ids.dtype, device=x.device)
    offs = torch.searchsorted(by_expert, experts, right=True, out_int32=True)
    rows = x.index_select(0, order // ids.size(1))
    gate = torch._grouped_mm(rows, w1.transpose(-2, -1), offs=offs)
    up = None if w3 is None else torch._grouped_mm(rows, w3.transpose(-2, -1), offs=offs)
    a = reference.activate(gate, up, activation=activation)
    y = torch._grouped_mm(a, w2.transpose(-2, -1), offs=offs)
    slots = torch.empty_like(y).index_copy_(0, order, y)
    return (scores.to(x.dtype).unsqueeze(1) @ slots.unflatten(0, scores.shape)).squeeze(1)


def vllm_experts(activation: str = "silu", *, gated: bool = True, invariant: bool = False) -> Callable:
    """vLLM's Triton path as a function of x, w13, w2, scores and ids: moe_align_block_size, fused_moe_kernel,
    the activation, fused_moe_kernel, moe_sum. w13 is (E, 2F, D), gate rows first; (E, F, D) without a gate.

    vLLM finds the tile in its tables, by GPU, E, F and the number of tokens, or takes its default; with
    `invariant` it is INVARIANT_TILE. With very few tokens vLLM skips moe_align_block_size.
    """
    if activation not in VLLM_ACTIVATIONS:
        raise Unavailable(f"vllm: expected {', '.join(VLLM_ACTIVATIONS)}, found {activation}")
    try:
        from vllm.model_executor.layers.fused_moe import override_config
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
    except (ImportError, OSError) as error:  # OSError: a library that another PyTorch has built
        raise Unavailable(f"vllm is not installed ({error})") from None
    function = MoEActivation.from_str(activation if gated else f"{activation}_no_mul")

    def experts(x: Tensor, w13: Tensor, w2: Tensor, scores: Tensor, ids: Tensor, **options) -> Tensor:
        with override_config(INVARIANT_TILE if invariant else None):
            return fused_experts(x, w13, w2, scores, ids, activation=function, **options)

    return experts


class QuantisedPeer(NamedTuple):
    """Another library's experts on the values of our quantised weights."""

    convert: Callable  # w1, w2 and w3, QuantizedWeights, to weights in the layout of the library
    experts: Callable  # of x, those weights, scores and ids
    bound: float | None = None  # of the error, where the usual one is that of a more precise computation


def stacked(w1, w3, part: Callable[..., Tensor]) -> Tensor:
    """A part of gate's and of up's quantised weight, gate rows first; of gate's alone without an up."""
    return part(w1) if w3 is None else torch.cat([part(w1), part(w3)], dim=1)


def column_scales(w) -> Tensor:
    """(E, out, groups), as 16-bit floats; those of mxfp4 are powers of two."""
    if w.format == "fp8_block":
        return w.scale.repeat_interleave(BLOCK, 1)[:, : w.size(1)].to(w.dtype)
    return w.scale.view(torch.float8_e8m0fnu).to(w.dtype) if w.format == "mxfp4" else w.scale.to(w.dtype)


def vllm_marlin(format: str, activation: str = "silu", *, gated: bool = True) -> QuantisedPeer:
    """vLLM's Marlin, weight-only as ours: moe_align_block_size, moe_wna16_marlin_gemm, the activation,
    moe_wna16_marlin_gemm, moe_sum. vLLM's wrapper chooses the block size.

    Scales of fp8_block are rounded to bfloat16, as vLLM does for Marlin; others have the same values as ours.
    Its kernels are in the wheel as PTX for 8.0, which the driver compiles for Hopper where nothing else has.
    """
    if format not in MARLIN_FORMATS:
        raise Unavailable(f"marlin: expected {', '.join(MARLIN_FORMATS)}, found {format}")
    if activation not in VLLM_ACTIVATIONS:
        raise Unavailable(f"marlin: expected {', '.join(VLLM_ACTIVATIONS)}, found {activation}")
    try:
        from vllm import _custom_ops as ops
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
        from vllm.model_executor.layers.quantization.utils import (
            marlin_utils,
            marlin_utils_fp4,
            marlin_utils_fp8,
        )
        from vllm.scalar_type import scalar_types

        type_name, bits = MARLIN_FORMATS[format]
        code_type = getattr(scalar_types, type_name).id
    except (ImportError, OSError, AttributeError) as error:  # AttributeError: a version without the type
        raise Unavailable(f"vllm is not installed ({error})") from None
    function = MoEActivation.from_str(activation if gated else f"{activation}_no_mul")
    workspaces: dict[torch.device, Tensor] = {}  # vLLM, too, keeps one for all calls

    def workspace(device: torch.device) -> Tensor:
        if device not in workspaces:
            workspaces[device] = marlin_utils.marlin_make_workspace_new(device, MARLIN_BLOCKS)
        return workspaces[device]

    def codes(w) -> Tensor:
        return w.data.view(torch.uint8)

    def repacked(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        columns, rows = codes.size(2) * 8 // bits, codes.size(1)
        words = codes.view(torch.int32).mT.contiguous()
        packed = ops.gptq_marlin_moe_repack(words, columns, rows, bits)
        group = columns // scales.size(2)
        scales = marlin_utils.marlin_moe_permute_scales(scales.mT.contiguous(), columns, rows, group)
        if format == "mxfp4":
            flat = marlin_utils_fp4.mxfp4_marlin_process_scales(scales.flatten(0, 1))
            scales = flat.view(scales.shape)
        if format == "fp8_block":
            scales = marlin_utils_fp8.fp8_fused_exponent_bias_into_scales(scales)
        return packed, scales

    def convert(w1, w2, w3) -> tuple[Tensor, ...]:
        if w1.zero is not None:
            raise Unavailable("marlin: expected weights without zero points")
        first = repacked(stacked(w1, w3, codes), stacked(w1, w3, column_scales))
        return *first, *repacked(codes(w2), column_scales(w2))

    def experts(x: Tensor, weights: tuple[Tensor, ...], scores: Tensor, ids: Tensor) -> Tensor:
        w13, scale13, w2, scale2 = weights
        return fused_marlin_moe(
            x, w13, w2, None, None, scale13, scale2, scores.float(), ids, code_type,
            activation=function, moe_sum=sum_of_slots, workspace=workspace(x.device),
        )  # fmt: skip

    def sum_of_slots(slots: Tensor, out: Tensor, ids: Tensor, expert_map: None) -> Tensor:
        ops.moe_sum(slots, out)  # a separate kernel, as in vLLM's layer; the wrapper's default is torch.sum
        return out

    return QuantisedPeer(convert, experts)


def vllm_fp8_block(format: str, activation: str = "silu", *, gated: bool = True) -> QuantisedPeer:
    """vLLM's Triton kernel with weights in fp8_block, which is W8A8: it rounds x and the hidden values to
    e4m3 with a scale per token and 128 columns, where ours multiplies 16-bit activations. So it is less
    precise, and has twice the tensor cores' rate. Its tile is that of its tables for this GPU, or its
    default. vLLM may choose DeepGEMM or CUTLASS in its place where those are installed.
    """
    if format != "fp8_block":
        raise Unavailable(f"vllm: expected fp8_block, found {format}")
    float_experts = vllm_experts(activation, gated=gated)  # or the reason why not
    try:
        from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    except ImportError as error:
        raise Unavailable(f"vllm: {error}") from None

    def convert(w1, w2, w3) -> tuple:
        if w3 is not None and w1.size(1) % BLOCK:
            raise Unavailable(f"vllm: expected F, a multiple of {BLOCK}, found {w1.size(1)}")
        scale13 = stacked(w1, w3, lambda w: w.scale)
        config = fp8_w8a8_moe_quant_config(scale13, w2.scale, block_shape=[BLOCK, BLOCK])
        codes = stacked(w1, w3, lambda w: w.data.view(torch.uint8)).view(torch.float8_e4m3fn)
        return codes, w2.data, config

    def experts(x: Tensor, weights: tuple, scores: Tensor, ids: Tensor) -> Tensor:
        w13, w2, config = weights
        return float_experts(x, w13, w2, scores, ids, quant_config=config)

    return QuantisedPeer(convert, experts, FP8_ACTIVATIONS_BOUND)


class HummingWeight(NamedTuple):
    config: object  # humming.config.LayerConfig
    tensors: dict[str, Tensor]
    locks: Tensor  # of Stream-K


@cache
def plan_in_order(shape: tuple[int, int], device: torch.device) -> Plan:
    """The plan by which row t * K + k is that of slot k of token t, as if all had chosen one expert."""
    return route_plan(torch.zeros(shape, dtype=torch.int32, device=device), 1)


def humming(
    format: str, activation: str = "silu", *, gated: bool = True, grouped: bool = False
) -> QuantisedPeer:
    """humming-kernels 0.1.19 (github.com/vllm-project/humming), weight-only as ours, as vLLM runs it: its
    indexed GEMM on slots in blocks of one expert, the activation, its indexed GEMM, the weighted sum. With
    `grouped`, vLLM's other choice: its grouped GEMMs, on copied rows.

    The GEMMs and the activation are Humming's, with the tiles that its heuristics choose for the number of
    slots. The rest is vLLM's, and vLLM need not be installed, so what is timed in its place is moe_align.py,
    one launch as vLLM's for few slots, and our unpermute for the sum; with `grouped` our permute, too. Where
    the two GEMMs' tiles differ in rows, that launch makes the blocks of both.

    Scales of fp8_block are rounded to 16 bits, as Humming's loader of such weights does; others have the same
    values as ours. Kernels are compiled in the first call of a shape and a number of tokens.
    """
    if format not in HUMMING_FORMATS:
        raise Unavailable(f"humming: expected {', '.join(HUMMING_FORMATS)}, found {format}")
    if activation not in HUMMING_ACTIVATIONS:
        raise Unavailable(f"humming: expected {', '.join(HUMMING_ACTIVATIONS)}, found {activation}")
    try:
        from humming.forward import humming_forward, may_process_input
        from humming.schema import HummingWeightSchema
        from humming.transform import prepare_and_transform_humming_tensors
        from humming.tune import get_heuristics_config
        from moe_align import align
    except (ImportError, OSError) as error:
        raise Unavailable(f"humming is not installed ({error})") from None
    kind = "grouped_contiguous" if grouped else "indexed"
    code_type, multiple = HUMMING_FORMATS[format]
    function = HUMMING_ACTIVATIONS[activation]

    def codes(w) -> Tensor:
        """As bytes; signed ones plus 128."""
        data = w.data.view(torch.uint8)
        return data ^ 128 if format == "int8" else data

    def scales(w) -> Tensor:
        """(E, out, groups)"""
        return w.scale if format == "mxfp4" else column_scales(w).expand(-1, w.size(1), -1)

    def arranged(codes: Tensor, scales: Tensor, shape: tuple[int, int, int], dtype) -> HummingWeight:
        E, rows, columns = shape
        schema = HummingWeightSchema(
            b_dtype=code_type,
            bs_dtype="float8e8m0" if format == "mxfp4" else None,
            weight_scale_group_size=0 if format == "int8" else columns // scales.size(2),
        )
        scales = scales.view(torch.float8_e8m0fnu) if format == "mxfp4" else scales
        done = []
        for part in parts(shape):  # Humming unpacks integers to 32 bits in between
            tensors = {"weight": codes[part].view(torch.int32), "weight_scale": scales[part]}
            of_part, tensors = schema.convert_symmetric_integer_weight(tensors)
            config, tensors = prepare_and_transform_humming_tensors(
                tensors, rows, columns, of_part, num_experts=part.stop - part.start, torch_dtype=dtype,
                device=codes.device, **HUMMING_PADS,
            )  # fmt: skip
            done.append(tensors)
        tensors = {
            name: torch.cat([tensors[name].view(torch.uint8) for tensors in done]).view(done[0][name].dtype)
            for name in done[0]
        }
        locks = torch.zeros(HUMMING_LOCKS, dtype=torch.int32, device=codes.device)
        return HummingWeight(replace(config, num_experts=E), tensors, locks)

    def convert(w1, w2, w3) -> tuple[HummingWeight, HummingWeight]:
        if w1.zero is not None:
            raise Unavailable("humming: expected weights without zero points")
        E, hidden, dim = w1.size()
        if hidden % multiple or dim % multiple:
            widths = f"multiples of {multiple}, found D = {dim}, F = {hidden}"
            raise Unavailable(f"humming: expected widths that are {widths}")
        up = E, hidden * (1 if w3 is None else 2), dim
        return (
            arranged(stacked(w1, w3, codes), stacked(w1, w3, scales), up, w1.dtype),
            arranged(codes(w2), scales(w2), w2.size(), w2.dtype),
        )

    @cache
    def tile(config, num_rows: int) -> tuple[int, str]:
        """How many rows it has, and all of it in JSON."""
        found = get_heuristics_config(config, num_rows, gemm_type=kind)
        return found["block_shape"][0], json.dumps(found)

    def gemm(x: Tensor, w: HummingWeight, num_rows: int, **rows) -> Tensor:
        return humming_forward(
            w.config, x, **w.tensors, locks=w.locks, valid_shape_m=num_rows,
            compute_config=json.dumps({"gemm_type": kind}), tuning_config=tile(w.config, num_rows)[1], **rows,
        )  # fmt: skip

    def activate(h: Tensor, w: HummingWeight) -> Tensor:
        arguments, body = ("binary_split", f"{function} * b") if gated else ("unary", function)
        return may_process_input(w.config, h, activation_type=arguments, activation_impl=body)[0]

    def on_blocks(x: Tensor, weights: tuple, scores: Tensor, ids: Tensor) -> Tensor:
        up, down = weights
        num_rows, top_k = ids.numel(), ids.size(1)

        def rows(blocks) -> dict[str, Tensor]:
            return dict(zip(("sorted_ids", "expert_ids", "num_tokens_padded"), blocks, strict=True))

        sizes = tuple(tile(w.config, num_rows)[0] for w in weights)
        of_up, of_down = align(ids, up.config.num_experts, sizes)
        h = gemm(x, up, num_rows, top_k=top_k, **rows(of_up))
        slots = gemm(activate(h, down), down, num_rows, **rows(of_down))
        return unpermute(slots, plan_in_order(ids.shape, ids.device), scores)

    def on_groups(x: Tensor, weights: tuple, scores: Tensor, ids: Tensor) -> Tensor:
        up, down = weights
        rows, plan = permute(x, ids, up.config.num_experts)
        h = gemm(rows, up, ids.numel(), expert_layout=plan.offsets)
        y = gemm(activate(h, down), down, ids.numel(), expert_layout=plan.offsets)
        return unpermute(y, plan, scores)

    return QuantisedPeer(convert, on_groups if grouped else on_blocks)


QUANTISED_PEERS = {
    "marlin": vllm_marlin,
    "vllm": vllm_fp8_block,
    "humming": humming,
    "humming-grouped": partial(humming, grouped=True),
}


class TorchMoE(nn.Module):
    """A router and torch_experts. It shares the parameters of `ours`: copies would take gigabytes."""

    def __init__(self, ours: FusedMoE):
        super().__init__()
        self.gate = ours.router.gate.weight
        self.w1, self.w2, self.w3 = ours.experts.w1, ours.experts.w2, ours.experts.w3
        self.top_k, self.activation = ours.top_k, ours.experts.activation

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = route(x, self.gate, self.top_k)
        return torch_experts(x, self.w1, self.w2, self.w3, scores, ids, activation=self.activation)


class ScatterMoE(nn.Module):
    """github.com/shawntan/scattermoe, whose packed first weight has the up half first, then the gate half."""

    def __init__(self, ours: FusedMoE):
        super().__init__()
        try:
            from scattermoe.mlp import GLUMLP
        except ImportError as error:
            raise Unavailable(f"scattermoe is not installed ({error})") from None
        experts = ours.experts
        with torch.device(experts.w1.device):
            mlp = GLUMLP(experts.dim, experts.hidden_dim, ours.num_experts, ours.top_k, activation=nn.SiLU())
        self.mlp = mlp.to(experts.w1.dtype)
        self.gate, self.top_k = ours.router.gate.weight, ours.top_k
        with torch.no_grad():
            self.mlp.experts.weight.copy_(torch.cat([experts.w3, experts.w1], dim=1))
            self.mlp.output_experts.weight.copy_(experts.w2)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x, *route(x, self.gate, self.top_k))


def tiles_in_words() -> str:
    each = ", ".join(f"{m}x{n} {kind}" for (m, n), kind in TILES.items())
    return f"{each}, in clusters of {'x'.join(map(str, CLUSTER))}"


def has_tile(config) -> bool:
    """Whether one of QuACK's configurations is among TILES."""
    kind = "ping-pong" if config.pingpong else "cooperative"
    cluster = (config.cluster_m, config.cluster_n)
    return TILES.get((config.tile_m, config.tile_n)) == kind and cluster == CLUSTER and not config.swap_ab


def restrict_tiles() -> None:
    """Leaves only TILES in the tuning lists of QuACK, SonicMoE's GEMM library.

    QuACK 0.4.1 has a list for each of its three GEMMs. 0.6.5 has one for plain GEMMs; the lists of those with
    an activation are made by get_all_configs in their first call.
    """
    from quack import gemm_interface

    for name in ("gemm_tuned", "gemm_gated_tuned", "gemm_dgated_tuned"):
        if tuner := getattr(gemm_interface, name, None):
            tuner.configs = [entry for entry in tuner.configs if has_tile(entry.kwargs["config"])]
    try:
        from quack.gemm_runtime import autotune
    except ImportError:  # 0.4.1
        return
    every = getattr(autotune.get_all_configs, "every", autotune.get_all_configs)

    def restricted(*args, **kwargs) -> list:
        return [config for config in every(*args, **kwargs) if has_tile(config)]

    restricted.every = every
    autotune.get_all_configs = restricted


class SonicMoE(nn.Module):
    """github.com/Dao-AILab/sonic-moe through the function that sonic-moe's benchmark times.

    Its package asks for an older PyTorch, so it is installed without what it asks for: pip install --no-deps
    sonic-moe==0.1.2.post1 quack-kernels==0.6.5 nvidia-cutlass-dsl==4.7.0 nvidia-cutlass-dsl-libs-base==4.7.0
    nvidia-cutlass-dsl-libs-core==4.7.0 nvidia-cutlass-dsl-libs-cu13==4.7.0 "apache-tvm-ffi<0.2"
    torch-c-dlpack-ext; or quack-kernels==0.4.1 with nvidia-cutlass-dsl 4.4.2. Compiling takes minutes for the
    first shape; QUACK_CACHE_DIR keeps the kernels.

    Its MoE module would add a balance loss. Gate and up rows of its first weight alternate. Its softmax
    over the K chosen logits is our renormalised softmax over all.
    """

    def __init__(self, ours: FusedMoE):
        super().__init__()
        # QuACK 0.6.5 keys its kernels by what their source refers to, and CUTLASS' source refers to a logger
        logging.Logger.__quack_semantic_key__ = lambda logger: logger.name
        try:
            from sonicmoe.enums import ActivationType
            from sonicmoe.functional import moe_TC_softmax_topk_layer
        except ImportError as error:
            raise Unavailable(f"sonicmoe is not installed ({error})") from None
        restrict_tiles()
        versions = f"SonicMoE {version('sonic-moe')}, QuACK {version('quack-kernels')}"
        self.about = f"{versions}, tiles {tiles_in_words()}"
        experts = ours.experts
        self.layer, self.activation = moe_TC_softmax_topk_layer, ActivationType.SWIGLU
        self.gate, self.w2, self.top_k = ours.router.gate.weight, experts.w2, ours.top_k
        self.w13 = nn.Parameter(torch.stack([experts.w1, experts.w3], dim=2).flatten(1, 2).detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(
            x,
            self.gate,
            self.w13.permute(1, 2, 0),
            None,
            self.w2.permute(1, 2, 0),
            None,
            self.top_k,
            torch.cuda.current_stream().cuda_stream,
            activation_type=self.activation,
            is_inference_mode_enabled=not torch.is_grad_enabled(),
        )[0]


def loop(ours: FusedMoE) -> nn.Module:
    """One expert after another: fused_moe.reference."""
    weight = ours.experts.w1
    layer = reference.FusedMoE(
        ours.experts.dim,
        ours.experts.hidden_dim,
        ours.num_experts,
        ours.top_k,
        activation=ours.experts.activation,
        gated=ours.experts.w3 is not None,
        **ours.router.routing,
        device=weight.device,
        dtype=weight.dtype,
    )
    layer.load_state_dict(ours.state_dict())
    return layer


PEERS = {"loop": loop, "torch": TorchMoE, "scattermoe": ScatterMoE, "sonicmoe": SonicMoE}
