/* grouped_mm on the Hopper engine: out[r] = sum_i a[r, part i] b[i][e(r)]^T + bias[e(r)].
 *
 * Forward (weights dense along k) and the gradient of rows (dense along the columns) differ in how B's boxes
 * lie alone; up_dgrad's two parts are two runs of k in one accumulator. */
#include "engine.cuh"
#include "tier.cuh"

namespace fused_moe {

/* --- kernel ------------------------------------------------------------------------------------------------ */

typedef struct {
    Product product;
    const void *bias; /* [E,M] or NULL */
    void *out;        /* [R,M] */
    int32_t M;
} GroupedMM;

template <typename T>
struct GroupedMMFinish {
    using Writer = WarpgroupWriter;
    static constexpr int SLOTS = 4; /* a box each */
    static constexpr bool NARROW = true;
    const GroupedMM &p;
    /* what is held of the tile before: rounded boxes of 64 columns, in columns [column, end), end 0: nothing */
    uint32_t words[SLOTS][16];
    int expert, row, column, end;

    __device__ void take(float (&d)[128], const Item &item, int first_row, Writer &) {
        const T *bias = p.bias ? (const T *)p.bias + (int64_t)item.expert * p.M : nullptr;
        expert = item.expert, row = first_row, column = item.first_column;
        end = item.narrow ? min(p.M, column + 2 * BOX) : p.M;
#pragma unroll
        for (int i = 0; i < SLOTS; i++) {
            if (bias) add_bias(&d[32 * i], bias, column + i * BOX, p.M);
            pack_box<T>(words[i], &d[32 * i]);
        }
    }

    template <int slot>
    __device__ void put(Writer &writer) {
        int at = column + slot * BOX;
        if (at < end) writer.store(words[slot], p.product.plan.maps + expert, at, row);
    }

    __device__ void put_all(Writer &writer) {
        for_each_slot<0, SLOTS>([&](auto slot) { put<slot.value>(writer); });
        end = 0;
    }

    template <int tokens>
    __device__ void few(float (&d)[tokens], const Item &item, int wg, int warp, Writer &writer) {
        const T *bias = p.bias ? (const T *)p.bias + (int64_t)item.expert * p.M : nullptr;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int column = item.first_column + (2 * wg + i) * BOX + 16 * warp;
            if (column >= p.M || (item.narrow && wg)) return; /* these boxes were not loaded */
            if (bias) add_bias_few<tokens>(&d[tokens / 2 * i], bias, column, p.M);
            T *out = (T *)p.out + (int64_t)item.first_row * p.M + column;
            writer.store_few<tokens>(&d[tokens / 2 * i], out, p.M, item.num_rows, p.M - column);
        }
    }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    hopper_grouped_mm_kernel(const __grid_constant__ GroupedMM p) {
    grouped_product<Tile>(p.product, GroupedMMFinish<typename Tile::T>{p, {}});
    zero_rows_past(p.product.plan, (typename Tile::T *)p.out, p.M);
}

/* --- launcher ----------------------------------------------------------------------------------------------- */

template <class Tile>
static int run(const FusedMoeGroupedMM &p, void *stream) {
    using T = typename Tile::T;
    GroupedMM q = {};
    q.bias = p.bias;
    q.out = p.out;
    q.M = (int32_t)p.M;
    Product &product = q.product;
    int status = FUSED_MOE_OK;
    const T *a = (const T *)p.a;
    for (int i = 0; i < 2 && p.b[i].data && status == FUSED_MOE_OK; a += p.N[i++]) {
        status = matrix_map(&product.a[i], a, p.R, p.N[i], p.N[0] + p.N[1], BOX);
        if (status == FUSED_MOE_OK)
            status = weight_map<T>(&product.b[i], p.b[i], Tile::B_MAJOR, p.b[i].stride_out,
                                   p.b[i].stride_in, p.E, p.M, p.N[i]);
        product.steps[i] = (int32_t)ceil_div(p.N[i], BOX);
    }
    Result results[MAX_RESULTS] = {};
    results[0].data = p.out;
    results[0].pitch_bytes = p.M * sizeof(T);
    if (status == FUSED_MOE_OK)
        status =
            matrix_map(&results[0].whole, (const T *)p.out, p.R, p.M, p.M, WarpgroupWriter::ROWS);
    product.plan.R = p.R;
    product.plan.E = p.E;
    product.plan.tile_columns = Tile::BN;
    product.plan.num_columns = (int32_t)ceil_div(p.M, Tile::BN);
    product.plan.last_is_narrow = (p.M - 1) % Tile::BN < Tile::BN / 2;
    /* where a column of tiles is narrow already, none is cut */
    int workers = 0;
    if (status == FUSED_MOE_OK && !product.plan.last_is_narrow) status = num_workers(&workers);
    product.plan.schedule = schedule_for(Tile::BM, workers);
    if (status == FUSED_MOE_OK)
        status = make_plan(&product.plan, p.ends, results, p.workspace, stream);
    if (status == FUSED_MOE_OK)
        status = launch_product<Tile>(hopper_grouped_mm_kernel<Tile>, q, stream);
    return status;
}

int hopper_grouped_mm(const FusedMoeGroupedMM &p, void *stream) {
    return with_half(p.dtype, [&](auto t) {
        using T = decltype(t);
        if (p.b[0].stride_in == 1) return run<Tile<T, ALONG_K, false>>(p, stream);
        return run<Tile<T, ALONG_LINES, false>>(p, stream);
    });
}

} // namespace fused_moe
