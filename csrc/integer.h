/* Reads an element of an array whose integer dtype is known at run time, for every tier. */
#ifndef FUSED_MOE_INTEGER_H
#define FUSED_MOE_INTEGER_H

#include "fused_moe.h"

#ifdef __CUDACC__
#define FUSED_MOE_INTEGER_FN static inline __host__ __device__
#else
#define FUSED_MOE_INTEGER_FN static inline
#endif

FUSED_MOE_INTEGER_FN int64_t integer(const void *data, FusedMoeDtype dtype, int64_t i) {
    switch (dtype) {
    case FUSED_MOE_I64: return ((const int64_t *)data)[i];
    case FUSED_MOE_I32: return ((const int32_t *)data)[i];
    case FUSED_MOE_I16: return ((const int16_t *)data)[i];
    case FUSED_MOE_I8: return ((const int8_t *)data)[i];
    default: return ((const uint8_t *)data)[i];
    }
}

#endif
