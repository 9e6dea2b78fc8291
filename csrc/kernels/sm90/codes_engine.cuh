/* Grouped GEMMs of quantised weights: engine.cuh's roles, pipelines and schedule, with codes as B and every tile
 * computed by swap-AB. The weight's values, made in registers of codes, are wgmma's A, and the tile's rows its N: 8
 * to 128 of them.
 *
 *   warpgroup 0     producer, as in engine.cuh; a stage is 128 or 32 rows of the activation and 256 rows of codes
 *   warpgroups 1-2  consumers: each has two subtiles of 64 weight rows
 *
 *   subtile 0   |make k 0 |          |make k 1 |          |make k 2      values of a k-tile: 16 words a thread
 *   MMAs                  |k 0 of 0  |k 0 of 1 |k 1 of 0  |k 1 of 1
 *   subtile 1             |make k 0  |         |make k 1  |
 *
 * While one subtile's MMAs run, the other's values are made. Two consumers are eight warps that unpack: on each of an
 * SM's schedulers one can wait while the other computes.
 *
 * FewRowsCodesConfig has registers for one subtile's values. They are made when the MMAs of the other's have ended;
 * meanwhile the other CTA's warps unpack. */
#pragma once

#include "codes.cuh"
#include "engine.cuh"
#include "launch.cuh"

namespace fused_moe {
namespace sm90 {

template <class Decoder_, bool GATHER>
struct CodesConfig : GemmConfig<typename Decoder_::T, Major::K, GATHER> {
    using Base = GemmConfig<typename Decoder_::T, Major::K, GATHER>;
    using Decoder = Decoder_;
    static constexpr int STAGES = Decoder::IS_4_BIT ? 7 : 5;
    static constexpr int B_K_TILE = Decoder::ROW_BYTES, B_BYTES = Base::BN * Decoder::ROW_BYTES;
    using Pipeline = PipelineState<STAGES>;
};

/* Of experts that have few rows on average: 32 in a tile at most. Two CTAs share an SM: four warps that unpack on each
 * of its schedulers instead of two. */
template <class Decoder, bool GATHER>
struct FewRowsCodesConfig : CodesConfig<Decoder, GATHER> {
    using Base = CodesConfig<Decoder, GATHER>;
    static constexpr bool FEW_ROWS = true;
    static constexpr int CTAS_PER_SM = 2, BM = 32, CUT_ROWS = BM;
    static constexpr int A_BYTES = BM * SWIZZLE_BYTES, STAGING_BYTES = SkinnyWriter<BM>::BYTES;
    static constexpr int STAGES = 100 * 1024 / (A_BYTES + Base::B_BYTES);
    static constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = 88;
    static_assert(PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS <= 3 * LAUNCH_REGISTERS<2 * Base::THREADS>,
                  "setmaxnreg would wait forever");
    using Queue = TileQueue<WorkTile, Base::CONSUMER_WARPS + Base::LOAD_WARPS, GATHER ? BM : 0>;
    using Pipeline = PipelineState<STAGES>;
};

/* What a GEMM of codes has beside Gemm. */
typedef struct {
    Gemm gemm;        /* b: maps of codes, in boxes of 64 columns and two subtiles */
    Scales scales[2]; /* of the weights of a consumer's two subtiles               */
} CodesGemm;

/* First weight row of subtile i of a consumer's two. With gate_up they are a gate's and its up's. */
__device__ inline int first_row_of(const Gemm &p, const WorkTile &tile, int wg, int i) {
    return tile.first_column + SUBTILE * (p.gate_up ? wg : 2 * wg + i);
}

template <class Config, int TOKENS>
__device__ __forceinline__ void run_mainloop_codes(float (&d)[TOKENS], const CodesGemm &p, Shared<Config> &s,
                                                   typename Config::Pipeline &pipe, const WorkTile &tile,
                                                   int wg) {
    using T = typename Config::T;
    constexpr int x_step = K16_STEP<Major::K, T>;
    constexpr int BUFFERS = Config::FEW_ROWS ? 1 : 2; /* for values: registers are few */
    const typename Config::Decoder decoder;
    const uint32_t offset = codes_offset<Config::Decoder::ROW_BYTES>();
    RowScales<typename Config::Decoder> scales[2];
    uint32_t subtile[2]; /* in a stage's codes */
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int lane_row = 16 * (threadIdx.x / 32 % 4) + threadIdx.x % 32 / 4;
        scales[i].start(p.scales[i], tile.expert, first_row_of(p.gemm, tile, wg, i) + lane_row);
        subtile[i] =
            (p.gemm.gate_up ? wg + 2 * i : 2 * wg + i) * SUBTILE * Config::Decoder::ROW_BYTES + offset;
    }
    uint32_t a[BUFFERS][16];
    int previous = 0;
    auto run_k_tile = [&](int k_tile, auto first) {
        auto &stage = s.stage[pipe.index];
        mbarrier_wait(shared_address(&s.full[pipe.index]), pipe.phase);
        if constexpr (Config::GATHER) fence_proxy_async(); /* cp.async's copies are ordinary writes */
        uint64_t x = matrix_descriptor<Major::K>(shared_address(stage.a));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t (&values)[16] = a[i % BUFFERS];
            if (BUFFERS == 1) wgmma_wait_group<0>(); /* for the MMAs that read the last values */
            if (BUFFERS == 1 && i == 0 && !first.value) release<Config>(s, previous);
            make_fragments(values, decoder, shared_address(stage.b) + subtile[i], scales[i], p.scales[i],
                           k_tile + 1);
            for (uint32_t &word : values) pin(word); /* no wgmma waits for one that is made later */
            wgmma_fence();
            float *accumulators = d + TOKENS / 2 * i;
            wgmma<TOKENS, !first.value, Major::K>(accumulators, values, x, T());
#pragma unroll
            for (int k = 1; k < K_TILE<T> / 16; k++)
                wgmma<TOKENS, 1, Major::K>(accumulators, values + 4 * k, x + k * x_step, T());
            wgmma_commit_group();
            if (BUFFERS == 2) wgmma_wait_group<1>(); /* for the other subtile's */
            if (BUFFERS == 2 && i == 0 && !first.value) release<Config>(s, previous);
        }
        previous = pipe.index;
        pipe.advance();
    };
    run_k_tile(0, std::true_type());
#pragma unroll 1
    for (int k_tile = 1; k_tile < p.gemm.num_k_tiles[0]; k_tile++) run_k_tile(k_tile, std::false_type());
    wgmma_wait_group<0>();
    release<Config>(s, previous);
}

/* Nothing here may become a call, at which MMAs in flight would be waited for. */
template <class Config, int TOKENS, typename Epilogue, class Writer>
__device__ __forceinline__ void run_codes_tile(const CodesGemm &p, Shared<Config> &s,
                                               typename Config::Pipeline &pipe, const WorkTile &tile, int wg,
                                               Epilogue &epilogue, Writer &writer) {
    float d[TOKENS];
    run_mainloop_codes<Config>(d, p, s, pipe, tile, wg);
    epilogue.template store_swapped<TOKENS>(d, tile, wg, threadIdx.x / 32 % 4, writer);
}

/* epilogue.store_swapped<TOKENS>(d, tile, wg, warp, writer), as in persistent_gemm. */
template <class Config, typename Epilogue>
__device__ __forceinline__ void persistent_codes_gemm(const CodesGemm &p, Epilogue epilogue) {
    auto &s = static_cast<PlanningShared<Config> &>(prologue<Config>());
    const Gemm &gemm = p.gemm;
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), wg = warp / 4 - 1; /* -1: the producer */
    if (wg < 0) {
        setmaxnreg_dec<Config::PRODUCER_REGISTERS>();
        produce<Config>(gemm, s, warp);
    } else {
        setmaxnreg_inc<Config::CONSUMER_REGISTERS>();
        griddepcontrol_wait();
        if (gemm.tiles.lets_next_start) griddepcontrol_launch_dependents();
        TileReader<typename Config::Queue> reader(s.queue);
        typename Config::Pipeline pipe;
        using Writer = std::conditional_t<Config::FEW_ROWS, SkinnyWriter<Config::BM>, WarpWriter>;
        Writer writer(shared_address(s.staging[wg]), WARPGROUP_BARRIER + wg, warp % 4);
        for (WorkTile tile = reader.next(); tile.expert >= 0; tile = reader.next()) {
            if constexpr (Config::FEW_ROWS) {
                with_few_tokens<8, Config::BM>(tile, [&](auto tokens) {
                    run_codes_tile<Config, tokens.value>(p, s, pipe, tile, wg, epilogue, writer);
                });
            } else {
                switch (tile.num_rows > SUBTILE ? FUSED_MOE_TILE_ROWS : num_tokens_of(tile)) {
                case 8: run_codes_tile<Config, 8>(p, s, pipe, tile, wg, epilogue, writer); break;
                case 32: run_codes_tile<Config, 32>(p, s, pipe, tile, wg, epilogue, writer); break;
                case 64: run_codes_tile<Config, 64>(p, s, pipe, tile, wg, epilogue, writer); break;
                default: run_codes_tile<Config, 128>(p, s, pipe, tile, wg, epilogue, writer);
                }
            }
        }
    }
    if (gemm.tiles.starts_early)
        griddepcontrol_wait(); /* every warp, before it zeroes rows past the last one */
}

/* --- launching ------------------------------------------------------------------------------------------ */

/* The kernels are as many as these: dtype, codes, and scales of the dtype or of another. */
template <typename Fn>
int with_decoder(FusedMoeDtype dtype, const FusedMoeQuantizedWeight &w, Fn fn) {
    return with_half(dtype, [&](auto t) {
        using T = decltype(t);
        switch (w.format) {
        case FUSED_MOE_INT8: return fn(Decoder<T, Code::INT8, false>());
        case FUSED_MOE_INT4:
            return w.scale_dtype == dtype ? fn(Decoder<T, Code::INT4, true>())
                                          : fn(Decoder<T, Code::INT4, false>());
        case FUSED_MOE_MXFP4: /* bf16 has every e8m0 scale */
            return fn(Decoder<T, Code::E2M1, std::is_same_v<T, __nv_bfloat16>>());
        default: return fn(Decoder<T, Code::E4M3, false>());
        }
    });
}

/* Calls fn with a configuration for R rows of E experts, and k. With a long k two CTAs on an SM would only make the
 * last wave of tiles longer. */
template <class Decoder, bool GATHER, typename Fn>
int with_codes_config(int64_t R, int32_t E, int64_t k, Fn fn) {
    if (fused_moe_few_rows(R, E) && k < LONG_K && !schedule_override().no_tails)
        return fn(FewRowsCodesConfig<Decoder, GATHER>());
    return fn(CodesConfig<Decoder, GATHER>());
}

/* Up to so many rows for each expert, reading codes once more for every 128 of them costs less than writing a
 * dequantised weight and reading it (docs/lab/quantised.md). A rule on shapes: the host knows no counts. */
constexpr int64_t MOST_ROWS = 768;

inline bool has_many_rows(int64_t R, int32_t E) {
    int64_t asked = schedule_override().code_rows;
    return R > (asked < 0 ? MOST_ROWS : asked) * E;
}

/* Rows [first_row, first_row + rows) of a weight of codes (E, out, in): a map of their codes, and their scales. */
template <class Decoder>
int codes_of(CUtensorMap *map, Scales *scales, const FusedMoeWeight &w, int32_t E, int64_t first_row,
             int64_t rows) {
    const FusedMoeQuantizedWeight &codes = *w.codes;
    int64_t row_bytes = codes.in / (Decoder::IS_4_BIT ? 2 : 1);
    const uint64_t sizes[] = {(uint64_t)row_bytes, (uint64_t)rows, (uint64_t)E};
    const uint64_t strides[] = {(uint64_t)row_bytes, (uint64_t)(codes.out * row_bytes)};
    const uint32_t box[] = {Decoder::ROW_BYTES, 2 * SUBTILE, 1};
    int shift = ONE_BLOCK;
    if (codes.block_in < codes.in)
        for (shift = 0; 1 << shift < codes.block_in;) shift++;
    *scales = {codes.scale,
               codes.zero,
               codes.scale_dtype,
               (int32_t)first_row,
               (int32_t)(first_row + rows),
               (int32_t)codes.block_out,
               (int32_t)ceil_div(codes.out, codes.block_out),
               (int32_t)ceil_div(codes.in, codes.block_in),
               shift};
    return encode_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3,
                             (const char *)codes.data + first_row * row_bytes, sizes, strides, box,
                             Decoder::IS_4_BIT ? CU_TENSOR_MAP_SWIZZLE_32B : CU_TENSOR_MAP_SWIZZLE_64B);
}

/* Whether the kernels read the codes: rows of multiples of 16 bytes, scales of half a k-tile or more. */
inline bool has_readable_codes(const FusedMoeWeight &w, int32_t E) {
    if (!w.codes || w.codes->transposed) return false;
    const FusedMoeQuantizedWeight &codes = *w.codes;
    bool is_4_bit = codes.format == FUSED_MOE_INT4 || codes.format == FUSED_MOE_MXFP4;
    bool has_one_scale = codes.block_in >= codes.in;
    bool is_power = (codes.block_in & (codes.block_in - 1)) == 0;
    int64_t num_scales = E * ceil_div(codes.out, codes.block_out) * ceil_div(codes.in, codes.block_in);
    return is_aligned(codes.data) && codes.in % (is_4_bit ? 32 : 16) == 0 && num_scales < INT32_MAX &&
           (has_one_scale || (is_power && codes.block_in >= 32));
}

} // namespace sm90
} // namespace fused_moe
