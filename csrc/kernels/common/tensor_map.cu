/* The driver's encoder of tensor maps, called without linking libcuda. */
#include "tensor_map.cuh"

namespace fused_moe {

static PFN_cuTensorMapEncodeTiled_v12000 find_encoder() {
    void *entry = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
#else
    cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &result);
#endif
    bool ok = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return ok ? (PFN_cuTensorMapEncodeTiled_v12000)entry : nullptr;
}

int encode_tensor_map(CUtensorMap *map, CUtensorMapDataType dtype, int rank, const void *data,
                      const uint64_t *sizes, const uint64_t *strides, const uint32_t *box,
                      CUtensorMapSwizzle swizzle) {
    static const PFN_cuTensorMapEncodeTiled_v12000 encode = find_encoder();
    if (!encode) return FUSED_MOE_DRIVER_TOO_OLD;
    const uint32_t element_strides[] = {1, 1, 1, 1, 1};
    auto encoded = [&] {
        return encode(map, dtype, rank, const_cast<void *>(data), sizes, strides, box, element_strides,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
    };
    if (encoded()) return FUSED_MOE_OK;
    /* It needs a current context, which a thread has from its first launch on. A thread of autograd may call
     * this before. */
    int device;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaSetDevice(device);
    if (error == cudaSuccess && !encoded()) error = cudaErrorInvalidValue;
    return cuda_status(error);
}

} // namespace fused_moe
