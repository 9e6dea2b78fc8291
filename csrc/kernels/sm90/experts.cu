/* Both sides of experts of few rows, without gradients, in one launch: up_gate, the down GEMM and, with few
 * slots, the combine.
 *
 * With few rows the experts take as long as reading their weights. Between two launches the memory has
 * nothing to do, and little in the last wave of each. So one persistent grid has the work tiles of both
 * GEMMs, up_gate's first, and reads on. Tiles, stages and arithmetic are FewRowsConfig's (config.cuh): the
 * bits are those of up_gate, grouped_mm and unpermute.
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
 * Where tiles are few each has 64 rows of weights instead of 128 (PAIRED). In up_gate these are 32 of the
 * gate's and 32 of the up's, paired by eights, so that a thread still has both of a column: one box of a map
 * whose third dimension steps from one weight to the other.
 *
 * In a captured graph nothing zeroes memory between two replays. So counters begin as anything: CTA 0 zeroes
 * them, and then writes the launch's tag, for which the others wait while they sort the slots. The last CTA
 * to exit erases it for the next replay. A tag is a random number of 64 bits that no two launches share.
 *
 * No deadlock: tiles are claimed in order, so a down tile waits only for tiles that running CTAs hold. The
 * launch ends on any number of free SMs if CTA 0 is among the first: GPUs start CTAs in the order of their
 * index, though no document promises it (tests/cuda/test_held_sms.py). */
#include <atomic>
#include <random>

#include "../common/combine.cuh"
#include "up_gate.cuh"

namespace fused_moe {
namespace sm90 {
namespace {

/* --- parameters ----------------------------------------------------------------------------------------- */

constexpr int MAX_SMS = FUSED_MOE_MAX_CTAS / 2;

typedef struct { /* in the workspace, before stored_a and stored_y */
    uint64_t tag;
    uint32_t exited;                      /* CTAs that claim no more */
    alignas(128) uint32_t claimed;        /* tiles */
    alignas(128) uint32_t on_sm[MAX_SMS]; /* CTAs that have started */
} Progress;

typedef struct {
    DenseGemm gemm;
    const void *bias; /* [E,M] or NULL */
    void *out;        /* [R,M] y */
    int32_t M;
} Down;

typedef struct {
    UpGate up;
    CUtensorMap paired; /* of paired tiles: the gate's and the up's rows */
    bool up_is_first;   /* its rows come first in a pair                   */
    Down down;
    FusedMoeUnpermute combine; /* out NULL: another launch's */
    Progress *progress;
    uint64_t tag;
    uint32_t *stored_a; /* [E]           rows stored, counted once by each of the four warps of each N tile */
    uint32_t *stored_y; /* [N tiles, 4]  rows stored of the columns that a warp of an N tile has            */
    int32_t num_counters;
} Experts;

struct alignas(16) Tile : WorkTile {
    int32_t is_down;
    int32_t a_rows;     /* what stored_a counts to */
    int32_t a_is_there; /* all of it */
};

constexpr int CLAIM_AHEAD = 3; /* k-tiles left to load when the next tile is claimed */

constexpr int PAIRED_COLUMNS = 32; /* hidden ones of a paired tile */

/* Subtiles of 64 rows of weights: a tile of up_gate has UP_SUBTILES, one of the down GEMM DOWN_SUBTILES. */
template <typename T, Major B_MAJOR, int ROWS, int UP_SUBTILES, int DOWN_SUBTILES>
struct Config : FewRowsConfig<T, B_MAJOR, true, ROWS, UP_SUBTILES> {
    static constexpr bool PAIRED = UP_SUBTILES == 1;
    using Down = FewRowsConfig<T, B_MAJOR, true, ROWS, DOWN_SUBTILES>;
    using Queue = TileQueue<Tile, Config::CONSUMER_WARPS + Config::LOAD_WARPS, ROWS>;
};

template <class Config>
struct ExpertsShared : Shared<Config> {
    FusedMoeSlotPlan plan;
    Barrier<OneThread> claims; /* the next tile may be claimed */
    uint32_t first_claim;      /* by the loading warp, while the fetching warp sorts */
};

/* --- the fetching warp ---------------------------------------------------------------------------------- */

/* The first CTA's: zeroes the counters. */
__device__ inline void zero_counters(const Experts &p) {
    int lane = threadIdx.x % 32;
    for (int i = lane; i < p.num_counters; i += 32) p.stored_a[i] = 0;
    for (int i = lane; i < MAX_SMS; i += 32) p.progress->on_sm[i] = 0;
    if (lane == 0) p.progress->exited = p.progress->claimed = 0;
    __syncwarp();
    if (lane == 0) st_release_gpu(&p.progress->tag, p.tag);
}

/* After the CTA's last claim, by one thread. */
__device__ inline void exit_claims(const Experts &p) {
    if (atomicAdd(&p.progress->exited, 1u) == gridDim.x - 1) p.progress->tag = 0;
}

template <class Config>
__device__ inline void fetch_experts_tiles(const Experts &p, ExpertsShared<Config> &s) {
    const TileSource &up = p.up.gemm.tiles, &down = p.down.gemm.tiles;
    const bool plans = !up.offs;
    if (plans) make_slot_plan(p.up.gemm.unplanned, s.plan);
    auto num_tiles = [&](const TileSource &source) {
        return plans ? fused_moe_num_slot_tiles(&s.plan, &source.order)
                     : fused_moe_num_work_tiles(source.schedule, source.E, (int32_t)source.R, &source.order);
    };
    auto set = [&](const TileSource &source, uint32_t index, Tile &tile) {
        FusedMoeWorkTile work = plans ? fused_moe_slot_tile(&s.plan, &source.order, index)
                                      : fused_moe_work_tile(source.schedule, source.offs, source.E,
                                                            (int32_t)source.R, &source.order, index);
        set_tile(source, work, tile);
        int32_t rows =
            plans ? work.num_rows : fused_moe_expert_rows(source.offs, work.expert, (int32_t)source.R).num;
        tile.a_rows = 4 * rows * up.order.num_n_tiles;
    };
    auto token_of = [&](const Tile &tile, int i) {
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
        Tile tile = {};
        tile.is_down = index >= num_up;
        if (tile.is_down) {
            set(down, index - num_up, tile);
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
    Tile none = {{-1}};
    writer.publish(none, token_of);
    if (plans && blockIdx.x == gridDim.x - 1) write_slot_plan(p.up.gemm.unplanned, s.plan);
    if (threadIdx.x % 32 == 0) exit_claims(p);
}

/* --- the loading warps ---------------------------------------------------------------------------------- */

/* The first tile's claim, by one thread. A second CTA of an SM gives the first ones of all SMs a moment.
 * (Acquiring loads do no harm here: nothing of the tiles is in flight yet.) */
__device__ inline uint32_t claim_first(const Experts &p) {
    Progress &progress = *p.progress;
    wait_for_value(&progress.tag, p.tag);
    bool is_second = atomicAdd(&progress.on_sm[smid() % MAX_SMS], 1u) > 0;
    for (int i = 0; is_second && i < 4 && ld_acquire_gpu(&progress.claimed) < gridDim.x / 2; i++) {
    }
    return atomicAdd(&progress.claimed, 1u);
}

/* The three warps that load a tile: all gather rows of x or a, and warp 0 loads weights by TMA. */
template <class Config>
class Loader {
    using Rows = GatherRows<Config>;
    static constexpr int LOAD_BARRIER = WARPGROUP_BARRIER + Config::CONSUMERS;
    const Experts &p;
    ExpertsShared<Config> &s;
    typename Config::Pipeline pipe;
    Rows rows;
    bool loads_weight = __shfl_sync(~0u, threadIdx.x / 32, 0) == 0;

    /* Prefetches weights into the stages, as they become free, and then waits until a is there. Returns the
     * number of k-tiles whose weights are loaded. */
    __device__ int wait_for_a(const Tile &tile) {
        using Weight = typename Config::Down::Weight;
        const DenseGemm &gemm = p.down.gemm;
        const int ahead = min(Config::STAGES, gemm.num_k_tiles[0]);
        if (loads_weight) {
            auto next = pipe;
            for (int k_tile = 0; k_tile < ahead; k_tile++, next.advance()) {
                s.empty[next.index].wait(next.phase ^ 1);
                if (elect_sync()) {
                    auto &full = s.full[next.index];
                    full.expect(Weight::bytes(gemm, tile));
                    Weight::load(gemm, shared_address(s.stage[next.index].b), full.address(), 0, k_tile,
                                 tile);
                }
                __syncwarp();
            }
            wait_for_count(&p.stored_a[tile.expert], (uint32_t)tile.a_rows);
            __syncwarp();
        }
        barrier_sync(LOAD_BARRIER, 32 * Config::LOAD_WARPS);
        return ahead;
    }

    /* A tile whose rows are rows token[i] of gemm.x. One thread calls load_weight(k_tile, where, barrier). */
    template <class Weight, typename LoadWeight>
    __device__ __forceinline__ void load(const DenseGemm &gemm, const int32_t (&token)[Rows::MOST],
                                         const Tile &tile, LoadWeight load_weight) {
        const int num_k_tiles = gemm.num_k_tiles[0], claim_at = max(num_k_tiles - CLAIM_AHEAD, 0);
        rows.point(gemm.x, gemm.k, [&](int i) { return token[i]; });
        rows.set_num(tile.num_rows);
        const int ahead = tile.is_down && !tile.a_is_there ? wait_for_a(tile) : 0;
        gather_tile<false>(s, pipe, rows, num_k_tiles, loads_weight, [&](int k_tile, uint32_t b, auto &full) {
            if (k_tile >= ahead) {
                full.expect(Weight::bytes(gemm, tile));
                load_weight(k_tile, b, full.address());
            }
            if (k_tile == claim_at) s.claims.arrive();
        });
    }

  public:
    __device__ Loader(const Experts &p, ExpertsShared<Config> &s) : p(p), s(s) {}

    __device__ void run() {
        using Up = typename Config::Weight;
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
            const Tile tile = reader.next();
            if (tile.expert < 0) return;
            if (tile.is_down)
                load<Down>(p.down.gemm, token, tile, [&](int k_tile, uint32_t b, uint32_t full) {
                    Down::load(p.down.gemm, b, full, 0, k_tile, tile);
                });
            else
                load<Up>(p.up.gemm, token, tile, [&](int k_tile, uint32_t b, uint32_t full) {
                    if constexpr (Config::PAIRED)
                        cp_async_bulk_tensor_load(b, &p.paired, full,
                                                  K_TILE<typename Config::Operand> * k_tile, 0, 0,
                                                  tile.first_column / CHUNK, tile.expert);
                    else
                        Up::load(p.up.gemm, b, full, 0, k_tile, tile);
                });
        }
    }
};

/* --- consumers ------------------------------------------------------------------------------------------ */

/* The tokens' sums of the columns that this warp's threads have of an N tile: 16 of each of its subtiles. */
template <class Config>
__device__ inline void combine_columns(const FusedMoeUnpermute &p, const FusedMoeSlotPlan &plan,
                                       int first_column, int warp) {
    using T = typename Config::Out;
    constexpr int CHUNKS = 2 * Config::Down::SUBTILES, IN_FLIGHT = 8;
    const int K = (int)p.row_map.K, D = (int)p.D;
    for (int i = threadIdx.x % 32; i < (int)p.row_map.T * CHUNKS; i += 32) {
        int t = i / CHUNKS, chunk = i % CHUNKS;
        int column = first_column + chunk / 2 * SUBTILE + 16 * warp + chunk % 2 * CHUNK;
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

/* What run_mainloop_swapped left of a paired tile of up_gate: a warp has 8 hidden columns, a thread one. */
template <int TOKENS, typename Out, typename Bias, class Writer>
__device__ __forceinline__ void store_paired(const Experts &p,
                                             const UpGateEpilogue<Out, Bias, GATE_UP> &epilogue,
                                             const float *d, const Tile &tile, int warp, Writer &writer) {
    const UpGate &up = p.up;
    const int first = tile.first_column + CHUNK * warp, column = first + threadIdx.x % 32 / 4;
    if (first >= up.F) return;
    const Bias *bias = epilogue.bias_of(up.bias, tile), *bias_up = epilogue.bias_of(up.bias_up, tile);
    const float of_gate = bias ? to_accum(bias[column]) : 0, of_up = bias_up ? to_accum(bias_up[column]) : 0;
    float gates[TOKENS / 4], ups[TOKENS / 4];
#pragma unroll
    for (int i = 0; i < TOKENS / 4; i++) {
        const float low = d[i / 2 * 4 + i % 2], high = d[i / 2 * 4 + 2 + i % 2];
        gates[i] = p.up_is_first ? high : low, ups[i] = p.up_is_first ? low : high;
        if (bias) gates[i] += of_gate;
        if (bias_up) ups[i] += of_up;
    }
    epilogue.template activate<true, 1>(gates, gates, ups);
    Out *a = (Out *)up.a + (int64_t)tile.first_row * up.F + first;
    writer.template store_swapped_eight<TOKENS>(gates, a, up.F, tile.num_rows, CHUNK);
}

template <class Config, Columns columns>
__device__ inline void compute_experts(const Experts &p, ExpertsShared<Config> &s, int warp) {
    constexpr int DOWN_SUBTILES = Config::Down::SUBTILES;
    TileReader<typename Config::Queue> reader(s.queue);
    typename Config::Pipeline pipe;
    SkinnyWriter<Config::BM> writer(shared_address(s.staging[0]), WARPGROUP_BARRIER, warp);
    UpGateEpilogue<typename Config::Out, typename Config::Bias, columns> epilogue{p.up};
    const bool is_counter = threadIdx.x % 32 == 0;
    Tile tile = reader.next(); /* up_gate's come first */
    for (; tile.expert >= 0 && !tile.is_down; tile = reader.next()) {
        with_tokens<Config>(tile.num_rows, [&](auto tokens) {
            float d[tokens.value / 2 * Config::SUBTILES];
            run_mainloop_swapped<Config, tokens.value>(d, s, pipe, p.up.gemm.num_k_tiles[0], 0, 1);
            if constexpr (Config::PAIRED)
                store_paired<tokens.value>(p, epilogue, d, tile, warp, writer);
            else
                epilogue.template store_swapped<tokens.value, 2>(d, tile, 0, warp, writer);
        });
        __syncwarp();
        if (is_counter) red_add_release_gpu(&p.stored_a[tile.expert], tile.num_rows);
    }
    for (; tile.expert >= 0; tile = reader.next()) {
        with_tokens<Config>(tile.num_rows, [&](auto tokens) {
            float d[tokens.value / 2 * DOWN_SUBTILES];
            run_mainloop_swapped<Config, tokens.value, DOWN_SUBTILES>(d, s, pipe, p.down.gemm.num_k_tiles[0],
                                                                      0, 1);
            store_swapped_subtiles<typename Config::Out, typename Config::Bias, tokens.value, DOWN_SUBTILES>(
                p.down, d, tile, 0, warp, writer);
        });
        if (!p.combine.out) continue;
        __syncwarp();
        uint32_t *stored = p.stored_y + tile.first_column / Config::Down::BN * 4 + warp, before = 0;
        if (is_counter) before = atom_add_acq_rel_gpu(stored, tile.num_rows);
        before = __shfl_sync(~0u, before, 0);
        __syncwarp(); /* all lanes see what the counting one acquired */
        if (before + tile.num_rows == (uint32_t)s.plan.first_row[s.plan.num_experts])
            combine_columns<Config>(p.combine, s.plan, tile.first_column, warp);
    }
    if (p.combine.out && s.plan.num_experts == 0) /* no slot has a row, so there was no tile */
        for (int n = blockIdx.x; n < p.down.gemm.tiles.order.num_n_tiles; n += gridDim.x)
            combine_columns<Config>(p.combine, s.plan, n * Config::Down::BN, warp);
}

/* --- kernel --------------------------------------------------------------------------------------------- */

template <class Config, Columns columns>
__global__ void __launch_bounds__(Config::THREADS, Config::CTAS_PER_SM)
    experts_kernel(const __grid_constant__ Experts p) {
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
        compute_experts<Config, columns>(p, s, warp - 4);
    } else if (warp == 3) {
        if (blockIdx.x == 0) zero_counters(p);
        fetch_experts_tiles<Config>(p, s);
    } else {
        Loader<Config>(p, s).run();
    }
}

/* --- launcher ------------------------------------------------------------------------------------------- */

/* A tag that no other launch has: splitmix64 of a counter, which is a permutation, from a random start. */
uint64_t next_tag() {
    static std::atomic<uint64_t> counter{(uint64_t)std::random_device()() << 32 | std::random_device()()};
    uint64_t z = counter.fetch_add(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    z ^= z >> 31;
    return z ? z : next_tag(); /* 0 is an erased one */
}

bool has_few_rows(const FusedMoeExperts &p) {
    return fused_moe_few_rows_together(p.down.R, p.down.E) == 16;
}

/* Gate and up, that of lower address first; up's data is NULL where there is no such pair. */
typedef struct {
    FusedMoeWeight first, second;
    bool up_is_first;
} WeightPair;

WeightPair weight_pair_of(const FusedMoeUpGate &p) {
    WeightPair pair = {p.w1, p.w3, false};
    if (p.layout == FUSED_MOE_HALVES) { /* elements have two bytes */
        pair.second = p.w1;
        pair.second.data = (uint16_t *)p.w1.data + p.F * p.w1.stride_out;
    }
    pair.up_is_first = (uintptr_t)pair.second.data < (uintptr_t)pair.first.data;
    if (pair.up_is_first) std::swap(pair.first, pair.second);
    return pair;
}

/* Tiles are paired where the rule says so, and one map reaches both weights. */
bool pairs_rows(const FusedMoeExperts &p) {
    const FusedMoeUpGate &up = p.up;
    bool is_pair = up.layout == FUSED_MOE_HALVES ||
                   (up.layout == FUSED_MOE_SEPARATE && up.w1.stride_out == up.w3.stride_out &&
                    up.w1.stride_expert == up.w3.stride_expert);
    if (!is_pair || up.w1.stride_in != 1) return false;
    if (fused_moe_experts_up_subtiles(p.down.R, p.down.E, up.F, current_device().num_sms) == 2) return false;
    WeightPair pair = weight_pair_of(up);
    uintptr_t apart = (uintptr_t)pair.second.data - (uintptr_t)pair.first.data;
    return 0 < apart && apart < 1ull << 40; /* as TMA's strides */
}

/* Columns of a tile of the down GEMM. */
int columns_of_down(const FusedMoeExperts &p) {
    int32_t rows = fused_moe_few_rows_together(p.down.R, p.down.E);
    return SUBTILE * (pairs_rows(p) ? 1 : fused_moe_few_rows_subtiles(rows, p.up.F));
}

int num_counters_of(const FusedMoeExperts &p) {
    return (int)(p.down.E + 4 * ceil_div(p.down.M, columns_of_down(p)));
}

template <class Config, Columns columns>
int launch(const FusedMoeExperts &p, void *stream) {
    using T = typename Config::Out;
    constexpr int BN = Config::Down::BN;
    const FusedMoeGroupedMM &d = p.down;
    Experts q = {};
    int status = set_up_gate<Config, columns>(&q.up, p.up);
    if constexpr (Config::PAIRED) {
        TileSource &up = q.up.gemm.tiles;
        up = tile_source(up.offs, up.schedule, up.R, up.E, p.up.F, PAIRED_COLUMNS, nullptr);
        const WeightPair pair = weight_pair_of(p.up);
        q.up_is_first = pair.up_is_first;
        if (status == FUSED_MOE_OK)
            status = paired_map<T>(&q.paired, pair.first, pair.second, p.down.E, p.up.F, p.up.D,
                                   PAIRED_COLUMNS / CHUNK);
    }
    q.down.bias = d.bias;
    q.down.out = d.out;
    q.down.M = (int32_t)d.M;
    DenseGemm &down = q.down.gemm;
    down.x = d.a;
    down.T = d.R;
    down.k = (int32_t)d.N[0];
    down.num_k_tiles[0] = (int32_t)ceil_div(d.N[0], K_TILE<T>);
    down.tiles = tile_source(d.offs, d.schedule, d.R, d.E, d.M, BN, nullptr);
    down.tiles.last_is_half_n = BN > SUBTILE && (d.M - 1) % BN < BN / 2;
    if (status == FUSED_MOE_OK)
        status = weight_map<T>(&down.weight.map[0], d.b[0], Config::B_MAJOR, d.b[0].stride_out,
                               d.b[0].stride_in, d.E, d.M, d.N[0], SUBTILE);
    if (status != FUSED_MOE_OK) return status;
    /* as the plan has them: of other tiles some would never be stored, and be waited for */
    q.up.gemm.tiles.order.tile_rows = down.tiles.order.tile_rows = Config::BM;
    if (p.up.unplanned) q.combine = p.combine;
    q.progress = (Progress *)p.workspace.data;
    q.tag = next_tag();
    q.stored_a = (uint32_t *)(q.progress + 1);
    q.stored_y = q.stored_a + d.E;
    q.num_counters = num_counters_of(p);
    return launch_persistent<Config, ExpertsShared<Config>, experts_kernel<Config, columns>>(q, stream);
}

int run(const FusedMoeExperts &p, void *stream) {
    auto with_config = [&](auto t, auto major) {
        using T = decltype(t);
        constexpr Major MAJOR = decltype(major)::value;
        auto with_rows = [&](auto config) {
            return with_columns(p.up.layout, [&](auto columns) {
                return launch<decltype(config), columns.value>(p, stream);
            });
        };
        if constexpr (MAJOR == Major::K)
            if (pairs_rows(p)) return launch<Config<T, MAJOR, 16, 1, 1>, GATE_UP>(p, stream);
        if (!has_few_rows(p)) return with_rows(Config<T, MAJOR, 64, 2, 2>());
        if (columns_of_down(p) == SUBTILE) return with_rows(Config<T, MAJOR, 16, 2, 1>());
        return with_rows(Config<T, MAJOR, 16, 2, 2>());
    };
    return with_half(p.up.dtype, [&](auto t) {
        return p.up.w1.stride_in == 1 ? with_config(t, std::integral_constant<Major, Major::K>())
                                      : with_config(t, std::integral_constant<Major, Major::MN>());
    });
}

FusedMoeReason reason(const FusedMoeExperts &p) {
    FusedMoeReason why = up_gate.reason(p.up);
    if (why == FUSED_MOE_RUNS) why = grouped_mm.reason(p.down);
    if (why != FUSED_MOE_RUNS) return why;
    const ScheduleOverride &asked = schedule_override();
    if (!fused_moe_few_rows_together(p.down.R, p.down.E) || asked.no_tails) return FUSED_MOE_MANY_ROWS;
    if ((p.up.w1.stride_in == 1) != (p.down.b[0].stride_in == 1)) return FUSED_MOE_STRIDES;
    bool combines = p.up.unplanned;
    if (combines && (!is_aligned(p.combine.out) || !is_aligned(p.combine.shared))) return FUSED_MOE_UNALIGNED;
    /* both GEMMs' tiles, and rows counted by each warp of an N tile */
    int64_t n_tiles = ceil_div(p.up.F, PAIRED_COLUMNS) + ceil_div(p.down.M, SUBTILE);
    return (fused_moe_max_row_tiles((int32_t)p.down.R, p.down.E, 16) + 4 * p.down.R) * n_tiles < INT32_MAX
               ? FUSED_MOE_RUNS
               : FUSED_MOE_TOO_LARGE;
}

size_t workspace(const FusedMoeExperts &p) {
    return sizeof(Progress) + num_counters_of(p) * sizeof(uint32_t);
}

} // namespace

const Kernel<FusedMoeExperts> experts = {reason, workspace, run};

} // namespace sm90
} // namespace fused_moe
