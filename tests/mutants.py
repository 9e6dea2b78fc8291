"""Breaks one line at a time and shows which test notices: mutation testing of the kernels and of their
Python.

python tests/mutants.py [--list] [--cuda] [NAME...]

Works on a copy of the tree in build/mutants, built for the CPU; with --cuda, on a machine with a GPU and
nvcc, for both, and the mutants are those of the CUDA kernels. Every result goes into the table of
docs/mutations.md. Exits with 1 if a mutant survives its tests, or if its text is not found exactly once:
then it has to be written anew.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "mutations.md"
BEGIN, END = "<!-- mutants: begin -->", "<!-- mutants: end -->"
TIMEOUT = 300  # seconds: a mutant that hangs is noticed, too


class Mutant(NamedTuple):
    name: str
    path: str
    old: str
    new: str
    tests: str  # what may notice: a file, or pytest's arguments


CPU = [
    # --- router_logits
    Mutant(
        "logits of the last slice alone",
        "csrc/cpu/router_logits.c",
        "fm_transposed(weight), k > 0);",
        "fm_transposed(weight), false);",
        "tests/test_router_logits.py",
    ),
    Mutant(
        "every block of logits has the first one's bias",
        "csrc/cpu/router_logits.c",
        "fm_at(p->bias, w->elem_bytes, expert), experts);",
        "p->bias, experts);",
        "tests/test_router_logits.py",
    ),
    Mutant(
        "logits of tensor subclasses are ours",
        "fused_moe/gate.py",
        "if type(x) not in PLAIN or",
        "if",
        "tests/test_router_logits.py",
    ),
    # --- route
    Mutant(
        "softmax without its maximum",
        "csrc/cpu/route.c",
        "exp(logits[e] - max)",
        "exp(logits[e])",
        "tests/test_route.py",
    ),
    Mutant(
        "ties to the higher id",
        "csrc/cpu/route.c",
        "return a > b ||",
        "return a >= b ||",
        "tests/test_route.py",
    ),
    Mutant(
        "NaN is not the greatest", "csrc/cpu/route.c", "|| (isnan(a) && !isnan(b))", "", "tests/test_route.py"
    ),
    Mutant(
        "scores with the bias",
        "csrc/cpu/route.c",
        "score[ids[k]] * factor",
        "choice[ids[k]] * factor",
        "tests/test_route.py",
    ),
    Mutant(
        "a group is worth its best expert",
        "csrc/cpu/route.c",
        "(adds ? choice[g * size + two[1]] : 0)",
        "0",
        "tests/test_route.py",
    ),
    Mutant(
        "norm without the scale",
        "csrc/cpu/route.c",
        "? p->route_scale / sum : p->route_scale; for (int32_t k = 0; k < p->K; k++) v->set",
        "? 1 / sum : p->route_scale; for (int32_t k = 0; k < p->K; k++) v->set",
        "tests/test_route.py",
    ),
    Mutant(
        "norm's gradient without its shift",
        "csrc/cpu/route.c",
        "- shift) * factor",
        ") * factor",
        "tests/test_route.py",
    ),
    Mutant(
        "softmax's gradient without its mean",
        "csrc/cpu/route.c",
        "(dscore[e] - mean) * score[e]",
        "dscore[e] * score[e]",
        "tests/test_route.py",
    ),
    Mutant(
        "scores of padding are left",
        "csrc/cpu/route.c",
        "v->set(p->scores, t * p->K + k, 0);",
        ";",
        "tests/test_padding.py",
    ),
    Mutant(
        "a negative number of tokens is all of them",
        "csrc/integer.h",
        "return num < 0 ? 0 : num < T ? num : T;",
        "return num < 0 ? T : num < T ? num : T;",
        "tests/test_padding.py",
    ),
    Mutant(
        "given ids are cut to 32 bits",
        "csrc/cpu/route.c",
        "int64_t id = integer(p->given_ids",
        "int32_t id = (int32_t)integer(p->given_ids",
        "tests/test_padding.py",
    ),
    Mutant(
        "nothing is chosen for ids that are all -1",
        "csrc/cpu/route.c",
        "is_given |= id != -1;",
        "is_given = true;",
        "tests/test_padding.py",
    ),
    Mutant(
        "barred experts fill the slots that are left",
        "csrc/cpu/route.c",
        "if (!is_allowed(p, ids[k])) ids[k] = -1;",
        ";",
        "tests/test_route.py",
    ),
    Mutant(
        "a NaN score frees a barred expert",
        "csrc/cpu/route.c",
        "choice[e] = is_allowed(p, e) ? choice[e] + p->bias[e] : -INFINITY;",
        "choice[e] += p->bias[e];",
        "tests/test_route.py",
    ),
    Mutant(
        "a remote slot has part in the norm's gradient",
        "csrc/cpu/route.c",
        "if (ids[k] >= 0) shift +=",
        "shift +=",
        "tests/test_padding.py",
    ),
    Mutant(
        "the gradient of padding is computed",
        "csrc/cpu/route.c",
        "if (!has_expert) {",
        "if (false) {",
        "tests/test_padding.py",
    ),
    Mutant(
        "the last of equal ids has all of the gradient",
        "csrc/cpu/route.c",
        "dscore[ids[k]] += (unscaled",
        "dscore[ids[k]] = (unscaled",
        "tests/test_padding.py",
    ),
    # --- route_plan
    Mutant(
        "ids beyond the map are experts",
        "csrc/integer.h",
        "p->expert_map[id] : -1",
        "p->expert_map[id] : id",
        "tests/test_route_plan.py",
    ),
    Mutant(
        "counts without the map",
        "csrc/cpu/route_plan.c",
        "int64_t e = slot_expert(p, slot); if (e >= 0",
        "int64_t e = integer(p->ids, p->ids_dtype, slot); if (e >= 0",
        "tests/test_route_plan.py",
    ),
    Mutant(
        "the sentinel E has a row",
        "csrc/cpu/route_plan.c",
        "if (e < 0 || e >= p->E) continue;",
        "if (e < 0 || e > p->E) continue;",
        "tests/test_route_plan.py",
    ),
    Mutant(
        "row_token is the slot's",
        "csrc/cpu/route_plan.c",
        "(int32_t)(slot / p->K)",
        "(int32_t)(slot % p->K)",
        "tests/test_route_plan.py",
    ),
    Mutant(
        "no -1 past the last row",
        "csrc/cpu/route_plan.c",
        "p->row_slot[row] = p->row_token[row] = -1",
        "p->row_slot[row] = -1",
        "tests/test_route_plan.py",
    ),
    Mutant(
        "offsets are left walked through",
        "csrc/cpu/route_plan.c",
        "p->offsets[e] = p->offsets[e - 1];",
        ";",
        "tests/test_route_plan.py",
    ),
    Mutant(
        "counts may exceed the rows",
        "csrc/cpu/route_plan.c",
        "|| count > p->R - sum",
        "",
        "tests/test_errors.py tests/test_route_plan.py tests/test_operators.py",
    ),
    # --- permute
    Mutant(
        "tail rows are not zeroed",
        "csrc/cpu/permute.c",
        "fm_clear(row, row_bytes);",
        ";",
        "tests/test_permute.py",
    ),
    Mutant(
        "the router's gradient replaces the experts'",
        "csrc/cpu/router_dgrad.c",
        "if (p->accumulate) {",
        "if (false) {",
        "tests/test_experts.py",
    ),
    Mutant(
        "permute loses the last element",
        "csrc/cpu/permute.c",
        "p->row_map.row_token[r]), row_bytes);",
        "p->row_map.row_token[r]), row_bytes - 1);",
        "tests/test_permute.py",
    ),
    Mutant(
        "unpermute takes the next slot's score",
        "csrc/cpu/permute.c",
        "v->axpy(sum, p->scores ? v->get(p->scores, slot) : 1, row, p->D);",
        "v->axpy(sum, p->scores ? v->get(p->scores, slot ^ 1) : 1, row, p->D);",
        "tests/test_permute.py",
    ),
    Mutant(
        "unpermute sums K - 1 rows",
        "csrc/cpu/permute.c",
        "slot < (t + 1) * p->row_map.K; slot++",
        "slot < (t + 1) * p->row_map.K - 1; slot++",
        "tests/test_permute.py",
    ),
    Mutant(
        "shared experts without their gate",
        "csrc/cpu/permute.c",
        "p->shared_gate ? sigmoid(v->get(p->shared_gate, t)) : 1",
        "1",
        "tests/test_permute.py",
    ),
    Mutant(
        "the sum forgets the shared experts",
        "csrc/cpu/permute.c",
        "if (p->shared) {",
        "if (0) {",
        "tests/test_permute.py",
    ),
    Mutant(
        "dshared without the gate",
        "csrc/cpu/permute.c",
        "v->scale(dout, sigmoid(gate), dout, p->D);",
        ";",
        "tests/test_permute.py",
    ),
    Mutant(
        "a derivative of the gate that cancels",
        "csrc/cpu/permute.c",
        "v->dot(row, dout, p->D) * sigmoid(gate) * sigmoid(-gate)",
        "v->dot(row, dout, p->D) * sigmoid(gate) * (1 - sigmoid(gate))",
        "tests/test_permute.py",
    ),
    Mutant(
        "drows without the score",
        "csrc/cpu/permute.c",
        "if (p->scores) v->scale(dout,",
        "if (0) v->scale(dout,",
        "tests/test_permute.py",
    ),
    Mutant(
        "a lost row of dscores",
        "csrc/cpu/permute.c",
        "if (p->dscores) { v->load",
        "if (p->dscores && r != 5) { v->load",
        "tests/test_permute.py",
    ),
    # --- gather
    Mutant(
        "gather reads the next token",
        "csrc/cpu/matrix.c",
        "g->row_token[r] * g->width + col)",
        "g->row_token[r ^ 1] * g->width + col)",
        "tests/test_experts.py",
    ),
    Mutant(
        "one score for all inputs of a tile",
        "csrc/cpu/matrix.c",
        "g->row_slot[r])",
        "g->row_slot[first])",
        "tests/test_experts.py",
    ),
    Mutant(
        "a part of a matrix starts a row late",
        "csrc/cpu/matrix.c",
        "row * m.row_stride + col * m.col_stride); return",
        "(row + (row > 0)) * m.row_stride + col * m.col_stride); return",
        "tests/test_grouped_mm.py",
    ),
    # --- up_gate and its epilogue
    Mutant(
        "w3 reads b1",
        "csrc/cpu/up_gate.c",
        "{&p->w3, p->b3, F, j, n, F + j}",
        "{&p->w3, p->b1, F, j, n, F + j}",
        "tests/test_experts.py",
    ),
    Mutant(
        "up's half is gate's",
        "csrc/cpu/up_gate.c",
        "{&p->w1, p->b1, 2 * F, F + j, n, F + j}",
        "{&p->w1, p->b1, 2 * F, j, n, F + j}",
        "tests/test_experts.py",
    ),
    Mutant(
        "no bias",
        "csrc/cpu/up_gate.c",
        "if (c->bias) v->add(row, s.bias, c->width);",
        "",
        "tests/test_experts.py",
    ),
    Mutant(
        "the first expert's bias",
        "csrc/cpu/up_gate.c",
        "tile.expert * c->weight_rows + c->row",
        "c->row",
        "tests/test_experts.py",
    ),
    Mutant(
        "a of garbage rows is garbage",
        "csrc/cpu/up_gate.c",
        "fm_clear(fm_at(p->a, v->elem_bytes, num_rows * p->F), unused_rows * p->F * v->elem_bytes);",
        "",
        "tests/test_experts.py tests/test_operators.py tests/test_grouped_mlp.py",
    ),
    # --- down_dgrad
    Mutant(
        "dh without the score",
        "csrc/cpu/down_dgrad.c",
        "v->scale(q->sg, score, g_row, n);",
        "v->scale(q->sg, 1, g_row, n);",
        "tests/test_experts.py",
    ),
    Mutant(
        "a_scaled is 3% too large",
        "csrc/cpu/down_dgrad.c",
        "v->scale(q->a, score, q->a, n);",
        "v->scale(q->a, 1.03 * score, q->a, n);",
        "tests/test_experts.py",
    ),
    Mutant(
        "dscores 2% too large",
        "csrc/cpu/down_dgrad.c",
        "row, s.dscore[r]);",
        "row, 1.02 * s.dscore[r]);",
        "tests/test_experts.py",
    ),
    Mutant(
        "dscores without b2",
        "csrc/cpu/down_dgrad.c",
        "if (p->dscores && p->b2) {",
        "if (0) {",
        "tests/test_experts.py",
    ),
    Mutant(
        "dscores of the last columns alone",
        "csrc/cpu/down_dgrad.c",
        "s.dscore[r] += v->dot(g_row",
        "s.dscore[r] = v->dot(g_row",
        "tests/test_experts.py",
    ),
    # --- wgrad and bias_grad
    Mutant(
        "sums begin anew in every block",
        "csrc/cpu/wgrad.c",
        "b, row > first);",
        "b, false);",
        "tests/test_experts.py tests/test_main_grads.py",
    ),
    Mutant(
        "an empty expert's gradient is not zeroed",
        "csrc/cpu/wgrad.c",
        "if (first == end && !p->accumulate) fm_zero(out, dw[part]);",
        "",
        "tests/test_experts.py",
    ),
    Mutant(
        "dw3 from gate's columns",
        "csrc/cpu/wgrad.c",
        "part ? p->M[0] : 0, p->M[part]",
        "0, p->M[part]",
        "tests/test_experts.py",
    ),
    Mutant(
        "a main gradient is overwritten",
        "csrc/cpu/wgrad.c",
        "(p->accumulate ? fm_add : fm_from_accum)",
        "fm_from_accum",
        "tests/test_main_grads.py",
    ),
    Mutant(
        "bias_grad loses a row",
        "csrc/cpu/wgrad.c",
        "r < p->offs[e]; r++",
        "r < p->offs[e] - 1; r++",
        "tests/test_experts.py",
    ),
    Mutant(
        "bias_grad without scores",
        "csrc/cpu/wgrad.c",
        "v->sum(sum, p->scores ? v->get(p->scores, p->row_slot[r]) : 1, row, cols);",
        "v->sum(sum, 1, row, cols);",
        "tests/test_experts.py",
    ),
    # --- grouped_mm
    Mutant(
        "up_dgrad loses gate's part",
        "csrc/cpu/grouped_mm.c",
        "fm_transposed(b), part > 0);",
        "fm_transposed(b), false);",
        "tests/test_experts.py",
    ),
    Mutant(
        "part columns of the first block",
        "csrc/cpu/grouped_mm.c",
        "tile.first_row, tile.num_rows, j, n);",
        "tile.first_row, tile.num_rows, cols.first, n);",
        "tests/test_grouped_mm.py tests/test_experts.py",
    ),
    Mutant(
        "garbage past the last row",
        "csrc/cpu/grouped_mm.c",
        "(p->R - num_rows) * p->M * (int64_t)v->elem_bytes);",
        "0);",
        "tests/test_grouped_mm.py",
    ),
    # --- 8 bits on both operands
    Mutant(
        "8 bits: a has the scales of its first block",
        "csrc/cpu/eight_bit.c",
        "a->scale + k / FUSED_MOE_BLOCK * a->scale_stride",
        "a->scale",
        "tests/test_eight_bit_operator.py",
    ),
    Mutant(
        "8 bits: every column has the first one's scale",
        "csrc/cpu/eight_bit.c",
        "fm_scale(w, e, row + j, k)",
        "fm_scale(w, e, row, k)",
        "tests/test_eight_bit_operator.py",
    ),
    Mutant(
        "8 bits: every block has the first one's scale",
        "csrc/cpu/eight_bit.c",
        "fm_scale(w, e, row + j, k)",
        "fm_scale(w, e, row + j, 0)",
        "tests/test_eight_bit_operator.py",
    ),
    Mutant(
        "8 bits: every expert has the first one's codes",
        "csrc/cpu/eight_bit.c",
        "(e * w->out + row + j) * w->in + k",
        "(row + j) * w->in + k",
        "tests/test_eight_bit_operator.py",
    ),
    Mutant(
        "8 bits: subnormals are rounded as normals",
        "csrc/cpu/eight_bit.c",
        "magnitude < 0x3c800000 ? subnormal : normal",
        "normal",
        "tests/test_eight_bit_operator.py",
    ),
    Mutant(
        "8 bits: e4m3 is truncated",
        "csrc/cpu/eight_bit.c",
        " + 0x7ffff + ((magnitude >> 20) & 1)",
        "",
        "tests/test_eight_bit_operator.py",
    ),
    Mutant(
        "8 bits: int8 is truncated",
        "csrc/cpu/eight_bit.c",
        "(uint8_t)fused_moe_float_bits(x + 0x1.8p23f)",
        "(uint8_t)(int8_t)x",
        "tests/test_eight_bit_operator.py",
    ),
    Mutant(
        "8 bits: every expert is smoothed as the first",
        "csrc/cpu/eight_bit.c",
        "while (p->row_map.offs[e] <= r) e++;",
        "",
        "tests/test_eight_bit_operator.py",
    ),
    Mutant(
        "8 bits: scales of a are not rounded up",
        "csrc/cpu/eight_bit.c",
        "quantize(FUSED_MOE_CODE_E4M3, p->power_of_two,",
        "quantize(FUSED_MOE_CODE_E4M3, false,",
        "tests/test_eight_bit_operator.py",
    ),
    Mutant(
        "8 bits: sums of e4m3 are rounded",
        "csrc/cpu/eight_bit.c",
        "FUSED_MOE_CODE_INT8 ? FUSED_MOE_F32 : FUSED_MOE_F64",
        "FUSED_MOE_CODE_INT8 ? FUSED_MOE_F32 : FUSED_MOE_F32",
        "tests/test_eight_bit_operator.py",
    ),
    # --- FP8 training
    # --- which codes a call uses
    Mutant(
        "fp8: kept codes do not see optimizers",
        "fused_moe/fp8_training.py",
        "w.dtype, _optimizer_steps, stream)",
        "w.dtype, 0, stream)",
        "tests/test_enable_fp8.py",
    ),
    Mutant(
        "fp8: kept codes do not see versions",
        "fused_moe/fp8_training.py",
        "self.about = (w._version, ",
        "self.about = (",
        "tests/test_enable_fp8.py",
    ),
    Mutant(
        "fp8: kept codes do not see memory",
        "fused_moe/fp8_training.py",
        "self.storage == other.storage and self.about == other.about",
        "self.about[:1] + self.about[2:] == other.about[:1] + other.about[2:]",
        "tests/test_enable_fp8.py",
    ),
    Mutant(
        "fp8: codes of DTensors are kept",
        "fused_moe/fp8_training.py",
        "if fp8.keep_codes and any(",
        "if False and any(",
        "tests/test_distributed.py -k keeps_no_codes",
    ),
    Mutant(
        "fp8: traces have kept codes",
        "fused_moe/fp8_training.py",
        " or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack():",
        ":",
        "tests/test_enable_fp8.py",
    ),
    Mutant(
        "fp8: kept codes are used without gradients",
        "fused_moe/fp8_training.py",
        "if not needs_grad:",
        "if not needs_grad and not self.keep_codes:",
        "tests/test_enable_fp8.py",
    ),
    Mutant(
        "fp8: codes are kept in copies of a layer",
        "fused_moe/fp8_training.py",
        'return self.__dict__ | {"_kept": None}',
        "return dict(self.__dict__)",
        "tests/test_enable_fp8.py",
    ),
    Mutant(
        "fp8: codes of gathered weights outlive the call",
        "fused_moe/fp8_training.py",
        "for_backward=not self.is_gathered",
        "for_backward=True",
        "tests/test_distributed.py -k in_fp8",
    ),
    Mutant(
        "fp8: rows past the last expert's are its own",
        "fused_moe/function.py",
        "row, right=True).unsqueeze(1)",
        "row, right=True).clamp_max(counts.size(0) - 1).unsqueeze(1)",
        "tests/test_enable_fp8.py",
    ),
    Mutant(
        "fp8: a row block has the scale of its first columns",
        "csrc/cpu/fp8_training.c",
        "scale[(p->scale_is_of_b ? n + c : m) / BLOCK]",
        "scale[0]",
        "tests/test_fp8_bits.py",
    ),
    Mutant(
        "fp8: every expert has the first one's row blocks",
        "csrc/cpu/fp8_training.c",
        "first_block + b, m, n, cols, &s",
        "b, m, n, cols, &s",
        "tests/test_fp8_bits.py",
    ),
    Mutant(
        "fp8: the last row block is left out",
        "csrc/cpu/fp8_training.c",
        "b < fm_blocks(num_rows, BLOCK); b++",
        "b < num_rows / BLOCK; b++",
        "tests/test_fp8_bits.py",
    ),
    Mutant(
        "fp8: a row of a block does not count for its scale",
        "csrc/cpu/fp8_training.c",
        "uint32_t peak = 0; for (int64_t r = 0; r < block.num_rows",
        "uint32_t peak = 0; for (int64_t r = 1; r < block.num_rows",
        "tests/test_fp8_bits.py",
    ),
    Mutant(
        "fp8: codes by columns without the other operand's scale",
        "csrc/cpu/fp8_training.c",
        "factors[block.first_row + r] * inverse",
        "inverse",
        "tests/test_fp8_bits.py",
    ),
    Mutant(
        "fp8: padding of dh is what the block before had",
        "csrc/cpu/fp8_training.c",
        "clear_past(codes, block.num_rows); for (int64_t r",
        "for (int64_t r",
        "tests/test_fp8_bits.py",
    ),
    Mutant(
        "fp8: padding of x is what the task before had",
        "csrc/cpu/fp8_training.c",
        "clear_past(codes, block.num_rows); for (int64_t j",
        "for (int64_t j",
        "tests/test_fp8_bits.py",
    ),
    Mutant(
        "fp8: tokens have the codes of the first row",
        "csrc/cpu/eight_bit.c",
        "fm_at(p->codes, 1, m->token_row[slot] * p->D)",
        "p->codes",
        "tests/test_fp8_bits.py",
    ),
    Mutant(
        "fp8: a transposed weight has the scales as they were",
        "csrc/cpu/fp8_training.c",
        "p->scale_t[(e * n_blocks + n_block) * m_blocks + m_block]",
        "p->scale_t[(e * m_blocks + m_block) * n_blocks + n_block]",
        "tests/test_fp8_training.py::test_weights_made_once",
    ),
    Mutant(
        "fp8: dh by rows is made where x needs no gradient",
        "csrc/torch/fp8_training.cpp",
        "if (need_dlink) {",
        "if (need_dlink || need_dlink_t) {",
        "tests/test_fp8_training.py::test_what_is_not_needed_is_not_made",
    ),
    Mutant(
        "fp8: dh by columns is made where w1 and w3 need no gradient",
        "csrc/torch/fp8_training.cpp",
        "if (need_dlink_t) {",
        "if (need_dlink_t || need_dlink) {",
        "tests/test_fp8_training.py::test_what_is_not_needed_is_not_made",
    ),
    Mutant(
        "fp8: backward makes both orders of a weight",
        "fused_moe/ops.py",
        "second, layout, TRANSPOSED)",
        "second, layout)",
        "tests/test_fp8_training.py::test_backward_quantises_again",
    ),
    Mutant(
        "fp8: dx alone makes dw1 and dw3",
        "fused_moe/function.py",
        "of_weights = (x.detach(), w1, w3,",
        "of_weights = (x, w1, w3,",
        "tests/test_fp8_training.py::test_what_is_not_asked_for_is_not_made",
    ),
    Mutant(
        "fp8: a chunk of columns takes all that bf16 has",
        "csrc/rules.h",
        "room = peak - (of_dw2 ? in_dw2 : in_dw1);",
        "room = peak;",
        "tests/test_rules.py",
    ),
    Mutant(
        "split-K slices of part of a k-tile",
        "csrc/schedule.h",
        "if (slices * slice_rows % k_tile) slices++;",
        "if (slices * slice_rows % (k_tile / 2)) slices++;",
        "tests/test_host.py::test_split_k_slices_are_whole_row_blocks",
    ),
    Mutant(
        "fp8: every chunk of a weight gradient is the first",
        "csrc/torch/fp8_training.cpp",
        "w.data = (char *)w.data + of_x.first * w.stride_in * elem_bytes;",
        ";",
        "tests/test_fp8_bits.py",
    ),
    Mutant(
        "fp8: interleaved rows of a gradient are halves",
        "csrc/torch/fp8_training.cpp",
        "grad.part[i].stride_out = 2 * dw1.stride_out;",
        "",
        "tests/test_fp8_bits.py",
    ),
    # --- quantised weights, LoRA
    Mutant(
        "subnormal e4m3 codes are zero",
        "csrc/cpu/quantized.c",
        "(float)magnitude * 0x1p-9f",
        "0.0f",
        "tests/test_quantized.py",
    ),
    Mutant(
        "a scale of 255 is infinite",
        "csrc/cpu/quantized.c",
        "if (code == 255) return NAN;",
        "",
        "tests/test_quantized.py",
    ),
    Mutant(
        "int4 is unsigned",
        "csrc/cpu/quantized.c",
        "(float)((pairs[i] & 15) - 8);",
        "(float)(pairs[i] & 15);",
        "tests/test_quantized.py",
    ),
    Mutant(
        "every expert has the first one's scales",
        "csrc/cpu/quantized.c",
        "(e * row_blocks + row / w->block_out)",
        "(row / w->block_out)",
        "tests/test_quantized.py",
    ),
    Mutant(
        "values are not rounded",
        "csrc/cpu/quantized.c",
        "v->round(accum, n);",
        "",
        "tests/test_quantized.py",
    ),
    Mutant(
        "a transposed weight's first columns",
        "csrc/cpu/matrix.c",
        "fm_dequantize(v, w->quantized, e, col, cols, row, rows, buffer)",
        "fm_dequantize(v, w->quantized, e, col, cols, 0, rows, buffer)",
        "tests/test_quantized.py",
    ),
    Mutant(
        "half of a code is away from even",
        "fused_moe/quantized/formats.py",
        "torch.where(down % 2 == 0, down, up)",
        "up",
        "tests/test_quantized.py",
    ),
    Mutant(
        "hooks of quantised weights are passed over",
        "fused_moe/quantized/weight.py",
        "return _called(w) if is_altered(w) else w",
        "return w",
        "tests/test_offload.py",
    ),
    Mutant(
        "a policy casts shards",
        "fused_moe/quantized/weight.py",
        "if not (shards.is_floating_point() and sharding.TAKES_INTEGERS):",
        "if True:",
        "tests/test_distributed.py",
    ),
    Mutant(
        "loading leaves shards of tiles as they were",
        "fused_moe/quantized/weight.py",
        "self._local()._tile(_of_tensors(self, before)._local()._parameters)",
        "pass",
        "tests/test_distributed.py",
    ),
    Mutant(
        "the second packing stays beside shards",
        "fused_moe/quantized/weight.py",
        "self._drop_kept() if self.is_tiled and",
        "if self.is_tiled and",
        "tests/test_distributed.py",
    ),
    Mutant(
        "released adapters are read",
        "fused_moe/lora.py",
        "if is_altered(self):",
        "if False:",
        "tests/test_offload.py",
    ),
    Mutant(
        "a dtype casts codes",
        "fused_moe/quantized/weight.py",
        "return tensor.detach().to(found.device)",
        "return found",
        "tests/test_quantized.py",
    ),
    Mutant(
        "codes of two columns change places in tiles",
        "fused_moe/quantized/tiles.py",
        "(first >> 4) | (second & 240)",
        "(second >> 4) | (first & 240)",
        "tests/test_tiles.py",
    ),
    Mutant(
        "loading leaves the tiles that a CUDA graph reads",
        "fused_moe/quantized/weight.py",
        "out = _if_on(tensor.device, before.get(names[key]))",
        "out = None",
        "tests/test_tiles.py",
    ),
    Mutant(
        "loading leaves the second packing as it was",
        "fused_moe/quantized/weight.py",
        "if wanted and (is_loaded or not self._kept):",
        "if wanted and not self._kept:",
        "tests/test_tiles.py",
    ),
    Mutant(
        "tiles that are written in place leave the second packing as it was",
        "fused_moe/quantized/weight.py",
        "if any(write_state(tensor) != state for",
        "if any(write_state(tensor) < state for",
        "tests/test_tiles.py",
    ),
    Mutant(
        "scales of two column pairs change places in the second packing",
        "fused_moe/quantized/tiles.py",
        "permute(0, 1, 2, 5, 3, 4, 6)",
        "permute(0, 1, 2, 5, 4, 3, 6)",
        "tests/test_tiles.py",
    ),
    Mutant(
        "experts hold tiles and the parameters that they were made of",
        "fused_moe/transformers/weights.py",
        "own.pop(name + part) for part",
        "own[name + part] for part",
        "tests/test_transformers_quantized.py",
    ),
    Mutant(
        "every row has the first one's ups",
        "csrc/cpu/activate.c",
        "fm_at(up, v->elem_bytes, r * F)}",
        "fm_at(up, v->elem_bytes, 0)}",
        "tests/test_activate.py",
    ),
    Mutant(
        "every block of columns has the first one's da",
        "csrc/cpu/activate.c",
        "v->load(s.da, fm_at(p->da, v->elem_bytes, r * p->F + j), n);",
        "v->load(s.da, fm_at(p->da, v->elem_bytes, r * p->F), n);",
        "tests/test_activate.py",
    ),
    Mutant(
        "scores on the input are lost",
        "fused_moe/composed.py",
        "rows = _scored(rows, scores, plan)",
        "pass",
        "tests/test_quantized.py",
    ),
    Mutant(
        "adapters without their scale",
        "fused_moe/composed.py",
        "rows, a, offsets) * scale",
        "rows, a, offsets)",
        "tests/test_lora.py",
    ),
    Mutant(
        "h is rounded before the activation where it is kept",
        "csrc/cpu/up_gate.c",
        "if (p->h) v->store(fm_at(p->h, v->elem_bytes, in_h), row, c->width);",
        "if (p->h) v->store(fm_at(p->h, v->elem_bytes, in_h), row, c->width), "
        "v->load(row, fm_at(p->h, v->elem_bytes, in_h), c->width);",
        "tests/test_quantized_bits.py",
    ),
    Mutant(
        "adapters of the up read the gate's ranks",
        "fused_moe/composed.py",
        "F.pad(b3, (b1.size(2), 0))",
        "F.pad(b3, (0, b1.size(2)))",
        "tests/test_quantized_bits.py",
    ),
    Mutant(
        "adapters are skipped by the joint operator",
        "fused_moe/routed.py",
        "experts.lora is not None or ",
        "",
        "tests/test_lora.py",
    ),
    Mutant(
        "auto takes codes for any number of rows",
        "fused_moe/quantized/computing.py",
        "return num_rows <= AUTO_ROWS * num_experts",
        "return True",
        "tests/test_eight_bits.py",
    ),
    Mutant(
        "the factors of x and of a change places",
        "fused_moe/quantized/quantizing.py",
        'factors = smooth2 if name == "w2" else smooth1',
        'factors = smooth1 if name == "w2" else smooth2',
        "tests/test_eight_bits.py",
    ),
    Mutant(
        "x is divided by what codes were not multiplied by",
        "fused_moe/quantized/formats.py",
        "one if smooth is None else one * smooth[part].unsqueeze(1)",
        "one",
        "tests/test_eight_bits.py",
    ),
    Mutant(
        "8 bits with a smooth of their own are taken for codes",
        "fused_moe/quantized/computing.py",
        'if mode != "int8_smooth" and w._smooth() is not None:',
        "if False:",
        "tests/test_eight_bits.py",
    ),
    Mutant(
        "experts without tokens have factors of no tokens",
        "fused_moe/quantized/smoothing.py",
        "torch.where(has_tokens, _normalised(measured), from_weights(*weights))",
        "_normalised(measured)",
        "tests/test_eight_bits.py",
    ),
    Mutant(
        "each expert has the factors of the next one",
        "fused_moe/quantized/smoothing.py",
        "peaks[:-1].pow(alpha) / _column_peaks(weights)",
        "peaks[1:].pow(alpha) / _column_peaks(weights)",
        "tests/test_eight_bits.py",
    ),
    Mutant(
        "8 bits keep tiles",
        "fused_moe/quantized/weight.py",
        'self.compute in ("codes", "auto")',
        "True",
        "tests/test_eight_bits.py",
    ),
    # --- arithmetic of rows, activations
    Mutant(
        "bf16 is truncated",
        "csrc/cpu/rows.c",
        "(bits + 0x7fff + ((bits >> 16) & 1)) >> 16",
        "bits >> 16",
        "tests/test_experts.py",
    ),
    Mutant(
        "a dot product loses its tail",
        "csrc/cpu/rows_accum.h",
        "for (int l = 0; i < n; i++, l++) lane[l]",
        "for (int l = 0; i < n - 1; i++, l++) lane[l]",
        "tests/test_permute.py",
    ),
    Mutant(
        "up's derivative has no gate",
        "csrc/cpu/rows_accum.h",
        "ACCUM_NAME(chain)(da[i] * f.value, m);",
        "ACCUM_NAME(chain)(da[i], m);",
        "tests/test_experts.py",
    ),
    Mutant(
        "silu's derivative is the sigmoid",
        "csrc/activation.h",
        "s + x * s * (1 - s)",
        "s",
        "tests/test_experts.py",
    ),
    Mutant(
        "gelu's density is 3% too large",
        "csrc/activation.h",
        "0.39894228040143267794",
        "0.411",
        "tests/test_experts.py",
    ),
    Mutant(
        "gelu_tanh's cubic term",
        "csrc/activation.h",
        "(accum_t)0.044715;",
        "(accum_t)0.04;",
        "tests/test_experts.py",
    ),
    Mutant(
        "relu's derivative at zero",
        "csrc/activation.h",
        "KINKED(x < 0 ? 0 : x, 1, x <= 0)",
        "KINKED(x < 0 ? 0 : x, 1, x < 0)",
        "tests/test_experts.py tests/test_gradcheck.py",
    ),
    Mutant(
        "NaN passes the flat side of a kink",
        "csrc/activation.h",
        "p.flat ? 0 : d * p.derivative",
        "d * (p.flat ? 0 : p.derivative)",
        "tests/test_experts.py",
    ),
    Mutant(
        "scores are read through any row_slot",
        "csrc/cpu/wgrad.c",
        "fm_map_is_valid(row_token, n, 0, T) && fm_map_is_valid(row_slot, n, 0, T * K)",
        "fm_map_is_valid(row_token, n, 0, T)",
        "tests/test_raw_operators.py",
    ),
    Mutant(
        "up is clamped from above alone",
        "csrc/activation.h",
        "u < -c.limit ? -c.limit : u",
        "u",
        "tests/test_experts.py",
    ),
    # --- the tile schedule, shared with the kernels
    Mutant(
        "an expert of 64 rows is full",
        "csrc/schedule.h",
        "E, FUSED_MOE_SKINNY_ROWS + 1, INT32_MAX, tile_rows",
        "E, FUSED_MOE_SKINNY_ROWS, INT32_MAX, tile_rows",
        "tests/test_host.py tests/test_schedule.py tests/test_route_plan.py",
    ),
    Mutant(
        "the last tile has a full tile's rows",
        "csrc/schedule.h",
        "rows.num - done < order->tile_rows ? rows.num - done : order->tile_rows",
        "order->tile_rows",
        "tests/test_host.py tests/test_experts.py",
    ),
    Mutant(
        "no expert has a part tile",
        "csrc/schedule.h",
        "rows ? (rows - 1) / tile_rows + 1 : 1",
        "rows >= tile_rows ? rows / tile_rows : 1",
        "tests/test_host.py tests/test_experts.py",
    ),
    Mutant(
        "halves of the last wave overlap",
        "csrc/schedule.h",
        "1 + (int32_t)(half % 2)",
        "1",
        "tests/test_host.py",
    ),
    Mutant(
        "both tall tiles of a pair have its left half",
        "csrc/schedule.h",
        "1 + row_tile % 2",
        "1",
        "tests/test_host.py",
    ),
    Mutant(
        "a short second row tile makes a tall one, too",
        "csrc/schedule.h",
        "rows.num - done <= tall * 3 / 4",
        "rows.num - done <= order->tile_rows",
        "tests/test_host.py",
    ),
    Mutant(
        "few slots of one expert share a row",
        "csrc/slot_plan.h",
        "row += plan->key[i] < key",
        "row += plan->key[i] / FUSED_MOE_FEW_SLOTS < key / FUSED_MOE_FEW_SLOTS",
        "tests/test_host.py",
    ),
    Mutant(
        "experts of three rows have tiles of 16",
        "csrc/rules.h",
        "R <= 2 * E ? 16",
        "R <= 3 * E ? 16",
        "tests/test_rules.py",
    ),
    Mutant(
        "experts of 33 rows are one launch",
        "csrc/rules.h",
        "R > 32 * E",
        "R > 33 * E",
        "tests/test_rules.py",
    ),
    Mutant(
        "the signs of a tile's mxfp4 codes are read from other bits",
        "csrc/quantized_tile.h",
        "0xecdf",
        "0xecfd",
        "tests/test_tiles.py",
    ),
    Mutant(
        "a token's slots are in two CTAs of a cluster",
        "csrc/rules.h",
        "int64_t together = chooses ? K : 1, parts = chooses ? T : T * K;",
        "int64_t together = 1, parts = T * K;",
        "tests/test_rules.py",
    ),
    Mutant(
        "experts of several slices are not summed up",
        "csrc/schedule.h",
        "int32_t end = sum + fused_moe_inclusive_sum(slices);",
        "int32_t end = fused_moe_inclusive_sum(slices);",
        "tests/test_host.py",
    ),
    Mutant(
        "a thief steals from another CTA",
        "csrc/schedule.h",
        "if (left > most) most = left;",
        "most = left;",
        "tests/test_host.py",
    ),
    Mutant(
        "a CTA has the same place in every wave",
        "csrc/schedule.h",
        "(cta + wave) % ctas",
        "cta",
        "tests/test_host.py",
    ),
    # --- Python
    Mutant(
        "main_grad and .grad",
        "fused_moe/ops.py",
        "if getattr(need, name) and main_grad is None}",
        "if getattr(need, name)}",
        "tests/test_main_grads.py",
    ),
    Mutant(
        "autograd.grad of x adds to a main_grad",
        "fused_moe/main_grad.py",
        "_answer(edges[i][0]) is not False",
        "True",
        "tests/test_main_grads.py",
    ),
    Mutant(
        "grouped_mm's gradient has no transpose",
        "fused_moe/ops.py",
        "run(ops.grouped_mm.default, a, dw.mT, offsets)",
        "run(ops.grouped_mm.default, a, dw.mT.mT, offsets)",
        "tests/test_grouped_mm.py tests/test_gradcheck.py",
    ),
    Mutant(
        "autocast casts a alone",
        "fused_moe/ops.py",
        'autocast=("a", "b", "bias"),',
        'autocast=("a",),',
        "tests/test_autocast.py",
    ),
    Mutant(
        "h is always kept",
        "fused_moe/function.py",
        "*settings, needs_grad, *main_up)",
        "*settings, True, *main_up)",
        "tests/test_memory.py",
    ),
    Mutant(
        "scores on the input, too",
        "fused_moe/function.py",
        "b2, None if on_input else scores)",
        "b2, scores)",
        "tests/test_experts.py",
    ),
    Mutant(
        "the load bias goes the wrong way",
        "fused_moe/expert_bias.py",
        "torch.sign(shortfall)",
        "torch.sign(-shortfall)",
        "tests/test_module.py",
    ),
    Mutant(
        "the load bias drifts",
        "fused_moe/expert_bias.py",
        "(delta - delta.mean()).to(bias.device)",
        "delta.to(bias.device)",
        "tests/test_module.py",
    ),
    Mutant(
        "dx without the router's part",
        "fused_moe/routed.py",
        "*up, *of_router)",
        "*up)",
        "tests/test_routed.py",
    ),
    Mutant(
        "the router's hooks are passed over",
        "fused_moe/routed.py",
        "map(is_altered, (router, gate, experts))",
        "map(is_altered, (gate, experts))",
        "tests/test_routed.py",
    ),
    Mutant(
        "padding reaches the gate's gradient",
        "fused_moe/module.py",
        "if is_recording() or type(router)",
        "if type(router)",
        "tests/test_padding.py",
    ),
    Mutant(
        "a foreign gate sees padding",
        "fused_moe/module.py",
        "type(gate) is not Gate or is_altered(gate) or not linear_fits(",
        "not linear_fits(",
        "tests/test_padding.py",
    ),
    Mutant(
        "shared experts' biases reach padding",
        "fused_moe/module.py",
        "return zero_padding(shared if gate is None else _gated(gate(x), shared), num_tokens)",
        "return shared if gate is None else _gated(gate(x), shared)",
        "tests/test_padding.py",
    ),
    Mutant(
        "the shared experts' gate of padding",
        "fused_moe/module.py",
        "return shared, None if logits is None else zero_padding(logits, num_tokens)",
        "return shared, logits",
        "tests/test_padding.py",
    ),
    Mutant(
        "shared experts join hooked experts",
        "fused_moe/module.py",
        "if type(experts) is not Experts or is_altered(experts):",
        "if type(experts) is not Experts:",
        "tests/test_shared.py",
    ),
    Mutant(
        "shared experts are added twice",
        "fused_moe/module.py",
        "if self.shared_experts is not None and not combines:",
        "if self.shared_experts is not None:",
        "tests/test_shared.py",
    ),
    Mutant(
        "shared experts compute padding",
        "fused_moe/module.py",
        "counts = num_tokens.reshape(1).clamp(0, x.size(0))",
        "counts = torch.full_like(num_tokens.reshape(1), x.size(0))",
        "tests/test_padding.py",
    ),
    Mutant(
        "the shares of a batch with padding",
        "fused_moe/losses.py",
        "tokens = real.reshape(num_sequences, length).sum(1, keepdim=True)",
        "tokens = flat.new_full((num_sequences, 1), length)",
        "tests/test_padding.py",
    ),
    Mutant(
        "the losses' gradients see padding",
        "fused_moe/losses.py",
        "return _zeroed(logits.reshape(-1, logits.size(-1)), real)",
        "return logits.reshape(-1, logits.size(-1))",
        "tests/test_padding.py",
    ),
    Mutant(
        "padded rows get a bias of latent_up",
        "fused_moe/module.py",
        'zero_padding(_linear(self.latent_up, out), given.get("num_tokens"))',
        "_linear(self.latent_up, out)",
        "tests/test_latent.py",
    ),
    Mutant(
        "a foreign latent_down sees padding",
        "fused_moe/module.py",
        "if self.latent_down is not None: return False",
        "if False: return False",
        "tests/test_latent.py",
    ),
    Mutant(
        "balance sums over all ranks, not the group",
        "fused_moe/expert_bias.py",
        "dist.all_reduce(loads, group=group)",
        "dist.all_reduce(loads)",
        "tests/test_distributed.py",
    ),
    Mutant(
        "a model's report shows the most balanced layers",
        "fused_moe/balance.py",
        "rows = [max(rows[i : i + folded], key=_imbalance)",
        "rows = [min(rows[i : i + folded], key=_imbalance)",
        "tests/test_balance.py",
    ),
    Mutant(
        "masked tokens are in the load of the loss",
        "fused_moe/losses.py",
        "has_expert = has_expert & real.unsqueeze(1)",
        "has_expert = has_expert",
        "tests/test_losses.py",
    ),
    Mutant(
        "sequences without tokens are in the mean",
        "fused_moe/losses.py",
        "(tokens > 0).sum().clamp_min(1)",
        "max(num_sequences, 1)",
        "tests/test_losses.py",
    ),
    Mutant(
        "a micro-batch is twice in the load of its loss",
        "fused_moe/module.py",
        'scope["load"] = load - counts if self.training else load',
        'scope["load"] = load',
        "tests/test_module.py",
    ),
    Mutant(
        "a rank's loss is not scaled to the batch of all",
        "fused_moe/losses.py",
        "scale = num_experts * group.size()",
        "scale = num_experts",
        "tests/test_distributed.py",
    ),
    Mutant(
        "one operator of experts forgets the map",
        "fused_moe/function.py",
        "experts.default, *operands, *settings, expert_map, *shared)",
        "experts.default, *operands, *settings, None, *shared)",
        "tests/test_experts.py",
    ),
]

CUDA = [
    # --- common: every tier
    Mutant(
        "cuda: a span counts a slot too many",
        "csrc/kernels/common/route_plan.cu",
        "counts[e] = 0; __syncthreads();",
        "counts[e] = e == 3; __syncthreads();",
        "tests/test_route_plan.py",
    ),
    Mutant(
        "cuda: counts are not clamped",
        "csrc/kernels/common/route_plan.cu",
        "end = max((int64_t)0, min(end, s.R));",
        "",
        "tests/cuda/test_misuse.py",
    ),
    Mutant(
        "cuda: scores of padding are a real token's",
        "csrc/kernels/common/choose.cuh",
        "has_expert &= token < num_tokens;",
        "",
        "tests/test_padding.py",
    ),
    Mutant(
        "cuda: the gradient of padding is computed",
        "csrc/kernels/common/route.cu",
        "if (!has_expert) {",
        "if (false) {",
        "tests/test_padding.py",
    ),
    Mutant(
        "cuda: counts without the map",
        "csrc/kernels/common/route_plan.cu",
        "if (slot >= end) return -1; int64_t e = slot_expert(&s.p, slot);",
        "if (slot >= end) return -1; int64_t e = integer(s.p.ids, s.p.ids_dtype, slot);",
        "tests/test_route_plan.py",
    ),
    Mutant(
        "cuda: permute leaves tail rows",
        "csrc/kernels/common/permute.cu",
        "((Unit *)p.rows)[r * p.D + j] = Unit{};",
        ";",
        "tests/test_permute.py",
    ),
    Mutant(
        "cuda: unpermute without scores",
        "csrc/kernels/common/permute.cu",
        "has_row && scores ? scores[k0 + k] : Acc(has_row)",
        "Acc(has_row)",
        "tests/test_permute.py",
    ),
    Mutant(
        "cuda: shared experts without their gate",
        "csrc/kernels/common/combine.cuh",
        "return shared_gate ? sigmoid(((const Acc *)shared_gate)[t]) : Acc(1);",
        "return Acc(1);",
        "tests/cuda/test_unpermute.py",
    ),
    Mutant(
        "cuda: every column gets the shared experts' first ones",
        "csrc/kernels/common/permute.cu",
        "(const uint4 *)p.shared + (t * (int64_t)chunks + chunk)",
        "(const uint4 *)p.shared + (t * (int64_t)chunks + lane)",
        "tests/cuda/test_unpermute.py",
    ),
    Mutant(
        "cuda: the sum of more than 32 slots forgets the shared experts",
        "csrc/kernels/common/permute.cu",
        "if (p.shared) {",
        "if (false) {",
        "tests/cuda/test_unpermute.py",
    ),
    Mutant(
        "cuda: few tokens lose every second eight of their slots",
        "csrc/kernels/common/permute.cu",
        "for (uint32_t k = 0; k < K; k += ROWS) {",
        "for (uint32_t k = 0; k < K; k += few_tokens ? 2 * ROWS : ROWS) {",
        "tests/cuda/test_unpermute.py",
    ),
    Mutant(
        "cuda: drows without the score",
        "csrc/kernels/common/permute.cu",
        "for (int c = 0; c < CHUNK; c++) dout[c] *= score;",
        "for (int c = 0; c < CHUNK; c++) dout[c] *= 1;",
        "tests/test_permute.py",
    ),
    Mutant(
        "cuda: bias_grad loses a warp's rows",
        "csrc/kernels/common/bias_grad.cu",
        "for (int i = 1; i < WARPS; i++)",
        "for (int i = 2; i < WARPS; i++)",
        "tests/test_experts.py",
    ),
    Mutant(
        "cuda: every row has the first one's ups",
        "csrc/kernels/common/activate.cu",
        "? up + r * F : gates + F;",
        "? up : gates + F;",
        "tests/test_activate.py",
    ),
    Mutant(
        "cuda: chunks past a row's end are in the same row",
        "csrc/kernels/common/activate.cu",
        "chunk.row = row + in_row / row_chunks;",
        "chunk.row = row;",
        "tests/test_activate.py",
    ),
    Mutant(
        "cuda: dscores without b2",
        "csrc/kernels/common/dscores.cu",
        "if constexpr (LANES == 32) {",
        "if constexpr (false) {",
        "tests/test_experts.py",
    ),
    # --- sm80
    Mutant(
        "sm80: a main gradient is overwritten",
        "csrc/kernels/sm80/wgrad.cu",
        "v[c] += old.v[c];",
        "v[c] += 0;",
        "tests/test_main_grads.py",
    ),
    Mutant(
        "sm80: a full tile of few rows loses its last row",
        "csrc/kernels/sm80/tile_scheduler.cuh",
        "FUSED_MOE_BROADCAST(expert_rows.num, owner) - done, rows);",
        "FUSED_MOE_BROADCAST(expert_rows.num, owner) - done, rows - 1);",
        "tests/cuda/test_sm80_few_rows.py",
    ),
    Mutant(
        "sm80: columns of few rows are read past the swizzle",
        "csrc/kernels/sm80/few_rows_tile.cuh",
        "((address + stage_offset) ^ group * 16 * SIZE)",
        "((address + stage_offset) + group * 16 * SIZE)",
        "tests/cuda/test_sm80_few_rows.py",
    ),
    Mutant(
        "sm90: subtiles of 8 bits have the scale of the first one",
        "csrc/kernels/sm90/eight_bit.cuh",
        "(tile.first_column + SUBTILE * subtile)",
        "tile.first_column",
        "tests/cuda/test_eight_bit_tiles.py::test_every_layout",
    ),
    Mutant(
        "sm90: a's scale is of half of its columns",
        "csrc/kernels/sm90/eight_bit_up_gate.cu",
        "peak = max_nan_f32(peak, __shfl_xor_sync(~0u, peak, 2));",
        "",
        "tests/cuda/test_eight_bit_tiles.py::test_every_layout",
    ),
    Mutant(
        "sm90: rows of codes are zeroed as rows of 16 bits",
        "csrc/kernels/sm90/eight_bit_up_gate.cu",
        "Config::IN_BLOCKS ? p.F / 2 : p.F);",
        "p.F);",
        "tests/cuda/test_eight_bit_tiles.py::test_rows_past_the_last_one",
    ),
    Mutant(
        "sm80: int8 weights always have a scale per row",
        "csrc/kernels/sm80/eight_bit.cu",
        "scale[has_row_scales ? expert * out + row : expert]",
        "scale[expert * out + row]",
        "tests/cuda/test_eight_bit_portable.py",
    ),
    Mutant(
        "sm80: ups have the scales of the gates",
        "csrc/kernels/sm80/eight_bit.cu",
        "ups.scale_of(w.tile.expert, up_row)",
        "ups.scale_of(w.tile.expert, row)",
        "tests/cuda/test_eight_bit_portable.py",
    ),
    Mutant(
        "sm80: int8 rows have the scale of the tile's first row",
        "csrc/kernels/sm80/eight_bit.cu",
        "p.a_scale[w.tile.first_row + row]",
        "p.a_scale[w.tile.first_row]",
        "tests/cuda/test_eight_bit_portable.py",
    ),
    Mutant(
        "sm80: wgrad loses an expert's last row",
        "csrc/kernels/sm80/wgrad.cu",
        "num_rows = rows.num;",
        "num_rows = max(0, rows.num - 1);",
        "tests/test_experts.py",
    ),
    # --- sm90
    Mutant(
        "sm90: half of the swizzle",
        "csrc/kernels/common/tensor_map.cuh",
        "16 * (chunk ^ row % 8)",
        "16 * (chunk ^ row % 4)",
        "tests/cuda/test_sm90_up_gate.py",
    ),
    Mutant(
        "sm90: the gather reads past k",
        "csrc/kernels/sm90/rows.cuh",
        "TILE_K * j < left && (",
        "(",
        "tests/cuda/test_sm90_up_gate.py",
    ),
    Mutant(
        "sm90: skinny experts of 33 rows lose some",
        "csrc/kernels/sm90/config.cuh",
        "using Tokens = std::integer_sequence<int, 8, 32, 64>;",
        "using Tokens = std::integer_sequence<int, 8, 32>;",
        "tests/cuda/test_sm90_grouped_mm.py",
    ),
    Mutant(
        "sm90: the last subtile is not flushed",
        "csrc/kernels/sm90/gemm.cuh",
        "if (tile.skinny || num_k_tiles < Epilogue::SUBTILES) epilogue.flush(writer);",
        "if (tile.skinny) epilogue.flush(writer);",
        "tests/cuda/test_sm90_grouped_mm.py",
    ),
    Mutant(
        "sm90: the first k-tile accumulates",
        "csrc/kernels/sm90/mainloop.cuh",
        "wgmma<N, !first.value, A_MAJOR, B_MAJOR>(accumulators, a, b, Operand());",
        "wgmma<N, 1, A_MAJOR, B_MAJOR>(accumulators, a, b, Operand());",
        "tests/cuda/test_sm90_grouped_mm.py",
    ),
    Mutant(
        "sm90: the parts of a cut tile begin at its first row",
        "csrc/kernels/sm90/tile_queue.cuh",
        "rows -= part, tile.first_row += part",
        "rows -= part",
        "tests/cuda/test_sm90_grouped_mm.py",
    ),
    Mutant(
        "sm90: the last part of a cut tile is as high as the others",
        "csrc/kernels/sm90/tile_queue.cuh",
        "tile.num_rows = rows; } fn(tile);",
        "} fn(tile);",
        "tests/cuda/test_sm90_grouped_mm.py",
    ),
    Mutant(
        "sm90: a tile of few rows loses those past wgmma's N",
        "csrc/kernels/sm90/config.cuh",
        "if (rows > N) return with_first_of",
        "if (rows > 2 * N) return with_first_of",
        "tests/cuda/test_sm90_grouped_mm.py",
    ),
    Mutant(
        "sm90: every CTA of a cluster has the first one's rows",
        "csrc/kernels/sm90/cluster_plan.cu",
        "if (cta < blockIdx.x) earlier += count;",
        "",
        "tests/cuda/test_cluster_plan.py",
    ),
    Mutant(
        "sm90: all chunks of a span begin at the same rows",
        "csrc/kernels/sm90/cluster_plan.cu",
        "s.chunk_rows[(first + i) * E + e] = (uint16_t)rows;",
        "s.chunk_rows[(first + i) * E + e] = 0;",
        "tests/cuda/test_cluster_plan.py",
    ),
    Mutant(
        "sm90: a cluster's plan has row tiles of 128 rows for any GEMM",
        "csrc/kernels/sm90/cluster_plan.cu",
        "make_schedule(p.schedule, s.ends, p.E, p.T * p.K, p.tile_rows)",
        "make_schedule(p.schedule, s.ends, p.E, p.T * p.K)",
        "tests/cuda/test_one_launch.py",
    ),
    Mutant(
        "sm90: experts past a CTA's threads begin at row 0",
        "csrc/kernels/sm90/cluster_plan.cu",
        "row += before;",
        "",
        "tests/cuda/test_cluster_plan.py",
    ),
    Mutant(
        "sm90: a cluster's plan has no -1 past the last row",
        "csrc/kernels/sm90/cluster_plan.cu",
        "if (slot >= num_rows) p.row_slot[slot] = p.row_token[slot] = -1;",
        "",
        "tests/cuda/test_cluster_plan.py",
    ),
    Mutant(
        "sm90: a cluster counts ids without the map",
        "csrc/kernels/sm90/cluster_plan.cu",
        "int64_t e = slot_expert(&q.plan, span.first_slot + i);",
        "int64_t e = integer(q.plan.ids, q.plan.ids_dtype, span.first_slot + i);",
        "tests/cuda/test_cluster_plan.py",
    ),
    Mutant(
        "sm90: up_gate without the up bias",
        "csrc/kernels/sm90/up_gate.cuh",
        "if (bias_up) add_bias(up, bias_up, column, p.F);",
        "",
        "tests/cuda/test_sm90_up_gate.py",
    ),
    Mutant(
        "sm90: the swapped up bias is gate's",
        "csrc/kernels/sm90/up_gate.cuh",
        "add_bias_swapped<TOKENS>(second, bias_up, column, p.F);",
        "add_bias_swapped<TOKENS>(second, bias, column, p.F);",
        "tests/cuda/test_sm90_up_gate.py",
    ),
    Mutant(
        "sm90: interleaved a one column off",
        "csrc/kernels/sm90/up_gate.cuh",
        "__shfl_down_sync(~0u, outputs[n], 4)",
        "__shfl_down_sync(~0u, outputs[n], 8)",
        "tests/cuda/test_sm90_up_gate.py",
    ),
    Mutant(
        "sm90: dh without the score",
        "csrc/kernels/sm90/down_dgrad.cu",
        "da[n] = score * g[n];",
        "da[n] = g[n];",
        "tests/cuda/test_sm90_down_dgrad.py",
    ),
    Mutant(
        "sm90: a_scaled without the score",
        "csrc/kernels/sm90/down_dgrad.cu",
        "dot += g[n] * a[n], a[n] *= score;",
        "dot += g[n] * a[n];",
        "tests/cuda/test_sm90_down_dgrad.py",
    ),
    Mutant(
        "sm90: dscores of the last subtile alone",
        "csrc/kernels/sm90/down_dgrad.cu",
        "dot += g[n] * a[n],",
        "dot = g[n] * a[n],",
        "tests/cuda/test_sm90_down_dgrad.py",
    ),
    Mutant(
        "sm90: down_dgrad leaves tail rows",
        "csrc/kernels/sm90/down_dgrad.cu",
        "if (e.a_scaled) zero_rows_past(gemm.tiles, (T *)e.a_scaled, e.F);",
        "",
        "tests/cuda/test_sm90_down_dgrad.py",
    ),
    Mutant(
        "sm90: an empty expert's gradient is what registers held",
        "csrc/kernels/sm90/wgrad.cu",
        "for (int i = 0; i < 128; i++) d[i] = 0;",
        "for (int i = 0; i < 128; i++) d[i] = 1;",
        "tests/cuda/test_sm90_wgrad.py",
    ),
    Mutant(
        "sm90: an expert's last 16 rows are left out of its gradient",
        "csrc/kernels/sm90/mainloop.cuh",
        "for (; rows > 0; rows -= WGMMA_K",
        "for (; rows > WGMMA_K; rows -= WGMMA_K",
        "tests/cuda/test_sm90_wgrad.py",
    ),
    Mutant(
        "sm90: split-K keeps its last slice alone",
        "csrc/kernels/sm90/wgrad.cu",
        "if (tile.num_slices == 1 || sum_slices(p, tile, wg, d))",
        "if (tile.num_slices == 1 || tile.slice == tile.num_slices - 1)",
        "tests/cuda/test_sm90_wgrad.py",
    ),
    Mutant(
        "sm90: a main gradient is overwritten",
        "csrc/kernels/sm90/wgrad.cu",
        "if (p.accumulate) cp_reduce",
        "if (false) cp_reduce",
        "tests/cuda/test_sm90_wgrad.py",
    ),
    Mutant(
        "sm90: columns' scale of dh without the last warp's rows",
        "csrc/kernels/sm90/quantize_dh.cu",
        "for (int i = 0; i < TILE_WARPS; i++) most",
        "for (int i = 0; i < TILE_WARPS - 1; i++) most",
        "tests/test_fp8_bits.py",
    ),
    Mutant(
        "sm90: columns of ups begin beside those of gates",
        "csrc/kernels/sm90/quantize_dh.cu",
        "copy(p.dh_t, in_dh + n_tiles, UP)",
        "copy(p.dh_t, in_dh + 1, UP)",
        "tests/test_fp8_bits.py",
    ),
    Mutant(
        "sm90: row blocks without rows are left",
        "csrc/kernels/sm90/quantize_dh.cu",
        "clear((uint8_t *)p.dh_t + used * q.H * TILE_ROWS, (next - used) * q.H * TILE_ROWS / 16);",
        "",
        "tests/test_fp8_bits.py",
    ),
    Mutant(
        "sm90: dscores of the last column alone",
        "csrc/kernels/sm90/quantize_dh.cu",
        "dot[i] += g[j] * a[j], a[j] *= score;",
        "dot[i] = g[j] * a[j], a[j] *= score;",
        "tests/cuda/test_sm90_fp8_training.py",
    ),
    Mutant(
        "sm90: of two rows the second's sum is the first's",
        "csrc/kernels/sm90/quantize_dh.cu",
        "sent = has_second ? first : second;",
        "sent = has_second ? second : first;",
        "tests/cuda/test_sm90_fp8_training.py",
    ),
    Mutant(
        "sm90: padding of x is a block's first row",
        "csrc/kernels/sm90/transpose_codes.cu",
        "ld_global_v4(codes + LANE_COLUMNS * chunk, exists)",
        "ld_global_v4(codes + LANE_COLUMNS * chunk, true)",
        "tests/test_fp8_bits.py",
    ),
    Mutant(
        "sm90: a transposed weight has the scales as they were",
        "csrc/kernels/sm90/quantize_weight.cu",
        "q.scale_t[(expert * column_blocks + blockIdx.x) * row_blocks + blockIdx.y]",
        "q.scale_t[(expert * row_blocks + blockIdx.y) * column_blocks + blockIdx.x]",
        "tests/cuda/test_sm90_fp8_training.py",
    ),
    Mutant(
        "sm90: 256 columns of a row block have one scale",
        "csrc/kernels/sm90/eight_bit_wgrad.cu",
        "tile.n / FUSED_MOE_BLOCK + lane / 2",
        "tile.n / FUSED_MOE_BLOCK",
        "tests/test_fp8_bits.py",
    ),
    Mutant(
        "sm90: every slice has the first one's row blocks",
        "csrc/kernels/sm90/eight_bit_wgrad.cu",
        "+ row_in_expert / FUSED_MOE_BLOCK;",
        ";",
        "tests/test_fp8_bits.py",
    ),
    Mutant(
        "sm90: split-K of 8 bits keeps its last slice alone",
        "csrc/kernels/sm90/eight_bit_wgrad.cu",
        "if (tile.num_slices > 1 && !sum_slices(p, tile, wg, d)) continue;",
        "if (tile.num_slices > 1 && tile.slice < tile.num_slices - 1) continue;",
        "tests/test_fp8_bits.py",
    ),
    Mutant(
        "sm90: a main gradient of 8 bits is overwritten",
        "csrc/kernels/sm90/eight_bit_wgrad.cu",
        "if (p.accumulate) cp_reduce",
        "if (false) cp_reduce",
        "tests/test_fp8_bits.py",
    ),
    Mutant(
        "sm90: h that is kept has ups in the place of gates",
        "csrc/kernels/sm90/eight_bit_up_gate.cu",
        "(i / 2) * p.F + first + SUBTILE * (i % 2);",
        "first + SUBTILE * (i % 2);",
        "tests/cuda/test_sm90_fp8_training.py",
    ),
]


def sole_place(mutant: Mutant, root: Path) -> tuple[str, str]:
    """The file's text before and after, if the mutant's is in there exactly once, white space apart."""
    path = root / mutant.path
    if not path.exists():
        raise SystemExit(f"{mutant.name}: there is no {mutant.path}")
    text = path.read_text()
    pattern = r"\s+".join(map(re.escape, mutant.old.split()))
    places = re.findall(pattern, text)
    if len(places) != 1:
        raise SystemExit(f"{mutant.name}: {len(places)} times in {mutant.path}, expected once: {mutant.old}")
    return text, text.replace(places[0], mutant.new)


# --- a copy of the tree ---------------------------------------------------------------------------


def update(tree: Path) -> None:
    """Copies what differs, so that only that is compiled again."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    names = [n for n in names if (ROOT / n).is_file() and n.split("/")[0] != "shared"]
    for name in names:
        source, target = ROOT / name, tree / name
        if not target.exists() or source.read_bytes() != target.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    for folder in ("csrc", "fused_moe", "tests"):
        for path in (tree / folder).rglob("*.*"):
            is_source = path.suffix in (".py", ".c", ".h", ".cpp", ".cu", ".cuh")
            if is_source and str(path.relative_to(tree)) not in names:
                path.unlink()


def build(tree: Path, cuda: bool) -> bool:
    environment = os.environ | {"FUSED_MOE_HOST": "1"} | ({} if cuda else {"CUDA_HOME": "/nonexistent"})
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    built = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if built.returncode:
        print(built.stdout[-3000:], built.stderr[-3000:])
    return built.returncode == 0


def failing_test(tree: Path, tests: str, cuda: bool) -> str | None:
    """The first test that fails, or None if all pass."""
    device = ["--device", "cuda"] if cuda else []
    command = [sys.executable, "-m", "pytest", "-x", "-v", "-p", "no:cacheprovider", *device, *tests.split()]
    environment = os.environ | {"CI": "1", "PYTHONPATH": str(tree)}
    try:
        run = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT
        )
        code, output = run.returncode, run.stdout
    except subprocess.TimeoutExpired as late:
        code, output = 1, (late.stdout or b"").decode()
    if code == 0:
        return None
    if failed := re.findall(r"^(?:FAILED|ERROR) (\S+?)(?:\[| |$)", output, re.M):
        return failed[0]
    started = re.findall(r"^(tests/\S+?::\w+)", output, re.M)  # it crashed, or hung
    if code in (2, 4, 5) or not started:
        raise SystemExit(f"pytest {tests} did not run: {output[-3000:]}")
    return started[-1]


def try_mutant(mutant: Mutant, tree: Path, cuda: bool) -> str:
    """The test that kills it, "" if it survives."""
    text, mutated = sole_place(mutant, tree)
    path = tree / mutant.path
    path.write_text(mutated)
    try:
        if not build(tree, cuda):  # of Python, too: the library may be the mutant before this one
            raise SystemExit(f"{mutant.name}: does not compile: {mutant.new}")
        return failing_test(tree, mutant.tests, cuda) or ""
    finally:
        path.write_text(text)


# --- the table ------------------------------------------------------------------------------------


def cell(code: str) -> str:
    code = re.sub(r"\s+", " ", code.strip()).replace("|", "\\|")
    return f"`` {code} ``" if code else "(nothing)"


def row_of(mutant: Mutant) -> str:
    """All but its last cell."""
    cells = (mutant.name, mutant.path, cell(mutant.old), cell(mutant.new))
    return f"| {' | '.join(cells)} |"


def read_killers() -> dict[str, str]:
    """{row_of(mutant): the last cell}: a mutant that was changed has to be tried again."""
    table = TABLE.read_text().split(BEGIN)[1].split(END)[0]
    lines = [line.removesuffix(" |").rpartition(" | ") for line in table.strip().splitlines()[2:]]
    return {f"{row} |": killer for row, _, killer in lines}


def write_table(found: dict[str, str]) -> None:
    """found: {mutant: the test that kills it, or ""}. What was not tried keeps its result."""
    killers = read_killers()
    lines = ["| mutant | file | instead of | it has | killed by |", "|---|---|---|---|---|"]
    for mutant in (*CPU, *CUDA):
        row = row_of(mutant)
        if mutant.name in found:
            killer = f"`{found[mutant.name]}`" if found[mutant.name] else "**nothing**"
        else:
            killer = killers.get(row, "not tried yet")
        lines.append(f"{row} {killer} |")
    before, rest = TABLE.read_text().split(BEGIN)
    _, after = rest.split(END)
    table = "\n".join(lines)
    TABLE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="these mutants alone")
    parser.add_argument("--cuda", action="store_true", help="the CUDA kernels' mutants; needs a GPU and nvcc")
    parser.add_argument("--list", action="store_true", help="only looks for each mutant's text")
    options = parser.parse_args()
    mutants = CUDA if options.cuda else CPU
    unknown = set(options.names) - {m.name for m in mutants}
    if unknown:
        raise SystemExit(f"no such mutants: {', '.join(sorted(unknown))}")
    mutants = [m for m in mutants if not options.names or m.name in options.names]
    for mutant in (*CPU, *CUDA) if options.list else mutants:
        sole_place(mutant, ROOT)
        if options.list:
            print(f"{mutant.name:<40} {mutant.path}")
    if options.list:
        return

    tree = ROOT / "build" / "mutants" / ("cuda" if options.cuda else "cpu")
    update(tree)
    if not build(tree, options.cuda):
        raise SystemExit("the tree does not build")
    for tests in sorted({m.tests for m in mutants}):
        if failed := failing_test(tree, tests, options.cuda):
            raise SystemExit(f"{failed} fails without any mutant")
    found = {}
    try:
        for mutant in mutants:
            found[mutant.name] = killer = try_mutant(mutant, tree, options.cuda)
            print(f"{mutant.name:<40} {killer or 'SURVIVES'}", flush=True)
    finally:
        write_table(found)
        build(tree, options.cuda)
    raise SystemExit(not all(found.values()))


if __name__ == "__main__":
    main()
