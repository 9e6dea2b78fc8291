/* grouped_mm on Hopper: out[r] = sum_i a[r, part i] b[i][e(r)]^T + bias[e(r)].
 *
 * Roles, pipelines and timeline are gemm.cuh's. Forward reads K-major weights, the gradient of the rows
 * MN-major ones; where weights are transposed in memory it is the other way round. up_dgrad's two parts are
 * two runs of k in one accumulator.
 * The epilogue is overlapped: accumulators are rounded into 64 registers and stored under the next tile's
 * k-tiles. */
#include "gemm.cuh"
#include "launch.cuh"

namespace fused_moe {
namespace sm90 {
namespace {

/* --- kernel --------------------------------------------------------------------------------------------- */

typedef struct {
    DenseGemm gemm;
    const void *bias; /* [E,M] or NULL */
    void *out;        /* [R,M] */
    int32_t M;
    CUtensorMap out_map; /* ragged */
} GroupedMM;

template <typename Out, typename Bias>
struct Epilogue {
    using Writer = WarpgroupWriter;
    static constexpr int SUBTILES = 4;
    static constexpr bool HALF_N = true;
    const GroupedMM &p;
    /* What is held of the previous tile: rounded subtiles, of columns [column, end). end 0: nothing. */
    uint32_t words[SUBTILES][16];
    int row, num_rows, column, end;

    __device__ void hold(float (&d)[128], const WorkTile &tile, int wg, Writer &) {
        const Bias *bias = p.bias ? (const Bias *)p.bias + (int64_t)tile.expert * p.M : nullptr;
        row = tile.first_row + SUBTILE * wg, num_rows = min(SUBTILE, tile.num_rows - SUBTILE * wg);
        column = tile.first_column;
        end = tile.half_n ? min(p.M, column + 2 * SUBTILE) : p.M;
        if (num_rows <= 0) end = 0;
        /* of a half-N tile, subtiles 2 and 3 were never computed: `end` drops them */
#pragma unroll
        for (int i = 0; i < SUBTILES; i++) {
            if (bias) add_bias(&d[32 * i], bias, column + i * SUBTILE, p.M);
            pack_subtile<Out>(words[i], &d[32 * i]);
        }
    }

    template <int i>
    __device__ void store_subtile(Writer &writer) {
        int first = column + i * SUBTILE;
        if (first >= end) return;
        auto fill = [&](uint32_t subtile, int warp) { fill_subtile(subtile, 16 * warp, words[i]); };
        writer.store_filled(fill, [&](uint32_t subtile) {
            cp_async_bulk_tensor_store(&p.out_map, subtile, first, SUBTILE - num_rows, row + num_rows);
        });
    }

    __device__ void flush(Writer &writer) {
        for_each_constant<0, SUBTILES>([&](auto i) { store_subtile<i.value>(writer); });
        end = 0;
    }

    template <int TOKENS, int SUBTILES, class AnyWriter>
    __device__ void store_swapped(float *d, const WorkTile &tile, int wg, int warp, AnyWriter &writer) {
        store_swapped_subtiles<Out, Bias, TOKENS, SUBTILES>(p, d, tile, wg, warp, writer);
    }
};

template <class Config>
__global__ void __launch_bounds__(Config::THREADS, Config::CTAS_PER_SM)
    grouped_mm_kernel(const __grid_constant__ GroupedMM p) {
    persistent_gemm<Config>(p.gemm, Epilogue<typename Config::Out, typename Config::Bias>{p, {}});
    zero_rows_past(p.gemm.tiles, (typename Config::Out *)p.out, p.M);
}

/* --- launcher ------------------------------------------------------------------------------------------- */

template <class Config>
int launch(const FusedMoeGroupedMM &p, void *stream) {
    using Operand = typename Config::Operand;
    using Out = typename Config::Out;
    GroupedMM q = {};
    q.bias = p.bias;
    q.out = p.out;
    q.M = (int32_t)p.M;
    DenseGemm &gemm = q.gemm;
    TileSource &tiles = gemm.tiles;
    int status = FUSED_MOE_OK;
    for (int i = 0; i < 2 && p.b[i].data && status == FUSED_MOE_OK; i++) {
        status = set_rows_of_a<Operand>(gemm, i, p.a, p.R, i * p.N[0], p.N[i], p.N[0] + p.N[1]);
        if (status == FUSED_MOE_OK)
            status = weight_map<Operand>(&gemm.weight.map[i], p.b[i], Config::B_MAJOR, p.b[i].stride_out,
                                         p.b[i].stride_in, p.E, p.M, p.N[i], Config::Weight::BOX);
        gemm.num_k_tiles[i] = (int32_t)ceil_div(p.N[i], K_TILE<Operand>);
    }
    set_tiles(gemm, p, Config::BN);
    tiles.last_is_half_n = Config::BN > SUBTILE && (p.M - 1) % Config::BN < Config::BN / 2;
    /* where an N tile is half as wide already, the last wave is not split */
    if (!tiles.last_is_half_n && !schedule_override().no_tails && !Config::ALL_SWAPPED)
        tiles.order.split_last_wave = num_ctas();
    /* beside up_gate's last CTAs not all halves of skinny tiles would find an SM */
    tiles.order.splits_skinny = !p.pdl.reads_before_wait;
    if (status == FUSED_MOE_OK)
        status = ragged_map(&q.out_map, (const Out *)p.out, p.R, p.M, p.M, WarpgroupWriter::ROWS);
    if (status != FUSED_MOE_OK) return status;
    return launch_persistent<Config, PlanningShared<Config>, grouped_mm_kernel<Config>>(q, stream, p.pdl);
}

int run(const FusedMoeGroupedMM &p, void *stream) {
    return with_half(p.dtype, [&](auto t) {
        using T = decltype(t);
        return with_config<T, false>(p.b[0].stride_in == 1, p.R, p.E, p.M, p.N[0] + p.N[1],
                                     [&](auto config) { return launch<decltype(config)>(p, stream); });
    });
}

FusedMoeReason reason(const FusedMoeGroupedMM &p) {
    const FusedMoeWeight *b = p.b;
    if (!is_16_bit(p.dtype)) return FUSED_MOE_OTHER_DTYPE;
    if (p.R == 0) return FUSED_MOE_NO_ROWS;
    if (p.M % CHUNK || p.N[0] % CHUNK || p.N[1] % CHUNK) return FUSED_MOE_WIDTH;
    if (!is_aligned(p.a) || !is_aligned(p.out) || !is_aligned(p.bias)) return FUSED_MOE_UNALIGNED;
    for (int i = 0; i < 2 && b[i].data; i++)
        if (!is_readable(b[i], b[i].stride_out, b[i].stride_in, p.E)) return FUSED_MOE_STRIDES;
    if (b[1].data && (b[0].stride_in == 1) != (b[1].stride_in == 1)) return FUSED_MOE_STRIDES;
    return is_countable(p.R, p.E, p.M) ? FUSED_MOE_RUNS : FUSED_MOE_TOO_LARGE;
}

} // namespace

const Kernel<FusedMoeGroupedMM> grouped_mm = {reason, nullptr, run};

} // namespace sm90
} // namespace fused_moe
