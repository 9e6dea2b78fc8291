/* down_dgrad on the Hopper engine: g = dout[row_token] w2, and from it and h
 *   dh = dact(s g, h),  a_scaled = s a,  partial sums of <g, a>.
 *
 * For each number of g the epilogue reads two and writes three, and computes as long as the gemm of a short k. So
 * it has a warpgroup of its own, the FINISHER: the two that multiply hand it their tile, rounded, in shared memory, and
 * go on; it works beside the next tile's products. Its warp i takes what the warps i of both have multiplied.
 *
 *   consumer 0   |k 0|k 1| ... |hand |k 0|k 1| ... of the next tile
 *   consumer 1   |k 0|k 1| ... |hand |k 0|k 1| ...
 *   finisher     the tile before     |rows of consumer 0 |rows of consumer 1
 *
 * Experts of few rows have no tiles of their own kind here: whatever the rows, their weight has to be loaded. */
#include "../activation.cuh"
#include "engine.cuh"
#include "tier.cuh"

namespace fused_moe {

/* --- kernel ------------------------------------------------------------------------------------------------ */

typedef struct {
    Gemm gemm;
    const void *h;           /* [R,H] */
    const float *scores;     /* [T,K] or NULL */
    const int32_t *row_slot; /* [R] or NULL: row r is slot r */
    void *dh, *a_scaled;     /* [R,H], [R,F]; may be NULL */
    float *partials;         /* [R, tiles of F] or NULL */
    int64_t num_slots;
    int32_t F, H;
    FusedMoeLayout layout;
    FusedMoeActivation activation;
} DownDgrad;

template <typename T, Major B_MAJOR>
struct DownDgradTile : Tile<T, B_MAJOR, true> {
    static constexpr int STAGES = 3, WGMMA_N = 128, THREADS = 128 * 4;
    static constexpr int CONSUMER_REGISTERS = 160, EPILOGUE_REGISTERS = 120; /* of 512 x 128 */
    static constexpr int STAGING_BYTES = 4 * SUBTILE_BYTES;                  /* g of 64 rows */
    using Base = Tile<T, B_MAJOR, true>;
    static_assert(Base::PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS + EPILOGUE_REGISTERS <= 4 * 128,
                  "or it hangs");
    using Queue = TileQueue<Base::CONSUMER_WARPS + Base::LOAD_WARPS + 4, Base::BM>;
    using Stages = PipelineState<STAGES>;
};

template <class Tile>
struct DownDgradShared : Shared<Tile> {
    uint4 h[4][4][2][32]; /* by warp and box: chunks on their way to its lanes */
    uint64_t accumulator_full[Tile::WARPGROUPS][4],
        accumulator_empty[Tile::WARPGROUPS][4]; /* by warp */
};

/* A consumer's tile, of `boxes` boxes, to the finisher. */
template <class Tile>
__device__ inline void store_accumulators(DownDgradShared<Tile> &s, int wg, int warp,
                                          uint32_t parity, int boxes, const float (&d)[128]) {
    mbarrier_wait(shared_address(&s.accumulator_empty[wg][warp]), parity ^ 1);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (i >= boxes) break;
        uint32_t words[16];
        pack_subtile<typename Tile::T>(words, &d[32 * i]);
        fill_subtile(shared_address(s.staging[wg]) + i * SUBTILE_BYTES, 16 * warp, words);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&s.accumulator_full[wg][warp]));
}

/* The score of a tile's row; 0 if there is none. */
__device__ inline float score_of(const DownDgrad &p, const WorkTile &tile, int row) {
    if (row >= tile.num_rows) return 0;
    int64_t r = tile.first_row + row, slot = p.row_slot ? p.row_slot[r] : r;
    if (!p.scores) return 1;
    return (uint64_t)slot < (uint64_t)p.num_slots ? p.scores[slot] : 0;
}

/* A warp of the finisher: four rows at a time, of each of their boxes a chunk a lane. What a lane needs of h it has
 * sent for when it had the same box of the four rows before. */
template <class Tile, FusedMoeLayout layout, typename Act>
__device__ inline void run_epilogue(const DownDgrad &p, DownDgradShared<Tile> &s, int warp,
                                    Act act) {
    using T = typename Tile::T;
    constexpr bool GATED = layout != FUSED_MOE_UNGATED, GATE_UP = layout == FUSED_MOE_INTERLEAVED;
    constexpr int WIDTH = GATE_UP ? 2 : 1; /* numbers of h side by side for one of g */
    int lane = threadIdx.x % 32, second = GATE_UP ? CHUNK : p.F;
    float alpha = (float)p.activation.alpha, limit = (float)p.activation.limit;
    TileReader<typename Tile::Queue> reader(s.queue);
    uint32_t parity = 0;
    for (WorkTile tile = reader.next(); tile.expert >= 0; tile = reader.next(), parity ^= 1) {
        /* the lane's first row and column; of its rows and boxes, how many are there */
        int row = 16 * warp + lane / 8, column = tile.first_column + lane % 8 * CHUNK;
        int rows = tile.num_rows - row;
        int boxes = min(tile.half_n ? 2 : 4, (p.F - column + SUBTILE - 1) / SUBTILE);
        int64_t r = tile.first_row + row, in_h = r * p.H + WIDTH * column;
        const T *h = (const T *)p.h + in_h, *h_second = h + second;
        T *dh = (T *)p.dh + in_h, *a_scaled = (T *)p.a_scaled + r * p.F + column;
        /* Past the last row nothing is sent, so that nothing is on its way when the CTA ends. */
        auto prefetch_h = [&](int box, bool there) {
            if (there && box < boxes) {
                cp_async(shared_address(&s.h[warp][box][0][lane]), h + WIDTH * SUBTILE * box, true);
                if (GATED)
                    cp_async(shared_address(&s.h[warp][box][1][lane]),
                             h_second + WIDTH * SUBTILE * box, true);
            }
            cp_async_commit_group();
        };
        for (int box = 0; box < 4; box++) prefetch_h(box, rows > 0);
        float of_lane = score_of(p, tile, lane / 16 * SUBTILE + 16 * warp + lane % 16);
#pragma unroll 1
        for (int i = 0; i < 8; i++) {
            int wg = i / 4, on = i % 4 < 3 ? 4 : SUBTILE - 12; /* rows to the next four */
            if (i % 4 == 0) mbarrier_wait(shared_address(&s.accumulator_full[wg][warp]), parity);
            int line = 16 * warp + 4 * (i % 4) + lane / 8;
            uint32_t g_line =
                shared_address(s.staging[wg]) + 128 * line + 16 * (lane % 8 ^ line % 8);
            float score = __shfl_sync(~0u, of_lane, 4 * i + lane / 8), dot = 0;
            h += on * p.H, h_second += on * p.H;
#pragma unroll
            for (int box = 0; box < 4; box++) {
                Pack<T> packed;
                PackedPair<T> pair;
                cp_async_wait_group<3>();
                packed.words[0] = ld_shared_v4(g_line + box * SUBTILE_BYTES);
                pair.low.words[0] = ld_shared_v4(shared_address(&s.h[warp][box][0][lane]));
                pair.high.words[0] = ld_shared_v4(shared_address(&s.h[warp][box][1][lane]));
                prefetch_h(box, rows > on && i < 7);
                if (rows <= 0 || box >= boxes) continue;
                Pair<float> q, d;
                float g[CHUNK], da[CHUNK], a[CHUNK];
#pragma unroll
                for (int n = 0; n < CHUNK; n += 2) to_accums(g[n], g[n + 1], packed.v + n);
                pair.unpack(q, layout);
#pragma unroll
                for (int n = 0; n < CHUNK; n++) da[n] = score * g[n];
                activate_backward<T>(act, a, d, da, q, alpha, limit, GATED);
#pragma unroll
                for (int n = 0; n < CHUNK; n++) dot += g[n] * a[n], a[n] *= score;
                if (p.dh) store_pair<T>(dh, d, layout, p.F, SUBTILE * box, CHUNK, true);
                if (p.a_scaled) store_chunk<T>(a_scaled + SUBTILE * box, a, CHUNK, true);
            }
            if (i % 4 == 3) {
                __syncwarp();
                if (lane == 0) mbarrier_arrive(shared_address(&s.accumulator_empty[wg][warp]));
            }
            if (p.partials) {
                dot = warp_sum(dot, 8);
                if (lane % 8 == 0 && rows > 0)
                    p.partials[r * p.gemm.schedule.num_columns + tile.first_column / Tile::BN] =
                        dot;
            }
            r += on, rows -= on, dh += on * p.H, a_scaled += on * p.F;
        }
    }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    hopper_down_dgrad_kernel(const __grid_constant__ DownDgrad p) {
    using T = typename Tile::T;
    const Gemm &gemm = p.gemm;
    auto &s = static_cast<DownDgradShared<Tile> &>(prologue<Tile>());
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), wg = warp / 4 - 1; /* -1: the producer */
    if (threadIdx.x < 8) {
        mbarrier_init(shared_address(&s.accumulator_full[0][threadIdx.x]), 1);
        mbarrier_init(shared_address(&s.accumulator_empty[0][threadIdx.x]), 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (wg < 0) {
        setmaxnreg_dec<Tile::PRODUCER_REGISTERS>();
        if (warp == 3)
            fetch_tiles(gemm.schedule, s.queue, gemm.row_token, gemm.T);
        else
            load_gather<Tile>(gemm, s);
    } else if (wg < Tile::WARPGROUPS) {
        setmaxnreg_inc<Tile::CONSUMER_REGISTERS>();
        TileReader<typename Tile::Queue> reader(s.queue);
        typename Tile::Stages pipe;
        uint32_t parity = 0;
        for (WorkTile tile = reader.next(); tile.expert >= 0; tile = reader.next(), parity ^= 1) {
            float d[128];
            auto nothing = [](auto) {};
            if (tile.half_n)
                run_mainloop<Tile, Tile::BN / 2, 0>(d, s, pipe, gemm.num_k_tiles[0], wg, nothing);
            else
                run_mainloop<Tile, Tile::BN, 0>(d, s, pipe, gemm.num_k_tiles[0], wg, nothing);
            store_accumulators<Tile>(s, wg, warp % 4, parity, tile.half_n ? 2 : 4, d);
        }
    } else {
        setmaxnreg_dec<Tile::EPILOGUE_REGISTERS>();
        with_activation<T>(p.activation.kind, [&p, &s, warp](auto act) {
            if (p.layout == FUSED_MOE_UNGATED)
                run_epilogue<Tile, FUSED_MOE_UNGATED>(p, s, warp % 4, act);
            else if (p.layout == FUSED_MOE_INTERLEAVED)
                run_epilogue<Tile, FUSED_MOE_INTERLEAVED>(p, s, warp % 4, act);
            else
                run_epilogue<Tile, FUSED_MOE_HALVES>(p, s, warp % 4, act);
        });
    }
    if (p.dh) zero_rows_past(gemm.schedule, (T *)p.dh, p.H);
    if (p.a_scaled) zero_rows_past(gemm.schedule, (T *)p.a_scaled, p.F);
}

/* --- launcher ----------------------------------------------------------------------------------------------- */

int64_t hopper_partials_of_row(int64_t F) {
    return ceil_div(F, 4 * SUBTILE);
}

size_t hopper_down_dgrad_workspace(const FusedMoeDownDgrad &p) {
    size_t partials = p.dscores ? p.row_map.R * hopper_partials_of_row(p.F) * sizeof(float) : 0;
    return tile_schedule_workspace(p.row_map.E) + partials;
}

float *hopper_partials(const FusedMoeDownDgrad &p) {
    return p.dscores ? (float *)((char *)p.workspace + tile_schedule_workspace(p.row_map.E))
                     : nullptr;
}

template <class Tile>
static int run(const FusedMoeDownDgrad &p, void *stream) {
    using T = typename Tile::T;
    const FusedMoeRowMap &rows = p.row_map;
    DownDgrad q = {};
    q.h = p.h;
    q.scores = (const float *)p.scores;
    q.row_slot = rows.row_slot;
    q.dh = p.dh;
    q.a_scaled = p.a_scaled;
    q.partials = hopper_partials(p);
    q.num_slots = rows.T * rows.K;
    q.F = (int32_t)p.F;
    q.H = p.layout == FUSED_MOE_UNGATED ? q.F : 2 * q.F;
    q.layout = p.layout;
    q.activation = p.activation;

    Gemm &gemm = q.gemm;
    gemm.x = p.dout;
    gemm.row_token = rows.row_token;
    gemm.T = rows.T;
    gemm.k = (int32_t)p.D;
    gemm.num_k_tiles[0] = (int32_t)ceil_div(p.D, K_TILE);
    int status = weight_map<T>(&gemm.b[0], p.w2, Tile::B_MAJOR, p.w2.stride_in, p.w2.stride_out,
                               rows.E, p.F, p.D);
    if (status != FUSED_MOE_OK) return status;
    gemm.schedule.R = rows.R;
    gemm.schedule.E = rows.E;
    gemm.schedule.tile_columns = Tile::BN;
    gemm.schedule.num_columns = (int32_t)hopper_partials_of_row(p.F);
    gemm.schedule.last_is_half_n = (p.F - 1) % Tile::BN < Tile::BN / 2;
    gemm.schedule.order = schedule_for(Tile::BM, 0);
    gemm.schedule.order.skinny_rows = 0;
    const Result none[MAX_RESULTS] = {};
    status = make_tile_schedule(&gemm.schedule, rows.ends, none, p.workspace, stream);
    if (status != FUSED_MOE_OK) return status;
    return launch_gemm<Tile, DownDgradShared<Tile>>(hopper_down_dgrad_kernel<Tile>, q, stream);
}

int hopper_down_dgrad(const FusedMoeDownDgrad &p, void *stream) {
    return with_half(p.dtype, [&](auto t) {
        using T = decltype(t);
        if (p.w2.stride_out == 1) return run<DownDgradTile<T, MAJOR_K>>(p, stream);
        return run<DownDgradTile<T, MAJOR_MN>>(p, stream);
    });
}

} // namespace fused_moe
