/* Which tier runs a call, and why: one table per operator, best tier first, decided once per call.
 *
 * A tier is a folder beside this file (sm90, sm80; FUSED_MOE_TIER calls them hopper and portable) and a line
 * in each table. The last tier takes every call, but for some of 8 bits on both operands.
 *
 * Offsets that nothing has checked (raw grouped_mm and wgrad): one launch before the GEMM's clamps them and
 * makes their schedule.
 *
 * Quantised weights have tables of their own. A call runs on the tier of the same call with plain weights, so
 * both have the same bits. If that tier's kernel does not read the quantised weight, one launch per weight
 * dequantises it into the workspace, and the call with plain weights runs. */
#include "dispatch.cuh"

#include <atomic>
#include <mutex>

#include "common/dequantize.cuh"
#include "common/schedule.cuh"
#include "device.cuh"

namespace fused_moe {

/* --- tables --------------------------------------------------------------------------------------------- */

/* An entry is the last definition of the file that has its name: sm90::wgrad is in sm90/wgrad.cu, and so on.
 * sm80/eight_bit.cu has the two of 8 bits. */
template <typename Params>
using Table = const Kernel<Params> *const[FUSED_MOE_NUM_TIERS];

static Table<FusedMoeRouterLogits> ROUTER_LOGITS = {&sm90::router_logits, &sm80::router_logits};
static Table<FusedMoeRouterDgrad> ROUTER_DGRAD = {&sm90::router_dgrad, &sm80::router_dgrad};
static Table<FusedMoeGroupedMM> GROUPED_MM = {&sm90::grouped_mm, &sm80::grouped_mm};
static Table<FusedMoeWgrad> WGRAD = {&sm90::wgrad, &sm80::wgrad};
static Table<FusedMoeUpGate> UP_GATE = {&sm90::up_gate, &sm80::up_gate};
static Table<FusedMoeGroupedMM> QUANTIZED_MM = {&sm90::quantized_mm, &sm80::quantized_mm};
static Table<FusedMoeUpGate> QUANTIZED_UP_GATE = {&sm90::quantized_up_gate, &sm80::quantized_up_gate};
static Table<FusedMoeEightBitUpGate> EIGHT_BIT_UP_GATE = {&sm90::eight_bit_up_gate, &sm80::eight_bit_up_gate};
static Table<FusedMoeEightBitMM> EIGHT_BIT_MM = {&sm90::eight_bit_mm, &sm80::eight_bit_mm};
static Table<FusedMoeDownDgrad> DOWN_DGRAD = {&sm90::down_dgrad, &sm80::down_dgrad};

static const char *const REASONS[FUSED_MOE_NUM_REASONS] = {
    "it runs",
    "the GPU is of another compute capability",
    "FUSED_MOE_TIER asks for another tier",
    "the dtype is neither bf16 nor fp16",
    "the input is fp16 and the weight float32",
    "there is no row",
    "the input is multiplied by its scores",
    "there are many rows, for which a quantised weight is dequantised",
    "a width is not a multiple of 8",
    "rows or a bias are not 16-byte aligned",
    "a weight's strides or address are not what TMA reads",
    "a size exceeds the kernel's 32-bit arithmetic",
};

/* --- selecting and running ------------------------------------------------------------------------------ */

static struct {
    std::atomic<int64_t> of_tier[FUSED_MOE_NUM_TIERS];
    std::atomic<int32_t> reason;
} calls[FUSED_MOE_NUM_TIERED_OPS];

/* The tier that runs a call. *reason: why the best one does not. */
template <typename Params>
static int tier_of(Table<Params> &table, const Params &p, FusedMoeReason *reason) {
    *reason = FUSED_MOE_RUNS;
    int tier = 0;
    for (; tier < LAST_TIER; tier++) {
        FusedMoeReason why = device_reason(tier);
        if (why == FUSED_MOE_RUNS) why = table[tier]->reason(p);
        if (why == FUSED_MOE_RUNS) break;
        if (*reason == FUSED_MOE_RUNS || *reason == FUSED_MOE_OTHER_GPU) *reason = why;
    }
    return tier;
}

template <typename Params>
static void select(FusedMoeTieredOp op, Table<Params> &table, Params *p, size_t more_bytes = 0) {
    FusedMoeReason reason;
    int tier = tier_of(table, *p, &reason);
    calls[op].of_tier[tier]++;
    if (tier) calls[op].reason = reason;
    p->workspace.tier = tier;
    p->workspace.bytes = (int64_t)((table[tier]->workspace ? table[tier]->workspace(*p) : 0) + more_bytes);
}

template <typename Params>
static int run(Table<Params> &table, const Params &p, void *stream) {
    return table[p.workspace.tier]->run(p, stream);
}

/* select() for 8 bits on both operands. The last tier does not take all such calls: run_eight_bit asks it. */
template <typename Params>
static void select_eight_bit(FusedMoeTieredOp op, Table<Params> &table, const Params &p,
                             FusedMoeWorkspace *workspace) {
    FusedMoeReason reason;
    int tier = tier_of(table, p, &reason);
    calls[op].of_tier[tier]++;
    if (tier) calls[op].reason = reason;
    workspace->tier = tier;
    workspace->bytes = 0;
}

template <typename Params>
static int run_eight_bit(Table<Params> &table, const Params &p, int tier, void *stream) {
    if (table[tier]->reason(p) != FUSED_MOE_RUNS) return FUSED_MOE_UNSUPPORTED_EIGHT_BIT;
    return table[tier]->run(p, stream);
}

/* FP8 training, which the sm90 tier alone has. */
template <typename Params>
static int run_fp8(int (*run)(const Params &, void *), const Params &p, void *stream) {
    return fused_moe_cuda_trains_fp8() ? run(p, stream) : FUSED_MOE_UNSUPPORTED_EIGHT_BIT;
}

/* Bytes of the workspace for a call's clamped offsets and their schedule; none where they are checked. */
template <typename Params>
static size_t private_schedule_bytes(const Params &p) {
    return p.schedule ? 0 : checked_offsets_bytes(p.E);
}

/* --- quantised weights ---------------------------------------------------------------------------------- */

typedef struct {
    FusedMoeWeight *w[2];
    const int32_t *offs; /* [E] to tell experts without rows */
    int64_t R;
    int32_t E;
} Weights;

static Weights weights_of(FusedMoeGroupedMM &p) {
    return {{&p.b[0], &p.b[1]}, p.offs, p.R, p.E};
}

/* The launch before this one makes the weight, so the GEMM may not begin early. */
static void follow_dequantize(FusedMoeGroupedMM &p) {
    p.pdl.reads_before_wait = false;
    p.pdl.after_any = true;
}

static void follow_dequantize(FusedMoeUpGate &) {}

static Weights weights_of(FusedMoeUpGate &p) {
    return {{&p.w1, &p.w3}, p.row_map.offs, p.row_map.R, p.row_map.E};
}

template <typename Params>
static bool is_quantized(Params p) {
    Weights weights = weights_of(p);
    return weights.w[0]->quantized || weights.w[1]->quantized;
}

/* Makes quantised weights dense ones at `data`, one after the other, and calls fn(address, quantized,
 * weights) for each. Returns their bytes: 0 if there are no rows, since nothing reads the weights then. */
template <typename Params, typename Fn>
static size_t place_weights(Params &p, void *data, Fn fn) {
    Weights weights = weights_of(p);
    size_t bytes = 0;
    for (FusedMoeWeight *w : weights.w) {
        if (!w->quantized) continue;
        const FusedMoeQuantizedWeight &quantized = *w->quantized;
        w->quantized = nullptr;
        if (weights.R == 0) continue;
        w->data = (char *)data + bytes;
        fn(w->data, quantized, weights);
        bytes += (dequantized_bytes(quantized, weights.E, p.dtype) + 127) / 128 * 128;
    }
    return bytes;
}

static void *const ALIGNED = (void *)128; /* as the workspace will be */

/* select() for an operator whose weights may be quantised. */
template <typename Params>
static void select_weights(FusedMoeTieredOp op, Table<Params> &table, Table<Params> &of_quantized, Params *p,
                           size_t more_bytes = 0) {
    p->workspace.dequantizes = false;
    if (!is_quantized(*p)) return select(op, table, p, more_bytes);
    Params plain = *p;
    size_t dense_bytes = place_weights(plain, ALIGNED, [](auto &&...) {});
    select(op, table, &plain, more_bytes + dense_bytes);
    p->workspace = plain.workspace;
    p->workspace.dequantizes = of_quantized[p->workspace.tier]->reason(*p) != FUSED_MOE_RUNS;
    if (!p->workspace.dequantizes) p->workspace.bytes = (int64_t)more_bytes;
}

/* Whether the call's GEMM can make the plan: on its tier, and without launches before it that dequantise. */
template <typename Params>
static bool plans_in_gemm(Table<Params> &table, Table<Params> &of_quantized, const Params &p) {
    Params plain = p;
    place_weights(plain, ALIGNED, [](auto &&...) {});
    FusedMoeReason reason;
    int tier = tier_of(table, plain, &reason);
    return fused_moe_tier(tier).plans_in_gemm &&
           (!is_quantized(p) || of_quantized[tier]->reason(p) == FUSED_MOE_RUNS);
}

/* run() for an operator whose weights may be quantised. */
template <typename Params>
static int run_weights(Table<Params> &table, Table<Params> &of_quantized, const Params &call, void *stream) {
    Params p = call;
    if (!is_quantized(p)) return run(table, p, stream);
    if (!p.workspace.dequantizes) return run(of_quantized, p, stream);
    int status = FUSED_MOE_OK;
    auto fill = [&](void *dense, const FusedMoeQuantizedWeight &quantized, const Weights &weights) {
        if (status == FUSED_MOE_OK)
            status = dequantize(dense, quantized, weights.offs, weights.E, p.dtype, stream);
    };
    size_t bytes = place_weights(p, p.workspace.data, fill);
    p.workspace.data = (char *)p.workspace.data + bytes;
    follow_dequantize(p);
    return status == FUSED_MOE_OK ? run(table, p, stream) : status;
}

/* --- calls that are not complete ------------------------------------------------------------------------ */

/* run_next(p) for a call whose offsets may be unchecked. Clamped offsets and their schedule are then at the
 * start of the workspace. */
template <typename Params, typename Fn>
static int run_checked(const Params &unchecked, void *stream, Fn run_next) {
    Params p = unchecked;
    if (!p.schedule) {
        int status = check_offsets(&p.offs, &p.schedule, p.E, p.R, p.workspace.data, stream);
        if (status != FUSED_MOE_OK) return status;
        p.workspace.data = (char *)p.workspace.data + checked_offsets_bytes(p.E);
    }
    return run_next(p);
}

/* --- zeroed counters ------------------------------------------------------------------------------------ */

/* Calls on one stream run one after the other, so they share the stream's counters, which each leaves at
 * zero. (up_gate and a down GEMM that overlaps it use one half each.) They are zeros when the module is
 * loaded. PyTorch has the default stream and up to 4 pools of 32, and uses few of them. A call on a stream
 * past the first MAX_STREAMS zeroes private counters. */
constexpr int MAX_STREAMS = 128; /* per device */
static __device__ uint32_t stream_counters[MAX_STREAMS][FUSED_MOE_NUM_COUNTERS];

static struct {
    std::mutex mutex;
    uint32_t *first;                        /* the device's address of stream_counters */
    unsigned long long stream[MAX_STREAMS]; /* identities, which no later stream has */
    int num_streams;
} counters_of[MAX_DEVICES];

static int find_counters(cudaStream_t stream, uint32_t **found) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    int device = 0;
    *found = nullptr;
    cudaError_t error = cudaStreamIsCapturing(stream, &capture);
    if (error != cudaSuccess || capture != cudaStreamCaptureStatusNone) return cuda_status(error);
    error = cudaStreamGetId(stream, &id);
    if (error == cudaSuccess) error = cudaGetDevice(&device);
    if (error != cudaSuccess || device >= MAX_DEVICES) return cuda_status(error);
    auto &known = counters_of[device];
    std::lock_guard<std::mutex> lock(known.mutex);
    if (!known.first) error = cudaGetSymbolAddress((void **)&known.first, stream_counters);
    if (error != cudaSuccess) return cuda_status(error);
    int i = 0;
    while (i < known.num_streams && known.stream[i] != id) i++;
    if (i == MAX_STREAMS) return FUSED_MOE_OK;
    if (i == known.num_streams) known.stream[known.num_streams++] = id;
    *found = known.first + (size_t)i * FUSED_MOE_NUM_COUNTERS;
    return FUSED_MOE_OK;
}

/* --- both sides in one launch --------------------------------------------------------------------------- */

static const Kernel<FusedMoeExperts> &kernel_of(const FusedMoeExperts &p) {
    return is_quantized(p.up) ? sm90::quantized_experts : sm90::experts;
}

} // namespace fused_moe

/* --- the C interface ------------------------------------------------------------------------------------ */

using namespace fused_moe;

extern "C" {

void fused_moe_cuda_select_router_logits(FusedMoeRouterLogits *p) {
    select(FUSED_MOE_OP_ROUTER_LOGITS, ROUTER_LOGITS, p);
}
void fused_moe_cuda_select_router_dgrad(FusedMoeRouterDgrad *p) {
    select(FUSED_MOE_OP_ROUTER_DGRAD, ROUTER_DGRAD, p);
}
void fused_moe_cuda_select_grouped_mm(FusedMoeGroupedMM *p) {
    select_weights(FUSED_MOE_OP_GROUPED_MM, GROUPED_MM, QUANTIZED_MM, p, private_schedule_bytes(*p));
}
void fused_moe_cuda_select_wgrad(FusedMoeWgrad *p) {
    select(FUSED_MOE_OP_WGRAD, WGRAD, p, private_schedule_bytes(*p));
}
void fused_moe_cuda_select_up_gate(FusedMoeUpGate *p) {
    select_weights(FUSED_MOE_OP_UP_GATE, UP_GATE, QUANTIZED_UP_GATE, p);
}
void fused_moe_cuda_select_eight_bit_up_gate(FusedMoeEightBitUpGate *p) {
    const FusedMoeRowMap &rows = p->up.row_map;
    select_eight_bit(FUSED_MOE_OP_UP_GATE, EIGHT_BIT_UP_GATE, *p, &p->up.workspace);
    p->gathers = p->up.workspace.tier != FUSED_MOE_TIER_SM90 || sm90::eight_bit_gathers(rows.R, rows.E);
}
void fused_moe_cuda_select_eight_bit_mm(FusedMoeEightBitMM *p) {
    select_eight_bit(FUSED_MOE_OP_GROUPED_MM, EIGHT_BIT_MM, *p, &p->down.workspace);
}
void fused_moe_cuda_select_eight_bit_wgrad(FusedMoeEightBitWgrad *p) {
    calls[FUSED_MOE_OP_WGRAD].of_tier[FUSED_MOE_TIER_SM90]++;
    p->workspace.tier = FUSED_MOE_TIER_SM90;
    p->workspace.bytes = (int64_t)sm90::eight_bit_wgrad_workspace(*p);
}
void fused_moe_cuda_select_down_dgrad(FusedMoeDownDgrad *p) {
    select(FUSED_MOE_OP_DOWN_DGRAD, DOWN_DGRAD, p);
}

/* Only the sm90 tier has this kernel. If the answer is no, the caller runs up_gate and grouped_mm, which
 * count themselves. */
bool fused_moe_cuda_select_experts(FusedMoeExperts *p) {
    if (is_quantized(p->up) != is_quantized(p->down)) return false;
    if (device_reason(FUSED_MOE_TIER_SM90) != FUSED_MOE_RUNS) return false;
    if (kernel_of(*p).reason(*p) != FUSED_MOE_RUNS) return false;
    for (FusedMoeTieredOp op : {FUSED_MOE_OP_UP_GATE, FUSED_MOE_OP_GROUPED_MM})
        calls[op].of_tier[FUSED_MOE_TIER_SM90]++;
    p->workspace.tier = FUSED_MOE_TIER_SM90;
    p->workspace.bytes = (int64_t)kernel_of(*p).workspace(*p);
    p->tile_rows = fused_moe_few_rows_together(p->down.R, p->down.E);
    return true;
}

int fused_moe_cuda_router_logits(const FusedMoeRouterLogits *p, void *stream) {
    return run(ROUTER_LOGITS, *p, stream);
}
int fused_moe_cuda_router_dgrad(const FusedMoeRouterDgrad *p, void *stream) {
    return run(ROUTER_DGRAD, *p, stream);
}
FusedMoePlanner fused_moe_cuda_planner(const FusedMoeRoutePlan *p, const FusedMoeRoute *route,
                                       const FusedMoeUpGate *up, const FusedMoeGroupedMM *down) {
    const bool gemms_plan = up && down && fused_moe_has_few_slots(p->T * p->K, p->E) &&
                            plans_in_gemm(UP_GATE, QUANTIZED_UP_GATE, *up) &&
                            plans_in_gemm(GROUPED_MM, QUANTIZED_MM, *down);
    const bool has_clusters = device_reason(FUSED_MOE_TIER_SM90) == FUSED_MOE_RUNS;
    const bool chooses = route && route->dtype != FUSED_MOE_F64;
    return fused_moe_planner(p->T, p->K, p->E, gemms_plan, has_clusters, chooses);
}
int fused_moe_cuda_cluster_plan(const FusedMoeRoutePlan *p, const FusedMoeRoute *route, void *stream) {
    return sm90::cluster_plan(*p, route, stream);
}

int fused_moe_cuda_grouped_mm(const FusedMoeGroupedMM *p, void *stream) {
    return run_checked(*p, stream, [&](auto &q) { return run_weights(GROUPED_MM, QUANTIZED_MM, q, stream); });
}
int fused_moe_cuda_wgrad(const FusedMoeWgrad *p, void *stream) {
    return run_checked(*p, stream, [&](auto &q) { return run(WGRAD, q, stream); });
}
int fused_moe_cuda_up_gate(const FusedMoeUpGate *p, void *stream) {
    return run_weights(UP_GATE, QUANTIZED_UP_GATE, *p, stream);
}
int fused_moe_cuda_eight_bit_up_gate(const FusedMoeEightBitUpGate *p, void *stream) {
    return run_eight_bit(EIGHT_BIT_UP_GATE, *p, p->up.workspace.tier, stream);
}
int fused_moe_cuda_eight_bit_mm(const FusedMoeEightBitMM *p, void *stream) {
    return run_eight_bit(EIGHT_BIT_MM, *p, p->down.workspace.tier, stream);
}
bool fused_moe_cuda_trains_fp8(void) {
    return device_reason(FUSED_MOE_TIER_SM90) == FUSED_MOE_RUNS;
}
int fused_moe_cuda_quantize_weight(const FusedMoeQuantizeWeight *p, void *stream) {
    return run_fp8(sm90::quantize_weight, *p, stream);
}
int fused_moe_cuda_transpose_codes(const FusedMoeTransposeCodes *p, void *stream) {
    return run_fp8(sm90::transpose_codes, *p, stream);
}
int fused_moe_cuda_quantize_dh(const FusedMoeQuantizeDh *p, void *stream) {
    return run_fp8(sm90::quantize_dh, *p, stream);
}
int fused_moe_cuda_eight_bit_wgrad(const FusedMoeEightBitWgrad *p, void *stream) {
    return run_fp8(sm90::eight_bit_wgrad, *p, stream);
}
int fused_moe_cuda_experts(const FusedMoeExperts *p, void *stream) {
    return kernel_of(*p).run(*p, stream);
}
int fused_moe_cuda_down_dgrad(const FusedMoeDownDgrad *p, void *stream) {
    return run(DOWN_DGRAD, *p, stream);
}

void fused_moe_cuda_calls(FusedMoeTieredOp op, FusedMoeCalls *found) {
    for (int i = 0; i < FUSED_MOE_NUM_TIERS; i++) found->of_tier[i] = calls[op].of_tier[i];
    found->reason = calls[op].reason;
}

const char *fused_moe_cuda_reason(int reason) {
    return reason >= 0 && reason < FUSED_MOE_NUM_REASONS ? REASONS[reason] : "unknown";
}

int fused_moe_cuda_counters(void *stream, uint32_t **counters) {
    return find_counters((cudaStream_t)stream, counters);
}

int fused_moe_cuda_zero(void *data, int64_t bytes, void *stream) {
    return cuda_status(cudaMemsetAsync(data, 0, (size_t)bytes, (cudaStream_t)stream));
}

} // extern "C"
