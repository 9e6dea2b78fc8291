/* grouped_mm on the Hopper engine: out[r] = sum_i a[r, part i] b[i][e(r)]^T + bias[e(r)].
 *
 * Forward (weights dense along k) and the gradient of rows (dense along the columns) differ in how B's boxes
 * lie alone; up_dgrad's two parts are two runs of k in one accumulator. */
#include "engine.cuh"
#include "tier.cuh"

namespace fused_moe {

/* --- kernel ------------------------------------------------------------------------------------------------ */

typedef struct {
    Gemm gemm;
    const void *bias; /* [E,M] or NULL */
    void *out;        /* [R,M] */
    int32_t M;
} GroupedMM;

template <typename T>
struct GroupedMMEpilogue {
    using Writer = WarpgroupWriter;
    static constexpr int SUBTILES = 4; /* a box each */
    static constexpr bool HALF_N = true;
    const GroupedMM &p;
    /* what is held of the tile before: rounded boxes of 64 columns, in columns [column, end), end 0: nothing */
    uint32_t words[SUBTILES][16];
    int expert, row, column, end;

    __device__ void hold(float (&d)[128], const WorkTile &tile, int first_row, Writer &) {
        const T *bias = p.bias ? (const T *)p.bias + (int64_t)tile.expert * p.M : nullptr;
        expert = tile.expert, row = first_row, column = tile.first_column;
        end = tile.half_n ? min(p.M, column + 2 * SUBTILE) : p.M;
#pragma unroll
        for (int i = 0; i < SUBTILES; i++) {
            if (bias) add_bias(&d[32 * i], bias, column + i * SUBTILE, p.M);
            pack_subtile<T>(words[i], &d[32 * i]);
        }
    }

    template <int slot>
    __device__ void store_subtile(Writer &writer) {
        int at = column + slot * SUBTILE;
        if (at < end) writer.store(words[slot], p.gemm.schedule.maps + expert, at, row);
    }

    __device__ void flush(Writer &writer) {
        for_each_subtile<0, SUBTILES>([&](auto slot) { store_subtile<slot.value>(writer); });
        end = 0;
    }

    template <int tokens>
    __device__ void store_swapped(float (&d)[tokens], const WorkTile &tile, int wg, int warp,
                                  Writer &writer) {
        const T *bias = p.bias ? (const T *)p.bias + (int64_t)tile.expert * p.M : nullptr;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int column = tile.first_column + (2 * wg + i) * SUBTILE + 16 * warp;
            if (column >= p.M || (tile.half_n && wg)) return; /* these boxes were not loaded */
            if (bias) add_bias_swapped<tokens>(&d[tokens / 2 * i], bias, column, p.M);
            T *out = (T *)p.out + (int64_t)tile.first_row * p.M + column;
            writer.store_swapped<tokens>(&d[tokens / 2 * i], out, p.M, tile.num_rows, p.M - column);
        }
    }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    hopper_grouped_mm_kernel(const __grid_constant__ GroupedMM p) {
    persistent_gemm<Tile>(p.gemm, GroupedMMEpilogue<typename Tile::T>{p, {}});
    zero_rows_past(p.gemm.schedule, (typename Tile::T *)p.out, p.M);
}

/* --- launcher ----------------------------------------------------------------------------------------------- */

template <class Tile>
static int run(const FusedMoeGroupedMM &p, void *stream) {
    using T = typename Tile::T;
    GroupedMM q = {};
    q.bias = p.bias;
    q.out = p.out;
    q.M = (int32_t)p.M;
    Gemm &gemm = q.gemm;
    int status = FUSED_MOE_OK;
    const T *a = (const T *)p.a;
    for (int i = 0; i < 2 && p.b[i].data && status == FUSED_MOE_OK; a += p.N[i++]) {
        status = matrix_map(&gemm.a[i], a, p.R, p.N[i], p.N[0] + p.N[1], SUBTILE);
        if (status == FUSED_MOE_OK)
            status = weight_map<T>(&gemm.b[i], p.b[i], Tile::B_MAJOR, p.b[i].stride_out,
                                   p.b[i].stride_in, p.E, p.M, p.N[i]);
        gemm.num_k_tiles[i] = (int32_t)ceil_div(p.N[i], K_TILE);
    }
    Result results[MAX_RESULTS] = {};
    results[0].data = p.out;
    results[0].pitch_bytes = p.M * sizeof(T);
    if (status == FUSED_MOE_OK)
        status =
            matrix_map(&results[0].aligned, (const T *)p.out, p.R, p.M, p.M, WarpgroupWriter::ROWS);
    gemm.schedule.R = p.R;
    gemm.schedule.E = p.E;
    gemm.schedule.tile_columns = Tile::BN;
    gemm.schedule.num_columns = (int32_t)ceil_div(p.M, Tile::BN);
    gemm.schedule.last_is_half_n = (p.M - 1) % Tile::BN < Tile::BN / 2;
    /* where a column of tiles is half_n already, none is cut */
    int num_ctas = 0;
    if (status == FUSED_MOE_OK && !gemm.schedule.last_is_half_n) status = num_sms(&num_ctas);
    gemm.schedule.order = schedule_for(Tile::BM, num_ctas);
    if (status == FUSED_MOE_OK)
        status = make_tile_schedule(&gemm.schedule, p.ends, results, p.workspace, stream);
    if (status == FUSED_MOE_OK)
        status = launch_gemm<Tile>(hopper_grouped_mm_kernel<Tile>, q, stream);
    return status;
}

int hopper_grouped_mm(const FusedMoeGroupedMM &p, void *stream) {
    return with_half(p.dtype, [&](auto t) {
        using T = decltype(t);
        if (p.b[0].stride_in == 1) return run<Tile<T, MAJOR_K, false>>(p, stream);
        return run<Tile<T, MAJOR_MN, false>>(p, stream);
    });
}

} // namespace fused_moe
