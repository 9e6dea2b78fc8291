/* What dispatch.cu's tables name of sm90/, in builds without sm_90a (FUSED_MOE_ARCHS). No GPU runs the tier
 * then, so none of it is called. */
#include "../dispatch.cuh"

namespace fused_moe::sm90 {

const Kernel<FusedMoeRouterLogits> router_logits = {};
const Kernel<FusedMoeRouterDgrad> router_dgrad = {};
const Kernel<FusedMoeGroupedMM> grouped_mm = {};
const Kernel<FusedMoeWgrad> wgrad = {};
const Kernel<FusedMoeUpGate> up_gate = {};
const Kernel<FusedMoeDownDgrad> down_dgrad = {};
const Kernel<FusedMoeExperts> experts = {}, quantized_experts = {};
const Kernel<FusedMoeGroupedMM> quantized_mm = {};
const Kernel<FusedMoeUpGate> quantized_up_gate = {};
const Kernel<FusedMoeEightBitUpGate> eight_bit_up_gate = {};
const Kernel<FusedMoeEightBitMM> eight_bit_mm = {};

bool eight_bit_gathers(int64_t, int32_t) {
    return true;
}

int quantize_weight(const FusedMoeQuantizeWeight &, void *) {
    return FUSED_MOE_NO_SUCH_TIER;
}
int transpose_codes(const FusedMoeTransposeCodes &, void *) {
    return FUSED_MOE_NO_SUCH_TIER;
}
int quantize_dh(const FusedMoeQuantizeDh &, void *) {
    return FUSED_MOE_NO_SUCH_TIER;
}
int eight_bit_wgrad(const FusedMoeEightBitWgrad &, void *) {
    return FUSED_MOE_NO_SUCH_TIER;
}
size_t eight_bit_wgrad_workspace(const FusedMoeEightBitWgrad &) {
    return 0;
}

int cluster_plan(const FusedMoeRoutePlan &, const FusedMoeRoute *, void *) {
    return FUSED_MOE_NO_SUCH_TIER;
}

} // namespace fused_moe::sm90
