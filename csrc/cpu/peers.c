/* sum_peers: unpermute, whose rows are in the memory of several ranks. On the CPU that is memory of several
 * processes, which each has mapped. */
#include "cpu.h"

#include <string.h>

enum { BLOCK = 64 }; /* tokens per task */

static int sum_peers_block(int64_t block, const void *ctx, char *scratch) {
    const FusedMoeSumPeers *p = ctx;
    const FmRows *v = fm_rows(p->dtype);
    size_t unused = 0;
    void *sum = fm_take(&scratch, &unused, p->D * v->accum_bytes);
    void *row = fm_take(&scratch, &unused, p->D * v->accum_bytes);
    for (int64_t t = block * BLOCK; t < fm_min(p->T, (block + 1) * BLOCK); t++) {
        memset(sum, 0, p->D * v->accum_bytes);
        for (int64_t slot = t * p->K; slot < (t + 1) * p->K; slot++) {
            int64_t i = p->index[slot];
            if (i < 0 || i >= p->N * p->C) continue;
            v->load(row, fm_at(p->rows[i / p->C], v->elem_bytes, i % p->C * p->D), p->D);
            v->axpy(sum, p->scores ? v->get(p->scores, slot) : 1, row, p->D);
        }
        v->store(fm_at(p->out, v->elem_bytes, t * p->D), sum, p->D);
    }
    return FUSED_MOE_OK;
}

int fused_moe_cpu_sum_peers(const FusedMoeSumPeers *p) {
    const FmRows *v = fm_rows(p->dtype);
    if (!v) return FUSED_MOE_UNSUPPORTED_DTYPE;
    size_t bytes = 2 * (p->D * v->accum_bytes + 64);
    return fm_parallel(fm_blocks(p->T, BLOCK), p->T * p->K * p->D, sum_peers_block, p, bytes);
}
