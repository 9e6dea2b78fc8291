"""What each operator of torch.ops.fused_moe computes, and a call of it: `OPERATORS`.

The public functions check their arguments and then call these. The operators check devices, dtypes and sizes
alone, so a graph may call them by name. `ops.py` has their gradients and their kernels for torch.compile.

Letters: T tokens, D model width, F expert hidden width, E experts, K experts per token, R rows of (token,
slot) pairs, H the width of h: 2F with a gate, else F. In all operators

    plan        is the list `Plan.tensors`; of experts_backward [packed, ids], results of experts with keeps
    layout      0 separate w1 and w3, 1 w1 in halves, 2 w1 interleaved, 3 no gate
    activation  the number of a name in `fused_moe.activation.ACTIVATIONS`
    constants   the activation's [alpha, limit]; of experts beside a gate also route_scale and route_norm_eps
    routing     [top_k, score_func, route_norm, num_expert_groups, num_limited_groups, group_score]
    score_func  0 softmax, 1 sigmoid, 2 sqrtsoftplus
    need_*      whether that gradient is computed; one that is not is an empty tensor
    needs       the same for dw1, dw3, dw2, db1, db3, db2 and dscores of experts_backward; others are left out
"""

from __future__ import annotations

from typing import NamedTuple


class Operator(NamedTuple):
    """A line of the reference."""

    meaning: str
    example: str  # a call after SETUP, and behind `#` the shapes or types of its results


# What the examples share. Sizes differ, so that a shape tells what a dimension is.
SETUP = """
import torch, fused_moe

ops = torch.ops.fused_moe
T, K, R, E, D, F = 5, 2, 10, 3, 8, 16
x, logits = torch.randn(T, D), torch.randn(T, E)
w1, w2, w3 = torch.randn(E, F, D), torch.randn(E, D, F), torch.randn(E, F, D)
scores, ids = fused_moe.route(logits, K)
made = fused_moe.route_plan(ids, E)
plan, offs = made.tensors, made.offsets[1:]
silu, softmax = (0, 0, [1.702, 7.0]), (0, False, 1.0, 1e-20)
rows = ops.permute(x, plan)
h, a = ops.up_gate(x, w1, w3, None, None, plan, *silu)
gate, routing, of_router = torch.randn(E, D), [K, 0, 0, 0, 0, 0], (0, 0, [1.702, 7.0, 1.0, 1e-20])
weights = [w1], [w3], [w2]
kept = ops.experts(x, *weights, None, None, *of_router, gate, routing=routing, keeps=True)[2]
ids_of_x, logits_of_x, scores_of_x, h_of_x, packed = kept
x8, v1, v2, v3 = torch.randn(T, 128), *torch.randn(3, E, 128, 128)
codes = fused_moe.quantize(v1, "int8")
up8, down8 = [*ops.fp8_weight(v1, v3, 0)], [*ops.fp8_weight(v2, None, 3)]
link = ops.fp8_up(x8, v1, v3, plan, up8, *silu, True)
link_t = ops.fp8_up_weights(x8, v1, v3, plan, 0, 1)
of_down8 = (x8, link[2], link[5], v2, scores, plan, down8[2:], *silu, 1, True, True, True, True)
back8 = ops.fp8_down_backward(*of_down8)
ends = torch.tensor([200, 200, 300], dtype=torch.int32)
tiles = ops.tile_schedule(ends, 128, 256)
""".strip()

TESTS = "For tests and tools alone: "

# In the order of csrc/torch/library.cpp, then of planners.cpp.
OPERATORS = {
    "facts": Operator(
        "The build, the tiers and the constants of the library, as JSON.",
        "ops.facts()  # str",
    ),
    "cuda_device": Operator(
        "Whether a CUDA tier runs on a device (status 0), its driver, runtime and compute capability.",
        "ops.cuda_device(0)  # int, int, int, int",
    ),
    "cuda_problem": Operator(
        "The result of cuda_device as the end of an error message; empty for status 0.",
        "ops.cuda_problem(0, 13000, 13000, 90)  # str",
    ),
    "cuda_calls": Operator(
        "How many calls of a GEMM each CUDA tier ran, best first, then why the last one missed the best.",
        "ops.cuda_calls(0)  # (3,)",
    ),
    "cuda_reset": Operator(
        TESTS + "the next CUDA call reads devices and the environment again.",
        "ops.cuda_reset()  # None",
    ),
    "private_plan": Operator(
        TESTS + "the scores, ids, counts and plan that experts makes itself, of logits or of ids.",
        "ops.private_plan(logits, None, E, None, None, K, *softmax, 0, 0, 0, None)"
        "  # (5, 2), (5, 2), (3,), (54,)",
    ),
    "router_logits": Operator(
        "The router's linear layer, logits (T, E) in float32, not rounded: `fused_moe.router_logits`.",
        "ops.router_logits(x, torch.randn(E, D), None)  # (5, 3)",
    ),
    "router_dgrad": Operator(
        "The gradient of x through the router's linear layer: dx = dlogits @ weight.",
        "ops.router_dgrad(logits, torch.randn(E, D))  # (5, 8)",
    ),
    "route": Operator(
        "Scores and ids (T, K) of the K best experts of every token: `fused_moe.route`.",
        "ops.route(logits, None, K, *softmax, 0, 0, 0)  # (5, 2), (5, 2)",
    ),
    "route_backward": Operator(
        "The gradient of the logits from that of the scores; scores are computed again.",
        "ops.route_backward(scores, logits, ids, *softmax)  # (5, 3)",
    ),
    "route_plan": Operator(
        "The plan of expert ids, a stable sort of the slots by expert: `fused_moe.route_plan`.",
        "ops.route_plan(ids, E)  # (3,), (4,), (20,), (10,), (10,), (5, 2)",
    ),
    "route_plan_dropped": Operator(
        "route_plan with max_rows, which adds the number of dropped slots to a tensor.",
        "ops.route_plan_dropped(ids, E, None, 8, torch.tensor(0))  # (3,), (4,), (20,), (8,), (8,), (5, 2)",
    ),
    "count_plan": Operator(
        "The plan of rows that are grouped by expert already: `fused_moe.plan_from_counts`.",
        "ops.count_plan(made.counts, R)  # (3,), (4,), (20,)",
    ),
    "pad": Operator(
        "A copy of x (E, a, b, c) in sizes (E, A, B, C): each dimension is cut, or gets zeros behind.",
        "ops.pad(w1[:, None], 1, 20, 6)  # (3, 1, 20, 6)",
    ),
    "permute": Operator(
        "The token of every row: rows[r] = x[row_token[r]], zero past the last row.",
        "ops.permute(x, plan)  # (10, 8)",
    ),
    "unpermute": Operator(
        "The weighted sum of every token's rows, plus shared rows times the sigmoid of their gate.",
        "ops.unpermute(rows, scores, plan)  # (5, 8)",
    ),
    "sum_peers": Operator(
        "unpermute of rows that are in the memory of several ranks; index counts through all of them.",
        "ops.sum_peers([rows, rows], made.token_row, scores)  # (5, 8)",
    ),
    "unpermute_backward": Operator(
        "The gradients of unpermute's rows and scores.",
        "ops.unpermute_backward(x, rows, scores, plan, True, True)  # (10, 8), (5, 2)",
    ),
    "shared_backward": Operator(
        "The gradients of unpermute's shared rows and of their gate's logits.",
        "ops.shared_backward(x, x, torch.randn(T), True, True)  # (5, 8), (5,)",
    ),
    "grouped_mm": Operator(
        "A GEMM per expert: out[r] = a[r] @ b[e].T + bias[e], zero past the last row.",
        "ops.grouped_mm(rows, w1, offs)  # (10, 16)",
    ),
    "quantized_mm": Operator(
        "grouped_mm by a quantised weight, or by its transpose, in the dtype of a.",
        "ops.quantized_mm(torch.randn(R, 128), *codes.tensors, offs, codes.code)  # (10, 128)",
    ),
    "wgrad": Operator(
        "The gradient of grouped_mm's b: dw[e] = a[rows of e].T @ b[rows of e].",
        "ops.wgrad(a, rows, offs)  # (3, 16, 8)",
    ),
    "wgrad_accumulate": Operator(
        "wgrad that is added to float32 dw, without rounding to the weight's dtype.",
        "ops.wgrad_accumulate(a, rows, offs, torch.zeros(E, F, D))  # None",
    ),
    "bias_grad": Operator(
        "The sum of every expert's rows.",
        "ops.bias_grad(rows, offs)  # (3, 8)",
    ),
    "activate": Operator(
        "The activation between the two sides of experts: a = act(gate) * up.",
        "ops.activate(a, a, *silu)  # (10, 16)",
    ),
    "activate_backward": Operator(
        "The gradients of activate's h and up.",
        "ops.activate_backward(a, a, a, *silu)  # (10, 16), (10, 16)",
    ),
    "up_gate": Operator(
        TESTS + "experts_up that always returns h.",
        "ops.up_gate(x, w1, w3, None, None, plan, *silu)  # (10, 32), (10, 16)",
    ),
    "up_dgrad": Operator(
        TESTS + "the gradient of the rows of x, one for each slot, from that of h.",
        "ops.up_dgrad(h, w1, w3, plan, 0)  # (10, 8)",
    ),
    "down_dgrad": Operator(
        TESTS + "the down side's dh and dscores, and a times the scores, which dw2 reads.",
        "ops.down_dgrad(x, w2, None, h, scores, plan, *silu)  # (10, 32), (10, 16), (5, 2)",
    ),
    "experts_up": Operator(
        "The up side of the experts, a = act(x @ w1.T) * (x @ w3.T) for every row, and h if it is saved.",
        "ops.experts_up(x, w1, w3, None, None, None, plan, *silu, True)  # (10, 32), (10, 16)",
    ),
    "quantized_up": Operator(
        "experts_up with quantised w1 and w3, and what adapters add to h.",
        "ops.quantized_up(x8, [*codes.tensors[:2]], codes.code, [], 0, None, None, None, None, plan, 3, 0, "
        "[1.702, 7.0], False)  # (0, 128), (10, 128)",
    ),
    "experts_down": Operator(
        "The down side of the experts: a @ w2.T for every row, and the weighted sum per token.",
        "ops.experts_down(a, h, w2, None, scores, plan, *silu)  # (5, 8)",
    ),
    "experts": Operator(
        "The experts in one call, behind the router or of given scores; keeps: with what backward reads.",
        "ops.experts(x, [w1], [w3], [w2], scores, ids, *silu)  # (5, 8), (3,), []",
    ),
    "experts_out": Operator(
        "experts that writes its result into a given tensor, and returns counts, ids and logits.",
        "ops.experts_out(torch.empty(T, D), x, [w1], [w3], [w2], scores, ids, *silu)  # (3,), (0,), (0,)",
    ),
    "experts_backward": Operator(
        "The gradients of experts with keeps: of x and logits, and those asked for of all others.",
        "ops.experts_backward(x, x, w1, w3, w2, gate, h_of_x, scores_of_x, logits_of_x, [packed, ids_of_x], "
        "*of_router, routing, [1, 1, 1, 0, 0, 0, 0])"
        "  # [(5, 8), (5, 3), (3, 16, 8), (3, 16, 8), (3, 8, 16)]",
    ),
    "experts_up_backward": Operator(
        "The gradients of experts_up from that of h; dx may include the router's.",
        "ops.experts_up_backward(h, x, w1, w3, None, plan, 0, True, True, True, False, False, False)"
        "  # (5, 8), (3, 16, 8), (3, 16, 8), (0,), (0,), (0,)",
    ),
    "experts_up_backward_accumulate": Operator(
        "experts_up_backward that adds the weight gradients to float32 main_grads.",
        "ops.experts_up_backward_accumulate(h, x, w1, w3, None, plan, 0, True, True, True, False, False, "
        "False, torch.zeros(E, F, D), torch.zeros(E, F, D))  # (5, 8), (0,), (0,), (0,), (0,), (0,)",
    ),
    "experts_down_backward": Operator(
        "The gradients of experts_down: of h, through the activation, of w2, its bias and the scores.",
        "ops.experts_down_backward(x, h, w2, None, scores, plan, *silu, True, True, False, True)"
        "  # (10, 32), (3, 8, 16), (0,), (5, 2)",
    ),
    "experts_down_backward_accumulate": Operator(
        "experts_down_backward that adds the gradient of w2 to a float32 main_grad.",
        "ops.experts_down_backward_accumulate(x, h, w2, None, scores, plan, *silu, True, True, False, True, "
        "torch.zeros(E, D, F))  # (10, 32), (0,), (0,), (5, 2)",
    ),
    "fp8_weight": Operator(
        "e4m3 codes (in bytes) and scales of a weight by blocks of 128x128, and those of its transpose.",
        "ops.fp8_weight(v1, v3, 0)  # (3, 256, 128), (3, 2, 1), (3, 128, 256), (3, 1, 2)",
    ),
    "fp8_up_weights": Operator(
        "FP8 training: zeros whose gradients are dh by columns, of which backward makes dw1 and dw3.",
        "ops.fp8_up_weights(x8, v1, v3, plan, 0, 0)  # (3, 8192), (3, 2)",
    ),
    "fp8_up": Operator(
        "FP8 training: the up side. The links are zeros whose gradients are dh by rows.",
        "ops.fp8_up(x8, v1, v3, plan, up8, *silu, True)"
        "  # (10, 64), (2, 10), (10, 256), (10, 128), (1, 10), (10,)",
    ),
    "fp8_down": Operator(
        "FP8 training: the down side and the weighted sum per token.",
        "ops.fp8_down(*link, v2, *link_t, scores, plan, down8, *silu, 1)  # (5, 128)",
    ),
    "fp8_up_backward": Operator(
        "FP8 training: the gradient of x from dh by rows.",
        "ops.fp8_up_backward(back8[0], back8[1], x8, plan, up8[2:])  # (5, 128)",
    ),
    "fp8_up_weights_backward": Operator(
        "FP8 training: the gradients of w1 and w3 from dh by columns.",
        "ops.fp8_up_weights_backward(back8[2], back8[3], x8, v1, v3, plan, 0, 1, True, True)"
        "  # (3, 128, 128), (3, 128, 128)",
    ),
    "fp8_up_weights_backward_accumulate": Operator(
        "fp8_up_weights_backward that adds the gradients to float32 main_grads.",
        "ops.fp8_up_weights_backward_accumulate(back8[2], back8[3], x8, v1, v3, plan, 0, 1, True, True, "
        "torch.zeros(E, 128, 128), torch.zeros(E, 128, 128))  # (0,), (0,)",
    ),
    "fp8_down_backward": Operator(
        "FP8 training: the gradients of fp8_down, dh as e4m3 codes with scales by rows and by columns.",
        "ops.fp8_down_backward(*of_down8)  # (10, 64), (2, 10), (10, 256), (0, 2), (3, 128, 128), (5, 2)",
    ),
    "fp8_down_backward_accumulate": Operator(
        "fp8_down_backward that adds the gradient of w2 to a float32 main_grad.",
        "ops.fp8_down_backward_accumulate(*of_down8, torch.zeros(E, 128, 128))"
        "  # (10, 64), (2, 10), (10, 256), (0, 2), (0,), (5, 2)",
    ),
    "tile_schedule": Operator(
        TESTS + "the tile schedule of the experts' cumulative ends, as a plan has it.",
        "ops.tile_schedule(ends, 128, 256)  # (20,)",
    ),
    "work_tiles": Operator(
        TESTS + "the work tiles of a grouped GEMM in their order, one per row.",
        "ops.work_tiles(tiles, ends, 2, 8, True, 0)  # (6, 6)",
    ),
    "wgrad_tiles": Operator(
        TESTS + "the tiles of a weight gradient in their order, split-K slices included, one per row.",
        "ops.wgrad_tiles(tiles, ends, 2, 0)  # (6, 6)",
    ),
    "share_tiles": Operator(
        TESTS + "the number of full tiles, and of CTAs with skinny tiles alone; or of all tiles, and 0.",
        "ops.share_tiles(tiles, ends, 2, 8)  # int, int",
    ),
    "next_tile": Operator(
        TESTS + "the tile that a CTA claims next; num_tiles or more if none is left.",
        "ops.next_tile(torch.zeros(3, 4, dtype=torch.int32), 10, 0)  # int",
    ),
    "default_order": Operator(
        TESTS + "the rows of a tile, the row tiles of a group, and whether skinny experts are interleaved.",
        "ops.default_order()  # int, int, bool",
    ),
}
