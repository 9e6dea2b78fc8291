/* One CTA's tile of C = A B^T for experts of few rows, where a GEMM takes as long as reading B: TensorTile's
 * interface and bits, in small CTAs.
 *
 *   C           16 x 64 or 64 x 128, by four warps side by side of 16 or 32 columns
 *   k-tile      64 elements of k. A line is 64 elements of k of one row or, MN-major, all columns at one k.
 *               Chunk c of line l is swizzled to c ^ (l % 8). A line of K-major B is a whole cache line.
 *   pipeline    for a dense B 4 stages of one k-tile, 3 with 64 rows
 *
 *   waits       |k 0             |k 1             |k 2
 *   fragments    |of k 0          |of k 1
 *   loads                |k 4             |k 5            into the stage that was read
 *   mma           |k 0            |k 1
 *
 * Bytes in flight decide the speed. So a stage is loaded again as soon as all warps have its fragments, at
 * the price of a second barrier per k-tile, and while a CTA waits all its stages are in flight: 32 KiB of a
 * dense B (48 with 64 rows). An SM has room for 5 such CTAs (3) on the H100, 3 (2) on the A100, 2 (1) where
 * it has 100 KiB. Their prologues and epilogues overlap, and one token has tiles enough for every SM.
 *
 * An accumulator is TensorTile's to the bit: the same instruction with the same operands adds 16 k at a time,
 * in order, from zero. There may be more steps past the depth here; they add zeros.
 *
 * `Columns` makes the fragments of B: DenseColumns below, or QuantizedColumns (quantized_columns.cuh). */
#pragma once

#include "operand.cuh"

namespace fused_moe::sm80 {

/* --- the tile's shape ----------------------------------------------------------------------------------- */

template <int ROWS>
struct FewRows {
    static_assert(ROWS == 16 || ROWS == 64);
    static constexpr int BM = ROWS, BN = ROWS == 16 ? 64 : 128, BK = 64, WARPS = 4, THREADS = 32 * WARPS;
    static constexpr int GROUPS_M = BM / 16, WARP_COLUMNS = BN / WARPS, GROUPS_N = WARP_COLUMNS / 16;
    static constexpr int CTAS_PER_SM = ROWS == 16 ? 5 : 3;
};

/* Where a stage has a chunk of an operand with `width` chunks per line. */
template <int width>
__device__ inline int swizzled_line(int line, int chunk) {
    return (line * width + (chunk ^ line % 8)) * CHUNK;
}

/* Global memory to a stage: a thread's part of one operand of 16-bit elements. Consecutive threads load
 * consecutive chunks. Each load() is of the next k-tile; past the depth, zeros. */
template <typename T, class Shape, int extent, bool k_major>
struct LineLoader {
    static constexpr int BK = Shape::BK;
    static constexpr int WIDTH = (k_major ? BK : extent) / CHUNK,
                         LINES = Shape::THREADS / WIDTH; /* per load */
    static constexpr int LOADS = (k_major ? extent : BK) / LINES;
    const T *next[LOADS];
    int64_t advance;
    int left;            /* elements of k from this thread's first to the depth */
    unsigned exists = 0; /* bit i: load i has an origin */
    uint32_t dst;

    __device__ LineLoader(const Operand<T> &x, int depth, T *stage) {
        int line = threadIdx.x / WIDTH, chunk = threadIdx.x % WIDTH;
        advance = k_major ? BK : BK * x.stride_k;
        left = depth - (k_major ? chunk * CHUNK : line);
        dst = shared_address(stage + swizzled_line<WIDTH>(line, chunk));
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int l = line + i * LINES;
            const T *origin = x.origin[k_major ? l : chunk * CHUNK];
            if (origin) exists |= 1u << i;
            next[i] = origin + (k_major ? chunk * CHUNK : l * x.stride_k);
        }
    }

    __device__ void load(uint32_t stage_offset) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            bool in_depth = left > (k_major ? 0 : i * LINES);
            cp_async(dst + stage_offset + i * LINES * WIDTH * CHUNK * (int)sizeof(T), next[i],
                     in_depth && exists >> i & 1);
            next[i] += advance;
        }
        left -= BK;
    }
};

/* A stage to registers: mma fragments of groups of 16 mn, as TensorTile's. Along an MN-major line groups
 * differ in bits that the swizzle only inverts; along a K-major line k does. */
template <typename T, class Shape, int extent, bool k_major, bool mn_first>
struct LineFragments {
    static constexpr int BK = Shape::BK;
    uint32_t address; /* of group 0 at k = 0 in stage 0 */

    __device__ LineFragments(int first_mn, const T *stage) {
        int row = threadIdx.x % 8, low = threadIdx.x / 8 % 2 * 8, high = threadIdx.x / 16 % 2 * 8;
        int mn = first_mn + (mn_first ? low : high), k = mn_first ? high : low;
        address = shared_address(stage + (k_major ? swizzled_line<BK / CHUNK>(mn + row, k / CHUNK)
                                                  : swizzled_line<extent / CHUNK>(k + row, mn / CHUNK)));
    }

    __device__ void load(uint32_t (&r)[4], uint32_t stage_offset, int group, int k) const {
        constexpr int SIZE = sizeof(T);
        if constexpr (k_major)
            ldmatrix_x4(r, ((address + stage_offset) ^ k * SIZE) + group * 16 * BK * SIZE);
        else
            ldmatrix_x4_trans(r, ((address + stage_offset) ^ group * 16 * SIZE) + k * extent * SIZE);
    }
};

/* --- B of 16-bit elements ------------------------------------------------------------------------------- */

/* What a tile asks of its columns: load() of the next stage; begin_stage() before a stage's steps; for each
 * step of 16 k read(), after which the stage may be loaded again, then make() of the fragments. */
template <typename T_, bool k_major, int ROWS>
struct DenseColumns {
    using T = T_;
    using Shape = FewRows<ROWS>;
    using Origin = const T *;
    using Operand = sm80::Operand<T>;
    static constexpr int K_TILES = 1, STAGES = ROWS == 16 ? 4 : 3; /* k-tiles of a stage; stages */
    static constexpr bool MAY_SKIP_ROWS = false;
    using Stage = T[Shape::BN * Shape::BK];

    LineLoader<T, Shape, Shape::BN, k_major> loader;
    LineFragments<T, Shape, Shape::BN, k_major, false> fragments;
    uint32_t fragment[Shape::GROUPS_N][4]; /* of a step */

    __device__ DenseColumns(const Operand &b, int depth, Stage &first)
        : loader(b, depth, first), fragments(threadIdx.x / 32 * Shape::WARP_COLUMNS, first) {}

    __device__ void load(uint32_t stage_offset) { loader.load(stage_offset); }

    __device__ void begin_stage() {}

    __device__ void read(uint32_t stage_offset, int step) {
#pragma unroll
        for (int j = 0; j < Shape::GROUPS_N; j++) fragments.load(fragment[j], stage_offset, j, 16 * step);
    }

    __device__ void make(int) {}
};

/* --- the tile ------------------------------------------------------------------------------------------- */

/* A is K-major. It and dense B are vectorisable. */
template <class Columns>
struct FewRowsTile : Columns::Shape {
    using Shape = typename Columns::Shape;
    using T = typename Columns::T;
    using Acc = float;
    using OriginB = typename Columns::Origin;
    using Shape::BK, Shape::BM, Shape::BN, Shape::GROUPS_M, Shape::GROUPS_N, Shape::WARP_COLUMNS,
        Shape::WARPS;
    static constexpr int STAGES = Columns::STAGES, K_TILES = Columns::K_TILES;
    /* In the epilogue a warp has SUBTILE_ROWS rows of 64 columns, which the warps exchange. */
    static constexpr int WARPS_N = BN / WARP_N, WARPS_M = WARPS / WARPS_N;
    static constexpr int SUBTILES = 1, SUBTILE_ROWS = BM / WARPS_M;
    static constexpr bool HAS_SCALES = false, HAS_STRIDES = false;

    struct Stage {
        T a[K_TILES][BM * BK];
        typename Columns::Stage b;
    };
    struct Stages {
        Stage stage[STAGES];
    };
    static constexpr uint32_t STAGE_BYTES = sizeof(Stage), K_TILE_BYTES = BM * BK * sizeof(T);

    Sum<T> acc[GROUPS_M][2 * GROUPS_N][4];

    __device__ static int warp_m() { return threadIdx.x / 32 % WARPS_M; }
    __device__ static int warp_n() { return threadIdx.x / 32 / WARPS_M; }

    __device__ void zero() {
#pragma unroll
        for (int i = 0; i < GROUPS_M * 2 * GROUPS_N * 4; i++) (&acc[0][0][0])[i] = 0;
    }

    /* acc += A B^T over k < depth. The origins are in shared memory, synchronised by the caller. */
    __device__ void main_loop(Stages &s, const Operand<T> &a, const typename Columns::Operand &b, int depth) {
        constexpr int STEPS = K_TILES * BK / 16;
        Stage &first = s.stage[0];
        LineLoader<T, Shape, BM, true> loader_a(a, depth, first.a[0]);
        LineFragments<T, Shape, BM, true, true> fragments_a(0, first.a[0]);
        Columns columns(b, depth, first.b);
        auto load_stage = [&](uint32_t stage_offset) {
#pragma unroll
            for (int i = 0; i < K_TILES; i++) loader_a.load(stage_offset + i * K_TILE_BYTES);
            columns.load(stage_offset);
            cp_async_commit_group();
        };
        /* MMAs of absent rows hide behind loads of bf16, but not behind the few bytes of codes. */
        bool has_rows[GROUPS_M];
#pragma unroll
        for (int i = 0; i < GROUPS_M; i++)
            has_rows[i] = !Columns::MAY_SKIP_ROWS || i == 0 ||
                          __any_sync(~0u, a.origin[16 * i + threadIdx.x % 16] != nullptr);

#pragma unroll
        for (int stage = 0; stage < STAGES; stage++) load_stage(stage * STAGE_BYTES);
        uint32_t stage_offset = 0;
#pragma unroll 1
        for (int left = depth; left > 0; left -= K_TILES * BK) {
            cp_async_wait_group<STAGES - 1>();
            __syncthreads();
            columns.begin_stage();
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                uint32_t fa[GROUPS_M][4], k_tile = stage_offset + 16 * step / BK * K_TILE_BYTES;
#pragma unroll
                for (int i = 0; i < GROUPS_M; i++)
                    if (has_rows[i]) fragments_a.load(fa[i], k_tile, i, 16 * step % BK);
                columns.read(stage_offset, step);
                if (step == STEPS - 1) { /* those were the last */
                    __syncthreads();
                    load_stage(stage_offset);
                }
                columns.make(step);
#pragma unroll
                for (int i = 0; i < GROUPS_M; i++) {
                    if (!has_rows[i]) continue;
#pragma unroll
                    for (int j = 0; j < 2 * GROUPS_N; j++)
                        multiply_add<T>(acc[i][j], fa[i], columns.fragment[j / 2][j % 2 * 2],
                                        columns.fragment[j / 2][j % 2 * 2 + 1]);
                }
            }
            stage_offset += STAGE_BYTES;
            if (stage_offset == STAGES * STAGE_BYTES) stage_offset = 0;
        }
        cp_async_wait_group<0>();
        __syncthreads();
    }

    /* --- the accumulators ------------------------------------------------------------------------------- */

    /* Row of the tile that is row i of this warp's rows. */
    __device__ static int subtile_row(int, int i) { return warp_m() * SUBTILE_ROWS + i; }

    /* Stores the warp's accumulators to the staging buffers of the warps that have their rows. `staging` is
     * this warp's; together they are [WARPS_N][BM][pitch]. Called by all warps. */
    __device__ void store_subtile(int, float *staging, int pitch) const {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = warp * WARP_COLUMNS;
        float *stored = staging - warp * SUBTILE_ROWS * pitch;
        stored += (column / WARP_N * BM + lane / 4) * pitch + column % WARP_N + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < GROUPS_M; i++)
#pragma unroll
            for (int j = 0; j < 2 * GROUPS_N; j++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    *reinterpret_cast<float2 *>(stored + (16 * i + 8 * half) * pitch + 8 * j) =
                        make_float2(acc[i][j][2 * half], acc[i][j][2 * half + 1]);
        __syncthreads();
    }
};

} // namespace fused_moe::sm80
