/* The planning kernel of the Hopper products: see plan.cuh for what it leaves where.
 *
 * Block 0 makes the schedule; a warp of the other blocks makes the maps of one expert. A warp finds where its
 * expert's rows lie by itself, so nothing waits for anything. */
#include "plan.cuh"

#include <stdlib.h>
#include <string.h>

#include <cub/block/block_scan.cuh>

namespace fused_moe {

/* --- kernel ----------------------------------------------------------------------------------------------- */

constexpr int SCHEDULE_THREADS = 512, SCHEDULE_WARPS = SCHEDULE_THREADS / 32;
typedef struct {
    const int32_t *ends_in; /* [E] */
    int32_t *ends;          /* [E] */
    int32_t *work;          /* [5+2E] */
    uint32_t *claimed;      /* [num_counters] */
    CUtensorMap *maps;      /* [MAX_RESULTS, E] */
    Result results[MAX_RESULTS];
    int64_t R, num_counters;
    int32_t E;
    FusedMoeSchedule schedule;
} ScheduleParams;

__device__ inline int32_t clamped_end(const ScheduleParams &p, int e) {
    return e < 0 ? 0 : (int32_t)max((int64_t)0, min((int64_t)p.ends_in[e], p.R));
}

struct Max {
    __device__ int32_t operator()(int32_t a, int32_t b) const { return max(a, b); }
};

__device__ inline void plan_work(const ScheduleParams &p) {
    struct Sum {
        int active, tiles;
    };
    struct Add {
        __device__ Sum operator()(const Sum &a, const Sum &b) const {
            return {a.active + b.active, a.tiles + b.tiles};
        }
    };
    using Ends = cub::BlockScan<int32_t, SCHEDULE_THREADS, cub::BLOCK_SCAN_WARP_SCANS>;
    using Sums = cub::BlockScan<Sum, SCHEDULE_THREADS, cub::BLOCK_SCAN_WARP_SCANS>;
    __shared__ union {
        typename Ends::TempStorage ends;
        typename Sums::TempStorage sums;
    } storage;
    int32_t *active = p.work + 5, *tile_end = active + p.E;

    int32_t last = 0;
    for (int first = 0; first < p.E; first += SCHEDULE_THREADS) {
        int e = first + threadIdx.x;
        int32_t end = e < p.E ? clamped_end(p, e) : 0, most, total;
        Ends(storage.ends).InclusiveScan(end, most, Max(), total);
        __syncthreads();
        if (e < p.E) p.ends[e] = max(last, most);
        last = max(last, total);
    }
    __syncthreads();

    Sum done[2] = {}; /* with the full experts, then with all */
    for (int few = 0; few < 2; few++) {
        for (int first = 0; first < p.E; first += SCHEDULE_THREADS) {
            int e = first + threadIdx.x;
            int32_t rows = e < p.E ? p.ends[e] - fused_moe_first_row(p.ends, e) : 0;
            int32_t tiles = e < p.E ? fused_moe_row_tiles(rows, &p.schedule) : 0;
            bool mine = tiles && (rows <= p.schedule.skinny_rows) == few;
            Sum sum = {mine, mine ? tiles : 0}, total;
            Sums(storage.sums).InclusiveScan(sum, sum, Add(), total);
            __syncthreads();
            sum = Add()(done[few], sum);
            if (mine) {
                active[sum.active - 1] = e;
                tile_end[sum.active - 1] = sum.tiles;
            }
            done[few] = Add()(done[few], total);
        }
        if (!few) done[1] = done[0];
    }
    for (int64_t i = threadIdx.x; i < p.num_counters; i += SCHEDULE_THREADS) p.claimed[i] = 0;
    if (threadIdx.x == 0) {
        p.work[0] = done[1].active;
        p.work[1] = done[0].active;
        p.work[2] = done[1].tiles;
        p.work[3] = done[0].tiles;
        p.work[4] = (int32_t)fused_moe_skinny_share(done[0].tiles, done[1].tiles);
    }
}

__device__ inline void make_tensor_maps(const ScheduleParams &p, int e, CUtensorMap *scratch) {
    int lane = threadIdx.x % 32;
    int32_t first = 0;
    for (int i = lane; i < e; i += 32) first = max(first, clamped_end(p, i));
    first = __reduce_max_sync(~0u, first);
    int32_t rows = max(first, clamped_end(p, e)) - first;
    if (rows == 0) return; /* nobody goes there, and a map of no rows does not exist */
#pragma unroll
    for (int i = 0; i < MAX_RESULTS; i++) {
        const Result &r = p.results[i];
        if (!r.data) continue;
        ((uint32_t *)scratch)[lane] = ((const uint32_t *)&r.aligned)[lane];
        __syncwarp();
        if (elect_sync()) {
            uint32_t map = shared_address(scratch);
            tensormap_replace_global_address(map, (const char *)r.data + first * r.pitch_bytes);
            tensormap_replace_global_dim<1>(map, rows);
        }
        __syncwarp();
        tensormap_cp_fenceproxy(&p.maps[i * p.E + e], shared_address(scratch));
        __syncwarp();
    }
}

__global__ void __launch_bounds__(SCHEDULE_THREADS)
    tile_schedule_kernel(const __grid_constant__ ScheduleParams p) {
    __shared__ __align__(128) CUtensorMap scratch[SCHEDULE_WARPS];
    griddepcontrol_launch_dependents();
    int warp = threadIdx.x / 32;
    if (blockIdx.x == 0) {
        plan_work(p);
    } else {
        int e = (blockIdx.x - 1) * SCHEDULE_WARPS + warp;
        if (e < p.E) make_tensor_maps(p, e, &scratch[warp]);
    }
}

/* --- launcher ---------------------------------------------------------------------------------------------- */

static size_t round_up(size_t n, size_t to) {
    return (n + to - 1) / to * to;
}

static size_t ints_bytes(int32_t E, int64_t counters) {
    return round_up((E + fused_moe_work_length(E) + MAX_CTAS + counters) * sizeof(int32_t),
                    MAP_BYTES);
}

size_t tile_schedule_workspace(int32_t E, int64_t counters) {
    return ints_bytes(E, counters) + MAX_RESULTS * (size_t)E * MAP_BYTES +
           MAP_BYTES; /* its start is aligned */
}

FusedMoeSchedule schedule_for(int tile_rows, int split_last_wave) {
    FusedMoeSchedule s = {tile_rows, 64, 16, 1, split_last_wave};
    const char *asked = getenv("FUSED_MOE_SCHEDULE");
    if (!asked) return s;
    const char *group = strstr(asked, "group=");
    int tiles = group ? atoi(group + strlen("group=")) : 0;
    if (tiles > 0) s.group = tiles;
    if (strstr(asked, "order=linear")) s.group = 1;
    if (strstr(asked, "order=column")) s.group = INT32_MAX;
    if (strstr(asked, "experts=in-turn")) s.interleave = 0;
    if (strstr(asked, "tails=off")) s.skinny_rows = s.split_last_wave = 0;
    return s;
}

int make_tile_schedule(TileSchedule *plan, const int32_t *ends,
                       const Result (&results)[MAX_RESULTS], void *workspace, void *stream,
                       int64_t counters) {
    int32_t E = plan->E;
    char *memory = (char *)round_up((uintptr_t)workspace, MAP_BYTES);
    int32_t *ints = (int32_t *)memory;
    ScheduleParams p = {ends, ints, ints + E, (uint32_t *)(ints + E + fused_moe_work_length(E))};
    p.maps = (CUtensorMap *)(memory + ints_bytes(E, counters));
    for (int i = 0; i < MAX_RESULTS; i++) p.results[i] = results[i];
    plan->num_results = results[1].data ? 2 : results[0].data ? 1 : 0;
    p.R = plan->R;
    p.num_counters = MAX_CTAS + counters;
    p.E = E;
    p.schedule = plan->order;
    plan->ends = p.ends;
    plan->work = p.work;
    plan->claimed = p.claimed;
    plan->counters = p.claimed + MAX_CTAS;
    plan->maps = p.maps;
    return launch(tile_schedule_kernel, p, 1 + ceil_div(E, SCHEDULE_WARPS), SCHEDULE_THREADS, 0,
                  stream);
}

} // namespace fused_moe
