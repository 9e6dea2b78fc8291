/* pad: a copy in other sizes, with zeros behind a dimension or cut there.
 *
 * Memory-bound. Rows of odd widths begin at any even address, where a copy of elements would move two bytes
 * per lane. A warp writes a row, in aligned chunks of 16 bytes. A lane reads the two aligned blocks of 16 bytes
 * that hold a chunk; the second is the next lane's first, so it comes from L1. */
#include "launch.cuh"
#include "numeric.cuh"

namespace fused_moe {
namespace {

constexpr int WARPS = 4, DEPTH = 3; /* chunks of a lane in flight */
constexpr int HALVES = 8;           /* of 2 bytes, in a chunk: rows of every dtype are copied as such */

struct Blocks {
    uint4 first, last;
};

/* The aligned blocks that hold n halves at an even address: no other memory is read. */
__device__ inline Blocks load_blocks(const uint16_t *src, int n) {
    if (n <= 0) return {};
    const uintptr_t address = (uintptr_t)src, last = address + 2 * n - 1;
    return {__ldg((const uint4 *)(address & ~(uintptr_t)15)), __ldg((const uint4 *)(last & ~(uintptr_t)15))};
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

/* p's last sizes and its strides count halves. */
__global__ void __launch_bounds__(32 * WARPS) pad_kernel(const __grid_constant__ FusedMoePad p) {
    const uint32_t A = (uint32_t)p.sizes[0], B = (uint32_t)p.sizes[1], lane = threadIdx.x % 32;
    const uint32_t row = blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= p.E * A * B) return;
    const uint32_t j = row % B, i = row / B % A, e = row / B / A;
    const uint16_t *x = (const uint16_t *)p.x + e * p.x_strides[0] + i * p.x_strides[1] + j * p.x_strides[2];
    const int64_t C = p.sizes[2], n = i < p.x_sizes[0] && j < p.x_sizes[1] ? min(p.x_sizes[2], C) : 0;
    uint16_t *out = (uint16_t *)p.out + row * C;

    /* the halves before and behind the chunks, one per lane */
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
            blocks[d] = load_blocks(x + k, in_x[d]);
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
    return with_dtype(given->dtype, [&](auto t) {
        FusedMoePad p = *given;
        constexpr int64_t UNITS = sizeof(t) / sizeof(uint16_t);
        p.x_sizes[2] *= UNITS, p.sizes[2] *= UNITS;
        for (int64_t &stride : p.x_strides) stride *= UNITS;
        const int64_t rows = p.sizes[2] ? p.E * p.sizes[0] * p.sizes[1] : 0;
        return launch(pad_kernel, p, ceil_div(rows, WARPS), 32 * WARPS, 0, stream);
    });
}
