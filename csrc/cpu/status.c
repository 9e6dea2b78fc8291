/* What a status means, in words for the exception that torch_ops.cpp raises. */
#include "../fused_moe.h"

const char *fused_moe_status_string(int status) {
    switch (status) {
    case FUSED_MOE_OK: return "no error";
    case FUSED_MOE_INVALID_ROWS:
        return "expected ids and maps in range, and row counts >= 0 that sum to at most the rows "
               "given";
    case FUSED_MOE_OUT_OF_MEMORY: return "out of memory";
    case FUSED_MOE_PRODUCT_FAILED: return "PyTorch's matrix product or thread pool failed";
    case FUSED_MOE_UNSUPPORTED_DTYPE: return "expected float32, float64, float16 or bfloat16";
    default: return "unknown status";
    }
}
