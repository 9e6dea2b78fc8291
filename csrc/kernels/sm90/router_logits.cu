/* The router's GEMM on Hopper: logits[t] = weight x[t] + bias in float32, the same bits in any batch.
 *
 * D is summed in slices (fused_moe_router_slice). wgmma adds a slice from zero in order of k, with the same
 * bits for any N and any place in the tile. The slices' sums are then added in order. So it makes no
 * difference which CTA sums a slice:
 *   many tokens   persistent CTAs: each sums all slices of every num_ctas-th tile, and its loads run on from
 *                 one tile to the next
 *   few tokens    the CTAs of a cluster share a tile's slices, so more SMs read the weight. Each leaves its
 *                 slices' sums in shared memory, then adds up its share of the tile
 *
 * A float32 weight beside bf16 x is the sum of three bf16 parts, which a kernel before this one makes
 * (split_kernel). A k-tile of x is multiplied by the three in turn, into the same accumulators: the GEMM is
 * that of three times the k-tiles.
 *
 * Roles: all warpgroups but the last are consumers, 64 tokens each; one lane of the last loads by TMA. Logits
 * are stored from registers: a quad of lanes fills a 32-byte sector. */
#include <type_traits>

#include "launch.cuh"
#include "wgmma.cuh"

namespace fused_moe {
namespace sm90 {
namespace {

/* --- kernel --------------------------------------------------------------------------------------------- */

typedef struct {
    CUtensorMap x;      /* (T, D), boxes of the tile's tokens         */
    CUtensorMap weight; /* (parts E, D), boxes of the tile's experts  */
    const void *bias;   /* [E] of x's dtype, f32 with parts; or NULL  */
    float *logits;      /* [T,E]                                      */
    int64_t T;
    int32_t E, num_expert_tiles, num_tiles;
    int32_t num_parts;                  /* of the weight; 1: it is of x's dtype              */
    int32_t num_k_tiles, slice_k_tiles; /* of D, of a slice; each counts once for every part */
    int32_t num_slices, cta_slices;     /* of D, of a CTA                                    */
    int32_t cluster;                    /* CTAs that share a tile's slices                   */
} RouterLogits;

/* SPLIT: clusters share tiles. */
template <typename T_, int WARPGROUPS_, int EXPERTS_, bool SPLIT_>
struct RouterConfig {
    using T = T_;
    static constexpr int WARPGROUPS = WARPGROUPS_, TOKENS = SUBTILE * WARPGROUPS, EXPERTS = EXPERTS_;
    static constexpr bool SPLIT = SPLIT_;
    static constexpr int THREADS = 128 * (WARPGROUPS + 1), SUMS = EXPERTS / 2; /* accumulators of a thread */
    /* Running sums over slices: at most 64 fit registers beside 128 accumulators. */
    static constexpr int TOTALS = SPLIT ? 0 : EXPERTS <= 128 ? SUMS : 64;
    static constexpr int SHARED_TOTALS = SPLIT ? 0 : SUMS - TOTALS;
    static constexpr int MAX_CTA_SLICES = SPLIT ? 4 : 0; /* shared memory holds their sums */
    static constexpr int PITCH = EXPERTS + 8;            /* spreads a warp's rows over the banks */
    static constexpr int STAGE_BYTES = (TOKENS + EXPERTS) * SWIZZLE_BYTES;
    static constexpr int STAGES = SPLIT ? 8 : SHARED_TOTALS ? 3 : 192 * 1024 / STAGE_BYTES;
    using Pipeline = PipelineState<STAGES>;
};

template <class Config>
struct alignas(1024) RouterShared {
    struct Stage {
        uint8_t x[Config::TOKENS * SWIZZLE_BYTES], weight[Config::EXPERTS * SWIZZLE_BYTES];
    } stage[Config::STAGES];
    float sums[Config::MAX_CTA_SLICES][Config::TOKENS * Config::PITCH];
    float totals[Config::SHARED_TOTALS][128 * Config::WARPGROUPS];
    uint64_t full[Config::STAGES], empty[Config::STAGES];
};

typedef struct {
    int64_t token;
    int expert; /* the first of each */
} RouterTile;

template <class Config>
__device__ inline RouterTile tile_of(const RouterLogits &p, int index) {
    return {index / p.num_expert_tiles * (int64_t)Config::TOKENS,
            index % p.num_expert_tiles * Config::EXPERTS};
}

/* Loads k-tiles [k, end), which begin with a weight's first part, into the pipeline's stages. */
template <class Config>
__device__ inline void load_k_tiles(const RouterLogits &p, RouterShared<Config> &s,
                                    typename Config::Pipeline &pipe, const RouterTile &tile, int k, int end) {
    int column = k / p.num_parts * K_TILE<typename Config::T>, part = 0;
    for (; k < end; k++, pipe.advance()) {
        auto &stage = s.stage[pipe.index];
        uint32_t full = shared_address(&s.full[pipe.index]);
        mbarrier_wait(shared_address(&s.empty[pipe.index]), pipe.phase ^ 1);
        mbarrier_arrive_expect_tx(full, Config::STAGE_BYTES);
        int row = part * p.E + tile.expert;
        cp_async_bulk_tensor_load(shared_address(stage.weight), &p.weight, full, column, row);
        cp_async_bulk_tensor_load(shared_address(stage.x), &p.x, full, column, (int)tile.token);
        if (++part == p.num_parts) part = 0, column += K_TILE<typename Config::T>;
    }
}

/* acc = the slice's MMAs, accumulated from zero. */
template <class Config>
__device__ inline void sum_slice(float (&acc)[Config::SUMS], RouterShared<Config> &s,
                                 typename Config::Pipeline &pipe, int num_k_tiles, int wg) {
    using T = typename Config::T;
    auto multiply = [&](auto accumulate) {
        auto &stage = s.stage[pipe.index];
        mbarrier_wait(shared_address(&s.full[pipe.index]), pipe.phase);
        uint64_t x = matrix_descriptor<Major::K>(shared_address(stage.x) + wg * SUBTILE_BYTES);
        uint64_t weight = matrix_descriptor<Major::K>(shared_address(stage.weight));
        wgmma_fence();
        wgmma<Config::EXPERTS, accumulate.value, Major::K, Major::K>(acc, x, weight, T());
#pragma unroll
        for (int i = 1; i < NUM_K_STEPS; i++)
            wgmma<Config::EXPERTS, 1, Major::K, Major::K>(acc, x + i * K_STEP<Major::K, T>,
                                                          weight + i * K_STEP<Major::K, T>, T());
        wgmma_commit_group();
        wgmma_wait_group<0>();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&s.empty[pipe.index]));
        pipe.advance();
    };
    multiply(std::integral_constant<int, 0>());
    for (int k = 1; k < num_k_tiles; k++) multiply(std::integral_constant<int, 1>());
}

/* Two neighbouring logits of a token. */
template <typename T>
__device__ inline void store_pair(const RouterLogits &p, int64_t token, int expert, float low, float high) {
    if (token >= p.T || expert >= p.E) return;
    float *logits = p.logits + token * p.E + expert;
    bool has_high = expert + 1 < p.E;
    auto add = [&](auto *bias) {
        low += to_accum(bias[expert]), high += has_high ? to_accum(bias[expert + 1]) : 0;
    };
    if (p.bias && p.num_parts == 1) add((const T *)p.bias);
    if (p.bias && p.num_parts > 1) add((const float *)p.bias);
    if (p.E % 2 == 0) {
        *(float2 *)logits = {low, high};
    } else {
        logits[0] = low;
        if (has_high) logits[1] = high;
    }
}

/* Calls fn(acc, total) for all accumulators of this thread; totals are in registers, the rest in shared
 * memory. */
template <class Config, typename Fn>
__device__ inline void for_each_total(float (&acc)[Config::SUMS], float (&total)[Config::TOTALS + 1],
                                      RouterShared<Config> &s, Fn fn) {
#pragma unroll
    for (int i = 0; i < Config::TOTALS; i++) fn(acc[i], total[i]);
#pragma unroll
    for (int i = 0; i < Config::SHARED_TOTALS; i++) fn(acc[Config::TOTALS + i], s.totals[i][threadIdx.x]);
}

/* Adds the cluster's sums in order of their slices, for this CTA's share of the tile, and stores the
 * logits. */
template <class Config>
__device__ inline void add_slices(const RouterLogits &p, RouterShared<Config> &s, int rank,
                                  const RouterTile &tile) {
    constexpr int PAIRS = Config::EXPERTS / 2; /* of a token's logits */
    __syncwarp();                              /* the loading warp's lanes diverged */
    barrier_cluster_sync();
    int pairs = (int)min((int64_t)Config::TOKENS, p.T - tile.token) * PAIRS;
    for (int pair = rank * Config::THREADS + threadIdx.x; pair < pairs; pair += p.cluster * Config::THREADS) {
        int token = pair / PAIRS, expert = pair % PAIRS * 2;
        uint32_t first = shared_address(&s.sums[0][token * Config::PITCH + expert]);
        float2 total = {};
        for (int cta = 0, slice = 0; cta < p.cluster; cta++) {
            uint32_t address = mapa(first, cta);
            for (int i = 0; i < p.cta_slices && slice < p.num_slices; i++, slice++) {
                float2 sum = ld_shared_cluster_v2(address + i * (uint32_t)sizeof(s.sums[0]));
                total = slice ? float2{total.x + sum.x, total.y + sum.y} : sum;
            }
        }
        store_pair<typename Config::T>(p, tile.token + token, tile.expert + expert, total.x, total.y);
    }
    barrier_cluster_sync(); /* until the others have read this CTA's sums */
}

template <class Config>
__global__ void __launch_bounds__(Config::THREADS, 1)
    router_logits_kernel(const __grid_constant__ RouterLogits p) {
    using T = typename Config::T;
    extern __shared__ __align__(1024) char memory[];
    auto &s = *reinterpret_cast<RouterShared<Config> *>(memory);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < Config::STAGES; i++) {
            mbarrier_init(shared_address(&s.full[i]), 1);
            mbarrier_init(shared_address(&s.empty[i]), 4 * Config::WARPGROUPS);
        }
        fence_mbarrier_init();
    }
    __syncthreads();

    /* Work: this CTA's tiles, with all slices, or with its share of them */
    int rank = Config::SPLIT ? blockIdx.x % p.cluster : 0, step = Config::SPLIT ? p.num_tiles : gridDim.x;
    int first_tile = Config::SPLIT ? blockIdx.x / p.cluster : blockIdx.x;
    int first_slice = rank * p.cta_slices, end_slice = min(first_slice + p.cta_slices, p.num_slices);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();

    /* Main loop */
    typename Config::Pipeline pipe;
    if (warp >= 4 * Config::WARPGROUPS) {
        if constexpr (Config::SHARED_TOTALS > 0) setmaxnreg_dec<40>();
        int k = first_slice * p.slice_k_tiles, end = min(end_slice * p.slice_k_tiles, p.num_k_tiles);
        if (warp == 4 * Config::WARPGROUPS && elect_sync())
            for (int tile = first_tile; tile < p.num_tiles; tile += step)
                load_k_tiles(p, s, pipe, tile_of<Config>(p, tile), k, end);
    } else {
        if constexpr (Config::SHARED_TOTALS > 0) setmaxnreg_inc<232>();
        float acc[Config::SUMS], total[Config::TOTALS + 1]; /* + 1: arrays have an element */
        int row = SUBTILE * (warp / 4) + 16 * (warp % 4) + lane / 4, column = 2 * (lane % 4);
        for (int index = first_tile; index < p.num_tiles; index += step) {
            for (int slice = first_slice; slice < end_slice; slice++) {
                int num_k_tiles = min(p.slice_k_tiles, p.num_k_tiles - slice * p.slice_k_tiles);
                sum_slice(acc, s, pipe, num_k_tiles, warp / 4);
                if constexpr (Config::SPLIT) {
                    float *sums = s.sums[slice - first_slice] + row * Config::PITCH + column;
#pragma unroll
                    for (int i = 0; i < Config::SUMS; i += 2)
                        *(float2 *)&sums[i / 2 % 2 * 8 * Config::PITCH + i / 4 * 8] = {acc[i], acc[i + 1]};
                } else if (slice == 0) {
                    for_each_total<Config>(acc, total, s, [](float sum, float &total) { total = sum; });
                } else {
                    for_each_total<Config>(acc, total, s, [](float sum, float &total) { total += sum; });
                }
            }
            if constexpr (!Config::SPLIT) {
                RouterTile tile = tile_of<Config>(p, index);
                for_each_total<Config>(acc, total, s, [](float &sum, float total) { sum = total; });
#pragma unroll
                for (int i = 0; i < Config::SUMS; i += 2)
                    store_pair<T>(p, tile.token + row + i / 2 % 2 * 8, tile.expert + column + i / 4 * 8,
                                  acc[i], acc[i + 1]);
            }
        }
    }
    if constexpr (Config::SPLIT) add_slices<Config>(p, s, rank, tile_of<Config>(p, first_tile));
}

/* --- a float32 weight as three bf16 ones ---------------------------------------------------------------- */

constexpr int PARTS = 3; /* bf16 values that add up to a float32 one, but for its subnormals */

typedef struct {
    const float *weight;  /* [n], n a multiple of 8 */
    __nv_bfloat16 *parts; /* [PARTS,n]              */
    int64_t n;
} Split;

/* Each part is truncated, so its difference to the rest is exact. What is not finite is the first part. */
__global__ void __launch_bounds__(256) split_kernel(const __grid_constant__ Split p) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    int64_t i = 4 * (blockIdx.x * (int64_t)blockDim.x + threadIdx.x);
    if (i >= p.n) return;
    float4 weight = *(const float4 *)(p.weight + i);
    float rest[4] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        alignas(8) __nv_bfloat16 value[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            value[j] = __float2bfloat16_rz(rest[j]);
            rest[j] = isfinite(rest[j]) ? rest[j] - to_accum(value[j]) : 0;
        }
        *(uint2 *)(p.parts + part * p.n + i) = *(const uint2 *)value;
    }
}

bool has_parts(const FusedMoeRouterLogits &p) {
    return p.weight_dtype != p.dtype;
}

size_t workspace(const FusedMoeRouterLogits &p) {
    return has_parts(p) ? PARTS * p.E * p.D * sizeof(__nv_bfloat16) : 0;
}

int split_weight(const FusedMoeRouterLogits &p, void *stream) {
    Split split = {(const float *)p.weight, (__nv_bfloat16 *)p.workspace.data, p.E * p.D};
    return launch_dependent<split_kernel>(split, {ceil_div(split.n, 4 * 256), 256, 1, 0}, stream);
}

/* --- launcher ------------------------------------------------------------------------------------------- */

int64_t num_slices_of(int64_t D) {
    return ceil_div(D, fused_moe_router_slice(D));
}

template <class Config>
int launch(const FusedMoeRouterLogits &p, int cta_slices, void *stream) {
    using T = typename Config::T;
    RouterLogits q = {};
    q.num_parts = has_parts(p) ? PARTS : 1;
    const void *weight = has_parts(p) ? p.workspace.data : p.weight;
    int status = matrix_map(&q.x, (const T *)p.x, p.T, p.D, p.D, Config::TOKENS);
    if (status == FUSED_MOE_OK)
        status =
            matrix_map(&q.weight, (const T *)weight, q.num_parts * (int64_t)p.E, p.D, p.D, Config::EXPERTS);
    if (status != FUSED_MOE_OK) return status;
    q.bias = p.bias;
    q.logits = (float *)p.logits;
    q.T = p.T;
    q.E = p.E;
    q.num_expert_tiles = (int32_t)ceil_div(p.E, Config::EXPERTS);
    q.num_k_tiles = q.num_parts * (int32_t)ceil_div(p.D, K_TILE<T>);
    q.slice_k_tiles = q.num_parts * (int32_t)(fused_moe_router_slice(p.D) / K_TILE<T>);
    q.num_slices = (int32_t)num_slices_of(p.D);
    q.cta_slices = cta_slices;
    q.cluster = (int32_t)ceil_div(q.num_slices, cta_slices);
    constexpr size_t shared = sizeof(RouterShared<Config>);
    static_assert(shared + CTA_SHARED_BYTES <= SM_SHARED_BYTES, "shared memory of an SM of sm_90");
    q.num_tiles = (int32_t)(ceil_div(p.T, Config::TOKENS) * q.num_expert_tiles);
    int grid = Config::SPLIT ? q.num_tiles * q.cluster : min(q.num_tiles, num_ctas());
    return launch_dependent<router_logits_kernel<Config>>(q, {grid, Config::THREADS, q.cluster, shared},
                                                          stream);
}

template <typename T>
int run_tokens(const FusedMoeRouterLogits &p, void *stream) {
    if (int each = fused_moe_router_cta_slices(p.T, p.E, p.D, num_ctas()))
        return launch<RouterConfig<T, 1, 64, true>>(p, each, stream);
    int all = (int)num_slices_of(p.D);
    switch (fused_moe_router_tile(p.T, p.E, num_ctas())) {
    case FUSED_MOE_ROUTER_128X64: return launch<RouterConfig<T, 2, 64, false>>(p, all, stream);
    case FUSED_MOE_ROUTER_64X128: return launch<RouterConfig<T, 1, 128, false>>(p, all, stream);
    case FUSED_MOE_ROUTER_128X256: return launch<RouterConfig<T, 2, 256, false>>(p, all, stream);
    default: return launch<RouterConfig<T, 2, 128, false>>(p, all, stream);
    }
}

int run(const FusedMoeRouterLogits &p, void *stream) {
    if (has_parts(p)) {
        int status = split_weight(p, stream);
        return status == FUSED_MOE_OK ? run_tokens<__nv_bfloat16>(p, stream) : status;
    }
    return with_half(p.dtype, [&](auto t) { return run_tokens<decltype(t)>(p, stream); });
}

FusedMoeReason reason(const FusedMoeRouterLogits &p) {
    if (!is_16_bit(p.dtype)) return FUSED_MOE_OTHER_DTYPE;
    if (has_parts(p) && p.dtype != FUSED_MOE_BF16) return FUSED_MOE_MIXED_DTYPES;
    if (p.T == 0) return FUSED_MOE_NO_ROWS;
    if (p.D % CHUNK) return FUSED_MOE_WIDTH;
    if (!is_aligned(p.x) || !is_aligned(p.weight)) return FUSED_MOE_UNALIGNED;
    bool fits = p.D < INT32_MAX && p.T * ceil_div(p.E, SUBTILE) < INT32_MAX;
    return fits ? FUSED_MOE_RUNS : FUSED_MOE_TOO_LARGE;
}

} // namespace

const Kernel<FusedMoeRouterLogits> router_logits = {reason, workspace, run};

} // namespace sm90
} // namespace fused_moe
