/* route_plan: a counting sort of the slots by expert, stable in t*K + k, without the host. It is two
 * launches, or one if a single span has all slots. The plan of given counts is one launch, and so is the
 * schedule of unchecked offsets.
 *
 * The slots are cut into spans of consecutive slots, the experts into ranges of 512. Both grids are spans x
 * ranges: a CTA has the slots of one span that chose an expert of one range.
 *   count    counts the slots of each span that chose each expert: span_counts[span][e]
 *   scatter  every CTA sums the counts again, over all spans for the experts' offsets and over the earlier
 *            spans for its rows, and writes its slots' rows. CTA 0 writes counts, offsets and schedule, and
 *            zeroes the counters of the GEMMs
 * Summing in every CTA costs E * spans reads from L2. That is less than the two launches it replaces, since
 * there is at most one span per SM. No atomics decide an order, so the same ids give the same plan. */
#include "../../integer.h"
#include "../dispatch.cuh"
#include "ptx.cuh"
#include "schedule.cuh"

#include <cub/block/block_scan.cuh>

namespace fused_moe {
namespace {

constexpr int THREADS = 1024, WARPS = THREADS / 32;
constexpr int ROUNDS = 2; /* slots of a thread in one pass */
constexpr int PASS_SLOTS = THREADS * ROUNDS;
static_assert(PASS_SLOTS == FUSED_MOE_PASS_SLOTS, "rules.h");
constexpr int EXPERTS_PER_CTA = 512; /* next_row of its warps fills 64 KiB, which every GPU has */
constexpr int SCHEDULE_THREADS = 1024;

typedef struct {
    FusedMoeRoutePlan p;
    int32_t *span_counts;          /* [num_spans, E] */
    int64_t num_slots, span_slots; /* in all; of a span */
    int64_t *dropped;              /* or NULL */
    int32_t num_spans, R;          /* rows from R on are dropped */
    int32_t slice_rows;
} Sort;

/* --- schedules ------------------------------------------------------------------------------------------ */

typedef struct {            /* offsets from counts, or from unchecked cumulative ends; neither: no rows */
    const void *counts;     /* [E] of counts_dtype, or NULL */
    const int32_t *offs_in; /* [E] or NULL */
    FusedMoeDtype counts_dtype;
    int32_t *counts_out; /* [E] or NULL */
    int32_t *offs;       /* [E] never decreasing, within [0, R] */
    int32_t *schedule;   /* [8+4E] */
    int64_t R;
    int32_t E, slice_rows;
    bool leading_zero; /* offs[-1] = 0: offsets (E+1,) */
} Schedule;

/* A GPU cannot raise without a synchronisation, so wrong values are clamped: counts to [0, R], ends to [0, R]
 * and to no less than the ends before. */
__global__ void __launch_bounds__(SCHEDULE_THREADS) schedule_kernel(const __grid_constant__ Schedule s) {
    struct Max {
        __device__ int64_t operator()(int64_t a, int64_t b) const { return max(a, b); }
    };
    using Scan = cub::BlockScan<int64_t, SCHEDULE_THREADS, cub::BLOCK_SCAN_WARP_SCANS>;
    __shared__ typename Scan::TempStorage storage;
    if (s.leading_zero && threadIdx.x == 0) s.offs[-1] = 0;
    int64_t before = 0; /* the end of the experts before these */
    for (int32_t first = 0; first < s.E; first += SCHEDULE_THREADS) {
        int32_t e = first + threadIdx.x;
        int64_t end = 0, total;
        if (e < s.E && s.counts) end = integer(s.counts, s.counts_dtype, e);
        if (e < s.E && s.offs_in) end = s.offs_in[e];
        end = max((int64_t)0, min(end, s.R));
        if (s.counts)
            Scan(storage).InclusiveSum(end, end, total);
        else
            Scan(storage).InclusiveScan(end, end, Max(), total);
        __syncthreads();
        end = min(s.counts ? before + end : max(before, end), s.R);
        before = s.counts ? before + total : max(before, total);
        if (e < s.E) s.offs[e] = (int32_t)end;
    }
    __syncthreads();
    for (int32_t e = threadIdx.x; s.counts_out && e < s.E; e += SCHEDULE_THREADS)
        s.counts_out[e] = s.offs[e] - fused_moe_expert_start(s.offs, e);
    make_schedule(s.schedule, s.offs, s.E, s.slice_rows);
}

/* --- the sort ------------------------------------------------------------------------------------------- */

/* The expert of a slot, counted from first_expert on; -1: it is not in this CTA's range. */
__device__ inline int expert_of(const Sort &s, int64_t slot, int64_t end, int32_t first_expert) {
    if (slot >= end) return -1;
    int64_t e = slot_expert(&s.p, slot);
    return e >= first_expert && e < min(s.p.E, first_expert + EXPERTS_PER_CTA) ? (int)(e - first_expert) : -1;
}

__global__ void __launch_bounds__(THREADS) count_kernel(const __grid_constant__ Sort s) {
    __shared__ int32_t counts[EXPERTS_PER_CTA];
    int32_t span = blockIdx.x % s.num_spans, first_expert = blockIdx.x / s.num_spans * EXPERTS_PER_CTA;
    int32_t num_experts = min(EXPERTS_PER_CTA, s.p.E - first_expert);
    int64_t first = span * s.span_slots, end = min(first + s.span_slots, s.num_slots);
    for (int32_t e = threadIdx.x; e < num_experts; e += THREADS) counts[e] = 0;
    __syncthreads();
    for (int64_t slot = first + threadIdx.x; slot < end; slot += THREADS) {
        int e = expert_of(s, slot, end, first_expert);
        if (e >= 0) atomicAdd(&counts[e], 1);
    }
    __syncthreads();
    for (int32_t e = threadIdx.x; e < num_experts; e += THREADS)
        s.span_counts[(int64_t)span * s.p.E + first_expert + e] = counts[e];
}

/* Counts the only span's slots of experts [first, first + num). */
__device__ inline void count_slots(const Sort &s, int32_t first, int32_t num, int32_t *rows) {
    for (int64_t slot = threadIdx.x; slot < s.num_slots; slot += THREADS) {
        int64_t e = slot_expert(&s.p, slot);
        if (e >= first && e < first + num) atomicAdd(&rows[e - first], 1);
    }
}

/* Adds count_kernel's counts of all spans to rows, and those of the spans before `span` to earlier. A warp
 * adds whole spans. */
__device__ inline void add_span_counts(const Sort &s, int32_t span, int32_t first, int32_t num, int32_t *rows,
                                       int32_t *earlier) {
    for (int32_t other = threadIdx.x / 32; other < s.num_spans; other += WARPS) {
        const int32_t *counts = s.span_counts + (int64_t)other * s.p.E + first;
#pragma unroll 4
        for (int32_t i = threadIdx.x % 32; i < num; i += 32) {
            int32_t count = counts[i];
            if (count) atomicAdd(&rows[i], count);
            if (count && other < span) atomicAdd(&earlier[i], count);
        }
    }
}

/* Sums all spans' counts and returns the number of rows, dropped ones included, as they are in row_of_span:
 * row_of_span[e] becomes this span's first row of expert first_expert + e. ends[e] becomes one past the last
 * row of e, one of the first THREADS experts. CTA 0 writes counts and offsets. */
__device__ inline int32_t sum_counts(const Sort &s, int32_t span, int32_t first_expert, int32_t *row_of_span,
                                     int32_t *ends) {
    using Scan = cub::BlockScan<int32_t, THREADS, cub::BLOCK_SCAN_WARP_SCANS>;
    __shared__ typename Scan::TempStorage storage;
    __shared__ int32_t rows[THREADS], earlier[THREADS]; /* an expert's in all spans; in the spans before */
    int32_t before = 0;                                 /* rows of the experts before these */
    for (int32_t first = 0; first < s.p.E; first += THREADS) {
        int32_t num = min(THREADS, s.p.E - first), e = first + threadIdx.x, row, total;
        rows[threadIdx.x] = earlier[threadIdx.x] = 0;
        __syncthreads();
        if (s.num_spans == 1)
            count_slots(s, first, num, rows);
        else
            add_span_counts(s, span, first, num, rows, earlier);
        __syncthreads();
        Scan(storage).ExclusiveSum(rows[threadIdx.x], row, total);
        row += before;
        before += total;
        int32_t end = min(row + rows[threadIdx.x], s.R);
        if (first == 0) ends[e] = end;
        if (e >= first_expert && e < min(s.p.E, first_expert + EXPERTS_PER_CTA))
            row_of_span[e - first_expert] = row + earlier[threadIdx.x];
        if (blockIdx.x == 0 && e < s.p.E) {
            s.p.counts[e] = end - min(row, s.R);
            s.p.offsets[e + 1] = end;
            if (e == 0) s.p.offsets[0] = 0;
        }
        __syncthreads();
    }
    return before;
}

__global__ void __launch_bounds__(THREADS, 1) scatter_kernel(const __grid_constant__ Sort s) {
    extern __shared__ int32_t
        next_row[]; /* [WARPS, num_experts]: counts of a warp's slots, then its next row */
    __shared__ int32_t row_of_span[EXPERTS_PER_CTA], ends[THREADS];
    const FusedMoeRoutePlan &p = s.p;
    int32_t span = blockIdx.x % s.num_spans, first_expert = blockIdx.x / s.num_spans * EXPERTS_PER_CTA;
    int32_t num_experts = min(EXPERTS_PER_CTA, p.E - first_expert), warp = threadIdx.x / 32;
    unsigned lane = threadIdx.x % 32, lanes_before = (1u << lane) - 1;
    griddepcontrol_wait();
    if (gridDim.x == 1) griddepcontrol_launch_dependents(); /* all other SMs are free for up_gate */
    for (int i = threadIdx.x; blockIdx.x == 0 && p.counters && i < FUSED_MOE_NUM_COUNTERS; i += THREADS)
        p.counters[i] = 0;
    int32_t num_rows = sum_counts(s, span, first_expert, row_of_span, ends);
    if (blockIdx.x == 0)
        make_schedule(p.schedule, p.E <= THREADS ? ends : p.offsets + 1, p.E, s.slice_rows, p.tile_rows);
    if (blockIdx.x == 0 && threadIdx.x == 0 && s.dropped) *s.dropped += max(num_rows - s.R, 0);

    int64_t end = min((span + 1) * s.span_slots, s.num_slots);
    for (int64_t pass = span * s.span_slots; pass < end; pass += PASS_SLOTS) {
        for (int32_t i = threadIdx.x; i < WARPS * num_experts; i += THREADS) next_row[i] = 0;
        __syncthreads();

        /* slots of a warp are consecutive, so ranks follow from lanes, rounds and warps in that order */
        int32_t *warp_rows = next_row + warp * num_experts;
        int64_t first_slot = pass + warp * 32 * ROUNDS + lane;
        int expert[ROUNDS];
        unsigned peers[ROUNDS]; /* lanes with the same expert */
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            expert[i] = expert_of(s, first_slot + 32 * i, end, first_expert);
            peers[i] = __match_any_sync(~0u, expert[i]);
            if (expert[i] >= 0 && !(peers[i] & lanes_before)) warp_rows[expert[i]] += __popc(peers[i]);
            __syncwarp();
        }
        __syncthreads();
        for (int32_t e = threadIdx.x; e < num_experts; e += THREADS) {
            int32_t row = row_of_span[e];
            for (int w = 0; w < WARPS; w++) {
                int32_t count = next_row[w * num_experts + e];
                next_row[w * num_experts + e] = row;
                row += count;
            }
            row_of_span[e] = row;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            int64_t slot = first_slot + 32 * i;
            int e = expert[i];
            int32_t row = e >= 0 ? warp_rows[e] + __popc(peers[i] & lanes_before) : -1;
            __syncwarp();
            if (e >= 0 && !(peers[i] & lanes_before)) warp_rows[e] += __popc(peers[i]);
            __syncwarp();
            if (e >= 0) p.token_row[slot] = row < s.R ? row : -1;
            if (e >= 0 && row < s.R) {
                p.row_slot[row] = (int32_t)slot;
                p.row_token[row] = (int32_t)(slot / p.K);
            }
            if (slot >= end || first_expert) continue;
            int64_t slots_expert = slot_expert(&p, slot); /* in any range */
            if (slots_expert < 0 || slots_expert >= p.E) p.token_row[slot] = -1;
            if (slot >= num_rows && slot < s.R) p.row_slot[slot] = p.row_token[slot] = -1; /* no such row */
        }
        __syncthreads();
    }
}

} // namespace

/* --- launchers ------------------------------------------------------------------------------------------ */

static int launch_schedule(Schedule s, void *stream) {
    s.slice_rows = slice_rows_of(s.R, s.E);
    return launch(schedule_kernel, s, 1, SCHEDULE_THREADS, 0, stream);
}

int check_offsets(const int32_t **offs, const int32_t **schedule, int32_t E, int64_t R, void *workspace,
                  void *stream) {
    Schedule s = {};
    s.offs_in = *offs;
    s.offs = (int32_t *)workspace;
    s.schedule = s.offs + E;
    s.R = R;
    s.E = E;
    *offs = s.offs;
    *schedule = s.schedule;
    return launch_schedule(s, stream);
}

static int32_t num_spans_of(const FusedMoeRoutePlan &p) {
    return fused_moe_num_spans(p.T * p.K, current_device().num_sms);
}

} // namespace fused_moe

using namespace fused_moe;

extern "C" size_t fused_moe_cuda_route_plan_workspace(const FusedMoeRoutePlan *p) {
    int32_t num_spans = num_spans_of(*p);
    return num_spans > 1 ? p->E * (size_t)num_spans * sizeof(int32_t) : 0;
}

extern "C" int fused_moe_cuda_route_plan(const FusedMoeBoundedPlan *bounded, void *stream) {
    const FusedMoeRoutePlan *p = &bounded->plan;
    int32_t num_spans = num_spans_of(*p);
    if (!num_spans) { /* no slots: no rows of any expert */
        Schedule none = {};
        none.counts_out = p->counts;
        none.offs = p->offsets + 1;
        none.schedule = p->schedule;
        none.E = p->E;
        none.leading_zero = true;
        return launch_schedule(none, stream);
    }
    int64_t num_slots = p->T * p->K;
    int64_t span_slots = ceil_div(num_slots, num_spans);
    int32_t R = (int32_t)bounded->R, slice_rows = slice_rows_of(R, p->E);
    Sort s = {*p, (int32_t *)p->workspace, num_slots, span_slots, bounded->dropped, num_spans, R, slice_rows};
    int64_t grid = num_spans * ceil_div(p->E, EXPERTS_PER_CTA);
    int status = num_spans > 1 ? launch(count_kernel, s, grid, THREADS, 0, stream) : FUSED_MOE_OK;
    /* above 16 KiB always the maximum, as launch_dependent() requires */
    size_t experts = p->E <= 16 * 1024 / 4 / WARPS ? (size_t)p->E : EXPERTS_PER_CTA;
    Launch how = {grid, THREADS, 1, WARPS * experts * sizeof(int32_t)};
    return status == FUSED_MOE_OK ? launch_dependent<scatter_kernel>(s, how, stream) : status;
}

extern "C" int fused_moe_cuda_count_plan(const FusedMoeCountPlan *p, void *stream) {
    Schedule s = {};
    s.counts = p->counts_in;
    s.counts_dtype = p->counts_dtype;
    s.counts_out = p->counts;
    s.offs = p->offsets + 1;
    s.schedule = p->schedule;
    s.R = p->R;
    s.E = p->E;
    s.leading_zero = true;
    return launch_schedule(s, stream);
}
