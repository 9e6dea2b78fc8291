/* What a tile of up_gate of quantised weights becomes, and its parameters: of quantized_up_gate.cu, and of
 * quantized_experts.cu. A thread has the gate and the up of one output, so nothing is exchanged before the
 * activation. */
#pragma once

#include "../common/activation.cuh"
#include "quantized_launch.cuh"

namespace fused_moe {
namespace sm90 {

typedef struct {
    Gemm<QuantizedParams> gemm;
    const void *bias, *bias_up; /* [E] x bias_stride: of h's columns; with halves, of gate and up; or NULL */
    int64_t bias_stride;
    const void *addend; /* [R,H]; with HAS_H, as h, and either may be NULL */
    void *h, *a;        /* [R,H]; [R,F] */
    int32_t F, H;
    FusedMoeLayout layout;
    int32_t activation;
    ActConstants<float> constants;
} QuantizedUpGate;

template <class Config, bool HAS_H>
struct QuantizedUpGateEpilogue {
    using T = typename Config::Out;
    const QuantizedUpGate &p;

    /* A warp has 8 outputs of a subtile, 16 without ups. A thread has the gate and the up of one output, or
     * two gates, for two tokens in eight. */
    typedef struct {
        int first;       /* output                                          */
        bool has_second; /* of experts without ups: 8 more                 */
        float bias[2];   /* of the gate and the up, or of the two gates     */
        int64_t start;   /* in a, of the tile's first row and that output   */
    } Outputs;

    template <int TOKENS>
    __device__ void store_swapped(float *d, const WorkTile &tile, int subtile, int warp,
                                  uint32_t staging) const {
        constexpr int EIGHT_BYTES = 32 * sizeof(float4); /* of eight tokens */
        constexpr int WARP_BYTES = Config::STAGING_BYTES / 4, FIT = 8 * (WARP_BYTES / EIGHT_BYTES);
        constexpr int STAGED = TOKENS < FIT ? TOKENS : FIT; /* tokens at a time */
        Outputs out = outputs_of(tile, subtile, warp);
        if (out.first >= p.F) return;
        if constexpr (HAS_H) {
#pragma unroll
            for (int j = 0; j < TOKENS / 8; j++) finish_h(d + 4 * j, out, tile, 8 * j);
            out.bias[0] = out.bias[1] = 0;
        }
        if constexpr (TOKENS == 8) {
            with_act([&](auto act) { store_eight(act, of_eight(d), out, 0, tile.num_rows); });
            return;
        }
        /* Each thread's accumulators go through its own shared memory, so one loop activates them instead of
         * a copy of it for every eight tokens. */
        uint32_t thread_staging = staging + warp * WARP_BYTES + threadIdx.x % 32 * (int)sizeof(float4);
#pragma unroll 1
        for (int first = 0; first < tile.num_rows; first += STAGED) {
#pragma unroll
            for (int j = 0; j < STAGED / 8; j++)
                st_shared_v4(thread_staging + EIGHT_BYTES * j, of_eight(d + 4 * j));
            with_act([&](auto act) {
                int end = min(first + STAGED, tile.num_rows);
                uint32_t address = thread_staging;
#pragma unroll 1
                for (int row = first; row < end; row += 8, address += EIGHT_BYTES)
                    store_eight(act, as_floats(ld_shared_v4(address)), out, row, tile.num_rows);
            });
#pragma unroll
            for (int i = 0; i < (TOKENS - STAGED) / 2; i++) d[i] = d[i + STAGED / 2]; /* the next tokens' */
        }
    }

    /* With many rows all is done in registers: arithmetic takes the time, not fetching code. A line
     * has the outputs of two subtiles; in a tall tile a warpgroup has one of the two, and half a line.
     * Without ups a line has one subtile's outputs. */
    template <int TOKENS, bool TALL>
    __device__ void store_lines(float *d, const WorkTile &tile, int subtile, int row, int warp,
                                const typename Config::Lines &lines) const {
        bool is_ungated = p.layout == FUSED_MOE_UNGATED;
        Outputs out = outputs_of(tile, subtile, warp);
        int line = out.first / SUBTILE * SUBTILE;
        if (line >= p.F || row >= tile.num_rows) return;
        if constexpr (HAS_H) {
            if (p.layout != FUSED_MOE_INTERLEAVED)
                finish_lines<TOKENS>(d, out, tile, row, warp, lines);
            else
#pragma unroll
                for (int j = 0; j < TOKENS / 8; j++) finish_h(d + 4 * j, out, tile, row + 8 * j);
            out.bias[0] = out.bias[1] = 0;
        }
        with_act([&](auto act) { activate<TOKENS>(act, d, out); });
        if (is_ungated) fill<TOKENS>(lines, 2 * warp, d + 3);
        fill<TOKENS>(lines, is_ungated ? 2 * warp + 1 : 4 * (subtile % 2) + warp, d + 2);
        T *a_out = (T *)p.a + (int64_t)(tile.first_row + row) * p.F + line;
        int rows = tile.num_rows - row, columns = p.F - line;
        if constexpr (TALL || HAS_H) /* the next subtile's h takes the line */
            if (!is_ungated)
                return lines.template copy_out<TOKENS, 4>(a_out, p.F, rows, columns, subtile % 2 * 4);
        if (is_ungated || subtile % 2) lines.template copy_out<TOKENS>(a_out, p.F, rows, columns);
    }

    template <int TOKENS>
    __device__ static void fill(const typename Config::Lines &lines, int chunk, const float *words) {
        uint32_t w[TOKENS / 8];
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j++) w[j] = __float_as_uint(words[4 * j]);
        lines.template fill<TOKENS>(chunk, w);
    }

    /* Four accumulators are two tokens of a gate, then two of its up, or of a second gate. Outputs are packed
     * in place: the third accumulator becomes the word of the two outputs; without ups, the second gate's
     * word, and the fourth the first gate's. */
    template <int TOKENS, class Activation>
    __device__ void activate(Activation act, float *d, const Outputs &out) const {
        bool is_gated = p.layout != FUSED_MOE_UNGATED;
#pragma unroll 1
        for (bool is_second = false;; is_second = true) { /* a loop: half the code */
#pragma unroll
            for (int j = 0; j < TOKENS / 8; j++) {
                float *v = d + 4 * j, a[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    if (!is_second) v[i] += out.bias[0], v[2 + i] += out.bias[1];
                    a[i] = act.gate(v[i], p.constants).value;
                    if (is_gated) a[i] *= act.up(v[2 + i], p.constants).value;
                    v[i] = v[2 + i];
                }
                v[3] = v[2];
                v[2] = __uint_as_float(pack<T>(a[0], a[1]));
            }
            if (is_gated || is_second) return;
        }
    }

    /* Makes h, unrounded, of accumulators of eight tokens from `row` on, and stores it where it is kept. v:
     * two tokens of the gate, and of the up or the second gate. Transposed, a lane has two columns of one
     * token; interleaved, it has the gate and the up of one token as they are. */
    __device__ void finish_h(float *v, const Outputs &out, const WorkTile &tile, int row) const {
        add_biases(v, out);
        int lane = threadIdx.x % 32;
        bool is_interleaved = p.layout == FUSED_MOE_INTERLEAVED, is_ungated = p.layout == FUSED_MOE_UNGATED;
        if (is_interleaved) swap(v[1], v[2]); /* now the first two are neighbours in h */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int r = row + (is_interleaved ? lane % 4 * 2 + i : lane / 4);
            int column = out.first + lane % 4 * 2 + i * (is_ungated ? 8 : p.F);
            if (is_interleaved) column = 2 * (out.first + lane / 4);
            bool is_ours = r < tile.num_rows && (i && is_ungated ? out.has_second : out.first < p.F);
            int64_t word = ((int64_t)(tile.first_row + r) * p.H + column) / 2;
            if (p.addend) {
                uint32_t pair = is_ours ? ((const uint32_t *)p.addend)[word] : 0;
                add_pair(v + 2 * i, is_interleaved ? pair : movmatrix_trans(pair));
            }
            if (p.h) {
                uint32_t pair = pack<T>(v[2 * i], v[2 * i + 1]);
                if (!is_interleaved) pair = movmatrix_trans(pair);
                if (is_ours) ((uint32_t *)p.h)[word] = pair;
            }
        }
        if (is_interleaved) swap(v[1], v[2]);
    }

    /* The same of a subtile's rows from `row` on, where gates and ups are not interleaved, through lines: h
     * has eight chunks, two of each warp. The first four are gates and the others ups, if there are ups. All
     * four warps call it. */
    template <int TOKENS>
    __device__ void finish_lines(float *d, const Outputs &out, const WorkTile &tile, int row, int warp,
                                 const typename Config::Lines &lines) const {
        bool is_gated = p.layout != FUSED_MOE_UNGATED;
        int chunk = is_gated ? warp : 2 * warp, next = is_gated ? warp + 4 : chunk + 1;
        int line = out.first - (is_gated ? 8 : 16) * warp; /* the first output */
        int rows = tile.num_rows - row, left = p.F - line;
        int64_t first = (int64_t)(tile.first_row + row) * p.H + line;
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j++) add_biases(d + 4 * j, out);
        auto move = [&](auto *h, auto fn) {
            if (is_gated) {
                lines.template for_each_chunk<TOKENS, 4>(h, p.H, rows, left, 0, fn);
                lines.template for_each_chunk<TOKENS, 4>(h + p.F - 32, p.H, rows, left + 32, 4, fn);
            } else {
                lines.template for_each_chunk<TOKENS, 8>(h, p.H, rows, left, 0, fn);
            }
        };
        if (p.addend) {
            move((const T *)p.addend + first,
                 [](uint32_t address, const T *global) { cp_async(address, global, true); });
            lines.wait();
            add_lines<TOKENS>(d, lines, chunk, next);
            lines.wait();
        }
        if (!p.h) return;
        fill_values<TOKENS>(lines, chunk, d);
        fill_values<TOKENS>(lines, next, d + 2);
        lines.wait();
        move((T *)p.h + first,
             [](uint32_t address, T *global) { st_global_v4(global, ld_shared_v4(address)); });
        lines.wait();
    }

    template <int TOKENS>
    __device__ static void add_lines(float *d, const typename Config::Lines &lines, int chunk, int next) {
#pragma unroll
        for (int first = 0; first < TOKENS / 8; first += 4)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32_t words[4];
                lines.read(8 * first, half ? next : chunk, words);
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (first + j < TOKENS / 8) add_pair(d + 4 * (first + j) + 2 * half, words[j]);
            }
    }

    template <int TOKENS>
    __device__ static void fill_values(const typename Config::Lines &lines, int chunk, const float *values) {
        uint32_t w[TOKENS / 8];
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j++) w[j] = pack<T>(values[4 * j], values[4 * j + 1]);
        lines.template fill<TOKENS>(chunk, w);
    }

    __device__ static void add_biases(float *v, const Outputs &out) {
        v[0] += out.bias[0], v[1] += out.bias[0], v[2] += out.bias[1], v[3] += out.bias[1];
    }

    __device__ static void add_pair(float *v, uint32_t pair) {
        float2 values = floats_of(pair_of<T>(pair));
        v[0] += values.x, v[1] += values.y;
    }

    __device__ static void swap(float &a, float &b) {
        float before = a;
        a = b, b = before;
    }

    /* silu, the usual one, needs no jump table, which would be read from memory. */
    template <typename Fn>
    __device__ void with_act(Fn fn) const {
        if (p.activation == FUSED_MOE_ACT_silu)
            fn(Act<FUSED_MOE_ACT_silu, T>());
        else
            with_activation<T>(p.activation, fn);
    }

    __device__ static float4 as_floats(uint4 v) {
        return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                           __uint_as_float(v.w));
    }
    __device__ static float4 of_eight(const float *d) { return make_float4(d[0], d[1], d[2], d[3]); }

    __device__ Outputs outputs_of(const WorkTile &tile, int subtile, int warp) const {
        Outputs out = {tile.first_column + SUBTILE * subtile + 16 * warp};
        bool is_ungated = p.layout == FUSED_MOE_UNGATED;
        if (!is_ungated)
            out.first = (tile.first_column >> !p.gemm.gate_up) + SUBTILE / 2 * subtile + 8 * warp;
        out.has_second = is_ungated && out.first + 8 < p.F;
        out.start = (int64_t)tile.first_row * p.F + out.first;
        if (!p.bias && !p.bias_up) return out;
        int column = out.first + threadIdx.x % 32 / 4;
        if (column >= p.F) return out;
        const T *of_gates = (const T *)p.bias + tile.expert * p.bias_stride;
        const T *of_ups = (const T *)p.bias_up + tile.expert * p.bias_stride;
        bool is_interleaved = p.layout == FUSED_MOE_INTERLEAVED;
        if (p.bias) out.bias[0] = to_accum(of_gates[is_interleaved ? 2 * column : column]);
        if (p.bias && (is_interleaved || out.has_second))
            out.bias[1] = to_accum(of_gates[is_interleaved ? 2 * column + 1 : column + 8]);
        if (p.bias_up) out.bias[1] = to_accum(of_ups[column]);
        return out;
    }

    /* Stores eight tokens from `row` on. v: two tokens of the gate, and of the up or the second gate. */
    template <class Activation>
    __device__ void store_eight(Activation act, float4 v, const Outputs &out, int row, int num_rows) const {
        bool is_gated = p.layout != FUSED_MOE_UNGATED;
        int lane = threadIdx.x % 32;
        T *a_out = (T *)p.a + out.start + (int64_t)(row + lane / 4) * p.F + lane % 4 * 2;
        float gate[2] = {v.x + out.bias[0], v.y + out.bias[0]};
        float other[2] = {v.z + out.bias[1], v.w + out.bias[1]};
#pragma unroll 1
        for (bool is_second = false;; is_second = true, a_out += 8) { /* a loop: fetching code takes time */
            float a[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                a[i] = act.gate(gate[i], p.constants).value;
                if (is_gated) a[i] *= act.up(other[i], p.constants).value;
                gate[i] = other[i];
            }
            /* Transposed, a lane has two outputs of one token. */
            uint32_t pair = movmatrix_trans(pack<T>(a[0], a[1]));
            if (row + lane / 4 < num_rows) *(uint32_t *)a_out = pair;
            if (is_second || !out.has_second) return;
        }
    }
};

/* --- host ----------------------------------------------------------------------------------------------- */

/* All but what PDL needs. */
template <class Config>
int set_up_gate(QuantizedUpGate *q, const FusedMoeUpGate &p) {
    using T = typename Config::Out;
    bool is_gate_up = p.layout == FUSED_MOE_SEPARATE || p.layout == FUSED_MOE_HALVES;
    bool halves = p.layout == FUSED_MOE_HALVES;
    int32_t E = p.row_map.E, F = (int32_t)p.F, H = p.layout == FUSED_MOE_UNGATED ? F : 2 * F;
    int32_t b_rows = is_gate_up ? F : H; /* of a map of B */
    q->addend = p.addend;
    q->h = p.h;
    q->a = p.a;
    q->F = F;
    q->H = H;
    q->layout = p.layout;
    q->activation = p.activation.kind;
    q->constants = act_constants<float>(p.activation);
    q->bias = p.b1;
    q->bias_up = !halves ? p.b3 : p.b1 ? (const T *)p.b1 + F : nullptr;
    q->bias_stride = halves ? H : b_rows;

    auto &gemm = q->gemm;
    set_rows(gemm, p, Config::COLUMNS, is_gate_up, b_rows, Config::BN);
    gemm.tiles.has_tall = Config::HAS_TALL;
    gemm.weight.is_interleaved = p.layout == FUSED_MOE_INTERLEAVED;
    int status = set_weight<Config>(gemm.weight, 0, *p.w1.quantized, E, 0, b_rows);
    if (status != FUSED_MOE_OK || !is_gate_up) return status;
    return set_weight<Config>(gemm.weight, 1, halves ? *p.w1.quantized : *p.w3.quantized, E, halves ? F : 0,
                              F);
}

} // namespace sm90
} // namespace fused_moe
