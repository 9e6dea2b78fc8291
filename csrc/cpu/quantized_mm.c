/* quantized_mm: every expert's quantised weight on its own rows. As in grouped_mm a task is a tile of rows and a part
 * of the output's columns, which it walks in blocks; a block of the weight is dequantised in scratch, and is used by
 * all of the tile's rows. No more of the weight than that exists in another dtype. */
#include "cpu.h"

#include <stdlib.h>

typedef struct {
    const FusedMoeQuantizedMM *p;
    const FmRows *v;
    const int32_t *schedule;
    int64_t M, N; /* widths of out and of a */
    int64_t parts;
} Task;

typedef struct {
    void *a, *b, *out;
} Buffers;

static Buffers take(const Task *t, char *scratch, size_t *bytes) {
    size_t accum = t->v->accum_bytes, copies = t->v->is_accum ? 0 : accum;
    int64_t rows = fm_min(t->p->R, FM_TILE_ROWS), cols = fm_min(t->M, FM_TILE_COLS);
    Buffers s;
    s.a = fm_take(&scratch, bytes, rows * t->N * copies);
    s.b = fm_take(&scratch, bytes, cols * t->N * accum);
    s.out = fm_take(&scratch, bytes, rows * cols * copies);
    return s;
}

static int quantized_mm_tile(int64_t i, const void *ctx, char *scratch) {
    const Task *t = ctx;
    const FusedMoeQuantizedMM *p = t->p;
    const FmRows *v = t->v;
    size_t unused = 0;
    Buffers s = take(t, scratch, &unused);
    FusedMoeWorkTile tile = fm_row_tile(t->schedule, p->offs, p->E, i / t->parts);
    FmCols cols = fm_cols_of(t->M, t->parts, i % t->parts);
    const FmQuantized weight = {&p->b, tile.expert, p->b_out, p->b_in};

    FmMatrix all_a = fm_dense((void *)p->a, p->R, t->N), all_out = fm_dense(p->out, p->R, t->M);
    FmMatrix a = fm_to_accum(v, fm_part(all_a, v->elem_bytes, tile.first_row, tile.num_rows, 0, t->N), s.a);
    for (int64_t j = cols.first; j < cols.end; j += FM_TILE_COLS) {
        int64_t n = fm_min(FM_TILE_COLS, cols.end - j);
        FmMatrix out = fm_part(all_out, v->elem_bytes, tile.first_row, tile.num_rows, j, n);
        FmMatrix sum = fm_accum_for(v, out, s.out);
        FmMatrix b = p->transposed ? fm_dequantize(v, &weight, 0, p->b_out, j, n, s.b)
                                   : fm_transposed(fm_dequantize(v, &weight, j, n, 0, p->b_in, s.b));
        int status = fm_matmul(v, sum, a, b, false);
        if (status != FUSED_MOE_OK) return status;
        fm_from_accum(v, out, sum);
    }
    return FUSED_MOE_OK;
}

int fused_moe_cpu_quantized_mm(const FusedMoeQuantizedMM *p) {
    const FmRows *v = fm_rows(p->dtype);
    if (!v) return FUSED_MOE_UNSUPPORTED_DTYPE;
    if (!fm_offs_are_valid(p->offs, p->E, p->R)) return FUSED_MOE_INVALID_ROWS;
    Task task = {
        .p = p, .v = v, .M = p->transposed ? p->b_in : p->b_out, .N = p->transposed ? p->b_out : p->b_in};
    int64_t num_rows = p->offs[p->E - 1];
    fm_clear(fm_at(p->out, v->elem_bytes, num_rows * task.M),
             (p->R - num_rows) * task.M * (int64_t)v->elem_bytes);
    int32_t *schedule = fm_make_schedule(p->offs, p->E);
    if (!schedule) return FUSED_MOE_OUT_OF_MEMORY;
    int64_t num_tiles = fused_moe_schedule_head(schedule)->num_row_tiles;
    task.schedule = schedule;
    task.parts = fm_parts(num_tiles, task.M);
    size_t bytes = 0;
    take(&task, NULL, &bytes);
    int status =
        fm_parallel(num_tiles * task.parts, num_rows * task.M * task.N, quantized_mm_tile, &task, bytes);
    free(schedule);
    return status;
}
