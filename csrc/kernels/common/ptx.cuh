/* PTX instructions, one wrapper each, named like the instruction. Raw asm is nowhere else. */
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace fused_moe {

__device__ inline uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* The SM that runs this CTA. */
__device__ inline uint32_t smid() {
    uint32_t id;
    asm("mov.u32 %0, %smid;" : "=r"(id));
    return id;
}

/* Nanoseconds of the GPU's clock, which all SMs share. */
__device__ inline uint64_t globaltimer() {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

/* x, made such that ptxas keeps it in a register: it would rather compute addresses again inside a loop. Not
 * for a constant, whose shuffle nvcc computes. */
__device__ inline uint32_t opaque(uint32_t x) {
    return __shfl_sync(~0u, x, threadIdx.x % 32);
}

/* opaque() of a constant: bit 31 of the SM's number is added, which is 0, but compilers do not know that. */
__device__ inline uint32_t opaque_constant(uint32_t x) {
    return opaque(x + (smid() >> 31));
}

/* (a & b) | c in one instruction. Where two operands are constants, ptxas would make two. */
__device__ inline uint32_t lop3_and_or(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

/* x is computed before what follows. No instruction. */
__device__ inline void pin(uint32_t &x) {
    asm volatile("" : "+r"(x)::"memory");
}
__device__ inline void pin(int32_t &x) {
    asm volatile("" : "+r"(x)::"memory");
}
__device__ inline void pin(float &x) {
    asm volatile("" : "+f"(x)::"memory");
}

/* --- PDL, programmatic dependent launch (PTX ISA 9.7.13.13): for launch_dependent() --------------------- */

/* Waits until the kernels before this one in the stream are complete and what they wrote is visible. */
__device__ inline void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* The next kernel in the stream may start once a thread of every CTA has called this, or has exited. Called
 * after griddepcontrol_wait(), so that when the next kernel starts all but this one are complete. */
__device__ inline void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* --- memory order between CTAs (PTX ISA 8.8) ------------------------------------------------------------ */

/* A release publishes what the thread has written, and what its warp had written before a __syncwarp(). Who
 * acquires the value that was released sees it. */

__device__ inline uint32_t ld_acquire_gpu(const uint32_t *src) {
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(src) : "memory");
    return v;
}
__device__ inline uint64_t ld_acquire_gpu(const uint64_t *src) {
    uint64_t v;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(src) : "memory");
    return v;
}

/* As it is now, and nothing more: with fence_acq_rel_gpu() after it, it acquires. */
__device__ inline uint32_t ld_relaxed_gpu(const uint32_t *src) {
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(src) : "memory");
    return v;
}

/* Cheaper than __threadfence(), which is sequentially consistent, too. */
__device__ inline void fence_acq_rel_gpu() {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

__device__ inline void st_release_gpu(uint64_t *dst, uint64_t v) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(dst), "l"(v) : "memory");
}

__device__ inline void red_add_release_gpu(uint32_t *dst, uint32_t v) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(dst), "r"(v) : "memory");
}

/* Returns what was there. */
__device__ inline uint32_t atom_add_acq_rel_gpu(uint32_t *dst, uint32_t v) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(dst), "r"(v)
                 : "memory");
    return before;
}

/* --- named barriers (PTX ISA 9.7.13.1) ------------------------------------------------------------------ */

/* Waits until `threads` threads, in whole warps, have come to barrier `id` (1 to 15; 0 is
 * __syncthreads'). */
__device__ inline void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* --- arithmetic ----------------------------------------------------------------------------------------- */

/* 2^x and 1/x to two units in the last place; tiny values count as zero. */
__device__ inline float ex2_approx_ftz(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float rcp_approx_ftz(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The larger one, and NaN if either is NaN. */
__device__ inline float max_nan_f32(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

/* Four of the bytes of a (0 to 3) and b (4 to 7), numbered by the selector's nibbles; a nibble's upper
 * bit asks for eight copies of the byte's upper bit. */
__device__ inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
    return bytes;
}

/* 16 bytes from global to shared memory, past L1; zeros where valid is false, and src is not read. */
__device__ inline void cp_async(uint32_t dst, const void *src, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0)
                 : "memory");
}

/* One word. */
__device__ inline void cp_async_word(uint32_t dst, const void *src) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}

__device__ inline void cp_async_commit_group() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most `pending` of this thread's groups are still in flight. */
template <int pending>
__device__ inline void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

/* 16 bytes of global memory; zeros where valid is false, and src is not read. */
__device__ inline uint4 ld_global_v4(const void *src, bool valid) {
    uint4 v;
    asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0; "
                 "mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0; "
                 "@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];}"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
                 : "l"(src), "r"((int)valid));
    return v;
}

/* 16 bytes to global memory in one store, which the compiler may not split. */
__device__ inline void st_global_v4(void *dst, const uint4 &v) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(dst), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

/* 8 bytes to global memory where valid is true, without a branch. */
__device__ inline void st_global_v2(void *dst, const uint2 &v, bool valid) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %3, 0; @p st.global.v2.b32 [%0], {%1, %2};}" ::"l"(dst),
                 "r"(v.x), "r"(v.y), "r"((int)valid)
                 : "memory");
}

/* Four bytes of shared memory at an address of shared_address(). */
__device__ inline uint32_t ld_shared_u32(uint32_t address) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

__device__ inline uint4 ld_shared_v4(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

/* Four 8x8 matrices of 16-bit elements; lane l gives the address of row l%8 of matrix l/8. */
__device__ inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* d (16x8, fp32) += a (16x16) b (16x8) */
__device__ inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                    __nv_bfloat16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __half) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* d (16x8, int32) += a (16x32, int8) b (32x8, int8) */
__device__ inline void mma_m16n8k32(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

} // namespace fused_moe
