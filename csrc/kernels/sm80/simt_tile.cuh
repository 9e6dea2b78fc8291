/* One CTA's tile of C = A B^T in float or double, by FMA instructions: no tf32.
 *
 * C is 128 x 128: eight warps of 32 x 64, 8 x 8 accumulators per thread. Shared memory is double-buffered:
 * the next k-tile is loaded into registers while this one is multiplied. Operands may have any strides.
 *
 * Each k-tile is summed on its own and then added to the accumulators, so the rounding error of a long float
 * sum grows with the number of k-tiles, not of elements.
 *
 * Every other instruction takes the time of an FMA (docs/lab.md). So a thread loads 16 bytes of each operand
 * at once where it can. Neighbouring lanes have the same columns of B, and lanes 2 apart the same rows of A,
 * since shared memory then serves 16 lanes at a time. */
#pragma once

#include "operand.cuh"

namespace fused_moe::sm80 {

template <typename T_>
struct SimtTile {
    using T = T_;
    using Acc = T_;
    using OriginB = const T *;
    static constexpr int BM = 128, BN = 128, BK = 32 / sizeof(T), THREADS = 256, CTAS_PER_SM = 1;
    static constexpr int WARPS_N = 2, WARP_M = 32;
    static constexpr int SUBTILES = 8, SUBTILE_ROWS = 4; /* of a warp, in the epilogue */
    static constexpr bool HAS_SCALES = true, HAS_STRIDES = true;
    static constexpr int PITCH = BM + 4;
    static constexpr int LOADS = BM * BK / THREADS; /* elements of each operand that a thread loads */
    static_assert(LOADS * sizeof(T) == 16);

    struct Stages {
        T a[2][BK][PITCH], b[2][BK][PITCH];
    };

    struct __align__(16) Vector {
        T v[LOADS];
    };

    T acc[8][8];

    __device__ static int warp_m() { return threadIdx.x / 32 / WARPS_N; }
    __device__ static int warp_n() { return threadIdx.x / 32 % WARPS_N; }
    /* Which of the warp's 4 x 8 blocks of accumulators a thread has. */
    __device__ static int lane_row() { return threadIdx.x % 32 / 16 * 2 + threadIdx.x % 2; }
    __device__ static int lane_column() { return threadIdx.x % 16 / 2; }

    __device__ void zero() {
#pragma unroll
        for (int i = 0; i < 64; i++) (&acc[0][0])[i] = 0;
    }

    /* This thread's elements of an operand's k-tiles: neighbours along k if it is K-major, else along mn. */
    struct Loader {
        const Operand<T> &x;
        const T *origin;
        int mn, k, depth, next_row;
        bool k_major, together; /* the elements are one vector in memory, or all zero */
        Vector elements;
        T scale;

        __device__ Loader(const Operand<T> &x, int depth) : x(x), depth(depth) {
            int n = threadIdx.x;
            k_major = x.stride_k == 1;
            mn = k_major ? n / (BK / LOADS) : n % (BM / LOADS) * LOADS;
            k = k_major ? n % (BK / LOADS) * LOADS : n / (BM / LOADS);
            origin = x.origin[mn];
            together = (uintptr_t)origin % 16 == 0 && !x.strides_k;
            if (k_major) {
                together = together && !x.row && !x.scores;
            } else {
                together = together && !x.scale_mn && x.stride_k % LOADS == 0;
#pragma unroll
                for (int i = 1; i < LOADS; i++)
                    together = together && x.origin[mn + i] == (origin ? origin + i : nullptr);
            }
            next_row = x.row_of(k, depth);
        }

        /* k-tiles are loaded in order, from k0 = 0 on. */
        __device__ void load(int k0) {
            int first = k0 + k, row = next_row;
            next_row = x.row_of(first + BK, depth);
            bool ends_within = k_major && first < depth && first + LOADS > depth;
            elements = {}, scale = 1;
            if (!together || ends_within) {
#pragma unroll
                for (int i = 0; i < LOADS; i++)
                    elements.v[i] = x.element(k_major ? mn : mn + i, k_major ? first + i : first, depth);
            } else if (origin && row >= 0) {
                auto *vector = reinterpret_cast<const uint4 *>(origin + row * x.stride_k);
                *reinterpret_cast<uint4 *>(&elements) = __ldg(vector);
                if (x.scale_mn || x.scores) scale = x.scale(mn, first);
            }
        }

        __device__ void store(T (*stage)[PITCH]) {
#pragma unroll
            for (int i = 0; i < LOADS; i++) elements.v[i] *= scale;
            if (!k_major) *reinterpret_cast<Vector *>(&stage[k][mn]) = elements;
#pragma unroll
            for (int i = 0; i < LOADS; i++)
                if (k_major) stage[k + i][mn] = elements.v[i];
        }
    };

    /* acc += A B^T over k < depth. The origins are in shared memory, synchronised by the caller. */
    __device__ void main_loop(Stages &s, const Operand<T> &a, const Operand<T> &b, int depth) {
        int row = warp_m() * WARP_M + lane_row() * 8, col = warp_n() * WARP_N + lane_column() * 4;
        Loader of_a(a, depth), of_b(b, depth);
        of_a.load(0);
        of_b.load(0);
        for (int k0 = 0, stage = 0; k0 < depth; k0 += BK, stage ^= 1) {
            of_a.store(s.a[stage]);
            of_b.store(s.b[stage]);
            __syncthreads();
            of_a.load(k0 + BK);
            of_b.load(k0 + BK);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                T sum[8][4] = {};
#pragma unroll
                for (int k = 0; k < BK; k++)
#pragma unroll
                    for (int i = 0; i < 8; i++)
#pragma unroll
                        for (int j = 0; j < 4; j++)
                            sum[i][j] += s.a[stage][k][row + i] * s.b[stage][k][col + 32 * half + j];
#pragma unroll
                for (int i = 0; i < 8; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++) acc[i][4 * half + j] += sum[i][j];
            }
        }
        __syncthreads();
    }

    /* Row of the tile that is row i of this warp's subtile q. */
    __device__ static int subtile_row(int q, int i) { return warp_m() * WARP_M + i * 8 + q; }

    /* Stores the warp's subtile q, 4 rows of 64 accumulators, to its staging buffer. */
    __device__ void store_subtile(int q, T *staging, int pitch) const {
#pragma unroll
        for (int i = 0; i < SUBTILES; i++)
            if (i == q) /* a run-time index would move acc to local memory */
#pragma unroll
                for (int j = 0; j < 8; j++)
                    staging[lane_row() * pitch + j / 4 * 32 + lane_column() * 4 + j % 4] = acc[i][j];
    }
};

} // namespace fused_moe::sm80
