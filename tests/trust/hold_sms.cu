/* Holds SMs, so that a test's kernels find fewer of them than they plan for: held_sms.py compiles and calls
 * it.
 *
 * A block takes all of an SM's shared memory, so no other block fits beside it, and stays until the host
 * releases it or its time is over. A green context is the other way: its streams run on a part of the SMs. */
#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct Shared { /* pinned memory of the host, which the blocks see */
    volatile int32_t released;
    volatile int32_t sm[1024]; /* where each block runs, plus 1 */
};

static __device__ uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

static __global__ void hold_kernel(Shared *shared, uint64_t limit) {
    uint32_t sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    uint64_t start = nanoseconds();
    shared->sm[blockIdx.x] = (int32_t)sm + 1;
    __threadfence_system();
    while (!shared->released && nanoseconds() - start < limit) __nanosleep(10000);
}

struct Holder {
    Shared *shared;
    cudaStream_t stream;
    int blocks;
};

/* A driver function, since libcuda is not linked. */
template <typename Function>
static bool find(Function *function, const char *name) {
    void *found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaError_t status = cudaGetDriverEntryPointByVersion(name, &found, 12050, cudaEnableDefault, &result);
    *function = (Function)found;
    return status == cudaSuccess && result == cudaDriverEntryPointSuccess;
}

extern "C" {

/* Launches `blocks` blocks that stay for `seconds` at most; of the current device. NULL, and what failed in
 * *error: they could not be launched. */
Holder *hold(int blocks, double seconds, const char **error) {
    Holder *holder = (Holder *)calloc(1, sizeof *holder);
    int device = 0, bytes = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (status == cudaSuccess)
        status = cudaFuncSetAttribute(hold_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (status == cudaSuccess) status = cudaStreamCreateWithFlags(&holder->stream, cudaStreamNonBlocking);
    if (status == cudaSuccess)
        status = cudaHostAlloc((void **)&holder->shared, sizeof(Shared), cudaHostAllocMapped);
    void *seen = nullptr;
    if (status == cudaSuccess) status = cudaHostGetDevicePointer(&seen, (void *)holder->shared, 0);
    if (status == cudaSuccess) {
        memset((void *)holder->shared, 0, sizeof(Shared));
        holder->blocks = blocks;
        hold_kernel<<<blocks, 1, bytes, holder->stream>>>((Shared *)seen, (uint64_t)(seconds * 1e9));
        status = cudaGetLastError();
    }
    *error = cudaGetErrorString(status);
    return status == cudaSuccess ? holder : nullptr;
}

/* How many SMs the blocks are on: no two of them share one. */
int num_held(const Holder *holder) {
    int num = 0;
    for (int i = 0; i < holder->blocks; i++) num += holder->shared->sm[i] != 0;
    return num;
}

/* 1: the blocks are still there. */
int is_holding(const Holder *holder) {
    return cudaStreamQuery(holder->stream) == cudaErrorNotReady;
}

/* Ends the blocks and waits for them. */
void release(Holder *holder) {
    holder->shared->released = 1;
    cudaStreamSynchronize(holder->stream);
    cudaStreamDestroy(holder->stream);
    cudaFreeHost((void *)holder->shared);
    free(holder);
}

/* --- green contexts ------------------------------------------------------------------------------------- */

/* A stream of a green context with at least `sms` SMs of the current device, and how many it has. NULL, and
 * which call failed in *error: there is none. It stays until the process ends. */
void *green_stream(int sms, int *granted, const char **error) {
    decltype(&cuDeviceGetDevResource) get_resource;
    decltype(&cuDevSmResourceSplitByCount) split;
    decltype(&cuDevResourceGenerateDesc) describe;
    decltype(&cuGreenCtxCreate) create;
    decltype(&cuGreenCtxStreamCreate) create_stream;
    *error = "the driver has no green contexts";
    if (!find(&get_resource, "cuDeviceGetDevResource") || !find(&split, "cuDevSmResourceSplitByCount") ||
        !find(&describe, "cuDevResourceGenerateDesc") || !find(&create, "cuGreenCtxCreate") ||
        !find(&create_stream, "cuGreenCtxStreamCreate"))
        return nullptr;
    CUdevResource all, part, rest;
    CUdevResourceDesc description;
    CUgreenCtx context;
    CUstream stream;
    unsigned groups = 1;
    int device = 0; /* the driver numbers devices as the runtime does */
    cudaGetDevice(&device);
    *error = "cuDeviceGetDevResource failed";
    if (get_resource(device, &all, CU_DEV_RESOURCE_TYPE_SM) != CUDA_SUCCESS) return nullptr;
    *error = "cuDevSmResourceSplitByCount failed";
    if (split(&part, &groups, &all, &rest, 0, sms) != CUDA_SUCCESS || groups != 1) return nullptr;
    *error = "cuDevResourceGenerateDesc failed";
    if (describe(&description, &part, 1) != CUDA_SUCCESS) return nullptr;
    *error = "cuGreenCtxCreate failed";
    if (create(&context, description, device, CU_GREEN_CTX_DEFAULT_STREAM) != CUDA_SUCCESS) return nullptr;
    *error = "cuGreenCtxStreamCreate failed";
    if (create_stream(&stream, context, CU_STREAM_NON_BLOCKING, 0) != CUDA_SUCCESS) return nullptr;
    *granted = (int)part.sm.smCount;
    return stream;
}

} // extern "C"
