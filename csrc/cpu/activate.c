/* activate and its gradients: the activation of rows of h, for experts that are composed of grouped GEMMs. A
 * task is a block of rows and a part of the hidden columns. */
#include "cpu.h"

enum { BLOCK = 64 }; /* rows per task */

typedef struct {
    const void *p;
    const FmRows *v;
    int64_t parts; /* of a block's columns, a task each */
} Task;

typedef struct {
    void *gate, *up, *a, *da, *dgate, *dup, *pairs;
} Buffers;

static Buffers take(const FmRows *v, int64_t F, char *scratch, size_t *bytes) {
    size_t row_bytes = (size_t)fm_min(F, FM_TILE_COLS) * v->accum_bytes;
    Buffers s;
    s.gate = fm_take(&scratch, bytes, row_bytes);
    s.up = fm_take(&scratch, bytes, row_bytes);
    s.a = fm_take(&scratch, bytes, row_bytes);
    s.da = fm_take(&scratch, bytes, row_bytes);
    s.dgate = fm_take(&scratch, bytes, row_bytes);
    s.dup = fm_take(&scratch, bytes, row_bytes);
    s.pairs = fm_take(&scratch, bytes, 2 * row_bytes);
    return s;
}

static int run(const FmRows *v, int64_t R, int64_t F, FmTask *task, const void *p) {
    if (!v) return FUSED_MOE_UNSUPPORTED_DTYPE;
    int64_t blocks = fm_blocks(R, BLOCK);
    const Task t = {p, v, fm_parts(blocks, F)};
    size_t bytes = 0;
    take(v, F, NULL, &bytes);
    return fm_parallel(blocks * t.parts, R * F, task, &t, bytes);
}

/* Where the gates and the ups of row r begin; the interleaved pairs begin at the gates. */
typedef struct {
    void *gates, *ups;
} Row;

static Row row_of(const FmRows *v, FusedMoeLayout layout, int64_t F, const void *h, const void *up,
                  int64_t r) {
    if (layout == FUSED_MOE_SEPARATE)
        return (Row){fm_at(h, v->elem_bytes, r * F), fm_at(up, v->elem_bytes, r * F)};
    void *gates = fm_at(h, v->elem_bytes, r * fm_h_width(layout, F));
    return (Row){gates, fm_at(gates, v->elem_bytes, F)};
}

static int activate_block(int64_t i, const void *ctx, char *scratch) {
    const Task *t = ctx;
    const FusedMoeActivate *p = t->p;
    const FmRows *v = t->v;
    size_t unused = 0;
    Buffers s = take(v, p->F, scratch, &unused);
    void *up = p->layout == FUSED_MOE_UNGATED ? NULL : s.up;
    int64_t block = i / t->parts;
    FmCols cols = fm_cols_of(p->F, t->parts, i % t->parts);
    for (int64_t r = block * BLOCK; r < fm_min(p->R, (block + 1) * BLOCK); r++) {
        Row row = row_of(v, p->layout, p->F, p->h, p->up, r);
        for (int64_t j = cols.first; j < cols.end; j += FM_TILE_COLS) {
            int64_t n = fm_min(FM_TILE_COLS, cols.end - j);
            fm_load_pair(v, p->layout, row.gates, row.ups, j, n, s.gate, up, s.pairs);
            v->act(&p->activation, s.a, s.gate, up, n);
            v->store(fm_at(p->a, v->elem_bytes, r * p->F + j), s.a, n);
        }
    }
    return FUSED_MOE_OK;
}

int fused_moe_cpu_activate(const FusedMoeActivate *p) {
    return run(fm_rows(p->dtype), p->R, p->F, activate_block, p);
}

static int activate_backward_block(int64_t i, const void *ctx, char *scratch) {
    const Task *t = ctx;
    const FusedMoeActivateBackward *p = t->p;
    const FmRows *v = t->v;
    size_t unused = 0;
    Buffers s = take(v, p->F, scratch, &unused);
    bool gated = p->layout != FUSED_MOE_UNGATED;
    void *up = gated ? s.up : NULL, *dup = gated ? s.dup : NULL;
    int64_t block = i / t->parts;
    FmCols cols = fm_cols_of(p->F, t->parts, i % t->parts);
    for (int64_t r = block * BLOCK; r < fm_min(p->R, (block + 1) * BLOCK); r++) {
        Row row = row_of(v, p->layout, p->F, p->h, p->up, r);
        Row drow = row_of(v, p->layout, p->F, p->dh, p->dup, r);
        for (int64_t j = cols.first; j < cols.end; j += FM_TILE_COLS) {
            int64_t n = fm_min(FM_TILE_COLS, cols.end - j);
            fm_load_pair(v, p->layout, row.gates, row.ups, j, n, s.gate, up, s.pairs);
            v->load(s.da, fm_at(p->da, v->elem_bytes, r * p->F + j), n);
            v->dact(&p->activation, s.dgate, dup, s.a, s.da, s.gate, up, n);
            fm_store_pair(v, p->layout, drow.gates, drow.ups, j, n, s.dgate, dup, s.pairs);
        }
    }
    return FUSED_MOE_OK;
}

int fused_moe_cpu_activate_backward(const FusedMoeActivateBackward *p) {
    return run(fm_rows(p->dtype), p->R, p->F, activate_backward_block, p);
}
