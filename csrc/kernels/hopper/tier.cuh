/* Which tier serves a call on a CUDA device: the rules, in one place. */
#pragma once

#include "../launch.cuh"
#include "../numeric.cuh"

namespace fused_moe {

/* FUSED_MOE_ON_HOPPER, or why the portable tier has the call. */
FusedMoeTierReason tier_reason(const FusedMoeGroupedMM &p);
FusedMoeTierReason tier_reason(const FusedMoeUpGate &p);

/* Counts a call for fused_moe_cuda_calls; true where the Hopper engine has it. */
bool serves(FusedMoeTierOp op, FusedMoeTierReason reason);

/* The engine's launchers, for calls that it serves. */
int hopper_grouped_mm(const FusedMoeGroupedMM &p, void *stream);
int hopper_up_gate(const FusedMoeUpGate &p, void *stream);
size_t hopper_workspace(int32_t E);

/* Calls fn with a number of the 16-bit dtype. */
template <typename Fn>
int with_half(FusedMoeDtype dtype, Fn fn) {
    return dtype == FUSED_MOE_BF16 ? fn(__nv_bfloat16()) : fn(__half());
}

} // namespace fused_moe
