/* The gradient of the router's input on Hopper: dx = dlogits weight, or dx += dlogits weight.
 *
 * k is E, a few k-tiles, so a tile is mostly its loads and stores. Hence short CTAs: one warpgroup computes a
 * 64x128 tile, and three CTAs per SM overlap loads, MMAs and stores. Thread 0 issues the loads. */
#include <type_traits>

#include "launch.cuh"
#include "writers.cuh"

namespace fused_moe {
namespace sm90 {
namespace {

constexpr int TOKENS = SUBTILE, COLUMNS = 2 * SUBTILE, THREADS = 128, CTAS_PER_SM = 3, STAGES = 2;

/* --- kernel --------------------------------------------------------------------------------------------- */

typedef struct {
    CUtensorMap dlogits; /* (T, E), boxes of one subtile */
    CUtensorMap weight;  /* (E, D), boxes of one subtile */
    CUtensorMap dx;      /* (T, D), boxes of one subtile */
    int32_t num_k_tiles, num_column_tiles;
    bool accumulate;
} RouterDgrad;

struct alignas(1024) RouterDgradShared {
    struct Stage {
        uint8_t dlogits[SUBTILE_BYTES], weight[2][SUBTILE_BYTES];
    } stage[STAGES];
    uint8_t dx[2][SUBTILE_BYTES]; /* the old values, if it accumulates, then the new ones */
    uint64_t full[STAGES], dx_full;
};

/* The sum of two pairs of elements. */
template <typename T>
__device__ inline uint32_t add_rounded(uint32_t a, uint32_t b) {
    float low[2], high[2];
    to_accums<T>(low[0], high[0], reinterpret_cast<const T *>(&a));
    to_accums<T>(low[1], high[1], reinterpret_cast<const T *>(&b));
    return pack<T>(low[0] + low[1], high[0] + high[1]);
}

template <typename T>
__global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    router_dgrad_kernel(const __grid_constant__ RouterDgrad p) {
    extern __shared__ __align__(1024) char memory[];
    auto &s = *reinterpret_cast<RouterDgradShared *>(memory);
    int first_token = blockIdx.x / p.num_column_tiles * TOKENS;
    int first_column = blockIdx.x % p.num_column_tiles * COLUMNS;
    auto load = [&](int k_tile) {
        auto &stage = s.stage[k_tile % STAGES];
        uint32_t full = shared_address(&s.full[k_tile % STAGES]);
        mbarrier_arrive_expect_tx(full, sizeof(stage));
        cp_async_bulk_tensor_load(shared_address(stage.dlogits), &p.dlogits, full, k_tile * K_TILE<T>,
                                  first_token);
        for (int i = 0; i < 2; i++)
            cp_async_bulk_tensor_load(shared_address(stage.weight[i]), &p.weight, full,
                                      first_column + i * SUBTILE, k_tile * K_TILE<T>);
    };
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) mbarrier_init(shared_address(&s.full[i]), 1);
        mbarrier_init(shared_address(&s.dx_full), 1);
        fence_mbarrier_init();
        griddepcontrol_wait();
        for (int i = 0; i < min(STAGES, p.num_k_tiles); i++) load(i);
        if (p.accumulate) {
            mbarrier_arrive_expect_tx(shared_address(&s.dx_full), sizeof(s.dx));
            for (int i = 0; i < 2; i++)
                cp_async_bulk_tensor_load(shared_address(s.dx[i]), &p.dx, shared_address(&s.dx_full),
                                          first_column + i * SUBTILE, first_token);
        }
    }
    __syncthreads();

    /* Main loop */
    float d[COLUMNS / 2];
    auto add_k_tile = [&](int k_tile, auto accumulate) {
        auto &stage = s.stage[k_tile % STAGES];
        mbarrier_wait(shared_address(&s.full[k_tile % STAGES]), k_tile / STAGES % 2);
        uint64_t a = matrix_descriptor<Major::K>(shared_address(stage.dlogits));
        uint64_t b = matrix_descriptor<Major::MN>(shared_address(stage.weight));
        auto multiply = [&](auto accumulate, int i) {
            wgmma<COLUMNS, decltype(accumulate)::value, Major::K, Major::MN>(
                d, a + i * K_STEP<Major::K, T>, b + i * K_STEP<Major::MN, T>, T());
        };
        wgmma_fence();
        multiply(accumulate, 0);
#pragma unroll
        for (int i = 1; i < NUM_K_STEPS; i++) multiply(std::integral_constant<int, 1>(), i);
        wgmma_commit_group();
        wgmma_wait_group<0>();
        __syncthreads();
        if (threadIdx.x == 0 && k_tile + STAGES < p.num_k_tiles) load(k_tile + STAGES);
    };
    add_k_tile(0, std::integral_constant<int, 0>());
    for (int k_tile = 1; k_tile < p.num_k_tiles; k_tile++)
        add_k_tile(k_tile, std::integral_constant<int, 1>());

    /* Epilogue: add, round, store by TMA, which drops what is past T and D */
    if (p.accumulate) mbarrier_wait(shared_address(&s.dx_full), 0);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t words[16], before[16], subtile = shared_address(s.dx[i]);
        pack_subtile<T>(words, &d[32 * i]);
        if (p.accumulate) {
            read_subtile(before, subtile, 16 * (threadIdx.x / 32));
#pragma unroll
            for (int j = 0; j < 16; j++) words[j] = add_rounded<T>(words[j], before[j]);
        }
        fill_subtile(subtile, 16 * (threadIdx.x / 32), words);
    }
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++)
            cp_async_bulk_tensor_store(&p.dx, shared_address(s.dx[i]), first_column + i * SUBTILE,
                                       first_token);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read<0>();
    }
}

/* --- launcher ------------------------------------------------------------------------------------------- */

template <typename T>
int launch(const FusedMoeRouterDgrad &p, void *stream) {
    RouterDgrad q = {};
    int status = matrix_map(&q.dlogits, (const T *)p.dlogits, p.T, p.E, p.E, TOKENS);
    if (status == FUSED_MOE_OK) status = matrix_map(&q.weight, (const T *)p.weight, p.E, p.D, p.D, SUBTILE);
    if (status == FUSED_MOE_OK) status = matrix_map(&q.dx, (const T *)p.dx, p.T, p.D, p.D, SUBTILE);
    if (status != FUSED_MOE_OK) return status;
    q.num_k_tiles = (int32_t)ceil_div(p.E, K_TILE<T>);
    q.num_column_tiles = (int32_t)ceil_div(p.D, COLUMNS);
    q.accumulate = p.accumulate;
    int64_t grid = ceil_div(p.T, TOKENS) * q.num_column_tiles;
    return launch_dependent<router_dgrad_kernel<T>>(q, {grid, THREADS, 1, sizeof(RouterDgradShared)}, stream);
}

int run(const FusedMoeRouterDgrad &p, void *stream) {
    return with_half(p.dtype, [&](auto t) { return launch<decltype(t)>(p, stream); });
}

FusedMoeReason reason(const FusedMoeRouterDgrad &p) {
    if (!is_16_bit(p.dtype)) return FUSED_MOE_OTHER_DTYPE;
    if (p.T == 0) return FUSED_MOE_NO_ROWS;
    if (p.D % CHUNK || p.E % CHUNK) return FUSED_MOE_WIDTH;
    if (!is_aligned(p.dlogits) || !is_aligned(p.weight) || !is_aligned(p.dx)) return FUSED_MOE_UNALIGNED;
    bool fits = p.D < INT32_MAX && ceil_div(p.T, TOKENS) * ceil_div(p.D, COLUMNS) < INT32_MAX;
    return fits && p.T < INT32_MAX ? FUSED_MOE_RUNS : FUSED_MOE_TOO_LARGE;
}

} // namespace

const Kernel<FusedMoeRouterDgrad> router_dgrad = {reason, nullptr, run};

} // namespace sm90
} // namespace fused_moe
