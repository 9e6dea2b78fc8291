/* A CTA's tile of C = A B^T in float or double, on the ordinary arithmetic units: exact, no tf32.
 *
 * C 128 x 128 over eight warps of 32 x 64, 8 x 8 numbers a thread. Two stages: the next one's numbers are
 * in registers while this one's are multiplied. Operands may have any strides.
 *
 * A stage's products are summed apart and then added: the rounding of a long float sum grows with the
 * number of stages and not of products. */
#pragma once

#include "operand.cuh"

namespace fused_moe {

template <typename T_>
struct SimtTile {
    using T = T_;
    using R = T_;
    static constexpr int BM = 128, BN = 128, BK = 32 / sizeof(T), THREADS = 256, CTAS = 1;
    static constexpr int WARPS_N = 2, WARP_M = 32, SLICES = 8, SLICE_ROWS = 4;
    static constexpr bool HAS_SCALES = true, HAS_STRIDES = true;
    static constexpr int COPIES = BM * BK / THREADS, PITCH = BM + 4;

    struct Shared {
        T a[2][BK][PITCH], b[2][BK][PITCH];
    };

    T acc[8][8];

    __device__ static int warp_m() { return threadIdx.x / 32 / WARPS_N; }
    __device__ static int warp_n() { return threadIdx.x / 32 % WARPS_N; }

    __device__ void zero() {
#pragma unroll
        for (int i = 0; i < 64; i++) (&acc[0][0])[i] = 0;
    }

    /* Consecutive threads read consecutive numbers, whichever way those run. */
    __device__ static void line_and_k(const Operand<T> &x, int i, int &line, int &k) {
        int n = threadIdx.x + i * THREADS;
        bool along_k = x.stride_k == 1;
        line = along_k ? n / BK : n % BM;
        k = along_k ? n % BK : n / BM;
    }

    __device__ static void load(T (&v)[COPIES], const Operand<T> &x, int k0, int depth) {
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            int line, k;
            line_and_k(x, i, line, k);
            v[i] = x.at(line, k0 + k, depth);
        }
    }

    __device__ static void store(T (*stage)[PITCH], const Operand<T> &x, const T (&v)[COPIES]) {
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            int line, k;
            line_and_k(x, i, line, k);
            stage[k][line] = v[i];
        }
    }

    /* acc += A B^T over k < depth. Origins are in shared memory and synchronised. */
    __device__ void multiply(Shared &s, const Operand<T> &a, const Operand<T> &b, int depth) {
        int lane = threadIdx.x % 32;
        int row = warp_m() * WARP_M + lane / 8 * 8, col = warp_n() * 64 + lane % 8 * 4;
        T va[COPIES], vb[COPIES];
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
                            sum[i][j] +=
                                s.a[stage][k][row + i] * s.b[stage][k][col + 32 * half + j];
#pragma unroll
                for (int i = 0; i < 8; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++) acc[i][4 * half + j] += sum[i][j];
            }
        }
        __syncthreads();
    }

    __device__ static int slice_row(int q, int i) { return warp_m() * WARP_M + i * 8 + q; }

    /* Slice q of the warp's accumulators, 4 rows of 64 columns, into shared memory. */
    __device__ void store_slice(int q, T *out, int stride) const {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < SLICES; i++)
            if (i == q) /* a run-time index would put acc into local memory */
#pragma unroll
                for (int j = 0; j < 8; j++)
                    out[lane / 8 * stride + j / 4 * 32 + lane % 8 * 4 + j % 4] = acc[i][j];
    }
};

} // namespace fused_moe
