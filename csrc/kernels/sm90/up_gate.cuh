/* What a tile of up_gate becomes, and its parameters: of up_gate.cu, and of experts.cu.
 *
 * A tile has 128 hidden columns, 256 columns of h (64 and 128 where experts have few rows).
 *   GATE_UP      h is gate | up: B is rows of the gate's weight and the same rows of the up's, from two maps
 *                (w1 and w3, or the halves of a packed weight). Gate and up are 128 columns apart, which is
 *                64 elements apart in the registers of one thread.
 *   INTERLEAVED  B's rows are consecutive: gate and up are neighbouring columns, in one thread too
 *   UNGATED      a tile has 256 hidden columns
 * Nothing is copied: h and a go from registers through the staging buffer to TMA stores, by ragged maps;
 * swapped tiles go by ordinary stores. */
#pragma once

#include "../common/activation.cuh"
#include "gemm.cuh"
#include "launch.cuh"

namespace fused_moe {
namespace sm90 {

enum Columns { GATE_UP, INTERLEAVED, UNGATED };

typedef struct {
    DenseGemm gemm;
    const void *bias,
        *bias_up; /* [E] x bias_stride: of h's columns, with GATE_UP of the two halves; or NULL */
    int64_t bias_stride;
    const void *addend; /* [R,H] or NULL */
    void *h, *a;        /* [R,H], may be NULL; [R,F] */
    int32_t F, H, activation;
    ActConstants<float> constants;
    CUtensorMap a_map, h_map; /* ragged; with GATE_UP h's has two halves */
} UpGate;

/* Packs 64 columns. A thread holds columns 4 j + lane % 4 (of two rows: a[2 j], a[2 j + 1]); a writer takes
 * columns 2 (lane % 4) and 2 (lane % 4) + 1 of every eight. */
template <typename T>
__device__ inline void pack_spread_subtile(uint32_t (&words)[16], const float (&a)[32]) {
    int quad = threadIdx.x % 32 / 4 * 4, t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < 16; m++) { /* chunk m / 2 of eight columns, row m % 2 of the two */
        const float *v = &a[m / 2 * 4 + m % 2];
        uint32_t packed = pack<T>(v[0], v[2]);
        uint32_t low = __shfl_sync(~0u, packed, quad + 2 * t % 4);
        uint32_t high = __shfl_sync(~0u, packed, quad + (2 * t + 1) % 4);
        words[m] = __byte_perm(low, high, t < 2 ? 0x5410 : 0x7632);
    }
}

template <typename T, typename Bias, Columns columns, bool HAS_ADDEND = false>
struct UpGateEpilogue {
    using Writer = WarpWriter;
    static constexpr int SUBTILES = 0; /* held for the next tile: none */
    static constexpr bool HALF_N = false;
    const UpGate &p;

    __device__ const Bias *bias_of(const void *bias, const WorkTile &tile) const {
        return bias ? (const Bias *)bias + tile.expert * p.bias_stride : nullptr;
    }

    /* Adds the addend to 64 columns from `column` of h on, of `left` that exist, of a warp's rows from `row`
     * on. */
    __device__ void add_addend(float *d, int row, int rows, int column, int left) const {
        if constexpr (HAS_ADDEND)
            add_rows(d, (const T *)p.addend + (int64_t)row * p.H + column, p.H, rows, left);
    }

    template <int TOKENS>
    __device__ void add_addend_swapped(float *d, int64_t row, int rows, int column, int left) const {
        if constexpr (HAS_ADDEND)
            add_rows_swapped<TOKENS>(d, (const T *)p.addend + row * p.H + column, p.H, rows, left);
    }

    __device__ void hold(float (&d)[128], const WorkTile &tile, int wg, Writer &writer) {
        const Bias *bias = bias_of(p.bias, tile), *bias_up = bias_of(p.bias_up, tile);
        uint32_t words[16];
        float a[32];
        /* the warp's rows in the tile */
        int offset = SUBTILE * wg + WarpWriter::ROWS * (threadIdx.x / 32 % 4);
        int rows = min(WarpWriter::ROWS, tile.num_rows - offset), end = tile.first_row + offset + rows;
        auto store_a = [&](uint32_t subtile, int column) {
            if (rows > 0) cp_async_bulk_tensor_store(&p.a_map, subtile, column, WarpWriter::ROWS - rows, end);
        };
        auto store_h = [&](uint32_t subtile, int column) {
            if (rows > 0) cp_async_bulk_tensor_store(&p.h_map, subtile, column, WarpWriter::ROWS - rows, end);
        };
        auto store_both_halves = [&](uint32_t subtile, int column) {
            if (rows > 0)
                cp_async_bulk_tensor_store(&p.h_map, subtile, column, WarpWriter::ROWS - rows, end, 0);
        };
        if constexpr (columns == GATE_UP) {
            /* TMA drops subtiles past F */
            uint32_t up_words[16], a_words[2][16];
            int first = tile.first_column;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float *gate = &d[32 * i], *up = gate + 64;
                int column = first + i * SUBTILE;
                if (bias) add_bias(gate, bias, column, p.F);
                if (bias_up) add_bias(up, bias_up, column, p.F);
                add_addend(gate, tile.first_row + offset, rows, column, p.F - column);
                add_addend(up, tile.first_row + offset, rows, p.F + column, p.F - column);
                if (p.h) {
                    pack_subtile<T>(words, gate);
                    pack_subtile<T>(up_words, up);
                    writer.store_two(words, up_words,
                                     [&](uint32_t gates, uint32_t) { store_both_halves(gates, column); });
                }
                activate<true, 1>(a, gate, up);
                pack_subtile<T>(a_words[i], a);
            }
            writer.store_two(a_words[0], a_words[1], [&](uint32_t subtile, uint32_t next) {
                store_a(subtile, first);
                store_a(next, first + SUBTILE);
            });
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int column = tile.first_column + i * SUBTILE;
                if (bias) add_bias(&d[32 * i], bias, column, p.H);
                add_addend(&d[32 * i], tile.first_row + offset, rows, column, p.H - column);
                if (p.h && column < p.H) {
                    pack_subtile<T>(words, &d[32 * i]);
                    writer.store(words, [&](uint32_t subtile) { store_h(subtile, column); });
                }
                if (columns == UNGATED && column < p.H) {
                    activate<false, 1>(a, &d[32 * i], nullptr);
                    pack_subtile<T>(words, a);
                    writer.store(words, [&](uint32_t subtile) { store_a(subtile, column); });
                }
                if (columns == INTERLEAVED && i % 2 &&
                    column - SUBTILE < p.H) { /* two subtiles of h: one of a */
                    activate<true, 2>(a, &d[32 * (i - 1)], &d[32 * (i - 1)] + 1);
                    pack_spread_subtile<T>(words, a);
                    writer.store(words, [&](uint32_t subtile) { store_a(subtile, (column - SUBTILE) / 2); });
                }
            }
        }
    }

    template <int i>
    __device__ void store_subtile(Writer &) {}
    __device__ void flush(Writer &) {}

    template <int TOKENS, int SUBTILES, class AnyWriter>
    __device__ void store_swapped(float *d, const WorkTile &tile, int wg, int warp, AnyWriter &writer) {
        static_assert(SUBTILES == 2, "a gate's and its up's");
        constexpr int PART = TOKENS < 32 ? TOKENS : 32; /* rows at a time: registers are few */
#pragma unroll
        for (int first = 0; first < TOKENS; first += PART)
            if (first < tile.num_rows)
                store_swapped_part<PART>(d + first / 2, d + (TOKENS + first) / 2, tile, first, wg, warp,
                                         writer);
    }

    /* Rows from `first` on of both subtiles. */
    template <int TOKENS, class AnyWriter>
    __device__ void store_swapped_part(float *d, float *second, const WorkTile &tile, int first, int wg,
                                       int warp, AnyWriter &writer) {
        const Bias *bias = bias_of(p.bias, tile), *bias_up = bias_of(p.bias_up, tile);
        int64_t row = tile.first_row + first;
        T *h = (T *)p.h + row * p.H, *out = (T *)p.a + row * p.F;
        int rows = tile.num_rows - first;
        float a[TOKENS / 2];
        if constexpr (columns == GATE_UP) { /* gates, then ups */
            int column = tile.first_column + wg * SUBTILE + 16 * warp, left = p.F - column;
            if (left <= 0) return;
            if (bias) add_bias_swapped<TOKENS>(d, bias, column, p.F);
            if (bias_up) add_bias_swapped<TOKENS>(second, bias_up, column, p.F);
            add_addend_swapped<TOKENS>(d, row, rows, column, left);
            add_addend_swapped<TOKENS>(second, row, rows, p.F + column, left);
            if (p.h) {
                writer.template store_swapped<TOKENS>(d, h + column, p.H, rows, left);
                writer.template store_swapped<TOKENS>(second, h + p.F + column, p.H, rows, left);
            }
            activate<true, 1>(a, d, second);
            writer.template store_swapped<TOKENS>(a, out + column, p.F, rows, left);
        } else {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float *outputs = i ? second : d;
                int column = tile.first_column + (2 * wg + i) * SUBTILE + 16 * warp, left = p.H - column;
                if (left <= 0) return;
                if (bias) add_bias_swapped<TOKENS>(outputs, bias, column, p.H);
                add_addend_swapped<TOKENS>(outputs, row, rows, column, left);
                if (p.h) writer.template store_swapped<TOKENS>(outputs, h + column, p.H, rows, left);
                if constexpr (columns == UNGATED) {
                    activate<false, 1>(a, outputs, nullptr);
                    writer.template store_swapped<TOKENS>(a, out + column, p.F, rows, left);
                } else { /* a gate's up is the next column, four lanes on */
#pragma unroll
                    for (int n = 0; n < TOKENS / 2; n++) a[n] = __shfl_down_sync(~0u, outputs[n], 4);
                    activate<true, 1>(a, outputs, a);
                    writer.template store_swapped_pairs<TOKENS>(a, out + column / 2, p.F, rows, left / 2);
                }
            }
        }
    }

    /* a = act(gate) up, or act(gate); elements of both are `stride` apart. Either may be a. */
    template <bool GATED, int stride, int count>
    __device__ void activate(float (&a)[count], const float *gate, const float *up) const {
        with_activation<T>(p.activation, [&](auto act) {
#pragma unroll
            for (int i = 0; i < count; i++) {
                float v = act.gate(gate[stride * i], p.constants).value;
                a[i] = GATED ? v * act.up(up[stride * i], p.constants).value : v;
            }
        });
    }
};

/* --- host ----------------------------------------------------------------------------------------------- */

/* All but the maps of h and a, and what PDL needs. */
template <class Config, Columns columns>
int set_up_gate(UpGate *q, const FusedMoeUpGate &p) {
    using Operand = typename Config::Operand;
    const FusedMoeRowMap &rows = p.row_map;
    const FusedMoeWeight &w1 = p.w1;
    bool halves = p.layout == FUSED_MOE_HALVES;
    int32_t F = (int32_t)p.F, H = columns == UNGATED ? F : 2 * F;
    int32_t b_rows = columns == GATE_UP ? F : H; /* of a map of B */
    q->addend = p.addend;
    q->h = p.h;
    q->a = p.a;
    q->F = F;
    q->H = H;
    q->activation = p.activation.kind;
    q->constants = act_constants<float>(p.activation);
    q->bias = p.b1;
    q->bias_up = !halves ? p.b3 : p.b1 ? (const typename Config::Bias *)p.b1 + F : nullptr;
    q->bias_stride = halves ? H : b_rows;

    DenseGemm &gemm = q->gemm;
    set_rows(gemm, p, K_TILE<Operand>, columns == GATE_UP, b_rows, Config::BN);
    if (columns == UNGATED && fused_moe_takes_turns(p.F, p.D)) gemm.tiles.assignment = FUSED_MOE_IN_TURN;
    FusedMoeWeight up = halves ? w1 : p.w3;
    if (halves) up.data = (Operand *)w1.data + F * w1.stride_out;
    int status = weight_map<Operand>(&gemm.weight.map[0], w1, Config::B_MAJOR, w1.stride_out, w1.stride_in,
                                     rows.E, b_rows, p.D, Config::BN / 2);
    if (status == FUSED_MOE_OK && columns == GATE_UP)
        status = weight_map<Operand>(&gemm.weight.map[1], up, Config::B_MAJOR, up.stride_out, up.stride_in,
                                     rows.E, b_rows, p.D, Config::BN / 2);
    return status;
}

/* Whether tiles of few rows have kernels of these columns. The model whose gates and ups are interleaved,
 * gpt-oss, runs in bf16: in fp16 they have full tiles alone. */
constexpr bool has_few_rows_kernel(bool is_bf16, Columns columns) {
    return is_bf16 || columns != INTERLEAVED;
}

template <class Config, Columns columns>
constexpr bool has_kernel() {
    constexpr bool IS_BF16 = std::is_same_v<typename Config::Operand, __nv_bfloat16>;
    return !Config::ALL_SWAPPED || has_few_rows_kernel(IS_BF16, columns);
}

/* Calls fn with a layout's columns, a constant. */
template <typename Fn>
int with_columns(FusedMoeLayout layout, Fn fn) {
    if (layout == FUSED_MOE_UNGATED) return fn(std::integral_constant<Columns, UNGATED>());
    if (layout == FUSED_MOE_INTERLEAVED) return fn(std::integral_constant<Columns, INTERLEAVED>());
    return fn(std::integral_constant<Columns, GATE_UP>());
}

} // namespace sm90
} // namespace fused_moe
