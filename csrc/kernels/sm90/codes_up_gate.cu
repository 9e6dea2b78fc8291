/* up_gate of quantised weights on Hopper, by codes_engine.cuh: a = act(x w1^T + b1) (x w3^T + b3). h is not kept:
 * gradients are not for this kernel. */
#include "../common/activation.cuh"
#include "codes_engine.cuh"

namespace fused_moe {
namespace sm90 {
namespace {

/* --- kernel --------------------------------------------------------------------------------------------- */

typedef struct {
    CodesGemm codes;
    const void *bias, *bias_up; /* [E] x bias_stride: of h's columns, of halves the two's; or NULL */
    int64_t bias_stride;
    void *a; /* [R,F] */
    int32_t F, H;
    FusedMoeLayout layout;
    FusedMoeActivation activation;
} UpGate;

template <typename T>
struct ActivatingEpilogue {
    const UpGate &p;

    template <int TOKENS, class Writer>
    __device__ void store_swapped(float (&d)[TOKENS], const WorkTile &tile, int wg, int warp,
                                  Writer &writer) {
        const T *bias = bias_of(p.bias, tile), *bias_up = bias_of(p.bias_up, tile);
        T *out = (T *)p.a + (int64_t)tile.first_row * p.F;
        int column = tile.first_column + 16 * warp;
        if (p.codes.gemm.gate_up) {
            float *up = d + TOKENS / 2;
            column += wg * SUBTILE;
            if (column >= p.F) return;
            if (bias) add_bias_swapped<TOKENS>(d, bias, column, p.F);
            if (bias_up) add_bias_swapped<TOKENS>(up, bias_up, column, p.F);
            for_each_part<TOKENS>(tile, [&](auto part, int first, int rows) {
                float *gates = d + first / 2, *ups = up + first / 2;
                activate<part.value / 2>(gates, [&](int n) { return ups[n]; }, true);
                writer.template store_swapped<part.value>(gates, out + (int64_t)first * p.F + column, p.F,
                                                          rows, p.F - column);
            });
            return;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float *outputs = &d[TOKENS / 2 * i];
            int first_column = column + (2 * wg + i) * SUBTILE, left = p.H - first_column;
            if (left <= 0) return;
            if (bias) add_bias_swapped<TOKENS>(outputs, bias, first_column, p.H);
            for_each_part<TOKENS>(tile, [&](auto part, int first, int rows) {
                float *values = outputs + first / 2;
                T *part_out = out + (int64_t)first * p.F;
                if (p.layout == FUSED_MOE_UNGATED) {
                    activate<part.value / 2>(values, [](int) { return 1.f; }, false);
                    writer.template store_swapped<part.value>(values, part_out + first_column, p.F, rows,
                                                              left);
                } else { /* a gate's up is the next column, four lanes on */
                    auto up = [&](int n) { return __shfl_down_sync(~0u, values[n], 4); };
                    activate<part.value / 2>(values, up, true);
                    writer.template store_swapped_pairs<part.value>(values, part_out + first_column / 2, p.F,
                                                                    rows, left / 2);
                }
            });
        }
    }

    /* fn(so many tokens, the first one, their rows in the tile), 32 at a time: registers are few. */
    template <int TOKENS, typename Fn>
    __device__ static void for_each_part(const WorkTile &tile, Fn fn) {
        constexpr int PART = TOKENS < 32 ? TOKENS : 32;
#pragma unroll
        for (int first = 0; first < TOKENS; first += PART)
            fn(std::integral_constant<int, PART>(), first, min(PART, tile.num_rows - first));
    }

    __device__ const T *bias_of(const void *bias, const WorkTile &tile) const {
        return bias ? (const T *)bias + tile.expert * p.bias_stride : nullptr;
    }

    /* gate = act(gate) up, or act(gate): in place, since registers are few. */
    template <int count, typename Up>
    __device__ void activate(float *gate, Up up_of, bool gated) const {
        const FusedMoeActivation &f = p.activation;
        with_activation<T>(f.kind, [&](auto act) {
            float alpha = (float)f.alpha, limit = (float)f.limit;
#pragma unroll
            for (int i = 0; i < count; i++) {
                float up = up_of(i), v = act.gate(gate[i], alpha, limit).value;
                gate[i] = gated ? v * act.up(up, limit).value : v;
                pin(gate[i]);
            }
        });
    }
};

template <class Config>
__global__ void __launch_bounds__(Config::THREADS, Config::CTAS_PER_SM)
    codes_up_gate_kernel(const __grid_constant__ UpGate p) {
    persistent_codes_gemm<Config>(p.codes, ActivatingEpilogue<typename Config::T>{p});
    zero_rows_past(p.codes.gemm.tiles, (typename Config::T *)p.a, p.F);
}

/* --- launcher ------------------------------------------------------------------------------------------- */

template <class Config>
int launch(const FusedMoeUpGate &p, void *stream) {
    using Decoder = typename Config::Decoder;
    using T = typename Config::T;
    const FusedMoeRowMap &rows = p.row_map;
    bool is_gate_up = p.layout == FUSED_MOE_SEPARATE || p.layout == FUSED_MOE_HALVES;
    bool halves = p.layout == FUSED_MOE_HALVES;
    int32_t F = (int32_t)p.F, H = p.layout == FUSED_MOE_UNGATED ? F : 2 * F;
    int32_t b_rows = is_gate_up ? F : H; /* of a map of B */
    UpGate q = {};
    q.a = p.a;
    q.F = F;
    q.H = H;
    q.layout = p.layout;
    q.activation = p.activation;
    q.bias = p.b1;
    q.bias_up = !halves ? p.b3 : p.b1 ? (const T *)p.b1 + F : nullptr;
    q.bias_stride = halves ? H : b_rows;

    Gemm &gemm = q.codes.gemm;
    gemm.x = p.x;
    gemm.row_token = rows.row_token;
    gemm.T = rows.T;
    gemm.k = (int32_t)p.D;
    gemm.num_k_tiles[0] = (int32_t)ceil_div(p.D, K_TILE<T>);
    gemm.gate_up = is_gate_up;
    Scales *scales = q.codes.scales;
    int status = codes_of<Decoder>(&gemm.b[0], &scales[0], p.w1, rows.E, 0, b_rows);
    scales[1] = scales[0];
    if (status == FUSED_MOE_OK && is_gate_up)
        status = codes_of<Decoder>(&gemm.b[1], &scales[1], halves ? p.w1 : p.w3, rows.E, halves ? F : 0, F);
    if (status != FUSED_MOE_OK) return status;
    gemm.tiles = tile_source(rows.offs, rows.schedule, rows.R, rows.E, b_rows,
                             is_gate_up ? Config::BN / 2 : Config::BN, p.workspace.counters);
    gemm.tiles.swaps_skinny = true;
    if (p.slots) plan_in_kernel(gemm, *p.slots);
    gemm.tiles.lets_next_start = p.next_starts_early;
    return launch_persistent<Config, PlanningShared<Config>, codes_up_gate_kernel<Config>>(q, stream);
}

int run(const FusedMoeUpGate &p, void *stream) {
    return with_decoder(p.dtype, *p.w1.codes, [&](auto decoder) {
        return with_codes_config<decltype(decoder), true>(
            p.row_map.R, p.row_map.E, p.D, [&](auto config) { return launch<decltype(config)>(p, stream); });
    });
}

/* Whether one kernel decodes both. */
bool are_alike(const FusedMoeQuantizedWeight &a, const FusedMoeQuantizedWeight &b) {
    auto kind = [](const FusedMoeQuantizedWeight &w) {
        return w.format == FUSED_MOE_FP8_BLOCK ? FUSED_MOE_FP8 : w.format;
    };
    return kind(a) == kind(b) && a.scale_dtype == b.scale_dtype;
}

FusedMoeReason reason(const FusedMoeUpGate &p) {
    const FusedMoeRowMap &rows = p.row_map;
    if (!is_16_bit(p.dtype)) return FUSED_MOE_OTHER_DTYPE;
    if (rows.R == 0 || rows.T == 0) return FUSED_MOE_NO_ROWS;
    if (p.scores) return FUSED_MOE_SCORED_INPUT;
    if (has_many_rows(rows.R, rows.E)) return FUSED_MOE_MANY_ROWS;
    if (p.D % CHUNK || p.F % CHUNK) return FUSED_MOE_WIDTH;
    for (const void *data : {p.x, (const void *)p.a, p.b1, p.b3})
        if (!is_aligned(data)) return FUSED_MOE_UNALIGNED;
    if (p.h || !has_readable_codes(p.w1, rows.E)) return FUSED_MOE_STRIDES;
    if (p.w3.data && (!has_readable_codes(p.w3, rows.E) || !are_alike(*p.w1.codes, *p.w3.codes)))
        return FUSED_MOE_STRIDES;
    return is_countable(rows.R, rows.E, 2 * p.F) ? FUSED_MOE_RUNS : FUSED_MOE_TOO_LARGE;
}

} // namespace

const Kernel<FusedMoeUpGate> codes_up_gate = {reason, nullptr, run};

} // namespace sm90
} // namespace fused_moe
