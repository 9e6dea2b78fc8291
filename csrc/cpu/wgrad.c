/* wgrad: a GEMM along the rows of each expert; and bias_grad, their plain sum.
 *
 * dw[e] = a[rows of e]^T b[rows of e]. b may be gathered, so a task is an expert and a block of b's columns,
 * and walks the rows in blocks of FM_TILE_DEPTH: nothing is gathered twice, an expert with many rows is
 * shared by its column blocks, and the order of every sum is fixed.
 *
 * What is added to dw is summed apart first: added block by block it would be rounded to dw's size each
 * time. */
#include "cpu.h"

#include <string.h>

static bool maps_are_valid(const int32_t *row_token, const int32_t *row_slot, int64_t n, int64_t T,
                           int64_t K) {
    return fm_map_is_valid(row_token, n, 0, T) && fm_map_is_valid(row_slot, n, 0, T * K);
}

typedef struct {
    const FusedMoeWgrad *p;
    const FmRows *v, *out; /* of a and b; of dw */
    int64_t blocks;        /* of columns, per expert */
} Task;

typedef struct {
    void *a, *b, *dw[2];
} Buffers;

static Buffers take(const Task *t, char *scratch, size_t *bytes) {
    const FusedMoeWgrad *p = t->p;
    size_t accum = t->v->accum_bytes, operand = t->v->operand_bytes;
    int64_t rows = fm_min(p->R, FM_TILE_DEPTH), cols = fm_min(p->N, FM_TILE_COLS);
    bool copies = !fm_operands_are_elements(t->v);
    Buffers s;
    s.a = fm_take(&scratch, bytes, copies ? rows * (p->M[0] + p->M[1]) * operand : 0);
    s.b = fm_take(&scratch, bytes, copies || p->b_row_token ? rows * cols * operand : 0);
    for (int i = 0; i < 2; i++)
        s.dw[i] = fm_take(&scratch, bytes, p->dw[i].data ? p->M[i] * cols * accum : 0);
    return s;
}

static int wgrad_block(int64_t i, const void *ctx, char *scratch) {
    const Task *t = ctx;
    const FusedMoeWgrad *p = t->p;
    const FmRows *v = t->v, *out = t->out;
    size_t unused = 0;
    Buffers s = take(t, scratch, &unused);
    int32_t e = (int32_t)(i / t->blocks);
    int64_t col = i % t->blocks * FM_TILE_COLS, cols = fm_min(FM_TILE_COLS, p->N - col);
    int64_t width = p->M[0] + p->M[1], first = fused_moe_expert_start(p->offs, e), end = p->offs[e];
    const FmGather gather = {p->b, p->N, p->b_row_token, p->row_slot, p->b_scores};

    FmMatrix dw[2], sum[2];
    for (int part = 0; part < 2; part++) {
        if (!p->dw[part].data) continue;
        dw[part] = fm_part(fm_expert(&p->dw[part], out->elem_bytes, e, p->M[part], p->N), out->elem_bytes, 0,
                           p->M[part], col, cols);
        sum[part] =
            p->accumulate ? fm_dense_as(dw[part], s.dw[part]) : fm_accum_for(out, dw[part], s.dw[part]);
        if (first == end && !p->accumulate) fm_zero(out, dw[part]);
    }
    if (first == end) return FUSED_MOE_OK;

    for (int64_t row = first; row < end; row += FM_TILE_DEPTH) {
        int64_t rows = fm_min(FM_TILE_DEPTH, end - row);
        FmMatrix a = fm_part(fm_dense((void *)p->a, p->R, width), v->elem_bytes, row, rows, 0, width);
        a = fm_operand(v, a, s.a);
        FmMatrix b = fm_gather(v, &gather, row, rows, col, cols, s.b);
        for (int part = 0; part < 2; part++) {
            if (!p->dw[part].data) continue;
            FmMatrix a_part = fm_part(a, v->operand_bytes, 0, rows, part ? p->M[0] : 0, p->M[part]);
            int status = fm_matmul(v, sum[part], fm_transposed(a_part), b, row > first);
            if (status != FUSED_MOE_OK) return status;
        }
    }
    for (int part = 0; part < 2; part++)
        if (p->dw[part].data) (p->accumulate ? fm_add : fm_from_accum)(out, dw[part], sum[part]);
    return FUSED_MOE_OK;
}

int fused_moe_cpu_wgrad(const FusedMoeWgrad *p) {
    const FmRows *v = fm_rows(p->dtype), *out = fm_rows(p->dw_dtype);
    if (!v || !out || v->accum_bytes != out->accum_bytes) return FUSED_MOE_UNSUPPORTED_DTYPE;
    if (p->accumulate && p->dw_dtype != FUSED_MOE_F32) return FUSED_MOE_UNSUPPORTED_DTYPE;
    if (!fm_offs_are_valid(p->offs, p->E, p->R)) return FUSED_MOE_INVALID_ROWS;
    if (!maps_are_valid(p->b_row_token, p->b_scores ? p->row_slot : NULL, p->offs[p->E - 1], p->T, p->K))
        return FUSED_MOE_INVALID_ROWS;
    Task task = {p, v, out, fm_blocks(p->N, FM_TILE_COLS)};
    size_t bytes = 0;
    take(&task, NULL, &bytes);
    return fm_parallel(p->E * task.blocks, (p->R + p->E) * p->N * (p->M[0] + p->M[1]), wgrad_block, &task,
                       bytes);
}

/* --- bias_grad ------------------------------------------------------------------------------------------ */

static int bias_grad_block(int64_t i, const void *ctx, char *scratch) {
    const FusedMoeBiasGrad *p = ctx;
    const FmRows *v = fm_rows(p->dtype);
    size_t unused = 0;
    double *sum = fm_take(&scratch, &unused, FM_TILE_COLS * sizeof *sum);
    void *row = fm_take(&scratch, &unused, FM_TILE_COLS * v->accum_bytes);
    int64_t blocks = fm_blocks(p->N, FM_TILE_COLS);
    int32_t e = (int32_t)(i / blocks);
    int64_t col = i % blocks * FM_TILE_COLS, cols = fm_min(FM_TILE_COLS, p->N - col);

    memset(sum, 0, cols * sizeof *sum);
    for (int64_t r = fused_moe_expert_start(p->offs, e); r < p->offs[e]; r++) {
        int64_t row_index = p->row_token ? p->row_token[r] : r;
        v->load(row, fm_at(p->rows, v->elem_bytes, row_index * p->N + col), cols);
        v->sum(sum, p->scores ? v->get(p->scores, p->row_slot[r]) : 1, row, cols);
    }
    for (int64_t j = 0; j < cols; j++) v->set(row, j, sum[j]);
    v->store(fm_at(p->db, v->elem_bytes, e * p->N + col), row, cols);
    return FUSED_MOE_OK;
}

int fused_moe_cpu_bias_grad(const FusedMoeBiasGrad *p) {
    const FmRows *v = fm_rows(p->dtype);
    if (!v) return FUSED_MOE_UNSUPPORTED_DTYPE;
    if (!fm_offs_are_valid(p->offs, p->E, p->R)) return FUSED_MOE_INVALID_ROWS;
    if (!maps_are_valid(p->row_token, p->scores ? p->row_slot : NULL, p->offs[p->E - 1], p->T, p->K))
        return FUSED_MOE_INVALID_ROWS;
    size_t bytes = FM_TILE_COLS * (sizeof(double) + v->accum_bytes);
    return fm_parallel(p->E * fm_blocks(p->N, FM_TILE_COLS), (p->R + p->E) * p->N, bias_grad_block, p, bytes);
}
