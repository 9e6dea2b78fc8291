/* up_gate on the Hopper engine: h = x[row_token] w1^T | w3^T + b and a = act(gate) up in one product.
 *
 * For a gated expert the four boxes of a tile's columns are 64 gates, the 64 ups that belong to them, and the
 * next 64 of each, from two maps: w1 and w3, or the two halves of a packed weight. A gate and its up are then
 * 64 columns apart and meet in one thread's registers, 32 numbers apart. Interleaved weights have the pair in
 * neighbouring columns, which one thread holds, too. Nothing is copied, and h and a leave the registers only
 * for the copy engine. */
#include "../activation.cuh"
#include "engine.cuh"
#include "tier.cuh"

namespace fused_moe {

/* --- kernel ------------------------------------------------------------------------------------------------ */

enum { MAP_A, MAP_GATE, MAP_UP }; /* results; interleaved and ungated h is MAP_GATE */

typedef struct {
    Product product;
    const void *b_gate, *b_up; /* [E] rows of biases, bias_pitch apart in memory; or NULL */
    void *h, *a;               /* h may be NULL */
    int64_t bias_stride;       /* from expert to expert */
    int32_t bias_pitch;        /* from column to column */
    int32_t F, H;
    FusedMoeLayout layout;
    FusedMoeActivation activation;
} UpGate;

/* v = act(gate) up for 32 pairs of a thread. */
template <typename T>
__device__ inline void activate_pairs(float (&v)[32], const float *gate, const float *up,
                                      const FusedMoeActivation &f) {
    with_activation<T>(f.kind, [&](auto act) {
#pragma unroll
        for (int i = 0; i < 32; i++)
            v[i] = act.gate(gate[i], f.alpha, f.limit).value * act.up(up[i], f.limit).value;
    });
}

template <typename T>
__device__ inline void pack_box(uint32_t (&words)[16], const float *d) {
#pragma unroll
    for (int j = 0; j < 16; j++) words[j] = pack<T>(d[2 * j], d[2 * j + 1]);
}

template <class Tile, FusedMoeLayout layout>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    hopper_up_gate_kernel(const __grid_constant__ UpGate p) {
    using T = typename Tile::T;
    const Plan &plan = p.product.plan;
    auto finish = [&](float (&d)[128], const Item &item, int row, BoxWriter &writer) {
        const CUtensorMap *map_a = plan.maps + MAP_A * plan.E + item.expert;
        const CUtensorMap *map_gate = map_a + plan.E, *map_up = map_gate + plan.E;
        int64_t expert = (int64_t)item.expert * p.bias_stride;
        const T *b_gate = p.b_gate ? (const T *)p.b_gate + expert : nullptr;
        const T *b_up = p.b_up ? (const T *)p.b_up + expert : nullptr;
        uint32_t words[16];
        if constexpr (layout == FUSED_MOE_SEPARATE) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float *gate = &d[32 * i], *up = gate + 64, a[32];
                int column = (2 * item.column + i) * BOX;
                if (column >= p.F) break;
                if (b_gate) add_bias(gate, b_gate, column, p.bias_pitch, p.F);
                if (b_up) add_bias(up, b_up, column, p.bias_pitch, p.F);
                if (p.h) {
                    pack_box<T>(words, gate);
                    writer.store(words, map_gate, column, row);
                    pack_box<T>(words, up);
                    writer.store(words, map_up, column, row);
                }
                activate_pairs<T>(a, gate, up, p.activation);
                pack_box<T>(words, a);
                writer.store(words, map_a, column, row);
            }
        }
    };
    grouped_product<Tile>(p.product, finish);
    if (p.h) zero_rows_past(plan, (T *)p.h, p.H);
    zero_rows_past(plan, (T *)p.a, p.F);
}

/* --- launcher ----------------------------------------------------------------------------------------------- */

template <class Tile, FusedMoeLayout layout>
static int run(const FusedMoeUpGate &p, void *stream) {
    using T = typename Tile::T;
    const FusedMoePlan &rows = p.plan;
    bool packed = p.layout == FUSED_MOE_HALVES;
    int32_t F = (int32_t)p.F, H = p.layout == FUSED_MOE_UNGATED ? F : 2 * F;
    UpGate q = {};
    q.h = p.h;
    q.a = p.a;
    q.F = F;
    q.H = H;
    q.layout = p.layout;
    q.activation = p.activation;
    q.b_gate = p.b1;
    q.b_up = packed && p.b1 ? (const T *)p.b1 + F : p.b3;
    q.bias_stride = packed ? H : F;
    q.bias_pitch = 1;

    Product &product = q.product;
    product.x = p.x;
    product.row_token = rows.row_token;
    product.T = rows.T;
    product.k = (int32_t)p.D;
    product.steps[0] = (int32_t)ceil_div(p.D, BOX);
    product.paired = true;
    FusedMoeWeight gate = p.w1, up = p.w3;
    if (packed) {
        up = p.w1;
        up.data = (T *)up.data + F * up.stride_out;
    }
    int status = weight_map<T>(&product.b[0], gate, Tile::B_MAJOR, gate.stride_out, gate.stride_in,
                               rows.E, F, p.D, Tile::BN / 2);
    if (status == FUSED_MOE_OK)
        status = weight_map<T>(&product.b[1], up, Tile::B_MAJOR, up.stride_out, up.stride_in, rows.E,
                               F, p.D, Tile::BN / 2);
    Result results[MAX_RESULTS] = {};
    auto result = [&](int i, T *data, int64_t width, int64_t pitch) {
        results[i].data = data;
        results[i].pitch_bytes = pitch * sizeof(T);
        if (status == FUSED_MOE_OK)
            status = matrix_map(&results[i].whole, data, rows.R, width, pitch, 16);
    };
    result(MAP_A, (T *)p.a, F, F);
    if (p.h) {
        result(MAP_GATE, (T *)p.h, F, H);
        result(MAP_UP, (T *)p.h + F, F, H);
    }
    product.plan.R = rows.R;
    product.plan.E = rows.E;
    product.plan.num_columns = (int32_t)ceil_div(F, Tile::BN / 2);
    product.plan.schedule = schedule_for(Tile::BM);
    if (status == FUSED_MOE_OK)
        status = make_plan(&product.plan, rows.ends, results, p.workspace, stream);
    if (status == FUSED_MOE_OK)
        status = launch_product<Tile>(hopper_up_gate_kernel<Tile, layout>, q, stream);
    return status;
}

int hopper_up_gate(const FusedMoeUpGate &p, void *stream) {
    return with_half(p.dtype, [&](auto t) {
        using T = decltype(t);
        if (p.w1.stride_in == 1)
            return run<Tile<T, ALONG_K, true>, FUSED_MOE_SEPARATE>(p, stream);
        return run<Tile<T, ALONG_LINES, true>, FUSED_MOE_SEPARATE>(p, stream);
    });
}

} // namespace fused_moe
