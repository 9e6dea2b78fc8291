/* down_dgrad: the gradient of the down side, and with it everything that h gives. A task is a tile of an
 * expert's rows: it gathers dout once, and for every block of hidden columns forms g = dout w2, computes a
 * from h again, and from g, h and the row's score s
 *   dh = dact(s g, h),  a_scaled = s a  (for dw2),  dscore = <g, a> (+ <dout, b2>),
 * so that neither a nor the down GEMM's output is kept from forward. */
#include "cpu.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    const FusedMoeDownDgrad *p;
    const FmRows *v;
    const int32_t *schedule;
} Task;

typedef struct {
    void *sg, *gate, *up, *dgate, *dup, *a, *pairs;
} Rows;

typedef struct {
    void *dout, *w, *g, *bias, *dout_row;
    double *dscore;
    Rows rows;
} Buffers;

static Rows take_rows(size_t accum_bytes, int64_t cols, char **scratch, size_t *bytes) {
    size_t row_bytes = cols * accum_bytes;
    Rows s;
    s.sg = fm_take(scratch, bytes, row_bytes);
    s.gate = fm_take(scratch, bytes, row_bytes);
    s.up = fm_take(scratch, bytes, row_bytes);
    s.dgate = fm_take(scratch, bytes, row_bytes);
    s.dup = fm_take(scratch, bytes, row_bytes);
    s.a = fm_take(scratch, bytes, row_bytes);
    s.pairs = fm_take(scratch, bytes, 2 * row_bytes);
    return s;
}

static Buffers take(const Task *t, char *scratch, size_t *bytes) {
    const FusedMoeDownDgrad *p = t->p;
    size_t accum = t->v->accum_bytes, operand = t->v->operand_bytes;
    int64_t rows = fm_min(p->row_map.R, FM_TILE_ROWS), cols = fm_min(p->F, FM_TILE_COLS);
    Buffers s;
    s.dout = fm_take(&scratch, bytes, rows * p->D * operand);
    s.w = fm_take(&scratch, bytes, t->v->is_accum ? 0 : cols * p->D * operand);
    s.g = fm_take(&scratch, bytes, rows * cols * accum);
    s.bias = fm_take(&scratch, bytes, p->b2 ? p->D * accum : 0);
    s.dout_row = fm_take(&scratch, bytes, p->b2 ? p->D * accum : 0);
    s.dscore = fm_take(&scratch, bytes, rows * sizeof *s.dscore);
    s.rows = take_rows(accum, cols, &scratch, bytes);
    return s;
}

static int down_dgrad_tile(int64_t i, const void *ctx, char *scratch) {
    const Task *t = ctx;
    const FusedMoeDownDgrad *p = t->p;
    const FmRows *v = t->v;
    size_t unused = 0;
    Buffers s = take(t, scratch, &unused);
    Rows *q = &s.rows;
    bool gated = p->layout != FUSED_MOE_UNGATED;
    void *up = gated ? q->up : NULL, *dup = gated ? q->dup : NULL;
    int64_t h_width = fm_h_width(p->layout, p->F);
    FusedMoeWorkTile tile = fm_row_tile(t->schedule, p->row_map.offs, p->row_map.E, i);
    const FmGather gather = {p->dout, p->D, p->row_map.row_token, NULL, NULL};
    FmMatrix dout = fm_gather(v, &gather, tile.first_row, tile.num_rows, 0, p->D, s.dout);

    memset(s.dscore, 0, tile.num_rows * sizeof *s.dscore);
    if (p->dscores && p->b2) {
        v->load(s.bias, fm_at(p->b2, v->elem_bytes, tile.expert * p->D), p->D);
        for (int64_t r = 0; r < tile.num_rows; r++) {
            fm_gather_row(v, &gather, tile.first_row + r, 0, p->D, s.dout_row);
            s.dscore[r] = v->dot(s.dout_row, s.bias, p->D);
        }
    }

    FmMatrix all_w = fm_expert(&p->w2, v->elem_bytes, tile.expert, p->D, p->F);
    for (int64_t j = 0; j < p->F; j += FM_TILE_COLS) {
        int64_t n = fm_min(FM_TILE_COLS, p->F - j);
        FmMatrix w = fm_operand(v, fm_part(all_w, v->elem_bytes, 0, p->D, j, n), s.w);
        FmMatrix g = fm_dense(s.g, tile.num_rows, n);
        int status = fm_matmul(v, g, dout, w, false);
        if (status != FUSED_MOE_OK) return status;
        for (int64_t r = 0; r < tile.num_rows; r++) {
            int64_t row = tile.first_row + r;
            double score = p->scores ? v->get(p->scores, p->row_map.row_slot[row]) : 1;
            void *g_row = fm_at(g.data, v->accum_bytes, r * n);
            void *gates = fm_at(p->h, v->elem_bytes, row * h_width), *ups = fm_at(gates, v->elem_bytes, p->F);
            fm_load_pair(v, p->layout, gates, ups, j, n, q->gate, up, q->pairs);
            v->scale(q->sg, score, g_row, n);
            v->dact(&p->activation, q->dgate, dup, q->a, q->sg, q->gate, up, n);
            if (p->dscores) s.dscore[r] += v->dot(g_row, q->a, n);
            if (p->dh) {
                gates = fm_at(p->dh, v->elem_bytes, row * h_width), ups = fm_at(gates, v->elem_bytes, p->F);
                fm_store_pair(v, p->layout, gates, ups, j, n, q->dgate, dup, q->pairs);
            }
            if (p->a_scaled) {
                v->scale(q->a, score, q->a, n);
                v->store(fm_at(p->a_scaled, v->elem_bytes, row * p->F + j), q->a, n);
            }
        }
    }
    for (int64_t r = 0; p->dscores && r < tile.num_rows; r++) {
        int64_t row = tile.first_row + r;
        v->set(p->dscores, p->row_map.row_slot ? p->row_map.row_slot[row] : row, s.dscore[r]);
    }
    return FUSED_MOE_OK;
}

int fused_moe_cpu_down_dgrad(const FusedMoeDownDgrad *p) {
    const FmRows *v = fm_rows(p->dtype);
    if (!v) return FUSED_MOE_UNSUPPORTED_DTYPE;
    if (!fm_row_map_is_valid(&p->row_map)) return FUSED_MOE_INVALID_ROWS;
    int64_t num_rows = p->row_map.offs[p->row_map.E - 1], unused_rows = p->row_map.R - num_rows;
    int64_t h_width = fm_h_width(p->layout, p->F);
    if (p->dscores) fm_clear(p->dscores, p->row_map.T * p->row_map.K * v->accum_bytes);
    if (p->dh)
        fm_clear(fm_at(p->dh, v->elem_bytes, num_rows * h_width), unused_rows * h_width * v->elem_bytes);
    if (p->a_scaled)
        fm_clear(fm_at(p->a_scaled, v->elem_bytes, num_rows * p->F), unused_rows * p->F * v->elem_bytes);
    int32_t *schedule = fm_make_schedule(p->row_map.offs, p->row_map.E);
    if (!schedule) return FUSED_MOE_OUT_OF_MEMORY;
    int64_t num_tiles = fused_moe_schedule_head(schedule)->num_row_tiles;
    Task task = {p, v, schedule};
    size_t bytes = 0;
    take(&task, NULL, &bytes);
    int status = fm_parallel(num_tiles, num_rows * p->D * p->F, down_dgrad_tile, &task, bytes);
    free(schedule);
    return status;
}
