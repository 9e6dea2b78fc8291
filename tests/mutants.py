"""Breaks one line at a time and shows which test notices: mutation testing of the kernels and of their
Python.

python tests/mutants.py [--list] [--cuda] [NAME...]

Works on a copy of the tree in build/mutants, built for the CPU; with --cuda, on a machine with a GPU and
nvcc, for both, and the mutants are those of the CUDA kernels. Every result is kept in tests/mutants.tsv;
--list prints all mutants with them, as a table. Exits with 1 if a mutant survives its tests, or if its text
is not found exactly once: then it has to be written anew.

Some mutants are left out, because no test can notice them: those that only change the time of a call; those
that write what is undefined anyway, such as h past the last row on a GPU; and those that leave out a
rounding, since the result is then nearer to float64 than the eager loop's (one was tried and survived:
inputs times scores that are not rounded to their dtype).
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "tests" / "mutants.tsv"
TIMEOUT = 300  # seconds: a mutant that hangs is noticed, too


class Mutant(NamedTuple):
    name: str
    path: str
    old: str
    new: str
    tests: str  # what may notice: a file, or pytest's arguments


def listed(table: dict[tuple[str, str], list[tuple[str, str, str]]]) -> list[Mutant]:
    """table: {(path, tests): [(name, old, new), ...]}."""
    places = table.items()
    return [Mutant(name, path, old, new, tests) for (path, tests), rows in places for name, old, new in rows]


# fmt: off
CPU = listed({
  ("csrc/cpu/router_logits.c", "tests/test_router_logits.py"): [
    ("logits of the last slice alone", "fm_transposed(weight), k > 0);", "fm_transposed(weight), false);"),
    ("every block of logits has the first one's bias", "fm_at(p->bias, w->elem_bytes, expert),", "p->bias,")],
  ("fused_moe/paths.py", "tests/test_router_logits.py"): [
    ("logits of tensor subclasses are ours", "if type(x) not in TRACED or", "if")],
  ("csrc/cpu/route.c", "tests/test_route.py"): [
    ("softmax without its maximum", "exp(logits[e] - max)", "exp(logits[e])"),
    ("ties to the higher id", "return a > b ||", "return a >= b ||"),
    ("NaN is not the greatest", "|| (isnan(a) && !isnan(b))", ""),
    ("scores with the bias", "score[ids[k]] * factor", "choice[ids[k]] * factor"),
    ("a group is worth its best expert", "(adds ? choice[g * size + two[1]] : 0)", "0"),
    ("norm without the scale",
     "? p->route_scale / sum : p->route_scale; for (int32_t k = 0; k < p->K; k++) v->set",
     "? 1 / sum : p->route_scale; for (int32_t k = 0; k < p->K; k++) v->set"),
    ("norm's gradient without its shift", "- shift) * factor", ") * factor"),
    ("softmax's gradient without its mean", "(dscore[e] - mean) * score[e]", "dscore[e] * score[e]"),
    ("barred experts fill the slots that are left", "if (!is_allowed(p, ids[k])) ids[k] = -1;", ";"),
    ("a NaN score frees a barred expert",
     "choice[e] = is_allowed(p, e) ? choice[e] + p->bias[e] : -INFINITY;", "choice[e] += p->bias[e];")],
  ("csrc/cpu/route.c", "tests/test_padding.py"): [
    ("scores of padding are left", "v->set(p->scores, t * p->K + k, 0);", ";"),
    ("given ids are cut to 32 bits", "int64_t id = integer", "int32_t id = (int32_t)integer"),
    ("nothing is chosen for ids that are all -1", "is_given |= id != -1;", "is_given = true;"),
    ("a remote slot has part in the norm's gradient", "if (ids[k] >= 0) shift +=", "shift +="),
    ("the gradient of padding is computed", "if (!has_expert) {", "if (false) {"),
    ("the last of equal ids has all of the gradient", "ids[k]] += (unscaled", "ids[k]] = (unscaled")],
  ("csrc/integer.h", "tests/test_padding.py"): [
    ("a negative number of tokens is all of them", "< 0 ? 0 : num < T ? num :", "< 0 ? T : num < T ? num :")],
  ("csrc/integer.h", "tests/test_route_plan.py"): [
    ("ids beyond the map are experts", "p->expert_map[id] : -1", "p->expert_map[id] : id")],
  ("csrc/cpu/route_plan.c", "tests/test_route_plan.py"): [
    ("counts without the map", "e = slot_expert(p, slot); if", "e = integer(p->ids, p->ids_dtype, slot); if"),
    ("the sentinel E has a row", "e >= p->E || p->offsets", "e > p->E || p->offsets"),
    ("a plan forgets what others dropped", "*bounded->dropped += dropped", "*bounded->dropped = dropped"),
    ("slices are those of the whole plan", "finish_plan(p->counts, R,", "finish_plan(p->counts, slots,"),
    ("row_token is the slot's", "(int32_t)(slot / p->K)", "(int32_t)(slot % p->K)"),
    ("no -1 past the last row", "p->row_slot[row] = p->row_token[row] = -1", "p->row_slot[row] = -1"),
    ("offsets are left walked through", "p->offsets[e] = p->offsets[e - 1];", ";")],
  ("csrc/cpu/route_plan.c", "tests/test_errors.py tests/test_route_plan.py tests/test_operators.py"): [
    ("counts may exceed the rows", "|| count > p->R - sum", "")],
  ("csrc/cpu/peers.c", "tests/test_symmetric.py -k sum_peers"): [
    ("all rows are the first rank's", "p->rows[i / p->C]", "p->rows[0]"),
    ("rows of several ranks without scores", "p->scores ? v->get(p->scores, slot) : 1", "1")],
  ("csrc/cpu/pad.c", "tests/test_pad.py"): [
    ("what is behind a row is not cleared", "fm_clear(out + copied, bytes - copied);", ";"),
    ("rows past the last one are not zeros", "i < p->x_sizes[0] && j < p->x_sizes[1]", "i < p->x_sizes[0]"),
    ("a row that is cut runs into the next",
     "fm_min(p->x_sizes[2] * p->elem_bytes, bytes)", "p->x_sizes[2] * p->elem_bytes"),
    ("the second part's rows are zeros", "row / B % A, j = row % B", "row / B % A, j = row")],
  ("csrc/cpu/permute.c", "tests/test_permute.py"): [
    ("tail rows are not zeroed", "fm_clear(row, row_bytes);", ";"),
    ("permute loses the last element", ".row_token[r]), row_bytes", ".row_token[r]), row_bytes - 1"),
    ("unpermute takes the next slot's score", "->get(p->scores, slot) : 1", "->get(p->scores, slot ^ 1) : 1"),
    ("unpermute sums K - 1 rows", "< (t + 1) * p->row_map.K; slot++", "< (t + 1) * p->row_map.K - 1; slot++"),
    ("shared experts without their gate", "p->shared_gate ? sigmoid(v->get(p->shared_gate, t)) : 1", "1"),
    ("the sum forgets the shared experts", "if (p->shared) {", "if (0) {"),
    ("dshared without the gate", "v->scale(dout, sigmoid(gate), dout, p->D);", ";"),
    ("a derivative of the gate that cancels", "(gate) * sigmoid(-gate)", "(gate) * (1 - sigmoid(gate))"),
    ("drows without the score", "if (p->scores) v->scale(dout,", "if (0) v->scale(dout,"),
    ("a lost row of dscores", "if (p->dscores) { v->load", "if (p->dscores && r != 5) { v->load")],
  ("csrc/cpu/router_dgrad.c", "tests/test_experts.py"): [
    ("the router's gradient replaces the experts'", "if (p->accumulate) {", "if (false) {")],
  ("csrc/cpu/matrix.c", "tests/test_experts.py"): [
    ("gather reads the next token", "? g->row_token[r] : r", "? g->row_token[r ^ 1] : r"),
    ("one score for all inputs of a tile", "g->row_slot[r])", "g->row_slot[r / 256 * 256])")],
  ("csrc/cpu/matrix.c", "tests/test_grouped_mm.py"): [
    ("a part of a matrix starts a row late", "row * m.row_stride +", "(row + (row > 0)) * m.row_stride +")],
  # noticed on CPUs that have AVX512_BF16 and no AMX
  ("csrc/cpu/bf16.c", "tests/test_grouped_mm.py"): [
    ("bf16: a block of k replaces the sum", ".accumulate = accumulate || k}", ".accumulate = accumulate}"),
    ("bf16: all blocks have the first one's rows", "rows_from(a, block, k)", "rows_from(a, 0, k)"),
    ("bf16: an odd depth has one element more", "high = 2 * i + 1 < depth ? low : 0;", "high = low;")],
  ("csrc/cpu/up_gate.c", "tests/test_experts.py"): [
    ("w3 reads b1", "{&p->w3, p->b3, F, j, n, F + j}", "{&p->w3, p->b1, F, j, n, F + j}"),
    ("up's half is gate's", "{&p->w1, p->b1, 2 * F, F + j, n, F + j}", "{&p->w1, p->b1, 2 * F, j, n, F + j}"),
    ("no bias", "if (c->bias) v->add(row, s.bias, c->width);", ""),
    ("the first expert's bias", "tile.expert * c->weight_rows + c->row", "c->row")],
  ("csrc/cpu/up_gate.c", "tests/test_experts.py tests/test_operators.py tests/test_grouped_mlp.py"): [
    ("a of garbage rows is garbage",
     "fm_clear(fm_at(p->a, v->elem_bytes, num_rows * p->F), unused_rows * p->F * v->elem_bytes);", "")],
  ("csrc/cpu/up_gate.c", "tests/test_quantized_bits.py"): [
    ("h is rounded before the activation where it is kept",
     ", row, c->width);", ", row, c->width), v->load(row, fm_at(p->h, v->elem_bytes, in_h), c->width);")],
  ("csrc/cpu/down_dgrad.c", "tests/test_experts.py"): [
    ("dh without the score", "v->scale(q->sg, score, g_row, n);", "v->scale(q->sg, 1, g_row, n);"),
    ("a_scaled is 3% too large", "v->scale(q->a, score, q->a, n);", "v->scale(q->a, 1.03 * score, q->a, n);"),
    ("dscores 2% too large", "row, s.dscore[r]);", "row, 1.02 * s.dscore[r]);"),
    ("dscores without b2", "if (p->dscores && p->b2) {", "if (0) {"),
    ("dscores of the last columns alone", "s.dscore[r] += v->dot(g_row", "s.dscore[r] = v->dot(g_row")],
  ("csrc/cpu/wgrad.c", "tests/test_experts.py tests/test_main_grads.py"): [
    ("sums begin anew in every block", "b, row > first);", "b, false);")],
  ("csrc/cpu/wgrad.c", "tests/test_experts.py"): [
    ("an empty expert's gradient is not zeroed",
     "if (first == end && !p->accumulate) fm_zero(out, dw[part]);", ""),
    ("dw3 from gate's columns", "part ? p->M[0] : 0, p->M[part]", "0, p->M[part]"),
    ("bias_grad loses a row", "r < p->offs[e]; r++", "r < p->offs[e] - 1; r++"),
    ("bias_grad without scores", ", p->scores ? v->get(p->scores, p->row_slot[r]) : 1, row,", ", 1, row,")],
  ("csrc/cpu/wgrad.c", "tests/test_main_grads.py"): [
    ("a main gradient is overwritten", "(p->accumulate ? fm_add : fm_from_accum)", "fm_from_accum")],
  ("csrc/cpu/wgrad.c", "tests/test_raw_operators.py"): [
    ("scores are read through any row_slot", ", 0, T) && fm_map_is_valid(row_slot, n, 0, T * K)", ", 0, T)")],
  ("csrc/cpu/grouped_mm.c", "tests/test_experts.py"): [
    ("up_dgrad loses gate's part", "fm_transposed(b), part > 0);", "fm_transposed(b), false);")],
  ("csrc/cpu/grouped_mm.c", "tests/test_grouped_mm.py tests/test_experts.py"): [
    ("part columns of the first block", ", tile.num_rows, j, n", ", tile.num_rows, cols.first, n")],
  ("csrc/cpu/grouped_mm.c", "tests/test_grouped_mm.py"): [
    ("garbage past the last row", "(p->R - num_rows) * p->M * (int64_t)v->elem_bytes);", "0);")],
  ("csrc/cpu/eight_bit.c", "tests/test_eight_bit_operator.py"): [
    ("8 bits: a has the scales of its first block", "scale + k / FUSED_MOE_BLOCK * a->scale_stride", "scale"),
    ("8 bits: every column has the first one's scale", "(w, e, row + j, k)", "(w, e, row, k)"),
    ("8 bits: every block has the first one's scale", "(w, e, row + j, k)", "(w, e, row + j, 0)"),
    ("8 bits: every expert has the first one's codes", "(e * w->out + row + j) * w->in", "(row + j) * w->in"),
    ("8 bits: subnormals are rounded as normals", "magnitude < 0x3c800000 ? subnormal : normal", "normal"),
    ("8 bits: e4m3 is truncated", " + 0x7ffff + ((magnitude >> 20) & 1)", ""),
    ("8 bits: int8 is truncated", "(uint8_t)fused_moe_float_bits(x + 0x1.8p23f)", "(uint8_t)(int8_t)x"),
    ("8 bits: every expert is smoothed as the first", "while (p->row_map.offs[e] <= r) e++;", ""),
    ("8 bits: scales of a are not rounded up",
     "FUSED_MOE_CODE_E4M3, p->power_of_two,", "FUSED_MOE_CODE_E4M3, false,"),
    ("8 bits: sums of e4m3 are rounded", "FUSED_MOE_F32 : FUSED_MOE_F64", "FUSED_MOE_F32 : FUSED_MOE_F32")],
  ("csrc/cpu/eight_bit.c", "tests/test_fp8_bits.py"): [
    ("fp8: tokens have the codes of the first row",
     "fm_at(p->codes, 1, m->token_row[slot] * p->D)", "p->codes")],
  ("fused_moe/fp8_training.py", "tests/test_enable_fp8.py"): [
    ("fp8: kept codes do not see optimizers", "w.dtype, _optimizer_steps, stream)", "w.dtype, 0, stream)"),
    ("fp8: kept codes do not see versions", "self.about = (w._version, ", "self.about = ("),
    ("fp8: kept codes do not see memory",
     "self.storage == other.storage and self.about == other.about",
     "self.about[:1] + self.about[2:] == other.about[:1] + other.about[2:]"),
    ("fp8: traces have kept codes",
     " or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack():", ":"),
    ("fp8: kept codes are used without gradients",
     "if not needs_grad:", "if not needs_grad and not self.keep_codes:"),
    ("fp8: codes are kept in copies of a layer", 'self.__dict__ | {"_kept": None}', "dict(self.__dict__)")],
  ("fused_moe/fp8_training.py", "tests/test_distributed.py -k keeps_no_codes"): [
    ("fp8: codes of DTensors are kept", "if fp8.keep_codes and any(", "if False and any(")],
  ("fused_moe/fp8_training.py", "tests/test_distributed.py -k in_fp8"): [
    ("fp8: codes of gathered weights outlive the call", "=not self.is_gathered", "=True")],
  ("fused_moe/function.py", "tests/test_enable_fp8.py"): [
    ("fp8: rows past the last expert's are its own", "unsqueeze", "clamp_max(counts.size(0) - 1).unsqueeze")],
  ("fused_moe/function.py", "tests/test_fp8_training.py::test_what_is_not_asked_for_is_not_made"): [
    ("fp8: dx alone makes dw1 and dw3", "of_weights = (x.detach(), w1, w3,", "of_weights = (x, w1, w3,")],
  ("fused_moe/function.py", "tests/test_memory.py"): [
    ("h is always kept", "*settings, needs_grad, *main_up)", "*settings, True, *main_up)")],
  ("fused_moe/function.py", "tests/test_experts.py"): [
    ("scores on the input, too", "b2, None if on_input else scores)", "b2, scores)"),
    ("one operator of experts forgets the map", "on_input, expert_map, shared)", "on_input, None, shared)")],
  ("csrc/cpu/fp8_training.c", "tests/test_fp8_bits.py"): [
    ("fp8: a row block has the scale of its first columns", "(p->scale_is_of_b ? n + c : m) / BLOCK", "0"),
    ("fp8: every expert has the first one's row blocks", "first_block + b, m, n, cols,", "b, m, n, cols,"),
    ("fp8: the last row block is left out", "b < fm_blocks(num_rows, BLOCK); b+", "b < num_rows / BLOCK; b+"),
    ("fp8: a row of a block does not count for its scale", "0; for (int64_t r = 0", "0; for (int64_t r = 1"),
    ("fp8: codes by columns without the other operand's scale",
     "factors[block.first_row + r] * inverse", "inverse"),
    ("fp8: padding of dh is what the block before had",
     "clear_past(codes, block.num_rows); for (int64_t r", "for (int64_t r"),
    ("fp8: padding of x is what the task before had",
     "clear_past(codes, block.num_rows); for (int64_t j", "for (int64_t j")],
  ("csrc/cpu/fp8_training.c", "tests/test_fp8_training.py::test_weights_made_once"): [
    ("fp8: a transposed weight has the scales as they were",
     "[(e * n_blocks + n_block) * m_blocks + m_block]", "[(e * m_blocks + m_block) * n_blocks + n_block]")],
  ("csrc/torch/fp8_training.cpp", "tests/test_fp8_training.py::test_what_is_not_needed_is_not_made"): [
    ("fp8: dh by rows is made where x needs no gradient", "need_dlink) {", "need_dlink || need_dlink_t) {"),
    ("fp8: dh by columns is made where w1 and w3 need no gradient",
     "if (need_dlink_t)", "if (need_dlink_t || need_dlink)")],
  ("csrc/torch/fp8_gemms.cpp", "tests/test_fp8_bits.py"): [
    ("fp8: every chunk of a weight gradient is the first",
     "w.data = (char *)w.data + of_x.first * w.stride_in * elem_bytes;", ";"),
    ("fp8: interleaved rows of a gradient are halves", "grad.part[i].stride_out = 2 * dw1.stride_out;", "")],
  ("fused_moe/ops.py", "tests/test_fp8_training.py::test_backward_quantises_again"): [
    ("fp8: backward makes both orders of a weight", "second, layout, TRANSPOSED)", "second, layout)")],
  ("fused_moe/ops.py", "tests/test_main_grads.py"): [
    ("main_grad and .grad", "if getattr(need, name) and main_grad is None}", "if getattr(need, name)}")],
  ("fused_moe/ops.py", "tests/test_grouped_mm.py tests/test_gradcheck.py"): [
    ("grouped_mm's gradient has no transpose", ".default, a, dw.mT,", ".default, a, dw.mT.mT,")],
  ("fused_moe/ops.py", "tests/test_transforms.py -k nested"): [
    ("an outer transform sees nothing of a node", "with torch.enable_grad():  #", "if True:  #")],
  ("fused_moe/ops.py", "tests/test_widths.py"): [
    ("backward copies a weight that it does not need", "need.a:\n        (b,)", "True:\n        (b,)")],
  ("fused_moe/ops.py", "tests/test_autocast.py"): [
    ("autocast casts a alone", 'autocast=("a", "b", "bias"),', 'autocast=("a",),')],
  ("csrc/rules.h", "tests/test_rules.py"): [
    ("fp8: a chunk of columns takes all that bf16 has", "= peak - (of_dw2 ? in_dw2 : in_dw1);", "= peak;"),
    ("experts of three rows have tiles of 16", "R <= 2 * E ? 16", "R <= 3 * E ? 16"),
    ("experts of 33 rows are one launch", "R > 32 * E", "R > 33 * E"),
    ("a token's slots are in two CTAs of a cluster", "chooses ? K : 1, parts = chooses ? T :", "1, parts =")],
  ("csrc/schedule.h", "tests/test_host.py::test_split_k_slices_are_whole_row_blocks"): [
    ("split-K slices of part of a k-tile", "* slice_rows % k_tile", "* slice_rows % (k_tile / 2)")],
  ("csrc/schedule.h", "tests/test_host.py::test_a_plan_of_another_device"): [
    ("slices of another device's plan are summed", "->slice_rows == order->slice_rows", "->slice_rows > 0")],
  ("csrc/schedule.h", "tests/test_host.py tests/tools/test_schedule.py tests/test_route_plan.py"): [
    ("an expert of 64 rows is full", "E, FUSED_MOE_SKINNY_ROWS + 1,", "E, FUSED_MOE_SKINNY_ROWS,")],
  ("csrc/schedule.h", "tests/test_host.py tests/test_experts.py"): [
    ("the last tile has a full tile's rows",
     "rows.num - done < order->tile_rows ? rows.num - done : order->tile_rows", "order->tile_rows"),
    ("no expert has a part tile", "? (rows - 1) / tile_rows + 1 : 1", ">= tile_rows ? rows / tile_rows : 1")],
  ("csrc/schedule.h", "tests/test_host.py"): [
    ("halves of the last wave overlap", "1 + (int32_t)(half % 2)", "1"),
    ("both tall tiles of a pair have its left half", "1 + row_tile % 2", "1"),
    ("a short second row tile makes a tall one, too", "- done <= tall * 3 / 4", "- done <= order->tile_rows"),
    ("experts of several slices are not summed up",
     "int32_t end = sum + fused_moe_inclusive_sum(slices)", "int32_t end = fused_moe_inclusive_sum(slices)"),
    ("a thief steals from another CTA", "if (left > most) most = left;", "most = left;"),
    ("a CTA has the same place in every wave", "(cta + wave) % ctas", "cta")],
  ("csrc/cpu/quantized.c", "tests/test_quantized.py"): [
    ("a transposed weight's first columns", "->quantized, e, col, cols, row", "->quantized, e, col, cols, 0"),
    ("subnormal e4m3 codes are zero", "(float)magnitude * 0x1p-9f", "0.0f"),
    ("a scale of 255 is infinite", "if (code == 255) return NAN;", ""),
    ("int4 is unsigned", "(float)((pairs[i] & 15) - 8);", "(float)(pairs[i] & 15);"),
    ("every expert has the first one's scales", "e * row_blocks + row / w->block_out", "row / w->block_out"),
    ("values are not rounded", "v->round(values, n);", ";")],
  ("fused_moe/quantized/formats.py", "tests/test_quantized.py"): [
    ("half of a code is away from even", "torch.where(down % 2 == 0, down, up)", "up")],
  ("fused_moe/quantized/formats.py", "tests/test_eight_bits.py"): [
    ("x is divided by what codes were not multiplied by",
     "one if smooth is None else one * smooth[part].unsqueeze(1)", "one")],
  ("fused_moe/quantized/weight.py", "tests/test_offload.py"): [
    ("hooks of quantised weights are passed over", "return _called(w) if why_altered(w) else w", "return w")],
  ("fused_moe/quantized/weight.py", "tests/test_distributed.py"): [
    ("a policy casts shards", "if not (shards.is_floating_point() and sharding.TAKES_INTEGERS):", "if True:"),
    ("loading leaves shards of tiles as they were",
     "self._local()._tile(_of_tensors(self, before)._local()._parameters)", "pass"),
    ("the second packing stays beside shards", "self._drop_kept() if self.is_tiled", "if self.is_tiled")],
  ("fused_moe/quantized/weight.py", "tests/test_quantized.py"): [
    ("a dtype casts codes", "return tensor.detach().to(found.device)", "return found")],
  ("fused_moe/quantized/weight.py", "tests/test_tiles.py"): [
    ("loading leaves the tiles that a CUDA graph reads",
     "out = _if_on(tensor.device, before.get(names[key]))", "out = None"),
    ("loading leaves the second packing as it was", "(is_loaded or not self._kept):", "not self._kept:"),
    ("tiles that are written in place leave the second packing as it was", "!= state for", "< state for")],
  ("fused_moe/quantized/weight.py", "tests/test_eight_bits.py"): [
    ("8 bits keep tiles", 'self.compute in ("codes", "auto")', "True")],
  ("fused_moe/lora.py", "tests/test_offload.py"): [
    ("released adapters are read", "if why_altered(self):", "if False:")],
  ("fused_moe/quantized/tiles.py", "tests/test_tiles.py"): [
    ("codes of two columns change places in tiles", "first >> 4) | (second &", "second >> 4) | (first &"),
    ("scales of two column pairs change places in the second packing", ", 1, 2, 5, 3, 4", ", 1, 2, 5, 4, 3")],
  ("fused_moe/transformers/weights.py", "tests/test_transformers_quantized.py"): [
    ("experts hold tiles and the parameters that they were made of", ".pop(name + part)", "[name + part]")],
  ("fused_moe/transformers/peft.py", "tests/test_peft.py"): [
    ("PEFT adds the adapters of our experts", "if not active or not is_ours:", "if True:"),
    ("adapters stay after PEFT's call", "vars(experts).pop(ADAPTERS, None)", "pass"),
    ("adapters that no kernel has pass", 'if "taken" not in handed:', "if False:"),
    ("active adapters have the first one's scale", "self.scaling[adapter])", "self.scaling[adapters[0]])"),
    ("adapters of earlier PEFT are read as today's", "(b.mT, a.mT) if swapped else (a, b.contiguous())",
     "(a, b.contiguous())"),
    ("quantised weights are merged unasked", "if not rounds:", "if False:"),
    ("names of absent parameters pass", "if not matched:", "if False:"),
    ("stand-ins of quantised weights stay", "experts._parameters.clear()", "continue")],
  ("fused_moe/transformers/experts.py", "tests/test_peft.py"): [
    ("adapters of down have the scale of gate and up", "b1, b2, s1, s2 = b1 * s1, b2 * s2, 1.0, 1.0", "pass"),
    ("adapters beside 8-bit products", "or lora is not None else None", "else None")],
  ("fused_moe/transformers/experts.py", "tests/test_transformers_parallel.py"): [
    ("adapters pass under expert parallelism", 'getattr(experts, "_is_expert_parallel", False)', "False")],
  ("fused_moe/transformers/experts.py", "tests/test_transformers_eight_bit.py"): [
    ("8-bit products are given max_rows",
     'if is_quantized and not (compute_of_call == "codes" and', "if not (True or")],
  ("fused_moe/transformers/parallel.py", "tests/test_transformers_parallel.py"): [
    ("experts of others pass", "if reason := _why_not_ours(experts):", "if False:"),
    ("experts with a forward of their own pass",
     'and hasattr(type(experts).forward, "__wrapped__")', "and True"),
    ("a token is sent once per slot", "distinct(slot_ranks, N)", "slot_ranks"),
    ("slots of no expert take a rank's place", "(ids >= 0) & (ids < N * E)", "ids < N * E"),
    ("received ids stay all experts'", "- self.ep_mesh.get_local_rank() * E", ""),
    ("memory is taken for remote slots", "max_rows=max(1, sum(slots))", "max_rows=None"),
    ("a rank without slots has no row", "max(1, sum(slots))", "sum(slots)")],
  ("fused_moe/transformers/experts.py", "tests/test_transformers_saved.py"): [
    ("models without experts get ours by default",
     "requested_experts is None and model._can_set_experts_implementation()", "requested_experts is None")],
  ("fused_moe/quantized/formats.py", "tests/test_transformers_saved.py"): [
    ("zero points are written without their offset", "(zero + INT4_OFFSET)", "zero")],
  ("fused_moe/transformers/saving.py", "tests/test_transformers_saved.py"): [
    ("8-bit activations are not written", 'if w.compute != "codes":', "if False:"),
    ("some quantised experts are saved as all", "if not all(isinstance(w, Q", "if not any(isinstance(w, Q")],
  ("fused_moe/transformers/packed.py", "tests/test_transformers_saved.py"): [
    ("scales are rounded as they are loaded", "reduce(torch.promote_types, scales)", "torch.bfloat16"),
    ("missing experts pass", "if missing and not counts[None]:", "if False:"),
    ("static activations are dynamic", "if inputs is not None and not inputs.dynamic:", "if False:")],
  ("csrc/cpu/activate.c", "tests/test_activate.py"): [
    ("every row has the first one's ups", "fm_at(up, v->elem_bytes, r * F)}", "fm_at(up, v->elem_bytes, 0)}"),
    ("every block of columns has the first one's da", ", r * p->F + j), n", ", r * p->F), n")],
  ("fused_moe/composed.py", "tests/test_quantized.py"): [
    ("scores on the input are lost", "rows = _scored(rows, scores, plan)", "pass")],
  ("fused_moe/composed.py", "tests/test_lora.py"): [
    ("adapters without their scale", "rows, a, offsets) * scale", "rows, a, offsets)")],
  ("fused_moe/composed.py", "tests/test_quantized_bits.py"): [
    ("adapters of the up read the gate's ranks", "F.pad(b3, (b1.size(2), 0))", "F.pad(b3, (0, b1.size(2)))")],
  ("fused_moe/paths.py", "tests/test_lora.py"): [
    ("adapters are skipped by the joint operator", "if experts.active_loras:", "if False:")],
  ("fused_moe/lora.py", "tests/test_adapters.py"): [
    ("joined adapters lose their scales", "torch.cat([scale * b for", "torch.cat([b for"),
    ("adapters compute, active or not", "loras.values() if adapters.is_active]", "loras.values()]")],
  ("fused_moe/adapters.py", "tests/test_adapters.py"): [
    ("earlier adapters compute beside new ones", "adapters.is_active = False", "pass"),
    ("a choice of adapters is for good", "context.callback(setattr,", "(lambda *_: None)(setattr,"),
    ("merging rounds the product first", "torch.addmm(values[e].double(), b[e], a[e], alpha=scale)",
     "values[e] + (scale * b[e] @ a[e]).to(values.dtype)"),
    ("merging forgets the scale", "alpha=scale)", "alpha=1)"),
    ("merged adapters are left", "_remove(layer, chosen)", "pass"),
    ("what was frozen stays frozen", "parameter.requires_grad_()", "pass"),
    ("adapters of another scale are loaded", "adapters.other_alphas(state_dict[", "None and (state_dict["),
    ("a merge writes what fully_shard has gathered", 'hook(m, "", True)', "pass")],
  ("fused_moe/quantized/quantizing.py", "tests/test_adapters.py"): [
    ("weights with adapters are quantised anew without zero points", "w.zero is None", "True")],
  ("fused_moe/distributed.py", "tests/test_distributed.py -k adapters"): [
    ("each rank has all new adapters", "_shard(adapters, self.mesh)", "pass"),
    ("each rank draws its own new adapters", "mesh: DeviceMesh, src_data_rank: int | None = 0)",
     "mesh: DeviceMesh, src_data_rank: int | None = None)")],
  ("fused_moe/exchange.py", "tests/test_distributed.py -k any_routing"): [
    ("every rank computes the first one's experts", "- (1 + self.first_expert)", "- 1")],
  ("fused_moe/symmetric.py", "tests/test_symmetric.py"): [
    ("what others still read is overwritten", "if are_read:", "if False:"),
    ("rows are read before all are written",
     "copy_(values)\n            self._memory.barrier()", "copy_(values)"),
    ("memory is in a graph", "@torch.no_grad()\n    def _gradients(ctx, dout", "def _gradients(ctx, dout"),
    ("a slot's row is the same on every rank", "first = peers.rank * peers.num_rows", "first = 0"),
    ("a call that failed leaves the others alone",
     "self.write((ids, torch.full_like(ids[self.rank], REFUSED)))", "pass"),
    ("a call that failed needs the memory of float32",
     "self.areas(self._dtype).ids", "self.areas(torch.float32).ids")],
  ("fused_moe/exchange.py", "tests/test_distributed.py -k sent_once"): [
    ("a token is sent once for each expert",
     "distinct(ids.div(self.num_experts // N, rounding_mode=\"floor\"), N), N)",
     "ids.div(self.num_experts // N, rounding_mode=\"floor\"), N)")],
  ("fused_moe/slots.py", "tests/test_distributed.py -k bits_of"): [
    ("the experts' rank does not weight gradients", "(rows, None, received_scores,", "(rows, None, None,")],
  ("fused_moe/exact.py", "tests/test_distributed.py -k bits_of"): [
    ("the experts' rank weights no gradients of exact sizes",
     "dy, None, scores, received", "dy, None, None, received")],
  ("fused_moe/ops.py", "tests/test_distributed.py -k exact_exchanges"): [
    ("gradients of weights come before those of rows",
     "if _hands_on(ctx, need):\n        dx, *_,", "if False:\n        dx, *_,")],
  ("fused_moe/module.py", "tests/test_distributed.py -k exact_exchanges"): [
    ("shared experts wait for the exchange", "and runs_shared(self.experts)", "and False")],
  ("fused_moe/distributed.py", "tests/test_distributed.py -k overflow_is_counted"): [
    ("tokens of dropped slots are sent", "< 0, -1, ids)", "< 0, ids, ids)")],
  ("fused_moe/distributed.py", "tests/test_distributed.py -k without_fully_shard"): [
    ("replicas have their own gradients", "p.requires_grad_().register_hook(_SumOverRanks(mesh))",
     "p.requires_grad_()"),
    ("what is frozen has no hook", "p.is_floating_point() and is_plain", "p.requires_grad")],
  ("fused_moe/distributed.py", "tests/test_distributed.py -k replaced_parameters"): [
    ("a copied layer's replicas have their own gradients", "module._prepare_parameters = prepare", "pass"),
    ("so have those of a layer that is loaded by assignment",
     "module.register_load_state_dict_post_hook(prepare)", "pass")],
  ("fused_moe/distributed.py", "tests/test_distributed.py -k two_layers"): [
    ("a tied router's gradient is summed twice", "and not is_hooked", "")],
  ("fused_moe/distributed.py", "tests/test_distributed.py -k unequal"): [
    ("styles may differ between ranks", "self._settings | _described(module, experts)",
     "_described(module, experts)"),
    ("layers may differ between ranks", "self._settings | _described(module, experts)", "self._settings")],
  ("fused_moe/distributed.py", "tests/test_distributed.py -k of_quantised_weights"): [
    ("codes are sent as floats", "tensor = tensor.view(torch.uint8)", "pass")],
  ("fused_moe/exchange.py", "tests/test_distributed.py -k overflow_is_counted"): [
    ("rows above the capacity are sent to the next rank", "& (row_index < capacity)", "")],
  ("fused_moe/routed.py", "tests/test_routed.py"): [
    ("dx without the router's part", "(main1, main3), *rounded) dw1", "(main1, main3))\n            dw1"),
    ("a large h is kept", "ctx.maybe_clear_saved_tensors()", "pass"),
    ("w2's edge is the third of any layer", "2 if w3 is None else 3", "3"),
    ("dlogits of a loss are left out", "if dlogits is None and main_grads", "if main_grads")],
  ("fused_moe/paths.py", "tests/test_routed.py"): [
    ("the router's hooks are passed over",
     'why_changed("router", router) or why_changed("experts", experts)', 'why_changed("experts", experts)')],
  ("fused_moe/paths.py", "tests/test_paths.py"): [
    ("hooked experts see padding", 'or why_changed("experts", layer.experts)\n', '\n'),
    ("a class's forward is passed over", "if cls.forward is not forward or cls.__call__", "if cls.__call__"),
    ("nn.Linear's forward is passed over", "not in (_LINEAR,", "not in (nn.Linear.forward,"),
    ("an instance's forward is passed over", 'if "forward" in vars(module):', "if False:"),
    ("a plan is made twice", "if plan is not None:", "if False:"),
    ("a checkpoint's operators are one", 'hooks[0].__module__ == "torch.utils.checkpoint"', "False"),
    ("autocast casts all weights at once", "if is_autocast_enabled(x) else", "if False else")],
  ("fused_moe/quantized/computing.py", "tests/test_eight_bits.py"): [
    ("auto takes codes for any number of rows", "return num_rows <= AUTO_ROWS * num_experts", "return True"),
    ("8 bits with a smooth of their own are taken for codes",
     'if mode != "int8_smooth" and w._smooth() is not None:', "if False:")],
  ("fused_moe/quantized/quantizing.py", "tests/test_eight_bits.py"): [
    ("the factors of x and of a change places",
     'factors = smooth2 if name == "w2" else smooth1', 'factors = smooth1 if name == "w2" else smooth2')],
  ("fused_moe/quantized/smoothing.py", "tests/test_eight_bits.py"): [
    ("experts without tokens have factors of no tokens",
     "torch.where(has_tokens, _normalised(measured), from_weights(*weights))", "_normalised(measured)"),
    ("each expert has the factors of the next one", "peaks[:-1].pow(alpha) /", "peaks[1:].pow(alpha) /")],
  ("csrc/cpu/rows.c", "tests/test_experts.py"): [
    ("bf16 is truncated", "(bits + 0x7fff + ((bits >> 16) & 1)) >> 16", "bits >> 16")],
  ("csrc/cpu/rows_accum.h", "tests/test_permute.py"): [
    ("a dot product loses its tail", "l = 0; i < n; i++, l++) lane[l", "l = 0; i < n - 1; i++, l++) lane[l")],
  ("csrc/cpu/rows_accum.h", "tests/test_experts.py"): [
    ("up's derivative has no gate", "ACCUM_NAME(chain)(da[i] * f.value, m)", "ACCUM_NAME(chain)(da[i], m)")],
  ("csrc/activation.h", "tests/test_experts.py"): [
    ("silu's derivative is the sigmoid", "s + x * s * (1 - s)", "s"),
    ("gelu's density is 3% too large", "0.39894228040143267794", "0.411"),
    ("gelu_tanh's cubic term", "(accum_t)0.044715;", "(accum_t)0.04;"),
    ("NaN passes the flat side of a kink",
     "p.flat ? 0 : d * p.derivative", "d * (p.flat ? 0 : p.derivative)"),
    ("up is clamped from above alone", "u < -c.limit ? -c.limit : u", "u")],
  ("csrc/activation.h", "tests/test_experts.py tests/test_gradcheck.py"): [
    ("relu's derivative at zero", "KINKED(x < 0 ? 0 : x, 1, x <= 0)", "KINKED(x < 0 ? 0 : x, 1, x < 0)")],
  ("csrc/slot_plan.h", "tests/test_host.py"): [
    ("few slots of one expert share a row", "< key", "/ FUSED_MOE_FEW_SLOTS < key / FUSED_MOE_FEW_SLOTS")],
  ("csrc/quantized_tile.h", "tests/test_tiles.py"): [
    ("the signs of a tile's mxfp4 codes are read from other bits", "0xecdf", "0xecfd")],
  ("fused_moe/widths.py", "tests/test_widths.py"): [
    ("padding casts float64 under autocast", "x.dtype != torch.float64 and torch.is_a", "torch.is_a"),
    ("a main_grad does not get the sums of its copy", "own.copy_(copy[", "own.clone().copy_(copy["),
    ("second derivatives miss a padded weight",
     "with_shape(_zeros_behind(w, rows)", "with_shape(_zeros_behind(w.detach(), rows)"),
    ("backward keeps padded copies", "if not any(copies):", "if True:"),
    ("halves are padded as one weight", "Rows(parts=2)", "Rows()")],
  ("fused_moe/routed.py", "tests/test_widths.py"): [
    ("joined experts are not padded", "if widths.are_padded(x, w1, w2, w3):", "if False:")],
  ("fused_moe/function.py", "tests/test_widths.py"): [
    ("what is padded is written beside out", "out is None or y is out else out.copy_(y)", "True else y")],
  ("fused_moe/main_grad.py", "tests/test_main_grads.py"): [
    ("autograd.grad of x adds to a main_grad", "is_asked(edges[i][0])", "True")],
  ("fused_moe/expert_bias.py", "tests/test_module.py"): [
    ("the load bias goes the wrong way", "torch.sign(shortfall)", "torch.sign(-shortfall)"),
    ("the load bias drifts", "(delta - delta.mean()).to(bias.device)", "delta.to(bias.device)")],
  ("fused_moe/expert_bias.py", "tests/test_distributed.py"): [
    ("balance sums over all ranks, not the group", ".all_reduce(loads, group=group)", ".all_reduce(loads)")],
  ("fused_moe/module.py", "tests/test_padding.py"): [
    ("shared experts' biases reach padding",
     "return zero_padding(shared if gate is None else _gated(gate(x), shared), num_tokens)",
     "return shared if gate is None else _gated(gate(x), shared)"),
    ("the shared experts' gate of padding",
     "return shared, None if logits is None else zero_padding(logits, num_tokens)", "return shared, logits"),
    ("shared experts compute padding",
     "= num_tokens.reshape(1).clamp(0, x.size(0))", "= torch.full_like(num_tokens.reshape(1), x.size(0))")],
  ("fused_moe/paths.py", "tests/test_padding.py"): [
    ("padding reaches the gate's gradient", "if is_recording() or layer.latent_down", "if layer.latent_down"),
    ("a foreign gate sees padding", 'why_changed("router.gate", router.gate) or why_unfit', "why_unfit")],
  ("fused_moe/paths.py", "tests/test_shared.py"): [
    ("shared experts join hooked experts", '"experts", modules.get("experts")) or why_changed("', '"')],
  ("fused_moe/paths.py", "tests/test_latent.py"): [
    ("a foreign latent_down sees padding", "() or layer.latent_down is not None:", "():")],
  ("fused_moe/module.py", "tests/test_shared.py"): [
    ("shared experts are added twice", "is not None and shared[0] is None:", "is not None:")],
  ("fused_moe/module.py", "tests/test_latent.py"): [
    ("padded rows get a bias of latent_up",
     'zero_padding(_linear(self.latent_up, out), given.get("num_tokens"))', "_linear(self.latent_up, out)")],
  ("fused_moe/module.py", "tests/test_module.py"): [
    ("a micro-batch is twice in the load of its loss", "load - counts if self.training else load", "load")],
  ("fused_moe/losses.py", "tests/test_padding.py"): [
    ("the shares of a batch with padding",
     "real.reshape(num_sequences, length).sum(1, keepdim=True)", "flat.new_full((num_sequences, 1), length)"),
    ("the losses' gradients see padding",
     "_zeroed(logits.reshape(-1, logits.size(-1)), real)", "logits.reshape(-1, logits.size(-1))")],
  ("fused_moe/losses.py", "tests/test_losses.py"): [
    ("masked tokens are in the load of the loss", "= has_expert & real.unsqueeze(1)", "= has_expert"),
    ("sequences without tokens are in the mean", "(tokens > 0).sum().clamp_min(1)", "max(num_sequences, 1)")],
  ("fused_moe/losses.py", "tests/test_distributed.py"): [
    ("a rank's loss is not scaled to the batch of all", "= num_experts * group.size()", "= num_experts")],
  ("fused_moe/balance.py", "tests/test_balance.py"): [
    ("a model's report shows the most balanced layers", "rows = [max", "rows = [min")],
})
CUDA = listed({
  ("csrc/kernels/common/route_plan.cu", "tests/test_route_plan.py"): [
    ("cuda: a span counts a slot too many", "[e] = 0; __syncthreads();", "[e] = e == 3; __syncthreads();"),
    ("cuda: ids are experts, with a map, too",
     "if (expert[i] >= 0) expert[i] = p.expert_map[expert[i]];", ";"),
    ("cuda: the second pass of a span forgets the first", "row_of_span[i] = row;", ";"),
    ("cuda: skinny experts' tiles begin at 0",
     "all[FULL_TILES] + before[SKINNY_TILES]", "before[SKINNY_TILES]")],
  ("csrc/kernels/common/route_plan.cu", "tests/cuda/test_misuse.py"): [
    ("cuda: counts are not clamped", "end = max((int64_t)0, min(end, s.R));", "")],
  ("csrc/kernels/common/choose.cuh", "tests/test_padding.py"): [
    ("cuda: scores of padding are a real token's", "has_expert &= token < num_tokens;", "")],
  ("csrc/kernels/common/route.cu", "tests/test_padding.py"): [
    ("cuda: the gradient of padding is computed", "if (!has_expert) {", "if (false) {")],
  ("csrc/kernels/common/pad.cu", "tests/test_pad.py"): [
    ("cuda: a row's last elements are not written", "if (edge < C)", "if (edge < head)"),
    ("cuda: copies of odd addresses are shifted", "address & 2 ? 16 : 0", "0"),
    ("cuda: what is behind a row is the next one's", "2 * i < n ? word & 0xffff : 0", "word")],
  ("csrc/kernels/common/permute.cu", "tests/test_permute.py"): [
    ("cuda: permute leaves tail rows", "((Unit *)p.rows)[r * p.D + j] = Unit{};", ";"),
    ("cuda: unpermute without scores", "has_row && scores ? scores[k0 + k] : Acc(has_row)", "Acc(has_row)"),
    ("cuda: drows without the score", "dout[c] *= score;", "dout[c] *= 1;")],
  ("csrc/kernels/common/permute.cu", "tests/cuda/test_unpermute.py"): [
    ("cuda: every column gets the shared experts' first ones", "chunks + chunk", "chunks + lane"),
    ("cuda: the sum of more than 32 slots forgets the shared experts", "if (p.shared) {", "if (false) {"),
    ("cuda: few tokens lose every second eight of their slots", "= ROWS", "= few_tokens ? 2 * ROWS : ROWS")],
  ("csrc/kernels/common/peers.cu", "tests/test_symmetric.py -k sum_peers"): [
    ("cuda: all rows are the first rank's", "p.rows[i / (uint32_t)p.C]", "p.rows[0]"),
    ("cuda: rows of several ranks without scores",
     "p.scores ? ((const Acc *)p.scores)[slot] : Acc(1)", "Acc(1)"),
    ("cuda: a row past the last rank's is read", "if (i >= (uint32_t)p.N * (uint32_t)p.C) continue;", "")],
  ("csrc/kernels/common/combine.cuh", "tests/cuda/test_unpermute.py"): [
    ("cuda: shared experts without their gate",
     "return shared_gate ? sigmoid(((const Acc *)shared_gate)[t]) : Acc(1);", "return Acc(1);")],
  ("csrc/kernels/common/bias_grad.cu", "tests/test_experts.py"): [
    ("cuda: bias_grad loses a warp's rows", "(int i = 1; i < WARPS; i++)", "(int i = 2; i < WARPS; i++)")],
  ("csrc/kernels/common/activate.cu", "tests/test_activate.py"): [
    ("cuda: every row has the first one's ups", "? up + r * F : gates + F;", "? up : gates + F;"),
    ("cuda: chunks past a row's end are in the same row", ".row = row + in_row / row_chunks", ".row = row")],
  ("csrc/kernels/common/dscores.cu", "tests/test_experts.py"): [
    ("cuda: dscores without b2", "if constexpr (LANES == 32) {", "if constexpr (false) {")],
  ("csrc/kernels/sm80/wgrad.cu", "tests/test_main_grads.py"): [
    ("sm80: a main gradient is overwritten", "v[c] += old.v[c];", "v[c] += 0;")],
  ("csrc/kernels/sm80/wgrad.cu", "tests/test_experts.py"): [
    ("sm80: wgrad loses an expert's last row", "num_rows = rows.num;", "num_rows = max(0, rows.num - 1);")],
  ("csrc/kernels/sm80/tile_scheduler.cuh", "tests/cuda/test_sm80_few_rows.py"): [
    ("sm80: a full tile of few rows loses its last row", "- done, rows", "- done, rows - 1")],
  ("csrc/kernels/sm80/few_rows_tile.cuh", "tests/cuda/test_sm80_few_rows.py"): [
    ("sm80: columns of few rows are read past the swizzle", "^ group * 16 * SIZE", "+ group * 16 * SIZE")],
  ("csrc/kernels/sm90/eight_bit_config.cuh", "tests/cuda/test_sm90_fp8_training.py"): [
    ("sm90: subtiles of 8 bits have the scale of the first one",
     "(tile.first_column + SUBTILE * subtile)", "tile.first_column")],
  ("csrc/kernels/sm90/eight_bit_up_gate.cu", "tests/cuda/test_eight_bit_tiles.py::test_every_layout"): [
    ("sm90: a's scale is of half of its columns",
     "peak = max_nan_f32(peak, __shfl_xor_sync(~0u, peak, 2));", "")],
  ("csrc/kernels/sm90/eight_bit_up_gate.cu", "tests/cuda/test_sm90_fp8_training.py"): [
    ("sm90: rows of codes are zeroed as rows of 16 bits", "Config::IN_BLOCKS ? p.F / 2 : p.F);", "p.F);"),
    ("sm90: h that is kept has ups in the place of gates", "(i / 2) * p.F + first +", "first +")],
  ("csrc/kernels/sm80/eight_bit.cu", "tests/cuda/test_eight_bit_portable.py"): [
    ("sm80: int8 weights always have a scale per row",
     "scale[has_row_scales ? expert * out + row : expert]", "scale[expert * out + row]"),
    ("sm80: ups have the scales of the gates", "(w.tile.expert, up_row)", "(w.tile.expert, row)"),
    ("sm80: int8 rows have the scale of the tile's first row", ".tile.first_row + row]", ".tile.first_row]")],
  ("csrc/kernels/common/tensor_map.cuh", "tests/cuda/test_sm90_up_gate.py"): [
    ("sm90: half of the swizzle", "16 * (chunk ^ row % 8)", "16 * (chunk ^ row % 4)")],
  ("csrc/kernels/sm90/rows.cuh", "tests/cuda/test_sm90_up_gate.py"): [
    ("sm90: the gather reads past k", "TILE_K * j < left && (", "(")],
  ("csrc/kernels/sm90/config.cuh", "tests/cuda/test_sm90_grouped_mm.py"): [
    ("sm90: skinny experts of 33 rows lose some", "<int, 8, 32, 64>;", "<int, 8, 32>;"),
    ("sm90: a tile of few rows loses those past wgmma's N", "(rows > N) return", "(rows > 2 * N) return")],
  ("csrc/kernels/sm90/gemm.cuh", "tests/cuda/test_sm90_grouped_mm.py"): [
    ("sm90: the last subtile is not flushed", ".skinny || num_k_tiles < Epilogue::SUBTILES", ".skinny")],
  ("csrc/kernels/sm90/mainloop.cuh", "tests/cuda/test_sm90_grouped_mm.py"): [
    ("sm90: the first k-tile accumulates", "<N, !first.value, A_MAJOR, B_MAJOR", "<N, 1, A_MAJOR, B_MAJOR")],
  ("csrc/kernels/sm90/mainloop.cuh", "tests/cuda/test_sm90_wgrad.py"): [
    ("sm90: an expert's last 16 rows are left out of its gradient", "> 0; rows -=", "> WGMMA_K; rows -=")],
  ("csrc/kernels/sm90/tile_queue.cuh", "tests/cuda/test_sm90_grouped_mm.py"): [
    ("sm90: the parts of a cut tile begin at its first row", "-= part, tile.first_row += part", "-= part"),
    ("sm90: the last part of a cut tile is as high as the others", "tile.num_rows = rows; } fn(", "} fn(")],
  ("csrc/kernels/sm90/cluster_plan.cu", "tests/cuda/test_cluster_plan.py"): [
    ("sm90: every CTA of a cluster has the first one's rows", "if (cta < blockIdx.x) earlier += count;", ""),
    ("sm90: all chunks of a span begin at the same rows", "= (uint16_t)rows;", "= 0;"),
    ("sm90: experts past a CTA's threads begin at row 0", "row += before;", ""),
    ("sm90: a cluster's plan has no -1 past the last row",
     "if (slot >= num_rows) p.row_slot[slot] = p.row_token[slot] = -1;", ""),
    ("sm90: a cluster counts ids without the map",
     "int64_t e = slot_expert(&q.plan, span.", "int64_t e = integer(q.plan.ids, q.plan.ids_dtype, span.")],
  ("csrc/kernels/sm90/cluster_plan.cu", "tests/cuda/test_one_launch.py"): [
    ("sm90: a cluster's plan has row tiles of 128 rows for any GEMM",
     "q.slice_rows, p.tile_rows", "q.slice_rows")],
  ("csrc/kernels/sm90/up_gate.cuh", "tests/cuda/test_sm90_up_gate.py"): [
    ("sm90: up_gate without the up bias", "if (bias_up) add_bias(up, bias_up, column, p.F);", ""),
    ("sm90: the swapped up bias is gate's", "(second, bias_up, column, p.F)", "(second, bias, column, p.F)"),
    ("sm90: interleaved a one column off", "(~0u, outputs[n], 4)", "(~0u, outputs[n], 8)")],
  ("csrc/kernels/sm90/down_dgrad.cu", "tests/cuda/test_sm90_down_dgrad.py"): [
    ("sm90: dh without the score", "da[n] = score * g[n];", "da[n] = g[n];"),
    ("sm90: a_scaled without the score", "dot += g[n] * a[n], a[n] *= score;", "dot += g[n] * a[n];"),
    ("sm90: dscores of the last subtile alone", "dot += g[n] * a[n],", "dot = g[n] * a[n],"),
    ("sm90: down_dgrad leaves tail rows",
     "if (e.a_scaled) zero_rows_past(gemm.tiles, (T *)e.a_scaled, e.F);", "")],
  ("csrc/kernels/sm90/wgrad.cu", "tests/cuda/test_sm90_wgrad.py"): [
    ("sm90: an empty expert's gradient is what registers held", "d[i] = 0;", "d[i] = 1;"),
    ("sm90: split-K keeps its last slice alone",
     "num_slices == 1 || sum_slices(p, tile, wg, d)", "num_slices == 1 || tile.slice == tile.num_slices - 1"),
    ("sm90: a main gradient is overwritten", "if (p.accumulate) cp_reduce", "if (false) cp_reduce")],
  ("csrc/kernels/sm90/quantize_dh.cu", "tests/test_fp8_bits.py"): [
    ("sm90: columns' scale of dh without the last warp's rows", "0; i < TILE_WARPS", "0; i < TILE_WARPS - 1"),
    ("sm90: columns of ups begin beside those of gates", "dh_t, in_dh + n_tiles, UP", "dh_t, in_dh + 1, UP"),
    ("sm90: row blocks without rows are left",
     "clear((uint8_t *)p.dh_t + used * q.H * TILE_ROWS, (next - used) * q.H * TILE_ROWS / 16);", "")],
  ("csrc/kernels/sm90/quantize_dh.cu", "tests/cuda/test_sm90_fp8_training.py"): [
    ("sm90: dscores of the last column alone", "dot[i] += g[j] * a[j], a[j]", "dot[i] = g[j] * a[j], a[j]"),
    ("sm90: of two rows the second's sum is the first's", "? first : second;", "? second : first;")],
  ("csrc/kernels/sm90/transpose_codes.cu", "tests/test_fp8_bits.py"): [
    ("sm90: padding of x is a block's first row", "* chunk, exists", "* chunk, true")],
  ("csrc/kernels/sm90/quantize_weight.cu", "tests/cuda/test_sm90_fp8_training.py"): [
    ("sm90: a transposed weight has the scales as they were",
     "q.scale_t[(expert * column_blocks + blockIdx.x) * row_blocks + blockIdx.y]",
     "q.scale_t[(expert * row_blocks + blockIdx.y) * column_blocks + blockIdx.x]")],
  ("csrc/kernels/sm90/eight_bit_wgrad.cu", "tests/test_fp8_bits.py"): [
    ("sm90: 256 columns of a row block have one scale", "/ FUSED_MOE_BLOCK + lane / 2", "/ FUSED_MOE_BLOCK"),
    ("sm90: every slice has the first one's row blocks", "+ row_in_expert / FUSED_MOE_BLOCK;", ";"),
    ("sm90: split-K of 8 bits keeps its last slice alone",
     ".num_slices > 1 && !sum_slices(p, tile, wg, d)", ".num_slices > 1 && tile.slice < tile.num_slices - 1"),
    ("sm90: a main gradient of 8 bits is overwritten", "(p.accumulate) cp_reduce", "(false) cp_reduce")],
})
# fmt: on


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


# --- records and table ----------------------------------------------------------------------------


def digest(mutant: Mutant) -> str:
    """Changes with the mutant's text, white space apart: then it has to be tried again."""
    words = " ".join((mutant.path, *mutant.old.split(), "->", *mutant.new.split()))
    return hashlib.sha256(words.encode()).hexdigest()[:12]


def read_killers() -> dict[tuple[str, str], str]:
    """{(name, digest): the test that kills it, or ""}."""
    rows = [line.split("\t") for line in RECORDS.read_text().splitlines()]
    return {(name, key): killer for name, key, killer in rows}


def write_killers(found: dict[str, str]) -> None:
    """found: {mutant: the test that kills it, or ""}. What was not tried keeps its result, if it has one."""
    killers = read_killers()
    for mutant in (*CPU, *CUDA):
        if mutant.name in found:
            killers[mutant.name, digest(mutant)] = found[mutant.name]
    keys = [(m.name, digest(m)) for m in (*CPU, *CUDA)]
    RECORDS.write_text(
        "".join(f"{name}\t{key}\t{killers[name, key]}\n" for name, key in keys if (name, key) in killers)
    )


def cell(code: str) -> str:
    code = re.sub(r"\s+", " ", code.strip()).replace("|", "\\|")
    return f"`` {code} ``" if code else "(nothing)"


def table(mutants: list[Mutant]) -> str:
    """In Markdown, with the test that noticed each mutant."""
    killers = read_killers()
    lines = ["| mutant | file | instead of | it has | killed by |", "| --- | --- | --- | --- | --- |"]
    for m in mutants:
        killer = killers.get((m.name, digest(m)))
        last = "not tried yet" if killer is None else f"`{killer}`" if killer else "**nothing**"
        lines.append(f"| {m.name} | {m.path} | {cell(m.old)} | {cell(m.new)} | {last} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="these mutants alone")
    parser.add_argument("--cuda", action="store_true", help="the CUDA kernels' mutants; needs a GPU and nvcc")
    parser.add_argument("--list", action="store_true", help="print the table of mutants; none is tried")
    options = parser.parse_args()
    mutants = CUDA if options.cuda else [*CPU, *CUDA] if options.list else CPU
    unknown = set(options.names) - {m.name for m in mutants}
    if unknown:
        raise SystemExit(f"no such mutants: {', '.join(sorted(unknown))}")
    mutants = [m for m in mutants if not options.names or m.name in options.names]
    for mutant in mutants:
        sole_place(mutant, ROOT)
    if options.list:
        print(table(mutants))
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
        write_killers(found)
        build(tree, options.cuda)
    raise SystemExit(not all(found.values()))


if __name__ == "__main__":
    main()
