/* Both sides of experts of few rows in one launch, with quantised weights: experts.cuh's kernel, with the
 * tiles and epilogues of quantized_up_gate.cu and quantized_mm.cu. */
#include "experts.cuh"
#include "quantized_mm.cuh"
#include "quantized_up_gate.cuh"

namespace fused_moe {
namespace sm90 {
namespace {

/* --- consumers ------------------------------------------------------------------------------------------ */

template <class Dequantizer>
struct TogetherConfig : QuantizedConfig<Dequantizer, true, Height::FEW> {
    using Down = QuantizedConfig<Dequantizer, true, Height::FEW>;
    using Queue = ExpertsQueue<Down>;
};

template <class Dequantizer>
struct Quantized {
    using Config = TogetherConfig<Dequantizer>;
    using Up = QuantizedUpGate;
    using Down = QuantizedMM;
    static constexpr int WARP_SUBTILES = Config::SUBTILES;

    __device__ static void load_up(const Up &up, uint32_t b, uint32_t full, int stage,
                                   const ExpertsTile &tile) {
        Config::Weight::load(up.gemm, b, full, 0, stage, tile);
    }

    __device__ static bool has_columns(const ExpertsTile &tile, int wg) {
        return !tile.half_n || WARP_SUBTILES * wg < Config::TILES / 2;
    }

    class Compute {
        const Experts<Quantized> &p;
        ExpertsShared<Config> &s;
        const int wg;
        typename Config::Pipeline pipe;

        template <bool IS_UP_GATE, class Gemm, class Epilogue>
        __device__ void run(const Gemm &gemm, const ExpertsTile &tile, Epilogue epilogue) {
            with_tokens<Config>(tile.num_rows, [&](auto tokens) {
                run_tile_fragments<Config, tokens.value, IS_UP_GATE>(gemm, s, pipe, tile, wg, epilogue);
            });
        }

      public:
        __device__ Compute(const Experts<Quantized> &p, ExpertsShared<Config> &s, int wg, int)
            : p(p), s(s), wg(wg) {}

        __device__ void up(const ExpertsTile &tile) {
            run<true>(p.up.gemm, tile, QuantizedUpGateEpilogue<Config, false>{p.up});
        }
        __device__ void down(const ExpertsTile &tile) {
            if (!has_columns(tile, wg)) return skip_stages<Config>(p.down.gemm, s, pipe);
            run<false>(p.down.gemm, tile, QuantizedMMEpilogue<Config>{p.down});
        }
    };
};

/* --- launcher ------------------------------------------------------------------------------------------- */

template <class Kind>
int launch(const FusedMoeExperts &p, void *stream) {
    using Config = typename Kind::Config;
    Experts<Kind> q = {};
    int status = set_up_gate<Config>(&q.up, p.up);
    if (status == FUSED_MOE_OK) status = set_grouped_mm<Config>(&q.down, p.down);
    if (status != FUSED_MOE_OK) return status;
    const FusedMoeGroupedMM &d = p.down;
    int32_t columns = fused_moe_quantized_down_columns(d.R, d.E, d.M, current_device().num_sms);
    return launch_experts(q, p, columns, stream);
}

int run(const FusedMoeExperts &p, void *stream) {
    return with_dequantizer(p.up.dtype, *p.up.w1.quantized, [&](auto dequantizer) {
        using Dequantizer = decltype(dequantizer);
        if constexpr (Dequantizer::OTHER_SCALES)
            return (int)FUSED_MOE_UNSUPPORTED_DTYPE; /* reason said no */
        else
            return launch<Quantized<Dequantizer>>(p, stream);
    });
}

FusedMoeReason reason(const FusedMoeExperts &p) {
    FusedMoeReason why = quantized_up_gate.reason(p.up);
    if (why == FUSED_MOE_RUNS) why = quantized_mm.reason(p.down);
    if (why == FUSED_MOE_RUNS) why = together_reason(p, SUBTILE / 2);
    if (why != FUSED_MOE_RUNS) return why;
    const FusedMoeGroupedMM &d = p.down;
    if (!fused_moe_quantized_together(d.R, d.E, d.M, d.N[0], current_device().num_sms))
        return FUSED_MOE_MANY_ROWS;
    /* one dequantizer reads both: but for their groups in number the weights are alike */
    const FusedMoeQuantizedWeight &up = *p.up.w1.quantized, &down = *p.down.b[0].quantized;
    FusedMoeFormatFacts a = fused_moe_format(up.format), b = fused_moe_format(down.format);
    if (has_other_scales(p.up.dtype, up)) return FUSED_MOE_OTHER_DTYPE;
    bool are_alike = a.code == b.code && up.scale_dtype == down.scale_dtype &&
                     has_small_groups(up) == has_small_groups(down);
    return are_alike ? FUSED_MOE_RUNS : FUSED_MOE_STRIDES; /* the caller asks whether, not why */
}

} // namespace

const Kernel<FusedMoeExperts> quantized_experts = {reason, experts_workspace, run};

} // namespace sm90
} // namespace fused_moe
