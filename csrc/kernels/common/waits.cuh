/* Waits for what other threads write, and their bound in debug builds (make build DEBUG=1). There a wait of
 * more than FUSED_MOE_WAIT_SECONDS prints who waits, where in the source and for what, and traps. Release
 * builds never trap: a GPU that is shared or paused can make any wait long. */
#pragma once

#include <stdint.h>
#ifdef FUSED_MOE_DEBUG
#include <stdio.h>
#endif

#include "ptx.cuh"

namespace fused_moe {

#ifdef FUSED_MOE_DEBUG

#ifndef FUSED_MOE_WAIT_SECONDS
#define FUSED_MOE_WAIT_SECONDS 10
#endif

/* Where a wait is called: a default argument is evaluated there. */
struct CallSite {
    const char *function, *file;
    int line;
};

__device__ constexpr CallSite call_site(const char *function = __builtin_FUNCTION(),
                                        const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {function, file, line};
}

/* check() follows each poll that found another value. One thread of those that wait together reports. Other
 * warps have a second to report, too, before the trap ends the kernel. */
class WaitBound {
    uint64_t start = globaltimer();

    __device__ static bool is_past(uint64_t since, double seconds) {
        return globaltimer() - since > (uint64_t)(seconds * 1e9);
    }

    __device__ __noinline__ static void end(const char *what, uint64_t address, uint64_t found,
                                            uint64_t expected, CallSite site) {
        const uint32_t lane = threadIdx.x % 32;
        if (lane == __ffs(__activemask()) - 1)
            printf("fused_moe: block %u, warp %u, lane %u waits in %s (%s:%d) for %s 0x%llx: expected %llu, "
                   "found %llu\n",
                   blockIdx.x, threadIdx.x / 32, lane, site.function, site.file, site.line, what,
                   (unsigned long long)address, (unsigned long long)expected, (unsigned long long)found);
        for (const uint64_t reported = globaltimer(); !is_past(reported, 1);) __nanosleep(1000);
        __trap();
    }

  public:
    __device__ void check(const char *what, uint64_t address, uint64_t found, uint64_t expected,
                          CallSite site) const {
        if (is_past(start, FUSED_MOE_WAIT_SECONDS)) end(what, address, found, expected, site);
    }
};

#else

struct CallSite {};

__device__ constexpr CallSite call_site() {
    return {};
}

class WaitBound {
  public:
    __device__ void check(const char *, uint64_t, uint64_t, uint64_t, CallSite) const {}
};

#endif

/* Waits until a word of global memory is `expected`, and acquires it. */
__device__ inline void wait_for_value(const uint64_t *word, uint64_t expected, CallSite site = call_site()) {
    WaitBound bound;
    for (uint64_t found; (found = ld_acquire_gpu(word)) != expected; __nanosleep(64))
        bound.check("the word at global address", (uint64_t)word, found, expected, site);
}

/* Waits until a counter of global memory is at least `expected`, and acquires it. The polls do not: each
 * acquiring load would invalidate the SM's L1. */
__device__ inline void wait_for_count(const uint32_t *counter, uint32_t expected,
                                      CallSite site = call_site()) {
    WaitBound bound;
    for (uint32_t found; (found = ld_relaxed_gpu(counter)) < expected; __nanosleep(64))
        bound.check("the counter at global address", (uint64_t)counter, found, expected, site);
    fence_acq_rel_gpu();
}

} // namespace fused_moe
