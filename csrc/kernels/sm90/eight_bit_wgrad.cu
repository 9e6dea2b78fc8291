/* Weight gradients of 8 bits on Hopper: dw[e] = sum over the row blocks of e of scale a b^T, where a and b
 * are codes by columns (eight_bit.h). A k-tile is a row block, so both operands are K-major, as 8-bit wgmma
 * takes them, and padding is in memory.
 *
 * The main loop is eight_bit.cuh's, in blocks: the accumulators of a row block are multiplied by the scale of
 * its 128 x 128 codes of one operand. split_k.cuh reduces an expert that is split along k. In 16 bits a
 * consumer stages all four subtiles and then stores them; in f32 it stores half a subtile at a time, and TMA
 * can add to memory. */
#include "eight_bit.cuh"
#include "split_k.cuh"
#include "wgrad_store.cuh"

namespace fused_moe {
namespace sm90 {
namespace {

/* --- kernel --------------------------------------------------------------------------------------------- */

struct alignas(16) EightBitWgradTile {
    int32_t expert; /* -1: there are no more tiles */
    int32_t first_block, num_blocks;
    int32_t slice, num_slices, split_index;
    int32_t m, n;   /* the first row and column of dw; parts follow one another along m */
    int32_t half_n; /* 128 columns instead of 256 */
};

typedef struct {
    CUtensorMap a, b; /* (blocks, M, 128), (blocks, N, 128) */
    CUtensorMap dw[2];
    const float *scale; /* [blocks, scale_columns] */
    int32_t scale_columns;
    bool scale_is_of_b;
    bool accumulate;
    int32_t M[2], N, m_tiles, n_tiles;
    FusedMoeWgradOrder order;
    int32_t slice_rows, later_slots;
    float4 *slices;
    TileSource tiles;
} EightBitWgrad;

/* b's columns, and behind them the scales of a tile's four subtiles. */
struct ScaledColumns : DenseWeight<__nv_fp8_e4m3, Major::K, 256> {
    static constexpr bool HAS_SCALES = true;
    static constexpr int SCALES = DenseWeight::STAGE_BYTES, STAGE_BYTES = SCALES + 1024;
};

struct EightBitWgradConfig : EightBitConfig<__nv_fp8_e4m3, ScalesOf::BLOCKS, Side::DOWN_DGRAD> {
    using Weight = ScaledColumns;
    using Queue = TileQueue<EightBitWgradTile, CONSUMER_WARPS + LOAD_WARPS, 0>;
};

/* Rows of a long tile: its k-tiles take three times as long as fetching a tile. */
constexpr int LONG_TILE = 2048;

__device__ inline bool decode_tile(const EightBitWgrad &p, uint32_t index, EightBitWgradTile &tile) {
    constexpr int GROUP = 16; /* tiles in flight together share columns of both operands */
    const TileSource &source = p.tiles;
    FusedMoeWgradTile work =
        fused_moe_wgrad_tile(source.schedule, source.offs, source.E, (int32_t)source.R, &p.order, index);
    int m_tile, n_tile;
    fused_moe_grouped_order(work.weight_tile, p.m_tiles, p.n_tiles, GROUP, &m_tile, &n_tile);
    const int32_t row_in_expert = work.slice * p.slice_rows, start = work.first_row - row_in_expert;
    tile.expert = work.expert;
    tile.first_block = fused_moe_first_row_block(start, work.expert) + row_in_expert / FUSED_MOE_BLOCK;
    tile.num_blocks = (work.num_rows + FUSED_MOE_BLOCK - 1) / FUSED_MOE_BLOCK;
    tile.slice = work.slice;
    tile.num_slices = work.num_slices;
    tile.split_index = start / p.slice_rows * p.order.weight_tiles + work.weight_tile;
    tile.m = m_tile * EightBitWgradConfig::BM;
    tile.n = n_tile * EightBitWgradConfig::BN;
    tile.half_n = p.N - tile.n <= EightBitWgradConfig::BN / 2;
    return work.num_slices > 0;
}

/* One warp loads both operands by TMA, and their scales by cp.async. */
__device__ inline void load_columns(const EightBitWgrad &p, Shared<EightBitWgradConfig> &s) {
    using Config = EightBitWgradConfig;
    constexpr int BOX_BYTES = FUSED_MOE_BLOCK * SWIZZLE_BYTES;
    const int lane = threadIdx.x % 32;
    TileReader<Config::Queue> reader(s.queue);
    Config::Pipeline pipe;
    for (EightBitWgradTile tile = reader.next(); tile.expert >= 0; tile = reader.next()) {
        const int boxes = tile.half_n ? 1 : 2;
        /* Column of the scale that lane i loads for subtile i: b's, or a's for all subtiles. */
        const int column = p.scale_is_of_b ? min(tile.n / FUSED_MOE_BLOCK + lane / 2, p.scale_columns - 1)
                                           : tile.m / FUSED_MOE_BLOCK;
        const float *scale = p.scale + column;
        for (int block = tile.first_block; block < tile.first_block + tile.num_blocks; block++) {
            auto &stage = s.stage[pipe.index];
            uint32_t full = s.full[pipe.index].address(), b = shared_address(stage.b);
            s.empty[pipe.index].wait(pipe.phase ^ 1);
            if (elect_sync()) {
                s.full[pipe.index].expect((1 + boxes) * BOX_BYTES);
                cp_async_bulk_tensor_load(shared_address(stage.a), &p.a, full, 0, tile.m, block);
                for (int i = 0; i < boxes; i++)
                    cp_async_bulk_tensor_load(b + i * BOX_BYTES, &p.b, full, 0, tile.n + i * FUSED_MOE_BLOCK,
                                              block);
            }
            __syncwarp();
            if (lane < Config::BN / SUBTILE)
                cp_async_word(b + Config::Weight::SCALES + 4 * lane,
                              scale + (int64_t)block * p.scale_columns);
            s.full[pipe.index].arrive_after_copies<Config::LOAD_WARPS>();
            pipe.advance();
        }
    }
}

/* Split-K of a warpgroup's accumulators. Returns true if d is the sum of all slices. */
__device__ inline bool sum_slices(const EightBitWgrad &p, const EightBitWgradTile &tile, int wg,
                                  float (&d)[128]) {
    auto vectors_of = [&](int slice) {
        int64_t index = fused_moe_split_slot(tile.split_index, p.later_slots, p.order.weight_tiles, slice);
        return p.slices + (2 * index + wg) * ACCUMULATOR_VECTORS;
    };
    return reduce_slices(d, tile.slice, tile.num_slices, vectors_of,
                         p.tiles.counters + SEMAPHORES + 2 * tile.split_index + wg, WARPGROUP_BARRIER + wg);
}

/* The accumulators of a consumer: 64 rows of dw from row m of `part` on. */
struct Target {
    int expert, part, m, n, columns;
};

struct WholeEpilogue {
    using Writer = WholeWriter;

    __device__ static void store(const EightBitWgrad &p, const float (&d)[128], const Target &t,
                                 Writer &writer) {
        writer.wait();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t words[16];
            pack_subtile<__nv_bfloat16>(words, &d[32 * i]);
            writer.fill(i, words);
        }
        writer.store([&](uint32_t subtile, int i) {
            if (i * SUBTILE < t.columns)
                cp_async_bulk_tensor_store(&p.dw[t.part], subtile, t.n + i * SUBTILE, t.m, t.expert);
        });
    }
};

struct HalfSubtileEpilogue { /* in f32 */
    using Writer = WarpgroupWriter;

    __device__ static void store(const EightBitWgrad &p, const float (&d)[128], const Target &t,
                                 Writer &writer) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (i * SUBTILE / 2 >= t.columns) return;
            auto fill = [&](uint32_t staged, int warp) {
                fill_subtile_f32<false>(staged, warp, i % 2, &d[i / 2 * 32]);
            };
            writer.store_filled(fill, [&](uint32_t staged) {
                const int n = t.n + i * SUBTILE / 2;
                if (p.accumulate)
                    cp_reduce_async_bulk_tensor_add(&p.dw[t.part], staged, n, t.m, t.expert);
                else
                    cp_async_bulk_tensor_store(&p.dw[t.part], staged, n, t.m, t.expert);
            });
        }
    }
};

template <class Epilogue>
__global__ void __launch_bounds__(EightBitWgradConfig::THREADS, 1)
    eight_bit_wgrad_kernel(const __grid_constant__ EightBitWgrad p) {
    using Config = EightBitWgradConfig;
    auto &s = prologue<Config>();
    griddepcontrol_wait();
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), wg = warp / 4 - 1; /* -1: the producer */
    if (wg < 0) {
        setmaxnreg_dec<Config::PRODUCER_REGISTERS>();
        if (warp == 3) {
            uint32_t num_tiles =
                fused_moe_num_wgrad_tiles(p.tiles.schedule, p.tiles.E, (int32_t)p.tiles.R, &p.order);
            fetch_tiles(
                p.tiles, s.queue, fused_moe_equal_shares(num_tiles),
                [&](uint32_t index, auto publish) {
                    EightBitWgradTile tile = {-1};
                    if (index >= num_tiles || decode_tile(p, index, tile)) publish(tile);
                },
                [](const EightBitWgradTile &, int) { return 0; },
                [](const EightBitWgradTile &tile) { return tile.num_blocks >= LONG_TILE / FUSED_MOE_BLOCK; });
        } else if (warp == 0) {
            load_columns(p, s);
        }
    } else {
        setmaxnreg_inc<Config::CONSUMER_REGISTERS>();
        TileReader<Config::Queue> reader(s.queue);
        Config::Pipeline pipe;
        typename Epilogue::Writer writer(shared_address(s.staging[wg]), WARPGROUP_BARRIER + wg, warp % 4);
        for (;;) {
            int num_blocks = reader.look().num_blocks;
            if (reader.look().expert < 0) break;
            float d[128];
            if (reader.look().half_n) {
#pragma unroll
                for (int i = 64; i < 128; i++) d[i] = 0;
                run_blocks<Config, Config::BN / 2>(d, s, pipe, num_blocks, wg);
            } else {
                run_blocks<Config, Config::BN>(d, s, pipe, num_blocks, wg);
            }
            const EightBitWgradTile tile = reader.look();
            reader.move_on();
            if (tile.num_slices > 1 && !sum_slices(p, tile, wg, d)) continue;
            const int m = tile.m + SUBTILE * wg, part = m >= p.M[0];
            if (m < p.M[0] + p.M[1])
                Epilogue::store(p, d, {tile.expert, part, part ? m - p.M[0] : m, tile.n, p.N - tile.n},
                                writer);
        }
        if (p.order.slices_per_tile)
            reset_semaphores(p.tiles.counters + FINISHED, Config::CONSUMERS * gridDim.x,
                             p.tiles.counters + SEMAPHORES,
                             Config::CONSUMERS * (p.later_slots + p.order.weight_tiles));
        writer.drain_all();
    }
}

/* --- launcher ------------------------------------------------------------------------------------------- */

/* Codes (blocks, columns, 128), in boxes of 128 columns of one block: coordinates (0, column, block). */
int columns_map(CUtensorMap *map, const void *data, int64_t columns, int64_t blocks) {
    const uint64_t sizes[] = {FUSED_MOE_BLOCK, (uint64_t)columns, (uint64_t)blocks};
    const uint64_t strides[] = {FUSED_MOE_BLOCK, (uint64_t)columns * FUSED_MOE_BLOCK};
    const uint32_t box[] = {FUSED_MOE_BLOCK, FUSED_MOE_BLOCK, 1};
    return encode_tensor_map(map, map_dtype(__nv_fp8_e4m3()), 3, data, sizes, strides, box);
}

int64_t weight_tiles_of(const FusedMoeEightBitWgrad &p) {
    return ceil_div(p.M[0] + p.M[1], EightBitWgradConfig::BM) * ceil_div(p.N, EightBitWgradConfig::BN);
}

template <typename Out, class Epilogue>
int launch(const FusedMoeEightBitWgrad &p, void *stream) {
    using Config = EightBitWgradConfig;
    const Slices slices = slices_of(p.R, p.E, weight_tiles_of(p), FUSED_MOE_BLOCK);
    const int64_t M = p.M[0] + p.M[1], blocks = fused_moe_num_row_blocks(p.R, p.E);
    EightBitWgrad q = {};
    q.scale = p.scale;
    q.scale_is_of_b = p.scale_is_of_b;
    q.scale_columns = (int32_t)((p.scale_is_of_b ? p.N : M) / FUSED_MOE_BLOCK);
    q.accumulate = p.accumulate;
    q.N = (int32_t)p.N;
    q.m_tiles = (int32_t)ceil_div(M, Config::BM);
    q.n_tiles = (int32_t)ceil_div(p.N, Config::BN);
    q.order = slices.order;
    q.slice_rows = (int32_t)slices.rows;
    q.later_slots = (int32_t)((slices.num_slots / 2 - 1) * q.order.weight_tiles);
    q.slices = (float4 *)p.workspace.data;
    int status = columns_map(&q.a, p.a, M, blocks);
    if (status == FUSED_MOE_OK) status = columns_map(&q.b, p.b, p.N, blocks);
    for (int i = 0; i < 2 && status == FUSED_MOE_OK; i++) {
        q.M[i] = (int32_t)p.M[i];
        if (p.dw[i].data) status = gradient_map<Out>(&q.dw[i], p.dw[i], true, p.M[i], p.N, p.E);
    }
    if (status != FUSED_MOE_OK) return status;
    q.tiles = tile_source(p.offs, p.schedule, p.R, p.E, 1, 1, p.workspace.counters);
    if (fused_moe_wgrad_takes_turns(p.R, p.E, weight_tiles_of(p), num_ctas()))
        q.tiles.assignment = FUSED_MOE_IN_TURN;
    return launch_persistent<Config, Shared<Config>, eight_bit_wgrad_kernel<Epilogue>>(q, stream);
}

} // namespace

int eight_bit_wgrad(const FusedMoeEightBitWgrad &p, void *stream) {
    return p.dw_dtype == FUSED_MOE_F32 ? launch<float, HalfSubtileEpilogue>(p, stream)
                                       : launch<__nv_bfloat16, WholeEpilogue>(p, stream);
}

size_t eight_bit_wgrad_workspace(const FusedMoeEightBitWgrad &p) {
    return slices_of(p.R, p.E, weight_tiles_of(p), FUSED_MOE_BLOCK).num_slots * weight_tiles_of(p) * 2 *
           ACCUMULATOR_BYTES;
}

} // namespace sm90
} // namespace fused_moe
