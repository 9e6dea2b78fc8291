/* Every rule on shapes: which kernel runs, which tiles it has, and who makes the plan.
 *
 * The host knows sizes, not how rows are distributed over the experts, so rules speak of averages. A result
 * has the same bits on both sides of a bound, but for that of compute="auto". The measurements behind the
 * figures are in docs/lab.md. Numbers of SMs and CTAs are the device's. The other bounds were measured on
 * H100 and H200, and apply to other GPUs unmeasured. How wgrad's rows are cut into slices is the schedule's
 * rule (schedule.h).
 *
 *   T tokens, K slots of a token, R rows, E experts, D and F widths, k a GEMM's reduction
 *
 * Plain C: bindings, kernels and tests (tests/test_rules.py) call the same functions. */
#ifndef FUSED_MOE_RULES_H
#define FUSED_MOE_RULES_H

#include <stdbool.h>

#include "schedule.h"

/* --- rows of an expert ---------------------------------------------------------------------------------- */

/* With more rows, full tiles run in lockstep, which a launch that begins early would break. A cluster's plan
 * has the same bound on the device (sm90/cluster_plan.cu). */
FUSED_MOE_FN bool fused_moe_has_skinny_average(int64_t R, int64_t E) {
    return R <= FUSED_MOE_SKINNY_ROWS * E;
}

/* Rows of a tile of the CUDA tiers' grouped_mm and up_gate where experts have few rows: 16 or 64; 0: the
 * usual tiles. A CTA cuts a tile of more rows and reads the weight again for each part. Skewed routing makes
 * that dear where the average is higher than here. */
FUSED_MOE_FN int32_t fused_moe_few_rows(int64_t R, int64_t E) {
    return R <= 2 * E ? 16 : R <= 16 * E ? 64 : 0;
}

/* The same for both GEMMs in one launch (sm90/experts.cuh), whose plan has row tiles of this height. An
 * expert's row tiles run side by side and share the weight in L2, so up to 32 rows count as few. */
FUSED_MOE_FN int32_t fused_moe_few_rows_together(int64_t R, int64_t E) {
    int32_t rows = fused_moe_few_rows(R, E);
    return rows || R > 32 * E ? rows : 64;
}

/* From here on k is long: a GEMM has few tiles, and each takes long. */
enum { FUSED_MOE_LONG_K = 2560 };

/* Subtiles of 64 weight rows in a tile of few rows. With a long k, tiles of one subtile keep more CTAs
 * loading. */
FUSED_MOE_FN int32_t fused_moe_few_rows_subtiles(int32_t tile_rows, int64_t k) {
    return tile_rows == 16 && k >= FUSED_MOE_LONG_K ? 1 : 2;
}

/* The same for up_gate in sm90/experts.cu, whose usual tile is 64 gates and their 64 ups. One subtile of 32
 * and 32 where the usual tiles are fewer than the CTAs, two on each SM. */
FUSED_MOE_FN int32_t fused_moe_experts_up_subtiles(int64_t R, int64_t E, int64_t F, int32_t num_sms) {
    int64_t tiles = (R < E ? R : E) * ((F + 63) / 64);
    return fused_moe_few_rows_together(R, E) == 16 && tiles < 2 * num_sms ? 1 : 2;
}

/* Whether the down GEMM begins while up_gate runs, and loads weights until that has ended. A
 * large CTA's tiles of a long k are few, and would be where SMs are free instead of spread evenly over the
 * GPU. Few rows of a dense weight have small CTAs, two on an SM, and begin whatever k is. */
FUSED_MOE_FN bool fused_moe_down_reads_before_wait(int64_t R, int64_t E, int64_t F, bool is_quantized) {
    return (fused_moe_few_rows(R, E) && !is_quantized) ||
           (fused_moe_has_skinny_average(R, E) && F < FUSED_MOE_LONG_K);
}

/* --- quantised weights ---------------------------------------------------------------------------------- */

/* Rows of an expert up to which a GEMM reads the quantised weight. With more, dequantising it first is
 * faster, since every row tile makes its values anew. The sm90 tier reads weights packed in tiles. The sm80
 * tier reads published weights, and only in tiles of few rows. Transposed weights, in backward, mostly have a
 * scale for each column. */
FUSED_MOE_FN int64_t fused_moe_most_quantized_rows(bool has_tiles, bool is_transposed) {
    return !has_tiles ? 16 : is_transposed ? 768 : 3072;
}

/* Rows of a tile of a quantised weight on sm90. A tall tile of 256 makes the weight's values once for twice
 * the rows. That is faster with more than 384 rows of an expert. */
FUSED_MOE_FN int32_t fused_moe_quantized_tile_rows(int64_t R, int64_t E) {
    if (fused_moe_few_rows(R, E) == 16) return 16;
    return fused_moe_has_skinny_average(R, E) ? 64 : R <= 384 * E ? 128 : 256;
}

/* How many tiles of `columns` columns the down GEMM has, if no expert has more rows than a tile. */
FUSED_MOE_FN int64_t fused_moe_down_tiles(int64_t R, int64_t E, int64_t M, int64_t columns) {
    return (R < E ? R : E) * ((M + columns - 1) / columns);
}

/* Whether both GEMMs of quantised weights are one launch (sm90/quantized_experts.cu), in tiles of 16 rows.
 * With a long k that saves little, up to one row on average; and where the down GEMM has fewer tiles than
 * there are SMs, some of these would get two and others none. */
FUSED_MOE_FN bool fused_moe_quantized_together(int64_t R, int64_t E, int64_t M, int64_t F, int32_t num_sms) {
    if (fused_moe_few_rows(R, E) != 16) return false;
    return F < FUSED_MOE_LONG_K || (R <= E && fused_moe_down_tiles(R, E, M, 64) >= num_sms);
}

/* Columns of the down GEMM's tiles there: 128, or 64 where such tiles would be fewer than the SMs. */
FUSED_MOE_FN int32_t fused_moe_quantized_down_columns(int64_t R, int64_t E, int64_t M, int32_t num_sms) {
    return fused_moe_down_tiles(R, E, M, 128) < num_sms ? 64 : 128;
}

/* Whether the down GEMM alone, in tiles of 16 rows, has tiles of 64 columns and one CTA on each SM: such
 * tiles are no more than the SMs. With room for two CTAs on an SM some would get two tiles, others none. */
FUSED_MOE_FN bool fused_moe_quantized_down_spreads(int64_t R, int64_t E, int64_t M, int32_t num_sms) {
    return fused_moe_few_rows(R, E) == 16 && fused_moe_down_tiles(R, E, M, 64) <= num_sms;
}

/* --- 8 bits on both operands ---------------------------------------------------------------------------- */

/* Python has the same numbers (fused_moe/quantized/computing.py). */
enum {
    FUSED_MOE_EIGHT_BIT_WIDTH = 16,         /* D and F are multiples of it: TMA reads 16 bytes of a row */
    FUSED_MOE_EIGHT_BIT_MOST_WIDTH = 16384, /* elements of a row that one CTA can quantise              */
    FUSED_MOE_EIGHT_BIT_AUTO_ROWS = 16,     /* average rows per expert up to which "auto" takes codes   */
};

/* Whether compute="auto" multiplies by the values of codes, and not 8 bits by 8 bits. With few rows the time
 * is that of reading the weight, and codes err less. This rule alone decides about bits. */
FUSED_MOE_FN bool fused_moe_auto_takes_codes(int64_t R, int64_t E) {
    return R <= FUSED_MOE_EIGHT_BIT_AUTO_ROWS * E;
}

/* --- FP8 training --------------------------------------------------------------------------------------- */

/* Whether fp8_wgrad="auto" takes FP8 weight gradients: their operands are quantised by columns, in row blocks
 * that an expert fills up with zeros, which experts of few rows do not pay back. Python has the same number
 * (fused_moe/fp8.py). This rule decides about bits, too. */
FUSED_MOE_FN bool fused_moe_fp8_wgrad_pays(int64_t R, int64_t E) {
    return R >= 256 * E;
}

/* How many of the D columns of x, or for dw2 of the output's gradient, are stored by columns at a time, for
 * their part of the weight gradient alone: a multiple of 128, in at most eight chunks. The most with which
 * the gradient takes no more memory than a step in bf16 has at its peak, or all if they are a sixteenth of
 * that.
 * Bytes that are alive, with P rows in row blocks, H columns of h, N columns at a time:
 *
 *               dw2                                              dw1 and dw3
 *   bf16        h 2RH, dh 2RH, a 2RF, dw2 2EDF                   dh 2RH, dx 2TD, dw2 2EDF, dw1 and dw3 2EDH;
 *                                                                before these two dx of each row, 2RD
 *   FP8         h 2RH, dh RH + RH/32 + PH, a PF, dw2 2EDF        dh PH, dx 2TD, dw2 2EDF, dw1 and dw3 2EDH
 *   and codes   of dout TD, by columns PN                        of x TD, by columns PN */
FUSED_MOE_FN int64_t fused_moe_fp8_column_chunk(int64_t T, int64_t R, int64_t E, int64_t D, int64_t F,
                                                int64_t H, bool of_dw2) {
    const int64_t P = (R / 128 + E) * 128, of_down = 4 * R * H + 2 * R * F + 2 * E * D * F;
    const int64_t of_up = 2 * R * H + 2 * T * D + 2 * E * D * F + 2 * D * (R > E * H ? R : E * H);
    const int64_t in_dw2 = 3 * R * H + R * H / 32 + P * (H + F) + 2 * E * D * F + T * D,
                  in_dw1 = P * H + 3 * T * D + 2 * E * D * (F + H);
    const int64_t peak = of_down > of_up ? of_down : of_up, room = peak - (of_dw2 ? in_dw2 : in_dw1);
    if (P * D <= peak / 16) return D;
    int64_t columns = D;
    for (int32_t chunks = 1; chunks <= 8; chunks++) {
        columns = (D / 128 + chunks - 1) / chunks * 128;
        if (P * columns > room) continue;
        const int64_t even = (columns + 255) / 256 * 256; /* whole tiles of the GEMM */
        return even <= D && P * even <= room ? even : columns;
    }
    return columns;
}

/* --- weight gradients ----------------------------------------------------------------------------------- */

/* Whether wgrad's gathered operand, N columns wide, is copied into expert order first, half of its columns at
 * a time. The copy pays from 3,000 columns of the other operand on. It takes memory, which from 8,192 on is
 * less than the gradients' own. */
FUSED_MOE_FN bool fused_moe_gathers_first(int64_t columns, int64_t N) {
    return columns >= 8192 && N % 256 == 0;
}

/* --- which CTA computes which tile ---------------------------------------------------------------------- */

/* Whether CTAs take their tiles in turn. With a short k and many columns the epilogue's memory takes longer
 * than the MMAs. */
FUSED_MOE_FN bool fused_moe_takes_turns(int64_t columns, int64_t k) {
    return k <= 1024 && columns > 1024;
}

/* The same for a weight gradient: tiles of few rows have an unequal number of k-tiles, and if an expert has
 * tiles for several waves, CTAs that drift apart read its rows again. */
FUSED_MOE_FN bool fused_moe_wgrad_takes_turns(int64_t R, int64_t E, int64_t weight_tiles, int32_t num_ctas) {
    return R <= 640 * E && weight_tiles > 2 * num_ctas;
}

/* Whether writing dw takes a weight gradient's time: experts have few rows, and dw is larger than L2. Then,
 * too, CTAs take their tiles in turn. */
FUSED_MOE_FN bool fused_moe_wgrad_is_write_bound(int64_t R, int64_t E, int64_t weight_tiles,
                                                 int32_t num_ctas) {
    return R <= 128 * E && E * weight_tiles >= 16 * num_ctas;
}

/* Consecutive tiles that a CTA of a weight gradient takes at once. If an expert has few tiles, a CTA's next
 * tile would nearly always be another expert's, and finding that takes longer than computing a tile of few
 * rows. */
FUSED_MOE_FN int32_t fused_moe_wgrad_tiles_at_once(int64_t R, int64_t E, int64_t weight_tiles,
                                                   int32_t num_ctas) {
    return fused_moe_wgrad_is_write_bound(R, E, weight_tiles, num_ctas) && weight_tiles <= 2 * num_ctas ? 2
                                                                                                        : 1;
}

/* --- the router's GEMM ---------------------------------------------------------------------------------- */

/* Columns of a slice of D: at most eight slices, each summed from zero and added in order. The rule knows D
 * alone, so a token's logits have the same bits in any batch. */
FUSED_MOE_FN int64_t fused_moe_router_slice(int64_t D) {
    int64_t eighth = (D + 7) / 8;
    return eighth < 512 ? 512 : (eighth + 63) / 64 * 64;
}

/* Slices that each CTA of a cluster sums, 1, 2 or 4, so that more SMs read the weight: the fewest with which
 * all clusters of 64x64 tiles run at once. 0: a CTA sums all slices. Clusters do not reach every SM, since a
 * GPC's SMs are no multiple of a cluster's CTAs. */
FUSED_MOE_FN int32_t fused_moe_router_cta_slices(int64_t T, int64_t E, int64_t D, int32_t num_ctas) {
    int64_t tiles = (T + 63) / 64 * ((E + 63) / 64), slice = fused_moe_router_slice(D);
    int64_t slices = (D + slice - 1) / slice;
    for (int32_t each = 1; each <= 4; each *= 2) {
        int64_t cluster = (slices + each - 1) / each;
        if (tiles * cluster <= (cluster > 1 ? num_ctas * 3 / 4 : num_ctas)) return each;
    }
    return 0;
}

/* Tokens and experts of a tile where a CTA sums all slices. A tile of 256 experts reads x less often, and
 * needs more tiles than CTAs; with few tiles one has half of the tokens, so that more CTAs have one. */
typedef enum {
    FUSED_MOE_ROUTER_128X64,
    FUSED_MOE_ROUTER_64X128,
    FUSED_MOE_ROUTER_128X128,
    FUSED_MOE_ROUTER_128X256,
} FusedMoeRouterTile;

FUSED_MOE_FN FusedMoeRouterTile fused_moe_router_tile(int64_t T, int64_t E, int32_t num_ctas) {
    int64_t row_tiles = (T + 63) / 64; /* of 64 tokens */
    if (E <= 64) return FUSED_MOE_ROUTER_128X64;
    if (E > 128 && row_tiles * ((E + 255) / 256) > num_ctas) return FUSED_MOE_ROUTER_128X256;
    return row_tiles * ((E + 127) / 128) <= num_ctas ? FUSED_MOE_ROUTER_64X128 : FUSED_MOE_ROUTER_128X128;
}

/* --- the choice, the plan and the combine --------------------------------------------------------------- */

enum {
    FUSED_MOE_FEW_SLOTS = 64,       /* that a GEMM plans; an expert that has them all is skinny */
    FUSED_MOE_PASS_SLOTS = 1024,    /* that a CTA of route_plan sorts at once                   */
    FUSED_MOE_RANGE_EXPERTS = 512,  /* experts per CTA of route_plan, at most                   */
    FUSED_MOE_COUNTED_SLOTS = 8192, /* counting these takes less time than a launch             */
    FUSED_MOE_CLUSTER_CTAS = 8,     /* the largest cluster that every GPU with clusters runs    */
    FUSED_MOE_CLUSTER_SLOTS = 8192,
    FUSED_MOE_CLUSTER_CHOICES = 4096, /* slots, where their experts are chosen, too */
    FUSED_MOE_CLUSTER_EXPERTS = 1024,
    FUSED_MOE_SPAN_SLOTS = FUSED_MOE_CLUSTER_SLOTS / FUSED_MOE_CLUSTER_CTAS, /* of one CTA, at most */
};

/* Whether a whole warp chooses a token's experts. Few tokens do not fill the SMs, or the cluster; with all
 * lanes each has fewer experts and is done sooner. */
FUSED_MOE_FN bool fused_moe_chooses_by_warp(int64_t T, int64_t E, bool by_cluster) {
    return T <= (by_cluster ? 128 : 1024) && E <= 256;
}

/* Whether each CTA of a GEMM may sort the slots (slot_plan.h): there is a slot, and keys fit in 32 bits. */
FUSED_MOE_FN bool fused_moe_has_few_slots(int64_t num_slots, int64_t E) {
    return 0 < num_slots && num_slots <= FUSED_MOE_FEW_SLOTS && E <= 1 << 25;
}

/* Slots of a CTA's span in a cluster's plan: consecutive ones, and whole tokens where it chooses their
 * experts. The last spans may be shorter, or empty. */
FUSED_MOE_FN int64_t fused_moe_span_slots(int64_t T, int64_t K, bool chooses) {
    int64_t together = chooses ? K : 1, parts = chooses ? T : T * K;
    return (parts + FUSED_MOE_CLUSTER_CTAS - 1) / FUSED_MOE_CLUSTER_CTAS * together;
}

/* Whether one cluster makes the plan in one launch, together with the choice of its ids where it chooses. The
 * GEMMs plan fewer slots. More take longer on the SMs of one cluster than two or three launches take on all
 * SMs. */
FUSED_MOE_FN bool fused_moe_has_cluster_plan(int64_t T, int64_t K, int64_t E, bool chooses) {
    int64_t most = chooses ? FUSED_MOE_CLUSTER_CHOICES : FUSED_MOE_CLUSTER_SLOTS;
    return FUSED_MOE_FEW_SLOTS < T * K && T * K <= most && E <= FUSED_MOE_CLUSTER_EXPERTS &&
           fused_moe_span_slots(T, K, chooses) <= FUSED_MOE_SPAN_SLOTS;
}

/* Who makes the plan of a call that does not return it. */
typedef enum {
    FUSED_MOE_PLAN_IN_GEMM,     /* every CTA of both GEMMs, without a launch for it */
    FUSED_MOE_PLAN_WITH_CHOICE, /* one cluster, which also chooses the experts      */
    FUSED_MOE_PLAN_BY_CLUSTER,  /* one cluster, from the ids                        */
    FUSED_MOE_PLAN_BY_KERNELS,  /* route_plan's                                     */
} FusedMoePlanner;

/* gemms_plan: both GEMMs run on a tier that can make it. chooses: the experts are not chosen yet, and a
 * cluster can. */
FUSED_MOE_FN FusedMoePlanner fused_moe_planner(int64_t T, int64_t K, int64_t E, bool gemms_plan,
                                               bool has_clusters, bool chooses) {
    if (gemms_plan && fused_moe_has_few_slots(T * K, E)) return FUSED_MOE_PLAN_IN_GEMM;
    if (has_clusters && chooses && fused_moe_has_cluster_plan(T, K, E, true))
        return FUSED_MOE_PLAN_WITH_CHOICE;
    if (has_clusters && fused_moe_has_cluster_plan(T, K, E, false)) return FUSED_MOE_PLAN_BY_CLUSTER;
    return FUSED_MOE_PLAN_BY_KERNELS;
}

/* Whether every CTA of route_plan counts all slots itself, once for each PASS_SLOTS experts. More slots are
 * counted by a launch before it. */
FUSED_MOE_FN bool fused_moe_counts_every_slot(int64_t num_slots, int64_t E) {
    return num_slots * ((E + FUSED_MOE_PASS_SLOTS - 1) / FUSED_MOE_PASS_SLOTS) <= FUSED_MOE_COUNTED_SLOTS;
}

/* Spans of slots that route_plan's CTAs count and scatter. Short spans are done sooner, but every CTA adds
 * the spans' counts if a launch made them. A span has a CTA for each range of experts, and the plan has one
 * more: all run at once, unless ranges alone outnumber the SMs. */
FUSED_MOE_FN int32_t fused_moe_num_spans(int64_t num_slots, int64_t E, int32_t num_sms) {
    int64_t span_slots = fused_moe_counts_every_slot(num_slots, E) ? 256 : 512;
    int64_t ranges = (E + FUSED_MOE_RANGE_EXPERTS - 1) / FUSED_MOE_RANGE_EXPERTS;
    int64_t spans = (num_slots + span_slots - 1) / span_slots;
    int64_t most = ranges < num_sms ? (num_sms - 1) / ranges : 1;
    return (int32_t)(spans < most ? spans : most);
}

/* Whether a warp of unpermute has half of the columns, and a lane twice the rows in flight: with few tokens,
 * the latency of consecutive loads is the time. */
FUSED_MOE_FN bool fused_moe_has_few_tokens(int64_t T) {
    return T <= 512;
}

#endif
