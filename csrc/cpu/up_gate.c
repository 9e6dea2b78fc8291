/* up_gate: the up side of the experts. A task is a tile of an expert's rows and a part of the hidden
 * columns: it reads x through row_token once, and for every block of those columns multiplies by the
 * gate's and the up's weights, adds biases and the addend, writes h, and writes a = act(gate) up while both
 * are in cache and not yet rounded. */
#include "cpu.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    const FusedMoeUpGate *p;
    const FmRows *v;
    const int32_t *schedule;
    int64_t parts; /* of a tile's columns, a task each */
} Task;

typedef struct {
    void *x, *w, *out[2], *bias, *addend, *gate, *up, *a;
} Buffers;

static Buffers take(const Task *t, char *scratch, size_t *bytes) {
    const FusedMoeUpGate *p = t->p;
    size_t accum = t->v->accum_bytes, operand = t->v->operand_bytes;
    int64_t rows = fm_min(p->row_map.R, FM_TILE_ROWS), cols = fm_min(p->F, FM_TILE_COLS);
    Buffers s;
    s.x = fm_take(&scratch, bytes, rows * p->D * operand);
    const bool copies = !t->v->is_accum || p->w1.quantized || p->w3.quantized;
    s.w = fm_take(&scratch, bytes, copies ? 2 * cols * p->D * operand : 0);
    for (int i = 0; i < 2; i++) s.out[i] = fm_take(&scratch, bytes, (2 - i) * rows * cols * accum);
    s.bias = fm_take(&scratch, bytes, 2 * cols * accum);
    s.addend = fm_take(&scratch, bytes, p->addend ? 2 * cols * accum : 0);
    s.gate = fm_take(&scratch, bytes, cols * accum);
    s.up = fm_take(&scratch, bytes, cols * accum);
    s.a = fm_take(&scratch, bytes, cols * accum);
    return s;
}

int fm_pieces(const FusedMoeUpGate *p, int64_t j, int64_t n, FmPiece piece[2]) {
    int64_t F = p->F;
    switch (p->layout) {
    case FUSED_MOE_SEPARATE:
        piece[0] = (FmPiece){&p->w1, p->b1, F, j, n, j};
        piece[1] = (FmPiece){&p->w3, p->b3, F, j, n, F + j};
        return 2;
    case FUSED_MOE_HALVES:
        piece[0] = (FmPiece){&p->w1, p->b1, 2 * F, j, n, j};
        piece[1] = (FmPiece){&p->w1, p->b1, 2 * F, F + j, n, F + j};
        return 2;
    case FUSED_MOE_INTERLEAVED: piece[0] = (FmPiece){&p->w1, p->b1, 2 * F, 2 * j, 2 * n, 2 * j}; return 1;
    default: piece[0] = (FmPiece){&p->w1, p->b1, F, j, n, j}; return 1;
    }
}

static int up_gate_tile(int64_t i, const void *ctx, char *scratch) {
    const Task *t = ctx;
    const FusedMoeUpGate *p = t->p;
    const FmRows *v = t->v;
    size_t unused = 0;
    Buffers s = take(t, scratch, &unused);
    int64_t h_width = fm_h_width(p->layout, p->F);
    FusedMoeWorkTile tile = fm_row_tile(t->schedule, p->row_map.offs, p->row_map.E, i / t->parts);
    FmCols cols = fm_cols_of(p->F, t->parts, i % t->parts);
    const FmGather gather = {p->x, p->D, p->row_map.row_token, p->row_map.row_slot, p->scores};
    FmMatrix x = fm_gather(v, &gather, tile.first_row, tile.num_rows, 0, p->D, s.x);

    for (int64_t j = cols.first; j < cols.end; j += FM_TILE_COLS) {
        int64_t n = fm_min(FM_TILE_COLS, cols.end - j);
        FmPiece piece[2];
        int num_pieces = fm_pieces(p, j, n, piece);
        for (int q = 0; q < num_pieces; q++) {
            const FmPiece *c = &piece[q];
            FmMatrix w = fm_weight_part(v, c->w, tile.expert, c->row, c->width, 0, p->D, s.w);
            FmMatrix out = fm_dense(s.out[q], tile.num_rows, c->width);
            int status = fm_matmul(v, out, x, fm_transposed(w), false);
            if (status != FUSED_MOE_OK) return status;
            if (c->bias)
                v->load(s.bias, fm_at(c->bias, v->elem_bytes, tile.expert * c->weight_rows + c->row),
                        c->width);
            for (int64_t r = 0; r < tile.num_rows; r++) {
                void *row = fm_at(out.data, v->accum_bytes, r * c->width);
                const int64_t in_h = (tile.first_row + r) * h_width + c->h_col;
                if (c->bias) v->add(row, s.bias, c->width);
                if (p->addend) {
                    v->load(s.addend, fm_at(p->addend, v->elem_bytes, in_h), c->width);
                    v->add(row, s.addend, c->width);
                }
                if (p->h) v->store(fm_at(p->h, v->elem_bytes, in_h), row, c->width);
            }
        }
        for (int64_t r = 0; r < tile.num_rows; r++) {
            void *gate = fm_at(s.out[0], v->accum_bytes, r * n), *up = NULL;
            if (p->layout == FUSED_MOE_INTERLEAVED) {
                v->split(s.gate, s.up, fm_at(s.out[0], v->accum_bytes, r * 2 * n), n);
                gate = s.gate, up = s.up;
            } else if (p->layout != FUSED_MOE_UNGATED) {
                up = fm_at(s.out[1], v->accum_bytes, r * n);
            }
            v->act(&p->activation, s.a, gate, up, n);
            v->store(fm_at(p->a, v->elem_bytes, (tile.first_row + r) * p->F + j), s.a, n);
        }
    }
    return FUSED_MOE_OK;
}

int fused_moe_cpu_up_gate(const FusedMoeUpGate *p) {
    const FmRows *v = fm_rows(p->dtype);
    if (!v) return FUSED_MOE_UNSUPPORTED_DTYPE;
    if (!fm_row_map_is_valid(&p->row_map)) return FUSED_MOE_INVALID_ROWS;
    int64_t num_rows = p->row_map.offs[p->row_map.E - 1], unused_rows = p->row_map.R - num_rows;
    int64_t h_width = fm_h_width(p->layout, p->F);
    fm_clear(fm_at(p->a, v->elem_bytes, num_rows * p->F), unused_rows * p->F * v->elem_bytes);
    if (p->h) fm_clear(fm_at(p->h, v->elem_bytes, num_rows * h_width), unused_rows * h_width * v->elem_bytes);
    int32_t *schedule = fm_make_schedule(p->row_map.offs, p->row_map.E);
    if (!schedule) return FUSED_MOE_OUT_OF_MEMORY;
    int64_t num_tiles = fused_moe_schedule_head(schedule)->num_row_tiles;
    Task task = {p, v, schedule, fm_parts(num_tiles, p->F)};
    size_t bytes = 0;
    take(&task, NULL, &bytes);
    int status = fm_parallel(num_tiles * task.parts, num_rows * p->D * h_width, up_gate_tile, &task, bytes);
    free(schedule);
    return status;
}
