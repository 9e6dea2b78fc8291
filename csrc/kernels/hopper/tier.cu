/* The rules of tier.cuh.
 *
 * The copy engine reads rows whose address and pitch are multiples of 16 bytes, and weights of which one
 * width is dense and the other strides are such multiples. Everything else is the portable tier's. */
#include "tier.cuh"

#include <stdlib.h>
#include <string.h>

#include <atomic>

#include "plan.cuh"

namespace fused_moe {

/* Whether the current device and the environment have the engine. */
static FusedMoeTierReason engine_reason(FusedMoeDtype dtype) {
    int device, major = 0, minor = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess)
        return FUSED_MOE_OTHER_GPU;
    if (major != 9 || minor != 0) return FUSED_MOE_OTHER_GPU;
    const char *tier = getenv("FUSED_MOE_TIER");
    if (tier && !strcmp(tier, "portable")) return FUSED_MOE_PORTABLE_ASKED;
    bool half = dtype == FUSED_MOE_BF16 || dtype == FUSED_MOE_F16;
    return half ? FUSED_MOE_ON_SM90 : FUSED_MOE_OTHER_DTYPE;
}

static bool on_16_bytes(const void *data) {
    return (uintptr_t)data % 16 == 0;
}

/* Weight (E, lines, k) of 16-bit numbers. */
static bool readable(const FusedMoeWeight &w, int64_t stride_line, int64_t stride_k, int32_t E) {
    bool along_k = stride_k == 1;
    int64_t pitch = along_k ? stride_line : stride_k, dense = along_k ? stride_k : stride_line;
    auto fits = [](int64_t stride) {
        return stride > 0 && stride % CHUNK == 0 && stride < 1ll << 39; /* 2^40 bytes */
    };
    return dense == 1 && fits(pitch) && (E == 1 || fits(w.stride_expert)) && on_16_bytes(w.data);
}

/* Whether queue can be counted in 31 bits, whatever the routing. */
static bool countable(int64_t R, int64_t E, int64_t width) {
    return (R / 128 + (E < R ? E : R)) * ceil_div(width, 256) < INT32_MAX;
}

FusedMoeTierReason sm90_reason(const FusedMoeGroupedMM &p) {
    FusedMoeTierReason reason = engine_reason(p.dtype);
    if (reason != FUSED_MOE_ON_SM90) return reason;
    const FusedMoeWeight *b = p.b;
    if (p.R == 0) return FUSED_MOE_NO_ROWS;
    if (p.M % CHUNK || p.N[0] % CHUNK || p.N[1] % CHUNK) return FUSED_MOE_WIDTH;
    if (!on_16_bytes(p.a) || !on_16_bytes(p.out) || !on_16_bytes(p.bias))
        return FUSED_MOE_UNALIGNED;
    for (int i = 0; i < 2 && b[i].data; i++)
        if (!readable(b[i], b[i].stride_out, b[i].stride_in, p.E)) return FUSED_MOE_STRIDES;
    if (b[1].data && (b[0].stride_in == 1) != (b[1].stride_in == 1)) return FUSED_MOE_STRIDES;
    return countable(p.R, p.E, p.M) ? FUSED_MOE_ON_SM90 : FUSED_MOE_TOO_LARGE;
}

FusedMoeTierReason sm90_reason(const FusedMoeUpGate &p) {
    FusedMoeTierReason reason = engine_reason(p.dtype);
    if (reason != FUSED_MOE_ON_SM90) return reason;
    const FusedMoeWeight &w1 = p.w1, &w3 = p.w3;
    if (p.row_map.R == 0 || p.row_map.T == 0) return FUSED_MOE_NO_ROWS;
    if (p.scores) return FUSED_MOE_SCORED_INPUT;
    if (p.D % CHUNK || p.F % CHUNK) return FUSED_MOE_WIDTH;
    for (const void *data : {p.x, (const void *)p.h, (const void *)p.a, p.b1, p.b3})
        if (!on_16_bytes(data)) return FUSED_MOE_UNALIGNED;
    if (!readable(w1, w1.stride_out, w1.stride_in, p.row_map.E)) return FUSED_MOE_STRIDES;
    if (w3.data && (!readable(w3, w3.stride_out, w3.stride_in, p.row_map.E) ||
                    (w1.stride_in == 1) != (w3.stride_in == 1)))
        return FUSED_MOE_STRIDES;
    return countable(p.row_map.R, p.row_map.E, 2 * p.F) ? FUSED_MOE_ON_SM90 : FUSED_MOE_TOO_LARGE;
}

FusedMoeTierReason sm90_reason(const FusedMoeWgrad &p) {
    FusedMoeTierReason reason = engine_reason(p.dtype);
    if (reason != FUSED_MOE_ON_SM90) return reason;
    if (p.R == 0 || p.T == 0) return FUSED_MOE_NO_ROWS;
    if (p.b_scores) return FUSED_MOE_SCORED_INPUT;
    if (p.N % CHUNK || p.M[0] % CHUNK || p.M[1] % CHUNK) return FUSED_MOE_WIDTH;
    if (!on_16_bytes(p.a) || !on_16_bytes(p.b)) return FUSED_MOE_UNALIGNED;
    int64_t width = 0;
    for (int i = 0; i < 2; i++) {
        const FusedMoeWeight &dw = p.dw[i];
        if (!dw.data) continue;
        if (!readable(dw, dw.stride_out, dw.stride_in, p.E)) return FUSED_MOE_STRIDES;
        width += p.M[i];
    }
    const FusedMoeWeight *dw = p.dw;
    if (dw[0].data && dw[1].data && (dw[0].stride_in == 1) != (dw[1].stride_in == 1))
        return FUSED_MOE_STRIDES;
    return countable(p.R, p.E, ceil_div(width, 256) * p.N * 2) ? FUSED_MOE_ON_SM90
                                                               : FUSED_MOE_TOO_LARGE;
}

FusedMoeTierReason sm90_reason(const FusedMoeDownDgrad &p) {
    FusedMoeTierReason reason = engine_reason(p.dtype);
    if (reason != FUSED_MOE_ON_SM90) return reason;
    if (p.row_map.R == 0 || p.row_map.T == 0) return FUSED_MOE_NO_ROWS;
    if (p.D % CHUNK || p.F % CHUNK) return FUSED_MOE_WIDTH;
    for (const void *data : {p.dout, p.h, (const void *)p.dh, (const void *)p.a_scaled})
        if (!on_16_bytes(data)) return FUSED_MOE_UNALIGNED;
    if (!readable(p.w2, p.w2.stride_in, p.w2.stride_out, p.row_map.E)) return FUSED_MOE_STRIDES;
    return countable(p.row_map.R, p.row_map.E, p.F) ? FUSED_MOE_ON_SM90 : FUSED_MOE_TOO_LARGE;
}

size_t hopper_workspace(int32_t E) {
    return tile_schedule_workspace(E);
}

/* --- what info() tells ---------------------------------------------------------------------------------------- */

static struct {
    std::atomic<int64_t> hopper, portable;
    std::atomic<int32_t> reason; /* of the last call that the portable tier had */
} calls[FUSED_MOE_NUM_TIER_OPS];

bool dispatches_to_sm90(FusedMoeTierOp op, FusedMoeTierReason reason, int64_t workspace_bytes,
                        size_t needed) {
    if (reason == FUSED_MOE_ON_SM90 && workspace_bytes < (int64_t)needed)
        reason = FUSED_MOE_PORTABLE_ASKED;
    bool hopper = reason == FUSED_MOE_ON_SM90;
    (hopper ? calls[op].hopper : calls[op].portable)++;
    if (!hopper) calls[op].reason = reason;
    return hopper;
}

} // namespace fused_moe

extern "C" void fused_moe_cuda_calls(FusedMoeTierOp op, FusedMoeCalls *found) {
    auto &calls = fused_moe::calls[op];
    *found = {calls.hopper, calls.portable, calls.reason};
}
