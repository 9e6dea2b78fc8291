/* pad: a copy in other sizes, with zeros behind a dimension or cut there.
 *
 * Memory-bound. Rows of odd widths begin at any even address, where a copy of elements would move two bytes
 * per lane. A warp writes a row, in aligned 16 bytes; a lane reads what they are made of from the two aligned
 * 16 bytes that hold it. The second are the next lane's first, so they come from L1. */
#include "launch.cuh"
#include "numeric.cuh"

namespace fused_moe {
namespace {

constexpr int WARPS = 8;
constexpr int HALVES = 8; /* of 2 bytes, in 16 bytes: rows of every dtype are copied as such */

/* n halves at an even address, and zeros. No 16 bytes are read that have none of them. */
__device__ inline uint4 load_unaligned(const uint16_t *src, int n) {
    const uintptr_t address = (uintptr_t)src, end = address + 2 * n - 1;
    const uint4 first = __ldg((const uint4 *)(address & ~(uintptr_t)15));
    const uint4 last = __ldg((const uint4 *)(end & ~(uintptr_t)15));
    uint32_t words[8] = {first.x, first.y, first.z, first.w, last.x, last.y, last.z, last.w};
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
    const int64_t A = p.sizes[0], B = p.sizes[1], C = p.sizes[2];
    const int64_t row = blockIdx.x * (int64_t)WARPS + threadIdx.x / 32;
    if (row >= p.E * A * B) return;
    const int lane = threadIdx.x % 32;
    const int64_t e = row / (A * B), i = row / B % A, j = row % B;
    const uint16_t *x = (const uint16_t *)p.x + e * p.x_strides[0] + i * p.x_strides[1] + j * p.x_strides[2];
    uint16_t *out = (uint16_t *)p.out + row * C;
    const int64_t n = i < p.x_sizes[0] && j < p.x_sizes[1] ? min(p.x_sizes[2], C) : 0;

    auto copy_half = [&](int64_t k) { out[k] = k < n ? x[k] : (uint16_t)0; };
    const int64_t head = min((int64_t)((16 - (uintptr_t)out % 16) % 16 / 2), C), body = (C - head) / HALVES;
    const int64_t tail = head + body * HALVES;
    if (lane < head) copy_half(lane);
    if (lane < C - tail) copy_half(tail + lane);
    for (int64_t k = head + lane * HALVES; k < tail; k += 32 * HALVES)
        *(uint4 *)(out + k) = k < n ? load_unaligned(x + k, (int)min((int64_t)HALVES, n - k)) : uint4{};
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
