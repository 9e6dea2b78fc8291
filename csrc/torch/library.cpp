/* The list of operators: their schemas and functions, and facts on the library.
 *
 * An argument that has a gradient, or is written, is a separate argument: autograd makes no node for a list
 * that holds None. The others are grouped:
 *   plan       [offsets, schedule], where row r is token r; or these, row_token, row_slot and token_row
 *   constants  [alpha, limit] of the activation
 *   quantized  [codes, scale, codes_t, scale_t] of FP8 training's weights; in backward [codes_t, scale_t] */
#include <string>

#include "operators.h"

/* --- facts ---------------------------------------------------------------------------------------------- */

struct Fact {
    const char *name, *value;
};

struct Constant {
    const char *name;
    int64_t value;
};

static const char *tier_name(int tier) {
    return fused_moe_tier(tier).name;
}

/* A JSON text, written from front to back. */
static void write_string(std::string *json, const char *s) {
    *json += '"';
    for (; *s; s++) {
        if (*s == '"' || *s == '\\') *json += '\\';
        if ((unsigned char)*s >= ' ') *json += *s;
    }
    *json += '"';
}

/* Opens the next member of an object: a comma unless it is the first, and its name. */
static void write_name(std::string *json, const char *name) {
    if (json->back() != '{') *json += ',';
    write_string(json, name);
    *json += ':';
}

static void write_strings(std::string *json, int num, const char *(*string_of)(int)) {
    *json += '[';
    for (int i = 0; i < num; i++) {
        if (i) *json += ',';
        write_string(json, string_of(i));
    }
    *json += ']';
}

static const char *operator_name(int op) {
    switch (op) {
    case FUSED_MOE_OP_GROUPED_MM: return "grouped_mm";
    case FUSED_MOE_OP_UP_GATE: return "up_gate";
    case FUSED_MOE_OP_DOWN_DGRAD: return "down_dgrad";
    case FUSED_MOE_OP_WGRAD: return "wgrad";
    case FUSED_MOE_OP_ROUTER_LOGITS: return "router_logits";
    case FUSED_MOE_OP_ROUTER_DGRAD: return "router_dgrad";
    default: return "unknown";
    }
}

/* Facts as JSON, so that Python and the tests read no C source: how the library was built, its tiers, best
 * first, with the compute capabilities that they run on, the reasons and operators that cuda_calls numbers,
 * and constants. */
static std::string facts() {
    static const Fact build[] = {BUILD_INFO};
    static const Constant constants[] = {
        {"TILE_ROWS", FUSED_MOE_TILE_ROWS},
        {"SKINNY_ROWS", FUSED_MOE_SKINNY_ROWS},
        {"MIN_SLICE", FUSED_MOE_MIN_SLICE},
        {"MAX_CTAS", FUSED_MOE_MAX_CTAS},
        {"SLICE_SMS", FUSED_MOE_SLICE_SMS},
        {"HEAD_WORDS", FUSED_MOE_HEAD_WORDS},
        {"NUM_COUNTERS", FUSED_MOE_NUM_COUNTERS},
        {"DRIVER_TOO_OLD", FUSED_MOE_DRIVER_TOO_OLD},
        {"UNSUPPORTED_GPU", FUSED_MOE_UNSUPPORTED_GPU},
        {"NO_SUCH_TIER", FUSED_MOE_NO_SUCH_TIER},
    };
    std::string json = "{";
    write_name(&json, "build");
    json += '{';
    for (const Fact &fact : build) {
        write_name(&json, fact.name);
        write_string(&json, fact.value);
    }
    json += '}';
    write_name(&json, "tiers");
    write_strings(&json, FUSED_MOE_NUM_TIERS, tier_name);
    write_name(&json, "capabilities");
    for (int tier = 0; tier < FUSED_MOE_NUM_TIERS; tier++) {
        FusedMoeTierFacts runs_on = fused_moe_tier(tier);
        json += tier ? ",[" : "[[";
        json += std::to_string(runs_on.oldest) + "," + std::to_string(runs_on.newest) + "]";
    }
    json += ']';
    write_name(&json, "reasons");
#ifdef FUSED_MOE_WITH_CUDA
    write_strings(&json, FUSED_MOE_NUM_REASONS, fused_moe_cuda_reason);
#else
    json += "[]";
#endif
    write_name(&json, "operators");
    write_strings(&json, FUSED_MOE_NUM_TIERED_OPS, operator_name);
    write_name(&json, "constants");
    json += '{';
    for (const Constant &constant : constants) {
        write_name(&json, constant.name);
        json += std::to_string(constant.value);
    }
    return json + "}}";
}

/* The number of calls of an operator that each tier ran, best first, then the reason why the last call was
 * not dispatched to the best. */
static Tensor cuda_calls(int64_t op) {
    check_size("cuda_calls", "op", op, 0, FUSED_MOE_NUM_TIERED_OPS - 1);
    FusedMoeCalls calls = {};
#ifdef FUSED_MOE_WITH_CUDA
    fused_moe_cuda_calls((FusedMoeTieredOp)op, &calls);
#endif
    const int64_t num = FUSED_MOE_NUM_TIERS;
    Tensor counts = torch::stable::empty({num + 1}, ScalarType::Long, {},
                                         torch::stable::Device(torch::headeronly::DeviceType::CPU));
    int64_t *values = (int64_t *)counts.mutable_data_ptr();
    for (int tier = 0; tier < num; tier++) values[tier] = calls.of_tier[tier];
    values[num] = calls.reason;
    return counts;
}

/* Whether a CUDA tier runs on a device (status 0: it does), and the versions that decide that. */
static std::tuple<int64_t, int64_t, int64_t, int64_t> cuda_device(int64_t index) {
#ifdef FUSED_MOE_WITH_CUDA
    FusedMoeCudaDevice device = {};
    int status = fused_moe_cuda_device((int)index, &device);
    return {status, device.driver_version, device.runtime_version, device.capability};
#else
    (void)index;
    return {FUSED_MOE_NO_SUCH_TIER, 0, 0, 0};
#endif
}

static void cuda_reset() {
#ifdef FUSED_MOE_WITH_CUDA
    fused_moe_cuda_reset();
#endif
}

/* --- schemas -------------------------------------------------------------------------------------------- */

/* A backward operator and its twin, which adds weight gradients to main_grads, differ only in these
 * arguments. */
#define EXPERTS_UP_BACKWARD(main_grads)                                                                      \
    "(Tensor dh, Tensor x, Tensor w1, Tensor? w3, Tensor? scores, Tensor[] plan, int layout, bool need_dx, " \
    "bool need_dw1, bool need_dw3, bool need_db1, bool need_db3, bool need_dscores" main_grads               \
    ", Tensor? dlogits=None, Tensor? gate=None) -> (Tensor dx, Tensor dw1, Tensor dw3, Tensor db1, "         \
    "Tensor db3, Tensor dscores)"
#define EXPERTS_DOWN_BACKWARD(main_grads)                                                                    \
    "(Tensor dout, Tensor h, Tensor w2, Tensor? b2, Tensor? scores, Tensor[] plan, int layout, int "         \
    "activation, "                                                                                           \
    "float[] constants, bool need_dh, bool need_dw2, bool need_db2, bool need_dscores" main_grads            \
    ") -> (Tensor dh, Tensor dw2, Tensor db2, Tensor dscores)"

#define FP8_UP_WEIGHTS_BACKWARD(main_grads)                                                                  \
    "(Tensor dlink_t, Tensor dlink_t_scale, Tensor x, Tensor w1, Tensor? w3, Tensor[] plan, int layout, "    \
    "int wgrad, bool need_dw1, bool need_dw3" main_grads ") -> (Tensor dw1, Tensor dw3)"
#define FP8_DOWN_BACKWARD(main_grads)                                                                        \
    "(Tensor dout, Tensor h, Tensor x_scale, Tensor w2, Tensor? scores, Tensor[] plan, Tensor[] quantized, " \
    "int layout, int activation, float[] constants, int wgrad, bool need_dlink, bool need_dlink_t, "         \
    "bool need_dw2, bool need_dscores" main_grads ") -> (Tensor dlink, Tensor dlink_scale, Tensor dlink_t, " \
    "Tensor dlink_t_scale, Tensor dw2, Tensor dscores)"

/* How experts are chosen and scored. */
#define ROUTING                                                                                              \
    "int top_k, int score_func, bool route_norm, float route_scale, float route_norm_eps, int num_groups, "  \
    "int num_limited_groups, int group_score"

/* The last arguments: rows that are added to the experts' sum. */
#define SHARED ", Tensor? shared=None, Tensor? shared_gate=None"

STABLE_TORCH_LIBRARY(fused_moe, m) {
    m.def("facts() -> str");
    m.def("cuda_device(int index) -> (int status, int driver, int runtime, int capability)");
    m.def("cuda_problem(int status, int driver, int runtime, int capability) -> str");
    m.def("cuda_calls(int op) -> Tensor");
    m.def("cuda_reset() -> ()");
    m.def("private_plan(Tensor? logits, Tensor? ids, int num_experts, Tensor? expert_map, Tensor? "
          "bias, " ROUTING ", Tensor? num_tokens, Tensor? expert_scale=None) -> (Tensor scores, Tensor ids, "
          "Tensor counts, Tensor plan)");

    m.def("router_logits(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
    m.def("router_dgrad(Tensor dlogits, Tensor weight) -> Tensor");
    m.def("route(Tensor logits, Tensor? bias, " ROUTING ", Tensor? given_ids=None, Tensor? num_tokens=None, "
          "Tensor? expert_scale=None) -> (Tensor scores, Tensor ids)");
    m.def("route_backward(Tensor dscores, Tensor logits, Tensor ids, int score_func, bool route_norm, "
          "float route_scale, float route_norm_eps, Tensor? expert_scale=None) -> Tensor");
    m.def(
        "route_plan(Tensor ids, int num_experts, Tensor? expert_map=None) -> (Tensor counts, Tensor offsets, "
        "Tensor schedule, Tensor row_token, Tensor row_slot, Tensor token_row)");
    m.def("count_plan(Tensor counts, SymInt num_rows, Tensor? rows=None) -> (Tensor counts_out, "
          "Tensor offsets, Tensor schedule)");

    m.def("permute(Tensor x, Tensor[] plan) -> Tensor");
    m.def("unpermute(Tensor rows, Tensor? scores, Tensor[] plan" SHARED ") -> Tensor");
    m.def("unpermute_backward(Tensor dout, Tensor? rows, Tensor? scores, Tensor[] plan, bool need_drows, "
          "bool need_dscores) -> (Tensor drows, Tensor dscores)");
    m.def("shared_backward(Tensor dout, Tensor? shared, Tensor shared_gate, bool need_dshared, "
          "bool need_dshared_gate) -> (Tensor dshared, Tensor dshared_gate)");

    m.def("grouped_mm(Tensor a, Tensor b, Tensor offsets, Tensor? bias=None) -> Tensor");
    m.def("quantized_mm(Tensor a, Tensor data, Tensor scale, Tensor? zero, Tensor offsets, int format, "
          "bool transposed=False, Tensor? data_t=None, Tensor? scale_t=None, Tensor? zero_t=None, "
          "Tensor? bias=None) -> Tensor");
    m.def("wgrad(Tensor a, Tensor b, Tensor offsets, Tensor? a_row_token=None, Tensor? b_row_token=None) -> "
          "Tensor");
    m.def("wgrad_accumulate(Tensor a, Tensor b, Tensor offsets, Tensor(a!) dw, Tensor? a_row_token=None, "
          "Tensor? b_row_token=None) -> ()");
    m.def("bias_grad(Tensor rows, Tensor offsets) -> Tensor");

    m.def("activate(Tensor h, Tensor? up, int layout, int activation, float[] constants) -> Tensor");
    m.def("activate_backward(Tensor da, Tensor h, Tensor? up, int layout, int activation, "
          "float[] constants) -> (Tensor dh, Tensor dup)");

    m.def("up_gate(Tensor x, Tensor w1, Tensor? w3, Tensor? b1, Tensor? b3, Tensor[] plan, int layout, "
          "int activation, float[] constants) -> (Tensor h, Tensor a)");
    m.def("up_dgrad(Tensor dh, Tensor w1, Tensor? w3, Tensor[] plan, int layout) -> Tensor");
    m.def(
        "down_dgrad(Tensor dout, Tensor w2, Tensor? b2, Tensor h, Tensor? scores, Tensor[] plan, int layout, "
        "int activation, float[] constants) -> (Tensor dh, Tensor a_scaled, Tensor dscores)");
    m.def(
        "experts_up(Tensor x, Tensor w1, Tensor? w3, Tensor? b1, Tensor? b3, Tensor? scores, Tensor[] plan, "
        "int layout, int activation, float[] constants, bool save_h, Tensor? main_grad1=None, "
        "Tensor? main_grad3=None) -> (Tensor h, Tensor a)");
    m.def("quantized_up(Tensor x, Tensor[] w1, int format1, Tensor[] w3, int format3, Tensor? b1, "
          "Tensor? b3, Tensor? scores, Tensor? addend, Tensor[] plan, int layout, int activation, "
          "float[] constants, bool save_h) -> (Tensor h, Tensor a)");
    m.def(
        "experts_down(Tensor a, Tensor? h, Tensor w2, Tensor? b2, Tensor? scores, Tensor[] plan, int layout, "
        "int activation, float[] constants, Tensor? main_grad2=None" SHARED ") -> Tensor");
    m.def("experts(Tensor x, Tensor w1, Tensor? w3, Tensor w2, Tensor? b1, Tensor? b3, Tensor? b2, "
          "Tensor scores, Tensor ids, int layout, int activation, float[] constants, bool score_on_input, "
          "Tensor? expert_map=None" SHARED ") -> (Tensor out, Tensor counts)");
    m.def("experts_out(Tensor x, Tensor w1, Tensor? w3, Tensor w2, Tensor? b1, Tensor? b3, Tensor? b2, "
          "Tensor scores, Tensor ids, int layout, int activation, float[] constants, bool score_on_input, "
          "Tensor(a!) out, Tensor? expert_map=None" SHARED ") -> Tensor");
    m.def(
        "quantized_experts(Tensor x, Tensor data1, Tensor scale1, Tensor? zero1, int format1, Tensor? data3, "
        "Tensor? scale3, Tensor? zero3, int format3, Tensor data2, Tensor scale2, Tensor? zero2, int "
        "format2, "
        "Tensor? b1, Tensor? b3, Tensor? b2, Tensor scores, Tensor ids, int layout, int activation, "
        "float[] constants, bool score_on_input, Tensor? expert_map=None" SHARED ") -> (Tensor out, "
        "Tensor counts)");
    m.def(
        "eight_bit_experts(Tensor x, Tensor data1, Tensor scale1, Tensor? data3, Tensor? scale3, Tensor "
        "data2, "
        "Tensor scale2, int format, Tensor? b1, Tensor? b3, Tensor? b2, Tensor scores, Tensor ids, int "
        "layout, "
        "int activation, float[] constants, bool score_on_input, Tensor? smooth1=None, Tensor? smooth2=None, "
        "bool power_of_two=False, Tensor? expert_map=None" SHARED ") -> (Tensor out, Tensor counts)");
    m.def("routed_experts(Tensor x, Tensor gate, Tensor? gate_bias, Tensor? expert_bias, Tensor w1, "
          "Tensor? w3, Tensor w2, Tensor? b1, Tensor? b3, Tensor? b2, " ROUTING ", int layout, "
          "int activation, float[] constants, Tensor? given_ids=None, Tensor? num_tokens=None, "
          "Tensor? expert_scale=None" SHARED ") -> (Tensor out, Tensor counts, Tensor ids, Tensor logits)");
    m.def("experts_up_backward" EXPERTS_UP_BACKWARD(""));
    m.def("experts_up_backward_accumulate" EXPERTS_UP_BACKWARD(
        ", Tensor(a!)? main_grad1, Tensor(b!)? main_grad3"));
    m.def("experts_down_backward" EXPERTS_DOWN_BACKWARD(""));
    m.def("experts_down_backward_accumulate" EXPERTS_DOWN_BACKWARD(", Tensor(a!)? main_grad2"));

    m.def("fp8_weight(Tensor w, Tensor? w3, int layout, int orders=3) -> (Tensor codes, Tensor scale, "
          "Tensor codes_t, Tensor scale_t)");
    m.def("fp8_up_weights(Tensor x, Tensor w1, Tensor? w3, Tensor[] plan, int layout, int wgrad, "
          "Tensor? main_grad1=None, Tensor? main_grad3=None) -> (Tensor link_t, Tensor link_t_scale)");
    m.def("fp8_up(Tensor x, Tensor w1, Tensor? w3, Tensor[] plan, Tensor[] quantized, int layout, "
          "int activation, float[] constants, bool save_h) -> (Tensor link, Tensor link_scale, Tensor h, "
          "Tensor a_codes, Tensor a_scale, Tensor x_scale)");
    m.def("fp8_down(Tensor link, Tensor link_scale, Tensor h, Tensor a_codes, Tensor a_scale, "
          "Tensor x_scale, Tensor w2, Tensor? link_t, Tensor? link_t_scale, Tensor? scores, Tensor[] plan, "
          "Tensor[] quantized, int layout, int activation, float[] constants, int wgrad, "
          "Tensor? main_grad2=None" SHARED ") -> Tensor");
    m.def("fp8_up_backward(Tensor dlink, Tensor dlink_scale, Tensor x, Tensor[] plan, Tensor[] quantized) "
          "-> Tensor");
    m.def("fp8_up_weights_backward" FP8_UP_WEIGHTS_BACKWARD(""));
    m.def("fp8_up_weights_backward_accumulate" FP8_UP_WEIGHTS_BACKWARD(
        ", Tensor(a!)? main_grad1, Tensor(b!)? main_grad3"));
    m.def("fp8_down_backward" FP8_DOWN_BACKWARD(""));
    m.def("fp8_down_backward_accumulate" FP8_DOWN_BACKWARD(", Tensor(a!)? main_grad2"));
}

/* --- functions ------------------------------------------------------------------------------------------ */

/* Both devices have the same functions: begin_call looks at the tensors. */
template <typename Library>
static void register_functions(Library &m) {
    REGISTER(m, router_logits);
    REGISTER(m, router_dgrad);
    REGISTER(m, route);
    REGISTER(m, route_backward);
    REGISTER(m, route_plan);
    REGISTER(m, count_plan);
    REGISTER(m, permute);
    REGISTER(m, unpermute);
    REGISTER(m, unpermute_backward);
    REGISTER(m, shared_backward);
    REGISTER(m, grouped_mm);
    REGISTER(m, quantized_mm);
    REGISTER(m, wgrad);
    REGISTER(m, wgrad_accumulate);
    REGISTER(m, bias_grad);
    REGISTER(m, activate);
    REGISTER(m, activate_backward);
    REGISTER(m, up_gate);
    REGISTER(m, up_dgrad);
    REGISTER(m, down_dgrad);
    REGISTER(m, experts_up);
    REGISTER(m, quantized_up);
    REGISTER(m, experts_up_backward);
    REGISTER(m, experts_up_backward_accumulate);
    REGISTER(m, experts_down);
    REGISTER(m, experts);
    REGISTER(m, experts_out);
    REGISTER(m, quantized_experts);
    REGISTER(m, eight_bit_experts);
    REGISTER(m, routed_experts);
    REGISTER(m, experts_down_backward);
    REGISTER(m, experts_down_backward_accumulate);
    REGISTER(m, fp8_weight);
    REGISTER(m, fp8_up_weights);
    REGISTER(m, fp8_up);
    REGISTER(m, fp8_up_backward);
    REGISTER(m, fp8_up_weights_backward);
    REGISTER(m, fp8_up_weights_backward_accumulate);
    REGISTER(m, fp8_down);
    REGISTER(m, fp8_down_backward);
    REGISTER(m, fp8_down_backward_accumulate);
}

STABLE_TORCH_LIBRARY_IMPL(fused_moe, CPU, m) {
    register_functions(m);
}

#ifdef FUSED_MOE_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(fused_moe, CUDA, m) {
    register_functions(m);
}
#endif

STABLE_TORCH_LIBRARY_IMPL(fused_moe, CompositeExplicitAutograd, m) {
    m.impl("facts", TORCH_BOX(&facts));
    m.impl("cuda_device", TORCH_BOX(&cuda_device));
    m.impl("cuda_problem", TORCH_BOX(&cuda_problem));
    m.impl("cuda_calls", TORCH_BOX(&cuda_calls));
    m.impl("cuda_reset", TORCH_BOX(&cuda_reset));
    REGISTER(m, private_plan);
}
