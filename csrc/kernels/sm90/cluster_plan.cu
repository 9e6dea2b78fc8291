/* The plan of a decode step's slots in one launch, optionally together with the choice of their experts.
 *
 * A plan needs the experts of all slots, so elsewhere choice and plan are two or three launches (route.cu,
 * route_plan.cu). Here the slots fit the shared memory of one cluster, whose CTAs can wait for each other.
 * Each CTA has a span of consecutive slots:
 *   choose   chooses its tokens' experts as route does, or reads the given ids, into shared memory
 *   count    counts its slots per expert, in chunks of 32
 *   ---      cluster barrier
 *   sum      adds the counts of all CTAs (the experts' offsets) and those of the CTAs before it (its first
 *            row of each expert)
 *   scatter  writes its slots' rows; the first CTA writes counts and offsets, the last one, whose span is the
 *            shortest, the schedule
 * Rows follow from ranks in slot order, as in route_plan.cu, so the plan is the same. No memory has to be
 * zero beforehand, so a captured graph needs no other kernel. */
#include <cub/block/block_scan.cuh>

#include "../common/choose.cuh"
#include "../common/ptx_sm90.cuh"
#include "../common/schedule.cuh"
#include "../dispatch.cuh"

namespace fused_moe {
namespace sm90 {
namespace {

/* --- kernels -------------------------------------------------------------------------------------------- */

constexpr int CTAS = FUSED_MOE_CLUSTER_CTAS, THREADS = 512, WARPS = THREADS / 32;
constexpr int MAX_EXPERTS = FUSED_MOE_CLUSTER_EXPERTS;
constexpr int CHUNKS = FUSED_MOE_SPAN_SLOTS / 32; /* of consecutive slots, one per lane of a warp */
constexpr int ROUNDS = CHUNKS / WARPS;            /* chunks of a warp, at most                    */
constexpr int BATCH = 8;                          /* counts that are read together                */
using Scan = cub::BlockScan<int32_t, THREADS, cub::BLOCK_SCAN_WARP_SCANS>;

typedef struct {
    FusedMoeRoutePlan plan;
    FusedMoeRoute route; /* read where the kernel chooses */
    int32_t span_slots, slice_rows;
} ClusterPlan;

struct PlanShared {
    int32_t id[CHUNKS * 32]; /* of the span's slots; -1: no expert                           */
    uint16_t
        chunk_rows[CHUNKS * MAX_EXPERTS]; /* [chunk, E] a chunk's rows, then those of the chunks before it */
    int32_t counts[MAX_EXPERTS];          /* the span's rows of each expert, which the cluster reads      */
    int32_t first_row[MAX_EXPERTS];       /* the span's, of each expert                                   */
    int32_t ends[MAX_EXPERTS];            /* one past the last row of each expert                         */
    typename Scan::TempStorage scan;
};

typedef struct {
    int first_slot, num_slots;
} Span;

__device__ inline Span span_of(const ClusterPlan &q) {
    int num_slots = (int)(q.plan.T * q.plan.K), first = min((int)blockIdx.x * q.span_slots, num_slots);
    return {first, min(q.span_slots, num_slots - first)};
}

/* Zeroes chunk_rows, then waits for the kernel before: from here on its results may be read, and memory
 * written. */
__device__ inline void begin(const ClusterPlan &q, PlanShared &s, const Span &span) {
    const FusedMoeRoutePlan &p = q.plan;
    int num_words = (span.num_slots + 31) / 32 * p.E;
    for (int i = threadIdx.x; i < num_words; i += THREADS) s.chunk_rows[i] = 0;
    griddepcontrol_wait();
    /* up_gate's CTAs start on the other SMs. With full experts they would start out of lockstep. */
    if (p.T * p.K <= FUSED_MOE_SKINNY_ROWS * (int64_t)p.E) griddepcontrol_launch_dependents();
    for (int i = blockIdx.x * THREADS + threadIdx.x; p.counters && i < FUSED_MOE_NUM_COUNTERS;
         i += CTAS * THREADS)
        p.counters[i] = 0;
}

/* Ranks the span's slots within their experts. chunk_rows gets the rows of each expert in the chunks before a
 * chunk, peers the lanes with the same expert, and counts the span's slots of each expert. */
__device__ inline void count_slots(PlanShared &s, const Span &span, int E, int (&id)[ROUNDS],
                                   unsigned (&peers)[ROUNDS]) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_chunks = (span.num_slots + 31) / 32;
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        int chunk = warp + WARPS * i, index = chunk * 32 + lane;
        if (chunk >= num_chunks) break;
        id[i] = index < span.num_slots ? s.id[index] : -1;
        peers[i] = __match_any_sync(ALL, id[i]);
        if (id[i] >= 0 && lane == __ffs(peers[i]) - 1)
            s.chunk_rows[chunk * E + id[i]] = (uint16_t)__popc(peers[i]);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += THREADS) {
        int rows = 0;
        for (int first = 0; first < num_chunks; first += BATCH) {
            int count[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++)
                if (first + i < num_chunks) count[i] = s.chunk_rows[(first + i) * E + e];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                if (first + i >= num_chunks) break;
                s.chunk_rows[(first + i) * E + e] = (uint16_t)rows;
                rows += count[i];
            }
        }
        s.counts[e] = rows;
    }
}

/* Sums the cluster's counts, and returns the number of rows. The first CTA writes counts and offsets. */
__device__ inline int sum_counts(const FusedMoeRoutePlan &p, PlanShared &s) {
    int before = 0; /* rows of the experts before these */
    for (int first = 0; first < p.E; first += THREADS) {
        int e = first + threadIdx.x, rows = 0, earlier = 0, row, total;
        uint32_t address = shared_address(&s.counts[min(e, p.E - 1)]);
#pragma unroll
        for (int cta = 0; cta < CTAS; cta++) {
            int count = ld_shared_cluster(mapa(address, cta));
            rows += count;
            if (cta < blockIdx.x) earlier += count;
        }
        if (e >= p.E) rows = 0;
        Scan(s.scan).ExclusiveSum(rows, row, total);
        row += before;
        before += total;
        if (e < p.E) {
            s.first_row[e] = row + earlier;
            s.ends[e] = row + rows;
            if (blockIdx.x == 0) {
                p.counts[e] = rows;
                p.offsets[e + 1] = row + rows;
                if (e == 0) p.offsets[0] = 0;
            }
        }
        __syncthreads();
    }
    return before;
}

/* Makes the plan from the ids of all spans. The whole cluster calls it. */
__device__ inline void make_plan(const ClusterPlan &q, PlanShared &s, const Span &span) {
    const FusedMoeRoutePlan &p = q.plan;
    int id[ROUNDS], warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned peers[ROUNDS], lanes_before = (1u << lane) - 1;
    __syncthreads(); /* ids and zeros are written */
    count_slots(s, span, p.E, id, peers);
    __syncwarp();
    barrier_cluster_sync();
    int num_rows = sum_counts(p, s);
    barrier_cluster_arrive(); /* this CTA reads no other's counts any more */
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        int chunk = warp + WARPS * i, index = chunk * 32 + lane, slot = span.first_slot + index, row = -1;
        if (index >= span.num_slots) continue;
        if (id[i] >= 0) {
            row = s.first_row[id[i]] + s.chunk_rows[chunk * p.E + id[i]] + __popc(peers[i] & lanes_before);
            p.row_slot[row] = slot;
            p.row_token[row] = slot / p.K;
        }
        p.token_row[slot] = row;
        if (slot >= num_rows) p.row_slot[slot] = p.row_token[slot] = -1; /* there is no such row */
    }
    __syncwarp();
    if (blockIdx.x == CTAS - 1) make_schedule(p.schedule, s.ends, p.E, q.slice_rows, p.tile_rows);
    __syncwarp();
    barrier_cluster_wait(); /* until the others have read this CTA's counts */
}

/* The plan of given ids. */
__global__ void __launch_bounds__(THREADS, 1) cluster_plan_kernel(const __grid_constant__ ClusterPlan q) {
    extern __shared__ __align__(16) char memory[];
    auto &s = *reinterpret_cast<PlanShared *>(memory);
    Span span = span_of(q);
    begin(q, s, span);
    for (int i = threadIdx.x; i < span.num_slots; i += THREADS) {
        int64_t e = slot_expert(&q.plan, span.first_slot + i);
        s.id[i] = e >= 0 && e < q.plan.E ? (int)e : -1;
    }
    make_plan(q, s, span);
}

template <int V>
struct ChoiceShared {
    PlanShared plan;
    float choice[THREADS * V]; /* of expert groups: [sub-warp, G V] */
};

/* Chooses and plans: G lanes per token, V experts per lane. */
template <int G, int V>
__global__ void __launch_bounds__(THREADS, 1) choice_plan_kernel(const __grid_constant__ ClusterPlan q) {
    constexpr int TOKENS = THREADS / G, WARP_TOKENS = 32 / G; /* at a time */
    extern __shared__ __align__(16) char memory[];
    auto &s = *reinterpret_cast<ChoiceShared<V> *>(memory);
    const FusedMoeRoute &p = q.route;
    Span span = span_of(q);
    int slot = subwarp_lane<G>(), subwarp = threadIdx.x / G;
    int first_token = span.first_slot / p.K, span_tokens = span.num_slots / p.K;
    begin(q, s.plan, span);
    int64_t num_tokens = num_real_tokens(p.num_tokens, p.num_tokens_dtype, p.T);
    /* whole warps iterate together, as choose() requires */
    for (int first = threadIdx.x / 32 * WARP_TOKENS; first < span_tokens; first += TOKENS) {
        int t = first + subwarp % WARP_TOKENS; /* of the span */
        Choice<float> chosen = choose<G, V>(p, first_token + t, num_tokens, s.choice + subwarp * G * V);
        if (slot < p.K && t < span_tokens) {
            int index = t * p.K + slot;
            ((float *)p.scores)[span.first_slot + index] = chosen.score;
            p.ids[span.first_slot + index] = s.plan.id[index] = chosen.id;
        }
        __syncwarp(); /* before the next tokens' choices overwrite these */
    }
    make_plan(q, s.plan, span);
}

/* --- launcher ------------------------------------------------------------------------------------------- */

template <auto kernel, class Shared>
int launch(const ClusterPlan &q, void *stream) {
    return launch_dependent<kernel>(q, {CTAS, THREADS, CTAS, sizeof(Shared)}, stream);
}

} // namespace

int cluster_plan(const FusedMoeRoutePlan &p, const FusedMoeRoute *route, void *stream) {
    ClusterPlan q = {
        p, {}, (int32_t)fused_moe_span_slots(p.T, p.K, route != nullptr), slice_rows_of(p.T * p.K, p.E)};
    if (!route) return launch<cluster_plan_kernel, PlanShared>(q, stream);
    q.route = *route;
    int K = fused_moe_chooses_by_warp(p.T, p.E, true) ? WHOLE_WARP : p.K;
    return with_kernel(route->dtype, p.E, K, [&](auto acc, auto lanes, auto elements) {
        constexpr int G = decltype(lanes)::value, V = decltype(elements)::value;
        if constexpr (std::is_same_v<decltype(acc), double>)
            return (int)FUSED_MOE_UNSUPPORTED_DTYPE;
        else
            return launch<choice_plan_kernel<G, V>, ChoiceShared<V>>(q, stream);
    });
}

} // namespace sm90
} // namespace fused_moe
