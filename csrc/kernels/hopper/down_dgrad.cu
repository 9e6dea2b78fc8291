/* down_dgrad on the Hopper engine: g = dout[row_token] w2, and from it and h
 *   dh = dact(s g, h),  a_scaled = s a,  partial sums of <g, a>.
 *
 * For each number of g the epilogue reads two and writes three, and computes as long as the product of a short k. So
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
    Product product;
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
    static constexpr int CONSUMER_REGISTERS = 160, FINISHER_REGISTERS = 120; /* of 512 x 128 */
    static constexpr int OUT_BYTES = 4 * BOX_BYTES;                          /* g of 64 rows */
    using Base = Tile<T, B_MAJOR, true>;
    static_assert(Base::PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS + FINISHER_REGISTERS <= 4 * 128,
                  "or it hangs");
    using Items = ItemRing<Base::CONSUMER_WARPS + Base::COPYING_WARPS + 4, Base::BM>;
    using Stages = Cursor<STAGES>;
};

template <class Tile>
struct DownDgradShared : Shared<Tile> {
    static constexpr int AHEAD = 4; /* chunks of h on their way, for every finishing thread */
    uint4 h[4][AHEAD][2][32];
    uint64_t handed[Tile::WARPGROUPS][4], taken[Tile::WARPGROUPS][4]; /* by warp */
};

/* A consumer's tile, of `boxes` boxes, to the finisher. */
template <class Tile>
__device__ inline void hand_over(DownDgradShared<Tile> &s, int wg, int warp, uint32_t parity,
                                 int boxes, const float (&d)[128]) {
    mbarrier_wait(shared_address(&s.taken[wg][warp]), parity ^ 1);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (i >= boxes) break;
        uint32_t words[16];
        pack_box<typename Tile::T>(words, &d[32 * i]);
        fill_box(shared_address(s.out[wg]) + i * BOX_BYTES, 16 * warp, words);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&s.handed[wg][warp]));
}

/* A warp of the finisher: four rows at a time, of each of their boxes a chunk a lane. What a lane needs of h it has
 * sent for four chunks before. */
template <class Tile, typename Act>
__device__ inline void finish_tiles(const DownDgrad &p, DownDgradShared<Tile> &s, int warp,
                                    Act act) {
    using T = typename Tile::T;
    int lane = threadIdx.x % 32, chunk = lane % 8;
    bool gated = p.layout != FUSED_MOE_UNGATED, interleaved = p.layout == FUSED_MOE_INTERLEAVED;
    T *dh = (T *)p.dh, *a_scaled = (T *)p.a_scaled;
    float alpha = (float)p.activation.alpha, limit = (float)p.activation.limit;
    Receiver<typename Tile::Items> receiver(s.items);
    uint32_t parity = 0;
    for (Item item = receiver.next(); item.expert >= 0; item = receiver.next(), parity ^= 1) {
        int boxes = item.narrow ? 2 : 4, first = item.first_column + chunk * CHUNK;
        /* the tile's row of number i of the warp's 32 */
        auto row_of = [&](int i) { return i / 16 * BOX + 16 * warp + i % 16; };
        float of_lane = 0;
        if (row_of(lane) < item.num_rows) {
            int64_t r = item.first_row + row_of(lane), slot = p.row_slot ? p.row_slot[r] : r;
            if (!p.scores)
                of_lane = 1;
            else if ((uint64_t)slot < (uint64_t)p.num_slots)
                of_lane = p.scores[slot];
        }
        auto inside = [&](int row, int box) {
            return row < item.num_rows && box < boxes && first + box * BOX < p.F;
        };
        /* Past the last row nothing is sent, so that nothing is on its way when the CTA ends: the next one on this SM,
         * of another stream perhaps, has the same shared memory. */
        auto send_for = [&](int i, int box) {
            int row = row_of(i + lane / 8), j = first + box * BOX;
            bool there = inside(row, box);
            const T *h = (const T *)p.h + (int64_t)(item.first_row + row) * p.H;
            if (i < 32) {
                cp_async(shared_address(&s.h[warp][box][0][lane]), h + (interleaved ? 2 * j : j),
                         there);
                if (gated)
                    cp_async(shared_address(&s.h[warp][box][1][lane]),
                             h + (interleaved ? 2 * j + CHUNK : p.F + j), there);
            }
            cp_async_commit_group();
        };
        for (int box = 0; box < 4; box++) send_for(0, box);
#pragma unroll 1
        for (int i = 0; i < 32; i += 4) {
            int wg = i / 16, row = row_of(i + lane / 8);
            if (i % 16 == 0) mbarrier_wait(shared_address(&s.handed[wg][warp]), parity);
            float score = __shfl_sync(~0u, of_lane, i + lane / 8), dot = 0;
            int64_t r = item.first_row + row;
            uint32_t g_row = shared_address(s.out[wg]) + 128 * (row % BOX) + 16 * (chunk ^ row % 8);
#pragma unroll 1
            for (int box = 0; box < 4; box++) {
                Pack<T> packed;
                PackedPair<T> h;
                cp_async_wait_group<3>();
                packed.words[0] = ld_shared_v4(g_row + box * BOX_BYTES);
                h.low.words[0] = ld_shared_v4(shared_address(&s.h[warp][box][0][lane]));
                h.high.words[0] = ld_shared_v4(shared_address(&s.h[warp][box][1][lane]));
                send_for(i + 4, box);
                if (!inside(row, box)) continue;
                Pair<float> q, d;
                float g[CHUNK], da[CHUNK], a[CHUNK];
#pragma unroll
                for (int n = 0; n < CHUNK; n += 2) to_reals(g[n], g[n + 1], packed.v + n);
                h.unpack(q, p.layout);
#pragma unroll
                for (int n = 0; n < CHUNK; n++) da[n] = score * g[n];
                activate_backward<T>(act, a, d, da, q, alpha, limit, gated);
#pragma unroll
                for (int n = 0; n < CHUNK; n++) dot += g[n] * a[n], a[n] *= score;
                int j = first + box * BOX;
                if (dh) store_pair<T>(dh + r * p.H, d, p.layout, p.F, j, CHUNK, true);
                if (a_scaled) store_chunk<T>(a_scaled + r * p.F + j, a, CHUNK, true);
            }
            if (i % 16 == 12) {
                __syncwarp();
                if (lane == 0) mbarrier_arrive(shared_address(&s.taken[wg][warp]));
            }
            if (p.partials) {
                dot = warp_sum(dot, 8);
                if (chunk == 0 && row < item.num_rows)
                    p.partials[r * p.product.plan.num_columns + item.first_column / Tile::BN] = dot;
            }
        }
    }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    hopper_down_dgrad_kernel(const __grid_constant__ DownDgrad p) {
    using T = typename Tile::T;
    const Product &product = p.product;
    auto &s = static_cast<DownDgradShared<Tile> &>(begin<Tile>());
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), wg = warp / 4 - 1; /* -1: the producer */
    if (threadIdx.x < 8) {
        mbarrier_init(shared_address(&s.handed[0][threadIdx.x]), 1);
        mbarrier_init(shared_address(&s.taken[0][threadIdx.x]), 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (wg < 0) {
        setmaxnreg_dec<Tile::PRODUCER_REGISTERS>();
        if (warp == 3)
            draw(product.plan, s.items, product.row_token, product.T);
        else
            copy_gathered<Tile>(product, s);
    } else if (wg < Tile::WARPGROUPS) {
        setmaxnreg_inc<Tile::CONSUMER_REGISTERS>();
        Receiver<typename Tile::Items> receiver(s.items);
        typename Tile::Stages from;
        uint32_t parity = 0;
        for (Item item = receiver.next(); item.expert >= 0; item = receiver.next(), parity ^= 1) {
            float d[128];
            auto nothing = [](auto) {};
            if (item.narrow)
                multiply<Tile, Tile::BN / 2, 0>(d, s, from, product.steps[0], wg, nothing);
            else
                multiply<Tile, Tile::BN, 0>(d, s, from, product.steps[0], wg, nothing);
            hand_over<Tile>(s, wg, warp % 4, parity, item.narrow ? 2 : 4, d);
        }
    } else {
        setmaxnreg_dec<Tile::FINISHER_REGISTERS>();
        with_activation<T>(p.activation.kind,
                           [&](auto act) { finish_tiles<Tile>(p, s, warp % 4, act); });
    }
    if (p.dh) zero_rows_past(product.plan, (T *)p.dh, p.H);
    if (p.a_scaled) zero_rows_past(product.plan, (T *)p.a_scaled, p.F);
}

/* --- launcher ----------------------------------------------------------------------------------------------- */

int64_t hopper_partials_of_row(int64_t F) {
    return ceil_div(F, 4 * BOX);
}

size_t hopper_down_dgrad_workspace(const FusedMoeDownDgrad &p) {
    size_t partials = p.dscores ? p.plan.R * hopper_partials_of_row(p.F) * sizeof(float) : 0;
    return plan_workspace(p.plan.E) + partials;
}

float *hopper_partials(const FusedMoeDownDgrad &p) {
    return p.dscores ? (float *)((char *)p.workspace + plan_workspace(p.plan.E)) : nullptr;
}

template <class Tile>
static int run(const FusedMoeDownDgrad &p, void *stream) {
    using T = typename Tile::T;
    const FusedMoePlan &rows = p.plan;
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

    Product &product = q.product;
    product.x = p.dout;
    product.row_token = rows.row_token;
    product.T = rows.T;
    product.k = (int32_t)p.D;
    product.steps[0] = (int32_t)ceil_div(p.D, BOX);
    int status = weight_map<T>(&product.b[0], p.w2, Tile::B_MAJOR, p.w2.stride_in, p.w2.stride_out,
                               rows.E, p.F, p.D);
    if (status != FUSED_MOE_OK) return status;
    product.plan.R = rows.R;
    product.plan.E = rows.E;
    product.plan.tile_columns = Tile::BN;
    product.plan.num_columns = (int32_t)hopper_partials_of_row(p.F);
    product.plan.last_is_narrow = (p.F - 1) % Tile::BN < Tile::BN / 2;
    product.plan.schedule = schedule_for(Tile::BM, 0);
    product.plan.schedule.few_rows = 0;
    const Result none[MAX_RESULTS] = {};
    status = make_plan(&product.plan, rows.ends, none, p.workspace, stream);
    if (status != FUSED_MOE_OK) return status;
    return launch_product<Tile, DownDgradShared<Tile>>(hopper_down_dgrad_kernel<Tile>, q, stream);
}

int hopper_down_dgrad(const FusedMoeDownDgrad &p, void *stream) {
    return with_half(p.dtype, [&](auto t) {
        using T = decltype(t);
        if (p.w2.stride_out == 1) return run<DownDgradTile<T, ALONG_K>>(p, stream);
        return run<DownDgradTile<T, ALONG_LINES>>(p, stream);
    });
}

} // namespace fused_moe
