/* What all launchers share: grid sizes, and errors as status codes. */
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "../../fused_moe.h"

namespace fused_moe {

/* A status; fused_moe_cuda_error() keeps the runtime's error. Defined in dispatch.cu. */
int cuda_status(cudaError_t error);

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

} // namespace fused_moe
