/* wgrad on the Hopper engine: dw[e] = a[rows of e]^T b[row_token[rows of e]], sums along the rows of an expert.
 *
 * Both operands lie along their lines, and wgmma reads them so: nothing is transposed. A tile is 128 lines of b
 * (wgmma's rows) times 256 lines of a (its columns), which the copy engine loads through the expert's own map. b it
 * loads likewise, but where its rows are gathered, by three warps. Rows past the expert's last are zero on both sides,
 * since 0 * NaN is NaN. An expert without rows has its tiles, too, and gets zeros.
 *
 * a's lines are counted in boxes of 64, those of part 1 behind those of part 0, so that a tile may have some of both.
 *
 * A weight's gradient lies as the weight does. If a's lines are consecutive there, a tile leaves as it lies in the
 * registers, else TRANSPOSED, by stmatrix.trans. In f32 the copy engine can add what it stores.
 *
 * An expert with many rows is cut into slices (schedule.h), whose sums meet in memory: who comes last adds them, in
 * the order of the slices whoever that is. */
#include "engine.cuh"
#include "tier.cuh"

namespace fused_moe {

/* --- kernel ------------------------------------------------------------------------------------------------ */

typedef struct {
    CUtensorMap dw[2];        /* of part i, as it lies */
    const void *b;            /* [T,N] to be gathered */
    const int32_t *row_token; /* [R] */
    int64_t T;
    int32_t N, M[2];
    int32_t tiles_n, boxes[2]; /* tiles of b's lines; boxes of a's, of part 0 and of both */
    bool accumulate;
    float4 *slices; /* [slices, tiles of an expert, 2, 32, 128] sums of a warpgroup's threads */
    uint32_t *
        semaphores; /* [slices, tiles of an expert, 2] of those that an expert's first slice stands for */
    TileSchedule schedule;
} Wgrad;

template <typename T, bool GATHER>
struct WgradTile : Tile<T, MAJOR_MN, GATHER> {
    static constexpr Major A_MAJOR = MAJOR_MN;
    static constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = 224; /* of 3 x 168 */
    using Queue = TileQueue<WgradTile::CONSUMER_WARPS + WgradTile::LOAD_WARPS, 0>;
};

/* Of a box of a's lines. */
__device__ inline int part_of(const Wgrad &p, int box) {
    return box >= p.boxes[0];
}
__device__ inline int line_in_part(const Wgrad &p, int box) {
    return (box - part_of(p, box) * p.boxes[0]) * SUBTILE;
}

/* Tiles of one time share lines of both: GROUP tiles of b's lines beside each other, then the next of a's. */
__device__ inline void set_tile_of_weight(const Wgrad &p, WorkTile &tile, int index) {
    constexpr int GROUP = 16;
    int tiles_m = (p.boxes[1] + 3) / 4, first = index / (GROUP * tiles_m) * GROUP;
    int size = min(GROUP, p.tiles_n - first), within = index - first * tiles_m;
    tile.first_box = within / size * 4;
    tile.first_line = (first + within % size) * 2 * SUBTILE;
}

__device__ inline int num_k_tiles_of(const WorkTile &tile) {
    return (tile.num_rows + K_TILE - 1) / K_TILE;
}

/* An tile's lines of a. */
struct LinesOfA {
    const CUtensorMap *map;
    int column[4]; /* of each box */

    __device__ LinesOfA(const Wgrad &p, const WorkTile &tile) : map(p.schedule.maps + tile.expert) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int box = tile.first_box + i;
            column[i] = part_of(p, box) * p.M[0] + line_in_part(p, box);
        }
    }

    /* 64 rows of them. One thread calls it. */
    __device__ void load(uint32_t dst, uint32_t full, int row) const {
#pragma unroll
        for (int i = 0; i < 4; i++)
            cp_async_bulk_tensor_load(dst + i * SUBTILE_BYTES, map, full, column[i], row);
    }
};

/* The tokens of some num_k_tiles' rows, two rows of a k_tile a lane; -1: there is none. A load of theirs has to wait behind the
 * copies, so it is sent as many num_k_tiles ahead, and an tile's first ones while the tile before is copied. */
struct Tokens {
    static constexpr int STEPS = 2;
    int of[STEPS][2];

    __device__ void load(const Wgrad &p, const WorkTile &tile, int first_step) {
        int row = first_step * K_TILE + threadIdx.x % 32;
        const int32_t *token = p.row_token + tile.first_row + row;
#pragma unroll
        for (int i = 0; i < 2 * STEPS; i++) {
            bool there = row + 32 * i < tile.num_rows;
            of[i / 2][i % 2] = ld_global_or(token + 32 * i, there, -1);
        }
    }
};

/* One warp, where b's rows lie as a's do: the copy engine loads both. */
template <class Tile>
__device__ inline void load_tma(const Wgrad &p, Shared<Tile> &s) {
    TileReader<typename Tile::Queue> reader(s.queue);
    typename Tile::Stages pipe;
    int acquired = -1;
    for (WorkTile tile = reader.next(); tile.expert >= 0; tile = reader.next()) {
        LinesOfA lines(p, tile);
        const CUtensorMap *b = lines.map + p.schedule.E;
        if (tile.expert != acquired) {
            fence_proxy_tensormap_acquire(lines.map);
            fence_proxy_tensormap_acquire(b);
        }
        acquired = tile.expert;
        int num_k_tiles = num_k_tiles_of(tile);
        for (int k_tile = 0; k_tile < num_k_tiles; k_tile++, pipe.advance()) {
            auto &stage = s.stage[pipe.index];
            uint32_t full = shared_address(&s.full[pipe.index]);
            mbarrier_wait(shared_address(&s.empty[pipe.index]), pipe.phase ^ 1);
            if (elect_sync()) {
                mbarrier_arrive_expect_tx(full, 6 * SUBTILE_BYTES);
                int row = tile.row_in_expert + k_tile * K_TILE;
                lines.load(shared_address(stage.b), full, row);
                for (int i = 0; i < 2; i++)
                    cp_async_bulk_tensor_load(shared_address(stage.a) + i * SUBTILE_BYTES, b, full,
                                              tile.first_line + i * SUBTILE, row);
            }
            __syncwarp();
        }
    }
}

/* Three warps. A copy of theirs is 64 lines of four rows, a chunk a lane. */
template <class Tile>
__device__ inline void load_gather(const Wgrad &p, Shared<Tile> &s) {
    constexpr int WARPS = Tile::LOAD_WARPS, QUADS = K_TILE / 8; /* of rows, in half a k_tile */
    constexpr int COPIES = (QUADS + WARPS - 1) / WARPS;
    int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), chunk = lane % 8;
    uint32_t T = (uint32_t)p.T; /* 2^31 - 1 at most */
    auto quad_of = [&](int half, int i) { return (warp + half) % WARPS + WARPS * i; };
    TileReader<typename Tile::Queue> reader(s.queue);
    typename Tile::Stages pipe;
    /* the warp that uses a map acquires it */
    auto acquire = [&](const WorkTile &tile, int before) {
        if (warp == 0 && tile.expert >= 0 && tile.expert != before)
            fence_proxy_tensormap_acquire(p.schedule.maps + tile.expert);
    };
    WorkTile next = reader.next();
    Tokens next_tokens;
    next_tokens.load(p, next, 0);
    acquire(next, -1);
    while (next.expert >= 0) {
        WorkTile tile = next;
        Tokens tokens = next_tokens;
        int line = tile.first_line + chunk * CHUNK, num_k_tiles = num_k_tiles_of(tile);
        const char *first = (const char *)p.b + line * 2;
        LinesOfA lines(p, tile);
        bool inside = line < p.N, inside_next = line + SUBTILE < p.N;
        auto copy_step = [&](int k_tile, const int (&token)[2]) {
            auto &stage = s.stage[pipe.index];
            uint32_t full = shared_address(&s.full[pipe.index]), a = shared_address(stage.a);
            uint32_t from[2][COPIES]; /* all of them first: shuffles would wait behind copies */
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int i = 0; i < COPIES; i++)
                    from[half][i] = __shfl_sync(~0u, token[half], 4 * quad_of(half, i) + lane / 8);
            mbarrier_wait(shared_address(&s.empty[pipe.index]), pipe.phase ^ 1);
            if (warp == 0 && elect_sync()) {
                mbarrier_arrive_expect_tx(full, 4 * SUBTILE_BYTES);
                lines.load(shared_address(stage.b), full, tile.row_in_expert + k_tile * K_TILE);
            }
            __syncwarp();
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int i = 0; i < COPIES; i++) {
                    if (quad_of(half, i) >= QUADS) continue;
                    int row = 32 * half + 4 * quad_of(half, i) + lane / 8;
                    uint32_t dst = a + 128 * row + 16 * (chunk ^ row % 8);
                    const char *src = first + from[half][i] * (int64_t)p.N * 2;
                    bool there = from[half][i] < T;
                    cp_async(dst, src, inside && there);
                    cp_async(dst + SUBTILE_BYTES, src + 2 * SUBTILE, inside_next && there);
                }
            cp_async_mbarrier_arrive_noinc(full);
            pipe.advance();
        };
        for (int k_tile = 0; k_tile == 0 || k_tile < num_k_tiles; k_tile += Tokens::STEPS) {
            Tokens later;
#pragma unroll
            for (int i = 0; i < Tokens::STEPS; i++) {
                if (k_tile + i < num_k_tiles) copy_step(k_tile + i, tokens.of[i]);
                if (i == 0) later.load(p, tile, k_tile + Tokens::STEPS);
            }
            tokens = later;
            if (k_tile == 0) {
                next = reader.next();
                next_tokens.load(p, next, 0);
                acquire(next, tile.expert);
            }
        }
    }
}

/* A warpgroup's sums of a slice go to memory. True for the last to come, which then has the sums of all. */
__device__ inline bool reduce_slices(const Wgrad &p, const WorkTile &tile, int wg,
                                     float (&d)[128]) {
    int rows = p.schedule.ends[tile.expert] - fused_moe_first_row(p.schedule.ends, tile.expert);
    int slice_rows = p.schedule.order.tile_rows, slices = (rows + slice_rows - 1) / slice_rows;
    int own_slice = tile.row_in_expert / slice_rows, thread = threadIdx.x % 128;
    auto index = [&](int slice) {
        return ((int64_t)tile.linear_index + (slice - own_slice) * p.schedule.num_columns) * 2 + wg;
    };
    auto sums = [&](int slice) { return p.slices + index(slice) * 32 * 128 + thread; };
    float4 *own = sums(own_slice);
#pragma unroll
    for (int i = 0; i < 32; i++)
        __stcg(own + 128 * i, make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]));
    __threadfence();
    barrier_sync(1 + wg, 128);
    bool last = thread == 0 && (int)atomicAdd(p.semaphores + index(0), 1u) == slices - 1;
    if (!barrier_or(1 + wg, 128, last)) return false;
    __threadfence();
#pragma unroll
    for (int i = 0; i < 128; i++) d[i] = 0;
    for (int slice = 0; slice < slices; slice++) {
        const float4 *other = sums(slice);
#pragma unroll
        for (int i = 0; i < 32; i++) {
            float4 v = __ldcg(other + 128 * i);
            d[4 * i] += v.x, d[4 * i + 1] += v.y, d[4 * i + 2] += v.z, d[4 * i + 3] += v.w;
        }
    }
    return true;
}

/* A box of 64 a-lines, which a thread has as fill_subtile says, of which 64 b-lines become the columns. */
__device__ inline void fill_subtile_transposed(uint32_t box, int warp,
                                               const uint32_t (&words)[16]) {
    int lane = threadIdx.x % 32, chunk = 2 * warp + lane / 8 % 2;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        int row = 8 * (j + lane / 16) + lane % 8;
        stmatrix_x4_trans(box + 128 * row + 16 * (chunk ^ row % 8), words[2 * j], words[2 * j + 1],
                          words[2 * j + 2], words[2 * j + 3]);
    }
}

/* Half of such a box in f32: 64 rows of 32 columns, of d's 64 columns. */
template <bool TRANSPOSED>
__device__ inline void fill_subtile_f32(uint32_t box, int warp, int half, const float *d) {
    int lane = threadIdx.x % 32;
    if (TRANSPOSED && warp / 2 != half) return;
#pragma unroll
    for (int i = 0; i < (TRANSPOSED ? 32 : 16); i++) {
        int n = TRANSPOSED ? i : i + 16 * half; /* d[n] is of row and column: */
        int row = 16 * warp + lane / 4 + n / 2 % 2 * 8, column = n / 4 * 8 + lane % 4 * 2 + n % 2;
        if (TRANSPOSED) {
            int line = column;
            column = row % 32, row = line;
        } else {
            column %= 32;
        }
        st_shared(box + 128 * row + 16 * (column / 4 ^ row % 8) + column % 4 * 4, d[n]);
    }
}

/* Where a warpgroup's tile goes. */
struct Target {
    int expert, box, b_line; /* box: the first of a's lines; past the last: nowhere */
};

/* In a's dtype: rounded and held, as in grouped_mm. */
template <typename T, bool TRANSPOSED>
struct WgradEpilogue {
    static constexpr int SUBTILES = 4, NOWHERE = INT32_MAX - SUBTILES;
    uint32_t words[SUBTILES][16];
    Target held = {0, NOWHERE, 0};

    __device__ void hold(const Wgrad &, const float (&d)[128], const Target &target,
                         WarpgroupWriter &) {
        held = target;
#pragma unroll
        for (int i = 0; i < SUBTILES; i++) pack_subtile<T>(words[i], &d[32 * i]);
    }

    template <int slot>
    __device__ void store_subtile(const Wgrad &p, WarpgroupWriter &writer) {
        int a_box = held.box + slot;
        if (a_box >= p.boxes[1]) return;
        auto fill = [&](uint32_t box, int warp) {
            if constexpr (TRANSPOSED)
                fill_subtile_transposed(box, warp, words[slot]);
            else
                fill_subtile(box, 16 * warp, words[slot]);
        };
        writer.store_filled(fill, [&](uint32_t box) {
            const CUtensorMap *map = &p.dw[part_of(p, a_box)];
            int a_line = line_in_part(p, a_box);
            if constexpr (TRANSPOSED)
                cp_async_bulk_tensor_store(map, box, held.b_line, a_line, held.expert);
            else
                cp_async_bulk_tensor_store(map, box, a_line, held.b_line, held.expert);
        });
    }

    __device__ void flush(const Wgrad &p, WarpgroupWriter &writer) {
        for_each_subtile<0, SUBTILES>([&](auto slot) { store_subtile<slot.value>(p, writer); });
        forget();
    }

    __device__ void forget() { held.box = NOWHERE; }
};

/* In f32: stored, or added, at once. */
template <bool TRANSPOSED>
struct WgradEpilogueF32 {
    static constexpr int SUBTILES = 0;

    __device__ void hold(const Wgrad &p, const float (&d)[128], const Target &target,
                         WarpgroupWriter &writer) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int half = i % 2, a_box = target.box + i / 2;
            if (a_box >= p.boxes[1]) return;
            int a_line = line_in_part(p, a_box), b_line = target.b_line;
            (TRANSPOSED ? b_line : a_line) += half * SUBTILE / 2;
            auto fill = [&](uint32_t box, int warp) {
                fill_subtile_f32<TRANSPOSED>(box, warp, half, &d[i / 2 * 32]);
            };
            writer.store_filled(fill, [&](uint32_t box) {
                const CUtensorMap *map = &p.dw[part_of(p, a_box)];
                int column = TRANSPOSED ? b_line : a_line, row = TRANSPOSED ? a_line : b_line;
                if (p.accumulate)
                    cp_reduce_async_bulk_tensor_add(map, box, column, row, target.expert);
                else
                    cp_async_bulk_tensor_store(map, box, column, row, target.expert);
            });
        }
    }

    template <int slot>
    __device__ void store_subtile(const Wgrad &, WarpgroupWriter &) {}
    __device__ void flush(const Wgrad &, WarpgroupWriter &) {}
    __device__ void forget() {}
};

template <class Tile, class Epilogue>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    hopper_wgrad_kernel(const __grid_constant__ Wgrad p) {
    auto &s = prologue<Tile>();
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), wg = warp / 4 - 1; /* -1: the producer */
    if (wg < 0) {
        setmaxnreg_dec<Tile::PRODUCER_REGISTERS>();
        if (warp == 3)
            fetch_tiles(p.schedule, s.queue, nullptr, 0,
                        [&](const TileSchedule &, WorkTile &tile, int column, int) {
                            set_tile_of_weight(p, tile, column);
                        });
        else if constexpr (Tile::GATHER)
            load_gather<Tile>(p, s);
        else if (warp == 0)
            load_tma<Tile>(p, s);
    } else {
        setmaxnreg_inc<Tile::CONSUMER_REGISTERS>();
        TileReader<typename Tile::Queue> reader(s.queue);
        typename Tile::Stages pipe;
        WarpgroupWriter writer(shared_address(s.staging[wg]), wg, warp % 4);
        Epilogue epilogue;
        auto store_subtile = [&](auto slot) {
            epilogue.template store_subtile<slot.value>(p, writer);
        };
        for (WorkTile tile = reader.next(); tile.expert >= 0; tile = reader.next()) {
            int num_k_tiles = num_k_tiles_of(tile);
            if (num_k_tiles < Epilogue::SUBTILES) epilogue.flush(p, writer);
            float d[128];
            if (num_k_tiles) {
                run_mainloop<Tile, Tile::BN, Epilogue::SUBTILES>(d, s, pipe, num_k_tiles, wg,
                                                                 store_subtile);
            } else {
#pragma unroll
                for (int i = 0; i < 128; i++) d[i] = 0;
            }
            epilogue.forget();
            if (tile.skinny || reduce_slices(p, tile, wg, d))
                epilogue.hold(p, d, {tile.expert, tile.first_box, tile.first_line + wg * SUBTILE},
                              writer);
        }
        epilogue.flush(p, writer);
        writer.drain_all();
    }
}

/* --- launcher ----------------------------------------------------------------------------------------------- */

static int64_t boxes_of(const FusedMoeWgrad &p, int part) {
    return p.dw[part].data ? ceil_div(p.M[part], SUBTILE) : 0;
}

static int64_t tiles_of(const FusedMoeWgrad &p) {
    return ceil_div(boxes_of(p, 0) + boxes_of(p, 1), 4) * ceil_div(p.N, 2 * SUBTILE);
}

static int64_t num_semaphores_of(const FusedMoeWgrad &p, const FusedMoeSchedule &s) {
    return fused_moe_max_slices(p.R, &s) * tiles_of(p) * 2;
}

size_t hopper_wgrad_workspace(const FusedMoeWgrad &p) {
    int num_ctas;
    if (num_sms(&num_ctas) != FUSED_MOE_OK) return 0;
    FusedMoeSchedule s = fused_moe_split_k_schedule(p.R, tiles_of(p), num_ctas);
    int64_t num_semaphores = num_semaphores_of(p, s);
    return tile_schedule_workspace(p.E, num_semaphores) +
           num_semaphores * 32 * 128 * sizeof(float4);
}

/* The map of a gradient as it lies: coordinates (consecutive line, other line, expert). */
template <typename Out>
static int gradient_map(CUtensorMap *map, const FusedMoeWeight &dw, bool transposed, int64_t M,
                        int64_t N, int32_t E, int box_columns) {
    const uint64_t sizes[] = {(uint64_t)(transposed ? N : M), (uint64_t)(transposed ? M : N),
                              (uint64_t)E};
    const uint64_t strides[] = {(transposed ? dw.stride_out : dw.stride_in) * sizeof(Out),
                                (E > 1 ? dw.stride_expert : CHUNK) * sizeof(Out)};
    const uint32_t box[] = {(uint32_t)box_columns, SUBTILE, 1};
    return encode_tensor_map(map, map_dtype(Out()), 3, dw.data, sizes, strides, box);
}

template <typename T, bool GATHER, typename Out, bool TRANSPOSED>
static int run(const FusedMoeWgrad &p, void *stream) {
    using Tile = WgradTile<T, GATHER>;
    constexpr bool HELD = std::is_same<T, Out>::value;
    using Epilogue =
        std::conditional_t<HELD, WgradEpilogue<T, TRANSPOSED>, WgradEpilogueF32<TRANSPOSED>>;
    Wgrad q = {};
    q.b = p.b;
    q.row_token = p.b_row_token;
    q.T = p.T;
    q.N = (int32_t)p.N;
    q.tiles_n = (int32_t)ceil_div(p.N, Tile::BM);
    q.boxes[0] = (int32_t)boxes_of(p, 0);
    q.boxes[1] = q.boxes[0] + (int32_t)boxes_of(p, 1);
    q.accumulate = p.accumulate;
    int num_ctas, status = num_sms(&num_ctas);
    for (int i = 0; i < 2 && status == FUSED_MOE_OK; i++) {
        q.M[i] = (int32_t)p.M[i];
        if (p.dw[i].data)
            status = gradient_map<Out>(&q.dw[i], p.dw[i], TRANSPOSED, p.M[i], p.N, p.E,
                                       128 / sizeof(Out));
    }
    int64_t width = p.M[0] + p.M[1];
    Result operands[MAX_RESULTS] = {};
    operands[0].data = const_cast<void *>(p.a);
    operands[0].pitch_bytes = width * sizeof(T);
    if (status == FUSED_MOE_OK)
        status = matrix_map(&operands[0].aligned, (const T *)p.a, p.R, width, width, SUBTILE);
    if (!GATHER) {
        operands[1].data = const_cast<void *>(p.b);
        operands[1].pitch_bytes = p.N * sizeof(T);
        if (status == FUSED_MOE_OK)
            status = matrix_map(&operands[1].aligned, (const T *)p.b, p.R, p.N, p.N, SUBTILE);
    }
    if (status != FUSED_MOE_OK) return status;
    q.schedule.R = p.R;
    q.schedule.E = p.E;
    q.schedule.tile_columns = 1;
    q.schedule.num_columns = (int32_t)tiles_of(p);
    q.schedule.order = fused_moe_split_k_schedule(p.R, tiles_of(p), num_ctas);
    int64_t num_semaphores = num_semaphores_of(p, q.schedule.order);
    status = make_tile_schedule(&q.schedule, p.ends, operands, p.workspace, stream, num_semaphores);
    if (status != FUSED_MOE_OK) return status;
    q.schedule.num_results = 0; /* the maps are of what is loaded */
    q.semaphores = q.schedule.counters;
    q.slices = (float4 *)((char *)q.schedule.maps + MAX_RESULTS * (size_t)p.E * MAP_BYTES);
    return launch_gemm<Tile>(hopper_wgrad_kernel<Tile, Epilogue>, q, stream);
}

template <typename T, bool GATHER>
static int run(const FusedMoeWgrad &p, void *stream) {
    const FusedMoeWeight &dw = p.dw[p.dw[0].data ? 0 : 1];
    bool transposed = dw.stride_in == 1, f32 = p.dw_dtype == FUSED_MOE_F32;
    if (transposed)
        return f32 ? run<T, GATHER, float, true>(p, stream) : run<T, GATHER, T, true>(p, stream);
    return f32 ? run<T, GATHER, float, false>(p, stream) : run<T, GATHER, T, false>(p, stream);
}

int hopper_wgrad(const FusedMoeWgrad &p, void *stream) {
    return with_half(p.dtype, [&](auto t) {
        using T = decltype(t);
        return p.b_row_token ? run<T, true>(p, stream) : run<T, false>(p, stream);
    });
}

} // namespace fused_moe
