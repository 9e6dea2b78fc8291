/* up_gate of 8 bits on Hopper: h = (x[row_token] w1^T | w3^T) scales + b, a = act(gate) up. h is stored for
 * backward alone.
 *
 * In blocks a tile has 128 columns of a, or two times 128 without ups, and a row of them shares a scale:
 * its peak is found in the epilogue, and a goes out as e4m3. By rows a scale is for all of F, so a is
 * stored in 16 bits, and quantize_rows.cu makes codes of it.
 *
 * B's rows are gates, then ups, from two maps; where the two are interleaved in memory, each map has every
 * second row. */
#include "../common/activation.cuh"
#include "eight_bit.cuh"

namespace fused_moe {
namespace sm90 {
namespace {

/* --- kernel --------------------------------------------------------------------------------------------- */

template <class WeightParams>
struct UpGate {
    Gemm<WeightParams> gemm;
    const float *x_scale; /* [T] */
    OfColumns scale;      /* by rows */
    OfColumns bias;
    void *a;        /* [R,F] */
    void *h;        /* [R,H], where it is kept */
    float *a_scale; /* in blocks [ceil(F/128),R] */
    int64_t R;
    int32_t F, activation;
    bool power_of_two, is_f16;
    ActConstants<float> constants;
    CUtensorMap a_map, h_map; /* ragged */
};

template <class Config, bool GATED>
struct Epilogue {
    using Params = UpGate<typename Config::Weight::Params>;
    static constexpr bool IN_BLOCKS = Config::IN_BLOCKS;
    using Writer = std::conditional_t<Config::KEEPS_H, WarpWholeWriter,
                                      std::conditional_t<IN_BLOCKS, SingleWarpWriter, WarpWriter>>;
    const Params &p;

    __device__ int num_columns() const { return p.F; }
    __device__ const float *row_scales() const { return p.x_scale; }
    __device__ void flush(Writer &) {}
    template <int i>
    __device__ void store_subtile(Writer &) {}

    /* --- one output from its sums */

    /* What a column of gate (part 0) or up is multiplied by, beside its row's scale, and its bias. */
    typedef struct {
        float scale, bias;
    } OfColumn;

    __device__ OfColumn of_column(int part, int expert, int n) const {
        OfColumn c = {1, 0};
        if (n >= p.F) return c;
        if constexpr (!IN_BLOCKS) c.scale = scale_at(p.scale, part, expert, n);
        if (p.bias.data[part]) c.bias = bias_at(p.bias, part, expert, n, p.is_f16);
        return c;
    }

    /* The arithmetic of finish_subtile. */
    template <typename Acc>
    __device__ float finish(Acc sum, float of_row, const OfColumn &c) const {
        return __fadd_rn(__fmul_rn((float)sum, IN_BLOCKS ? of_row : of_row * c.scale), c.bias);
    }

    template <class Act>
    __device__ float activate(Act act, float gate, float up) const {
        float v = act.gate(gate, p.constants).value;
        return GATED ? v * act.up(up, p.constants).value : v;
    }

    /* --- full tiles: a thread has columns 8 j + 2 (lane % 4) and one more of two rows */

    template <typename Acc>
    __device__ void hold(Acc (&d)[128], const WorkTile &tile, int wg, const float (&of_row)[2],
                         uint32_t of_columns, Writer &writer) {
        int offset =
            SUBTILE * wg + WarpWriter::ROWS * (threadIdx.x / 32 % 4); /* the warp's rows in the tile */
        int rows = min(WarpWriter::ROWS, tile.num_rows - offset), end = tile.first_row + offset + rows;
        auto store = [&](uint32_t subtile, int column) {
            if (rows > 0) cp_async_bulk_tensor_store(&p.a_map, subtile, column, WarpWriter::ROWS - rows, end);
        };
#pragma unroll
        for (int part = 0; part < (GATED ? 1 : 2); part++) { /* 128 columns of a */
            constexpr int SUBTILES = GATED ? 4 : 2; /* of h: gates, gates, ups, ups, or gates alone */
            int first = tile.first_column + 128 * part;
            if (first >= p.F) break;
            float a[32 * SUBTILES];
            if (part) /* nothing of this part is computed earlier, which would take registers */
#pragma unroll
                for (int i = 64; i < 128; i++) pin(d[i]);
#pragma unroll
            for (int i = 0; i < SUBTILES; i++)
                finish_subtile<Config::SCALES>(
                    a + 32 * i, d + 64 * part + 32 * i, of_row, of_columns + 4 * (128 * part + SUBTILE * i),
                    p.bias, GATED ? i / 2 : 0, tile.expert, first + SUBTILE * (i % 2), p.F, p.is_f16);
            if constexpr (Config::KEEPS_H) {
                const int first_buffer = part * SUBTILES;
                if (part == 0) writer.wait();
#pragma unroll
                for (int i = 0; i < SUBTILES; i++) {
                    uint32_t words[16];
                    pack_subtile<__nv_bfloat16>(words, a + 32 * i);
                    writer.fill(first_buffer + i, words);
                }
                writer.store(first_buffer, first_buffer + SUBTILES, [&](uint32_t subtile, int buffer) {
                    const int i = buffer - first_buffer;
                    const int h_column = (i / 2) * p.F + first + SUBTILE * (i % 2);
                    if (rows > 0)
                        cp_async_bulk_tensor_store(&p.h_map, subtile, h_column, WarpWriter::ROWS - rows, end);
                });
            }
            with_activation<__nv_bfloat16>(p.activation, [&](auto act) {
#pragma unroll
                for (int i = 0; i < 64; i++)
                    a[i] = activate(act, a[i], GATED ? a[64 % (32 * SUBTILES) + i] : 0.0f);
            });
            if constexpr (IN_BLOCKS) {
                float inverse[2];
                quantise_rows(inverse, a, first / FUSED_MOE_BLOCK, rows, end);
                writer.store_filled([&](uint32_t buffer) { fill_codes(buffer, a, inverse); },
                                    [&](uint32_t buffer) { store(buffer, first); });
            } else {
                uint32_t words[2][16];
                auto pack_both = [&](auto t) {
                    pack_subtile<decltype(t)>(words[0], a);
                    pack_subtile<decltype(t)>(words[1], a + 32);
                };
                p.is_f16 ? pack_both(__half()) : pack_both(__nv_bfloat16());
                writer.store_two(words[0], words[1], [&](uint32_t subtile, uint32_t next) {
                    store(subtile, first);
                    store(next, first + SUBTILE);
                });
            }
        }
    }

    /* The scales of 128 columns of the warp's two rows of this thread, and their inverses. */
    __device__ void quantise_rows(float (&inverse)[2], const float *a, int block, int rows, int end) const {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int row = 0; row < 2; row++) {
            float peak = 0;
#pragma unroll
            for (int i = 0; i < 32; i++) peak = max_nan_f32(peak, fabsf(a[i / 2 * 4 + 2 * row + i % 2]));
            peak = max_nan_f32(peak, __shfl_xor_sync(~0u, peak, 1));
            peak = max_nan_f32(peak, __shfl_xor_sync(~0u, peak, 2));
            float scale = fused_moe_scale_of(fused_moe_magnitude(peak),
                                             fused_moe_largest_code(FUSED_MOE_CODE_E4M3), p.power_of_two);
            inverse[row] = 1 / scale;
            int r = lane / 4 + 8 * row;
            if (lane % 4 == 0 && r < rows) p.a_scale[block * p.R + end - rows + r] = scale;
        }
    }

    /* 16 rows of 128 codes, swizzled as TMA reads them. */
    __device__ static void fill_codes(uint32_t buffer, const float *a, const float (&inverse)[2]) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < 16; j++)
#pragma unroll
            for (int row = 0; row < 2; row++) {
                const float *v = &a[4 * j + 2 * row];
                st_shared_u16(swizzled(buffer, lane / 4 + 8 * row, j / 2) + j % 2 * 8 + lane % 4 * 2,
                              cvt_e4m3x2_f32(v[0] * inverse[row], v[1] * inverse[row]));
            }
    }

    /* --- swapped tiles: a thread has columns lane / 4 and that + 8 of a warp's 16, of two rows in eight */

    template <int TOKENS, typename Acc, typename Skinny>
    __device__ void store_swapped(Acc *d, const WorkTile &tile, int wg, int warp,
                                  const RowScales<Config> &scales, Skinny &writer, uint8_t *staging) {
        constexpr int PART = TOKENS < 32 ? TOKENS : 32; /* rows at a time: registers are few */
#pragma unroll
        for (int first = 0; first < TOKENS; first += PART)
            if (first < tile.num_rows)
                store_swapped_part<PART>(d + first / 2, d + (TOKENS + first) / 2, tile, first, wg, warp,
                                         scales.scale + first / 4, writer, staging);
    }

    /* Rows from first_row of the tile on, of both subtiles. */
    template <int TOKENS, typename Acc, typename Skinny>
    __device__ void store_swapped_part(const Acc *d, const Acc *second, const WorkTile &tile, int first_row,
                                       int wg, int warp, const float *of_rows, Skinny &writer,
                                       uint8_t *staging) {
        int64_t row = tile.first_row + first_row;
        int rows = min(tile.num_rows - first_row, TOKENS);
#pragma unroll
        for (int part = 0; part < (GATED ? 1 : 2); part++) {
            /* the columns of a; without ups those of the second subtile are CONSUMERS subtiles on */
            int first = tile.first_column + (wg + part * Config::CONSUMERS) * SUBTILE + 16 * warp;
            float a[TOKENS / 2];
            with_activation<__nv_bfloat16>(p.activation, [&](auto act) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int n = first + 8 * half + threadIdx.x % 32 / 4;
                    OfColumn gate = of_column(0, tile.expert, n), up = {1, 0};
                    if (GATED) up = of_column(1, tile.expert, n);
#pragma unroll
                    for (int j = 0; j < TOKENS / 4; j++) {
                        int at = j / 2 * 4 + 2 * half + j % 2;
                        a[at] = activate(act, finish(part ? second[at] : d[at], of_rows[j], gate),
                                         GATED ? finish(second[at], of_rows[j], up) : 0.0f);
                    }
                }
            });
            if constexpr (IN_BLOCKS) {
                store_codes<TOKENS>(a, row, rows, tile.first_column + 128 * part, wg, warp, staging);
            } else if (first < p.F) {
                int64_t start = row * p.F + first;
                int left = p.F - first;
                if (p.is_f16)
                    writer.template store_swapped<TOKENS>(a, (__half *)p.a + start, p.F, rows, left);
                else
                    writer.template store_swapped<TOKENS>(a, (__nv_bfloat16 *)p.a + start, p.F, rows, left);
            }
        }
    }

    /* The codes of 128 columns from `column` on, of which each of eight warps has 16. */
    template <int TOKENS>
    __device__ void store_codes(const float (&a)[TOKENS / 2], int64_t first_row, int rows, int column, int wg,
                                int warp, uint8_t *staging) const {
        constexpr int WARPS = 8, PITCH = 128 + 16; /* a row of codes; rows are in other banks */
        auto peaks = (uint32_t (*)[Config::BM])staging;
        auto codes = (uint8_t (*)[PITCH])(staging + sizeof(uint32_t[WARPS][Config::BM]));
        static_assert(WARPS * Config::BM * 4 + Config::BM * PITCH <=
                          Config::CONSUMERS * Config::STAGING_BYTES ||
                      Config::CONSUMERS == 1);
        int lane = threadIdx.x % 32, thread = threadIdx.x - 128;
        auto sync = [] { barrier_sync(CONSUMERS_BARRIER, 128 * Config::CONSUMERS); };
#pragma unroll
        for (int j = 0; j < TOKENS / 4; j++) {
            uint32_t peak = 0;
#pragma unroll
            for (int half = 0; half < 2; half++)
                peak = max(peak, fused_moe_magnitude(a[j / 2 * 4 + 2 * half + j % 2]));
#pragma unroll
            for (int other = 4; other < 32; other *= 2) peak = max(peak, __shfl_xor_sync(~0u, peak, other));
            if (lane < 4) peaks[4 * wg + warp][RowScales<Config>::tile_row(wg, j)] = peak;
        }
        sync();
#pragma unroll
        for (int j = 0; j < TOKENS / 4; j++) {
            int row = RowScales<Config>::tile_row(wg, j);
            uint32_t peak = 0;
#pragma unroll
            for (int i = 0; i < WARPS; i++) peak = max(peak, peaks[i][row]);
            float scale =
                      fused_moe_scale_of(peak, fused_moe_largest_code(FUSED_MOE_CODE_E4M3), p.power_of_two),
                  inverse = 1 / scale;
            if (wg == 0 && warp == 0 && lane < 4 && row < rows && column < p.F)
                p.a_scale[column / FUSED_MOE_BLOCK * p.R + first_row + row] = scale;
            int at = j / 2 * 4 + j % 2;
            uint16_t pair = cvt_e4m3x2_f32(a[at] * inverse, a[at + 2] * inverse);
            uint8_t *code = &codes[row][SUBTILE * wg + 16 * warp + lane / 4];
            code[0] = pair & 255, code[8] = pair >> 8;
        }
        sync();
        uint8_t *out = (uint8_t *)p.a + first_row * p.F + column;
        for (int i = thread; i < 8 * rows; i += 128 * Config::CONSUMERS) {
            int row = i / 8, at = i % 8 * 16;
            if (column + at < p.F) st_global_v4(out + (int64_t)row * p.F + at, *(uint4 *)&codes[row][at]);
        }
    }
};

template <class Config, bool GATED>
__global__ void __launch_bounds__(Config::THREADS, Config::CTAS_PER_SM)
    eight_bit_up_gate_kernel(const __grid_constant__ UpGate<typename Config::Weight::Params> p) {
    persistent_eight_bit<Config>(p.gemm, Epilogue<Config, GATED>{p});
    /* in units of 16 bits: codes have 8 */
    zero_rows_past(p.gemm.tiles, (__half *)p.a, Config::IN_BLOCKS ? p.F / 2 : p.F);
    if constexpr (Config::KEEPS_H) zero_rows_past(p.gemm.tiles, (__half *)p.h, GATED ? 2 * p.F : p.F);
}

/* --- launcher ------------------------------------------------------------------------------------------- */

template <class Config, bool GATED>
int launch(const FusedMoeEightBitUpGate &call, void *stream) {
    using Operand = typename Config::Operand;
    const FusedMoeUpGate &p = call.up;
    const FusedMoeRowMap &rows = p.row_map;
    const FusedMoeQuantizedWeight &q1 = *p.w1.quantized;
    const bool is_separate = p.w3.data, is_interleaved = p.layout == FUSED_MOE_INTERLEAVED;
    const int32_t F = (int32_t)p.F, step = is_interleaved ? 2 : 1;
    /* where up begins in w1 and its bias, where they have both */
    const int64_t up_row = is_separate ? 0 : is_interleaved ? 1 : F, row_bytes = p.D;
    FusedMoeWeight up = is_separate ? p.w3 : p.w1;
    if (!is_separate) up.data = (char *)up.data + up_row * row_bytes;

    UpGate<typename Config::Weight::Params> q = {};
    q.x_scale = call.x_scale;
    q.a = p.a;
    q.h = p.h;
    q.a_scale = call.a_scale;
    q.R = rows.R;
    q.F = F;
    q.activation = p.activation.kind;
    q.constants = act_constants<float>(p.activation);
    q.power_of_two = call.power_of_two;
    q.is_f16 = p.dtype == FUSED_MOE_F16;
    const int64_t w1_rows = q1.out;
    q.bias = {{p.b1, nullptr}, {w1_rows, is_separate ? F : w1_rows}, step};
    if (GATED) q.bias.data[1] = is_separate ? p.b3 : p.b1 ? (const char *)p.b1 + 2 * up_row : nullptr;

    auto &gemm = q.gemm;
    set_rows(gemm, p, K_TILE<Operand>, GATED, F, Config::BN);
    const float *scale1 = (const float *)q1.scale;
    const float *scale3 = is_separate ? (const float *)p.w3.quantized->scale : scale1;
    if constexpr (Config::IN_BLOCKS) {
        gemm.weight.scales = {{scale1, scale3},
                              {0, (int32_t)up_row},
                              step,
                              (int32_t)ceil_div(w1_rows, FUSED_MOE_BLOCK),
                              gemm.num_k_tiles[0]};
    } else {
        const bool is_of_matrix = q1.block_out != 1;
        if (!is_of_matrix && !is_separate) scale3 += up_row;
        q.scale = {{scale1, scale3},
                   {is_of_matrix ? 1 : w1_rows, is_of_matrix  ? 1
                                                : is_separate ? F
                                                              : w1_rows},
                   is_of_matrix ? 0 : step};
    }
    gemm.tiles.swaps_skinny = Config::FEW_ROWS;
    gemm.tiles.pdl = p.pdl;
    if (!GATED && fused_moe_takes_turns(p.F, p.D)) gemm.tiles.assignment = FUSED_MOE_IN_TURN;
    int status = weight_map<Operand>(&gemm.weight.map[0], p.w1, Major::K, step * row_bytes, 1, rows.E, F, p.D,
                                     Config::BN / 2);
    if (status == FUSED_MOE_OK && GATED)
        status = weight_map<Operand>(&gemm.weight.map[1], up, Major::K, step * row_bytes, 1, rows.E, F, p.D,
                                     Config::BN / 2);
    if (status == FUSED_MOE_OK && !Config::FEW_ROWS)
        status = set_rows_of_a<Operand>(gemm, 0, p.x, rows.R, 0, p.D, p.D);
    if (status == FUSED_MOE_OK && Config::IN_BLOCKS)
        status = ragged_map(&q.a_map, (const __nv_fp8_e4m3 *)p.a, rows.R, F, F, WarpWriter::ROWS);
    else if (status == FUSED_MOE_OK)
        status = ragged_map(&q.a_map, (const __half *)p.a, rows.R, F, F, WarpWriter::ROWS);
    const int64_t H = GATED ? 2 * F : F;
    if (status == FUSED_MOE_OK && Config::KEEPS_H)
        status = ragged_map(&q.h_map, (const __nv_bfloat16 *)p.h, rows.R, H, H, WarpWriter::ROWS);
    if (status != FUSED_MOE_OK) return status;
    return launch_persistent<Config, EightBitMemory<Config>, eight_bit_up_gate_kernel<Config, GATED>>(
        q, stream, p.pdl);
}

int run(const FusedMoeEightBitUpGate &p, void *stream) {
    if (p.up.h)
        return p.up.layout == FUSED_MOE_UNGATED ? launch<EightBitTrainingConfig, false>(p, stream)
                                                : launch<EightBitTrainingConfig, true>(p, stream);
    return with_eight_bit_config<Side::UP>(
        p.up.w1.quantized->format, p.up.row_map.R, p.up.row_map.E, [&](auto config) {
            using Config = decltype(config);
            return p.up.layout == FUSED_MOE_UNGATED ? launch<Config, false>(p, stream)
                                                    : launch<Config, true>(p, stream);
        });
}

FusedMoeReason reason(const FusedMoeEightBitUpGate &call) {
    const FusedMoeUpGate &p = call.up;
    const FusedMoeRowMap &rows = p.row_map;
    if (!is_16_bit(p.dtype)) return FUSED_MOE_OTHER_DTYPE;
    if (rows.R == 0 || rows.T == 0) return FUSED_MOE_NO_ROWS;
    if (p.D % FUSED_MOE_EIGHT_BIT_WIDTH || p.F % FUSED_MOE_EIGHT_BIT_WIDTH) return FUSED_MOE_WIDTH;
    /* a subtile of ups may not straddle two blocks */
    if (p.layout == FUSED_MOE_HALVES && call.a_scale && p.F % SUBTILE) return FUSED_MOE_WIDTH;
    if (p.h && (p.dtype != FUSED_MOE_BF16 || !call.a_scale)) return FUSED_MOE_OTHER_DTYPE;
    for (const void *data : {p.x, (const void *)p.a, (const void *)p.w1.data, (const void *)p.w3.data})
        if (!is_aligned(data)) return FUSED_MOE_UNALIGNED;
    return is_countable(rows.R, rows.E, 2 * p.F) ? FUSED_MOE_RUNS : FUSED_MOE_TOO_LARGE;
}

} // namespace

const Kernel<FusedMoeEightBitUpGate> eight_bit_up_gate = {reason, nullptr, run};

bool eight_bit_gathers(int64_t R, int32_t E) {
    return swaps_eight_bit_tiles(R, E);
}

} // namespace sm90
} // namespace fused_moe
