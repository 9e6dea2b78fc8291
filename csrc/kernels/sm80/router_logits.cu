/* The router's GEMM: logits[t] = weight x[t] + bias, not rounded to x's dtype.
 *
 * One CTA per tile of 128 tokens and 128 experts, which sums all of D: a token's logits do not depend on the
 * other tokens. Few tokens have few CTAs; the sm90 tier has more, by slices of D. */
#include "../dispatch.cuh"
#include "grouped_tile.cuh"

namespace fused_moe::sm80 {
namespace {

constexpr int COLUMNS = 128; /* experts of a tile */

/* --- kernel --------------------------------------------------------------------------------------------- */

template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::CTAS_PER_SM)
    router_logits_kernel(const __grid_constant__ FusedMoeRouterLogits p) {
    using T = typename Tile::T;
    using Acc = typename Tile::Acc;
    extern __shared__ __align__(128) char memory[];
    auto &s = *reinterpret_cast<TileShared<Tile> *>(memory);
    int num_expert_tiles = (p.E + Tile::BN - 1) / Tile::BN;
    int64_t first_token = blockIdx.x / num_expert_tiles * (int64_t)Tile::BM;
    int first_expert = (int)(blockIdx.x % num_expert_tiles) * Tile::BN;

    /* Main loop */
    for_each_origin<Tile::BM, Tile>([&](int i) {
        int64_t t = first_token + i;
        s.origin_a[i] = t < p.T ? (const T *)p.x + t * p.D : nullptr;
    });
    for_each_origin<Tile::BN, Tile>([&](int i) {
        int64_t e = first_expert + i;
        s.origin_b[i] = e < p.E ? (const T *)p.weight + e * p.D : nullptr;
    });
    __syncthreads();
    Operand<T> x = {s.origin_a}, weight = {s.origin_b};
    x.stride_k = weight.stride_k = 1;
    Tile tile;
    tile.zero();
    tile.main_loop(s.stages, x, weight, (int)p.D);

    /* Epilogue: add the bias, store */
    const T *bias = (const T *)p.bias;
    int warp_expert = first_expert + tile.warp_n() * WARP_N;
    auto epilogue = [&](int row, int chunk, const Acc *staging, Nothing) {
        int64_t t = first_token + row;
        if (row >= Tile::BM || t >= p.T) return;
        Acc v[CHUNK];
        load_accumulators(v, staging + chunk * CHUNK);
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            int e = warp_expert + chunk * CHUNK + i;
            if (e < p.E) ((Acc *)p.logits)[t * p.E + e] = v[i] + (bias ? to_accum(bias[e]) : Acc(0));
        }
    };
    for_each_chunk<WARP_N / CHUNK, true>(tile, s, epilogue);
}

/* --- a float32 weight beside a 16-bit x ----------------------------------------------------------------- */

typedef struct {
    const void *x; /* [n] */
    float *wide;   /* [n] */
    int64_t n;
} Widen;

template <typename T>
__global__ void widen_kernel(const __grid_constant__ Widen p) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < p.n) p.wide[i] = to_accum(((const T *)p.x)[i]);
}

bool is_mixed(const FusedMoeRouterLogits &p) {
    return p.weight_dtype != p.dtype;
}

size_t workspace(const FusedMoeRouterLogits &p) {
    return is_mixed(p) ? p.T * p.D * sizeof(float) : 0;
}

/* Copies x as float32 into the workspace. */
int widen(const FusedMoeRouterLogits &p, void *stream) {
    Widen q = {p.x, (float *)p.workspace.data, p.T * p.D};
    auto kernel = p.dtype == FUSED_MOE_BF16 ? widen_kernel<__nv_bfloat16> : widen_kernel<__half>;
    return launch(kernel, q, ceil_div(q.n, 256), 256, 0, stream);
}

/* --- launcher ------------------------------------------------------------------------------------------- */

int run(const FusedMoeRouterLogits &p, void *stream) {
    if (is_mixed(p)) {
        FusedMoeRouterLogits wide = p;
        wide.x = p.workspace.data;
        wide.dtype = p.weight_dtype;
        int status = widen(p, stream);
        return status == FUSED_MOE_OK ? run(wide, stream) : status;
    }
    return with_dtype(p.dtype, [&](auto t) {
        using T = decltype(t);
        const FusedMoeWeight weight = {(void *)p.weight, 0, p.D, 1};
        bool x_k_major = (uintptr_t)p.x % 16 == 0 && p.D % CHUNK == 0;
        Major major = major_of<T>(weight, p.D, 1, p.E, p.D);
        return with_tile<T, COLUMNS>(x_k_major, major, [&](auto tile) {
            using Tile = decltype(tile);
            int64_t grid = ceil_div(p.T, Tile::BM) * ceil_div(p.E, Tile::BN);
            return launch(router_logits_kernel<Tile>, p, grid, Tile::THREADS, shared_bytes<Tile>(), stream);
        });
    });
}

} // namespace

const Kernel<FusedMoeRouterLogits> router_logits = {nullptr, workspace, run};

} // namespace fused_moe::sm80
