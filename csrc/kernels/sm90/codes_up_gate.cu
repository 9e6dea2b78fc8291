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
    int32_t F;
    FusedMoeLayout layout;
    FusedMoeActivation activation;
} UpGate;

template <class Config>
struct ActivatingEpilogue {
    using T = typename Config::T;
    const UpGate &p;

    /* Accumulators go through shared memory: a lane then has gates and their ups whatever the layout is, and there is
     * one loop that activates them, not as many copies of it as accumulators. */
    template <int TOKENS>
    __device__ void store_swapped(float *d, const WorkTile &tile, int subtile, int warp,
                                  uint32_t staging) const {
        constexpr int ROWS = 16, PITCH = 20; /* staged at a time; floats, so that no banks conflict */
        static_assert(4 * ROWS * PITCH * sizeof(float) <= Config::STAGING_BYTES);
        staging += warp * ROWS * PITCH * 4;
        int lane = threadIdx.x % 32, first_column = tile.first_column + SUBTILE * subtile + 16 * warp;
        Columns columns = {2, 1, 4, first_column / 2}; /* of interleaved ones a gate's up is the next */
        if (p.layout == FUSED_MOE_UNGATED) columns = {1, 0, 8, first_column};
        if (p.codes.gemm.gate_up)
            columns = {1, 8, 4, tile.first_column + SUBTILE * (subtile / 2) + 16 * warp + 8 * (subtile % 2)};
#pragma unroll 1
        for (int first = 0; first < tile.num_rows; first += ROWS) {
#pragma unroll
            for (int i = 0; i < min(ROWS, TOKENS) / 2; i++) {
                int row = i / 4 * 8 + lane % 4 * 2 + i % 2, column = i / 2 % 2 * 8 + lane / 4;
                st_shared(staging + 4 * (PITCH * row + column), d[i]);
            }
            __syncwarp();
            int rows = min(ROWS, tile.num_rows - first);
            for (int i = lane; i < rows * columns.pairs; i += 32) {
                int row = i / columns.pairs, pair = i % columns.pairs;
                store_pair(tile, first + row, columns, pair, staging + 4 * PITCH * row);
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < TOKENS / 2 - ROWS / 2; i++) d[i] = d[i + ROWS / 2]; /* the next rows' */
        }
    }

    /* Of a warp's 16 columns: from a gate to the next, and to its up; pairs of outputs, and the first of them. */
    typedef struct {
        int step, up, pairs, first_output;
    } Columns;

    /* Two outputs of a row, of accumulators in shared memory. */
    __device__ void store_pair(const WorkTile &tile, int row, const Columns &columns, int pair,
                               uint32_t staged) const {
        int output = columns.first_output + 2 * pair;
        if (output >= p.F) return;
        const T *bias = bias_of(p.bias, tile), *bias_up = bias_of(p.bias_up, tile);
        float gate[2], up[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int column = columns.step * (2 * pair + i);
            gate[i] = __uint_as_float(ld_shared_u32(staged + 4 * column));
            up[i] = __uint_as_float(ld_shared_u32(staged + 4 * (column + columns.up)));
            if (bias) gate[i] += to_accum(bias[columns.step * (output + i)]);
            if (p.layout == FUSED_MOE_INTERLEAVED && bias) up[i] += to_accum(bias[2 * (output + i) + 1]);
            if (bias_up) up[i] += to_accum(bias_up[output + i]);
        }
        with_activation<T>(p.activation.kind, [&](auto act) {
            float alpha = (float)p.activation.alpha, limit = (float)p.activation.limit;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                gate[i] = act.gate(gate[i], alpha, limit).value;
                if (p.layout != FUSED_MOE_UNGATED) gate[i] *= act.up(up[i], limit).value;
            }
        });
        from_accums((T *)p.a + (int64_t)(tile.first_row + row) * p.F + output, gate[0], gate[1]);
    }

    __device__ const T *bias_of(const void *bias, const WorkTile &tile) const {
        return bias ? (const T *)bias + tile.expert * p.bias_stride : nullptr;
    }
};

template <class Config>
__global__ void __launch_bounds__(Config::THREADS, Config::CTAS_PER_SM)
    codes_up_gate_kernel(const __grid_constant__ UpGate p) {
    persistent_codes_gemm<Config>(p.codes, ActivatingEpilogue<Config>{p});
    zero_rows_past(p.codes.gemm.tiles, (typename Config::T *)p.a, p.F);
}

/* --- launcher ------------------------------------------------------------------------------------------- */

template <class Config>
int launch(const FusedMoeUpGate &p, void *stream) {
    using T = typename Config::T;
    const FusedMoeRowMap &rows = p.row_map;
    bool is_gate_up = p.layout == FUSED_MOE_SEPARATE || p.layout == FUSED_MOE_HALVES;
    bool halves = p.layout == FUSED_MOE_HALVES;
    int32_t F = (int32_t)p.F, H = p.layout == FUSED_MOE_UNGATED ? F : 2 * F;
    int32_t b_rows = is_gate_up ? F : H; /* of a map of B */
    UpGate q = {};
    q.a = p.a;
    q.F = F;
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
    gemm.num_k_tiles[0] = (int32_t)ceil_div(p.D, Config::COLUMNS);
    gemm.gate_up = is_gate_up;
    int status = set_codes<Config>(q.codes, 0, p.w1, rows.E, 0, b_rows);
    if (status == FUSED_MOE_OK && is_gate_up)
        status = set_codes<Config>(q.codes, 1, halves ? p.w1 : p.w3, rows.E, halves ? F : 0, F);
    if (status != FUSED_MOE_OK) return status;
    gemm.tiles = tile_source(rows.offs, rows.schedule, rows.R, rows.E, b_rows,
                             is_gate_up ? Config::BN / 2 : Config::BN, p.workspace.counters);
    if (p.slots) plan_in_kernel(gemm, *p.slots);
    gemm.tiles.lets_next_start = p.next_starts_early;
    return launch_persistent<Config, PlanningShared<Config>, codes_up_gate_kernel<Config>>(q, stream);
}

int run(const FusedMoeUpGate &p, void *stream) {
    return with_decoder(p.dtype, *p.w1.codes, [&](auto decoder) {
        return with_codes_config<decltype(decoder), true>(
            p.row_map.R, p.row_map.E, [&](auto config) { return launch<decltype(config)>(p, stream); });
    });
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
    if (p.h || !has_readable_codes(p.w1)) return FUSED_MOE_STRIDES;
    if (p.w3.data && (!has_readable_codes(p.w3) || !are_alike(*p.w1.codes, *p.w3.codes)))
        return FUSED_MOE_STRIDES;
    if (p.layout == FUSED_MOE_HALVES && p.F % SUBTILE) return FUSED_MOE_STRIDES; /* ups begin within a tile */
    return is_countable(rows.R, rows.E, 2 * p.F) ? FUSED_MOE_RUNS : FUSED_MOE_TOO_LARGE;
}

} // namespace

const Kernel<FusedMoeUpGate> codes_up_gate = {reason, nullptr, run};

} // namespace sm90
} // namespace fused_moe
