/* dscores: adds each slot's partial sums of <g, a>, and with a bias <dout, b2>. A slot has one thread, or
 * with a bias one warp. The order of its sum is fixed, so the result is deterministic. */
#include "dscores.cuh"

#include "launch.cuh"
#include "numeric.cuh"
#include "schedule.cuh"

namespace fused_moe {
namespace {

constexpr int THREADS = 256;

typedef struct {
    FusedMoeDownDgrad p;
    const void *partials; /* [R, partials_per_row] */
    int64_t partials_per_row;
} Dscores;

/* LANES of a warp share a slot: 1 or 32. */
template <typename T, int LANES>
__global__ void __launch_bounds__(THREADS) dscores_kernel(const __grid_constant__ Dscores s) {
    using Acc = Accum<T>;
    const FusedMoeDownDgrad &p = s.p;
    const FusedMoeRowMap &row_map = p.row_map;
    const FusedMoeExpertList experts = {nullptr, (int32_t *)row_map.offs, row_map.E};
    int lane = threadIdx.x % LANES;
    int64_t num_slots = row_map.T * row_map.K;
    int64_t first_slot = (blockIdx.x * (int64_t)THREADS + threadIdx.x) / LANES;
    int64_t stride = (int64_t)gridDim.x * THREADS / LANES;
    griddepcontrol_wait();
    if (p.pdl.lets_next_start) griddepcontrol_launch_dependents();
    int64_t num_rows = num_rows_of(row_map.offs, row_map.E, row_map.R);
    for (int64_t slot = first_slot; slot < num_slots; slot += stride) {
        int64_t r = row_map.token_row ? row_map.token_row[slot] : slot;
        Acc sum = 0;
        if (r >= 0 && r < num_rows) {
            const Acc *row = (const Acc *)s.partials + r * s.partials_per_row;
            for (int64_t i = lane; i < s.partials_per_row; i += LANES) sum += row[i];
            if constexpr (LANES == 32) {
                int64_t expert = fused_moe_find_owner(&experts, (int32_t)r);
                const T *bias = (const T *)p.b2 + expert * p.D,
                        *dout = (const T *)p.dout + slot / row_map.K * p.D;
                for (int64_t i = lane; i < p.D; i += 32) sum += to_accum(bias[i]) * to_accum(dout[i]);
                sum = warp_sum(sum);
            }
        }
        if (lane == 0) ((Acc *)p.dscores)[slot] = sum;
    }
}

} // namespace

int run_dscores(const FusedMoeDownDgrad &p, const void *partials, int64_t partials_per_row, void *stream) {
    Dscores s = {p, partials, partials_per_row};
    int64_t num_slots = p.row_map.T * p.row_map.K;
    return with_dtype(p.dtype, [&](auto t) {
        using T = decltype(t);
        auto how = [](int64_t threads) { return Launch{ceil_div(threads, THREADS), THREADS, 1, 0}; };
        if (p.b2) return launch_dependent<dscores_kernel<T, 32>>(s, how(num_slots * 32), stream);
        return launch_dependent<dscores_kernel<T, 1>>(s, how(num_slots), stream);
    });
}

} // namespace fused_moe
