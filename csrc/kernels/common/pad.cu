/* pad: copies a tensor into other sizes. A dimension that grows ends in zeros, one that shrinks is cut.
 *
 * Memory-bound. Rows of odd widths begin at any even address, where a copy of elements would move two bytes
 * per lane. A warp writes a row, in aligned chunks of 16 bytes. A lane reads the two aligned blocks that hold
 * a chunk, 16 bytes each; the second is the next lane's first, so it comes from L1. */
#include "launch.cuh"

namespace fused_moe {
namespace {

constexpr int WARPS = 4;  /* a row each */
constexpr int DEPTH = 3;  /* chunks of a lane in flight */
constexpr int HALVES = 8; /* 2 bytes each, in a chunk: every dtype is copied as halves */

typedef struct {
    FusedMoePad pad;       /* its last sizes and its strides count halves */
    const uint16_t *x_end; /* behind x's last half */
} PadParams;

typedef struct {
    uint4 first, last;
} Blocks;

/* The aligned block with this half. Halves before and behind x, where memory may begin or end, are zeros. */
__device__ inline uint4 load_block(const PadParams &p, const uint16_t *half) {
    const uint16_t *begin = (const uint16_t *)p.pad.x;
    const uint16_t *block = (const uint16_t *)((uintptr_t)half & ~(uintptr_t)15);
    if (block >= begin && block + HALVES <= p.x_end) return __ldg((const uint4 *)block);
    uint32_t words[4] = {};
#pragma unroll
    for (int c = 0; c < HALVES; c++)
        if (block + c >= begin && block + c < p.x_end) words[c / 2] |= (uint32_t)block[c] << c % 2 * 16;
    return {words[0], words[1], words[2], words[3]};
}

/* The blocks that hold n halves. */
__device__ inline Blocks load_blocks(const PadParams &p, const uint16_t *src, int n) {
    if (n <= 0) return {};
    return {load_block(p, src), load_block(p, src + n - 1)};
}

/* A chunk of these halves, and zeros behind them. */
__device__ inline uint4 chunk_of(const Blocks &blocks, const uint16_t *src, int n) {
    const uint4 &a = blocks.first, &b = blocks.last;
    const uint32_t address = (uint32_t)(uintptr_t)src;
    uint32_t words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 6; i++) words[i] = address & 8 ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i < 5; i++) words[i] = address & 4 ? words[i + 1] : words[i];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t word = __funnelshift_r(words[i], words[i + 1], address & 2 ? 16 : 0);
        words[i] = 2 * i + 1 < n ? word : 2 * i < n ? word & 0xffff : 0;
    }
    return {words[0], words[1], words[2], words[3]};
}

__global__ void __launch_bounds__(32 * WARPS) pad_kernel(const __grid_constant__ PadParams q) {
    const FusedMoePad &p = q.pad;
    const uint32_t A = (uint32_t)p.sizes[0], B = (uint32_t)p.sizes[1], lane = threadIdx.x % 32;
    const uint32_t row = blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= p.E * A * B) return;
    const uint32_t j = row % B, i = row / B % A, e = row / B / A;
    const uint16_t *x = (const uint16_t *)p.x + e * p.x_strides[0] + i * p.x_strides[1] + j * p.x_strides[2];
    const int64_t C = p.sizes[2], n = i < p.x_sizes[0] && j < p.x_sizes[1] ? min(p.x_sizes[2], C) : 0;
    uint16_t *out = (uint16_t *)p.out + row * C;

    /* The halves before and behind the chunks, one per lane: in flight beside the chunks, and stored last. */
    const int64_t head = min((int64_t)(-(uintptr_t)out / 2 % HALVES), C), end = C - (C - head) % HALVES;
    const int64_t edge = lane < head ? lane : end + lane - head;
    const uint16_t edge_half = edge < n ? x[edge] : 0;
    for (int64_t first = head + lane * HALVES; first < end; first += DEPTH * 32 * HALVES) {
        Blocks blocks[DEPTH];
        int in_x[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const int64_t k = first + d * 32 * HALVES;
            in_x[d] = (int)max((int64_t)0, min((int64_t)HALVES, min(end, n) - k));
            blocks[d] = load_blocks(q, x + k, in_x[d]);
        }
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const int64_t k = first + d * 32 * HALVES;
            if (k < end) *(uint4 *)(out + k) = chunk_of(blocks[d], x + k, in_x[d]);
        }
    }
    if (edge < C) out[edge] = edge_half;
}

} // namespace
} // namespace fused_moe

using namespace fused_moe;

extern "C" int fused_moe_cuda_pad(const FusedMoePad *given, void *stream) {
    PadParams q = {.pad = *given};
    FusedMoePad &p = q.pad;
    const int64_t halves = p.elem_bytes / (int64_t)sizeof(uint16_t), *n = p.x_sizes, *stride = p.x_strides;
    p.x_sizes[2] *= halves, p.sizes[2] *= halves;
    for (int i = 0; i < 3; i++) p.x_strides[i] *= halves;
    q.x_end = (const uint16_t *)p.x;
    if (p.E && n[0] && n[1] && n[2])
        q.x_end += (p.E - 1) * stride[0] + (n[0] - 1) * stride[1] + (n[1] - 1) * stride[2] + n[2];
    const int64_t rows = p.sizes[2] ? p.E * p.sizes[0] * p.sizes[1] : 0;
    return launch(pad_kernel, q, ceil_div(rows, WARPS), 32 * WARPS, 0, stream);
}
