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

/* The larger half of a pair of magnitudes. */
__device__ inline uint32_t larger_half(uint32_t pair) {
    return max(pair & 0x7fff, pair >> 16 & 0x7fff);
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
    auto place = [&](int part, int half, int row) {
        return swizzled(shared_address(s.part[part]) + half * HALF_BYTES, first + row, chunk);
    };
    auto sync = [] { barrier_sync(1, COMPUTE_THREADS); };
    for (uint32_t phase = 0;; phase ^= 1) {
        s.full.wait(phase);
        const int num_rows = s.num_rows, n_tile = s.n_tile, column = n_tile * TILE_COLUMNS + CHUNK * chunk;
        if (num_rows < 0) break;
        const int64_t row0 = s.first_row + first;

        /* rows of another expert, or of none, become zeros: then so do their dh and a' */
        for (int i = max(num_rows - first, 0); i < LANE_ROWS; i++)
            for (int part = 0; part < MOST_PARTS; part++)
                for (int half = 0; half < 2; half++)
                    st_shared_v4(place(part, half, i), make_uint4(0, 0, 0, 0));

        /* dh and a' in 16 bits, and peaks: of gates in lower halves, of ups in upper ones */
        uint32_t dh_peak[LANE_ROWS], a_peaks[LANE_ROWS / 2] = {}; /* of a' two rows in a word */
        float dot[LANE_ROWS];
#pragma unroll
        for (int i = 0; i < LANE_ROWS; i++) {
            const float score = s.row[first + i].score;
            uint32_t peaks[MOST_PARTS] = {};
            dot[i] = 0;
#pragma unroll 1 /* code that is twice as long misses the instruction cache */
            for (int half = 0; half < 2; half++) {
                uint4 packed[MOST_PARTS];
                Pair<float> h, d;
                float g[CHUNK], da[CHUNK], a[CHUNK];
                unpack_chunk(g, ld_shared_v4(place(A, half, i)));
                unpack_chunk(h.gate, ld_shared_v4(place(GATE, half, i)));
                if (GATED) unpack_chunk(h.up, ld_shared_v4(place(UP, half, i)));
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
                    peaks[part] = max_magnitudes(peaks[part], peaks_of_chunk(packed[part]));
                }
                if (first + i >= num_rows) continue;
                if (p.dh_rows) {
                    T *dh = (T *)p.dh_rows + (row0 + i) * q.H + column + half * SUBTILE;
                    st_global_v4(dh, packed[GATE]);
                    if (GATED) st_global_v4(dh + q.F, packed[UP]);
                }
                if (p.a_rows)
                    st_global_v4((T *)p.a_rows + (row0 + i) * q.F + column + half * SUBTILE, packed[A]);
            }
            dh_peak[i] = larger_half(peaks[GATE]) | larger_half(peaks[UP]) << 16;
            a_peaks[i / 2] |= larger_half(peaks[A]) << i % 2 * 16;
        }
#pragma unroll
        for (int other = 1; other < 8; other *= 2) { /* over the eight lanes of a row */
#pragma unroll
            for (int i = 0; i < LANE_ROWS; i++) {
                dh_peak[i] = max_magnitudes(dh_peak[i], __shfl_xor_sync(~0u, dh_peak[i], other));
                dot[i] += __shfl_xor_sync(~0u, dot[i], other);
            }
#pragma unroll
            for (uint32_t &both : a_peaks) both = max_magnitudes(both, __shfl_xor_sync(~0u, both, other));
        }

        auto of_lane = [&](const auto &v) { /* that of row chunk % 4 */
                                            return chunk & 2 ? (chunk & 1 ? v[3] : v[2])
                                                             : (chunk & 1 ? v[1] : v[0]);
        };

        /* the scales of rows: lane c of eight has row c % 4, of gates or, from c = 4 on, of ups */
        float row_inverse[2][LANE_ROWS];
        {
            const int i = chunk % LANE_ROWS, part = chunk / LANE_ROWS;
            const uint32_t both = of_lane(dh_peak);
            const uint32_t peak = part ? both & 0xffff0000 : both << 16; /* bf16 are floats' upper halves */
            const float scale = fused_moe_scale_of(peak, largest, false), inverse = 1 / scale;
            if (p.dh && first + i < num_rows && (GATED || !part))
                p.dh_scale[(part * n_tiles + n_tile) * q.R + row0 + i] = scale;
#pragma unroll
            for (int j = 0; j < 2 * LANE_ROWS; j++)
                row_inverse[j / LANE_ROWS][j % LANE_ROWS] = __shfl_sync(~0u, inverse, j, 8);
            if (p.partials && !part && first + i < num_rows)
                p.partials[(row0 + i) * n_tiles + n_tile] = of_lane(dot);
        }

        /* the scales of columns */
        float x_scale[LANE_ROWS], dout_scale[LANE_ROWS];
        uint32_t peak[MOST_PARTS] = {};
#pragma unroll
        for (int i = 0; i < LANE_ROWS; i++) {
            const RowFactors &row = s.row[first + i];
            x_scale[i] = row.x_scale, dout_scale[i] = row.dout_scale;
            auto raise = [](uint32_t &most, float scale, uint32_t bits) {
                most = max(most, fused_moe_magnitude(scale * __uint_as_float(bits)));
            };
            raise(peak[GATE], x_scale[i], dh_peak[i] << 16);
            raise(peak[UP], x_scale[i], dh_peak[i] & 0xffff0000);
            raise(peak[A], dout_scale[i], i % 2 ? a_peaks[i / 2] & 0xffff0000 : a_peaks[i / 2] << 16);
        }
#pragma unroll
        for (int part = 0; part < MOST_PARTS; part++) {
            peak[part] = __reduce_max_sync(~0u, peak[part]);
            if (lane == 0) s.peaks[part][warp] = peak[part];
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
#pragma unroll
        for (int part = 0; part < MOST_PARTS; part++) {
            if (part == UP && !GATED) continue;
            uint32_t words[2 * CHUNK];
            float factor[LANE_ROWS];
#pragma unroll
            for (int i = 0; i < LANE_ROWS; i++)
                factor[i] = (part == A ? dout_scale[i] : x_scale[i]) * inverse[part];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float v[LANE_ROWS][CHUNK];
#pragma unroll
                for (int i = 0; i < LANE_ROWS; i++) {
                    unpack_chunk(v[i], ld_shared_v4(place(part, half, i)));
                    if (part == A || !p.dh || first + i >= num_rows) continue;
                    const float of_row = row_inverse[part % 2][i];
                    const uint2 codes = {
                        word_of_codes(v[i][0] * of_row, v[i][1] * of_row, v[i][2] * of_row, v[i][3] * of_row),
                        word_of_codes(v[i][4] * of_row, v[i][5] * of_row, v[i][6] * of_row,
                                      v[i][7] * of_row)};
                    uint8_t *row = (uint8_t *)p.dh + (row0 + i) * q.H + part * q.F + column + half * SUBTILE;
                    *(uint2 *)row = codes;
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
