/* permute, unpermute and unpermute's gradients: rows moved between token order and expert order.
 *
 * permute and unpermute are each other's adjoint. Both walk their output, so no two tasks write one row, and
 * unpermute sums a token's rows in slot order, then the shared experts' row, in the accumulation type: the
 * same bits on any number of threads. */
#include "cpu.h"

#include <math.h>
#include <string.h>

enum { BLOCK = 64 }; /* rows or tokens per task */

/* --- permute -------------------------------------------------------------------------------------------- */

static int permute_block(int64_t block, const void *ctx, char *scratch) {
    const FusedMoePermute *p = ctx;
    int64_t row_bytes = p->D * (int64_t)fm_rows(p->dtype)->elem_bytes;
    int64_t num_rows = p->row_map.offs[p->row_map.E - 1];
    (void)scratch;
    for (int64_t r = block * BLOCK; r < fm_min(p->row_map.R, (block + 1) * BLOCK); r++) {
        void *row = fm_at(p->rows, row_bytes, r);
        if (r < num_rows)
            fm_copy(row, fm_at(p->x, row_bytes, p->row_map.row_token[r]), row_bytes);
        else
            fm_clear(row, row_bytes);
    }
    return FUSED_MOE_OK;
}

int fused_moe_cpu_permute(const FusedMoePermute *p) {
    if (!fm_rows(p->dtype)) return FUSED_MOE_UNSUPPORTED_DTYPE;
    if (!fm_row_map_is_valid(&p->row_map)) return FUSED_MOE_INVALID_ROWS;
    return fm_parallel(fm_blocks(p->row_map.R, BLOCK), p->row_map.R * p->D, permute_block, p, 0);
}

/* --- unpermute ------------------------------------------------------------------------------------------ */

static double sigmoid(double x) {
    return 1 / (1 + exp(-x));
}

static int unpermute_block(int64_t block, const void *ctx, char *scratch) {
    const FusedMoeUnpermute *p = ctx;
    const FmRows *v = fm_rows(p->dtype);
    size_t unused = 0;
    void *sum = fm_take(&scratch, &unused, p->D * v->accum_bytes);
    void *row = fm_take(&scratch, &unused, p->D * v->accum_bytes);
    for (int64_t t = block * BLOCK; t < fm_min(p->row_map.T, (block + 1) * BLOCK); t++) {
        memset(sum, 0, p->D * v->accum_bytes);
        for (int64_t slot = t * p->row_map.K; slot < (t + 1) * p->row_map.K; slot++) {
            int32_t r = p->row_map.token_row[slot];
            if (r < 0) continue;
            v->load(row, fm_at(p->rows, v->elem_bytes, r * p->D), p->D);
            v->axpy(sum, p->scores ? v->get(p->scores, slot) : 1, row, p->D);
        }
        if (p->shared) {
            v->load(row, fm_at(p->shared, v->elem_bytes, t * p->D), p->D);
            v->axpy(sum, p->shared_gate ? sigmoid(v->get(p->shared_gate, t)) : 1, row, p->D);
        }
        v->store(fm_at(p->out, v->elem_bytes, t * p->D), sum, p->D);
    }
    return FUSED_MOE_OK;
}

int fused_moe_cpu_unpermute(const FusedMoeUnpermute *p) {
    const FmRows *v = fm_rows(p->dtype);
    if (!v) return FUSED_MOE_UNSUPPORTED_DTYPE;
    if (!fm_row_map_is_valid(&p->row_map)) return FUSED_MOE_INVALID_ROWS;
    size_t bytes = 2 * (p->D * v->accum_bytes + 64);
    int64_t num_rows = p->row_map.R + (p->shared ? p->row_map.T : 0);
    return fm_parallel(fm_blocks(p->row_map.T, BLOCK), num_rows * p->D, unpermute_block, p, bytes);
}

/* --- unpermute's gradients ------------------------------------------------------------------------------ */

static int unpermute_backward_block(int64_t block, const void *ctx, char *scratch) {
    const FusedMoeUnpermuteBackward *p = ctx;
    const FmRows *v = fm_rows(p->dtype);
    size_t unused = 0;
    void *dout = fm_take(&scratch, &unused, p->D * v->accum_bytes);
    void *row = fm_take(&scratch, &unused, p->D * v->accum_bytes);
    int64_t num_rows = p->row_map.offs[p->row_map.E - 1];
    for (int64_t r = block * BLOCK; r < fm_min(p->row_map.R, (block + 1) * BLOCK); r++) {
        void *drow = p->drows ? fm_at(p->drows, v->elem_bytes, r * p->D) : NULL;
        if (r >= num_rows) {
            if (drow) fm_clear(drow, p->D * (int64_t)v->elem_bytes);
            continue;
        }
        int32_t slot = p->row_map.row_slot[r];
        v->load(dout, fm_at(p->dout, v->elem_bytes, p->row_map.row_token[r] * p->D), p->D);
        if (p->dscores) {
            v->load(row, fm_at(p->rows, v->elem_bytes, r * p->D), p->D);
            v->set(p->dscores, slot, v->dot(row, dout, p->D));
        }
        if (!drow) continue;
        if (p->scores) v->scale(dout, v->get(p->scores, slot), dout, p->D);
        v->store(drow, dout, p->D);
    }
    return FUSED_MOE_OK;
}

int fused_moe_cpu_unpermute_backward(const FusedMoeUnpermuteBackward *p) {
    const FmRows *v = fm_rows(p->dtype);
    if (!v) return FUSED_MOE_UNSUPPORTED_DTYPE;
    if (!fm_row_map_is_valid(&p->row_map)) return FUSED_MOE_INVALID_ROWS;
    if (p->dscores) fm_clear(p->dscores, p->row_map.T * p->row_map.K * (int64_t)v->accum_bytes);
    size_t bytes = 2 * (p->D * v->accum_bytes + 64);
    return fm_parallel(fm_blocks(p->row_map.R, BLOCK), p->row_map.R * p->D, unpermute_backward_block, p,
                       bytes);
}

static int shared_backward_block(int64_t block, const void *ctx, char *scratch) {
    const FusedMoeSharedBackward *p = ctx;
    const FmRows *v = fm_rows(p->dtype);
    size_t unused = 0;
    void *dout = fm_take(&scratch, &unused, p->D * v->accum_bytes);
    void *row = fm_take(&scratch, &unused, p->D * v->accum_bytes);
    for (int64_t t = block * BLOCK; t < fm_min(p->T, (block + 1) * BLOCK); t++) {
        double gate = v->get(p->shared_gate, t);
        v->load(dout, fm_at(p->dout, v->elem_bytes, t * p->D), p->D);
        if (p->dshared_gate) {
            v->load(row, fm_at(p->shared, v->elem_bytes, t * p->D), p->D);
            /* not s (1 - s), which cancels where s is near 1 */
            v->set(p->dshared_gate, t, v->dot(row, dout, p->D) * sigmoid(gate) * sigmoid(-gate));
        }
        if (!p->dshared) continue;
        v->scale(dout, sigmoid(gate), dout, p->D);
        v->store(fm_at(p->dshared, v->elem_bytes, t * p->D), dout, p->D);
    }
    return FUSED_MOE_OK;
}

int fused_moe_cpu_shared_backward(const FusedMoeSharedBackward *p) {
    const FmRows *v = fm_rows(p->dtype);
    if (!v) return FUSED_MOE_UNSUPPORTED_DTYPE;
    size_t bytes = 2 * (p->D * v->accum_bytes + 64);
    return fm_parallel(fm_blocks(p->T, BLOCK), p->T * p->D, shared_backward_block, p, bytes);
}
