/* The rows of A, loaded stage by stage beside the weight: by TMA where they are contiguous, by cp.async where
 * they are gathered.
 *
 * cp.async's copies are written by 96 threads, which apply the swizzle, and arrive at the stage's full
 * barrier on completion. They are ordinary writes, so a consumer fences them for wgmma after its wait. */
#pragma once

#include "config.cuh"

namespace fused_moe {
namespace sm90 {

/* Rows of a box of A in a tile that is skinny or lacks rows. */
constexpr int TAIL_ROWS = 16;

/* --- by TMA --------------------------------------------------------------------------------------------- */

/* Rows of A that a stage loads: all, or those that a swapped tile's wgmma reads, in boxes of TAIL_ROWS. */
template <class Config>
__device__ inline int rows_of_stage(const WorkTile &tile) {
    if (Config::BM == TAIL_ROWS) return TAIL_ROWS; /* a wrong plan's tile may have no rows */
    if (Config::ALL_SWAPPED) return (tile.num_rows + TAIL_ROWS - 1) / TAIL_ROWS * TAIL_ROWS;
    return tile.skinny ? max(first_of(typename Config::Tokens(), tile.num_rows), TAIL_ROWS)
                       : FUSED_MOE_TILE_ROWS;
}

/* Loads `rows` rows of A of one stage. One thread calls it. The box of the tile's last row may have up to 15
 * rows of the next expert, whose results are not stored. Boxes after it are read outside of the matrix, so
 * they are zeros: arithmetic on zeros takes less power than on another expert's rows. */
template <class Config>
__device__ inline void load_rows(const GemmOf<Config> &p, uint32_t dst, uint32_t full, int part, int k,
                                 int rows, const WorkTile &tile) {
    if constexpr (Config::ALL_SWAPPED) {
#pragma unroll
        for (int i = 0; i < Config::K_TILES;
             i++, dst += Config::K_TILE_BYTES, k += K_TILE<typename Config::Operand>) {
            if constexpr (Config::Weight::IN_REGISTERS &&
                          Config::BM == TAIL_ROWS) { /* a loop takes more instructions */
                cp_async_bulk_tensor_load(dst, &p.tail[part], full, k, tile.first_row);
                continue;
            }
            int row = 0;
            if (Config::BM >= SUBTILE)
                for (; row + SUBTILE <= rows; row += SUBTILE)
                    cp_async_bulk_tensor_load(dst + SWIZZLE_BYTES * row, &p.a[part], full, k,
                                              tile.first_row + row);
            for (; row < rows; row += TAIL_ROWS)
                cp_async_bulk_tensor_load(dst + SWIZZLE_BYTES * row, &p.tail[part], full, k,
                                          row < tile.num_rows ? tile.first_row + row : (int)p.tiles.R);
        }
    } else if (tile.num_rows >= rows && !tile.skinny) {
        for (int row = 0; row < rows; row += SUBTILE)
            cp_async_bulk_tensor_load(dst + SWIZZLE_BYTES * row, &p.a[part], full, k, tile.first_row + row);
    } else {
        for (int row = 0; row < rows; row += TAIL_ROWS)
            cp_async_bulk_tensor_load(dst + SWIZZLE_BYTES * row, &p.tail[part], full, k,
                                      row < tile.num_rows ? tile.first_row + row : (int)p.tiles.R);
    }
}

/* Whether a gathering warp issues the loads of a stage's weight. For few rows of int4, which alone gained by
 * it, the warps take turns. */
template <class Config>
__device__ inline bool loads_weight(int warp, int stage) {
    if constexpr (Config::Weight::IN_REGISTERS)
        if (Config::FEW_ROWS && Config::Weight::Dequantizer::CODE == Code::INT4)
            return stage % Config::LOAD_WARPS == warp;
    return warp == 0;
}

/* A warp copies a stage's scales. */
template <class Config, class Shared>
__device__ inline void copy_scales(const GemmOf<Config> &p, Shared &s, int stage, int k_tile,
                                   const WorkTile &tile) {
    Config::Weight::copy_scales(p, shared_address(s.stage[stage].b), k_tile, tile);
    s.full[stage].template arrive_after_copies<Config::LOAD_WARPS>();
}

/* LOAD_WARPS warps, which take turns, issue the TMA loads of A and B. With reads_before_wait (only a GEMM of
 * one part has it) B of the first stages is in flight while the kernel before this one still writes A. */
template <class Config>
__device__ inline void load_tma(const GemmOf<Config> &p, Shared<Config> &s) {
    using Weight = typename Config::Weight;
    static_assert(Config::LOAD_WARPS == 1 || !Weight::HAS_SCALES, "one warp copies scales and arrives");
    constexpr int STAGE_K = Config::K_TILES * K_TILE<typename Config::Operand>;
    TileReader<typename Config::Queue> reader(s.queue);
    typename Config::Pipeline pipe;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    bool reads_before_wait = p.tiles.pdl.reads_before_wait;
    for (WorkTile tile = reader.next(); tile.expert >= 0; tile = reader.next()) {
        if constexpr (Weight::IN_REGISTERS) tile.half_n |= p.tiles.all_are_half_n;
        int rows = rows_of_stage<Config>(tile), num_stages = Weight::num_stages(p, tile), i = 0;
        int bytes = Config::K_TILES * rows * SWIZZLE_BYTES + Weight::bytes(p, tile);
        if (reads_before_wait) {
            int ahead = min(Config::STAGES, num_stages);
            if (Config::LOAD_WARPS > 1 && warp > 0) {
                griddepcontrol_wait();
            } else if (elect_sync()) {
#pragma unroll 1
                for (int stage = 0; stage < ahead; stage++) {
                    s.full[stage].expect(bytes);
                    Weight::load(p, shared_address(s.stage[stage].b), s.full[stage].address(), 0, stage,
                                 tile);
                }
                griddepcontrol_wait();
#pragma unroll 1
                for (int stage = 0; stage < ahead; stage++)
                    load_rows<Config>(p, shared_address(s.stage[stage].a), s.full[stage].address(), 0,
                                      STAGE_K * stage, rows, tile);
            }
            __syncwarp();
            if constexpr (Weight::HAS_SCALES)
                for (int stage = 0; stage < ahead; stage++) copy_scales<Config>(p, s, stage, stage, tile);
            for (; i < ahead; i++) pipe.advance();
            reads_before_wait = false;
        }
#pragma unroll 1
        for (; i < num_stages; i++, pipe.advance()) {
            /* Each warp has its own stages: in a stage that it skips at times it could miss two phases. */
            if (Config::LOAD_WARPS > 1 && pipe.index % Config::LOAD_WARPS != warp) continue;
            auto &stage = s.stage[pipe.index];
            int part = Weight::PARTS > 1 && i >= p.num_k_tiles[0], k_stage = part ? i - p.num_k_tiles[0] : i;
            uint32_t full = s.full[pipe.index].address();
            s.empty[pipe.index].wait(pipe.phase ^ 1);
            if (elect_sync()) {
                s.full[pipe.index].expect(bytes);
                /* a quantised weight first: with the rows first decoding took up to 1% longer */
                if (Weight::IN_REGISTERS) Weight::load(p, shared_address(stage.b), full, part, k_stage, tile);
                load_rows<Config>(p, shared_address(stage.a), full, part, STAGE_K * k_stage, rows, tile);
                if (!Weight::IN_REGISTERS)
                    Weight::load(p, shared_address(stage.b), full, part, k_stage, tile);
            }
            __syncwarp();
            if constexpr (Weight::HAS_SCALES) copy_scales<Config>(p, s, pipe.index, k_stage, tile);
        }
    }
}

/* --- on the host ---------------------------------------------------------------------------------------- */

/* Maps of part `part` of A [R,k], from column `first` of rows of `pitch` on. */
template <typename Operand, class WeightParams>
int set_rows_of_a(Gemm<WeightParams> &gemm, int part, const void *a, int64_t R, int64_t first, int64_t k,
                  int64_t pitch) {
    const Operand *data = (const Operand *)a + first;
    int status = matrix_map(&gemm.a[part], data, R, k, pitch, SUBTILE);
    return status != FUSED_MOE_OK ? status : matrix_map(&gemm.tail[part], data, R, k, pitch, TAIL_ROWS);
}

/* --- by cp.async ---------------------------------------------------------------------------------------- */

/* What thread i of the three gathering warps copies of each k-tile: 16-byte chunk i % 8 of rows i / 8,
 * i / 8 + 12, ... */
template <class Config>
struct GatherRows {
    using Operand = typename Config::Operand;
    static constexpr int CHUNK_ELEMENTS = 16 / sizeof(Operand);
    static constexpr int STEP = 4 * Config::LOAD_WARPS, MOST = (Config::BM + STEP - 1) / STEP;
    const char *source[MOST];
    uint32_t offset[2]; /* in a k-tile, of the first two rows: rows 12 apart alternate between two swizzles */
    int chunk, first;   /* the thread's chunk, its first row */
    int num, left;      /* the thread's rows; columns left from its chunk on */

    __device__ GatherRows() : chunk(threadIdx.x % 8), first(threadIdx.x / 8) {
        for (int i = 0; i < 2; i++) offset[i] = swizzled(0, first + STEP * i, chunk);
    }

    /* The tile's row that is the thread's row i; past the tile's end, its last. */
    __device__ int row(int i) const { return min(first + STEP * i, Config::BM - 1); }

    /* token_of(i) is the row of x, (T, k), that row(i) of the tile is copied from. */
    template <typename TokenOf>
    __device__ void point(const void *x, int k, TokenOf token_of) {
#pragma unroll
        for (int i = 0; i < MOST; i++)
            source[i] =
                (const char *)x + (token_of(i) * (int64_t)k + CHUNK_ELEMENTS * chunk) * (int)sizeof(Operand);
        left = k - CHUNK_ELEMENTS * chunk;
    }

    /* Rows from num on keep what an earlier tile left: their results are not stored. */
    __device__ void set_num(int num_rows) { num = (num_rows - first + STEP - 1) / STEP; }

    /* Copies a stage to `a`, the i-th since the pointers moved on. Rows that a full tile beside skinny ones
     * lacks are zeros, for load_rows' reason. HAS_ALL: the tile has BM rows. Without it each row has a
     * predicate. ptxas makes them all in one register, so the copies wait for one another. */
    template <bool HAS_ALL>
    __device__ void copy_stage(uint32_t a, int i) {
        constexpr int K_TILES = Config::K_TILES, TILE_K = K_TILE<Operand>;
        uint32_t dst[2] = {a + offset[0], a + offset[1]};
#pragma unroll
        for (int row = 0; row < MOST; row++)
#pragma unroll
            for (int j = 0; j < K_TILES; j++) {
                bool fits = (row + 1) * STEP <= Config::BM; /* for every thread */
                bool copies = Config::ALL_SWAPPED ? (HAS_ALL && fits) || row < num
                                                  : fits || first + STEP * row < Config::BM;
                bool is_valid = TILE_K * j < left && (Config::ALL_SWAPPED || row < num);
                if (copies)
                    cp_async(dst[row % 2] + row / 2 * 2 * STEP * SWIZZLE_BYTES + j * Config::K_TILE_BYTES,
                             source[row] + (K_TILES * i + j) * SWIZZLE_BYTES, is_valid);
            }
        left -= K_TILES * TILE_K;
    }

    __device__ void advance(int num_stages) {
#pragma unroll
        for (int i = 0; i < MOST; i++) source[i] += num_stages * Config::K_TILES * SWIZZLE_BYTES;
    }
};

struct NoScales {
    __device__ void operator()(int, uint32_t) const {}
};

/* Loads a tile's stages. One thread calls issue_weight(stage, b, barrier), which issues the loads of the
 * weight, and its warp copy_scales(stage, b) where a stage has scales. STAGES_AT_ONCE stages are loaded
 * before the pointers move on, since a stage's offset is then a constant of the instruction. */
template <bool HAS_ALL, class Config, class Shared, typename IssueWeight, typename CopyScales = NoScales>
__device__ __forceinline__ void gather_tile(Shared &s, typename Config::Pipeline &pipe,
                                            GatherRows<Config> &rows, int num_stages, int warp,
                                            IssueWeight issue_weight, CopyScales copy_scales = {}) {
    constexpr int AT_ONCE = HAS_ALL ? Config::STAGES_AT_ONCE : 1;
#pragma unroll 1
    for (int first = 0; first < num_stages; first += AT_ONCE) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (AT_ONCE > 1 && first + i == num_stages) break;
            auto &stage = s.stage[pipe.index];
            auto &full = s.full[pipe.index];
            s.empty[pipe.index].wait(pipe.phase ^ 1);
            bool is_loading = loads_weight<Config>(warp, first + i);
            if (is_loading && elect_sync()) issue_weight(first + i, shared_address(stage.b), full);
            if (Config::Weight::HAS_SCALES && is_loading) copy_scales(first + i, shared_address(stage.b));
            rows.template copy_stage<HAS_ALL>(shared_address(stage.a), i);
            full.template arrive_after_copies<Config::LOAD_WARPS>();
            pipe.advance();
        }
        rows.advance(AT_ONCE);
    }
}

/* Three warps gather A, and those of loads_weight() load B by TMA. */
template <class Config>
__device__ inline void load_gather(const GemmOf<Config> &p, Shared<Config> &s) {
    using Weight = typename Config::Weight;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    GatherRows<Config> rows;
    bool waits = Config::GATHERS_EARLY && p.tiles.pdl.reads_before_wait; /* for x */
    TileReader<typename Config::Queue> reader(s.queue);
    typename Config::Pipeline pipe;
    for (;;) {
        const int32_t *token = reader.wait_for_tokens();
        rows.point(p.x, p.k, [&](int i) { return token[rows.row(i)]; });
        WorkTile tile = reader.next();
        if (tile.expert < 0) break;
        rows.set_num(tile.num_rows);
        int loaded = 0; /* stages that have their weights already */
        auto issue_weight = [&](int stage, uint32_t b, auto &full) {
            if (Config::GATHERS_EARLY && stage < loaded) return;
            full.expect(Weight::bytes(p, tile));
            Weight::load(p, b, full.address(), 0, stage, tile);
        };
        if (waits) {
            int ahead = min(Config::STAGES, Weight::num_stages(p, tile));
            if (warp == 0 && elect_sync())
#pragma unroll 1
                for (int i = 0; i < ahead; i++) issue_weight(i, shared_address(s.stage[i].b), s.full[i]);
            __syncwarp();
            loaded = ahead;
            griddepcontrol_wait();
            waits = false;
        }
        auto copy_scales = [&](int stage, uint32_t b) {
            if constexpr (Weight::HAS_SCALES) Weight::copy_scales(p, b, stage, tile);
        };
        int num_stages = Weight::num_stages(p, tile);
        if constexpr (Config::STAGES_AT_ONCE > 1) {
            if (tile.num_rows == Config::BM) {
                gather_tile<true>(s, pipe, rows, num_stages, warp, issue_weight, copy_scales);
                continue;
            }
        }
        gather_tile<false>(s, pipe, rows, num_stages, warp, issue_weight, copy_scales);
    }
}

} // namespace sm90
} // namespace fused_moe
