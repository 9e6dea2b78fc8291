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

#ifdef FUSED_MOE_WITH_CUDA
static std::string why_no_such_tier(int32_t device_index) {
    FusedMoeCudaDevice device = {};
    (void)fused_moe_cuda_device(device_index, &device);
    std::string possible = "auto";
    for (int tier = 0; tier < FUSED_MOE_NUM_TIERS; tier++) {
        if (fused_moe_tier_runs_on(tier, device.capability))
            possible += std::string(" or ") + fused_moe_tier(tier).name;
    }
    const char *asked = getenv("FUSED_MOE_TIER");
    return "FUSED_MOE_TIER is " + std::string(asked ? asked : "not set") + ", expected " + possible +
           " on this GPU";
}
#endif

void check_status(const Call &call, int status) {
    if (status == FUSED_MOE_OK) return;
#ifdef FUSED_MOE_WITH_CUDA
    if (status == FUSED_MOE_CUDA_ERROR)
        fail(call.op, "expected CUDA to run the kernels, found its error: ", fused_moe_cuda_error());
    if (status == FUSED_MOE_NO_SUCH_TIER) fail(call.op, why_no_such_tier(call.device));
#endif
    fail(call.op, fused_moe_status_string(status));
}

#ifdef FUSED_MOE_WITH_CUDA
/* The stream's zeroed counters, or zeroed ones of this call alone. */
static uint32_t *zeroed_counters(const Call &call, const Tensor &x, WorkspaceTensors *tensors) {
    uint32_t *counters = nullptr;
    check_status(call, fused_moe_cuda_counters(call.stream, &counters));
    if (counters) return counters;
    const int64_t bytes = FUSED_MOE_NUM_COUNTERS * sizeof(uint32_t);
    tensors->counters = new_tensor(x, {bytes}, ScalarType::Byte);
    void *data = tensors->counters->mutable_data_ptr();
    check_status(call, fused_moe_cuda_zero(data, bytes, call.stream));
    return (uint32_t *)data;
}
#endif

void provide_workspace(const Call &call, const Tensor &x, FusedMoeWorkspace *workspace,
                       WorkspaceTensors *tensors) {
    if (workspace->bytes > 0) {
        tensors->data = new_tensor(x, {workspace->bytes}, ScalarType::Byte);
        workspace->data = tensors->data->mutable_data_ptr();
    }
#ifdef FUSED_MOE_WITH_CUDA
    if (fused_moe_tier(workspace->tier).uses_counters)
        workspace->counters = zeroed_counters(call, x, tensors);
#else
    (void)call;
#endif
}
