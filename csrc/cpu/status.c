/* What a status means, in words for the exception that the bindings raise. */
#include "../fused_moe.h"

const char *fused_moe_status_string(int status) {
    switch (status) {
    case FUSED_MOE_OK: return "no error";
    case FUSED_MOE_INVALID_ROWS:
        return "expected ids and maps in range, and row counts >= 0 that sum to at most the rows "
               "given, found others";
    case FUSED_MOE_OUT_OF_MEMORY: return "expected memory for the call's temporary buffers, found too little";
    case FUSED_MOE_MATMUL_FAILED:
        return "expected PyTorch's matmul and thread pool to succeed, found an error in one of them";
    case FUSED_MOE_UNSUPPORTED_DTYPE:
        return "expected float32, float64, float16 or bfloat16, found another dtype";
    case FUSED_MOE_UNSUPPORTED_EIGHT_BIT:
        return "expected 8-bit operands that this GPU multiplies: 16-bit x, widths that are multiples of 16 "
               "and at most 16,384, with gate and up of fp8_block in one weight of 64, and e4m3 on compute "
               "capability 9.0 alone; found others";
    case FUSED_MOE_DRIVER_TOO_OLD:
        return "expected an NVIDIA driver for the CUDA runtime of this build, found an older one; tensors on "
               "the CPU work";
    case FUSED_MOE_UNSUPPORTED_GPU:
        return "expected a GPU that this build has kernels for, found another; tensors on the CPU work";
    case FUSED_MOE_NO_SUCH_TIER:
        return "expected FUSED_MOE_TIER to name a tier of this build that runs on this GPU, found another";
    case FUSED_MOE_CUDA_ERROR: return "expected CUDA calls to succeed, found an error";
    default: return "unknown status";
    }
}
