/* What the sm90 launchers share: the grid, the tile source, and which calls TMA and wgmma can take. */
#pragma once

#include "../dispatch.cuh"
#include "tile_queue.cuh"

namespace fused_moe {
namespace sm90 {

/* --- launching ------------------------------------------------------------------------------------------ */

constexpr size_t SM_SHARED_BYTES = 228 * 1024; /* of sm_90 */
constexpr size_t CTA_SHARED_BYTES = 1024;      /* reserved by the system in every CTA */

/* CTAs of a grid whose CTAs are all resident: per_sm on each SM. */
inline int num_ctas(int per_sm = 1) {
    int ctas = per_sm * current_device().num_sms;
    return ctas < FUSED_MOE_MAX_CTAS ? ctas : FUSED_MOE_MAX_CTAS;
}

/* Row tiles and N tiles of a GEMM: `columns` output columns in tiles of tile_n. */
inline TileSource tile_source(const int32_t *offs, const int32_t *schedule, int64_t R, int32_t E,
                              int64_t columns, int tile_n, uint32_t *counters) {
    const ScheduleOverride &asked = schedule_override();
    TileSource source = {};
    source.offs = offs;
    source.schedule = schedule;
    source.R = R;
    source.E = E;
    source.tile_n = tile_n;
    source.swaps_skinny = !asked.no_tails;
    source.order = fused_moe_default_order((int32_t)ceil_div(columns, tile_n), 0);
    if (asked.group) source.order.group = asked.group;
    if (asked.no_interleave) source.order.interleave = 0;
    source.counters = counters;
    return source;
}

/* Bytes of the per-expert tensor maps, first in the workspace. */
inline size_t map_bytes(int num_maps) {
    return (size_t)num_ctas() * MAP_SLOTS * num_maps * sizeof(CUtensorMap);
}

/* Launches one wave of CTAs with a Memory each. */
template <class Config, class Memory, auto kernel, typename Params>
int launch_persistent(const Params &p, void *stream, const FusedMoePdl &pdl = {}) {
    static_assert(Config::CTAS_PER_SM * (sizeof(Memory) + CTA_SHARED_BYTES) <= SM_SHARED_BYTES,
                  "shared memory of an SM of sm_90");
    Launch how = {num_ctas(Config::CTAS_PER_SM), Config::THREADS, 1, sizeof(Memory), pdl};
    return launch_dependent<kernel>(p, how, stream);
}

/* Calls fn with a value of the 16-bit dtype. */
template <typename Fn>
int with_half(FusedMoeDtype dtype, Fn fn) {
    return dtype == FUSED_MOE_BF16 ? fn(__nv_bfloat16()) : fn(__half());
}

/* --- which calls the tier takes: TMA needs 16-byte aligned rows, strides of multiples of 16 bytes ------- */

inline bool is_16_bit(FusedMoeDtype dtype) {
    return dtype == FUSED_MOE_BF16 || dtype == FUSED_MOE_F16;
}

inline bool is_aligned(const void *data) {
    return (uintptr_t)data % 16 == 0;
}

/* Weight (E, N, k) of 16-bit elements: one of N and k is contiguous, the other strides are multiples of 16
 * bytes. */
inline bool is_readable(const FusedMoeWeight &w, int64_t stride_n, int64_t stride_k, int32_t E) {
    bool k_major = stride_k == 1;
    int64_t pitch = k_major ? stride_n : stride_k, contiguous = k_major ? stride_k : stride_n;
    auto fits = [](int64_t stride) {
        return stride > 0 && stride % CHUNK == 0 && stride < 1ll << 39; /* 2^40 bytes */
    };
    return contiguous == 1 && fits(pitch) && (E == 1 || fits(w.stride_expert)) && is_aligned(w.data);
}

/* Whether tiles can be counted in 31 bits, whatever the routing. */
inline bool is_countable(int64_t R, int32_t E, int64_t columns) {
    return fused_moe_max_row_tiles((int32_t)R, E, FUSED_MOE_TILE_ROWS) * ceil_div(columns, 256) < INT32_MAX;
}

} // namespace sm90
} // namespace fused_moe
