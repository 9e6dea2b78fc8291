/* Waits that never end: tests/cuda/test_debug_build.py compiles it as a debug build would, and runs it.
 *
 *   endless_wait barrier | word | counter */
#include <stdio.h>
#include <string.h>

#include "kernels/common/ptx_sm90.cuh"

using namespace fused_moe;

static __device__ uint64_t word;
static __device__ uint32_t counter;

static __global__ void wait_for_barrier() {
    __shared__ uint64_t barrier;
    if (threadIdx.x == 0) mbarrier_init(shared_address(&barrier), 1);
    __syncthreads();
    mbarrier_wait(shared_address(&barrier), 0); /* no thread arrives */
}

static __global__ void wait_for_word() {
    wait_for_value(&word, 7); /* no thread writes */
}

static __global__ void wait_for_counter() {
    wait_for_count(&counter, 8); /* no thread adds */
}

int main(int, char **arguments) {
    auto kernel = !strcmp(arguments[1], "barrier") ? wait_for_barrier
                  : !strcmp(arguments[1], "word")  ? wait_for_word
                                                   : wait_for_counter;
    kernel<<<2, 64>>>();
    puts(cudaGetErrorString(cudaDeviceSynchronize()));
}
