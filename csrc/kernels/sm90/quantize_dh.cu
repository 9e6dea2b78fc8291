/* quantize_dh: dh = dact(s g, h) and a' = s a as codes, by rows for the GEMM of dx and by columns for the
 * weight gradients, and the partial sums of <g, a> (fused_moe.h has the arithmetic).
 *
 * A tile is 128 rows of an expert and 128 columns of F, with the columns of gates, ups and g: 96 KiB. It is
 * read once and written once, so its time is the memory's: 6 bytes in and 5 out for an element of g.
 *
 * Roles (288 threads, two CTAs per SM: one loads while the other computes)
 *   warps 0-7  compute; a lane has four rows and eight columns at a time (columns.cuh)
 *   warp 8     decodes tiles and loads by TMA
 * Pipelines                             full: arrivals           empty: arrivals
 *   tile x1 (warp 8 -> warps 0-7)         1 + TMA bytes            8: one per warp
 *
 * Columns share a scale with 128 rows, which no warp has. So dh and a' replace h and g in shared memory, in
 * 16 bits and each lane's in the same place, and become codes when all warps know the peak. Columns' codes
 * then replace them, each part's when all warps have read it, and ordinary stores copy them to memory. */
#include "../common/activation.cuh"
#include "../common/dscores.cuh"
#include "../common/schedule.cuh"
#include "columns.cuh"
#include "launch.cuh"

namespace fused_moe {
namespace sm90 {
namespace {

/* --- kernel --------------------------------------------------------------------------------------------- */

enum { GATE, UP, A, MOST_PARTS }; /* in shared memory; ungated there is no UP */

constexpr int COMPUTE_THREADS = 32 * TILE_WARPS, THREADS = COMPUTE_THREADS + 32, CTAS_PER_SM = 2;
constexpr int HALF_BYTES = TILE_ROWS * SWIZZLE_BYTES, PART_BYTES = 2 * HALF_BYTES;
static_assert(COLUMNS_BYTES <= PART_BYTES, "a part's columns take its place");

typedef struct {
    FusedMoeQuantizeDh p;
    FusedMoeTileOrder order;
    int32_t F, H, R;
    ActConstants<float> constants;
    CUtensorMap g, h;
} QuantizeDh;

/* What a row is multiplied by. */
typedef struct {
    float score, x_scale, dout_scale;
} RowFactors;

struct alignas(1024) Memory {
    uint8_t part[MOST_PARTS][PART_BYTES];
    RowFactors row[TILE_ROWS];
    uint32_t peaks[MOST_PARTS][TILE_WARPS];
    int32_t first_row, num_rows, n_tile, block; /* of the tile; num_rows -1: there are no more */
    Barrier<TmaThread> full;
    Barrier<Warps<TILE_WARPS>> empty;
};

/* --- warp 8 */

__device__ inline RowFactors factors_of(const QuantizeDh &q, int32_t row, bool exists) {
    const FusedMoeQuantizeDh &p = q.p;
    RowFactors f = {0, 0, 0};
    if (!exists) return f;
    const FusedMoeRowMap &map = p.row_map;
    const int64_t slot = map.row_slot ? __ldg(map.row_slot + row) : row;
    f.score = !p.scores ? 1 : (uint64_t)slot < (uint64_t)(map.T * map.K) ? __ldg(p.scores + slot) : 0;
    if (p.x_scale) f.x_scale = __ldg(p.x_scale + row);
    if (p.dout_scale) f.dout_scale = __ldg(p.dout_scale + row);
    return f;
}

template <bool GATED>
__device__ inline void load_tiles(const QuantizeDh &q, Memory &s) {
    const FusedMoeQuantizeDh &p = q.p;
    const FusedMoeRowMap &map = p.row_map;
    const int lane = threadIdx.x % 32;
    const uint32_t num_tiles = fused_moe_num_work_tiles(map.schedule, map.E, q.R, &q.order);
    uint32_t phase = 0;
    for (uint32_t index = blockIdx.x;; index += gridDim.x) {
        const bool exists = index < num_tiles;
        FusedMoeWorkTile tile = {};
        RowFactors factors[TILE_ROWS / 32];
        int32_t block = 0;
        if (exists) {
            tile = fused_moe_work_tile(map.schedule, map.offs, map.E, q.R, &q.order, index);
            block = row_block_of(map, tile);
#pragma unroll
            for (int i = 0; i < TILE_ROWS / 32; i++)
                factors[i] = factors_of(q, tile.first_row + lane + 32 * i, lane + 32 * i < tile.num_rows);
        }
        if (index != blockIdx.x) s.empty.wait(phase ^ 1);
        if (lane == 0) {
            s.first_row = tile.first_row, s.n_tile = tile.n_tile, s.block = block;
            s.num_rows = exists ? tile.num_rows : -1;
        }
        if (exists)
#pragma unroll
            for (int i = 0; i < TILE_ROWS / 32; i++) s.row[lane + 32 * i] = factors[i];
        __syncwarp();
        if (elect_sync()) {
            s.full.expect(exists ? (GATED ? 3 : 2) * PART_BYTES : 0);
            for (int half = 0; half < (exists ? 2 : 0); half++) {
                const int column = tile.n_tile * TILE_COLUMNS + half * SUBTILE;
                auto load = [&](int part, const CUtensorMap *map_of_part, int first_column) {
                    cp_async_bulk_tensor_load(shared_address(s.part[part]) + half * HALF_BYTES, map_of_part,
                                              s.full.address(), first_column, tile.first_row);
                };
                load(A, &q.g, column);
                load(GATE, &q.h, column);
                if (GATED) load(UP, &q.h, q.F + column);
            }
        }
        __syncwarp();
        if (!exists) break;
        phase ^= 1;
    }
}

/* --- warps 0-7 */

/* Eight values of 16 bits. */
__device__ inline uint4 pack_chunk(const float (&v)[CHUNK]) {
    Pack<__nv_bfloat16> pack;
#pragma unroll
    for (int j = 0; j < CHUNK; j += 2) from_accums<__nv_bfloat16>(pack.v + j, v[j], v[j + 1]);
    return pack.words[0];
}

/* The larger magnitudes of two pairs of bf16; NaN is above all. Signs mean nothing. */
__device__ inline uint32_t max_magnitudes(uint32_t a, uint32_t b) {
    return max_nan_xorsign_abs_bf16x2(a, b);
}

/* The same of eight values. */
__device__ inline uint32_t peaks_of_chunk(const uint4 &v) {
    return max_magnitudes(max_magnitudes(v.x, v.y), max_magnitudes(v.z, v.w));
}

/* The larger halves of two pairs: those of a in the lower half, those of b in the upper one. */
__device__ inline uint32_t larger_halves(uint32_t a, uint32_t b) {
    return max_magnitudes(prmt(a, b, 0x5410), prmt(a, b, 0x7632));
}

/* A step of a reduction over lanes that also deals rows out. Two lanes differ in the bit `other`: the one
 * without it gets what both have of the first row, the one with it what they have of the second. */
template <typename T, typename Reduce>
__device__ inline T reduce_and_deal(T first, T second, int other, Reduce reduce) {
    const bool has_second = threadIdx.x & other;
    const T mine = has_second ? second : first, sent = has_second ? first : second;
    return reduce(mine, __shfl_xor_sync(~0u, sent, other));
}

/* Copies dh and a' from shared memory, for weight gradients in 16 bits. */
template <bool GATED, typename Place>
__device__ inline void store_16_bits(const QuantizeDh &q, Place place, int64_t row0, int num_rows,
                                     int column) {
    using T = __nv_bfloat16;
    T *dh = (T *)q.p.dh_rows + row0 * q.H + column, *a = (T *)q.p.a_rows + row0 * q.F + column;
#pragma unroll 1
    for (int half = 0; half < 2; half++, dh += SUBTILE, a += SUBTILE) {
#pragma unroll
        for (int i = 0; i < LANE_ROWS; i++) {
            if (i >= num_rows) break;
            if (q.p.dh_rows) st_global_v4(dh + i * (int64_t)q.H, ld_shared_v4(place(GATE, half, i)));
            if (q.p.dh_rows && GATED)
                st_global_v4(dh + i * (int64_t)q.H + q.F, ld_shared_v4(place(UP, half, i)));
            if (q.p.a_rows) st_global_v4(a + i * (int64_t)q.F, ld_shared_v4(place(A, half, i)));
        }
    }
}

/* The lane's four rows and eight columns of each half. */
template <bool GATED, typename Act>
__device__ inline void compute_tiles(const QuantizeDh &q, Memory &s, Act act) {
    using T = __nv_bfloat16;
    const FusedMoeQuantizeDh &p = q.p;
    uint32_t thread = threadIdx.x;
    pin(thread); /* or what all activations compute from it is kept in registers */
    const int warp = thread / 32, lane = thread % 32, chunk = lane % 8,
              first = warp * 16 + lane / 8 * LANE_ROWS;
    const float largest = fused_moe_largest_code(FUSED_MOE_CODE_E4M3);
    const int64_t n_tiles = q.F / TILE_COLUMNS;
    uint32_t places[LANE_ROWS];
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++)
        places[i] = opaque(swizzled(shared_address(s.part), first + i, chunk));
    auto place = [&](int part, int half, int row) {
        return places[row] + part * PART_BYTES + half * HALF_BYTES;
    };
    auto sync = [] { barrier_sync(1, COMPUTE_THREADS); };
    for (uint32_t phase = 0;; phase ^= 1) {
        s.full.wait(phase);
        const int num_rows = s.num_rows, n_tile = s.n_tile, column = n_tile * TILE_COLUMNS + CHUNK * chunk;
        if (num_rows < 0) break;
        const int64_t row0 = s.first_row + first;

        /* rows of another expert, or of none, become zeros: then so do their dh and a' */
        if (num_rows - first < LANE_ROWS)
#pragma unroll
            for (int i = 0; i < LANE_ROWS; i++)
                for (int at = 0; at < MOST_PARTS * PART_BYTES && first + i >= num_rows; at += HALF_BYTES)
                    st_shared_v4(places[i] + at, make_uint4(0, 0, 0, 0));

        /* dh and a' in 16 bits, and the peaks of even columns in lower halves, of odd ones in upper ones */
        uint32_t peaks[MOST_PARTS][LANE_ROWS] = {};
        float dot[LANE_ROWS] = {};
#pragma unroll 1 /* code that is twice as long misses the instruction cache */
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int i = 0; i < LANE_ROWS; i++) {
                const float score = s.row[first + i].score;
                uint4 packed[MOST_PARTS];
                Pair<float> h, d;
                float g[CHUNK], da[CHUNK], a[CHUNK];
                widen<T>(g, ld_shared_v4(place(A, half, i)));
                widen<T>(h.gate, ld_shared_v4(place(GATE, half, i)));
                if (GATED) widen<T>(h.up, ld_shared_v4(place(UP, half, i)));
#pragma unroll
                for (int j = 0; j < CHUNK; j++) da[j] = score * g[j];
                activate_backward<T>(act, a, d, da, h, q.constants, GATED);
#pragma unroll
                for (int j = 0; j < CHUNK; j++) dot[i] += g[j] * a[j], a[j] *= score;
                packed[A] = pack_chunk(a);
                packed[GATE] = pack_chunk(d.gate);
                if (GATED) packed[UP] = pack_chunk(d.up);
#pragma unroll
                for (int part = 0; part < MOST_PARTS; part++) {
                    if (part == UP && !GATED) continue;
                    st_shared_v4(place(part, half, i), packed[part]);
                    peaks[part][i] = max_magnitudes(peaks[part][i], peaks_of_chunk(packed[part]));
                }
            }
        }
        if (p.dh_rows || p.a_rows) store_16_bits<GATED>(q, place, row0, num_rows - first, column);

        /* Over the eight lanes of a row: lane c gets row c % 4 of the four. A word has the peaks of a row's
         * gates and ups, or those of a' in two rows, i and i + 2. */
        const int own = chunk % LANE_ROWS;
        const bool has_own = first + own < num_rows;
        uint32_t dh_peak[LANE_ROWS / 2], a_peak[LANE_ROWS / 2];
        float own_dot[LANE_ROWS / 2];
        auto sum = [](float a, float b) { return a + b; };
#pragma unroll
        for (int i = 0; i < LANE_ROWS / 2; i++) {
            auto both = [&](int row) { return larger_halves(peaks[GATE][row], peaks[UP][row]); };
            dh_peak[i] = reduce_and_deal(both(2 * i), both(2 * i + 1), 1, max_magnitudes);
            own_dot[i] = reduce_and_deal(dot[2 * i], dot[2 * i + 1], 1, sum);
            a_peak[i] = larger_halves(peaks[A][i], peaks[A][i + 2]);
        }
        dh_peak[0] = reduce_and_deal(dh_peak[0], dh_peak[1], 2, max_magnitudes);
        own_dot[0] = reduce_and_deal(own_dot[0], own_dot[1], 2, sum);
        a_peak[0] = reduce_and_deal(a_peak[0], a_peak[1], 1, max_magnitudes);
        a_peak[0] = max_magnitudes(a_peak[0], __shfl_xor_sync(~0u, a_peak[0], 2));
        dh_peak[0] = max_magnitudes(dh_peak[0], __shfl_xor_sync(~0u, dh_peak[0], 4));
        a_peak[0] = max_magnitudes(a_peak[0], __shfl_xor_sync(~0u, a_peak[0], 4));
        own_dot[0] += __shfl_xor_sync(~0u, own_dot[0], 4);
        float peak[MOST_PARTS]; /* row maxima; a bf16 is a float's upper half */
        auto lower = [](uint32_t pair) { return __uint_as_float(pair << 16 & 0x7fff0000); };
        auto upper = [](uint32_t pair) { return __uint_as_float(pair & 0x7fff0000); };
        peak[GATE] = lower(dh_peak[0]);
        peak[UP] = upper(dh_peak[0]);
        peak[A] = chunk & 2 ? upper(a_peak[0]) : lower(a_peak[0]);

        /* the scales of rows: lane c of eight has row c % 4, of gates or, from c = 4 on, of ups */
        float row_inverse[2][LANE_ROWS];
        {
            const int part = chunk / LANE_ROWS;
            const float scale =
                fused_moe_scale_of(__float_as_uint(part ? peak[UP] : peak[GATE]), largest, false);
            const float inverse = 1 / scale;
            if (p.dh && has_own && (GATED || !part))
                p.dh_scale[(part * n_tiles + n_tile) * q.R + row0 + own] = scale;
#pragma unroll
            for (int j = 0; j < 2 * LANE_ROWS; j++)
                row_inverse[j / LANE_ROWS][j % LANE_ROWS] = __shfl_sync(~0u, inverse, j, 8);
            if (p.partials && !part && has_own) p.partials[(row0 + own) * n_tiles + n_tile] = own_dot[0];
        }

        /* the scales of columns */
        {
            const RowFactors &row = s.row[first + own];
#pragma unroll
            for (int part = 0; part < MOST_PARTS; part++) {
                const float factor = part == A ? row.dout_scale : row.x_scale;
                const uint32_t most = __reduce_max_sync(~0u, fused_moe_magnitude(factor * peak[part]));
                if (lane == 0) s.peaks[part][warp] = most;
            }
        }
        sync();
        float inverse[MOST_PARTS];
        {
            const int part = lane % 4 < MOST_PARTS ? lane % 4 : A; /* each lane computes one part's */
            uint32_t most = 0;
#pragma unroll
            for (int i = 0; i < TILE_WARPS; i++) most = max(most, s.peaks[part][i]);
            const float scale = fused_moe_scale_of(most, largest, false), lane_inverse = 1 / scale;
#pragma unroll
            for (int i = 0; i < MOST_PARTS; i++) inverse[i] = __shfl_sync(~0u, lane_inverse, i);
            if (threadIdx.x == A && p.a_t) p.a_t_scale[s.block * n_tiles + n_tile] = scale;
            if (threadIdx.x < (GATED ? 2 : 1) && p.dh_t)
                p.dh_t_scale[s.block * (q.H / TILE_COLUMNS) + part * n_tiles + n_tile] = scale;
        }

        /* codes */
        const int num_codes = p.dh ? num_rows - first : 0; /* rows of them */
        uint8_t *const dh = (uint8_t *)p.dh + row0 * q.H + column;
#pragma unroll
        for (int part = 0; part < MOST_PARTS; part++) {
            if (part == UP && !GATED) continue;
            uint32_t words[2 * CHUNK];
            float factor[LANE_ROWS];
#pragma unroll
            for (int i = 0; i < LANE_ROWS; i++) {
                const RowFactors &row = s.row[first + i];
                factor[i] = (part == A ? row.dout_scale : row.x_scale) * inverse[part];
            }
            uint8_t *row_codes[LANE_ROWS];
#pragma unroll
            for (int i = 0; i < LANE_ROWS; i++) row_codes[i] = dh + part * q.F + i * (int64_t)q.H;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float v[LANE_ROWS][CHUNK];
#pragma unroll
                for (int i = 0; i < LANE_ROWS; i++) {
                    widen<T>(v[i], ld_shared_v4(place(part, half, i)));
                    if (part == A) continue;
                    st_global_v2(row_codes[i] + half * SUBTILE, chunk_of_e4m3(v[i], row_inverse[part % 2][i]),
                                 i < num_codes);
                }
                make_column_words(words + half * CHUNK, v, factor);
            }
            sync();
            for (int half = 0; half < 2; half++)
                store_column_words(shared_address(s.part[part]), half, first, words + half * CHUNK);
        }
        sync();
        auto copy = [&](void *codes, int64_t first, int part) {
            if (codes)
                copy_columns((uint8_t *)codes + first * TILE_COLUMNS * TILE_ROWS,
                             shared_address(s.part[part]));
        };
        const int64_t in_a = s.block * n_tiles + n_tile, in_dh = (GATED ? 2 : 1) * s.block * n_tiles + n_tile;
        copy(p.dh_t, in_dh, GATE);
        if (GATED) copy(p.dh_t, in_dh + n_tiles, UP);
        copy(p.a_t, in_a, A);
        fence_proxy_async(); /* TMA writes after these reads */
        __syncwarp();
        s.empty.template arrive_once<TILE_WARPS>();
    }
}

/* --- what no tile covers --- */

/* Zeroes n elements of 16 bytes, by a warp. */
__device__ inline void clear(void *data, int64_t n) {
    for (int64_t i = threadIdx.x % 32; i < n; i += 32)
        st_global_v4((uint4 *)data + i, make_uint4(0, 0, 0, 0));
}

/* Row blocks of dh_t without rows, and rows past the last one: zeros. No kernel reads them, but whoever asks
 * for NaNs in gradients does. Each warp of the grid takes some. */
__device__ inline void clear_unused(const QuantizeDh &q) {
    const FusedMoeQuantizeDh &p = q.p;
    const FusedMoeRowMap &map = p.row_map;
    const int64_t warp = (blockIdx.x * THREADS + threadIdx.x) / 32, warps = gridDim.x * (THREADS / 32);
    const int64_t tiles = q.H / TILE_COLUMNS, num_rows = num_rows_of(map.offs, map.E, q.R);
    for (int64_t e = warp; e < map.E && p.dh_t; e += warps) {
        const FusedMoeRows rows = fused_moe_expert_rows(map.offs, (int32_t)e, q.R);
        const int64_t used =
            fused_moe_first_row_block(rows.first, (int32_t)e) + (rows.num + TILE_ROWS - 1) / TILE_ROWS;
        const int64_t next = e + 1 < map.E ? fused_moe_first_row_block(rows.first + rows.num, (int32_t)e + 1)
                                           : fused_moe_num_row_blocks(q.R, map.E);
        clear((uint8_t *)p.dh_t + used * q.H * TILE_ROWS, (next - used) * q.H * TILE_ROWS / 16);
        for (int64_t i = used * tiles + threadIdx.x % 32; i < next * tiles; i += 32) p.dh_t_scale[i] = 0;
    }
    for (int64_t r = num_rows + warp; r < q.R; r += warps) {
        if (p.dh) clear((uint8_t *)p.dh + r * q.H, q.H / 16);
        for (int64_t i = threadIdx.x % 32; i < tiles && p.dh; i += 32) p.dh_scale[i * q.R + r] = 1;
        if (p.dh_rows) clear((__nv_bfloat16 *)p.dh_rows + r * q.H, q.H / 8);
        if (p.a_rows) clear((__nv_bfloat16 *)p.a_rows + r * q.F, q.F / 8);
    }
}

template <bool GATED>
__global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    quantize_dh_kernel(const __grid_constant__ QuantizeDh q) {
    extern __shared__ __align__(1024) uint8_t memory[];
    Memory &s = *(Memory *)memory;
    if (threadIdx.x == 0) {
        s.full.init();
        s.empty.init();
        fence_mbarrier_init();
    }
    __syncthreads();
    griddepcontrol_wait();
    if (threadIdx.x >= COMPUTE_THREADS)
        load_tiles<GATED>(q, s);
    else
        with_activation<__nv_bfloat16>(q.p.activation.kind,
                                       [&](auto act) { compute_tiles<GATED>(q, s, act); });
    clear_unused(q);
}

/* --- launcher ------------------------------------------------------------------------------------------- */

template <bool GATED>
int launch(const FusedMoeQuantizeDh &p, void *stream) {
    const FusedMoeRowMap &map = p.row_map;
    QuantizeDh q = {};
    q.p = p;
    q.F = (int32_t)p.F;
    q.H = GATED ? 2 * q.F : q.F;
    q.R = (int32_t)map.R;
    q.order = fused_moe_default_order(q.F / TILE_COLUMNS, 0);
    q.order.interleave = 0;
    q.constants = act_constants<float>(p.activation);
    int status = matrix_map(&q.g, (const __nv_bfloat16 *)p.g, map.R, q.F, q.F, TILE_ROWS);
    if (status == FUSED_MOE_OK)
        status = matrix_map(&q.h, (const __nv_bfloat16 *)p.h, map.R, q.H, q.H, TILE_ROWS);
    if (status != FUSED_MOE_OK) return status;
    static_assert(CTAS_PER_SM * (sizeof(Memory) + CTA_SHARED_BYTES) <= SM_SHARED_BYTES);
    Launch how = {num_ctas(CTAS_PER_SM), THREADS, 1, sizeof(Memory), {}};
    return launch_dependent<quantize_dh_kernel<GATED>>(q, how, stream);
}

} // namespace

int quantize_dh(const FusedMoeQuantizeDh &p, void *stream) {
    const FusedMoeRowMap &map = p.row_map;
    int status = FUSED_MOE_OK;
    if (map.R) status = p.layout == FUSED_MOE_UNGATED ? launch<false>(p, stream) : launch<true>(p, stream);
    if (status != FUSED_MOE_OK || !p.dscores) return status;
    FusedMoeDownDgrad of_scores = {};
    of_scores.dscores = p.dscores;
    of_scores.row_map = map;
    of_scores.dtype = p.dtype;
    return run_dscores(of_scores, p.partials, p.F / TILE_COLUMNS, stream);
}

} // namespace sm90
} // namespace fused_moe
