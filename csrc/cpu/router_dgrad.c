/* router_dgrad: dlogits weight, added to dx where it accumulates. A task is a block of tokens and columns. */
#include "cpu.h"

enum { BLOCK = 64 }; /* tokens per task */

typedef struct {
    const FusedMoeRouterDgrad *p;
    const FmRows *v;
    int64_t column_blocks;
} Task;

typedef struct {
    void *dlogits, *weight, *sum, *before, *rounded;
} Buffers;

static Buffers take(const Task *t, char *scratch, size_t *bytes) {
    const FusedMoeRouterDgrad *p = t->p;
    size_t accum = t->v->accum_bytes, operand = t->v->operand_bytes;
    int64_t experts = fm_operands_are_elements(t->v) ? 0 : p->E, tokens = fm_min(p->T, BLOCK);
    int64_t columns = fm_min(p->D, FM_TILE_COLS);
    Buffers s;
    s.dlogits = fm_take(&scratch, bytes, tokens * experts * operand);
    s.weight = fm_take(&scratch, bytes, columns * experts * operand);
    s.sum = fm_take(&scratch, bytes, tokens * columns * accum);
    s.before = fm_take(&scratch, bytes, columns * accum);
    s.rounded = fm_take(&scratch, bytes, columns * t->v->elem_bytes);
    return s;
}

static int router_dgrad_block(int64_t i, const void *ctx, char *scratch) {
    const Task *t = ctx;
    const FusedMoeRouterDgrad *p = t->p;
    const FmRows *v = t->v;
    size_t unused = 0, elem = v->elem_bytes;
    Buffers s = take(t, scratch, &unused);
    int64_t token = i / t->column_blocks * BLOCK, tokens = fm_min(BLOCK, p->T - token);
    int64_t column = i % t->column_blocks * FM_TILE_COLS, columns = fm_min(FM_TILE_COLS, p->D - column);

    FmMatrix all_dlogits = fm_dense((void *)p->dlogits, p->T, p->E);
    FmMatrix all_weight = fm_dense((void *)p->weight, p->E, p->D), sum = fm_dense(s.sum, tokens, columns);
    FmMatrix dlogits = fm_operand(v, fm_part(all_dlogits, elem, token, tokens, 0, p->E), s.dlogits);
    FmMatrix weight = fm_operand(v, fm_part(all_weight, elem, 0, p->E, column, columns), s.weight);
    int status = fm_matmul(v, sum, dlogits, weight, false);
    for (int64_t row = 0; status == FUSED_MOE_OK && row < tokens; row++) {
        void *dx = fm_at(p->dx, elem, (token + row) * p->D + column);
        void *values = fm_at(sum.data, v->accum_bytes, row * sum.row_stride);
        if (p->accumulate) { /* two rounded gradients, as autograd would add them */
            v->store(s.rounded, values, columns);
            v->load(values, s.rounded, columns);
            v->load(s.before, dx, columns);
            v->add(values, s.before, columns);
        }
        v->store(dx, values, columns);
    }
    return status;
}

int fused_moe_cpu_router_dgrad(const FusedMoeRouterDgrad *p) {
    const FmRows *v = fm_rows(p->dtype);
    if (!v) return FUSED_MOE_UNSUPPORTED_DTYPE;
    Task task = {p, v, fm_blocks(p->D, FM_TILE_COLS)};
    size_t bytes = 0;
    take(&task, NULL, &bytes);
    return fm_parallel(fm_blocks(p->T, BLOCK) * task.column_blocks, p->T * p->E * p->D, router_dgrad_block,
                       &task, bytes);
}
