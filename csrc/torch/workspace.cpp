/* How a call reaches its device and stream, and the memory that the CUDA tiers need beside tensors. */
#include <cstdlib>

#include "bindings.h"
#include "operators.h"

/* Weak, because a CPU build of PyTorch has none: the same library loads there. */
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device,
                                                                                   void **stream);

Call begin_call(const char *op, const Tensor &x) {
    Call call = {op, x.is_cuda(), 0, nullptr, {}};
#ifdef FUSED_MOE_WITH_CUDA
    if (!call.is_cuda) return call;
    call.device = x.get_device_index();
    call.guard.emplace(call.device);
    FusedMoeCudaDevice device;
    check_status(call, fused_moe_cuda_device(call.device, &device));
    if (!aoti_torch_get_current_cuda_stream || aoti_torch_get_current_cuda_stream(call.device, &call.stream))
        fail(op, "expected a CUDA stream from PyTorch, found none");
#else
    if (call.is_cuda) fail(op, "expected CUDA kernels in this build, found none");
#endif
    return call;
}

/* The first NVIDIA driver for a CUDA major version, on Linux: table 1 of NVIDIA's "CUDA Compatibility",
 * section "Minor Version Compatibility". */
static std::string first_driver(int64_t major) {
    return major == 13 ? " (580 or newer)" : major == 12 ? " (525 or newer)" : "";
}

/* CUDA's version numbers are 1000 major + 10 minor. */
static std::string why_driver_too_old(int64_t driver, int64_t runtime) {
    const int64_t major = driver / 1000;
    std::string found = "no driver", instead;
    if (driver) {
        found = "one for CUDA " + std::to_string(major) + "." + std::to_string(driver % 1000 / 10);
        instead = ", or build fused_moe with a CUDA " + std::to_string(major) + " toolkit";
    }
    return "expected an NVIDIA driver for CUDA " + std::to_string(runtime / 1000) +
           first_driver(runtime / 1000) + ", found " + found + ": update it" + instead;
}

static std::string why_no_such_tier(int64_t capability) {
    std::string possible = "auto";
    for (int tier = 0; tier < FUSED_MOE_NUM_TIERS; tier++) {
        if (fused_moe_tier_runs_on(tier, (int32_t)capability))
            possible += std::string(" or ") + fused_moe_tier(tier).name;
    }
    const char *asked = getenv("FUSED_MOE_TIER");
    return "FUSED_MOE_TIER is " + std::string(asked ? asked : "not set") + ", expected " + possible +
           " on this GPU";
}

/* 90 is 9.0. */
static std::string in_words(int64_t capability) {
    return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

/* The last tier runs on every GPU that the build supports. */
static std::string why_unsupported_gpu(int64_t capability) {
    const FusedMoeTierFacts runs_on = fused_moe_tier(FUSED_MOE_NUM_TIERS - 1);
    std::string newest = " or newer", instead;
    if (runs_on.newest != INT32_MAX)
        newest = runs_on.newest > runs_on.oldest ? " to " + in_words(runs_on.newest) : "";
    if (capability >= 80) instead = ", which FUSED_MOE_ARCHS left out of this build";
    return "expected a GPU of compute capability " + in_words(runs_on.oldest) + newest + ", found " +
           in_words(capability) + instead;
}

std::string cuda_problem(int64_t status, int64_t driver, int64_t runtime, int64_t capability) {
    switch (status) {
    case FUSED_MOE_OK: return "";
    case FUSED_MOE_DRIVER_TOO_OLD: return why_driver_too_old(driver, runtime);
    case FUSED_MOE_NO_SUCH_TIER: return why_no_such_tier(capability);
    case FUSED_MOE_UNSUPPORTED_GPU: return why_unsupported_gpu(capability);
    default: return fused_moe_status_string((int)status);
    }
}

/* Other tiers have no kernels of it. */
void check_trains_fp8(const Call &call) {
#ifdef FUSED_MOE_WITH_CUDA
    if (!call.is_cuda || fused_moe_cuda_trains_fp8()) return;
    FusedMoeCudaDevice d = {};
    (void)fused_moe_cuda_device(call.device, &d);
    const FusedMoeTierFacts tier = fused_moe_tier(FUSED_MOE_TIER_SM90);
    const char *asked = getenv("FUSED_MOE_TIER");
    fail(call.op, "expected the tier ", tier.name, ", which trains in FP8, on a GPU of compute capability ",
         in_words(tier.oldest), ", found a GPU of ", in_words(d.capability), " and FUSED_MOE_TIER ",
         asked && *asked ? asked : "not set");
#else
    (void)call;
#endif
}

void check_status(const Call &call, int status) {
    if (status == FUSED_MOE_OK) return;
#ifdef FUSED_MOE_WITH_CUDA
    if (status == FUSED_MOE_CUDA_ERROR)
        fail(call.op, "expected CUDA to run the kernels, found its error: ", fused_moe_cuda_error());
    if (call.is_cuda) {
        FusedMoeCudaDevice d = {};
        (void)fused_moe_cuda_device(call.device, &d);
        fail(call.op, cuda_problem(status, d.driver_version, d.runtime_version, d.capability));
    }
#endif
    fail(call.op, fused_moe_status_string(status));
}

static constexpr int64_t COUNTER_BYTES = FUSED_MOE_NUM_COUNTERS * sizeof(uint32_t);

Counters find_counters(const Call &call, const Tensor &x) {
    Counters found = {nullptr, {}};
#ifdef FUSED_MOE_WITH_CUDA
    if (!call.is_cuda) return found;
    check_status(call, fused_moe_cuda_counters(call.stream, &found.data));
    if (found.data) return found;
    found.to_zero = new_tensor(x, {COUNTER_BYTES}, ScalarType::Byte);
    found.data = (uint32_t *)found.to_zero->mutable_data_ptr();
#else
    (void)call, (void)x;
#endif
    return found;
}

void provide_workspace(const Call &call, const Tensor &x, FusedMoeWorkspace *workspace,
                       WorkspaceTensors *tensors) {
    if (workspace->bytes > 0) {
        tensors->data = new_tensor(x, {workspace->bytes}, ScalarType::Byte);
        workspace->data = tensors->data->mutable_data_ptr();
    }
#ifdef FUSED_MOE_WITH_CUDA
    if (!fused_moe_tier(workspace->tier).uses_counters || workspace->counters) return;
    Counters found = find_counters(call, x);
    workspace->counters = found.data;
    tensors->counters = found.to_zero;
    if (found.to_zero) check_status(call, fused_moe_cuda_zero(found.data, COUNTER_BYTES, call.stream));
#else
    (void)call;
#endif
}
