/* up_gate on the Hopper engine: h = x[row_token] w1^T | w3^T + b and a = act(gate) up in one gemm.
 *
 * A tile has 128 hidden columns, of 256 columns of h. Where h is gate | up (GATE_UP), B's lines are 128 rows of the
 * gate's weight and the 128 of the up's that belong to them, from two maps: w1 and w3, or the two halves of a
 * packed weight. A gate and its up are then 128 columns apart: in one thread's registers, 64 numbers apart.
 * Where they are interleaved, B's lines are consecutive and the pair lies in neighbouring columns, which one
 * thread holds, too. An ungated tile has 256 hidden columns. Nothing is copied, and h and a leave the registers
 * only for the copy engine.
 *
 * A tile is stored before the next is multiplied, not under it: there are h and a to hold, and too few registers
 * beside the sums. What was tried is in docs/performance.md. */
#include "../activation.cuh"
#include "engine.cuh"
#include "tier.cuh"

namespace fused_moe {

/* --- kernel ------------------------------------------------------------------------------------------------ */

enum Columns { GATE_UP, INTERLEAVED, UNGATED };

enum { MAP_A, MAP_H }; /* results; with GATE_UP h's map has two halves (halves_map) */

typedef struct {
    Gemm gemm;
    const void *bias,
        *bias_up; /* [E] x bias_stride: of h's columns, with GATE_UP of the two halves; or NULL */
    void *h, *a;  /* h may be NULL */
    int64_t bias_stride;
    int32_t F, H;
    FusedMoeActivation activation;
} UpGate;

/* 64 columns of which a thread holds number 4 j + lane % 4 (of two rows: a[2 j], a[2 j + 1]), as a writer takes
 * them: the two of columns 2 (lane % 4) and one more of every eight. */
template <typename T>
__device__ inline void pack_spread_subtile(uint32_t (&words)[16], const float (&a)[32]) {
    int quad = threadIdx.x % 32 / 4 * 4, t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < 16; m++) { /* chunk m / 2 of eight columns, row m % 2 of the two */
        const float *v = &a[m / 2 * 4 + m % 2];
        uint32_t mine = pack<T>(v[0], v[2]);
        uint32_t low = __shfl_sync(~0u, mine, quad + 2 * t % 4);
        uint32_t high = __shfl_sync(~0u, mine, quad + (2 * t + 1) % 4);
        words[m] = __byte_perm(low, high, t < 2 ? 0x5410 : 0x7632);
    }
}

template <typename T, Columns columns>
struct UpGateEpilogue {
    using Writer = WarpWriter;
    static constexpr int SUBTILES = 0; /* nothing is held */
    static constexpr bool HALF_N = false;
    const UpGate &p;

    __device__ const T *bias_of(const void *bias, const WorkTile &tile) const {
        return bias ? (const T *)bias + tile.expert * p.bias_stride : nullptr;
    }

    __device__ void hold(float (&d)[128], const WorkTile &tile, int row, Writer &writer) {
        const TileSchedule &plan = p.gemm.schedule;
        const CUtensorMap *map_a = plan.maps + MAP_A * plan.E + tile.expert;
        const CUtensorMap *map_h = plan.maps + MAP_H * plan.E + tile.expert;
        const T *bias = bias_of(p.bias, tile), *bias_up = bias_of(p.bias_up, tile);
        uint32_t words[16];
        float a[32];
        if constexpr (columns == GATE_UP) {
            /* boxes past F are clipped aligned */
            uint32_t up_words[16], a_words[2][16];
            int first = tile.first_column;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float *gate = &d[32 * i], *up = gate + 64;
                int column = first + i * SUBTILE;
                if (bias) add_bias(gate, bias, column, p.F);
                if (bias_up) add_bias(up, bias_up, column, p.F);
                if (p.h) {
                    pack_subtile<T>(words, gate);
                    pack_subtile<T>(up_words, up);
                    writer.store_two(words, up_words, row, [&](uint32_t box, uint32_t, int r) {
                        cp_async_bulk_tensor_store(map_h, box, column, r, 0); /* both halves */
                    });
                }
                activate<true, 1>(a, gate, up);
                pack_subtile<T>(a_words[i], a);
            }
            writer.store_two(a_words[0], a_words[1], row, [&](uint32_t box, uint32_t next, int r) {
                cp_async_bulk_tensor_store(map_a, box, first, r);
                cp_async_bulk_tensor_store(map_a, next, first + SUBTILE, r);
            });
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int column = tile.first_column + i * SUBTILE;
                if (bias) add_bias(&d[32 * i], bias, column, p.H);
                if (p.h && column < p.H) {
                    pack_subtile<T>(words, &d[32 * i]);
                    writer.store(words, map_h, column, row);
                }
                if (columns == UNGATED && column < p.H) {
                    activate<false, 1>(a, &d[32 * i], nullptr);
                    pack_subtile<T>(words, a);
                    writer.store(words, map_a, column, row);
                }
                if (columns == INTERLEAVED && i % 2 &&
                    column - SUBTILE < p.H) { /* two boxes of h: one of a */
                    activate<true, 2>(a, &d[32 * (i - 1)], &d[32 * (i - 1)] + 1);
                    pack_spread_subtile<T>(words, a);
                    writer.store(words, map_a, (column - SUBTILE) / 2, row);
                }
            }
        }
    }

    template <int slot>
    __device__ void store_subtile(Writer &) {}
    __device__ void flush(Writer &) {}

    template <int tokens>
    __device__ void store_swapped(float (&d)[tokens], const WorkTile &tile, int wg, int warp,
                                  Writer &writer) {
        const T *bias = bias_of(p.bias, tile), *bias_up = bias_of(p.bias_up, tile);
        T *h = (T *)p.h + (int64_t)tile.first_row * p.H,
          *out = (T *)p.a + (int64_t)tile.first_row * p.F;
        int rows = tile.num_rows;
        float a[tokens / 2];
        if constexpr (columns == GATE_UP) { /* gates, then their ups */
            int column = tile.first_column + wg * SUBTILE + 16 * warp, left = p.F - column;
            if (left <= 0) return;
            if (bias) add_bias_swapped<tokens>(d, bias, column, p.F);
            if (bias_up) add_bias_swapped<tokens>(d + tokens / 2, bias_up, column, p.F);
            if (p.h) {
                writer.store_swapped<tokens>(d, h + column, p.H, rows, left);
                writer.store_swapped<tokens>(d + tokens / 2, h + p.F + column, p.H, rows, left);
            }
            activate<true, 1>(a, d, d + tokens / 2);
            writer.store_swapped<tokens>(a, out + column, p.F, rows, left);
        } else {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float *lines = &d[tokens / 2 * i];
                int column = tile.first_column + (2 * wg + i) * SUBTILE + 16 * warp,
                    left = p.H - column;
                if (left <= 0) return;
                if (bias) add_bias_swapped<tokens>(lines, bias, column, p.H);
                if (p.h) writer.store_swapped<tokens>(lines, h + column, p.H, rows, left);
                if constexpr (columns == UNGATED) {
                    activate<false, 1>(a, lines, nullptr);
                    writer.store_swapped<tokens>(a, out + column, p.F, rows, left);
                } else { /* a gate's up is the next line, four lanes on */
#pragma unroll
                    for (int n = 0; n < tokens / 2; n++) a[n] = __shfl_down_sync(~0u, lines[n], 4);
                    activate<true, 1>(a, lines, a);
                    writer.store_swapped_pairs<tokens>(a, out + column / 2, p.F, rows, left / 2);
                }
            }
        }
    }

    /* a = act(gate) up, or act(gate); numbers of both stand `every` apart. up may be a. */
    template <bool gated, int every, int count>
    __device__ void activate(float (&a)[count], const float *gate, const float *up) const {
        const FusedMoeActivation &f = p.activation;
        with_activation<T>(f.kind, [&](auto act) {
#pragma unroll
            for (int i = 0; i < count; i++) {
                float v = act.gate(gate[every * i], f.alpha, f.limit).value;
                a[i] = gated ? v * act.up(up[every * i], f.limit).value : v;
            }
        });
    }
};

template <class Tile, Columns columns>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    hopper_up_gate_kernel(const __grid_constant__ UpGate p) {
    using T = typename Tile::T;
    persistent_gemm<Tile>(p.gemm, UpGateEpilogue<T, columns>{p});
    if (p.h) zero_rows_past(p.gemm.schedule, (T *)p.h, p.H);
    zero_rows_past(p.gemm.schedule, (T *)p.a, p.F);
}

/* --- launcher ----------------------------------------------------------------------------------------------- */

template <class Tile, Columns columns>
static int run(const FusedMoeUpGate &p, void *stream) {
    using T = typename Tile::T;
    const FusedMoeRowMap &rows = p.row_map;
    const FusedMoeWeight &w1 = p.w1;
    bool halves = p.layout == FUSED_MOE_HALVES;
    int32_t F = (int32_t)p.F, H = columns == UNGATED ? F : 2 * F, part = columns == GATE_UP ? F : H;
    UpGate q = {};
    q.h = p.h;
    q.a = p.a;
    q.F = F;
    q.H = H;
    q.activation = p.activation;
    q.bias = p.b1;
    q.bias_up = !halves ? p.b3 : p.b1 ? (const T *)p.b1 + F : nullptr;
    q.bias_stride = halves ? H : part;

    Gemm &gemm = q.gemm;
    gemm.x = p.x;
    gemm.row_token = rows.row_token;
    gemm.T = rows.T;
    gemm.k = (int32_t)p.D;
    gemm.num_k_tiles[0] = (int32_t)ceil_div(p.D, K_TILE);
    gemm.gate_up = columns == GATE_UP;
    FusedMoeWeight up = halves ? w1 : p.w3;
    if (halves) up.data = (T *)w1.data + F * w1.stride_out;
    int lines = columns == GATE_UP ? Tile::BN / 2 : Tile::BN;
    int status = weight_map<T>(&gemm.b[0], w1, Tile::B_MAJOR, w1.stride_out, w1.stride_in, rows.E,
                               part, p.D);
    if (status == FUSED_MOE_OK && columns == GATE_UP)
        status = weight_map<T>(&gemm.b[1], up, Tile::B_MAJOR, up.stride_out, up.stride_in, rows.E,
                               part, p.D);
    Result results[MAX_RESULTS] = {};
    results[MAP_A].data = p.a;
    results[MAP_A].pitch_bytes = F * sizeof(T);
    results[MAP_H].data = p.h;
    results[MAP_H].pitch_bytes = H * sizeof(T);
    if (status == FUSED_MOE_OK)
        status =
            matrix_map(&results[MAP_A].aligned, (const T *)p.a, rows.R, F, F, WarpWriter::ROWS);
    if (status == FUSED_MOE_OK && p.h)
        status = columns == GATE_UP ? halves_map(&results[MAP_H].aligned, (const T *)p.h, rows.R, F,
                                                 WarpWriter::ROWS)
                                    : matrix_map(&results[MAP_H].aligned, (const T *)p.h, rows.R, H,
                                                 H, WarpWriter::ROWS);
    gemm.schedule.R = rows.R;
    gemm.schedule.E = rows.E;
    gemm.schedule.tile_columns = lines;
    gemm.schedule.num_columns = (int32_t)ceil_div(part, lines);
    gemm.schedule.order = schedule_for(Tile::BM, 0);
    if (status == FUSED_MOE_OK)
        status = make_tile_schedule(&gemm.schedule, rows.ends, results, p.workspace, stream);
    if (status == FUSED_MOE_OK)
        status = launch_gemm<Tile>(hopper_up_gate_kernel<Tile, columns>, q, stream);
    return status;
}

int hopper_up_gate(const FusedMoeUpGate &p, void *stream) {
    return with_half(p.dtype, [&](auto t) {
        auto with_columns = [&](auto tile) {
            using Tile = decltype(tile);
            if (p.layout == FUSED_MOE_UNGATED) return run<Tile, UNGATED>(p, stream);
            if (p.layout == FUSED_MOE_INTERLEAVED) return run<Tile, INTERLEAVED>(p, stream);
            return run<Tile, GATE_UP>(p, stream);
        };
        using T = decltype(t);
        return p.w1.stride_in == 1 ? with_columns(Tile<T, MAJOR_K, true>())
                                   : with_columns(Tile<T, MAJOR_MN, true>());
    });
}

} // namespace fused_moe
