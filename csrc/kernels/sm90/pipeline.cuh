/* Pipelines between warps: barriers whose types say who arrives, and the stage that a warp is at.
 *
 * A barrier's phase ends when all of its arrivals have come, and for loads by TMA their bytes, too. A count
 * that is wrong by one is a hang or a race. So no count is written down: a barrier lists its roles, its count
 * is the sum of theirs, and an arrival of a role that is not listed does not compile. */
#pragma once

#include <type_traits>

#include "ptx.cuh"

namespace fused_moe {
namespace sm90 {

/* Roles, and their arrivals in a phase. */
struct TmaThread { /* expects the bytes of the loads that it issues */
    static constexpr int ARRIVALS = 1;
};
template <int WARPS>
struct CopyingWarps { /* each thread, when its cp.async copies are complete */
    static constexpr int ARRIVALS = 32 * WARPS;
};
template <int WARPS>
struct Warps { /* each one's lane 0 */
    static constexpr int ARRIVALS = WARPS;
};
struct OneThread {
    static constexpr int ARRIVALS = 1;
};
struct FetchingWarp { /* each lane: all have written their part of a work tile */
    static constexpr int ARRIVALS = 32;
};

template <class... Roles>
class Barrier {
    uint64_t state;

    template <class Role>
    static constexpr bool HAS = (std::is_same_v<Role, Roles> || ...);

  public:
    static constexpr int ARRIVALS = (Roles::ARRIVALS + ...);

    __device__ uint32_t address() { return shared_address(&state); }
    __device__ void init() { mbarrier_init(address(), ARRIVALS); }
    __device__ void wait(uint32_t phase, CallSite site = call_site()) {
        mbarrier_wait(address(), phase, site);
    }

    /* One thread calls it before it issues loads of `bytes` bytes. */
    __device__ void expect(uint32_t bytes) {
        static_assert(HAS<TmaThread>, "no thread issues TMA loads for this barrier");
        mbarrier_arrive_expect_tx(address(), bytes);
    }
    /* Each thread of WARPS warps calls it after its copies. */
    template <int WARPS>
    __device__ void arrive_after_copies() {
        static_assert(HAS<CopyingWarps<WARPS>>, "this many copying warps do not arrive here");
        cp_async_mbarrier_arrive_noinc(address());
    }
    /* Each of WARPS warps calls it. */
    template <int WARPS>
    __device__ void arrive_once() {
        static_assert(HAS<Warps<WARPS>>, "this many warps do not arrive here");
        if (threadIdx.x % 32 == 0) mbarrier_arrive(address());
    }
    /* One thread calls it. */
    __device__ void arrive() {
        static_assert(HAS<OneThread>, "no thread arrives here alone");
        mbarrier_arrive(address());
    }
    /* The fetching warp's lanes call it. */
    __device__ void arrive_fetched() {
        static_assert(HAS<FetchingWarp>, "the fetching warp does not arrive here");
        mbarrier_arrive(address());
    }
};

/* A stage of a pipeline, and the phase of its barriers. */
template <int STAGES>
struct PipelineState {
    int index = 0;
    uint32_t phase = 0;

    __device__ void advance() {
        if (++index == STAGES) index = 0, phase ^= 1;
    }
};

} // namespace sm90
} // namespace fused_moe
