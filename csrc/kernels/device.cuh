/* What dispatch.cu asks about a device; the kernels' questions are in common/launch.cuh and dispatch.cuh. */
#pragma once

#include "common/launch.cuh"

namespace fused_moe {

constexpr int MAX_DEVICES = 64;
/* It takes every call, but for some of 8 bits on both operands. */
constexpr int LAST_TIER = FUSED_MOE_NUM_TIERS - 1;

/* Why a tier does not run on the current device, whatever the call; FUSED_MOE_RUNS: it does. */
FusedMoeReason device_reason(int tier);

} // namespace fused_moe
