/* Both sides of experts of few rows, without gradients, in one launch: up_gate, the down GEMM and, with few
 * slots, the combine. experts.cu has it for dense weights, quantized_experts.cu for quantised ones.
 *
 * With few rows the experts take as long as reading their weights. Between two launches the memory has
 * nothing to do, and little in the last wave of each. So one persistent grid has the work tiles of both
 * GEMMs, up_gate's first, and reads on. Tiles, stages and arithmetic are those of the GEMMs that compute few
 * rows by themselves: the bits are those of up_gate, grouped_mm and unpermute.
 *
 *   claim     A CTA claims its next tile from one counter while the last loads of the tile before it are
 *             issued. No tile waits in a queue while another CTA has none. The first tiles go to one CTA of
 *             each SM, since few tiles on a part of the SMs do not get all of the memory's rate.
 *   up_gate   Its warps store a, and count their rows in stored_a[expert].
 *   down      Weights are loaded at once, as far as stages are free, and a when all of the expert's is
 *             stored.
 *   combine   Its warps store y, and count their rows in stored_y[columns]. The warp that stores the last of
 *             some columns' rows combines them for all tokens.
 *
 * In a captured graph nothing zeroes memory between two replays. So counters begin as anything: CTA 0 zeroes
 * them, and then writes the launch's tag, for which the others wait while they sort the slots. The last CTA
 * to exit erases it for the next replay. A tag is a random number of 64 bits that no two launches share.
 *
 * No deadlock: tiles are claimed in order, so a down tile waits only for tiles that running CTAs hold. The
 * launch ends on any number of free SMs if CTA 0 is among the first: GPUs start CTAs in the order of their
 * index, though no document promises it (tests/cuda/test_held_sms.py).
 *
 * The weights are a type, Kind, that gives
 *   Config         of up_gate; Config::Down, of which BN and the weight are the down GEMM's
 *   Up, Down       the parameters of both GEMMs: gemm, and what their epilogues read
 *   WARP_SUBTILES  subtiles of an N tile of the down GEMM in which a consumer warp has sixteen columns
 *   load_up(..)    issues the loads of a stage of up_gate's weights
 *   Compute        of a consumer warp: up(tile), down(tile) run the MMAs and store
 *   has_columns    whether a consumer has columns of a tile of the down GEMM, which may be a half-N tile */
#pragma once

#include "../common/combine.cuh"
#include "gemm.cuh"
#include "launch.cuh"

namespace fused_moe {
namespace sm90 {

/* --- parameters ----------------------------------------------------------------------------------------- */

constexpr int MAX_SMS = FUSED_MOE_MAX_CTAS / 2;

typedef struct { /* in the workspace, before stored_a and stored_y */
    uint64_t tag;
    uint32_t exited;                      /* CTAs that claim no more */
    alignas(128) uint32_t claimed;        /* tiles */
    alignas(128) uint32_t on_sm[MAX_SMS]; /* CTAs that have started */
} Progress;

template <class Kind>
struct Experts {
    typename Kind::Up up;
    typename Kind::Down down;
    FusedMoeUnpermute combine; /* out NULL: another launch's */
    Progress *progress;
    uint64_t tag;
    uint32_t *stored_a; /* [E]               rows stored: each warp of each N tile adds a tile's rows */
    uint32_t *stored_y; /* [N tiles, warps]  rows stored of the columns that a warp of an N tile has */
    int32_t num_counters;
    int32_t down_columns; /* columns per N tile of the down GEMM: BN or BN / 2 */
};

struct alignas(16) ExpertsTile : WorkTile {
    int32_t is_down;
    int32_t a_rows;     /* what stored_a counts to */
    int32_t a_is_there; /* all of it */
};

constexpr int CLAIM_AHEAD = 3; /* stages left to load when the next tile is claimed */

/* The queue of a configuration for experts. */
template <class Config>
using ExpertsQueue = TileQueue<ExpertsTile, Config::CONSUMER_WARPS + Config::LOAD_WARPS, Config::BM>;

template <class Config>
struct ExpertsShared : PlanningShared<Config> {
    Barrier<OneThread> claims; /* the next tile may be claimed */
    uint32_t first_claim;      /* by the loading warp, while the fetching warp sorts */
};

/* --- the fetching warp ---------------------------------------------------------------------------------- */

/* The first CTA's: zeroes the counters. */
template <class Kind>
__device__ inline void zero_counters(const Experts<Kind> &p) {
    int lane = threadIdx.x % 32;
    for (int i = lane; i < p.num_counters; i += 32) p.stored_a[i] = 0;
    for (int i = lane; i < MAX_SMS; i += 32) p.progress->on_sm[i] = 0;
    if (lane == 0) p.progress->exited = p.progress->claimed = 0;
    __syncwarp();
    if (lane == 0) st_release_gpu(&p.progress->tag, p.tag);
}

/* After the CTA's last claim, by one thread. */
template <class Kind>
__device__ inline void exit_claims(const Experts<Kind> &p) {
    if (atomicAdd(&p.progress->exited, 1u) == gridDim.x - 1) p.progress->tag = 0;
}

template <class Kind>
__device__ inline void fetch_experts_tiles(const Experts<Kind> &p, ExpertsShared<typename Kind::Config> &s) {
    using Config = typename Kind::Config;
    const TileSource &up = p.up.gemm.tiles, &down = p.down.gemm.tiles;
    const bool plans = !up.offs;
    if (plans) make_slot_plan(p.up.gemm.unplanned, s.plan);
    auto num_tiles = [&](const TileSource &source) {
        return plans ? fused_moe_num_slot_tiles(&s.plan, &source.order)
                     : fused_moe_num_work_tiles(source.schedule, source.E, (int32_t)source.R, &source.order);
    };
    auto set = [&](const TileSource &source, uint32_t index, ExpertsTile &tile) {
        FusedMoeWorkTile work = plans ? fused_moe_slot_tile(&s.plan, &source.order, index)
                                      : fused_moe_work_tile(source.schedule, source.offs, source.E,
                                                            (int32_t)source.R, &source.order, index);
        set_tile(source, work, tile);
        int32_t rows =
            plans ? work.num_rows : fused_moe_expert_rows(source.offs, work.expert, (int32_t)source.R).num;
        tile.a_rows = Config::CONSUMER_WARPS * rows * up.order.num_n_tiles;
    };
    auto token_of = [&](const ExpertsTile &tile, int i) {
        if (tile.is_down) return i < tile.num_rows ? tile.first_row + i : 0;
        if (plans)
            return i < tile.num_rows
                       ? fused_moe_slot_of_row(&s.plan, tile.first_row + i) / p.up.gemm.unplanned.K
                       : 0;
        return token_of_row(p.up.gemm, tile, i);
    };
    const uint32_t num_up = num_tiles(up), all = num_up + num_tiles(down);
    uint32_t phase = 0;
    TileWriter<typename Config::Queue> writer(s.queue);
    s.claims.wait(phase);
    for (uint32_t index = s.first_claim; index < all;) {
        ExpertsTile tile = {};
        tile.is_down = index >= num_up;
        if (tile.is_down) {
            set(down, index - num_up, tile);
            if (p.down_columns < Config::Down::BN) tile.half_n = 1;
            tile.a_is_there = ld_acquire_gpu(&p.stored_a[tile.expert]) >= (uint32_t)tile.a_rows;
        } else {
            set(up, index, tile);
        }
        for_each_part<Config::BM>(tile, [&](auto &part) {
            writer.publish(part, token_of);
            phase ^= 1;
            s.claims.wait(phase);
        });
        uint32_t claimed = FUSED_MOE_CLAIM(&p.progress->claimed);
        index = FUSED_MOE_BROADCAST(claimed, 0);
    }
    ExpertsTile none = {{-1}};
    writer.publish(none, token_of);
    if (plans && blockIdx.x == gridDim.x - 1) write_slot_plan(p.up.gemm.unplanned, s.plan);
    if (threadIdx.x % 32 == 0) exit_claims(p);
}

/* --- the loading warps ---------------------------------------------------------------------------------- */

/* The first tile's claim, by one thread. A second CTA of an SM gives the first ones of all SMs a moment.
 * (Acquiring loads do no harm here: nothing of the tiles is in flight yet.) */
template <class Kind>
__device__ inline uint32_t claim_first(const Experts<Kind> &p) {
    Progress &progress = *p.progress;
    wait_for_value(&progress.tag, p.tag);
    bool is_second = atomicAdd(&progress.on_sm[smid() % MAX_SMS], 1u) > 0;
    for (int i = 0; is_second && i < 4 && ld_acquire_gpu(&progress.claimed) < gridDim.x / 2; i++) {
    }
    return atomicAdd(&progress.claimed, 1u);
}

/* The three warps that load a tile: all gather rows of x or a, and those of loads_weight() load
 * weights by TMA. */
template <class Kind>
class Loader {
    using Config = typename Kind::Config;
    using Rows = GatherRows<Config>;
    static constexpr int LOAD_BARRIER = WARPGROUP_BARRIER + Config::CONSUMERS;
    const Experts<Kind> &p;
    ExpertsShared<Config> &s;
    typename Config::Pipeline pipe;
    Rows rows;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);

    /* Prefetches weights into the stages, as they become free, and then waits until a is there. Returns the
     * number of stages whose weights are loaded. */
    __device__ int wait_for_a(const ExpertsTile &tile) {
        using Weight = typename Config::Down::Weight;
        const auto &gemm = p.down.gemm;
        const int ahead = min(Config::STAGES, gemm.num_k_tiles[0]);
        if (warp == 0) {
            auto next = pipe;
            for (int stage = 0; stage < ahead; stage++, next.advance()) {
                s.empty[next.index].wait(next.phase ^ 1);
                if (elect_sync()) {
                    auto &full = s.full[next.index];
                    full.expect(Weight::bytes(gemm, tile));
                    Weight::load(gemm, shared_address(s.stage[next.index].b), full.address(), 0, stage, tile);
                }
                __syncwarp();
            }
            wait_for_count(&p.stored_a[tile.expert], (uint32_t)tile.a_rows);
            __syncwarp();
        }
        barrier_sync(LOAD_BARRIER, 32 * Config::LOAD_WARPS);
        return ahead;
    }

    /* A tile whose rows are rows token[i] of gemm.x. One thread calls load_weight(stage, where, barrier). */
    template <class Weight, class Gemm, typename LoadWeight>
    __device__ __forceinline__ void load(const Gemm &gemm, const int32_t (&token)[Rows::MOST],
                                         const ExpertsTile &tile, LoadWeight load_weight) {
        const int num_stages = gemm.num_k_tiles[0], claim_at = max(num_stages - CLAIM_AHEAD, 0);
        rows.point(gemm.x, gemm.k, [&](int i) { return token[i]; });
        rows.set_num(tile.num_rows);
        const int ahead = tile.is_down && !tile.a_is_there ? wait_for_a(tile) : 0;
        gather_tile<false>(s, pipe, rows, num_stages, warp, [&](int stage, uint32_t b, auto &full) {
            if (stage >= ahead) {
                full.expect(Weight::bytes(gemm, tile));
                load_weight(stage, b, full.address());
            }
            if (stage == claim_at) s.claims.arrive();
        });
    }

  public:
    __device__ Loader(const Experts<Kind> &p, ExpertsShared<Config> &s) : p(p), s(s) {}

    __device__ void run() {
        using Down = typename Config::Down::Weight;
        TileReader<typename Config::Queue> reader(s.queue);
        if (threadIdx.x == 0) {
            s.first_claim = claim_first(p);
            s.claims.arrive();
        }
        __syncwarp();
        for (;;) {
            const int32_t *tokens = reader.wait_for_tokens();
            int32_t token[Rows::MOST];
#pragma unroll
            for (int i = 0; i < Rows::MOST; i++) token[i] = tokens[rows.row(i)];
            const ExpertsTile tile = reader.next();
            if (tile.expert < 0) return;
            if (tile.is_down)
                load<Down>(p.down.gemm, token, tile, [&](int stage, uint32_t b, uint32_t full) {
                    Down::load(p.down.gemm, b, full, 0, stage, tile);
                });
            else
                load<typename Config::Weight>(
                    p.up.gemm, token, tile,
                    [&](int stage, uint32_t b, uint32_t full) { Kind::load_up(p.up, b, full, stage, tile); });
        }
    }
};

/* --- consumers ------------------------------------------------------------------------------------------ */

/* The tokens' sums of the columns that this warp's threads have of an N tile: sixteen of each of its
 * subtiles, from first_column on. */
template <class Kind>
__device__ inline void combine_columns(const FusedMoeUnpermute &p, const FusedMoeSlotPlan &plan,
                                       int first_column) {
    using T = typename Kind::Config::Out;
    constexpr int CHUNKS = 2 * Kind::WARP_SUBTILES, IN_FLIGHT = 8;
    const int K = (int)p.row_map.K, D = (int)p.D;
    for (int i = threadIdx.x % 32; i < (int)p.row_map.T * CHUNKS; i += 32) {
        int t = i / CHUNKS, chunk = i % CHUNKS;
        int column = first_column + chunk / 2 * SUBTILE + chunk % 2 * CHUNK;
        if (column >= D) continue;
        float sum[CHUNK] = {};
        for (int k = 0; k < K; k += IN_FLIGHT) {
            Pack<T> row[IN_FLIGHT];
            float score[IN_FLIGHT];
#pragma unroll
            for (int j = 0; j < IN_FLIGHT; j++) {
                int slot = t * K + k + j, r = k + j < K ? plan.slot_row[slot] : -1;
                score[j] = r < 0 ? 0 : p.scores ? ((const float *)p.scores)[slot] : 1;
                row[j].words[0] = ld_global_v4((const T *)p.rows + (int64_t)r * D + column, r >= 0);
            }
#pragma unroll
            for (int j = 0; j < IN_FLIGHT; j++)
                if (k + j < K) add_row(sum, score[j], row[j]);
        }
        if (p.shared) {
            Pack<T> shared;
            shared.words[0] = ld_global_v4((const T *)p.shared + (int64_t)t * D + column, true);
            add_row(sum, shared_score<float>(p.shared_gate, t), shared);
        }
        store_chunk<T>((T *)p.out + (int64_t)t * D + column, sum, CHUNK, true);
    }
}

template <class Kind>
__device__ inline void compute_experts(const Experts<Kind> &p, ExpertsShared<typename Kind::Config> &s,
                                       int wg, int warp) {
    using Config = typename Kind::Config;
    TileReader<typename Config::Queue> reader(s.queue);
    typename Kind::Compute compute(p, s, wg, warp);
    const bool is_counter = threadIdx.x % 32 == 0;
    const int of_warp = Kind::WARP_SUBTILES * SUBTILE * wg + 16 * warp; /* its first column of an N tile */
    ExpertsTile tile = reader.next();                                   /* up_gate's come first */
    for (; tile.expert >= 0 && !tile.is_down; tile = reader.next()) {
        compute.up(tile);
        __syncwarp();
        if (is_counter) red_add_release_gpu(&p.stored_a[tile.expert], tile.num_rows);
    }
    for (; tile.expert >= 0; tile = reader.next()) {
        compute.down(tile);
        if (!p.combine.out || !Kind::has_columns(tile, wg)) continue;
        __syncwarp();
        int n_tile = tile.first_column / p.down_columns;
        uint32_t *stored = p.stored_y + n_tile * Config::CONSUMER_WARPS + 4 * wg + warp;
        uint32_t before = 0;
        if (is_counter) before = atom_add_acq_rel_gpu(stored, tile.num_rows);
        before = __shfl_sync(~0u, before, 0);
        __syncwarp(); /* all lanes see what the counting one acquired */
        if (before + tile.num_rows == (uint32_t)s.plan.first_row[s.plan.num_experts])
            combine_columns<Kind>(p.combine, s.plan, tile.first_column + of_warp);
    }
    if (p.combine.out && s.plan.num_experts == 0) /* no slot has a row, so there was no tile */
        for (int n = blockIdx.x; n < p.down.gemm.tiles.order.num_n_tiles; n += gridDim.x)
            if (of_warp < p.down_columns)
                combine_columns<Kind>(p.combine, s.plan, n * p.down_columns + of_warp);
}

/* --- kernel --------------------------------------------------------------------------------------------- */

template <class Kind>
__global__ void __launch_bounds__(Kind::Config::THREADS, Kind::Config::CTAS_PER_SM)
    experts_kernel(const __grid_constant__ Experts<Kind> p) {
    using Config = typename Kind::Config;
    auto &s = static_cast<ExpertsShared<Config> &>(prologue<Config>());
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) {
        s.claims.init();
        fence_mbarrier_init();
    }
    __syncthreads();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (warp >= 4) {
        if constexpr (Config::CONSUMER_REGISTERS > 0) setmaxnreg_inc<Config::CONSUMER_REGISTERS>();
        compute_experts(p, s, warp / 4 - 1, warp % 4);
        return;
    }
    if constexpr (Config::CONSUMER_REGISTERS > 0) setmaxnreg_dec<Config::PRODUCER_REGISTERS>();
    if (warp == 3) {
        if (blockIdx.x == 0) zero_counters(p);
        fetch_experts_tiles(p, s);
    } else {
        Loader<Kind>(p, s).run();
    }
}

/* --- host ----------------------------------------------------------------------------------------------- */

/* A tag that no other launch has. */
uint64_t next_experts_tag();

/* At most: N tiles of 64 columns, with eight warps. */
inline size_t experts_workspace(const FusedMoeExperts &p) {
    return sizeof(Progress) + (p.down.E + 8 * ceil_div(p.down.M, SUBTILE)) * sizeof(uint32_t);
}

/* Runs q, in which weights and epilogues are set, and up_gate's rows. */
template <class Kind>
int launch_experts(Experts<Kind> &q, const FusedMoeExperts &p, int down_columns, void *stream) {
    using Config = typename Kind::Config;
    const FusedMoeGroupedMM &d = p.down;
    auto &down = q.down.gemm;
    down.x = d.a;
    down.T = d.R;
    down.k = (int32_t)d.N[0];
    down.num_k_tiles[0] = (int32_t)ceil_div(d.N[0], Config::K_TILES * K_TILE<typename Config::Operand>);
    down.tiles = tile_source(d.offs, d.schedule, d.R, d.E, d.M, down_columns, nullptr);
    down.tiles.last_is_half_n = down_columns > SUBTILE && (d.M - 1) % down_columns < down_columns / 2;
    q.down_columns = down_columns;
    /* as the plan has them: of other tiles some would never be stored, and be waited for */
    q.up.gemm.tiles.order.tile_rows = down.tiles.order.tile_rows = Config::BM;
    if (p.up.unplanned) q.combine = p.combine;
    q.progress = (Progress *)p.workspace.data;
    q.tag = next_experts_tag();
    q.stored_a = (uint32_t *)(q.progress + 1);
    q.stored_y = q.stored_a + d.E;
    static_assert(Config::CONSUMER_WARPS <= 8);
    q.num_counters = (int32_t)(d.E + Config::CONSUMER_WARPS * ceil_div(d.M, down_columns));
    return launch_persistent<Config, ExpertsShared<Config>, experts_kernel<Kind>>(q, stream);
}

/* Whether one launch takes a call of two GEMMs that the tier takes; up_columns: hidden columns of a tile. */
inline FusedMoeReason together_reason(const FusedMoeExperts &p, int up_columns) {
    const FusedMoeGroupedMM &d = p.down;
    if (!fused_moe_few_rows_together(d.R, d.E) || schedule_override().no_tails) return FUSED_MOE_MANY_ROWS;
    bool combines = p.up.unplanned;
    if (combines && (!is_aligned(p.combine.out) || !is_aligned(p.combine.shared))) return FUSED_MOE_UNALIGNED;
    /* both GEMMs' tiles, and rows counted by each warp of an N tile */
    int64_t n_tiles = ceil_div(p.up.F, up_columns) + ceil_div(d.M, SUBTILE);
    return (fused_moe_max_row_tiles((int32_t)d.R, d.E, 16) + 4 * d.R) * n_tiles < INT32_MAX
               ? FUSED_MOE_RUNS
               : FUSED_MOE_TOO_LARGE;
}

} // namespace sm90
} // namespace fused_moe
