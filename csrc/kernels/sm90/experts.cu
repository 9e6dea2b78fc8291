/* Both sides of experts of few rows in one launch, with dense weights: experts.cuh's kernel, with the tiles
 * of FewRowsConfig (config.cuh).
 *
 * Where tiles are few each has 64 rows of weights instead of 128 (PAIRED). In up_gate these are 32 of the
 * gate's and 32 of the up's, paired by eights, so that a thread still has both of a column: one box of a map
 * whose third dimension steps from one weight to the other. */
#include <atomic>
#include <random>

#include "experts.cuh"
#include "up_gate.cuh"

namespace fused_moe {
namespace sm90 {

/* splitmix64 of a counter, which is a permutation, from a random start. */
uint64_t next_experts_tag() {
    static std::atomic<uint64_t> counter{(uint64_t)std::random_device()() << 32 | std::random_device()()};
    uint64_t z = counter.fetch_add(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    z ^= z >> 31;
    return z ? z : next_experts_tag(); /* 0 is an erased one */
}

namespace {

/* --- parameters ----------------------------------------------------------------------------------------- */

struct PairedUpGate : UpGate {
    CUtensorMap paired; /* of paired tiles: the gate's and the up's rows */
    bool up_is_first;   /* its rows come first in a pair                 */
};

typedef struct {
    DenseGemm gemm;
    const void *bias; /* [E,M] or NULL */
    void *out;        /* [R,M] y */
    int32_t M;
} DenseDown;

constexpr int PAIRED_COLUMNS = 32; /* hidden ones of a paired tile */

/* Subtiles of 64 rows of weights: a tile of up_gate has UP_SUBTILES, one of the down GEMM DOWN_SUBTILES. */
template <typename T, Major B_MAJOR, int ROWS, int UP_SUBTILES, int DOWN_SUBTILES>
struct DenseConfig : FewRowsConfig<T, B_MAJOR, true, ROWS, UP_SUBTILES> {
    static constexpr bool PAIRED = UP_SUBTILES == 1;
    using Down = FewRowsConfig<T, B_MAJOR, true, ROWS, DOWN_SUBTILES>;
    using Queue = ExpertsQueue<FewRowsConfig<T, B_MAJOR, true, ROWS, UP_SUBTILES>>;
};

/* --- consumers ------------------------------------------------------------------------------------------ */

/* What run_mainloop_swapped left of a paired tile of up_gate: a warp has 8 hidden columns, a thread one. */
template <int TOKENS, typename Out, typename Bias>
__device__ __forceinline__ void store_paired(const PairedUpGate &up,
                                             const UpGateEpilogue<Out, Bias, GATE_UP> &epilogue,
                                             const float *d, const ExpertsTile &tile, int warp) {
    const int lane = threadIdx.x % 32, first = tile.first_column + CHUNK * warp, column = first + lane / 4;
    if (first >= up.F) return;
    const Bias *bias = epilogue.bias_of(up.bias, tile), *bias_up = epilogue.bias_of(up.bias_up, tile);
    const float of_gate = bias ? to_accum(bias[column]) : 0, of_up = bias_up ? to_accum(bias_up[column]) : 0;
    float gates[TOKENS / 4], ups[TOKENS / 4];
#pragma unroll
    for (int i = 0; i < TOKENS / 4; i++) {
        const float low = d[i / 2 * 4 + i % 2], high = d[i / 2 * 4 + 2 + i % 2];
        gates[i] = up.up_is_first ? high : low, ups[i] = up.up_is_first ? low : high;
        if (bias) gates[i] += of_gate;
        if (bias_up) ups[i] += of_up;
    }
    epilogue.template activate<true, 1>(gates, gates, ups);
    /* Transposed, a lane has two columns of one row. */
    Out *a = (Out *)up.a + (int64_t)(tile.first_row + lane / 4) * up.F + first + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j++) {
        uint32_t pair = movmatrix_trans(pack<Out>(gates[2 * j], gates[2 * j + 1]));
        if (8 * j + lane / 4 < tile.num_rows) *(uint32_t *)(a + 8 * j * (int64_t)up.F) = pair;
    }
}

template <class Config_, Columns columns>
struct Dense {
    using Config = Config_;
    using Up = PairedUpGate;
    using Down = DenseDown;
    static constexpr Columns COLUMNS = columns;
    static constexpr int WARP_SUBTILES = Config::Down::SUBTILES;

    __device__ static void load_up(const Up &up, uint32_t b, uint32_t full, int k_tile,
                                   const ExpertsTile &tile) {
        if constexpr (Config::PAIRED)
            cp_async_bulk_tensor_load(b, &up.paired, full, K_TILE<typename Config::Operand> * k_tile, 0, 0,
                                      tile.first_column / CHUNK, tile.expert);
        else
            Config::Weight::load(up.gemm, b, full, 0, k_tile, tile);
    }

    __device__ static bool has_columns(const ExpertsTile &, int) { return true; }

    class Compute {
        using Out = typename Config::Out;
        using Bias = typename Config::Bias;
        const Experts<Dense> &p;
        ExpertsShared<Config> &s;
        const int warp;
        typename Config::Pipeline pipe;
        SkinnyWriter<Config::BM> writer;
        UpGateEpilogue<Out, Bias, columns> epilogue;

      public:
        __device__ Compute(const Experts<Dense> &p, ExpertsShared<Config> &s, int wg, int warp)
            : p(p), s(s), warp(warp), writer(shared_address(s.staging[wg]), WARPGROUP_BARRIER + wg, warp),
              epilogue{p.up} {}

        __device__ void up(const ExpertsTile &tile) {
            with_tokens<Config>(tile.num_rows, [&](auto tokens) {
                float d[tokens.value / 2 * Config::SUBTILES];
                run_mainloop_swapped<Config, tokens.value>(d, s, pipe, p.up.gemm.num_k_tiles[0], 0, 1);
                if constexpr (Config::PAIRED)
                    store_paired<tokens.value>(p.up, epilogue, d, tile, warp);
                else
                    epilogue.template store_swapped<tokens.value, 2>(d, tile, 0, warp, writer);
            });
        }

        __device__ void down(const ExpertsTile &tile) {
            with_tokens<Config>(tile.num_rows, [&](auto tokens) {
                float d[tokens.value / 2 * WARP_SUBTILES];
                run_mainloop_swapped<Config, tokens.value, WARP_SUBTILES>(d, s, pipe,
                                                                          p.down.gemm.num_k_tiles[0], 0, 1);
                store_swapped_subtiles<Out, Bias, tokens.value, WARP_SUBTILES>(p.down, d, tile, 0, warp,
                                                                               writer);
            });
        }
    };
};

/* --- launcher ------------------------------------------------------------------------------------------- */

bool has_few_rows(const FusedMoeExperts &p) {
    return fused_moe_few_rows_together(p.down.R, p.down.E) == 16;
}

/* Gate and up, that of lower address first. */
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

template <class Kind>
int launch(const FusedMoeExperts &p, void *stream) {
    using Config = typename Kind::Config;
    using T = typename Config::Out;
    const FusedMoeGroupedMM &d = p.down;
    Experts<Kind> q = {};
    int status = set_up_gate<Config, Kind::COLUMNS>(&q.up, p.up);
    if constexpr (Config::PAIRED) {
        TileSource &up = q.up.gemm.tiles;
        up = tile_source(up.offs, up.schedule, up.R, up.E, p.up.F, PAIRED_COLUMNS, nullptr);
        const WeightPair pair = weight_pair_of(p.up);
        q.up.up_is_first = pair.up_is_first;
        if (status == FUSED_MOE_OK)
            status = paired_map<T>(&q.up.paired, pair.first, pair.second, d.E, p.up.F, p.up.D,
                                   PAIRED_COLUMNS / CHUNK);
    }
    q.down.bias = d.bias;
    q.down.out = d.out;
    q.down.M = (int32_t)d.M;
    if (status == FUSED_MOE_OK)
        status = weight_map<T>(&q.down.gemm.weight.map[0], d.b[0], Config::B_MAJOR, d.b[0].stride_out,
                               d.b[0].stride_in, d.E, d.M, d.N[0], SUBTILE);
    return status == FUSED_MOE_OK ? launch_experts(q, p, Config::Down::BN, stream) : status;
}

template <class Config>
int run_columns(const FusedMoeExperts &p, void *stream) {
    return with_columns(p.up.layout, [&](auto columns) {
        if constexpr (has_kernel<Config, columns.value>())
            return launch<Dense<Config, columns.value>>(p, stream);
        else
            return (int)FUSED_MOE_UNSUPPORTED_DTYPE; /* reason said no */
    });
}

template <typename T, Major MAJOR>
int run_config(const FusedMoeExperts &p, void *stream) {
    if constexpr (MAJOR == Major::K)
        if (pairs_rows(p)) return launch<Dense<DenseConfig<T, MAJOR, 16, 1, 1>, GATE_UP>>(p, stream);
    if (!has_few_rows(p)) return run_columns<DenseConfig<T, MAJOR, 64, 2, 2>>(p, stream);
    if (columns_of_down(p) == SUBTILE) return run_columns<DenseConfig<T, MAJOR, 16, 2, 1>>(p, stream);
    return run_columns<DenseConfig<T, MAJOR, 16, 2, 2>>(p, stream);
}

int run(const FusedMoeExperts &p, void *stream) {
    if (p.up.w1.stride_in != 1) return run_config<__nv_bfloat16, Major::MN>(p, stream);
    return p.up.dtype == FUSED_MOE_BF16 ? run_config<__nv_bfloat16, Major::K>(p, stream)
                                        : run_config<__half, Major::K>(p, stream);
}

FusedMoeReason reason(const FusedMoeExperts &p) {
    FusedMoeReason why = up_gate.reason(p.up);
    if (why == FUSED_MOE_RUNS) why = grouped_mm.reason(p.down);
    if (why == FUSED_MOE_RUNS) why = together_reason(p, PAIRED_COLUMNS);
    if (why != FUSED_MOE_RUNS) return why;
    bool is_k_major = p.up.w1.stride_in == 1, is_bf16 = p.up.dtype == FUSED_MOE_BF16;
    bool has_tiles = (is_bf16 || is_k_major) && with_columns(p.up.layout, [&](auto columns) {
                         return has_few_rows_kernel(is_bf16, columns.value);
                     });
    bool are_alike = is_k_major == (p.down.b[0].stride_in == 1);
    return are_alike && has_tiles ? FUSED_MOE_RUNS : FUSED_MOE_STRIDES;
}

} // namespace

const Kernel<FusedMoeExperts> experts = {reason, experts_workspace, run};

} // namespace sm90
} // namespace fused_moe
