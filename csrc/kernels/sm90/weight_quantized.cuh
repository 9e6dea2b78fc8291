/* A quantised weight as a GEMM's B. TMA loads codes, scales and zero points into a stage; consumers make the
 * values in registers, as operand A of their MMAs (dequantizer.cuh).
 *
 * Every tile is computed by swap-AB: the weight's values are A of the MMAs, the tile's rows their N. A stage
 * is one or two k-tiles of the tile's rows, and of its tiles of codes. weight.cuh says what a weight gives a
 * GEMM. */
#pragma once

#include "dequantizer.cuh"
#include "wgmma.cuh"

namespace fused_moe {
namespace sm90 {

/* --- tiles by the rows that experts have on average ----------------------------------------------------- */

/* Experts of up to 2 rows, up to 64, up to 384, and more (fused_moe_quantized_tile_rows). FEW has two CTAs on
 * an SM, with smaller tiles, and no wgmma, so there is less code to fetch from memory. */
enum class Height { FEW, SOME, MANY, TALL };

/* A work tile is BM rows of A times BN rows of the weight. A tall one has twice the rows and half the columns
 * (fused_moe_tall_tile), so values are made once for 256 rows instead of 128. */
template <Height HEIGHT>
struct QuantizedTile {
    static constexpr bool HAS_TALL = HEIGHT == Height::TALL;
    static constexpr bool MANY_ROWS = HEIGHT == Height::MANY || HAS_TALL;
    static constexpr bool FEW_ROWS = HEIGHT == Height::FEW;
    static constexpr int CONSUMERS = HEIGHT == Height::SOME ? 4 : 2;
    static constexpr int SUBTILES = MANY_ROWS ? 2 : 1; /* a consumer's; of a tall tile one */
    static constexpr int WIDE_ROWS = FEW_ROWS ? 16 : MANY_ROWS ? FUSED_MOE_TILE_ROWS : 64;
    static constexpr int BM = HAS_TALL ? 2 * WIDE_ROWS : WIDE_ROWS;
    /* In a stage. Codes are few bytes, and two k-tiles' waits are paid for once. */
    static constexpr int K_TILES = MANY_ROWS ? 1 : 2, COLUMNS = SUBTILE * K_TILES;
    static constexpr int TILES = CONSUMERS * SUBTILES, BN = SUBTILE * TILES; /* of the weight, in a stage */
    static constexpr int BOX = HAS_TALL ? 1 : TILES / 2;                     /* tiles that one load brings */
    static constexpr int K_TILE_BYTES = BM * SWIZZLE_BYTES, A_BYTES = K_TILES * K_TILE_BYTES;
};

/* --- what a launch computes ----------------------------------------------------------------------------- */

typedef struct {
    CUtensorMap codes[2];          /* of part i, in boxes of BOX tiles           */
    CUtensorMap scale[2], zero[2]; /* likewise                                   */
    Scales scales;
    bool is_interleaved; /* B's rows are gate0, up0, gate1, .. */
} QuantizedParams;

/* TMA counts a tile's codes in box rows of 256 of 8 bytes, the longest that it takes. */
constexpr int BOX_ROW_BYTES = 2048;

/* --- the weight ----------------------------------------------------------------------------------------- */

/* Where a stage has what a lane needs of its two rows, of the first k-tile and group. By columns the rows
 * share scales and zero points. */
typedef struct {
    uint32_t codes[2], scale[2], zero[2];
} LaneOffsets;

template <class Dequantizer_, Height HEIGHT>
struct QuantizedWeight {
    using Dequantizer = Dequantizer_;
    using Params = QuantizedParams;
    using Tile = QuantizedTile<HEIGHT>;
    static constexpr bool IN_REGISTERS = true, HAS_SCALES = false;
    static constexpr int PARTS = 1, TILES = Tile::TILES, BOX = Tile::BOX;
    static_assert(!Dequantizer::BY_COLUMN || Tile::K_TILES == 1,
                  "factors of columns are loaded once in a stage");
    static_assert(Tile::COLUMNS <= MAX_STAGE_COLUMNS);

    /* A stage's b: codes, scales, zero points. With HAS_TALL it has room for the codes of half of the tiles,
     * which is all that a tall tile has. Other tiles have half of the rows, and the other half of their codes
     * is in a, after the rows. */
    static constexpr int TILES_IN_B = Tile::HAS_TALL ? TILES / 2 : TILES;
    static constexpr int SCALES = TILES_IN_B * Tile::K_TILES * Dequantizer::TILE_BYTES;
    static constexpr int ZEROS = SCALES + TILES * Dequantizer::SCALE_BYTES;
    static constexpr int STAGE_BYTES = (ZEROS + TILES * Dequantizer::ZERO_BYTES + 1023) / 1024 * 1024;
    static_assert((TILES - TILES_IN_B) * Dequantizer::TILE_BYTES <=
                  Tile::A_BYTES - Tile::WIDE_ROWS * SWIZZLE_BYTES);

    /* Where b has the codes of a tile. */
    __host__ __device__ static constexpr int codes_at(int tile) {
        int in_a =
            Tile::WIDE_ROWS * SWIZZLE_BYTES - Tile::A_BYTES + (tile - TILES_IN_B) * Dequantizer::TILE_BYTES;
        return tile < TILES_IN_B ? tile * Tile::K_TILES * Dequantizer::TILE_BYTES : in_a;
    }

    /* --- loads */

    /* Tall tiles run an even number of stages; past the last k-tile, TMA reads zeros out of bounds. */
    template <class Gemm, class WorkTile>
    __device__ static int num_stages(const Gemm &p, const WorkTile &tile) {
        int num = p.num_k_tiles[0];
        return Tile::HAS_TALL && tile.num_rows > Tile::WIDE_ROWS ? num + num % 2 : num;
    }

    /* Boxes in a stage. A half-N tile has half of them: a tall one with gate and up, half of each weight. */
    template <class WorkTile>
    __device__ static int boxes_of(const WorkTile &tile) {
        return TILES / BOX / (tile.half_n ? 2 : 1);
    }

    template <class Gemm, class WorkTile>
    __device__ static int bytes(const Gemm &p, const WorkTile &tile) {
        return boxes_of(tile) * p.weight.scales.box_bytes;
    }

    /* One stage. One thread calls it. */
    template <class Gemm, class WorkTile>
    __device__ static void load(const Gemm &p, uint32_t dst, uint32_t full, int, int stage,
                                const WorkTile &tile) {
        constexpr int BOX_ROWS = Tile::K_TILES * Dequantizer::TILE_BYTES / BOX_ROW_BYTES;
        const QuantizedParams &w = p.weight;
        int boxes = boxes_of(tile), of_weight = p.gate_up ? boxes / 2 : boxes;
        int group = stage * w.scales.groups >> w.scales.shift;
        if (Dequantizer::BY_COLUMN) group = stage;
#pragma unroll
        for (int box = 0; box < TILES / BOX; box++) {
            if (box == boxes) break;
            int part = box >= of_weight, row = tile.first_column / SUBTILE + (box - part * of_weight) * BOX;
            cp_async_bulk_tensor_load(dst + codes_at(box * BOX), &w.codes[part], full, 0, stage * BOX_ROWS,
                                      row, tile.expert);
            if (Dequantizer::BY_COLUMN) row = row / BOX * w.scales.groups >> w.scales.shift;
            cp_async_bulk_tensor_load(dst + SCALES + box * BOX * Dequantizer::SCALE_BYTES, &w.scale[part],
                                      full, 0, group, row, tile.expert);
            if (Dequantizer::HAS_ZEROS && w.scales.has_zeros)
                cp_async_bulk_tensor_load(dst + ZEROS + box * BOX * Dequantizer::ZERO_BYTES, &w.zero[part],
                                          full, 0, group, row, tile.expert);
        }
    }

    /* --- a lane's part of a stage */

    /* Where the lane's first or second row of a subtile is: in which tile, and in its row 16 block + 8 half +
     * row. In up_gate the two are a gate and its up: a warp has eight outputs, a subtile 32. */
    typedef struct {
        int tile, block, half, row;
    } TileRow;

    template <bool IS_UP_GATE, class Gemm>
    __device__ static TileRow row_of(const Gemm &p, int tiles, int subtile, int which) {
        int warp = threadIdx.x / 32 % 4, group = threadIdx.x % 32 / 4;
        if (IS_UP_GATE && p.weight.is_interleaved) return {subtile, warp, group / 4, group % 4 * 2 + which};
        if (!IS_UP_GATE || !p.gate_up) return {subtile, warp, which, group};
        return {which * tiles / 2 + subtile / 2, subtile % 2 * 2 + warp / 2, warp % 2, group};
    }

    /* tiles: those of the weight in a stage. */
    template <bool IS_UP_GATE, class Gemm>
    __device__ static LaneOffsets offsets_of(const Gemm &p, int tiles, int subtile) {
        const Scales &scales = p.weight.scales;
        int warp = threadIdx.x / 32 % 4, t = threadIdx.x % 4;
        LaneOffsets offsets;
#pragma unroll
        for (int which = 0; which < 2; which++) {
            TileRow r = row_of<IS_UP_GATE>(p, tiles, subtile, which);
            int tile_row = 16 * r.block + 8 * r.half + r.row;
            /* TMA packs a box's tiles, whatever room they might need */
            int scale = r.tile % BOX * scales.groups * scales.rows + (scales.rows == SUBTILE ? tile_row : 0);
            if (Dequantizer::BY_COLUMN) { /* this lane's sixteen of a group */
                int group = (r.tile % BOX * SUBTILE + 16 * warp) * scales.groups / (BOX * SUBTILE);
                scale = group * SUBTILE + 16 * t;
            }
            offsets.codes[which] = codes_at(r.tile) + r.half * (Dequantizer::TILE_BYTES / 2) +
                                   (32 * r.block + 4 * r.row + t) * (Dequantizer::TILE_BYTES / 256);
            offsets.scale[which] =
                SCALES + r.tile / BOX * BOX * Dequantizer::SCALE_BYTES + scale * scales.bytes;
            offsets.zero[which] = ZEROS + r.tile / BOX * BOX * Dequantizer::ZERO_BYTES + scale;
        }
        return offsets;
    }
};

/* --- fragments ------------------------------------------------------------------------------------------ */

/* Factors of a lane's two rows: one for the stage, or one for each half of a k-tile, 32 columns. Both halves
 * have the same one where a group is larger. */
template <class Dequantizer, int K_TILES>
struct RowFactors {
    static constexpr int GROUPS = Dequantizer::GROUPED ? 2 : 1;
    typename Dequantizer::PairFactor factor[2][GROUPS];

    __device__ void load(uint32_t stage, const LaneOffsets &offsets, int k_tile, const Scales &s) {
        for_each(stage, offsets, k_tile, s, [&](int row, int i, uint32_t scale, uint32_t zero) {
            factor[row][i] = Dequantizer::factor(scale, zero, s);
        });
    }

    /* Calls fn(row, group, scale, zero): where these are in shared memory. */
    template <typename Fn>
    __device__ static void for_each(uint32_t stage, const LaneOffsets &offsets, int k_tile, const Scales &s,
                                    Fn fn) {
#pragma unroll
        for (int row = 0; row < 2; row++)
#pragma unroll
            for (int i = 0; i < GROUPS; i++) {
                /* e2m1 always has groups of 32 columns, and scales of a byte */
                bool has_all = Dequantizer::CODE == Code::E2M1;
                uint32_t group = GROUPS == 1                          ? 0
                                 : has_all || s.groups == 2 * K_TILES ? 2 * k_tile + i
                                 : s.groups == K_TILES                ? k_tile
                                                                      : 0;
                uint32_t offset = group * (has_all ? SUBTILE : s.rows);
                fn(row, i, stage + offsets.scale[row] + offset * (has_all ? 1 : s.bytes),
                   stage + offsets.zero[row] + offset);
            }
    }

    /* For columns 16 step + 8 u + 2 t and one more. */
    __device__ const auto &get(int row, int step, int) const { return factor[row][step / 2 % GROUPS]; }
};

/* The same of a whole stage, for one multiplication a pair. */
template <class Dequantizer, int K_TILES>
struct QuickFactors {
    using Rows = RowFactors<Dequantizer, K_TILES>;
    static constexpr int SETS = Dequantizer::GROUPED ? K_TILES : 1;
    QuickFactor factor[SETS][2][Rows::GROUPS];

    /* Loads the bits of the scales, of which make() makes the factors. */
    __device__ void load(uint32_t stage, const LaneOffsets &offsets, const Scales &s) {
#pragma unroll
        for (int k_tile = 0; k_tile < SETS; k_tile++)
            Rows::for_each(stage, offsets, k_tile, s, [&](int row, int i, uint32_t scale, uint32_t) {
                factor[k_tile][row][i].scale = Dequantizer::scale_bits(scale);
            });
    }

    /* Returns whether there are no zero points, and all scales of the warp are in the range. */
    __device__ bool make(const Scales &s) {
        bool fits = !Dequantizer::HAS_ZEROS || !s.has_zeros;
        for (auto &of_tile : factor)
            for (auto &of_row : of_tile)
                for (auto &f : of_row) fits &= Dequantizer::quick_factor(f);
        return __all_sync(~0u, fits);
    }

    /* Both at once, which takes fewer registers. */
    __device__ bool load_and_make(uint32_t stage, const LaneOffsets &offsets, const Scales &s) {
        bool fits = !Dequantizer::HAS_ZEROS || !s.has_zeros;
#pragma unroll
        for (int k_tile = 0; k_tile < SETS; k_tile++)
            Rows::for_each(stage, offsets, k_tile, s, [&](int row, int i, uint32_t scale, uint32_t) {
                QuickFactor &f = factor[k_tile][row][i];
                f.scale = Dequantizer::scale_bits(scale);
                fits &= Dequantizer::quick_factor(f);
            });
        return __all_sync(~0u, fits);
    }

    __device__ const QuickFactor &get(int k_tile, int row, int step) const {
        return factor[k_tile % SETS][row][step / 2 % Rows::GROUPS];
    }
};

/* Factors of a lane's columns of a stage, which is one k-tile. */
template <class Dequantizer>
struct ColumnFactors {
    typename Dequantizer::PairFactor factor[8];

    __device__ void load(uint32_t stage, const LaneOffsets &offsets, int, const Scales &s) {
        Dequantizer::column_factors(factor, stage + offsets.scale[0], stage + offsets.zero[0], s);
    }

    __device__ const auto &get(int, int step, int u) const { return factor[2 * step + u]; }
};

/* What a lane has of a stage: codes of two rows, and their factors. */
template <class Dequantizer, int K_TILES>
struct StageCodes {
    using Factors = std::conditional_t<Dequantizer::BY_COLUMN, ColumnFactors<Dequantizer>,
                                       RowFactors<Dequantizer, K_TILES>>;
    uint32_t words[K_TILES][2][Dequantizer::WORDS];
    Factors factors;

    __device__ void load(uint32_t stage, const LaneOffsets &offsets) {
#pragma unroll
        for (int k_tile = 0; k_tile < K_TILES; k_tile++)
#pragma unroll
            for (int row = 0; row < 2; row++)
                ld_shared_words(words[k_tile][row],
                                stage + offsets.codes[row] + k_tile * Dequantizer::TILE_BYTES);
    }

    /* Words 16 k_tile + 4 j + .. of A are columns 16 j .. 16 j + 15 of a k-tile. */
    __device__ void make_fragments(uint32_t (&a)[16 * K_TILES], int k_tile,
                                   const Dequantizer &dequantizer) const {
#pragma unroll
        for (int j = 0; j < SUBTILE / 16; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[16 * k_tile + 4 * j + i] =
                    dequantizer.pair(words[k_tile][i % 2], j, i / 2, factors.get(i % 2, j, i / 2));
    }

    __device__ void make_quick_fragments(uint32_t (&a)[16 * K_TILES],
                                         const QuickFactors<Dequantizer, K_TILES> &quick) const {
#pragma unroll
        for (int i = 0; i < 16 * K_TILES; i++)
            a[i] = Dequantizer::quick_pair(words[i / 16][i % 2], i % 16 / 4, i % 4 / 2,
                                           quick.get(i / 16, i % 2, i % 16 / 4));
    }
};

} // namespace sm90
} // namespace fused_moe
