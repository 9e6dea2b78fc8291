/* One CTA's tile of C = A B^T in float or double, by FMA instructions: no tf32.
 *
 * C is 128 x 128: eight warps of 32 x 64, 8 x 8 accumulators per thread. Shared memory is double-buffered:
 * the next k-tile is loaded into registers while this one is multiplied. Operands may have any strides.
 *
 * Each k-tile is summed on its own and then added to the accumulators, so the rounding error of a long float
 * sum grows with the number of k-tiles, not of elements. */
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
    static constexpr int LOADS = BM * BK / THREADS, PITCH = BM + 4;

    struct Stages {
        T a[2][BK][PITCH], b[2][BK][PITCH];
    };

    T acc[8][8];

    __device__ static int warp_m() { return threadIdx.x / 32 / WARPS_N; }
    __device__ static int warp_n() { return threadIdx.x / 32 % WARPS_N; }

    __device__ void zero() {
#pragma unroll
        for (int i = 0; i < 64; i++) (&acc[0][0])[i] = 0;
    }

    /* Element i of this thread. Consecutive threads load consecutive elements, K-major or MN-major. */
    __device__ static void index_of(const Operand<T> &x, int i, int &mn, int &k) {
        int n = threadIdx.x + i * THREADS;
        bool k_major = x.stride_k == 1;
        mn = k_major ? n / BK : n % BM;
        k = k_major ? n % BK : n / BM;
    }

    __device__ static void load(T (&v)[LOADS], const Operand<T> &x, int k0, int depth) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int mn, k;
            index_of(x, i, mn, k);
            v[i] = x.element(mn, k0 + k, depth);
        }
    }

    __device__ static void store(T (*stage)[PITCH], const Operand<T> &x, const T (&v)[LOADS]) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int mn, k;
            index_of(x, i, mn, k);
            stage[k][mn] = v[i];
        }
    }

    /* acc += A B^T over k < depth. The origins are in shared memory, synchronised by the caller. */
    __device__ void main_loop(Stages &s, const Operand<T> &a, const Operand<T> &b, int depth) {
        int lane = threadIdx.x % 32;
        int row = warp_m() * WARP_M + lane / 8 * 8, col = warp_n() * WARP_N + lane % 8 * 4;
        T va[LOADS], vb[LOADS];
        load(va, a, 0, depth);
        load(vb, b, 0, depth);
        for (int k0 = 0, stage = 0; k0 < depth; k0 += BK, stage ^= 1) {
            store(s.a[stage], a, va);
            store(s.b[stage], b, vb);
            __syncthreads();
            load(va, a, k0 + BK, depth);
            load(vb, b, k0 + BK, depth);
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
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < SUBTILES; i++)
            if (i == q) /* a run-time index would move acc to local memory */
#pragma unroll
                for (int j = 0; j < 8; j++)
                    staging[lane / 8 * pitch + j / 4 * 32 + lane % 8 * 4 + j % 4] = acc[i][j];
    }
};

} // namespace fused_moe::sm80
