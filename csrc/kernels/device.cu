/* Whether a CUDA tier runs on a device, and what the runtime said when a call failed. Which of the CUDA tiers has a
 * call: hopper/tier.cu.
 *
 * The environment variable FUSED_MOE_TIER asks for a tier: portable, hopper or auto (the default). hopper is
 * auto, and an error on other GPUs. */
#include "launch.cuh"

#include <stdlib.h>
#include <string.h>

namespace fused_moe {

static thread_local cudaError_t last_error = cudaSuccess;

int cuda_status(cudaError_t error) {
    if (error == cudaSuccess) return FUSED_MOE_OK;
    last_error = error;
    return FUSED_MOE_CUDA_ERROR;
}

} // namespace fused_moe

extern "C" const char *fused_moe_cuda_error(void) {
    return cudaGetErrorString(fused_moe::last_error);
}

extern "C" int fused_moe_cuda_device(int device, FusedMoeCudaDevice *found) {
    int major = 0, minor = 0, driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    cudaGetLastError(); /* a failed question must not show up as a later launch's error */
    *found = {driver, runtime, 10 * major + minor};
    if (error == cudaErrorInsufficientDriver) return FUSED_MOE_DRIVER_TOO_OLD;
    if (error != cudaSuccess) return fused_moe::cuda_status(error);
    if (major < 8) return FUSED_MOE_GPU_TOO_OLD;
    const char *tier = getenv("FUSED_MOE_TIER");
    bool known = !tier || !*tier || !strcmp(tier, "auto") || !strcmp(tier, "portable");
    bool hopper = tier && !strcmp(tier, "hopper") && found->capability == 90;
    return known || hopper ? FUSED_MOE_OK : FUSED_MOE_NO_SUCH_TIER;
}
