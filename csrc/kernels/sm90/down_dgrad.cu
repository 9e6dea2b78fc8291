/* down_dgrad on Hopper: g = dout[row_token] w2, and from it and h
 *   dh = dact(s g, h),  a_scaled = s a,  partial sums of <g, a>.
 *
 * Roles (512 threads): gemm.cuh's producer and consumers, with A gathered, and
 *   warpgroup 3     epilogue: warp i takes the rows that warps i of both consumers have computed
 * Pipelines beside gemm.cuh's                         full: arrivals        empty: arrivals
 *   accumulators x1 per warp (consumers -> epilogue)    1: consumer warp i    1: epilogue warp i
 *
 * For each element of g the epilogue reads two and writes three, and takes as long as the main loop of a
 * short k. So a separate warpgroup runs it: consumers leave their accumulators, rounded, in shared memory
 * and continue with the next tile.
 *
 *   consumer 1   |k 0|k 1| ... |store |k 0|k 1| ... of the next tile
 *   consumer 2   |k 0|k 1| ... |store |k 0|k 1| ...
 *   epilogue     the previous tile    |rows of consumer 1 |rows of consumer 2
 *
 * The price is one stage of four, and wgmma of N = 128: with 512 threads ptxas has no registers for 256.
 * Skinny experts are ordinary tiles here: their time is that of loading the weight, whatever the rows. */
#include "../common/activation.cuh"
#include "../common/dscores.cuh"
#include "gemm.cuh"
#include "launch.cuh"

namespace fused_moe {
namespace sm90 {
namespace {

/* --- kernel --------------------------------------------------------------------------------------------- */

/* What the epilogue warps read and write. They keep it in registers: captured by reference, it would be
 * reloaded for every chunk, by generic loads. */
typedef struct {
    const void *h;           /* [R,H] */
    const float *scores;     /* [T,K] or NULL */
    const int32_t *row_slot; /* [R] or NULL: row r is slot r */
    void *dh, *a_scaled;     /* [R,H], [R,F]; may be NULL */
    float *partials;         /* [R, N tiles] or NULL */
    int64_t num_slots;
    int32_t F, H, num_n_tiles;
    ActConstants<float> constants; /* of the activation */
} EpilogueOperands;

typedef struct {
    DenseGemm gemm;
    EpilogueOperands epilogue;
    FusedMoeLayout layout;
    int32_t activation;
} DownDgrad;

template <typename T, Major B_MAJOR>
struct DownDgradConfig : GemmConfig<T, B_MAJOR, true> {
    using Base = GemmConfig<T, B_MAJOR, true>;
    static constexpr int STAGES = 3, WGMMA_N = 128, THREADS = 128 * 4, EPILOGUE_WARPS = 4;
    static constexpr int CONSUMER_REGISTERS = 160, EPILOGUE_REGISTERS = 120;
    static constexpr int STAGING_BYTES = 4 * SUBTILE_BYTES; /* g of 64 rows */
    using Queue = TileQueue<WorkTile, Base::CONSUMER_WARPS + Base::LOAD_WARPS + EPILOGUE_WARPS, Base::BM>;
    using Pipeline = PipelineState<STAGES>;
};

template <class Config>
struct DownDgradShared : Shared<Config> {
    uint4 h[Config::EPILOGUE_WARPS][4][2][32]; /* by warp and subtile: chunks in flight to its lanes */
    /* by consumer and warp */
    Barrier<Warps<1>> accumulators_full[Config::CONSUMERS][4], accumulators_empty[Config::CONSUMERS][4];
};

/* Passes a consumer's tile to the epilogue warpgroup, as subtiles of 64 columns. */
template <class Config>
__device__ inline void store_accumulators(DownDgradShared<Config> &s, int wg, int warp, uint32_t phase,
                                          int subtiles, const float (&d)[128]) {
    s.accumulators_empty[wg][warp].wait(phase ^ 1);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (i >= subtiles) break;
        uint32_t words[16];
        pack_subtile<typename Config::Out>(words, &d[32 * i]);
        fill_subtile(shared_address(s.staging[wg]) + i * SUBTILE_BYTES, 16 * warp, words);
    }
    __syncwarp();
    s.accumulators_full[wg][warp].template arrive_once<1>();
}

/* The score of a tile's row; 0 if there is none. */
__device__ inline float score_of(const EpilogueOperands &p, const WorkTile &tile, int row) {
    if (row >= tile.num_rows) return 0;
    int64_t r = tile.first_row + row, slot = p.row_slot ? __ldg(p.row_slot + r) : r;
    if (!p.scores) return 1;
    return (uint64_t)slot < (uint64_t)p.num_slots ? __ldg(p.scores + slot) : 0;
}

/* One epilogue warp: four rows at a time, eight lanes per row, one chunk per lane and subtile. Each lane
 * prefetches its chunks of h by cp.async, four rows ahead. */
template <class Config, FusedMoeLayout layout, typename Act>
__device__ inline void run_epilogue(EpilogueOperands p, DownDgradShared<Config> &s, int warp, Act act) {
    using T = typename Config::Out;
    constexpr bool GATED = layout != FUSED_MOE_UNGATED, INTERLEAVED = layout == FUSED_MOE_INTERLEAVED;
    constexpr int WIDTH = INTERLEAVED ? 2 : 1; /* elements of h side by side for one of g */
    int lane = threadIdx.x % 32, second = INTERLEAVED ? CHUNK : p.F;
    TileReader<typename Config::Queue> reader(s.queue);
    uint32_t phase = 0;
    for (WorkTile tile = reader.next(); tile.expert >= 0; tile = reader.next(), phase ^= 1) {
        /* the lane's first row and column, and the number of rows and subtiles from there on */
        int row = 16 * warp + lane / 8, column = tile.first_column + lane % 8 * CHUNK;
        int rows = tile.num_rows - row;
        int subtiles = min(tile.half_n ? 2 : 4, (p.F - column + SUBTILE - 1) / SUBTILE);
        int64_t r = tile.first_row + row, in_h = r * p.H + WIDTH * column;
        const T *h = (const T *)p.h + in_h, *h_second = h + second;
        T *dh = (T *)p.dh + in_h, *a_scaled = (T *)p.a_scaled + r * p.F + column;
        /* Past the last row nothing is loaded, so no copy is in flight when the CTA exits. */
        auto prefetch_h = [&](int i, bool valid) {
            if (valid && i < subtiles) {
                cp_async(shared_address(&s.h[warp][i][0][lane]), h + WIDTH * SUBTILE * i, true);
                if (GATED)
                    cp_async(shared_address(&s.h[warp][i][1][lane]), h_second + WIDTH * SUBTILE * i, true);
            }
            cp_async_commit_group();
        };
        for (int i = 0; i < 4; i++) prefetch_h(i, rows > 0);
        float lane_score = score_of(p, tile, lane / 16 * SUBTILE + 16 * warp + lane % 16);
#pragma unroll 1
        for (int quad = 0; quad < 8; quad++) {
            int wg = quad / 4, row_step = quad % 4 < 3 ? 4 : SUBTILE - 12; /* to the next four rows */
            if (quad % 4 == 0) s.accumulators_full[wg][warp].wait(phase);
            int g_row = 16 * warp + 4 * (quad % 4) + lane / 8;
            uint32_t g_chunk = swizzled(shared_address(s.staging[wg]), g_row, lane % 8);
            float score = __shfl_sync(~0u, lane_score, 4 * quad + lane / 8), dot = 0;
            h += row_step * p.H, h_second += row_step * p.H;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                Pack<T> packed;
                PackedPair<T> pair;
                cp_async_wait_group<3>();
                packed.words[0] = ld_shared_v4(g_chunk + i * SUBTILE_BYTES);
                pair.low.words[0] = ld_shared_v4(shared_address(&s.h[warp][i][0][lane]));
                pair.high.words[0] = ld_shared_v4(shared_address(&s.h[warp][i][1][lane]));
                prefetch_h(i, rows > row_step && quad < 7);
                if (rows <= 0 || i >= subtiles) continue;
                Pair<float> q, d;
                float g[CHUNK], da[CHUNK], a[CHUNK];
#pragma unroll
                for (int n = 0; n < CHUNK; n += 2) to_accums(g[n], g[n + 1], packed.v + n);
                pair.unpack(q, layout);
#pragma unroll
                for (int n = 0; n < CHUNK; n++) da[n] = score * g[n];
                activate_backward<T>(act, a, d, da, q, p.constants, GATED);
#pragma unroll
                for (int n = 0; n < CHUNK; n++) dot += g[n] * a[n], a[n] *= score;
                if (p.dh) store_pair<T>(dh, dh + p.F, d, layout, SUBTILE * i, CHUNK, true);
                if (p.a_scaled) store_chunk<T>(a_scaled + SUBTILE * i, a, CHUNK, true);
            }
            if (quad % 4 == 3) {
                __syncwarp();
                s.accumulators_empty[wg][warp].template arrive_once<1>();
            }
            if (p.partials) {
                dot = warp_sum(dot, 8);
                if (lane % 8 == 0 && rows > 0)
                    __stwb(p.partials + r * p.num_n_tiles + tile.first_column / Config::BN, dot);
            }
            r += row_step, rows -= row_step, dh += row_step * p.H, a_scaled += row_step * p.F;
        }
    }
}

template <class Config>
__global__ void __launch_bounds__(Config::THREADS, 1) down_dgrad_kernel(const __grid_constant__ DownDgrad p) {
    using T = typename Config::Out;
    const DenseGemm &gemm = p.gemm;
    auto &s = static_cast<DownDgradShared<Config> &>(prologue<Config>());
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), wg = warp / 4 - 1; /* -1: the producer */
    if (threadIdx.x < Config::CONSUMER_WARPS) {
        s.accumulators_full[threadIdx.x / 4][threadIdx.x % 4].init();
        s.accumulators_empty[threadIdx.x / 4][threadIdx.x % 4].init();
        fence_mbarrier_init();
    }
    __syncthreads();
    griddepcontrol_wait();
    if (wg < 0) {
        setmaxnreg_dec<Config::PRODUCER_REGISTERS>();
        if (warp == 3)
            fetch_gemm_tiles<0>(gemm, s.queue);
        else
            load_gather<Config>(gemm, s);
    } else if (wg < Config::CONSUMERS) {
        setmaxnreg_inc<Config::CONSUMER_REGISTERS>();
        TileReader<typename Config::Queue> reader(s.queue);
        typename Config::Pipeline pipe;
        uint32_t phase = 0;
        for (WorkTile tile = reader.next(); tile.expert >= 0; tile = reader.next(), phase ^= 1) {
            float d[128];
            auto nothing = [](auto) {};
            if (tile.half_n)
                run_mainloop<Config, Config::BN / 2, 0>(d, s, pipe, gemm.num_k_tiles[0], wg, nothing);
            else
                run_mainloop<Config, Config::BN, 0>(d, s, pipe, gemm.num_k_tiles[0], wg, nothing);
            store_accumulators<Config>(s, wg, warp % 4, phase, tile.half_n ? 2 : 4, d);
        }
    } else {
        setmaxnreg_dec<Config::EPILOGUE_REGISTERS>();
        with_activation<T>(p.activation, [operands = p.epilogue, layout = p.layout, &s, warp](auto act) {
            if (layout == FUSED_MOE_UNGATED)
                run_epilogue<Config, FUSED_MOE_UNGATED>(operands, s, warp % 4, act);
            else if (layout == FUSED_MOE_INTERLEAVED)
                run_epilogue<Config, FUSED_MOE_INTERLEAVED>(operands, s, warp % 4, act);
            else
                run_epilogue<Config, FUSED_MOE_HALVES>(operands, s, warp % 4, act);
        });
    }
    const EpilogueOperands &e = p.epilogue;
    if (e.dh) zero_rows_past(gemm.tiles, (T *)e.dh, e.H);
    if (e.a_scaled) zero_rows_past(gemm.tiles, (T *)e.a_scaled, e.F);
}

/* --- launcher ------------------------------------------------------------------------------------------- */

constexpr int TILE_N = 256;

int64_t partials_of_row(const FusedMoeDownDgrad &p) {
    return ceil_div(p.F, TILE_N);
}

template <class Config>
int launch(const FusedMoeDownDgrad &p, void *stream) {
    static_assert(Config::BN == TILE_N);
    using T = typename Config::Out;
    const FusedMoeRowMap &rows = p.row_map;
    DownDgrad q = {};
    EpilogueOperands &e = q.epilogue;
    e.h = p.h;
    e.scores = (const float *)p.scores;
    e.row_slot = rows.row_slot;
    e.dh = p.dh;
    e.a_scaled = p.a_scaled;
    e.partials = p.dscores ? (float *)p.workspace.data : nullptr;
    e.num_slots = rows.T * rows.K;
    e.F = (int32_t)p.F;
    e.H = p.layout == FUSED_MOE_UNGATED ? e.F : 2 * e.F;
    e.num_n_tiles = (int32_t)partials_of_row(p);
    e.constants = act_constants<float>(p.activation);
    q.layout = p.layout;
    q.activation = p.activation.kind;

    DenseGemm &gemm = q.gemm;
    gemm.x = p.dout;
    gemm.row_token = rows.row_token;
    gemm.T = rows.T;
    gemm.k = (int32_t)p.D;
    gemm.num_k_tiles[0] = (int32_t)ceil_div(p.D, K_TILE<T>);
    gemm.tiles = tile_source(rows.offs, rows.schedule, rows.R, rows.E, p.F, TILE_N, p.workspace.counters);
    gemm.tiles.last_is_half_n = (p.F - 1) % TILE_N < TILE_N / 2;
    gemm.tiles.swaps_skinny = false;
    gemm.tiles.assignment = fused_moe_takes_turns(p.F, p.D) ? FUSED_MOE_IN_TURN : FUSED_MOE_ROTATED;
    int status = weight_map<T>(&gemm.weight.map[0], p.w2, Config::B_MAJOR, p.w2.stride_in, p.w2.stride_out,
                               rows.E, p.F, p.D, Config::BN / 2);
    if (status == FUSED_MOE_OK)
        status = launch_persistent<Config, DownDgradShared<Config>, down_dgrad_kernel<Config>>(
            q, stream, {false, false, true}); /* after_any */
    if (status != FUSED_MOE_OK || !p.dscores) return status;
    return run_dscores(p, e.partials, partials_of_row(p), stream);
}

int run(const FusedMoeDownDgrad &p, void *stream) {
    return with_half(p.dtype, [&](auto t) {
        using T = decltype(t);
        if (p.w2.stride_out == 1) return launch<DownDgradConfig<T, Major::K>>(p, stream);
        return launch<DownDgradConfig<T, Major::MN>>(p, stream);
    });
}

FusedMoeReason reason(const FusedMoeDownDgrad &p) {
    const FusedMoeRowMap &rows = p.row_map;
    if (!is_16_bit(p.dtype)) return FUSED_MOE_OTHER_DTYPE;
    if (rows.R == 0 || rows.T == 0) return FUSED_MOE_NO_ROWS;
    if (p.D % CHUNK || p.F % CHUNK) return FUSED_MOE_WIDTH;
    for (const void *data : {p.dout, p.h, (const void *)p.dh, (const void *)p.a_scaled})
        if (!is_aligned(data)) return FUSED_MOE_UNALIGNED;
    if (!is_readable(p.w2, p.w2.stride_in, p.w2.stride_out, rows.E)) return FUSED_MOE_STRIDES;
    if (2 * p.F * SUBTILE > INT32_MAX)
        return FUSED_MOE_TOO_LARGE; /* the epilogue steps rows of h in 32 bits */
    return is_countable(rows.R, rows.E, p.F) ? FUSED_MOE_RUNS : FUSED_MOE_TOO_LARGE;
}

size_t workspace(const FusedMoeDownDgrad &p) {
    return p.dscores ? p.row_map.R * partials_of_row(p) * sizeof(float) : 0;
}

} // namespace

const Kernel<FusedMoeDownDgrad> down_dgrad = {reason, workspace, run};

} // namespace sm90
} // namespace fused_moe
