/* Grouped GEMMs of quantised weights: gemm.cuh's roles, pipelines and schedule, with codes as B and every tile
 * computed by swap-AB. The weight's values, made in registers of codes, are A of the MMAs, and the tile's rows their N.
 *
 *   warpgroup 0     producer; a stage is one or two k-tiles of a tile's rows of the activation, and of its rows of codes
 *                   with their scales and zero points
 *   others          consumers: each has one or two subtiles of 64 weight rows
 *
 *   one subtile, two k-tiles    |wait: stage |codes, scales |wait: MMAs of the stage before; release it |make A |8 MMAs |..
 *   two subtiles, one k-tile    |wait: stage |codes, scales |wait: this subtile's MMAs before |make A |4 MMAs |the other ..
 *   one subtile, tall tile      |wait: stage |codes, scales |make A, one of two |wait: MMAs before; release it |4 MMAs |..
 *
 * Unpacking is what has to be hidden: by the memory's time where rows are few, by MMAs where they are many. So few rows
 * have many warps, each with one subtile, of which some unpack while the MMAs of others run. Of many rows a consumer has two
 * subtiles, so that a stage's rows are read for twice as many columns, and unpacks one while the MMAs of the other run.
 * ptxas has registers for that where a stage is one k-tile. A tall tile has twice the rows and half the columns
 * (fused_moe_tall_tile): values are made once for 256 rows instead of 128. What a warp issues counts: docs/lab/quantised.md. */
#pragma once

#include "dequantizer.cuh"
#include "gemm.cuh"
#include "launch.cuh"

namespace fused_moe {
namespace sm90 {

/* Rows that an expert has, on average: up to 2, up to 64, more, and so many that tall tiles pay. FEW has two CTAs on an SM,
 * with smaller tiles, and no wgmma: less code, which is read from memory, too. */
enum class Rows { FEW, SOME, MANY, TALL };

template <class Decoder_, bool GATHER, Rows ROWS>
struct CodesConfig : GemmConfig<typename Decoder_::T, Major::K, GATHER> {
    using Decoder = Decoder_;
    static constexpr bool FEW_ROWS = ROWS == Rows::FEW, HAS_TALL = ROWS == Rows::TALL;
    static constexpr bool MANY_ROWS = ROWS == Rows::MANY || HAS_TALL;
    static constexpr int CTAS_PER_SM = FEW_ROWS ? 2 : 1;
    static constexpr int CONSUMERS = ROWS == Rows::SOME ? 4 : 2;
    static constexpr int SUBTILES = MANY_ROWS ? 2 : 1; /* of a consumer, but of a tall tile */
    static constexpr int WIDE_ROWS = FEW_ROWS ? 16 : MANY_ROWS ? FUSED_MOE_TILE_ROWS : 64;
    static constexpr int BM = HAS_TALL ? 2 * WIDE_ROWS : WIDE_ROWS, CUT_ROWS = BM;
    /* Of a stage. Codes are few bytes, and two k-tiles' waits are paid for once. */
    static constexpr int K_TILES = MANY_ROWS ? 1 : 2, COLUMNS = SUBTILE * K_TILES;
    static_assert(COLUMNS <= MOST_COLUMNS);
    static_assert(!Decoder::BY_COLUMN || K_TILES == 1, "factors of columns are loaded once in a stage");
    static constexpr int TILES = CONSUMERS * SUBTILES, BN = SUBTILE * TILES; /* of B in a stage */
    static constexpr int BOX = HAS_TALL ? 1 : TILES / 2;                     /* tiles that one load brings */
    static constexpr int K_TILE_BYTES = BM * SWIZZLE_BYTES, A_BYTES = K_TILES * K_TILE_BYTES;
    /* Where a stage's b has what. Of a tall tile a stage has half as many tiles; of others the second half of them is in a, after
     * their rows. */
    static constexpr int TILES_IN_B = HAS_TALL ? TILES / 2 : TILES;
    static constexpr int SCALES = TILES_IN_B * K_TILES * Decoder::TILE_BYTES;
    static constexpr int ZEROS = SCALES + TILES * Decoder::SCALE_BYTES;
    static constexpr int B_BYTES = (ZEROS + TILES * Decoder::ZERO_BYTES + 1023) / 1024 * 1024;
    static_assert((TILES - TILES_IN_B) * Decoder::TILE_BYTES <= A_BYTES - WIDE_ROWS * SWIZZLE_BYTES);
    using Lines = LineWriter<HAS_TALL ? 64 : WIDE_ROWS>; /* of many rows */
    static constexpr int STAGING_BYTES = FEW_ROWS    ? 4 * 1024
                                         : MANY_ROWS ? Lines::BYTES
                                                     : SkinnyWriter<BM>::BYTES;
    static constexpr int MEMORY = (FEW_ROWS ? 108 : HAS_TALL ? 222 : 220) * 1024;
    static constexpr int STAGES = (MEMORY - CONSUMERS * STAGING_BYTES) / (A_BYTES + B_BYTES);
    static constexpr int THREADS = 128 * (1 + CONSUMERS), CONSUMER_WARPS = 4 * CONSUMERS;
    static constexpr int PRODUCER_REGISTERS = FEW_ROWS ? 48 : HAS_TALL ? 88 : MANY_ROWS ? 72 : 64;
    static constexpr int CONSUMER_REGISTERS = FEW_ROWS ? 96 : HAS_TALL ? 208 : MANY_ROWS ? 216 : 104;
    static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <=
                      (1 + CONSUMERS) * LAUNCH_REGISTERS<CTAS_PER_SM * THREADS>,
                  "setmaxnreg would wait forever");
    using Queue = TileQueue<WorkTile, CONSUMER_WARPS + CodesConfig::LOAD_WARPS, GATHER ? BM : 0>;
    using Pipeline = PipelineState<STAGES>;

    /* Where a stage's b has the codes of a tile. */
    __host__ __device__ static constexpr int codes_at(int tile) {
        int in_a = WIDE_ROWS * SWIZZLE_BYTES - A_BYTES + (tile - TILES_IN_B) * Decoder::TILE_BYTES;
        return tile < TILES_IN_B ? tile * K_TILES * Decoder::TILE_BYTES : in_a;
    }
};

/* TMA counts a tile's codes in pieces of 256 of 8 bytes, the longest that it takes. */
constexpr int PIECE_BYTES = 2048;

/* What a GEMM of codes has beside Gemm, whose num_k_tiles[0] counts stages. */
typedef struct {
    Gemm gemm;                     /* b: maps of codes, in boxes of Config::BOX tiles */
    CUtensorMap scale[2], zero[2]; /* likewise                                        */
    Scales scales;
    bool is_interleaved; /* B's rows are gate0, up0, gate1, ..                          */
} CodesGemm;

/* --- producer: loads ------------------------------------------------------------------------------------ */

/* Of a tall tile an even number: past the last k-tile there are zeros. */
template <class Config>
__device__ inline int num_stages_of(const CodesGemm &p, const WorkTile &tile) {
    int num = p.gemm.num_k_tiles[0];
    return Config::HAS_TALL && tile.num_rows > Config::WIDE_ROWS ? num + num % 2 : num;
}

/* Boxes of B in a stage: of a half tile, which with gate and up is a tall one, half of each weight's. */
template <class Config>
__device__ inline int boxes_of(const WorkTile &tile) {
    return Config::TILES / Config::BOX / (tile.half_n ? 2 : 1);
}

/* Codes, scales and zero points of one stage. One thread calls it. */
template <class Config>
__device__ inline void load_codes(const CodesGemm &p, uint32_t dst, uint32_t full, int stage,
                                  const WorkTile &tile) {
    using Decoder = typename Config::Decoder;
    constexpr int BOX = Config::BOX, PIECES = Config::K_TILES * Decoder::TILE_BYTES / PIECE_BYTES;
    int boxes = boxes_of<Config>(tile), of_weight = p.gemm.gate_up ? boxes / 2 : boxes;
    int group = stage * p.scales.groups >> p.scales.shift;
    if (Decoder::BY_COLUMN) group = stage;
#pragma unroll
    for (int box = 0; box < Config::TILES / BOX; box++) {
        if (box == boxes) break;
        int weight = box >= of_weight, row = tile.first_column / SUBTILE + (box - weight * of_weight) * BOX;
        cp_async_bulk_tensor_load(dst + Config::codes_at(box * BOX), &p.gemm.b[weight], full, 0,
                                  stage * PIECES, row, tile.expert);
        if (Decoder::BY_COLUMN) row = row / BOX * p.scales.groups >> p.scales.shift;
        cp_async_bulk_tensor_load(dst + Config::SCALES + box * BOX * Decoder::SCALE_BYTES, &p.scale[weight],
                                  full, 0, group, row, tile.expert);
        if (Decoder::HAS_ZEROS && p.scales.has_zeros)
            cp_async_bulk_tensor_load(dst + Config::ZEROS + box * BOX * Decoder::ZERO_BYTES, &p.zero[weight],
                                      full, 0, group, row, tile.expert);
    }
}

/* Rows of A in a stage: those of its boxes. */
__device__ inline int rows_in_boxes(const WorkTile &tile) {
    return (tile.num_rows + TAIL_ROWS - 1) / TAIL_ROWS * TAIL_ROWS;
}

/* Rows of A of one stage. The last box has up to 15 rows of the next expert, and the stores drop what comes of them. One
 * thread calls it. */
template <class Config>
__device__ inline void load_rows(const Gemm &p, uint32_t dst, uint32_t full, int stage,
                                 const WorkTile &tile) {
    for (int i = 0; i < Config::K_TILES; i++, dst += Config::K_TILE_BYTES) {
        int row = 0, rows = rows_in_boxes(tile), k = Config::COLUMNS * stage + SUBTILE * i;
        for (; row + SUBTILE <= rows; row += SUBTILE)
            cp_async_bulk_tensor_load(dst + SWIZZLE_BYTES * row, &p.a[0], full, k, tile.first_row + row);
        for (; row < rows; row += TAIL_ROWS)
            cp_async_bulk_tensor_load(dst + SWIZZLE_BYTES * row, &p.tail[0], full, k, tile.first_row + row);
    }
}

/* gemm.cuh's load_tma, of codes. */
template <class Config>
__device__ inline void load_tma_codes(const CodesGemm &p, Shared<Config> &s) {
    TileReader<typename Config::Queue> reader(s.queue);
    typename Config::Pipeline pipe;
    bool starts_early = p.gemm.tiles.starts_early;
    for (WorkTile tile = reader.next(); tile.expert >= 0; tile = reader.next()) {
        int bytes = Config::K_TILES * rows_in_boxes(tile) * SWIZZLE_BYTES +
                    boxes_of<Config>(tile) * p.scales.box_bytes,
            num_stages = num_stages_of<Config>(p, tile), i = 0;
        if (starts_early) {
            int ahead = min(Config::STAGES, num_stages);
            if (elect_sync()) {
                for (int stage = 0; stage < ahead; stage++) {
                    uint32_t full = shared_address(&s.full[stage]);
                    mbarrier_arrive_expect_tx(full, bytes);
                    load_codes<Config>(p, shared_address(s.stage[stage].b), full, stage, tile);
                }
                griddepcontrol_wait();
                for (int stage = 0; stage < ahead; stage++)
                    load_rows<Config>(p.gemm, shared_address(s.stage[stage].a),
                                      shared_address(&s.full[stage]), stage, tile);
            }
            __syncwarp();
            for (; i < ahead; i++) pipe.advance();
            starts_early = false;
        }
        for (; i < num_stages; i++, pipe.advance()) {
            auto &stage = s.stage[pipe.index];
            uint32_t full = shared_address(&s.full[pipe.index]);
            mbarrier_wait(shared_address(&s.empty[pipe.index]), pipe.phase ^ 1);
            if (elect_sync()) {
                mbarrier_arrive_expect_tx(full, bytes);
                load_codes<Config>(p, shared_address(stage.b), full, i, tile);
                load_rows<Config>(p.gemm, shared_address(stage.a), full, i, tile);
            }
            __syncwarp();
        }
    }
}

/* What a thread that gathers rows copies of each k-tile: its chunk of every twelfth row. */
template <class Config>
struct OwnRows {
    static constexpr int STEP = 4 * Config::LOAD_WARPS, MOST = (Config::BM + STEP - 1) / STEP;
    const char *source[MOST];
    uint32_t offset[2]; /* in a k-tile, of the first two: rows 12 apart alternate between two swizzles */
    int num, left;      /* rows; columns from the thread's first on */
};

/* A tile's stages, of which some are loaded before pointers move on: a stage's offset is a constant of the instruction.
 * HAS_ALL: the tile has BM rows. Else each row has a predicate, which ptxas makes in one register, and the copies wait for one
 * another. */
template <class Config, bool HAS_ALL>
__device__ __forceinline__ void gather_tile(const CodesGemm &p, Shared<Config> &s,
                                            typename Config::Pipeline &pipe, const WorkTile &tile,
                                            bool loads_b, OwnRows<Config> &own) {
    using Own = OwnRows<Config>;
    constexpr int K_TILES = Config::K_TILES, AT_ONCE = HAS_ALL ? 4 : 1; /* stages */
    int num_stages = num_stages_of<Config>(p, tile);
#pragma unroll 1
    for (int first = 0; first < num_stages; first += AT_ONCE) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (first + i == num_stages) break;
            auto &stage = s.stage[pipe.index];
            uint32_t full = shared_address(&s.full[pipe.index]), a = shared_address(stage.a);
            mbarrier_wait(shared_address(&s.empty[pipe.index]), pipe.phase ^ 1);
            if (loads_b && elect_sync()) {
                mbarrier_arrive_expect_tx(full, boxes_of<Config>(tile) * p.scales.box_bytes);
                load_codes<Config>(p, shared_address(stage.b), full, first + i, tile);
            }
            uint32_t to[2] = {a + own.offset[0], a + own.offset[1]};
#pragma unroll
            for (int row = 0; row < Own::MOST; row++)
#pragma unroll
                for (int j = 0; j < K_TILES; j++)
                    if ((HAS_ALL && (row + 1) * Own::STEP <= Config::BM) || row < own.num)
                        cp_async(to[row % 2] + row / 2 * 2 * Own::STEP * SWIZZLE_BYTES +
                                     j * Config::K_TILE_BYTES,
                                 own.source[row] + (K_TILES * i + j) * SWIZZLE_BYTES, SUBTILE * j < own.left);
            own.left -= Config::COLUMNS;
            cp_async_mbarrier_arrive_noinc(full);
            pipe.advance();
        }
#pragma unroll
        for (int row = 0; row < Own::MOST; row++) own.source[row] += AT_ONCE * K_TILES * SWIZZLE_BYTES;
    }
}

/* gemm.cuh's load_gather, of codes. */
template <class Config>
__device__ inline void load_gather_codes(const CodesGemm &p, Shared<Config> &s) {
    using T = typename Config::T;
    using Own = OwnRows<Config>;
    int chunk = threadIdx.x % 8, first = threadIdx.x / 8, k = p.gemm.k;
    bool loads_b = __shfl_sync(~0u, threadIdx.x / 32, 0) == 0;
    Own own;
    for (int i = 0; i < 2; i++) own.offset[i] = swizzled(0, first + Own::STEP * i, chunk);
    TileReader<typename Config::Queue> reader(s.queue);
    typename Config::Pipeline pipe;
    for (;;) {
        const int32_t *token = reader.wait_for_tokens();
#pragma unroll
        for (int i = 0; i < Own::MOST; i++) {
            int row = min(first + Own::STEP * i, Config::BM - 1);
            own.source[i] = (const char *)((const T *)p.gemm.x + token[row] * (int64_t)k + CHUNK * chunk);
        }
        WorkTile tile = reader.next();
        if (tile.expert < 0) break;
        /* Later rows keep what an earlier tile left; what comes of them is dropped. */
        own.num = (tile.num_rows - first + Own::STEP - 1) / Own::STEP;
        own.left = k - CHUNK * chunk;
        if (Config::MANY_ROWS && tile.num_rows == Config::BM)
            gather_tile<Config, true>(p, s, pipe, tile, loads_b, own);
        else
            gather_tile<Config, false>(p, s, pipe, tile, loads_b, own);
    }
}

/* The producer's warps. */
template <class Config>
__device__ inline void produce_codes(const CodesGemm &p, PlanningShared<Config> &s, int warp) {
    const Gemm &gemm = p.gemm;
    if (!gemm.tiles.starts_early) griddepcontrol_wait();
    if (warp == 3 && !gemm.tiles.offs)
        fetch_slot_tiles<Config::CUT_ROWS>(gemm.tiles, gemm.slots, s.plan, s.queue);
    else if (warp == 3)
        fetch_gemm_tiles<Config::CUT_ROWS>(gemm, s.queue);
    else if constexpr (Config::GATHER)
        load_gather_codes<Config>(p, s);
    else if (warp == 0)
        load_tma_codes<Config>(p, s);
}

/* --- consumers: the main loop ---------------------------------------------------------------------------- */

/* Where a stage has a thread's row 0 or 1 of a subtile: in which tile, and there in row 16 block + 8 half + row. Of gates and
 * ups, the two are those of one output: a warp has eight outputs, a subtile 32. */
typedef struct {
    int tile, block, half, row;
} TileRow;

template <class Config>
__device__ inline TileRow row_of(const CodesGemm &p, int tiles, int subtile, int which) {
    bool is_up_gate = Config::GATHER;
    int warp = threadIdx.x / 32 % 4, group = threadIdx.x % 32 / 4;
    if (is_up_gate && p.is_interleaved) return {subtile, warp, group / 4, group % 4 * 2 + which};
    if (!is_up_gate || !p.gemm.gate_up) return {subtile, warp, which, group};
    return {which * tiles / 2 + subtile / 2, subtile % 2 * 2 + warp / 2, warp % 2, group};
}

/* tiles: of B in a stage. */
template <class Config>
__device__ inline CodeOffsets offsets_of(const CodesGemm &p, int tiles, int subtile) {
    using Decoder = typename Config::Decoder;
    constexpr int BOX = Config::BOX; /* tiles; TMA packs them, whatever room they might need */
    int warp = threadIdx.x / 32 % 4, t = threadIdx.x % 4;
    CodeOffsets o;
#pragma unroll
    for (int which = 0; which < 2; which++) {
        TileRow at = row_of<Config>(p, tiles, subtile, which);
        int tile_row = 16 * at.block + 8 * at.half + at.row;
        int scale =
            at.tile % BOX * p.scales.groups * p.scales.rows + (p.scales.rows == SUBTILE ? tile_row : 0);
        if (Decoder::BY_COLUMN) { /* of a group, this lane's sixteen */
            int group = (at.tile % BOX * SUBTILE + 16 * warp) * p.scales.groups / (BOX * SUBTILE);
            scale = group * SUBTILE + 16 * t;
        }
        o.codes[which] = Config::codes_at(at.tile) + at.half * (Decoder::TILE_BYTES / 2) +
                         (32 * at.block + 4 * at.row + t) * (Decoder::TILE_BYTES / 256);
        o.scale[which] = Config::SCALES + at.tile / BOX * BOX * Decoder::SCALE_BYTES + scale * p.scales.bytes;
        o.zero[which] = Config::ZEROS + at.tile / BOX * BOX * Decoder::ZERO_BYTES + scale;
    }
    return o;
}

/* d += A (a subtile's rows of a stage) times the rows of x at `rows`, by the warpgroup. */
template <class Config, int TOKENS, bool accumulate>
__device__ __forceinline__ void multiply(float *d, const uint32_t *a, uint32_t rows) {
    using T = typename Config::T;
    constexpr int STEPS = K_TILE<T> / 16;
#pragma unroll
    for (int i = 0; i < Config::K_TILES * STEPS; i++) {
        uint64_t x = matrix_descriptor<Major::K>(rows + i / STEPS * Config::K_TILE_BYTES) +
                     i % STEPS * K16_STEP<Major::K, T>;
        if (accumulate || i)
            wgmma<TOKENS, 1, Major::K>(d, a + 4 * i, x, T());
        else
            wgmma<TOKENS, 0, Major::K>(d, a + 4 * i, x, T());
    }
}

/* The same by each warp for its sixteen rows, which has the same bits. */
template <class Config, int TOKENS>
__device__ __forceinline__ void multiply_by_warp(float *d, const uint32_t *a, uint32_t rows) {
    using T = typename Config::T;
    constexpr int STEPS = K_TILE<T> / 16;
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Config::K_TILES * STEPS; i += 2)
#pragma unroll
        for (int n = 0; n < TOKENS / 8; n++) {
            uint32_t x[4]; /* eight rows of 32 columns */
            ldmatrix_x4(x, swizzled(rows + i / STEPS * Config::K_TILE_BYTES, 8 * n + lane % 8,
                                    i % STEPS * 2 + lane / 8));
#pragma unroll
            for (int j = 0; j < 2; j++)
                mma_m16n8k16(*(float (*)[4])(d + 4 * n), *(const uint32_t (*)[4])(a + 4 * (i + j)), x[2 * j],
                             x[2 * j + 1], T());
        }
}

/* Up to so many rows each warp multiplies for itself. A warpgroup's MMAs of 8 rows take as long as those of 32, and the
 * next values are not made before they have ended. */
constexpr int WARP_TOKENS = 16;

template <class Config, int TOKENS>
__device__ __forceinline__ void run_mainloop_codes(float *d, const CodesGemm &p, Shared<Config> &s,
                                                   typename Config::Pipeline &pipe, int wg) {
    constexpr int SUBTILES = Config::SUBTILES;
    constexpr bool BY_WARP = TOKENS <= WARP_TOKENS;
    const auto decoder = Config::Decoder::make();
    CodeOffsets offsets[SUBTILES];
#pragma unroll
    for (int i = 0; i < SUBTILES; i++) offsets[i] = offsets_of<Config>(p, Config::TILES, SUBTILES * wg + i);
    uint32_t a[SUBTILES][Config::COLUMNS / 4];
    int previous = 0;
    auto run_stage = [&](auto first) {
        auto &stage = s.stage[pipe.index];
        mbarrier_wait(shared_address(&s.full[pipe.index]), pipe.phase);
        if (Config::GATHER && !BY_WARP) fence_proxy_async(); /* cp.async's copies are ordinary writes */
        uint32_t rows = shared_address(stage.a), b = shared_address(stage.b);
#pragma unroll
        for (int i = 0; i < SUBTILES; i++) {
            StageCodes<typename Config::Decoder, Config::K_TILES> codes;
            codes.load(b, offsets[i]);
            codes.factors.load(b, offsets[i], 0, p.scales);
            if constexpr (!BY_WARP) {
                wgmma_wait_group<SUBTILES - 1>(); /* for those that read a[i] */
                if (i == SUBTILES - 1 && !first.value) release<Config>(s, previous);
            }
            codes.make_fragments(a[i], 0, decoder);
            if constexpr (Config::K_TILES == 2) {
                if (Config::Decoder::GROUPED) codes.factors.load(b, offsets[i], 1, p.scales);
                codes.make_fragments(a[i], 1, decoder);
            }
            float *accumulators = d + TOKENS / 2 * i;
            if constexpr (BY_WARP) {
                multiply_by_warp<Config, TOKENS>(accumulators, a[i], rows);
            } else {
                for (uint32_t &word : a[i]) pin(word); /* no wgmma waits for one that is made later */
                wgmma_fence();
                multiply<Config, TOKENS, !first.value>(accumulators, a[i], rows);
                wgmma_commit_group();
            }
        }
        if constexpr (BY_WARP) {
            __syncwarp();
            release<Config>(s, pipe.index);
        }
        previous = pipe.index;
        pipe.advance();
    };
    if constexpr (BY_WARP) {
#pragma unroll
        for (int i = 0; i < TOKENS / 2 * SUBTILES; i++) d[i] = 0;
    } else {
        run_stage(std::true_type());
    }
#pragma unroll 1
    for (int i = BY_WARP ? 0 : 1; i < p.gemm.num_k_tiles[0]; i++) run_stage(std::false_type());
    if constexpr (!BY_WARP) {
        wgmma_wait_group<0>();
        release<Config>(s, previous);
#pragma unroll
        for (int i = 0; i < TOKENS / 2 * SUBTILES; i++) pin(d[i]); /* not read before the last MMA's end */
    }
}

/* Of a tall tile: one subtile, of which the values of two stages have registers. Stages are even in number (num_stages_of), so
 * that no branch is between MMAs: ptxas would have each wait for the one before. */
template <class Config>
__device__ __forceinline__ void run_mainloop_tall(float *d, const CodesGemm &p, Shared<Config> &s,
                                                  typename Config::Pipeline &pipe, int wg) {
    constexpr int TOKENS = Config::BM;
    const auto decoder = Config::Decoder::make();
    CodeOffsets offsets = offsets_of<Config>(p, Config::TILES / 2, wg);
    uint32_t even[Config::COLUMNS / 4], odd[Config::COLUMNS / 4];
    int previous = 0;
    auto run_stage = [&](auto first, auto &a) {
        auto &stage = s.stage[pipe.index];
        mbarrier_wait(shared_address(&s.full[pipe.index]), pipe.phase);
        if (Config::GATHER) fence_proxy_async();
        StageCodes<typename Config::Decoder, 1> codes;
        codes.load(shared_address(stage.b), offsets);
        codes.factors.load(shared_address(stage.b), offsets, 0, p.scales);
        codes.make_fragments(a, 0, decoder);
        for (uint32_t &word : a) pin(word);
        if constexpr (!first.value) {
            wgmma_wait_group<0>(); /* meanwhile the other consumer's MMAs run */
            release<Config>(s, previous);
        }
        wgmma_fence();
        multiply<Config, TOKENS, !first.value>(d, a, shared_address(stage.a));
        wgmma_commit_group();
        previous = pipe.index;
        pipe.advance();
    };
    run_stage(std::true_type(), even);
    run_stage(std::false_type(), odd);
#pragma unroll 1
    for (int i = 2; i < p.gemm.num_k_tiles[0]; i += 2) {
        run_stage(std::false_type(), even);
        run_stage(std::false_type(), odd);
    }
    wgmma_wait_group<0>();
    release<Config>(s, previous);
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) pin(d[i]);
}

/* Calls fn with the first N that is enough for the rows. */
template <int N, int... MORE, typename Fn>
__device__ __forceinline__ void with_first_of(int rows, Fn fn) {
    if constexpr (sizeof...(MORE) > 0) {
        if (rows > N) return with_first_of<MORE...>(rows, fn);
    }
    fn(std::integral_constant<int, N>());
}

/* Calls fn with the MMAs' N for the rows of a tile. */
template <class Config, typename Fn>
__device__ __forceinline__ void with_tokens(int rows, Fn fn) {
    if constexpr (Config::HAS_TALL)
        with_first_of<16, 64, Config::WIDE_ROWS, Config::BM>(rows, fn);
    else if constexpr (Config::MANY_ROWS)
        with_first_of<16, 64, Config::WIDE_ROWS>(rows, fn);
    else if constexpr (Config::FEW_ROWS)
        with_first_of<8, 16>(rows, fn);
    else
        with_first_of<8, 16, 32, 48, 64>(rows, fn);
}

/* Nothing here may become a call, at which MMAs in flight would be waited for. */
template <class Config, int TOKENS, typename Epilogue>
__device__ __forceinline__ void run_codes_tile(const CodesGemm &p, Shared<Config> &s,
                                               typename Config::Pipeline &pipe, const WorkTile &tile, int wg,
                                               Epilogue &epilogue) {
    constexpr bool TALL = TOKENS > Config::WIDE_ROWS;
    constexpr int SUBTILES = TALL ? 1 : Config::SUBTILES;
    int warp = threadIdx.x / 32 % 4, subtile = SUBTILES * wg;
    uint32_t staging = shared_address(s.staging[wg]);
    float d[TOKENS / 2 * SUBTILES];
    if constexpr (TALL)
        run_mainloop_tall<Config>(d, p, s, pipe, wg);
    else
        run_mainloop_codes<Config, TOKENS>(d, p, s, pipe, wg);
    if (!TALL && tile.half_n && subtile >= Config::TILES / 2) return; /* these were not loaded */
    if constexpr (Config::MANY_ROWS) {
        typename Config::Lines lines(staging, WARPGROUP_BARRIER + wg, warp);
        constexpr int PIECE = TOKENS < Config::Lines::ROWS ? TOKENS : Config::Lines::ROWS; /* rows */
        constexpr int PIECES = TOKENS / PIECE * SUBTILES, WORDS = PIECE / 2;
        auto first_word = [](int i) { return TOKENS / 2 * (i % SUBTILES) + WORDS * (i / SUBTILES); };
        /* A loop, in which each piece is moved to where the first was, since registers have no index: unrolled code would be
         * fetched anew for every tile. */
#pragma unroll 1
        for (int i = 0; i < PIECES; i++) {
            epilogue.template store_lines<PIECE, TALL>(d, tile, subtile + i % SUBTILES, i / SUBTILES * PIECE,
                                                       warp, lines);
#pragma unroll
            for (int j = 1; j < PIECES; j++)
#pragma unroll
                for (int k = 0; k < WORDS; k++) d[first_word(j - 1) + k] = d[first_word(j) + k];
        }
    } else {
        epilogue.template store_swapped<TOKENS>(d, tile, subtile, warp, staging);
    }
}

/* epilogue.store_swapped<TOKENS>(d, tile, subtile, warp, staging) stores a subtile of a tile: what warp w of 4 has of 16
 * rows of the weight. d is wgmma's, and may be changed; staging is the warpgroup's buffer. A thread's two rows are those of
 * row_of: rows lane / 4 and lane / 4 + 8 of the warp's sixteen, or a gate and its up. Of tiles of many rows
 * epilogue.store_lines<TOKENS, TALL>(d, tile, subtile, row, warp, lines) stores the subtile's rows from `row` on. */
template <class Config, typename Epilogue>
__device__ __forceinline__ void persistent_codes_gemm(const CodesGemm &p, Epilogue epilogue) {
    auto &s = static_cast<PlanningShared<Config> &>(prologue<Config>());
    const Gemm &gemm = p.gemm;
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), wg = warp / 4 - 1; /* -1: the producer */
    if (wg < 0) {
        setmaxnreg_dec<Config::PRODUCER_REGISTERS>();
        produce_codes<Config>(p, s, warp);
    } else {
        setmaxnreg_inc<Config::CONSUMER_REGISTERS>();
        griddepcontrol_wait();
        if (gemm.tiles.lets_next_start) griddepcontrol_launch_dependents();
        TileReader<typename Config::Queue> reader(s.queue);
        typename Config::Pipeline pipe;
        for (WorkTile tile = reader.next(); tile.expert >= 0; tile = reader.next())
            with_tokens<Config>(tile.num_rows, [&](auto tokens) {
                run_codes_tile<Config, tokens.value>(p, s, pipe, tile, wg, epilogue);
            });
    }
    if (gemm.tiles.starts_early)
        griddepcontrol_wait(); /* every warp, before it zeroes rows past the last one */
}

/* --- launching ------------------------------------------------------------------------------------------ */

/* The kernels are as many as these: dtype, codes, and scales of the dtype or of another, of 128 columns or fewer; by column,
 * of any rows. */
template <bool BY_COLUMN = false, typename Fn>
int with_decoder(FusedMoeDtype dtype, const FusedMoeQuantizedWeight &w, Fn fn) {
    return with_half(dtype, [&](auto t) {
        using T = decltype(t);
        switch (w.format) {
        case FUSED_MOE_INT8: return fn(Decoder<T, Code::INT8, false, false, BY_COLUMN>());
        case FUSED_MOE_INT4:
            if (w.scale_dtype != dtype) return fn(Decoder<T, Code::INT4, false, true, BY_COLUMN>());
            if constexpr (!BY_COLUMN)
                if (w.block_in >= MOST_COLUMNS || w.block_in >= w.in)
                    return fn(Decoder<T, Code::INT4, true, false>());
            return fn(Decoder<T, Code::INT4, true, true, BY_COLUMN>());
        case FUSED_MOE_MXFP4: /* bf16 has every e8m0 scale */
            return fn(Decoder<T, Code::E2M1, std::is_same_v<T, __nv_bfloat16>, true, BY_COLUMN>());
        default: return fn(Decoder<T, Code::E4M3, false, false, BY_COLUMN>());
        }
    });
}

/* Calls fn with a configuration for R rows of E experts. */
template <class Decoder, bool GATHER, typename Fn>
int with_codes_config(int64_t R, int32_t E, Fn fn) {
    switch (schedule_override().no_tails ? 128 : fused_moe_quantized_tile_rows(R, E)) {
    case 16: return fn(CodesConfig<Decoder, GATHER, Rows::FEW>());
    case 64: return fn(CodesConfig<Decoder, GATHER, Rows::SOME>());
    case 128: return fn(CodesConfig<Decoder, GATHER, Rows::MANY>());
    default: return fn(CodesConfig<Decoder, GATHER, Rows::TALL>());
    }
}

/* Whether the weight is dequantised first. */
inline bool has_many_rows(int64_t R, int32_t E, bool is_transposed) {
    int64_t asked = schedule_override().quantized_rows;
    return R > (asked < 0 ? fused_moe_most_quantized_rows(true, is_transposed) : asked) * E;
}

/* A map of `rows` tiles of 64 rows from the one at `data` on, of [E,out/64,count,width]: boxes of (1, tiles, box,
 * width) elements. */
inline int tiles_map(CUtensorMap *map, CUtensorMapDataType dtype, int bytes, const void *data, int32_t E,
                     int64_t out, int64_t rows, int64_t count, int64_t width, uint32_t box, uint32_t tiles) {
    const uint64_t sizes[] = {(uint64_t)width, (uint64_t)count, (uint64_t)rows, (uint64_t)E};
    const uint64_t row = (uint64_t)(width * bytes), tile = count * row;
    const uint64_t strides[] = {row, tile, (uint64_t)(out / SUBTILE) * tile};
    const uint32_t boxes[] = {(uint32_t)width, box, tiles, 1};
    return encode_tensor_map(map, dtype, 4, data, sizes, strides, boxes, CU_TENSOR_MAP_SWIZZLE_NONE);
}

/* A weight as a GEMM of codes reads it: where that is transposed, its second packing. */
inline FusedMoeQuantizedWeight packing_of(const FusedMoeQuantizedWeight &w) {
    if (!w.transposed) return w;
    FusedMoeQuantizedWeight t = w;
    t.data = w.data_t, t.scale = w.scale_t, t.zero = w.zero_t;
    t.out = w.in, t.in = w.out, t.block_out = w.block_in, t.block_in = w.block_out;
    return t;
}

/* Whether scales are of columns: of a transposed weight whose rows had them. */
inline bool is_by_column(const FusedMoeQuantizedWeight &packing) {
    return packing.block_in == 1;
}

/* Columns, or by column rows, that share a scale. */
inline int64_t group_of(const FusedMoeQuantizedWeight &packing) {
    if (is_by_column(packing)) return packing.block_out < packing.out ? packing.block_out : packing.out;
    return packing.block_in < packing.in ? packing.block_in : packing.in;
}

/* Lets weight i of a GEMM be rows [first_row, first_row + rows) of a weight of codes; by column it is all of one. */
template <class Config>
int set_codes(CodesGemm &p, int i, const FusedMoeQuantizedWeight &codes, int32_t E, int64_t first_row,
              int64_t rows) {
    using Decoder = typename Config::Decoder;
    constexpr int64_t PIECES = Decoder::TILE_BYTES / PIECE_BYTES; /* of a tile */
    constexpr uint32_t BOX = Config::BOX;                         /* tiles */
    /* Columns, or by column rows, that one load of scales is for. */
    constexpr int64_t SPAN = Decoder::BY_COLUMN ? BOX * SUBTILE : Config::COLUMNS;
    int64_t block = group_of(codes);
    int64_t num_groups = ceil_div(Decoder::BY_COLUMN ? codes.out : codes.in, block),
            tile = first_row / SUBTILE, k_tiles = codes.in / SUBTILE;
    Scales &s = p.scales;
    s.dtype = codes.scale_dtype;
    s.bytes = s.dtype == FUSED_MOE_U8 ? 1 : s.dtype == FUSED_MOE_F32 ? 4 : 2;
    s.rows = codes.tile_scales;
    s.groups = block < SPAN && num_groups > 1 ? (int32_t)(SPAN / block) : 1;
    s.shift = 0;
    while (num_groups == 1 ? s.shift < 31 : SPAN << s.shift < block) s.shift++;
    s.has_zeros = codes.zero;
    int32_t num_scales = s.groups * (Decoder::BY_COLUMN ? SUBTILE : (int32_t)BOX * s.rows);
    s.box_bytes = (int32_t)BOX * Config::K_TILES * Decoder::TILE_BYTES + num_scales * (s.bytes + s.has_zeros);

    const char *data = (const char *)codes.data + tile * k_tiles * Decoder::TILE_BYTES;
    int status = tiles_map(&p.gemm.b[i], CU_TENSOR_MAP_DATA_TYPE_UINT64, 8, data, E, codes.out,
                           rows / SUBTILE, k_tiles * PIECES, PIECE_BYTES / 8, Config::K_TILES * PIECES, BOX);
    auto scales_map = [&](CUtensorMap *map, CUtensorMapDataType dtype, int bytes, const void *scales) {
        if (Decoder::BY_COLUMN)
            return tiles_map(map, dtype, bytes, scales, E, num_groups * SUBTILE, num_groups, k_tiles, SUBTILE,
                             1, s.groups);
        scales = (const char *)scales + tile * num_groups * s.rows * bytes;
        return tiles_map(map, dtype, bytes, scales, E, codes.out, rows / SUBTILE, num_groups, s.rows,
                         s.groups, BOX);
    };
    auto scale_dtype = s.bytes == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                       : s.bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                      : CU_TENSOR_MAP_DATA_TYPE_UINT32;
    if (status == FUSED_MOE_OK) status = scales_map(&p.scale[i], scale_dtype, s.bytes, codes.scale);
    if (status == FUSED_MOE_OK && s.has_zeros)
        status = scales_map(&p.zero[i], CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, codes.zero);
    return status;
}

/* Whether the kernels read the codes: tiles, and scales of 32 columns (by column: rows), of twice as many and so on, or of all.
 * A stage's columns past the last are codes of zero, which of int4 are values: where their scale is a real one, which may be
 * so large that they are infinite, there must not be any. Scales by column are read by stages of one k-tile, which have none. */
inline bool has_readable_codes(const FusedMoeWeight &w) {
    if (!w.quantized || !w.quantized->tile_scales || (w.quantized->transposed && !w.quantized->data_t))
        return false;
    FusedMoeQuantizedWeight codes = packing_of(*w.quantized);
    bool by_column = is_by_column(codes), is_int4 = codes.format == FUSED_MOE_INT4;
    if (by_column && is_int4 && codes.scale_dtype == FUSED_MOE_F32) return false; /* it loads 16 bits */
    if (!is_aligned(codes.data) || !is_aligned(codes.scale) || !is_aligned(codes.zero)) return false;
    int64_t group = group_of(codes);
    if (group == (by_column ? codes.out : codes.in))
        return by_column || !is_int4 || codes.in % MOST_COLUMNS == 0;
    return group >= 32 && (group & (group - 1)) == 0;
}

} // namespace sm90
} // namespace fused_moe
