/* grouped_mm of 8 bits on Hopper: out[r] = (a[r] b[e(r)]^T) scales + bias[e(r)], rounded.
 *
 * By rows the epilogue is overlapped as grouped_mm.cu's. In blocks a tile's 64 rows of each consumer are
 * staged whole, so the consumer goes on while TMA stores them. */
#include "eight_bit.cuh"

namespace fused_moe {
namespace sm90 {
namespace {

/* --- kernel --------------------------------------------------------------------------------------------- */

typedef struct {
    Gemm<DenseParams> gemm;
    const float *a_scale; /* by rows [R] */
    OfColumns scale, bias;
    void *out; /* [R,M] */
    int32_t M;
    bool is_f16;
    CUtensorMap out_map; /* ragged */
} RowsMM;

typedef struct {
    Gemm<BlockParams> gemm;
    const float *a_scale; /* [R] where A's rows have one scale each; else the weight's parameters have them */
    OfColumns bias;
    void *out;
    int32_t M;
    bool is_f16;
    CUtensorMap out_map;
} BlocksMM;

template <class Config, typename Params>
struct MMEpilogue {
    static constexpr bool IN_BLOCKS = Config::IN_BLOCKS;
    using Writer = std::conditional_t<IN_BLOCKS, WholeWriter, WarpgroupWriter>;
    const Params &p;
    uint32_t words[IN_BLOCKS ? 1 : 4][16]; /* by rows those held of the previous tile */
    int row, num_rows, column, end;

    __device__ int num_columns() const { return p.M; }
    __device__ const float *row_scales() const { return p.a_scale; }

    template <typename Acc>
    __device__ void hold(Acc (&d)[128], const WorkTile &tile, int wg, const float (&of_row)[2],
                         uint32_t of_columns, Writer &writer) {
        row = tile.first_row + SUBTILE * wg, num_rows = min(SUBTILE, tile.num_rows - SUBTILE * wg);
        column = tile.first_column;
        end = tile.half_n ? min(p.M, column + 2 * SUBTILE) : p.M;
        if (num_rows <= 0) end = 0;
        p.is_f16 ? pack_tile<__half>(d, tile, of_row, of_columns, writer)
                 : pack_tile<__nv_bfloat16>(d, tile, of_row, of_columns, writer);
        if constexpr (IN_BLOCKS)
            writer.store([&](uint32_t subtile, int i) { issue(subtile, column + i * SUBTILE); });
    }

    /* Into the held words, or into the staging buffer. */
    template <typename T, typename Acc>
    __device__ void pack_tile(Acc (&d)[128], const WorkTile &tile, const float (&of_row)[2],
                              uint32_t of_columns, Writer &writer) {
        constexpr float NO_SCALES[2] = {1, 1}; /* those in blocks have been multiplied */
        constexpr bool IS_F16 = std::is_same_v<T, __half>;
        if constexpr (IN_BLOCKS) writer.wait();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t (&subtile)[16] = words[IN_BLOCKS ? 0 : i];
            float h[32];
            finish_subtile<Config::SCALES>(h, d + 32 * i, RowScales<Config>::HAS_ANY ? of_row : NO_SCALES,
                                           of_columns + 4 * SUBTILE * i, p.bias, 0, tile.expert,
                                           column + i * SUBTILE, p.M, IS_F16);
            pack_subtile<T>(subtile, h);
            if constexpr (IN_BLOCKS) writer.fill(i, subtile);
        }
    }

    __device__ void issue(uint32_t subtile, int first) const {
        if (first < end)
            cp_async_bulk_tensor_store(&p.out_map, subtile, first, SUBTILE - num_rows, row + num_rows);
    }

    template <int i>
    __device__ void store_subtile(Writer &writer) {
        int first = column + i * SUBTILE;
        if (first >= end) return;
        auto fill = [&](uint32_t subtile, int warp) { fill_subtile(subtile, 16 * warp, words[i]); };
        writer.store_filled(fill, [&](uint32_t subtile) { issue(subtile, first); });
    }

    __device__ void flush(Writer &writer) {
        if constexpr (Config::HELD > 0) {
            for_each_constant<0, 4>([&](auto i) { store_subtile<i.value>(writer); });
            end = 0;
        }
    }

    template <int TOKENS, typename Acc, typename Skinny>
    __device__ void store_swapped(Acc *d, const WorkTile &tile, int wg, int warp,
                                  const RowScales<Config> &scales, Skinny &writer, uint8_t *) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int first = tile.first_column + (wg + i) * SUBTILE + 16 * warp;
            if (first >= p.M) return;
            float v[TOKENS / 2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int n = first + 8 * half + threadIdx.x % 32 / 4;
                bool exists = n < p.M;
                float bias = p.bias.data[0] && exists ? bias_at(p.bias, 0, tile.expert, n, p.is_f16) : 0,
                      of_column;
                if constexpr (!IN_BLOCKS) of_column = exists ? scale_at(p.scale, 0, tile.expert, n) : 0;
#pragma unroll
                for (int j = 0; j < TOKENS / 4; j++) { /* rows 8 (j / 2) + .. + j % 2 */
                    int at = j / 2 * 4 + 2 * half + j % 2;
                    float sum = (float)d[TOKENS / 2 * i + at];
                    if constexpr (!IN_BLOCKS) sum = __fmul_rn(sum, scales.scale[j] * of_column);
                    v[at] = __fadd_rn(sum, bias);
                }
            }
            int64_t start = (int64_t)tile.first_row * p.M + first;
            if (p.is_f16)
                writer.template store_swapped<TOKENS>(v, (__half *)p.out + start, p.M, tile.num_rows,
                                                      p.M - first);
            else
                writer.template store_swapped<TOKENS>(v, (__nv_bfloat16 *)p.out + start, p.M, tile.num_rows,
                                                      p.M - first);
        }
    }
};

template <class Config, typename Params>
__global__ void __launch_bounds__(Config::THREADS, Config::CTAS_PER_SM)
    eight_bit_mm_kernel(const __grid_constant__ Params p) {
    persistent_eight_bit<Config>(p.gemm, MMEpilogue<Config, Params>{p, {}});
    zero_rows_past(p.gemm.tiles, (__half *)p.out, p.M);
}

/* --- launcher ------------------------------------------------------------------------------------------- */

template <class Config>
int launch(const FusedMoeEightBitMM &call, void *stream) {
    using Operand = typename Config::Operand;
    using Params = std::conditional_t<Config::IN_BLOCKS, BlocksMM, RowsMM>;
    const FusedMoeGroupedMM &p = call.down;
    const FusedMoeQuantizedWeight &w = *p.b[0].quantized;
    Params q = {};
    q.bias = {{p.bias, nullptr}, {p.M, 0}, 1};
    q.out = p.out;
    q.M = (int32_t)p.M;
    q.is_f16 = p.dtype == FUSED_MOE_F16;
    q.a_scale = call.a_scale;
    auto &gemm = q.gemm;
    gemm.num_k_tiles[0] = (int32_t)ceil_div(p.N[0], K_TILE<Operand>);
    if constexpr (Config::IN_BLOCKS) {
        gemm.weight.scales = {{(const float *)w.scale, nullptr},
                              {0, 0},
                              1,
                              (int32_t)ceil_div(p.M, FUSED_MOE_BLOCK),
                              gemm.num_k_tiles[0]};
        gemm.weight.a_scale = call.a_scale;
    } else {
        bool is_of_matrix = w.block_out != 1;
        q.a_scale = call.a_scale;
        q.scale = {{w.scale, nullptr}, {is_of_matrix ? 1 : p.M, 0}, is_of_matrix ? 0 : 1};
    }
    int status = set_rows_of_a<Operand>(gemm, 0, p.a, p.R, 0, p.N[0], p.N[0]);
    if (status == FUSED_MOE_OK)
        status = weight_map<Operand>(&gemm.weight.map[0], p.b[0], Major::K, p.b[0].stride_out, 1, p.E, p.M,
                                     p.N[0], Config::Weight::BOX);
    set_tiles(gemm, p, Config::BN);
    TileSource &tiles = gemm.tiles;
    tiles.swaps_skinny = Config::FEW_ROWS;
    if (!Config::FEW_ROWS) {
        tiles.last_is_half_n = (p.M - 1) % Config::BN < Config::BN / 2;
        if (!tiles.last_is_half_n && !schedule_override().no_tails) tiles.order.split_last_wave = num_ctas();
    }
    tiles.order.splits_skinny = !p.pdl.reads_before_wait;
    if (status == FUSED_MOE_OK)
        status = ragged_map(&q.out_map, (const __half *)p.out, p.R, p.M, p.M, WarpgroupWriter::ROWS);
    if (status != FUSED_MOE_OK) return status;
    return launch_persistent<Config, EightBitMemory<Config>, eight_bit_mm_kernel<Config, Params>>(q, stream,
                                                                                                  p.pdl);
}

/* Few rows of dout have full tiles, too: backward reads the weights of all experts anyway. */
int run(const FusedMoeEightBitMM &p, void *stream) {
    if (p.a_has_row_scales)
        return launch<EightBitConfig<__nv_fp8_e4m3, ScalesOf::BLOCKS, Side::DOWN_DGRAD>>(p, stream);
    return with_eight_bit_config<Side::DOWN>(
        p.down.b[0].quantized->format, p.down.R, p.down.E,
        [&](auto config) { return launch<decltype(config)>(p, stream); });
}

FusedMoeReason reason(const FusedMoeEightBitMM &call) {
    const FusedMoeGroupedMM &p = call.down;
    if (!is_16_bit(p.dtype)) return FUSED_MOE_OTHER_DTYPE;
    if (p.R == 0) return FUSED_MOE_NO_ROWS;
    if (p.M % CHUNK || p.N[0] % FUSED_MOE_EIGHT_BIT_WIDTH) return FUSED_MOE_WIDTH;
    for (const void *data : {p.a, (const void *)p.out, p.bias, (const void *)p.b[0].data})
        if (!is_aligned(data)) return FUSED_MOE_UNALIGNED;
    return is_countable(p.R, p.E, p.M) ? FUSED_MOE_RUNS : FUSED_MOE_TOO_LARGE;
}

} // namespace

const Kernel<FusedMoeEightBitMM> eight_bit_mm = {reason, nullptr, run};

} // namespace sm90
} // namespace fused_moe
