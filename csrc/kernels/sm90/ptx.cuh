/* PTX of sm_90a alone, one wrapper per instruction, named like it: register reallocation and tensor maps
 * edited on the device. Shared addresses are those of shared_address().
 *
 * PTX ISA: setmaxnreg 9.7.19.5, tensormap.replace 9.7.9.27, tensormap.cp_fenceproxy 9.7.13.17. */
#pragma once

#include "../common/ptx_sm90.cuh"

namespace fused_moe {

template <int registers>
__device__ inline void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ inline void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

/* --- tensor maps that the device builds ----------------------------------------------------------------- */

__device__ inline void tensormap_replace_global_address(uint32_t map, const void *address) {
    asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"r"(map),
                 "l"(address)
                 : "memory");
}

template <int dimension>
__device__ inline void tensormap_replace_global_dim(uint32_t map, uint32_t size) {
    asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], %1, %2;" ::"r"(map),
                 "n"(dimension), "r"(size)
                 : "memory");
}

/* Copies a tensor map from shared to global memory, with release to the tensormap proxy. A whole warp calls
 * it. */
__device__ inline void tensormap_cp_fenceproxy(void *dst, uint32_t src) {
    asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync."
                 "aligned [%0], [%1], 128;" ::"l"(dst),
                 "r"(src)
                 : "memory");
}

} // namespace fused_moe
