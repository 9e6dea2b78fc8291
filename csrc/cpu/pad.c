/* pad: copies a tensor into other sizes. A dimension that grows ends in zeros, one that shrinks is cut. */
#include "cpu.h"

enum { BLOCK = 64 }; /* rows per task */

static int pad_block(int64_t block, const void *ctx, char *scratch) {
    const FusedMoePad *p = ctx;
    const int64_t A = p->sizes[0], B = p->sizes[1], bytes = p->sizes[2] * p->elem_bytes;
    (void)scratch;
    for (int64_t row = block * BLOCK; row < fm_min(p->E * A * B, (block + 1) * BLOCK); row++) {
        const int64_t e = row / (A * B), i = row / B % A, j = row % B;
        const bool is_in_x = i < p->x_sizes[0] && j < p->x_sizes[1];
        const int64_t copied = is_in_x ? fm_min(p->x_sizes[2] * p->elem_bytes, bytes) : 0;
        const int64_t x = e * p->x_strides[0] + i * p->x_strides[1] + j * p->x_strides[2];
        char *out = fm_at(p->out, bytes, row);
        fm_copy(out, fm_at(p->x, p->elem_bytes, x), copied);
        fm_clear(out + copied, bytes - copied);
    }
    return FUSED_MOE_OK;
}

int fused_moe_cpu_pad(const FusedMoePad *p) {
    const int64_t rows = p->E * p->sizes[0] * p->sizes[1];
    return fm_parallel(fm_blocks(rows, BLOCK), rows * p->sizes[2], pad_block, p, 0);
}
