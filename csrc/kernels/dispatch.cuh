/* What dispatch.cu knows of the tiers, and what tiers may ask of it. */
#pragma once

#include "common/launch.cuh"

namespace fused_moe {

/* One operator of one tier: a table of the functions by which dispatch.cu selects and runs it. A tier defines
 * one for each of the operators below, under its __global__ kernel. */
template <typename Params>
struct Kernel {
    /* FUSED_MOE_RUNS, or why the tier does not take the call; NULL where the last tier takes every call */
    FusedMoeReason (*reason)(const Params &p);
    size_t (*workspace)(const Params &p); /* bytes; NULL: none */
    int (*run)(const Params &p, void *stream);
};

namespace sm80 {
extern const Kernel<FusedMoeRouterLogits> router_logits;
extern const Kernel<FusedMoeRouterDgrad> router_dgrad;
extern const Kernel<FusedMoeGroupedMM> grouped_mm;
extern const Kernel<FusedMoeWgrad> wgrad;
extern const Kernel<FusedMoeUpGate> up_gate;
extern const Kernel<FusedMoeDownDgrad> down_dgrad;
/* For quantised weights. */
extern const Kernel<FusedMoeGroupedMM> quantized_mm;
extern const Kernel<FusedMoeUpGate> quantized_up_gate;
/* For int8 weights and int8 rows. */
extern const Kernel<FusedMoeEightBitUpGate> eight_bit_up_gate;
extern const Kernel<FusedMoeEightBitMM> eight_bit_mm;
} // namespace sm80

namespace sm90 {
extern const Kernel<FusedMoeRouterLogits> router_logits;
extern const Kernel<FusedMoeRouterDgrad> router_dgrad;
extern const Kernel<FusedMoeGroupedMM> grouped_mm;
extern const Kernel<FusedMoeWgrad> wgrad;
extern const Kernel<FusedMoeUpGate> up_gate;
extern const Kernel<FusedMoeDownDgrad> down_dgrad;
/* Both sides in one launch, where rows are few. */
extern const Kernel<FusedMoeExperts> experts, quantized_experts;
/* For quantised weights. */
extern const Kernel<FusedMoeGroupedMM> quantized_mm;
extern const Kernel<FusedMoeUpGate> quantized_up_gate;
/* For 8 bits on both operands. */
extern const Kernel<FusedMoeEightBitUpGate> eight_bit_up_gate;
extern const Kernel<FusedMoeEightBitMM> eight_bit_mm;
bool eight_bit_gathers(int64_t R, int32_t E); /* see FusedMoeEightBitUpGate */
/* FP8 training, beside these two. */
int quantize_weight(const FusedMoeQuantizeWeight &p, void *stream);
int transpose_codes(const FusedMoeTransposeCodes &p, void *stream);
int quantize_dh(const FusedMoeQuantizeDh &p, void *stream);
int eight_bit_wgrad(const FusedMoeEightBitWgrad &p, void *stream);
size_t eight_bit_wgrad_workspace(const FusedMoeEightBitWgrad &p);
/* For plans that fused_moe_planner gives to a cluster. */
int cluster_plan(const FusedMoeRoutePlan &p, const FusedMoeRoute *route, void *stream);
} // namespace sm90

/* What the environment variable FUSED_MOE_SCHEDULE asks for. Defined in device.cu. */
typedef struct {
    int32_t group;      /* row tiles of a group; 0: the kernel's */
    bool no_interleave; /* skinny tiles come last                        */
    bool no_tails;      /* no swapped operands, split last wave, nor tiles of few rows */
    /* rows per expert up to which GEMMs read quantised weights, on sm80 16 at most; -1: rules.h's */
    int32_t quantized_rows;
} ScheduleOverride;

const ScheduleOverride &schedule_override();

} // namespace fused_moe
