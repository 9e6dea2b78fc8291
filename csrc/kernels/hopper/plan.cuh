/* What a Hopper gemm needs to know of its rows, made on the device before it, in one workspace:
 *
 *   ends   [E]       ends of the experts' rows, made to never decrease and to stay within R
 *   work   [5+2E]    schedule.h's plan
 *   claimed  [num_ctas] turns of a CTA's that were claimed
 *   maps   [2, E]    tensor maps of the results, each ending where the expert's rows end; of wgrad's operands
 *
 * and counters of the caller's own, which are zeroed. */
#pragma once

#include "../../schedule.h"
#include "tensor_map.cuh"

namespace fused_moe {

constexpr int MAX_RESULTS = 2;
constexpr int MAX_CTAS = FUSED_MOE_MAX_CTAS; /* GPUs of sm_90 have 144 SMs at most */

typedef struct { /* a matrix whose rows are grouped by expert: a result, or what wgrad loads */
    CUtensorMap aligned; /* of all its rows        */
    void *data;          /* NULL: there is none    */
    int64_t pitch_bytes; /* from row to row        */
} Result;

typedef struct {
    const int32_t *ends; /* [E]      */
    const int32_t *work; /* [5+2E]   */
    uint32_t *claimed;   /* [MAX_CTAS] */
    uint32_t *counters;  /* the caller's */
    CUtensorMap *maps;   /* [MAX_RESULTS, E] */
    int64_t R;
    int32_t E, num_results;
    int32_t num_columns, tile_columns; /* tiles of columns, and the columns of one */
    bool last_is_half_n;               /* the last tile of columns is half empty, or more */
    FusedMoeSchedule order;
} TileSchedule;

size_t tile_schedule_workspace(int32_t E, int64_t counters = 0);

/* Launches the planning kernel; plan receives where everything lies in the workspace. */
int make_tile_schedule(TileSchedule *plan, const int32_t *ends,
                       const Result (&results)[MAX_RESULTS], void *workspace, void *stream,
                       int64_t counters = 0);

/* The schedule of tiles of so many rows, or what FUSED_MOE_SCHEDULE asks for instead. split_last_wave: num_ctas, or 0. */
FusedMoeSchedule schedule_for(int tile_rows, int split_last_wave);

} // namespace fused_moe
