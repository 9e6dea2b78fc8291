/* What a status means, in words for the exception that the bindings raise. */
#include "../fused_moe.h"

const char *fused_moe_status_string(int status) {
    switch (status) {
    case FUSED_MOE_OK: return "no error";
    case FUSED_MOE_INVALID_ROWS:
        return "expected ids and maps in range, and row counts >= 0 that sum to at most the rows "
               "given";
    case FUSED_MOE_OUT_OF_MEMORY: return "out of memory";
    case FUSED_MOE_MATMUL_FAILED: return "PyTorch's matmul or thread pool failed";
    case FUSED_MOE_UNSUPPORTED_DTYPE: return "expected float32, float64, float16 or bfloat16";
    case FUSED_MOE_DRIVER_TOO_OLD:
        return "the NVIDIA driver is too old for the CUDA runtime of this build; tensors on the CPU work";
    case FUSED_MOE_GPU_TOO_OLD:
        return "expected a GPU of compute capability 8.0 or newer; tensors on the CPU work";
    case FUSED_MOE_NO_SUCH_TIER: return "FUSED_MOE_TIER names no tier of this build that runs on this GPU";
    case FUSED_MOE_CUDA_ERROR: return "a CUDA call failed";
    default: return "unknown status";
    }
}
