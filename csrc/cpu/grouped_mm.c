/* grouped_mm: every expert's weight on its own rows. A task is a tile of rows and a part of the output's
 * columns, which it walks in blocks. Forward and the gradients of the rows are this one kernel, since weights
 * carry strides: up_dgrad is the sum of two parts, dgate w1 + dup w3, in one accumulator. A block of a
 * quantised weight is dequantised in scratch for all of the tile's rows; no more of it exists in another
 * dtype. */
#include "cpu.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    const FusedMoeGroupedMM *p;
    const FmRows *v;
    const int32_t *schedule;
    int64_t parts; /* of a tile's columns, a task each */
} Task;

typedef struct {
    void *a[2], *b, *out, *bias;
} Buffers;

static Buffers take(const Task *t, char *scratch, size_t *bytes) {
    const FusedMoeGroupedMM *p = t->p;
    size_t accum = t->v->accum_bytes, operand = t->v->operand_bytes;
    int64_t rows = fm_min(p->R, FM_TILE_ROWS), cols = fm_min(p->M, FM_TILE_COLS);
    bool copies = !fm_operands_are_elements(t->v);
    Buffers s;
    for (int i = 0; i < 2; i++)
        s.a[i] = fm_take(&scratch, bytes, copies && p->b[i].data ? rows * p->N[i] * operand : 0);
    int64_t depth = p->N[0] > p->N[1] ? p->N[0] : p->N[1];
    bool makes_b = !t->v->is_accum || p->b[0].quantized || p->b[1].quantized;
    s.b = fm_take(&scratch, bytes, makes_b ? cols * depth * operand : 0);
    s.out = fm_take(&scratch, bytes, t->v->is_accum ? 0 : rows * cols * accum);
    s.bias = fm_take(&scratch, bytes, cols * accum);
    return s;
}

static int grouped_mm_tile(int64_t i, const void *ctx, char *scratch) {
    const Task *t = ctx;
    const FusedMoeGroupedMM *p = t->p;
    const FmRows *v = t->v;
    size_t unused = 0;
    Buffers s = take(t, scratch, &unused);
    FusedMoeWorkTile tile = fm_row_tile(t->schedule, p->offs, p->E, i / t->parts);
    FmCols cols = fm_cols_of(p->M, t->parts, i % t->parts);

    FmMatrix all_a = fm_dense((void *)p->a, p->R, p->N[0] + p->N[1]), a[2];
    for (int part = 0; part < 2 && p->b[part].data; part++)
        a[part] = fm_operand(
            v, fm_part(all_a, v->elem_bytes, tile.first_row, tile.num_rows, part ? p->N[0] : 0, p->N[part]),
            s.a[part]);

    FmMatrix all_out = fm_dense(p->out, p->R, p->M);
    for (int64_t j = cols.first; j < cols.end; j += FM_TILE_COLS) {
        int64_t n = fm_min(FM_TILE_COLS, cols.end - j);
        FmMatrix out = fm_part(all_out, v->elem_bytes, tile.first_row, tile.num_rows, j, n);
        FmMatrix sum = fm_accum_for(v, out, s.out);
        for (int part = 0; part < 2 && p->b[part].data; part++) {
            FmMatrix b = fm_weight_part(v, &p->b[part], tile.expert, j, n, 0, p->N[part], s.b);
            int status = fm_matmul(v, sum, a[part], fm_transposed(b), part > 0);
            if (status != FUSED_MOE_OK) return status;
        }
        if (p->bias) {
            v->load(s.bias, fm_at(p->bias, v->elem_bytes, tile.expert * p->M + j), n);
            for (int64_t r = 0; r < sum.rows; r++)
                v->add(fm_at(sum.data, v->accum_bytes, r * sum.row_stride), s.bias, n);
        }
        fm_from_accum(v, out, sum);
    }
    return FUSED_MOE_OK;
}

int fused_moe_cpu_grouped_mm(const FusedMoeGroupedMM *p) {
    const FmRows *v = fm_rows(p->dtype);
    if (!v) return FUSED_MOE_UNSUPPORTED_DTYPE;
    if (!fm_offs_are_valid(p->offs, p->E, p->R)) return FUSED_MOE_INVALID_ROWS;
    int64_t num_rows = p->offs[p->E - 1];
    fm_clear(fm_at(p->out, v->elem_bytes, num_rows * p->M),
             (p->R - num_rows) * p->M * (int64_t)v->elem_bytes);
    int32_t *schedule = fm_make_schedule(p->offs, p->E);
    if (!schedule) return FUSED_MOE_OUT_OF_MEMORY;
    int64_t num_tiles = fused_moe_schedule_head(schedule)->num_row_tiles;
    Task task = {p, v, schedule, fm_parts(num_tiles, p->M)};
    size_t bytes = 0;
    take(&task, NULL, &bytes);
    int status = fm_parallel(num_tiles * task.parts, num_rows * p->M * (p->N[0] + p->N[1]), grouped_mm_tile,
                             &task, bytes);
    free(schedule);
    return status;
}
