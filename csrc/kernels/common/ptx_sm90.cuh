/* PTX of sm_90 and newer, one wrapper per instruction, named like it: mbarrier, TMA, named barriers,
 * clusters, stmatrix. Shared addresses are those of shared_address().
 *
 * PTX ISA: barrier.cluster 9.7.13.3, mbarrier 9.7.13.15, mapa 9.7.9.23, cp.async.bulk 9.7.9.25,
 * fence.proxy.tensormap 9.7.13.4. */
#pragma once

#include "ptx.cuh"
#include "waits.cuh"

namespace fused_moe {

/* --- warps ---------------------------------------------------------------------------------------------- */

/* One lane of a whole warp, the same every time. */
__device__ inline bool elect_sync() {
    uint32_t elected;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
    return elected;
}

/* The same, and whether `value` is true for one of the threads or more. */
__device__ inline bool barrier_or(int id, int threads, bool value) {
    uint32_t any;
    asm volatile("{.reg .pred p, q; setp.ne.b32 p, %3, 0;\n"
                 "barrier.red.or.pred q, %1, %2, p; selp.u32 %0, 1, 0, q;}"
                 : "=r"(any)
                 : "r"(id), "r"(threads), "r"((uint32_t)value)
                 : "memory");
    return any;
}

/* --- barriers in shared memory -------------------------------------------------------------------------- */

__device__ inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

/* After the inits, before any other thread or TMA sees the barriers. */
__device__ inline void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

/* An arrival of this thread when its cp.async copies so far are complete; the barrier's count includes it. */
__device__ inline void cp_async_mbarrier_arrive_noinc(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

#ifdef FUSED_MOE_DEBUG

/* Whether the phase with this parity is over; the hardware suspends the thread for a while until it is. */
__device__ inline bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
    uint32_t is_over;
    asm volatile("{.reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;}"
                 : "=r"(is_over)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return is_over;
}

__device__ inline void mbarrier_wait(uint32_t barrier, uint32_t parity, CallSite site = call_site()) {
    for (WaitBound bound; !mbarrier_try_wait(barrier, parity);)
        bound.check("the phase of the mbarrier at shared address", barrier, parity, parity ^ 1, site);
}

#else

/* Waits for the end of the phase with this parity; the hardware suspends the thread for a while. */
__device__ inline void mbarrier_wait(uint32_t barrier, uint32_t parity, CallSite = call_site()) {
    asm volatile("{.reg .pred p;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra done;\n"
                 "bra again;\n"
                 "done:}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

#endif

/* --- TMA ------------------------------------------------------------------------------------------------ */

/* Ordinary writes to shared memory of this thread become visible to TMA and to wgmma. */
__device__ inline void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* A box of a map's tensor to shared memory; its bytes count on the barrier. */
__device__ inline void cp_async_bulk_tensor_load(uint32_t dst, const void *map, uint32_t barrier, int c0,
                                                 int c1) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%3, %4}], [%2];" ::"r"(dst),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1)
                 : "memory");
}

__device__ inline void cp_async_bulk_tensor_load(uint32_t dst, const void *map, uint32_t barrier, int c0,
                                                 int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%3, %4, %5}], [%2];" ::"r"(dst),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
                 : "memory");
}

__device__ inline void cp_async_bulk_tensor_load(uint32_t dst, const void *map, uint32_t barrier, int c0,
                                                 int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(dst),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

__device__ inline void cp_async_bulk_tensor_load(uint32_t dst, const void *map, uint32_t barrier, int c0,
                                                 int c1, int c2, int c3, int c4) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(dst),
                 "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
                 : "memory");
}

/* A box from shared memory; elements outside the tensor are not written. */
__device__ inline void cp_async_bulk_tensor_store(const void *map, uint32_t src, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(src), "r"(c0), "r"(c1)
                 : "memory");
}

__device__ inline void cp_async_bulk_tensor_store(const void *map, uint32_t src, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(src), "r"(c0), "r"(c1), "r"(c2)
                 : "memory");
}

/* The same; its lines are the first to leave L2. */
__device__ inline void cp_async_bulk_tensor_store_evict_first(const void *map, uint32_t src, int c0, int c1,
                                                              int c2) {
    asm volatile("{.reg .b64 policy;\n"
                 "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
                 "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint "
                 "[%0, {%2, %3, %4}], [%1], policy;}" ::"l"(map),
                 "r"(src), "r"(c0), "r"(c1), "r"(c2)
                 : "memory");
}

__device__ inline void cp_async_bulk_tensor_store(const void *map, uint32_t src, int c0, int c1, int c2,
                                                  int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
        "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

/* Adds a box of shared memory to the tensor. */
__device__ inline void cp_reduce_async_bulk_tensor_add(const void *map, uint32_t src, int c0, int c1,
                                                       int c2) {
    asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group "
                 "[%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(src), "r"(c0), "r"(c1), "r"(c2)
                 : "memory");
}

__device__ inline void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Waits until at most `pending` of this thread's groups still read their shared memory. */
template <int pending>
__device__ inline void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

/* Before TMA uses a tensor map that the device has built. */
__device__ inline void fence_proxy_tensormap_acquire(const void *map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

/* --- memory --------------------------------------------------------------------------------------------- */

/* An element of global memory that no kernel of this launch writes, or `otherwise` where `valid` is false. */
__device__ inline int32_t ld_global_or(const int32_t *src, bool valid, int32_t otherwise) {
    int32_t v;
    asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, %3;"
                 "@p ld.global.nc.b32 %0, [%1];}"
                 : "=&r"(v)
                 : "l"(src), "r"((int)valid), "r"(otherwise));
    return v;
}

/* --- conversions ---------------------------------------------------------------------------------------- */

/* Two e4m3 to two fp16. */
__device__ inline uint32_t cvt_f16x2_e4m3x2(uint16_t v) {
    uint32_t pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(v));
    return pair;
}

/* Two floats to e4m3, rounded to the nearest even; 448 is the largest. */
__device__ inline uint16_t cvt_e4m3x2_f32(float low, float high) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

/* --- arithmetic ----------------------------------------------------------------------------------------- */

/* The larger magnitudes of two pairs of bf16, NaN if either is NaN, in one instruction. Their signs are the
 * products of the operands' signs. */
__device__ inline uint32_t max_nan_xorsign_abs_bf16x2(uint32_t a, uint32_t b) {
    uint32_t larger;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

/* --- clusters ------------------------------------------------------------------------------------------- */

/* Waits until all threads of the cluster, in converged warps, have come here. What they wrote to shared
 * memory is then visible to all of them. */
__device__ inline void barrier_cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\n"
                 "barrier.cluster.wait.aligned;" ::
                     : "memory");
}

/* The same in two halves: a CTA that only has to tell the others goes on. */
__device__ inline void barrier_cluster_arrive() {
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
}

__device__ inline void barrier_cluster_wait() {
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

/* The cluster address in CTA `rank` that corresponds to this CTA's shared `address`. */
__device__ inline uint32_t mapa(uint32_t address, int rank) {
    uint32_t remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

__device__ inline int32_t ld_shared_cluster(uint32_t address) {
    int32_t v;
    asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

__device__ inline float2 ld_shared_cluster_v2(uint32_t address) {
    float2 v;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
                 : "=f"(v.x), "=f"(v.y)
                 : "r"(address)
                 : "memory");
    return v;
}

/* --- shared memory by its address ----------------------------------------------------------------------- */

__device__ inline uint32_t ld_shared_u8(uint32_t address) {
    uint32_t v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

__device__ inline int32_t ld_shared_s8(uint32_t address) {
    int32_t v;
    asm volatile("ld.shared.s8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

__device__ inline uint32_t ld_shared_u16(uint32_t address) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
    return v;
}

__device__ inline float ld_shared_f32(uint32_t address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
}

__device__ inline float2 ld_shared_f32x2(uint32_t address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}

__device__ inline uint2 ld_shared_v2(uint32_t address) {
    uint2 v;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}

__device__ inline void st_shared(uint32_t address, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}

__device__ inline void st_shared_u16(uint32_t address, uint16_t v) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(v) : "memory");
}

__device__ inline void st_shared_u32(uint32_t address, uint32_t v) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

__device__ inline void st_shared_v4(uint32_t address, float4 v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z),
                 "f"(v.w)
                 : "memory");
}

__device__ inline void st_shared_v4(uint32_t address, const uint4 &v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

/* An 8x8 matrix of 16-bit elements, transposed: lane l has elements 2 (l % 4) and one more of row l / 4. */
__device__ inline uint32_t movmatrix_trans(uint32_t pair) {
    uint32_t v;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(v) : "r"(pair));
    return v;
}

/* Four 8x8 matrices of 16-bit elements; lane l gives the address of row l%8 of matrix l/8. */
__device__ inline void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0),
                 "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

/* The same of the transposed matrices. */
__device__ inline void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                                         uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

} // namespace fused_moe
