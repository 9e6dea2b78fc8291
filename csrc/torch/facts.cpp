/* Facts on the library and on the machine, which no layer asks for: how it was built, what its numbers stand
 * for, which tier ran what. */
#include <string>

#include "operators.h"

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
 * what runs bfloat16 GEMMs on the CPU, and constants. */
std::string facts() {
    static const Fact build[] = {BUILD_INFO};
    static const Constant constants[] = {
        {"TILE_ROWS", FUSED_MOE_TILE_ROWS},
        {"SKINNY_ROWS", FUSED_MOE_SKINNY_ROWS},
        {"MIN_SLICE", FUSED_MOE_MIN_SLICE},
        {"MAX_CTAS", FUSED_MOE_MAX_CTAS},
        {"SLICE_SMS", FUSED_MOE_SLICE_SMS},
        {"HEAD_WORDS", FUSED_MOE_HEAD_WORDS},
        {"NUM_COUNTERS", FUSED_MOE_NUM_COUNTERS},
        {"PAD_CHUNK", PAD_CHUNK},
        {"PAD_LINE", PAD_LINE},
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
    write_name(&json, "cpu_bf16");
    write_string(&json, fused_moe_cpu_bf16());
    write_name(&json, "constants");
    json += '{';
    for (const Constant &constant : constants) {
        write_name(&json, constant.name);
        json += std::to_string(constant.value);
    }
    return json + "}}";
}

Tensor cuda_calls(int64_t op) {
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

std::tuple<int64_t, int64_t, int64_t, int64_t> cuda_device(int64_t index) {
#ifdef FUSED_MOE_WITH_CUDA
    FusedMoeCudaDevice device = {};
    int status = fused_moe_cuda_device((int)index, &device);
    return {status, device.driver_version, device.runtime_version, device.capability};
#else
    (void)index;
    return {FUSED_MOE_NO_SUCH_TIER, 0, 0, 0};
#endif
}

void cuda_reset() {
#ifdef FUSED_MOE_WITH_CUDA
    fused_moe_cuda_reset();
#endif
}
