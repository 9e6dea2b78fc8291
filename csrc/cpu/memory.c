/* Fresh memory. A large tensor comes from the system as pages that are mapped one fault at a time, 4 KiB
 * each; the weight gradients of many experts spend a third of a training step there. Asked in time, Linux
 * maps 2 MiB at once, where its setting for huge pages is "madvise" or "always". */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "../fused_moe.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

void fused_moe_cpu_prepare(void *data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    const uintptr_t huge = 2 << 20;
    uintptr_t first = ((uintptr_t)data + huge - 1) / huge * huge;
    uintptr_t end = ((uintptr_t)data + (uintptr_t)bytes) / huge * huge;
    if (first < end) (void)madvise((void *)first, end - first, MADV_HUGEPAGE); /* advice: may fail */
#else
    (void)data, (void)bytes;
#endif
}
