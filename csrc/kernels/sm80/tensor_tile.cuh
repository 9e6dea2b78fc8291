/* One CTA's tile of C = A B^T for 16-bit elements on tensor cores: mma.sync, fed by a cp.async pipeline.
 *
 *   C           128 x 256 by eight warps of 64 x 64; or 128 x 128 by four warps and two CTAs per SM, where
 *               one CTA's epilogue overlaps the other's main loop
 *   k-tile      32 elements of k, of A and of B, in the operand's own layout. Chunks are 16 bytes:
 *     K-major   [extent][32 k]   chunk c of row mn is swizzled to c ^ (mn/2 % 4)
 *     MN-major  [32 k][extent]   chunk c of row k  is swizzled to c ^ (k % 8); ldmatrix transposes it
 *   pipeline    4 stages where A is K-major and loaded by cp.async, else 3
 *
 * The swizzles avoid bank conflicts in cp.async and in ldmatrix. A warp issues 64 mma per k-tile, so every
 * other instruction counts: addresses are computed before the main loop, which only adds compile-time
 * constants to them.
 *
 * Without `vectorised`, operands may have any strides and alignment: elements are loaded one by one into the
 * K-major layout. With `scaled`, A's elements pass through registers, where they are multiplied by scores. */
#pragma once

#include "operand.cuh"

namespace fused_moe::sm80 {

template <typename T_, bool a_k_major, bool b_k_major, bool vectorised, bool scaled = false,
          int columns = 256>
struct TensorTile {
    using T = T_;
    using Acc = float;
    using OriginB = const T *;
    static constexpr bool FAST = vectorised && !scaled; /* loads by cp.async alone, unrolled main loop */
    static constexpr int BM = 128, BN = columns, BK = 32, THREADS = BN, CTAS_PER_SM = 256 / BN;
    static constexpr int STAGES = FAST && a_k_major ? 4 : 3;
    static constexpr int WARPS_N = BN / WARP_N, WARP_M = 64;
    static constexpr int SUBTILES = 4, SUBTILE_ROWS = 16; /* of a warp, in the epilogue */
    static constexpr bool A_K = a_k_major || !vectorised, B_K = b_k_major || !vectorised;
    /* In TileShared. Four 256-wide stages leave no room for scales in the 99 KiB of sm_86 and sm_89. */
    static constexpr bool HAS_SCALES = !FAST || BN == 128, HAS_STRIDES = !vectorised;

    struct Stages {
        T a[STAGES][BM * BK], b[STAGES][BN * BK];
    };

    Sum<T> acc[4][8][4];

    __device__ static int warp_m() { return threadIdx.x / 32 / WARPS_N; }
    __device__ static int warp_n() { return threadIdx.x / 32 % WARPS_N; }

    __device__ void zero() {
#pragma unroll
        for (int i = 0; i < 4 * 8 * 4; i++) (&acc[0][0][0])[i] = 0;
    }

    /* Where a stage has element (mn, k). */
    template <bool k_major, int extent>
    __device__ static int swizzled(int mn, int k) {
        return k_major ? mn * BK + ((k / 8 ^ mn / 2) % 4) * 8 + k % 8
                       : k * extent + (mn / 8 ^ k % 8) * 8 + mn % 8;
    }

    /* --- global memory to a stage: this thread's part of one operand ------------------------------------ */

    /* load(stage, ahead) loads the k-tile `ahead` after the present one; both are constants in the unrolled
     * main loop. advance() moves the present k-tile on by STAGES. Past the depth, zeros are loaded. */
    static constexpr int ADVANCE = STAGES * BK;

    __device__ static void load_scaled(T *dst, const T *src, bool valid, float scale) {
        Pack<T> pack = {};
        if (valid) pack = *reinterpret_cast<const Pack<T> *>(src);
#pragma unroll
        for (int i = 0; i < CHUNK; i++) pack.v[i] = from_accum<T>(valid ? to_accum(pack.v[i]) * scale : 0);
        *reinterpret_cast<Pack<T> *>(dst) = pack;
    }

    /* Consecutive threads load consecutive chunks along k. */
    template <int extent, bool with_scale>
    struct KMajorLoader {
        static constexpr int ROWS = THREADS * CHUNK / BK, LOADS = extent / ROWS; /* ROWS: of mn, per load */
        const Operand<T> &x;
        T *stages;
        const T *next[LOADS];
        int first_mn, k, left; /* left: elements from this thread's k to the depth */
        unsigned valid = 0;    /* bit i: load i has an origin */
        uint32_t dst;

        __device__ KMajorLoader(const Operand<T> &operand, int depth, T *stages_)
            : x(operand), stages(stages_), first_mn(threadIdx.x / (BK / CHUNK)),
              k(threadIdx.x % (BK / CHUNK) * CHUNK), left(depth - k) {
            stages += swizzled<true, extent>(first_mn, k);
            dst = opaque(shared_address(stages));
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                const T *origin = x.origin[first_mn + i * ROWS];
                if (origin) valid |= 1u << i;
                next[i] = origin + k;
            }
        }

        __device__ void load(int stage, int ahead) {
            unsigned in_depth = left > ahead * BK ? valid : 0;
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                int offset = (stage * extent + i * ROWS) * BK;
                if constexpr (with_scale)
                    load_scaled(stages + offset, next[i] + ahead * BK, in_depth >> i & 1,
                                x.scale(first_mn + i * ROWS, k + ahead * BK));
                else
                    cp_async(dst + offset * (int)sizeof(T), next[i] + ahead * BK, in_depth >> i & 1);
            }
        }

        __device__ void advance() {
            k += ADVANCE;
            left -= ADVANCE;
#pragma unroll
            for (int i = 0; i < LOADS; i++) next[i] += ADVANCE;
        }
    };

    /* Consecutive threads load consecutive chunks along M or N. row[] is prefetched one k-tile ahead. */
    template <int extent, bool with_scale>
    struct MNMajorLoader {
        static constexpr int WIDTH = extent / CHUNK, ROWS = THREADS / WIDTH,
                             LOADS = BK / ROWS; /* ROWS: of k, per load */
        const Operand<T> &x;
        T *stages;
        const char *origin;
        unsigned stride; /* in bytes */
        unsigned limit;  /* rows below it exist */
        int k, depth;
        int row[LOADS];
        uint32_t dst;

        __device__ MNMajorLoader(const Operand<T> &operand, int depth_, T *stages_)
            : x(operand), stages(stages_), stride((unsigned)x.stride_k * (unsigned)sizeof(T)),
              k(threadIdx.x / WIDTH), depth(depth_) {
            int first_mn = threadIdx.x % WIDTH * CHUNK;
            origin = (const char *)x.origin[first_mn];
            limit = !origin ? 0 : x.row ? (unsigned)x.num_rows : depth;
            stages += swizzled<false, extent>(first_mn, k);
            dst = opaque(shared_address(stages));
            prefetch_rows(0);
        }

        __device__ void prefetch_rows(int ahead) {
#pragma unroll
            for (int i = 0; i < LOADS; i++) row[i] = k + ahead * BK + i * ROWS;
            if (x.row)
#pragma unroll
                for (int i = 0; i < LOADS; i++) row[i] = row[i] < depth ? x.row[row[i]] : -1;
        }

        __device__ void load(int stage, int ahead) {
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                bool valid = (unsigned)row[i] < limit;
                const T *src = (const T *)(origin + (uint64_t)(unsigned)row[i] * stride);
                int offset = (stage * BK + i * ROWS) * extent;
                if constexpr (with_scale)
                    load_scaled(stages + offset, src, valid,
                                valid ? x.scale(0, k + ahead * BK + i * ROWS) : 0.0f);
                else
                    cp_async(dst + offset * (int)sizeof(T), src, valid);
            }
            prefetch_rows(ahead + 1);
        }

        __device__ void advance() { k += ADVANCE; }
    };

    /* Any strides and alignment: one element at a time. */
    template <int extent>
    struct ScalarLoader {
        const Operand<T> &x;
        T *stages;
        int k = 0, depth;

        __device__ ScalarLoader(const Operand<T> &operand, int depth_, T *stages_)
            : x(operand), stages(stages_), depth(depth_) {}

        __device__ void load(int stage, int ahead) {
            bool k_major = x.stride_k == 1;
#pragma unroll 1
            for (int i = threadIdx.x; i < extent * BK; i += THREADS) {
                int mn = k_major ? i / BK : i % extent, tile_k = k_major ? i % BK : i / extent;
                stages[stage * extent * BK + swizzled<true, extent>(mn, tile_k)] =
                    x.element(mn, k + ahead * BK + tile_k, depth);
            }
        }

        __device__ void advance() { k += ADVANCE; }
    };

    template <int extent, bool k_major, bool with_scale>
    using Loader = std::conditional_t<
        !vectorised, ScalarLoader<extent>,
        std::conditional_t<k_major, KMajorLoader<extent, with_scale>, MNMajorLoader<extent, with_scale>>>;

    /* --- a stage to registers --------------------------------------------------------------------------- */

    /* mma fragments of four groups of 16 mn. Each quarter of a warp addresses one 8x8 matrix. mn_first:
     * matrix 1 is 8 mn after matrix 0, matrix 2 is 8 k after it: mma's A. Otherwise the two are swapped: two
     * of mma's B. */
    template <int extent, bool k_major, bool mn_first>
    struct Fragments {
        static constexpr int NUM = k_major ? BK / 16 : 4;
        uint32_t address[NUM]; /* in stage 0 */

        __device__ Fragments(int first_mn, const T *stages) {
            int row = threadIdx.x % 8, low = threadIdx.x / 8 % 2 * 8, high = threadIdx.x / 16 % 2 * 8;
            int mn = first_mn + (mn_first ? low : high), k = mn_first ? high : low;
#pragma unroll
            for (int i = 0; i < NUM; i++) {
                int offset = k_major ? swizzled<true, extent>(mn + row, k + 16 * i)
                                     : swizzled<false, extent>(mn + 16 * i, k + row);
                address[i] = opaque(shared_address(stages + offset));
            }
        }

        /* Group i at k of the k-tile in a stage. */
        __device__ void load(uint32_t (&r)[4], int stage, int i, int k) const {
            if constexpr (k_major)
                ldmatrix_x4(r, address[k / 16] + (stage * extent + i * 16) * BK * (int)sizeof(T));
            else
                ldmatrix_x4_trans(r, address[i] + (stage * BK + k) * extent * (int)sizeof(T));
        }
    };

    /* --- the main loop ---------------------------------------------------------------------------------- */

    /* acc += A B^T over k < depth. The origins are in shared memory, synchronised by the caller. */
    __device__ void main_loop(Stages &s, const Operand<T> &a, const Operand<T> &b, int depth) {
        Loader<BM, A_K, scaled> loader_a(a, depth, s.a[0]);
        Loader<BN, B_K, false> loader_b(b, depth, s.b[0]);
        Fragments<BM, A_K, true> fragments_a(warp_m() * WARP_M, s.a[0]);
        Fragments<BN, B_K, false> fragments_b(warp_n() * WARP_N, s.b[0]);
        auto load_stage = [&](int stage, int ahead) {
            loader_a.load(stage, ahead);
            loader_b.load(stage, ahead);
            cp_async_commit_group();
        };
        /* Fragments are double-buffered: those of the next 16 k are in flight during the mma of these, also
         * from one k-tile to the next. */
        uint32_t fa[2][4][4], fb[2][4][4];
        auto load_fragments = [&](int half, int stage) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                fragments_a.load(fa[half][i], stage, i, 16 * half);
                fragments_b.load(fb[half][i], stage, i, 16 * half);
            }
        };
        auto mma_half = [&](int half) {
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 8; j++)
                    multiply_add<T>(acc[i][j], fa[half][i], fb[half][j / 2][j % 2 * 2],
                                    fb[half][j / 2][j % 2 * 2 + 1]);
        };

        /* prologue: fill the pipeline */
#pragma unroll(FAST ? STAGES - 1 : 1)
        for (int stage = 0; stage < STAGES - 1; stage++) load_stage(stage, stage);
        cp_async_wait_group<STAGES - 2>();
        __syncthreads();
        load_fragments(0, 0);

        auto k_tile = [&](int stage) {
            load_fragments(1, stage);
            load_stage((stage + STAGES - 1) % STAGES, stage + STAGES - 1);
            mma_half(0);
            cp_async_wait_group<STAGES - 2>();
            __syncthreads();
            load_fragments(0, (stage + 1) % STAGES);
            mma_half(1);
        };
        /* STAGES k-tiles per iteration: unrolled, the stage and so every address is a compile-time
         * constant */
        for (int left = (depth + BK - 1) / BK; left > 0; left -= STAGES) {
            if constexpr (FAST) {
#pragma unroll
                for (int stage = 0; stage < STAGES; stage++) {
                    if (stage >= left) break;
                    k_tile(stage);
                }
            } else {
#pragma unroll 1
                for (int stage = 0; stage < min(left, STAGES); stage++) k_tile(stage);
            }
            loader_a.advance();
            loader_b.advance();
        }
        cp_async_wait_group<0>();
        __syncthreads();
    }

    /* --- the accumulators ------------------------------------------------------------------------------- */

    /* Row of the tile that is row i of this warp's subtile q. */
    __device__ static int subtile_row(int q, int i) { return warp_m() * WARP_M + q * 16 + i; }

    /* Stores the warp's subtile q, 16 rows of 64 accumulators, to its staging buffer. */
    __device__ void store_subtile(int q, float *staging, int pitch) const {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < SUBTILES; i++)
            if (i == q) /* a run-time index would move acc to local memory */
#pragma unroll
                for (int j = 0; j < 8; j++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        *reinterpret_cast<float2 *>(staging + (lane / 4 + 8 * half) * pitch + j * 8 +
                                                    lane % 4 * 2) =
                            make_float2(acc[i][j][2 * half], acc[i][j][2 * half + 1]);
    }
};

} // namespace fused_moe::sm80
