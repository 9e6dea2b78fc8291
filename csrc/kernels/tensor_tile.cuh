/* A CTA's tile of C = A B^T for 16-bit dtypes on tensor cores: mma.sync fed by a ring of cp.async stages.
 *
 *   C 128 x 128, four warps of 64 x 64, two CTAs an SM so that one's epilogue hides under the other's loop
 *   stage: 32 of k; A and B each 8 KiB, in the order they have in memory:
 *     k-major     [128 lines][32 k],  16-byte chunk c of line i at place c ^ (i/2 % 4)
 *     line-major  [32 k][128 lines],  chunk c of k at place c ^ (k % 8)
 *   so that neither the copies nor ldmatrix meet a bank conflict. ldmatrix transposes line-major ones.
 *
 * The loop issues 64 mma a warp and stage, so every other instruction counts: a thread's addresses are
 * made before it, and differ inside it by constants.
 *
 * With vectors = false the operands may have any strides and alignment: numbers are copied one by one,
 * into the k-major order. With scaled = true A's numbers are multiplied on the way, through registers. */
#pragma once

#include <type_traits>

#include "operand.cuh"

namespace fused_moe {

template <typename T_, bool a_k_major, bool b_k_major, bool vectors, bool scaled = false>
struct TensorTile {
    using T = T_;
    using R = float;
    static constexpr int BM = 128, BN = 128, BK = 32, STAGES = 4, THREADS = 128, CTAS = 2;
    static constexpr int WARPS_N = 2, WARP_M = 64, SLICES = 4, SLICE_ROWS = 16;
    static constexpr int LINES = 128, COPIES = LINES * BK / CHUNK / THREADS;
    static constexpr bool A_K = a_k_major || !vectors, B_K = b_k_major || !vectors;
    static_assert(BM == LINES && BN == LINES, "one layout of a stage serves both operands");

    struct Shared {
        T a[STAGES][BM * BK], b[STAGES][BN * BK];
    };

    float acc[4][8][4];

    __device__ static int warp_m() { return threadIdx.x / 32 / WARPS_N; }
    __device__ static int warp_n() { return threadIdx.x / 32 % WARPS_N; }

    __device__ void zero() {
#pragma unroll
        for (int i = 0; i < 4 * 8 * 4; i++) (&acc[0][0][0])[i] = 0;
    }

    template <bool k_major>
    __device__ static int place(int line, int k) {
        return k_major ? line * BK + ((k / 8 ^ line / 2) % 4) * 8 + k % 8
                       : k * LINES + (line / 8 ^ k % 8) * 8 + line % 8;
    }

    /* --- from global memory to a stage: this thread's part of one operand ----------------------------- */

    __device__ static void copy_chunk(T *dst, const T *src, bool valid) {
        cp_async(shared_address(dst), src, valid);
    }

    __device__ static void copy_scaled(T *dst, const T *src, bool valid, float scale) {
        Pack<T> pack = {};
        if (valid) pack = *reinterpret_cast<const Pack<T> *>(src);
#pragma unroll
        for (int i = 0; i < CHUNK; i++) pack.v[i] = from_real<T>(valid ? to_real(pack.v[i]) * scale : 0);
        *reinterpret_cast<Pack<T> *>(dst) = pack;
    }

    /* Four threads a line, a fourth of the lines at a time. */
    template <bool with_scale>
    struct AlongK {
        const Operand<T> &x;
        const T *next[COPIES];
        int k, depth, first_line;
        unsigned valid = 0;

        __device__ AlongK(const Operand<T> &operand, int depth_)
            : x(operand), k(threadIdx.x % 4 * CHUNK), depth(depth_), first_line(threadIdx.x / 4) {
#pragma unroll
            for (int i = 0; i < COPIES; i++) {
                const T *line = x.origin[first_line + i * LINES / COPIES];
                if (line) valid |= 1u << i;
                next[i] = line + k;
            }
        }

        __device__ void copy(T *stage) {
            T *dst = stage + place<true>(first_line, threadIdx.x % 4 * CHUNK);
#pragma unroll
            for (int i = 0; i < COPIES; i++) {
                bool here = k < depth && (valid >> i & 1);
                if constexpr (with_scale)
                    copy_scaled(dst + i * (LINES / COPIES * BK), next[i], here,
                                x.scale(first_line + i * LINES / COPIES, k));
                else
                    copy_chunk(dst + i * (LINES / COPIES * BK), next[i], here);
                next[i] += BK;
            }
            k += BK;
        }
    };

    /* Sixteen threads a k, eight k at a time. A map's rows are fetched a step ahead. */
    template <bool with_scale>
    struct AlongLines {
        const Operand<T> &x;
        const T *line;
        int k, depth, stride;
        unsigned limit; /* rows below it are there */
        int row[COPIES];

        __device__ AlongLines(const Operand<T> &operand, int depth_)
            : x(operand), line(x.origin[threadIdx.x % 16 * CHUNK]), k(threadIdx.x / 16),
              depth(depth_), stride((int)x.stride_k), limit(!line   ? 0
                                                            : x.row ? (unsigned)x.num_rows
                                                                    : depth) {
            fetch_rows();
        }

        __device__ void fetch_rows() {
#pragma unroll
            for (int i = 0; i < COPIES; i++) row[i] = k + i * (BK / COPIES);
            if (x.row)
#pragma unroll
                for (int i = 0; i < COPIES; i++) row[i] = row[i] < depth ? x.row[row[i]] : -1;
        }

        __device__ void copy(T *stage) {
            T *dst = stage + place<false>(threadIdx.x % 16 * CHUNK, threadIdx.x / 16);
#pragma unroll
            for (int i = 0; i < COPIES; i++) {
                bool here = (unsigned)row[i] < limit;
                const T *src = line + (int64_t)row[i] * stride;
                T *to = dst + i * (BK / COPIES * LINES);
                if constexpr (with_scale)
                    copy_scaled(to, src, here, here ? x.scale(0, k + i * (BK / COPIES)) : 0.0f);
                else
                    copy_chunk(to, src, here);
            }
            k += BK;
            fetch_rows();
        }
    };

    struct OneByOne {
        const Operand<T> &x;
        int k = 0, depth;

        __device__ OneByOne(const Operand<T> &operand, int depth_) : x(operand), depth(depth_) {}

        __device__ void copy(T *stage) {
            bool along_k = x.stride_k == 1;
#pragma unroll 4
            for (int i = threadIdx.x; i < LINES * BK; i += THREADS) {
                int line = along_k ? i / BK : i % LINES, at = along_k ? i % BK : i / LINES;
                stage[place<true>(line, at)] = x.at(line, k + at, depth);
            }
            k += BK;
        }
    };

    template <bool k_major, bool with_scale>
    using Copier =
        std::conditional_t<!vectors, OneByOne,
                           std::conditional_t<k_major, AlongK<with_scale>, AlongLines<with_scale>>>;

    /* --- from a stage to registers --------------------------------------------------------------------- */

    /* Fragments of four 16-line groups. lines_first: the quarters of a warp address lines 0-7 | 8-15 and
     * then the same at k + 8, as mma's A wants them; else k | k + 8 first, as two of its B do. */
    template <bool k_major, bool lines_first>
    struct Fragments {
        uint32_t at[k_major ? 2 : 4]; /* byte in a stage */

        __device__ Fragments(int first_line) {
            int row = threadIdx.x % 8, low = threadIdx.x / 8 % 2 * 8,
                high = threadIdx.x / 16 % 2 * 8;
            int line = first_line + (lines_first ? low : high), k = lines_first ? high : low;
#pragma unroll
            for (int i = 0; i < (k_major ? 2 : 4); i++)
                at[i] = sizeof(T) * (k_major ? place<true>(line + row, k + 16 * i)
                                             : place<false>(line + 16 * i, k + row));
        }

        __device__ void load(uint32_t (&r)[4], uint32_t stage, int i, int k) const {
            if constexpr (k_major)
                ldmatrix_x4(r, stage + at[k / 16] + i * 16 * BK * (int)sizeof(T));
            else
                ldmatrix_x4_trans(r, stage + at[i] + k * LINES * (int)sizeof(T));
        }
    };

    /* --- the loop --------------------------------------------------------------------------------------- */

    /* acc += A B^T over k < depth. Origins are in shared memory and synchronised. */
    __device__ void multiply(Shared &s, const Operand<T> &a, const Operand<T> &b, int depth) {
        Copier<A_K, scaled> copy_a(a, depth);
        Copier<B_K, false> copy_b(b, depth);
        Fragments<A_K, true> fragments_a(warp_m() * WARP_M);
        Fragments<B_K, false> fragments_b(warp_n() * 64);
        int steps = (depth + BK - 1) / BK;
#pragma unroll
        for (int step = 0; step < STAGES - 1; step++) {
            if (step < steps) {
                copy_a.copy(s.a[step]);
                copy_b.copy(s.b[step]);
            }
            cp_async_commit_group();
        }
        /* Fragments of the next 16 k are on their way while these are multiplied, across stages too. */
        uint32_t fa[2][4][4], fb[2][4][4];
        auto load = [&](int half, int stage) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                fragments_a.load(fa[half][i], shared_address(s.a[stage]), i, 16 * half);
                fragments_b.load(fb[half][i], shared_address(s.b[stage]), i, 16 * half);
            }
        };
        auto multiply_half = [&](int half) {
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 8; j++)
                    mma_m16n8k16(acc[i][j], fa[half][i], fb[half][j / 2][j % 2 * 2],
                                 fb[half][j / 2][j % 2 * 2 + 1], T());
        };
        cp_async_wait_group<STAGES - 2>();
        __syncthreads();
        if (steps) load(0, 0);
        for (int step = 0; step < steps; step++) {
            load(1, step % STAGES);
            int ahead = step + STAGES - 1;
            if (ahead < steps) {
                copy_a.copy(s.a[ahead % STAGES]);
                copy_b.copy(s.b[ahead % STAGES]);
            }
            cp_async_commit_group();
            multiply_half(0);
            cp_async_wait_group<STAGES - 2>();
            __syncthreads();
            if (step + 1 < steps) load(0, (step + 1) % STAGES);
            multiply_half(1);
        }
        cp_async_wait_group<0>();
        __syncthreads();
    }

    /* --- the result ------------------------------------------------------------------------------------- */

    /* Row of the tile that is row i of this warp's slice q. */
    __device__ static int slice_row(int q, int i) { return warp_m() * WARP_M + q * 16 + i; }

    /* Slice q of the warp's accumulators, 16 rows of 64 columns, into shared memory. */
    __device__ void store_slice(int q, float *out, int stride) const {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < SLICES; i++)
            if (i == q) /* a run-time index would put acc into local memory */
#pragma unroll
                for (int j = 0; j < 8; j++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        *reinterpret_cast<float2 *>(out + (lane / 4 + 8 * half) * stride + j * 8 +
                                                    lane % 4 * 2) =
                            make_float2(acc[i][j][2 * half], acc[i][j][2 * half + 1]);
    }
};

} // namespace fused_moe
