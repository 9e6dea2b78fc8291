/* Reads integers whose dtype is known at run time, for every tier. */
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

/* The number of real tokens out of T; the others are padding. */
FUSED_MOE_INTEGER_FN int64_t num_real_tokens(const void *num_tokens, FusedMoeDtype dtype, int64_t T) {
    int64_t num = num_tokens ? integer(num_tokens, dtype, 0) : T;
    return num < 0 ? 0 : num < T ? num : T;
}

/* The expert of a slot; outside [0, E), the slot has none. */
FUSED_MOE_INTEGER_FN int64_t slot_expert(const FusedMoeRoutePlan *p, int64_t slot) {
    int64_t id = integer(p->ids, p->ids_dtype, slot);
    if (!p->expert_map) return id;
    return id >= 0 && id < p->map_size ? p->expert_map[id] : -1;
}

#endif
