/* wgrad on Hopper: dw[e] = a[rows of e]^T b[row_token[rows of e]], a GEMM whose k is an expert's rows.
 *
 * For dw1 and dw3, a is dh and b is x. A tile is 128x256 of dw transposed. wgmma's A, in stage.a, is 128
 * columns of b, counted by n. wgmma's B, in stage.b, is 256 columns of a, counted by m. The columns of a that
 * are dw3's (part 1) follow those that are dw1's (part 0), so a tile may have some of both. An expert without
 * rows has its tiles, too: they store zeros.
 *
 * Roles and pipelines are gemm.cuh's; wgrad_load.cuh has the loads, split_k.cuh the reduction of an expert
 * that is split along k, wgrad_store.cuh what the weight gradient of 8 bits has, too.
 *
 * A weight's gradient has the weight's strides. If a's columns are contiguous in it, accumulators are stored
 * as they are, else TRANSPOSED, by stmatrix.trans. In a's dtype the epilogue is overlapped as in grouped_mm.
 * In f32 it stores at once, and TMA can add to memory.
 *
 * Every tile gathers its columns of b, so b is gathered once for every 256 of a's columns, in about a tenth
 * of the GEMM's time. If a is wide, b's rows are copied into expert order first, half of their columns at a
 * time, and TMA loads them.
 *
 * With few rows writing dw takes the time. Memory writes faster what is written together, so CTAs take tiles
 * in turn, and stores in a's dtype leave L2 first. */
#include "launch.cuh"
#include "split_k.cuh"
#include "wgrad_load.cuh"
#include "wgrad_store.cuh"

namespace fused_moe {
namespace sm90 {
namespace {

/* --- kernel --------------------------------------------------------------------------------------------- */

template <typename T, bool GATHER>
struct WgradConfig : GemmConfig<T, Major::MN, GATHER> {
    static constexpr Major A_MAJOR = Major::MN;
    static constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = 224;
    using Queue = TileQueue<WgradTile, WgradConfig::CONSUMER_WARPS + WgradConfig::LOAD_WARPS, 0>;
};

/* Rows of a long tile: its 16 k-tiles take three times as long as fetching a tile. */
constexpr int LONG_TILE = 1024;

/* The place of a warpgroup's accumulators in dw: 64 of b's columns times 256 of a's. */
struct Target {
    int expert, first_subtile, n; /* first_subtile past the last: nothing is stored */
};

template <typename T, bool TRANSPOSED>
struct Epilogue;
template <bool TRANSPOSED>
struct EpilogueF32;
__device__ inline bool sum_slices(const Wgrad &p, const WgradTile &tile, int wg, float (&d)[128]);

__device__ inline WgradTile tile_of(const Wgrad &p, const FusedMoeWgradTile &work) {
    constexpr int GROUP = 16; /* tiles in flight together share columns of both operands */
    WgradTile tile;
    int n_tile, m_tile, weight_tiles = p.wgrad_order.weight_tiles;
    fused_moe_grouped_order(work.weight_tile, p.n_tiles, weight_tiles / p.n_tiles, GROUP, &n_tile, &m_tile);
    tile.expert = work.expert;
    tile.first_row = work.first_row;
    tile.num_rows = work.num_rows;
    tile.row_in_expert = work.slice * p.slice_rows;
    tile.slice = work.slice;
    tile.num_slices = work.num_slices;
    tile.split_index = (tile.first_row - tile.row_in_expert) / p.slice_rows * weight_tiles + work.weight_tile;
    tile.first_subtile = 4 * m_tile;
    tile.first_n = 2 * SUBTILE * n_tile;
    return tile;
}

/* The fetching warp. If a tile has few rows, looking up its expert and building the expert's maps takes
 * longer than computing it, so consecutive tiles are claimed at once. */
template <class Queue>
__device__ inline void fetch_wgrad_tiles(const Wgrad &p, Queue &queue) {
    const TileSource &source = p.tiles;
    const FusedMoeWgradOrder &order = p.wgrad_order;
    uint32_t num_tiles = fused_moe_num_wgrad_tiles(source.schedule, source.E, (int32_t)source.R, &order);
    uint32_t at_once = p.tiles_at_once, num_claims = (num_tiles + at_once - 1) / at_once;
    FusedMoeWgradTile work = {};
    int expert = -1, slot = 0;
    auto publish_tiles = [&](uint32_t claim, auto publish) {
        if (claim >= num_claims) return publish({-1});
        uint32_t first = claim * at_once, end = min(first + at_once, num_tiles);
        for (uint32_t i = first; i < end; i++) {
            if (i > first && work.weight_tile + 1 < order.weight_tiles)
                work.weight_tile++;
            else
                work = fused_moe_wgrad_tile(source.schedule, source.offs, source.E, (int32_t)source.R, &order,
                                            i);
            if (work.num_slices == 0) continue;
            if (work.expert != expert) {
                expert = work.expert;
                slot = (slot + 1) % MAP_SLOTS;
                build_maps(source, queue.scratch, expert, slot);
            }
            WgradTile tile = tile_of(p, work);
            tile.map_slot = slot;
            publish(tile);
        }
    };
    auto token_of = [](const WgradTile &, int) { return 0; };
    auto is_long = [](const WgradTile &tile) { return tile.num_rows >= LONG_TILE; };
    fetch_tiles(source, queue, fused_moe_equal_shares(num_claims), publish_tiles, token_of, is_long);
}

template <class Config, class Epilogue>
__global__ void __launch_bounds__(Config::THREADS, 1) wgrad_kernel(const __grid_constant__ Wgrad p) {
    using T = typename Config::Operand;
    auto &s = prologue<Config>();
    griddepcontrol_wait();
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), wg = warp / 4 - 1; /* -1: the producer */
    if (wg < 0) {
        setmaxnreg_dec<Config::PRODUCER_REGISTERS>();
        if (warp == 3) {
            fetch_wgrad_tiles(p, s.queue);
        } else if constexpr (Config::GATHER) {
            load_wgrad_gather<Config>(p, s);
        } else if (warp == 0) {
            load_wgrad_tma<Config>(p, s);
        }
    } else {
        setmaxnreg_inc<Config::CONSUMER_REGISTERS>();
        TileReader<typename Config::Queue> reader(s.queue);
        typename Config::Pipeline pipe;
        WarpgroupWriter writer(shared_address(s.staging[wg]), WARPGROUP_BARRIER + wg, warp % 4);
        Epilogue epilogue;
        auto store_subtile = [&](auto i) { epilogue.template store_subtile<i.value>(p, writer); };
        for (WgradTile tile = reader.next(); tile.expert >= 0; tile = reader.next()) {
            /* With few rows the zeros in the last k-tile would be a tenth of the MMAs. */
            int num_k_tiles = num_k_tiles_of<T>(tile);
            int last_rows = num_k_tiles > 1 ? tile.num_rows % K_TILE<T> : 0;
            num_k_tiles -= last_rows > 0;
            float d[128];
            if (num_k_tiles) {
                run_mainloop<Config, Config::BN, Epilogue::SUBTILES>(d, s, pipe, num_k_tiles, wg,
                                                                     store_subtile);
                if (last_rows)
                    run_last_k_tile<Config, Config::BN>(d, s, pipe, last_rows, wg,
                                                        [&] { epilogue.flush(p, writer, num_k_tiles); });
            } else {
#pragma unroll
                for (int i = 0; i < 128; i++) d[i] = 0;
            }
            epilogue.flush(p, writer, num_k_tiles); /* subtiles of the previous tile that found no k-tile */
            if (tile.num_slices == 1 || sum_slices(p, tile, wg, d))
                epilogue.hold(p, d, {tile.expert, tile.first_subtile, tile.first_n + wg * SUBTILE}, writer);
        }
        epilogue.flush(p, writer);
        if (p.wgrad_order.slices_per_tile)
            reset_semaphores(p.tiles.counters + FINISHED, Config::CONSUMERS * gridDim.x,
                             p.tiles.counters + SEMAPHORES,
                             Config::CONSUMERS * (p.later_slots + p.wgrad_order.weight_tiles));
        writer.drain_all();
    }
}

/* Split-K of a warpgroup's accumulators. Returns true if d is the sum of all slices. */
__device__ inline bool sum_slices(const Wgrad &p, const WgradTile &tile, int wg, float (&d)[128]) {
    auto vectors_of = [&](int slice) {
        int64_t index =
            fused_moe_split_slot(tile.split_index, p.later_slots, p.wgrad_order.weight_tiles, slice);
        return p.slices + (2 * index + wg) * ACCUMULATOR_VECTORS;
    };
    return reduce_slices(d, tile.slice, tile.num_slices, vectors_of,
                         p.tiles.counters + SEMAPHORES + 2 * tile.split_index + wg, WARPGROUP_BARRIER + wg);
}

/* --- epilogues ------------------------------------------------------------------------------------------ */

/* Fills a subtile whose rows are 64 of a's columns and hold b's 64 columns. A thread's words are laid out as
 * for fill_subtile. */
__device__ inline void fill_subtile_transposed(uint32_t subtile, int warp, const uint32_t (&words)[16]) {
    int lane = threadIdx.x % 32, chunk = 2 * warp + lane / 8 % 2;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        int row = 8 * (j + lane / 16) + lane % 8;
        stmatrix_x4_trans(swizzled(subtile, row, chunk), words[2 * j], words[2 * j + 1], words[2 * j + 2],
                          words[2 * j + 3]);
    }
}

/* In a's dtype: rounds and holds the accumulators, and stores them under the next tile's k-tiles. */
template <typename T, bool TRANSPOSED>
struct Epilogue {
    static constexpr int SUBTILES = 4, NOWHERE = INT32_MAX - SUBTILES;
    uint32_t words[SUBTILES][16];
    Target held = {0, NOWHERE, 0};

    __device__ void hold(const Wgrad &, const float (&d)[128], const Target &target, WarpgroupWriter &) {
        held = target;
#pragma unroll
        for (int i = 0; i < SUBTILES; i++) pack_subtile<T>(words[i], &d[32 * i]);
    }

    template <int i>
    __device__ void store_subtile(const Wgrad &p, WarpgroupWriter &writer) {
        int subtile = held.first_subtile + i;
        if (subtile >= p.subtiles[1]) return;
        auto fill = [&](uint32_t staged, int warp) {
            if constexpr (TRANSPOSED)
                fill_subtile_transposed(staged, warp, words[i]);
            else
                fill_subtile(staged, 16 * warp, words[i]);
        };
        writer.store_filled(fill, [&](uint32_t staged) {
            const CUtensorMap *map = &p.dw[part_of(p, subtile)];
            int m = column_in_part(p, subtile);
            int column = TRANSPOSED ? held.n : m, row = TRANSPOSED ? m : held.n;
            if (p.is_write_bound)
                cp_async_bulk_tensor_store_evict_first(map, staged, column, row, held.expert);
            else
                cp_async_bulk_tensor_store(map, staged, column, row, held.expert);
        });
    }

    /* Stores what is held from subtile `first` on. */
    __device__ void flush(const Wgrad &p, WarpgroupWriter &writer, int first = 0) {
        for_each_constant<0, SUBTILES>([&](auto i) {
            if (i.value >= first) store_subtile<i.value>(p, writer);
        });
        held.first_subtile = NOWHERE;
    }
};

/* In f32: stores the accumulators, or adds them to memory, at once. */
template <bool TRANSPOSED>
struct EpilogueF32 {
    static constexpr int SUBTILES = 0;

    __device__ void hold(const Wgrad &p, const float (&d)[128], const Target &target,
                         WarpgroupWriter &writer) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int half = i % 2, subtile = target.first_subtile + i / 2;
            if (subtile >= p.subtiles[1]) return;
            int m = column_in_part(p, subtile), n = target.n;
            (TRANSPOSED ? n : m) += half * SUBTILE / 2;
            auto fill = [&](uint32_t staged, int warp) {
                fill_subtile_f32<TRANSPOSED>(staged, warp, half, &d[i / 2 * 32]);
            };
            writer.store_filled(fill, [&](uint32_t staged) {
                const CUtensorMap *map = &p.dw[part_of(p, subtile)];
                int column = TRANSPOSED ? n : m, row = TRANSPOSED ? m : n;
                if (p.accumulate)
                    cp_reduce_async_bulk_tensor_add(map, staged, column, row, target.expert);
                else
                    cp_async_bulk_tensor_store(map, staged, column, row, target.expert);
            });
        }
    }

    template <int i>
    __device__ void store_subtile(const Wgrad &, WarpgroupWriter &) {}
    __device__ void flush(const Wgrad &, WarpgroupWriter &, int = 0) {}
};

/* --- launcher ------------------------------------------------------------------------------------------- */

int64_t subtiles_of(const FusedMoeWgrad &p, int part) {
    return p.dw[part].data ? ceil_div(p.M[part], SUBTILE) : 0;
}

/* Tiles of one expert's weight. */
int64_t weight_tiles_of(const FusedMoeWgrad &p) {
    return ceil_div(subtiles_of(p, 0) + subtiles_of(p, 1), 4) * ceil_div(p.N, 2 * SUBTILE);
}

template <typename T, bool GATHER, typename Out, bool TRANSPOSED>
int launch(const FusedMoeWgrad &p, void *stream) {
    using Store =
        std::conditional_t<std::is_same_v<T, Out>, Epilogue<T, TRANSPOSED>, EpilogueF32<TRANSPOSED>>;
    using Config = WgradConfig<T, GATHER>;
    int64_t width = p.M[0] + p.M[1];
    Slices slices = slices_of(p.R, p.E, weight_tiles_of(p), K_TILE<T>);
    Wgrad q = {};
    q.b = p.b;
    q.row_token = p.b_row_token;
    q.T = p.T;
    q.N = (int32_t)p.N;
    q.n_tiles = (int32_t)ceil_div(p.N, Config::BM);
    q.subtiles[0] = (int32_t)subtiles_of(p, 0);
    q.subtiles[1] = q.subtiles[0] + (int32_t)subtiles_of(p, 1);
    q.wgrad_order = slices.order;
    q.slice_rows = (int32_t)slices.rows;
    q.later_slots = (int32_t)((slices.num_slots / 2 - 1) * q.wgrad_order.weight_tiles);
    q.is_write_bound = fused_moe_wgrad_is_write_bound(p.R, p.E, q.wgrad_order.weight_tiles, num_ctas());
    q.tiles_at_once = fused_moe_wgrad_tiles_at_once(p.R, p.E, q.wgrad_order.weight_tiles, num_ctas());
    q.accumulate = p.accumulate;
    q.slices = (float4 *)((char *)p.workspace.data + map_bytes(MAX_MAPS));
    int status = FUSED_MOE_OK;
    for (int i = 0; i < 2 && status == FUSED_MOE_OK; i++) {
        q.M[i] = (int32_t)p.M[i];
        if (p.dw[i].data) status = gradient_map<Out>(&q.dw[i], p.dw[i], TRANSPOSED, p.M[i], p.N, p.E);
    }
    TileSource &tiles = q.tiles;
    tiles = tile_source(p.offs, p.schedule, p.R, p.E, 1, 1, p.workspace.counters);
    if (q.is_write_bound || fused_moe_wgrad_takes_turns(p.R, p.E, q.wgrad_order.weight_tiles, num_ctas()))
        tiles.assignment = FUSED_MOE_IN_TURN;
    tiles.maps = (CUtensorMap *)p.workspace.data;
    tiles.num_maps = GATHER ? 1 : 2;
    tiles.rows[MAP_OF_A].data = p.a;
    tiles.rows[MAP_OF_A].pitch_bytes = width * sizeof(T);
    tiles.rows[MAP_OF_B].data = p.b;
    tiles.rows[MAP_OF_B].pitch_bytes = p.N * sizeof(T);
    if (status == FUSED_MOE_OK)
        status = matrix_map(&tiles.rows[MAP_OF_A].all_rows, (const T *)p.a, p.R, width, width, K_TILE<T>);
    if (status == FUSED_MOE_OK && !GATHER)
        status = matrix_map(&tiles.rows[MAP_OF_B].all_rows, (const T *)p.b, p.R, p.N, p.N, K_TILE<T>);
    if (status != FUSED_MOE_OK) return status;
    return launch_persistent<Config, Shared<Config>, wgrad_kernel<Config, Store>>(q, stream);
}

template <typename T, bool GATHER>
int launch(const FusedMoeWgrad &p, void *stream) {
    const FusedMoeWeight &dw = p.dw[p.dw[0].data ? 0 : 1];
    bool transposed = dw.stride_in == 1, f32 = p.dw_dtype == FUSED_MOE_F32;
    if (transposed)
        return f32 ? launch<T, GATHER, float, true>(p, stream) : launch<T, GATHER, T, true>(p, stream);
    return f32 ? launch<T, GATHER, float, false>(p, stream) : launch<T, GATHER, T, false>(p, stream);
}

int run_gemm(const FusedMoeWgrad &p, void *stream) {
    return with_half(p.dtype, [&](auto t) {
        using T = decltype(t);
        return p.b_row_token ? launch<T, true>(p, stream) : launch<T, false>(p, stream);
    });
}

/* --- b in expert order ---------------------------------------------------------------------------------- */

constexpr int GATHER_THREADS = 256;

/* Whether b's rows are gathered first, half of their columns at a time. */
bool gathers_first(const FusedMoeWgrad &p) {
    return p.b_row_token && fused_moe_gathers_first(p.M[0] + p.M[1], p.N);
}

size_t gathered_bytes(const FusedMoeWgrad &p) {
    size_t bytes = (size_t)p.R * (p.N / 2) * sizeof(uint16_t);
    return gathers_first(p) ? (bytes + 127) / 128 * 128 : 0;
}

/* The call for half of the columns of b, already gathered, and of dw. */
FusedMoeWgrad half_of(const FusedMoeWgrad &p, int half) {
    FusedMoeWgrad q = p;
    q.b = p.workspace.data;
    q.b_row_token = nullptr;
    q.T = p.R;
    q.N = p.N / 2;
    q.workspace.data = (char *)p.workspace.data + gathered_bytes(p);
    int64_t out_bytes = p.dw_dtype == FUSED_MOE_F32 ? sizeof(float) : sizeof(uint16_t);
    for (FusedMoeWeight &dw : q.dw)
        if (dw.data) dw.data = (char *)dw.data + half * q.N * dw.stride_in * out_bytes;
    return q;
}

/* rows[r] = b[row_token[r]], one warp per row, in chunks. Rows past the last one are left unwritten. */
typedef struct {
    const uint4 *b;           /* [T] rows of b_chunks, from the first chunk on */
    uint4 *rows;              /* [R, chunks] */
    const int32_t *row_token; /* [R] */
    const int32_t *offs;      /* [E] */
    int64_t R, T, b_chunks, chunks;
    int32_t E;
} RowsOfB;

__global__ void __launch_bounds__(GATHER_THREADS) gather_rows_kernel(const __grid_constant__ RowsOfB p) {
    constexpr int IN_FLIGHT = 8; /* chunks of a lane */
    int64_t num_rows = num_rows_of(p.offs, p.E, p.R), warps = (int64_t)gridDim.x * (GATHER_THREADS / 32);
    int64_t r = (blockIdx.x * (int64_t)GATHER_THREADS + threadIdx.x) / 32;
    for (; r < num_rows; r += warps) {
        uint32_t token = p.row_token[r];
        const uint4 *src = p.b + token * p.b_chunks;
        uint4 *dst = p.rows + r * p.chunks;
        for (int64_t first = threadIdx.x % 32; first < p.chunks; first += 32 * IN_FLIGHT) {
            uint4 v[IN_FLIGHT];
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; i++)
                v[i] = ld_global_v4(src + first + 32 * i, first + 32 * i < p.chunks && token < p.T);
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; i++)
                if (first + 32 * i < p.chunks) st_global_v4(dst + first + 32 * i, v[i]);
        }
    }
}

int run(const FusedMoeWgrad &p, void *stream) {
    if (!gathers_first(p)) return run_gemm(p, stream);
    int status = FUSED_MOE_OK;
    for (int half = 0; half < 2 && status == FUSED_MOE_OK; half++) {
        int64_t chunks = p.N / 2 / CHUNK;
        const uint4 *b = (const uint4 *)p.b + half * chunks;
        uint4 *rows = (uint4 *)p.workspace.data;
        RowsOfB gather = {b, rows, p.b_row_token, p.offs, p.R, p.T, 2 * chunks, chunks, p.E};
        status = fused_moe::launch(gather_rows_kernel, gather, ceil_div(p.R, GATHER_THREADS / 32),
                                   GATHER_THREADS, 0, stream);
        if (status == FUSED_MOE_OK) status = run_gemm(half_of(p, half), stream);
    }
    return status;
}

FusedMoeReason reason(const FusedMoeWgrad &p) {
    if (!is_16_bit(p.dtype)) return FUSED_MOE_OTHER_DTYPE;
    if (p.R == 0 || p.T == 0) return FUSED_MOE_NO_ROWS;
    if (p.b_scores) return FUSED_MOE_SCORED_INPUT;
    if (p.N % CHUNK || p.M[0] % CHUNK || p.M[1] % CHUNK) return FUSED_MOE_WIDTH;
    if (!is_aligned(p.a) || !is_aligned(p.b)) return FUSED_MOE_UNALIGNED;
    const FusedMoeWeight *dw = p.dw;
    for (int i = 0; i < 2; i++)
        if (dw[i].data && !is_readable(dw[i], dw[i].stride_out, dw[i].stride_in, p.E))
            return FUSED_MOE_STRIDES;
    if (dw[0].data && dw[1].data && (dw[0].stride_in == 1) != (dw[1].stride_in == 1))
        return FUSED_MOE_STRIDES;
    bool is_countable = (p.R / FUSED_MOE_MIN_SLICE + p.E) * weight_tiles_of(p) < INT32_MAX;
    return is_countable ? FUSED_MOE_RUNS : FUSED_MOE_TOO_LARGE;
}

size_t workspace(const FusedMoeWgrad &p) {
    FusedMoeWgrad q = gathers_first(p) ? half_of(p, 0) : p;
    return gathered_bytes(p) + map_bytes(MAX_MAPS) +
           slices_of(q.R, q.E, weight_tiles_of(q), K_TILE<__half>).num_slots * weight_tiles_of(q) * 2 *
               ACCUMULATOR_BYTES;
}

} // namespace

const Kernel<FusedMoeWgrad> wgrad = {reason, workspace, run};

} // namespace sm90
} // namespace fused_moe
