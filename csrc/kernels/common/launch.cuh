/* What all launchers share: grid sizes, and errors as status codes. */
#pragma once

#include <atomic>
#include <cuda_runtime.h>
#include <stdint.h>

#include "../../fused_moe.h"
#include "../../rules.h"

namespace fused_moe {

/* A status; fused_moe_cuda_error() keeps the runtime's error. Defined in device.cu. */
int cuda_status(cudaError_t error);

/* Read once per process. */
typedef struct {
    int32_t capability; /* 90 is sm_90 */
    int32_t num_sms;
    bool runs_sm90; /* not where FUSED_MOE_ARCHS leaves sm_90a out: the code there is compute_80's */
} DeviceFacts;

/* The current device's; a CUDA tier runs on it. Defined in device.cu. */
const DeviceFacts &current_device();

inline int launch_status() {
    return cuda_status(cudaGetLastError());
}

inline int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

/* CTAs for n elements. Kernels use grid-stride loops: the grid may be smaller than that. */
inline unsigned grid_for(int64_t n, int64_t per_cta) {
    int64_t ctas = ceil_div(n, per_cta);
    return (unsigned)(ctas < 1 ? 1 : ctas < INT32_MAX ? ctas : INT32_MAX);
}

/* Launches a kernel that takes one params struct and `shared` bytes of dynamic shared memory. */
template <typename Params>
int launch(void (*kernel)(Params), const Params &p, int64_t grid, int threads, size_t shared, void *stream) {
    if (grid <= 0) return FUSED_MOE_OK;
    if (grid > INT32_MAX) return cuda_status(cudaErrorInvalidConfiguration);
    cudaError_t error = cudaSuccess;
    if (shared > 48 * 1024)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    if (error != cudaSuccess) return cuda_status(error);
    kernel<<<(unsigned)grid, threads, shared, (cudaStream_t)stream>>>(p);
    return launch_status();
}

typedef struct {
    int64_t grid;
    int threads, cluster; /* CTAs of a cluster; 1: none */
    size_t shared;        /* bytes of dynamic shared memory; above 16 KiB set most_shared if they vary */
    FusedMoePdl pdl;
    size_t most_shared; /* the most of any launch of the kernel; 0: shared */
} Launch;

/* Launches a kernel by PDL where sm_90a's code runs: it may start when the CTAs of the kernel before it have
 * exited or called griddepcontrol_launch_dependents(), so it calls griddepcontrol_wait() before it reads what
 * that wrote, or writes what that may read. Other GPUs run sm_80's code, in which both are empty. Few
 * kernels let the next one start: CTAs that take the SMs one by one, as they become free, are not where the
 * kernel's own order would have them. That costs a full GEMM 3%, and one of many small experts a third.
 * cuBLAS's kernels let the next one start, so down_dgrad, and grouped_mm unless it follows a kernel of its
 * own call, are launched without PDL. */
template <auto kernel, typename Params>
int launch_dependent(const Params &p, const Launch &how, void *stream) {
    static std::atomic<uint64_t> allowed; /* devices that allow the kernel its most_shared, one bit each */
    if (how.grid <= 0) return FUSED_MOE_OK;
    if (how.grid > INT32_MAX) return cuda_status(cudaErrorInvalidConfiguration);
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    uint64_t bit = 1ull << device % 64;
    /* 48 KiB, with a kernel's static shared memory, need no permission */
    if (error == cudaSuccess && how.shared > 16 * 1024 && !(allowed & bit)) {
        size_t most = how.most_shared ? how.most_shared : how.shared;
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)most);
        if (error == cudaSuccess) allowed |= bit;
    }
    if (error != cudaSuccess) return cuda_status(error);
    cudaLaunchAttribute attributes[2] = {};
    unsigned num_attributes = 0;
    const bool runs_sm90 = current_device().runs_sm90;
    if (runs_sm90 && !how.pdl.after_any) {
        cudaLaunchAttribute &pdl = attributes[num_attributes++];
        pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        pdl.val.programmaticStreamSerializationAllowed = 1;
    }
    if (runs_sm90 && how.cluster > 1) {
        cudaLaunchAttribute &cluster = attributes[num_attributes++];
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim = {(unsigned)how.cluster, 1, 1};
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = (unsigned)how.grid;
    config.blockDim = how.threads;
    config.dynamicSmemBytes = how.shared;
    config.stream = (cudaStream_t)stream;
    config.attrs = attributes;
    config.numAttrs = num_attributes;
    error = cudaLaunchKernelEx(&config, kernel, p);
    if (error != cudaSuccess) cudaGetLastError(); /* it is reported here, not by a later launch */
    return cuda_status(error);
}

} // namespace fused_moe
