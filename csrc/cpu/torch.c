/* PyTorch's thread pool and matmul, through libtorch's C interface.
 *
 * libtorch's shim headers are C++ in spite of their C functions, so the ones used are declared here; they
 * have been part of its stable interface since 2.10. */
#include "cpu.h"

#include <stdatomic.h>
#include <stdlib.h>

typedef int32_t AOTITorchError;
typedef struct AtenTensorOpaque *AtenTensorHandle;

AOTITorchError aoti_torch_create_tensor_from_blob(void *data, int64_t ndim, const int64_t *sizes,
                                                  const int64_t *strides, int64_t storage_offset,
                                                  int32_t dtype, int32_t device_type, int32_t device_index,
                                                  AtenTensorHandle *ret);
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
AOTITorchError aoti_torch_cpu_mm_out(AtenTensorHandle out, AtenTensorHandle a, AtenTensorHandle b);
AOTITorchError aoti_torch_cpu_addmm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle a,
                                        AtenTensorHandle b, double beta, double alpha);
int32_t aoti_torch_device_type_cpu(void);
int32_t aoti_torch_dtype_float32(void);
int32_t aoti_torch_dtype_float64(void);
AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain_size,
                                  void (*func)(int64_t begin, int64_t end, void *ctx), void *ctx);
AOTITorchError torch_get_num_threads(uint32_t *num_threads);

/* Exported by PyTorch builds with MKL. MKL splits a GEMM's sums by the number of threads that it
 * assumes, even inside a parallel region: told that it is one, it gives the same bits under any number. */
int MKL_Set_Num_Threads_Local(int num_threads) __attribute__((weak));

/* --- threads -------------------------------------------------------------------------------------------- */

typedef struct {
    FmTask *task;
    const void *ctx;
    size_t scratch_bytes;
    int64_t n;
    atomic_llong next;
    atomic_int status;
} Work;

static void run_tasks(int64_t begin, int64_t end, void *ctx) {
    Work *w = ctx;
    (void)begin, (void)end; /* all threads share one queue of tasks */
    int threads = MKL_Set_Num_Threads_Local ? MKL_Set_Num_Threads_Local(1) : 0;
    char *scratch = NULL;
    if (w->scratch_bytes) {
        scratch = aligned_alloc(64, (w->scratch_bytes + 63) / 64 * 64);
        if (!scratch) atomic_store(&w->status, FUSED_MOE_OUT_OF_MEMORY);
    }
    for (int64_t i; atomic_load(&w->status) == FUSED_MOE_OK && (i = atomic_fetch_add(&w->next, 1)) < w->n;) {
        int status = w->task(i, w->ctx, scratch);
        if (status != FUSED_MOE_OK) atomic_store(&w->status, status);
    }
    if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(threads);
    free(scratch);
}

enum { WORK_PER_THREAD = 1 << 16 }; /* some tens of microseconds */

static int64_t num_threads(void) {
    uint32_t threads;
    return torch_get_num_threads(&threads) ? 1 : threads;
}

int fm_parallel(int64_t n, int64_t work, FmTask *task, const void *ctx, size_t scratch_bytes) {
    if (n <= 0) return FUSED_MOE_OK;
    Work w = {.task = task, .ctx = ctx, .scratch_bytes = scratch_bytes, .n = n};
    int64_t threads = fm_min(fm_min(n, num_threads()), 1 + work / WORK_PER_THREAD);
    if (threads <= 1)
        run_tasks(0, 1, &w);
    else if (torch_parallel_for(0, threads, 1, run_tasks, &w))
        return FUSED_MOE_MATMUL_FAILED;
    return atomic_load(&w.status);
}

int64_t fm_parts(int64_t tiles, int64_t width) {
    enum { TASKS_PER_THREAD = 4 };
    if (tiles <= 0) return 1;
    return fm_min(fm_blocks(width, FM_TILE_COLS), fm_blocks(TASKS_PER_THREAD * num_threads(), tiles));
}

/* --- matmul --------------------------------------------------------------------------------------------- */

static AtenTensorHandle view(const FmRows *v, FmMatrix m) {
    int64_t sizes[] = {m.rows, m.cols}, strides[] = {m.row_stride, m.col_stride};
    int32_t dtype =
        v->accum_bytes == sizeof(double) ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
    AtenTensorHandle tensor = NULL;
    aoti_torch_create_tensor_from_blob(m.data, 2, sizes, strides, 0, dtype, aoti_torch_device_type_cpu(), -1,
                                       &tensor);
    return tensor;
}

int fm_matmul(const FmRows *v, FmMatrix out, FmMatrix a, FmMatrix b, bool accumulate) {
    if (v->operand_bytes < v->accum_bytes) return fm_bf16_matmul(out, a, b, accumulate);
    AtenTensorHandle tensor[] = {view(v, out), view(v, a), view(v, b)};
    AOTITorchError error = !tensor[0] || !tensor[1] || !tensor[2];
    if (!error)
        error = accumulate ? aoti_torch_cpu_addmm_out(tensor[0], tensor[0], tensor[1], tensor[2], 1, 1)
                           : aoti_torch_cpu_mm_out(tensor[0], tensor[1], tensor[2]);
    for (int i = 0; i < 3; i++)
        if (tensor[i]) aoti_torch_delete_tensor_object(tensor[i]);
    return error ? FUSED_MOE_MATMUL_FAILED : FUSED_MOE_OK;
}
