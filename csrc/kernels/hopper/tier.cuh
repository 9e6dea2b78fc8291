/* Which tier dispatches_to_sm90 a call on a CUDA device: the rules, in one place. */
#pragma once

#include "../launch.cuh"
#include "../numeric.cuh"

namespace fused_moe {

/* FUSED_MOE_ON_SM90, or why the portable tier has the call. */
FusedMoeTierReason sm90_reason(const FusedMoeGroupedMM &p);
FusedMoeTierReason sm90_reason(const FusedMoeUpGate &p);
FusedMoeTierReason sm90_reason(const FusedMoeWgrad &p);
FusedMoeTierReason sm90_reason(const FusedMoeDownDgrad &p);

/* Whether the Hopper engine has a call of E experts, which is counted for fused_moe_cuda_calls. A workspace that is
 * too small was made while FUSED_MOE_TIER asked for the portable tier, which then has the call. */
bool dispatches_to_sm90(FusedMoeTierOp op, FusedMoeTierReason reason, int64_t workspace_bytes,
                        size_t needed);

/* The engine's launchers, for calls that it dispatches_to_sm90. */
int hopper_grouped_mm(const FusedMoeGroupedMM &p, void *stream);
int hopper_up_gate(const FusedMoeUpGate &p, void *stream);
int hopper_wgrad(const FusedMoeWgrad &p, void *stream);
size_t hopper_workspace(int32_t E);
size_t hopper_wgrad_workspace(const FusedMoeWgrad &p);

/* down_dgrad leaves the sums of <g, a> over tiles of F in its workspace: so many a row. */
int hopper_down_dgrad(const FusedMoeDownDgrad &p, void *stream);
size_t hopper_down_dgrad_workspace(const FusedMoeDownDgrad &p);
int64_t hopper_partials_of_row(int64_t F);
float *hopper_partials(const FusedMoeDownDgrad &p);

/* Calls fn with a number of the 16-bit dtype. */
template <typename Fn>
int with_half(FusedMoeDtype dtype, Fn fn) {
    return dtype == FUSED_MOE_BF16 ? fn(__nv_bfloat16()) : fn(__half());
}

} // namespace fused_moe
