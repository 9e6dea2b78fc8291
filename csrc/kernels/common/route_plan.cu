/* route_plan: a counting sort of the slots by expert, stable in t*K + k, without the host. It is one launch
 * for few slots and two for many. The plan of given counts is one launch, and so is the schedule of unchecked
 * offsets.
 *
 * The slots are cut into spans of consecutive slots, the experts into ranges of 512. A CTA has the slots of
 * one span that chose an expert of one range.
 *   count    counts the slots of each span that chose each expert: span_counts[span][e]
 *   scatter  every CTA sums the counts again, over all spans for the experts' offsets and over the earlier
 *            spans for its rows, and writes its slots' rows. CTA 0 has no slots: it writes counts, offsets
 *            and schedule, and zeroes the counters of the GEMMs
 * Few slots are not counted beforehand: every CTA of scatter counts all of them, in less time than a launch
 * takes. The rows of a warp's slots are far apart, so an SM writes one at a time, and spans are short
 * (rules.h). No CTA waits for another. No atomics decide an order, so the same ids give the same plan. */
#include "../../integer.h"
#include "../dispatch.cuh"
#include "ptx.cuh"
#include "schedule.cuh"

#include <cub/block/block_scan.cuh>

namespace fused_moe {
namespace {

constexpr int THREADS = FUSED_MOE_PASS_SLOTS, WARPS = THREADS / 32;
constexpr int SLOT_BATCH = 4;     /* ids of a thread in flight together */
constexpr int WARP_BATCH = 8;     /* counts of warps that are read together */
constexpr int EARLY_SLOTS = 2048; /* up to these up_gate may start early: most SMs are free for it */

typedef struct {
    FusedMoeRoutePlan p;
    int32_t *span_counts;           /* [num_spans, E]; NULL: every CTA counts all slots */
    uint32_t num_slots, span_slots; /* in all; of a span */
    int64_t *dropped;               /* or NULL */
    int32_t num_spans, R;           /* rows from R on are dropped */
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

/* Replaces each value by its sum over the threads before this one; total: over all. Threads from num on have
 * zeros, and their sums are not to be used. */
template <int N>
__device__ inline void exclusive_sums(int32_t num, int32_t (&value)[N], int32_t (&total)[N]) {
    __shared__ int32_t warp_sums[N][WARPS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp * 32 < num) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            int32_t sum = fused_moe_inclusive_sum(value[i]);
            if (lane == 31) warp_sums[i][warp] = sum;
            value[i] = sum - value[i];
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; i++) {
        int32_t of_warp = lane * 32 < num ? warp_sums[i][lane] : 0;
        total[i] = __reduce_add_sync(~0u, of_warp);
        value[i] += __reduce_add_sync(~0u, lane < warp ? of_warp : 0);
    }
}

/* make_schedule() of at most THREADS experts: thread e has expert e and its rows, or no expert and 0. */
__device__ inline void schedule_experts(int32_t *schedule, int32_t rows, int32_t E, int32_t slice_rows,
                                        int32_t tile_rows) {
    enum { FULL, SKINNY, SPLIT, FULL_TILES, SKINNY_TILES, SPLIT_SLICES, NUM };
    int32_t e = threadIdx.x, *active = schedule + FUSED_MOE_HEAD_WORDS, *sliced = active + 2 * E;
    bool full = rows > FUSED_MOE_SKINNY_ROWS, skinny = rows && !full, split = rows > slice_rows;
    int32_t tiles = rows ? (rows - 1) / tile_rows + 1 : 0, slices = split ? (rows - 1) / slice_rows + 1 : 1;
    int32_t before[NUM] = {full, skinny, split, full ? tiles : 0, skinny ? tiles : 0, split ? slices : 0};
    int32_t all[NUM];
    exclusive_sums(E, before, all);
    int32_t num_active = all[FULL] + all[SKINNY], num_tiles = all[FULL_TILES] + all[SKINNY_TILES];
    if (rows) {
        int32_t i = full ? before[FULL] : all[FULL] + before[SKINNY];
        active[i] = e;
        active[E + i] = tiles + (full ? before[FULL_TILES] : all[FULL_TILES] + before[SKINNY_TILES]);
    }
    if (e < E) {
        if (e >= num_active) active[e] = active[E + e] = 0; /* past the list */
        int32_t whole = e - before[SPLIT], i = split ? before[SPLIT] : all[SPLIT] + whole;
        sliced[i] = e;
        sliced[E + i] = slices + (split ? before[SPLIT_SLICES] : all[SPLIT_SLICES] + whole);
    }
    if (e) return;
    FusedMoeScheduleHead *head = fused_moe_schedule_head(schedule);
    fused_moe_set_row_tiles(head, all[FULL], num_active, all[FULL_TILES], num_tiles, tile_rows);
    head->num_slices = all[SPLIT_SLICES] + E - all[SPLIT], head->slice_rows = slice_rows;
}

/* A GPU cannot raise without a synchronisation, so wrong values are clamped: counts to [0, R], ends to [0, R]
 * and to no less than the ends before. */
__global__ void __launch_bounds__(THREADS) schedule_kernel(const __grid_constant__ Schedule s) {
    struct Max {
        __device__ int64_t operator()(int64_t a, int64_t b) const { return max(a, b); }
    };
    using Scan = cub::BlockScan<int64_t, THREADS, cub::BLOCK_SCAN_WARP_SCANS>;
    __shared__ typename Scan::TempStorage storage;
    if (s.leading_zero && threadIdx.x == 0) s.offs[-1] = 0;
    int64_t before = 0; /* the end of the experts before these */
    for (int32_t first = 0; first < s.E; first += THREADS) {
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
    int32_t rows = 0;
    for (int32_t e = threadIdx.x; e < s.E; e += THREADS) {
        rows = s.offs[e] - fused_moe_expert_start(s.offs, e);
        if (s.counts_out) s.counts_out[e] = rows;
    }
    if (s.E > 32 && s.E <= THREADS) /* make_schedule's warps are faster with 32 */
        schedule_experts(s.schedule, rows, s.E, s.slice_rows, FUSED_MOE_TILE_ROWS);
    else
        make_schedule(s.schedule, s.offs, s.E, s.slice_rows);
}

/* --- the sort ------------------------------------------------------------------------------------------- */

/* The experts of N slots: first, first + THREADS, ... below end. -1: it has none. All loads are in flight
 * together. */
template <int N>
__device__ inline void load_experts(const FusedMoeRoutePlan &p, uint32_t first, uint32_t end,
                                    int32_t (&expert)[N]) {
    int64_t num_ids = p.expert_map ? p.map_size : p.E;
    auto load = [&](auto *ids) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            uint32_t slot = first + i * THREADS;
            int64_t id = slot < end ? (int64_t)ids[slot] : -1;
            expert[i] = 0 <= id && id < num_ids ? (int32_t)id : -1;
        }
    };
    switch (p.ids_dtype) {
    case FUSED_MOE_I64: load((const int64_t *)p.ids); break;
    case FUSED_MOE_I32: load((const int32_t *)p.ids); break;
    case FUSED_MOE_I16: load((const int16_t *)p.ids); break;
    case FUSED_MOE_I8: load((const int8_t *)p.ids); break;
    default: load((const uint8_t *)p.ids);
    }
    if (!p.expert_map) return;
#pragma unroll
    for (int i = 0; i < N; i++)
        if (expert[i] >= 0) expert[i] = p.expert_map[expert[i]];
#pragma unroll
    for (int i = 0; i < N; i++)
        if (expert[i] >= p.E) expert[i] = -1;
}

/* Counts the slots [first, end) of each of the num experts from first_expert on: those before `middle` in
 * earlier, the others in later. */
__device__ inline void count_slots(const FusedMoeRoutePlan &p, uint32_t first, uint32_t middle, uint32_t end,
                                   int32_t first_expert, int32_t num, int32_t *earlier, int32_t *later) {
#pragma unroll 1
    for (uint32_t slot = first + threadIdx.x; slot < end; slot += SLOT_BATCH * THREADS) {
        int32_t expert[SLOT_BATCH];
        load_experts(p, slot, end, expert);
#pragma unroll
        for (int i = 0; i < SLOT_BATCH; i++) {
            uint32_t e = (uint32_t)(expert[i] - first_expert);
            if (e < (uint32_t)num) atomicAdd((slot + i * THREADS < middle ? earlier : later) + e, 1);
        }
    }
}

__global__ void __launch_bounds__(THREADS) count_kernel(const __grid_constant__ Sort s) {
    __shared__ int32_t counts[FUSED_MOE_RANGE_EXPERTS];
    int32_t span = blockIdx.x % s.num_spans;
    int32_t first_expert = blockIdx.x / s.num_spans * FUSED_MOE_RANGE_EXPERTS;
    int32_t num_experts = min(FUSED_MOE_RANGE_EXPERTS, s.p.E - first_expert);
    uint32_t first = span * s.span_slots, end = min(first + s.span_slots, s.num_slots);
    for (int32_t e = threadIdx.x; e < num_experts; e += THREADS) counts[e] = 0;
    __syncthreads();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    count_slots(s.p, first, end, end, first_expert, num_experts, counts, counts);
    __syncthreads();
    for (int32_t e = threadIdx.x; e < num_experts; e += THREADS)
        s.span_counts[(int64_t)span * s.p.E + first_expert + e] = counts[e];
}

/* Adds count_kernel's counts of the spans before `span` to earlier, and those of the others to later. A warp
 * adds whole spans. */
__device__ inline void add_span_counts(const Sort &s, int32_t span, int32_t first, int32_t num,
                                       int32_t *earlier, int32_t *later) {
#pragma unroll 1
    for (int32_t other = threadIdx.x / 32; other < s.num_spans; other += WARPS) {
        const int32_t *counts = s.span_counts + (int64_t)other * s.p.E + first;
        int32_t *sums = other < span ? earlier : later;
#pragma unroll 4
        for (int32_t i = threadIdx.x % 32; i < num; i += 32) {
            int32_t count = counts[i];
            if (count) atomicAdd(&sums[i], count);
        }
    }
}

/* Sums all spans' counts and returns the number of rows, dropped ones included. row_of_span[e] becomes the
 * span's first row of expert first_expert + e, and thread_rows the rows of expert threadIdx.x. CTA 0 writes
 * counts and offsets. */
__device__ inline int32_t sum_counts(const Sort &s, int32_t span, int32_t first_expert, int32_t *row_of_span,
                                     int32_t &thread_rows) {
    /* an expert's slots in the spans before this one; in the others */
    __shared__ int32_t earlier[THREADS], later[THREADS];
    const FusedMoeRoutePlan &p = s.p;
    int32_t before = 0; /* rows of the experts before these */
    earlier[threadIdx.x] = later[threadIdx.x] = 0;
    __syncthreads();
    griddepcontrol_wait();
    if (s.num_slots <= EARLY_SLOTS && fused_moe_has_skinny_average(s.num_slots, p.E))
        griddepcontrol_launch_dependents();
#pragma unroll 1
    for (int32_t first = 0; first < p.E; first += THREADS) {
        int32_t num = min(THREADS, p.E - first), e = first + (int32_t)threadIdx.x;
        if (s.span_counts)
            add_span_counts(s, span, first, num, earlier, later);
        else
            count_slots(p, 0, span * s.span_slots, s.num_slots, first, num, earlier, later);
        __syncthreads();
        int32_t rows_before = earlier[threadIdx.x], rows = rows_before + later[threadIdx.x];
        int32_t sum[1] = {rows}, total[1];
        earlier[threadIdx.x] = later[threadIdx.x] = 0;
        exclusive_sums(num, sum, total);
        int32_t row = before + sum[0], end = min(row + rows, s.R);
        before += total[0];
        if (first == 0) thread_rows = end - min(row, s.R);
        if (e >= first_expert && e < min(p.E, first_expert + FUSED_MOE_RANGE_EXPERTS))
            row_of_span[e - first_expert] = row + rows_before;
        if (blockIdx.x == 0 && e < p.E) {
            p.counts[e] = end - min(row, s.R);
            p.offsets[e + 1] = end;
            if (e == 0) p.offsets[0] = 0;
        }
        __syncthreads();
    }
    return before;
}

__global__ void __launch_bounds__(THREADS, 1) scatter_kernel(const __grid_constant__ Sort s) {
    extern __shared__ int32_t
        next_row[]; /* [WARPS, num_experts]: counts of a warp's slots, then its first row */
    __shared__ int32_t row_of_span[FUSED_MOE_RANGE_EXPERTS];
    const FusedMoeRoutePlan &p = s.p;
    int32_t part = max((int32_t)blockIdx.x - 1, 0), span = part % s.num_spans;
    int32_t first_expert = part / s.num_spans * FUSED_MOE_RANGE_EXPERTS;
    int32_t num_experts = min(FUSED_MOE_RANGE_EXPERTS, p.E - first_expert);
    unsigned lane = threadIdx.x % 32, lanes_before = (1u << lane) - 1;
    int32_t warp = threadIdx.x / 32, *warp_rows = next_row + warp * num_experts;
    uint32_t first_slot = span * s.span_slots, end = min(first_slot + s.span_slots, s.num_slots);
    int32_t thread_rows, num_rows = sum_counts(s, span, first_expert, row_of_span, thread_rows);
    if (blockIdx.x == 0) {
        for (int i = threadIdx.x; p.counters && i < FUSED_MOE_NUM_COUNTERS; i += THREADS) p.counters[i] = 0;
        if (threadIdx.x == 0 && s.dropped) *s.dropped += max(num_rows - s.R, 0);
        if (p.E <= THREADS)
            schedule_experts(p.schedule, thread_rows, p.E, s.slice_rows, p.tile_rows);
        else
            make_schedule(p.schedule, p.offsets + 1, p.E, s.slice_rows, p.tile_rows);
        return;
    }
#pragma unroll 1
    for (uint32_t pass = first_slot; pass < end; pass += THREADS) {
        /* slots of a warp are consecutive, so ranks follow from lanes and warps in that order */
        uint32_t slot = pass + threadIdx.x;
        int32_t expert[1];
        load_experts(p, slot, end, expert);
        int32_t num_warps = min((int32_t)(end - pass + 31) / 32, WARPS); /* that have slots */
        int32_t e = expert[0] - first_expert;
        bool in_range = expert[0] >= first_expert && e < num_experts;
        unsigned peers = __match_any_sync(~0u, expert[0]); /* lanes with the same expert */
        __syncwarp();                                      /* the warp's rows of the pass before are read */
        if (warp < num_warps) {
#pragma unroll 1
            for (int32_t i = lane; i < num_experts; i += 32) warp_rows[i] = 0;
        }
        __syncwarp();
        if (in_range && !(peers & lanes_before)) warp_rows[e] = __popc(peers);
        __syncthreads();
#pragma unroll 1
        for (int32_t i = threadIdx.x; i < num_experts; i += THREADS) {
            int32_t row = row_of_span[i], *rows = next_row + i;
            for (int w = 0; w < num_warps; w += WARP_BATCH, rows += WARP_BATCH * num_experts) {
                int32_t count[WARP_BATCH];
#pragma unroll
                for (int j = 0; j < WARP_BATCH; j++)
                    if (w + j < num_warps) count[j] = rows[j * num_experts];
#pragma unroll
                for (int j = 0; j < WARP_BATCH; j++) {
                    if (w + j >= num_warps) break;
                    rows[j * num_experts] = row;
                    row += count[j];
                }
            }
            row_of_span[i] = row;
        }
        __syncthreads();
        if (in_range) {
            int32_t row = warp_rows[e] + __popc(peers & lanes_before);
            p.token_row[slot] = row < s.R ? row : -1;
            if (row < s.R) {
                p.row_slot[row] = (int32_t)slot;
                p.row_token[row] = (int32_t)(slot / (uint32_t)p.K);
            }
        }
        if (slot < end && !first_expert) {
            if (expert[0] < 0) p.token_row[slot] = -1;
            if (slot >= num_rows && slot < s.R) p.row_slot[slot] = p.row_token[slot] = -1; /* no such row */
        }
    }
}

} // namespace

/* --- launchers ------------------------------------------------------------------------------------------ */

static int launch_schedule(Schedule s, void *stream) {
    s.slice_rows = slice_rows_of(s.R, s.E);
    return launch(schedule_kernel, s, 1, THREADS, 0, stream);
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
    return fused_moe_num_spans(p.T * p.K, p.E, current_device().num_sms);
}

} // namespace fused_moe

using namespace fused_moe;

extern "C" size_t fused_moe_cuda_route_plan_workspace(const FusedMoeRoutePlan *p) {
    bool has_counts = !fused_moe_counts_every_slot(p->T * p->K, p->E);
    return has_counts ? p->E * (size_t)num_spans_of(*p) * sizeof(int32_t) : 0;
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
    int64_t num_slots = p->T * p->K, parts = num_spans * ceil_div(p->E, FUSED_MOE_RANGE_EXPERTS);
    Sort s = {};
    s.p = *p;
    s.num_slots = (uint32_t)num_slots;
    s.span_slots = (uint32_t)ceil_div(num_slots, num_spans);
    s.dropped = bounded->dropped;
    s.num_spans = num_spans;
    s.R = (int32_t)bounded->R;
    s.slice_rows = slice_rows_of(s.R, p->E);
    if (!fused_moe_counts_every_slot(num_slots, p->E)) {
        s.span_counts = (int32_t *)p->workspace;
        int status = launch_dependent<count_kernel>(s, {parts, THREADS, 1, 0}, stream);
        if (status != FUSED_MOE_OK) return status;
    }
    /* above 16 KiB always the maximum, as launch_dependent() requires */
    size_t experts = p->E <= 16 * 1024 / 4 / WARPS ? (size_t)p->E : FUSED_MOE_RANGE_EXPERTS;
    Launch how = {1 + parts, THREADS, 1, WARPS * experts * sizeof(int32_t)};
    return launch_dependent<scatter_kernel>(s, how, stream);
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
