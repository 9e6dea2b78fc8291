/* route_plan: a counting sort of the slots by expert, stable in t*K + k, without the host; the plan of
 * given counts; and the plan of ends that nobody has checked.
 *
 * A block has SLOTS consecutive slots and up to EXPERTS experts:
 *   count    how many of its slots chose each expert                    block_counts[e][block]
 *   scan     exclusive over the blocks, a block an expert: the rows of that expert before each block
 *   finish   offsets and the tile plan from the experts' counts, in one block
 *   scatter  a slot's rank among those of its expert in its block, and so its row
 * No atomics decide an order, so the same ids give the same plan. */
#include "../integer.h"
#include "../plan.h"
#include "launch.cuh"
#include "plan_tiles.cuh"

#include <cub/block/block_scan.cuh>

namespace fused_moe {

constexpr int WARPS = 8, THREADS = 32 * WARPS, ROUNDS = 4, SLOTS = THREADS * ROUNDS;
constexpr int EXPERTS = 1024;        /* of a block: counters of a block's warps fill 32 KiB */
constexpr int FINISH_THREADS = 1024; /* one block, all experts */

/* --- kernels -------------------------------------------------------------------------------------------- */

typedef struct {
    FusedMoeRoutePlan plan;
    int32_t *rows_before; /* [E, blocks]: rows of the block, then of the blocks before it */
    int64_t slots, blocks;
} Sort;

/* The expert of a slot within this block's experts, or -1. */
__device__ inline int expert_of(const Sort &s, int64_t slot, int first_expert) {
    if (slot >= s.slots) return -1;
    int64_t e = integer(s.plan.ids, s.plan.ids_dtype, slot);
    return e >= first_expert && e < min(s.plan.E, first_expert + EXPERTS) ? (int)(e - first_expert)
                                                                          : -1;
}

__global__ void __launch_bounds__(THREADS) count_kernel(const __grid_constant__ Sort s) {
    __shared__ int32_t counts[EXPERTS];
    int64_t block = blockIdx.x % s.blocks;
    int first_expert = (int)(blockIdx.x / s.blocks) * EXPERTS;
    int num_experts = min(EXPERTS, s.plan.E - first_expert);
    for (int e = threadIdx.x; e < num_experts; e += THREADS) counts[e] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        int e = expert_of(s, block * SLOTS + i * THREADS + threadIdx.x, first_expert);
        if (e >= 0) atomicAdd(&counts[e], 1);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < num_experts; e += THREADS)
        s.rows_before[(first_expert + e) * s.blocks + block] = counts[e];
}

__global__ void __launch_bounds__(THREADS) scan_kernel(const __grid_constant__ Sort s) {
    using Scan = cub::BlockScan<int32_t, THREADS, cub::BLOCK_SCAN_WARP_SCANS>;
    __shared__ typename Scan::TempStorage storage;
    int32_t *rows = s.rows_before + blockIdx.x * s.blocks, done = 0;
    for (int64_t first = 0; first < s.blocks; first += THREADS) {
        int64_t block = first + threadIdx.x;
        int32_t count = block < s.blocks ? rows[block] : 0, before, total;
        Scan(storage).ExclusiveSum(count, before, total);
        __syncthreads();
        if (block < s.blocks) rows[block] = done + before;
        done += total;
    }
    if (threadIdx.x == 0) s.plan.counts[blockIdx.x] = done;
}

__global__ void __launch_bounds__(THREADS) scatter_kernel(const __grid_constant__ Sort s) {
    __shared__ int32_t next[WARPS][EXPERTS]; /* counts of a warp's slots, then its next row */
    const FusedMoeRoutePlan &p = s.plan;
    int64_t block = blockIdx.x % s.blocks;
    int first_expert = (int)(blockIdx.x / s.blocks) * EXPERTS;
    int num_experts = min(EXPERTS, p.E - first_expert), warp = threadIdx.x / 32;
    unsigned lane = threadIdx.x % 32, before = (1u << lane) - 1;
    for (int i = threadIdx.x; i < WARPS * num_experts; i += THREADS)
        next[i / num_experts][i % num_experts] = 0;
    __syncthreads();

    int64_t first_slot = block * SLOTS + warp * 32 * ROUNDS + lane;
    int expert[ROUNDS];
    unsigned peers[ROUNDS]; /* lanes with the same expert */
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        expert[i] = expert_of(s, first_slot + 32 * i, first_expert);
        peers[i] = __match_any_sync(~0u, expert[i]);
        if (expert[i] >= 0 && !(peers[i] & before)) next[warp][expert[i]] += __popc(peers[i]);
        __syncwarp();
    }
    __syncthreads();
    for (int e = threadIdx.x; e < num_experts; e += THREADS) {
        int32_t row =
            p.offsets[first_expert + e] + s.rows_before[(first_expert + e) * s.blocks + block];
        for (int w = 0; w < WARPS; w++) {
            int32_t count = next[w][e];
            next[w][e] = row;
            row += count;
        }
    }
    __syncthreads();

    int32_t num_rows = p.offsets[p.E];
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        int64_t slot = first_slot + 32 * i;
        int e = expert[i];
        int32_t row = e >= 0 ? next[warp][e] + __popc(peers[i] & before) : -1;
        __syncwarp();
        if (e >= 0 && !(peers[i] & before)) next[warp][e] += __popc(peers[i]);
        __syncwarp();
        if (e >= 0) {
            p.token_row[slot] = row;
            p.row_slot[row] = (int32_t)slot;
            p.row_token[row] = (int32_t)(slot / p.K);
        }
        if (slot >= s.slots || first_expert) continue;
        int64_t id = integer(p.ids, p.ids_dtype, slot);
        if (id < 0 || id >= p.E) p.token_row[slot] = -1;
        if (slot >= num_rows) p.row_slot[slot] = p.row_token[slot] = -1; /* no such row */
    }
}

/* One block makes the plan from `count(e)`, an expert's rows, given in order. Tiles as plan.h's. */
template <typename Count>
__device__ inline void finish(int E, Count count, int32_t *offsets, int32_t *tiles) {
    struct Sum {
        int rows, active, tiles;
    };
    struct Add {
        __device__ Sum operator()(const Sum &a, const Sum &b) const {
            return {a.rows + b.rows, a.active + b.active, a.tiles + b.tiles};
        }
    };
    using Scan = cub::BlockScan<Sum, FINISH_THREADS, cub::BLOCK_SCAN_WARP_SCANS>;
    __shared__ typename Scan::TempStorage storage;
    Sum done = {0, 0, 0};
    for (int first = 0; first < E; first += FINISH_THREADS) {
        int e = first + threadIdx.x;
        int rows = e < E ? count(e) : 0;
        Sum mine = {rows, rows > 0, rows / FUSED_MOE_TILE_ROWS + (rows % FUSED_MOE_TILE_ROWS != 0)};
        Sum sum, total;
        Scan(storage).InclusiveScan(mine, sum, Add(), total);
        __syncthreads();
        sum = Add()(done, sum);
        if (e < E) {
            if (offsets) offsets[e + 1] = sum.rows;
            if (rows) {
                tiles[2 + sum.active - 1] = e;
                tiles[2 + E + sum.active - 1] = sum.tiles;
            }
        }
        done = Add()(done, total);
    }
    for (int b = done.active + threadIdx.x; b < E; b += FINISH_THREADS)
        tiles[2 + b] = tiles[2 + E + b] = 0;
    if (threadIdx.x == 0) {
        if (offsets) offsets[0] = 0;
        tiles[0] = done.active;
        tiles[1] = done.tiles;
    }
}

__global__ void __launch_bounds__(FINISH_THREADS)
    route_plan_finish_kernel(const __grid_constant__ Sort s) {
    finish(s.plan.E, [&](int e) { return s.plan.counts[e]; }, s.plan.offsets, s.plan.tiles);
}

/* Counts that are negative or lead past R rows are cut: a GPU cannot raise without a synchronisation. */
__global__ void __launch_bounds__(FINISH_THREADS)
    count_plan_kernel(const __grid_constant__ FusedMoeCountPlan p) {
    using Scan = cub::BlockScan<int64_t, FINISH_THREADS, cub::BLOCK_SCAN_WARP_SCANS>;
    __shared__ typename Scan::TempStorage storage;
    int64_t done = 0;
    for (int first = 0; first < p.E; first += FINISH_THREADS) {
        int e = first + threadIdx.x;
        int64_t rows = e < p.E ? integer(p.counts_in, p.counts_dtype, e) : 0, before, total;
        rows = max((int64_t)0, min(rows, p.R));
        Scan(storage).ExclusiveSum(rows, before, total);
        __syncthreads();
        if (e < p.E) p.counts[e] = (int32_t)max((int64_t)0, min(rows, p.R - done - before));
        done += total;
    }
    __syncthreads();
    finish(p.E, [&](int e) { return p.counts[e]; }, p.offsets, p.tiles);
}

typedef struct {
    const int32_t *ends;
    int32_t *checked_ends, *tiles;
    int64_t R;
    int32_t E;
} CheckEnds;

__global__ void __launch_bounds__(FINISH_THREADS)
    check_ends_kernel(const __grid_constant__ CheckEnds p) {
    struct Max {
        __device__ int32_t operator()(int32_t a, int32_t b) const { return max(a, b); }
    };
    using Scan = cub::BlockScan<int32_t, FINISH_THREADS, cub::BLOCK_SCAN_WARP_SCANS>;
    __shared__ typename Scan::TempStorage storage;
    int32_t done = 0;
    for (int first = 0; first < p.E; first += FINISH_THREADS) {
        int e = first + threadIdx.x;
        int32_t end = e < p.E ? (int32_t)max((int64_t)0, min((int64_t)p.ends[e], p.R)) : 0, sum,
                total;
        Scan(storage).InclusiveScan(end, sum, Max(), total);
        __syncthreads();
        if (e < p.E) p.checked_ends[e] = max(done, sum);
        done = max(done, total);
    }
    __syncthreads();
    auto count = [&](int e) { return p.checked_ends[e] - (e ? p.checked_ends[e - 1] : 0); };
    finish(p.E, count, nullptr, p.tiles);
}

/* --- launchers ------------------------------------------------------------------------------------------ */

int make_checked_plan(const int32_t *ends, int32_t E, int64_t R, int32_t *workspace,
                      const int32_t **checked_ends, const int32_t **tiles, void *stream) {
    CheckEnds p = {ends, workspace, workspace + E, R, E};
    *checked_ends = p.checked_ends;
    *tiles = p.tiles;
    return launch(check_ends_kernel, p, 1, FINISH_THREADS, 0, stream);
}

static int64_t blocks_of(const FusedMoeRoutePlan &p) {
    return ceil_div(p.T * p.K, SLOTS);
}

} // namespace fused_moe

extern "C" size_t fused_moe_cuda_route_plan_workspace(const FusedMoeRoutePlan *p) {
    return p->E * fused_moe::blocks_of(*p) * sizeof(int32_t);
}

extern "C" int fused_moe_cuda_route_plan(const FusedMoeRoutePlan *p, void *stream) {
    using namespace fused_moe;
    Sort s = {*p, (int32_t *)p->workspace, p->T * p->K, blocks_of(*p)};
    int64_t grid = s.blocks * ceil_div(p->E, EXPERTS);
    int status = launch(count_kernel, s, grid, THREADS, 0, stream);
    if (status == FUSED_MOE_OK) status = launch(scan_kernel, s, p->E, THREADS, 0, stream);
    if (status == FUSED_MOE_OK)
        status = launch(route_plan_finish_kernel, s, 1, FINISH_THREADS, 0, stream);
    if (status == FUSED_MOE_OK) status = launch(scatter_kernel, s, grid, THREADS, 0, stream);
    return status;
}

extern "C" int fused_moe_cuda_count_plan(const FusedMoeCountPlan *p, void *stream) {
    using namespace fused_moe;
    return launch(count_plan_kernel, *p, 1, FINISH_THREADS, 0, stream);
}
