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
 * An expert with many rows is cut into pieces (schedule.h), whose sums meet in memory: who comes last adds them, in
 * the order of the pieces whoever that is. */
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
    float4 *pieces; /* [pieces, tiles of an expert, 2, 32, 128] sums of a warpgroup's threads */
    uint32_t *
        arrived; /* [pieces, tiles of an expert, 2] of those that an expert's first piece stands for */
    Plan plan;
} Wgrad;

template <typename T, bool GATHER>
struct WgradTile : Tile<T, ALONG_LINES, GATHER> {
    static constexpr Major A_MAJOR = ALONG_LINES;
    static constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = 224; /* of 3 x 168 */
    using Items = ItemRing<WgradTile::CONSUMER_WARPS + WgradTile::COPYING_WARPS, 0>;
};

/* Of a box of a's lines. */
__device__ inline int part_of(const Wgrad &p, int box) {
    return box >= p.boxes[0];
}
__device__ inline int line_in_part(const Wgrad &p, int box) {
    return (box - part_of(p, box) * p.boxes[0]) * BOX;
}

/* Tiles of one time share lines of both: GROUP tiles of b's lines beside each other, then the next of a's. */
__device__ inline void place_lines(const Wgrad &p, Item &item, int index) {
    constexpr int GROUP = 16;
    int tiles_m = (p.boxes[1] + 3) / 4, first = index / (GROUP * tiles_m) * GROUP;
    int size = min(GROUP, p.tiles_n - first), within = index - first * tiles_m;
    item.first_box = within / size * 4;
    item.first_line = (first + within % size) * 2 * BOX;
}

__device__ inline int steps_of(const Item &item) {
    return (item.num_rows + BOX - 1) / BOX;
}

/* An item's lines of a. */
struct LinesOfA {
    const CUtensorMap *map;
    int column[4]; /* of each box */

    __device__ LinesOfA(const Wgrad &p, const Item &item) : map(p.plan.maps + item.expert) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int box = item.first_box + i;
            column[i] = part_of(p, box) * p.M[0] + line_in_part(p, box);
        }
    }

    /* 64 rows of them. One thread calls it. */
    __device__ void load(uint32_t dst, uint32_t full, int row) const {
#pragma unroll
        for (int i = 0; i < 4; i++)
            cp_async_bulk_tensor_load(dst + i * BOX_BYTES, map, full, column[i], row);
    }
};

/* The tokens of some steps' rows, two rows of a step a lane; -1: there is none. A load of theirs has to wait behind the
 * copies, so it is sent as many steps ahead, and an item's first ones while the item before is copied. */
struct Tokens {
    static constexpr int STEPS = 2;
    int of[STEPS][2];

    __device__ void load(const Wgrad &p, const Item &item, int first_step) {
        int row = first_step * BOX + threadIdx.x % 32;
        const int32_t *token = p.row_token + item.first_row + row;
#pragma unroll
        for (int i = 0; i < 2 * STEPS; i++) {
            bool there = row + 32 * i < item.num_rows;
            of[i / 2][i % 2] = ld_global_or(token + 32 * i, there, -1);
        }
    }
};

/* One warp, where b's rows lie as a's do: the copy engine loads both. */
template <class Tile>
__device__ inline void copy_lines(const Wgrad &p, Shared<Tile> &s) {
    Receiver<typename Tile::Items> receiver(s.items);
    typename Tile::Stages to;
    int acquired = -1;
    for (Item item = receiver.next(); item.expert >= 0; item = receiver.next()) {
        LinesOfA lines(p, item);
        const CUtensorMap *b = lines.map + p.plan.E;
        if (item.expert != acquired) {
            fence_proxy_tensormap_acquire(lines.map);
            fence_proxy_tensormap_acquire(b);
        }
        acquired = item.expert;
        int steps = steps_of(item);
        for (int step = 0; step < steps; step++, to.advance()) {
            auto &stage = s.stage[to.at];
            uint32_t full = shared_address(&s.full[to.at]);
            mbarrier_wait(shared_address(&s.empty[to.at]), to.parity ^ 1);
            if (elect_sync()) {
                mbarrier_arrive_expect_tx(full, 6 * BOX_BYTES);
                int row = item.row_in_expert + step * BOX;
                lines.load(shared_address(stage.b), full, row);
                for (int i = 0; i < 2; i++)
                    cp_async_bulk_tensor_load(shared_address(stage.a) + i * BOX_BYTES, b, full,
                                              item.first_line + i * BOX, row);
            }
            __syncwarp();
        }
    }
}

/* Three warps. A copy of theirs is 64 lines of four rows, a chunk a lane. */
template <class Tile>
__device__ inline void copy_rows(const Wgrad &p, Shared<Tile> &s) {
    constexpr int WARPS = Tile::COPYING_WARPS, QUADS = BOX / 8; /* of rows, in half a step */
    constexpr int COPIES = (QUADS + WARPS - 1) / WARPS;
    int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), chunk = lane % 8;
    uint32_t T = (uint32_t)p.T; /* 2^31 - 1 at most */
    auto quad_of = [&](int half, int i) { return (warp + half) % WARPS + WARPS * i; };
    Receiver<typename Tile::Items> receiver(s.items);
    typename Tile::Stages to;
    /* the warp that uses a map acquires it */
    auto acquire = [&](const Item &item, int before) {
        if (warp == 0 && item.expert >= 0 && item.expert != before)
            fence_proxy_tensormap_acquire(p.plan.maps + item.expert);
    };
    Item next = receiver.next();
    Tokens next_tokens;
    next_tokens.load(p, next, 0);
    acquire(next, -1);
    while (next.expert >= 0) {
        Item item = next;
        Tokens tokens = next_tokens;
        int line = item.first_line + chunk * CHUNK, steps = steps_of(item);
        const char *first = (const char *)p.b + line * 2;
        LinesOfA lines(p, item);
        bool inside = line < p.N, inside_next = line + BOX < p.N;
        auto copy_step = [&](int step, const int (&token)[2]) {
            auto &stage = s.stage[to.at];
            uint32_t full = shared_address(&s.full[to.at]), a = shared_address(stage.a);
            uint32_t from[2][COPIES]; /* all of them first: shuffles would wait behind copies */
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int i = 0; i < COPIES; i++)
                    from[half][i] = __shfl_sync(~0u, token[half], 4 * quad_of(half, i) + lane / 8);
            mbarrier_wait(shared_address(&s.empty[to.at]), to.parity ^ 1);
            if (warp == 0 && elect_sync()) {
                mbarrier_arrive_expect_tx(full, 4 * BOX_BYTES);
                lines.load(shared_address(stage.b), full, item.row_in_expert + step * BOX);
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
                    cp_async(dst + BOX_BYTES, src + 2 * BOX, inside_next && there);
                }
            cp_async_mbarrier_arrive_noinc(full);
            to.advance();
        };
        for (int step = 0; step == 0 || step < steps; step += Tokens::STEPS) {
            Tokens later;
#pragma unroll
            for (int i = 0; i < Tokens::STEPS; i++) {
                if (step + i < steps) copy_step(step + i, tokens.of[i]);
                if (i == 0) later.load(p, item, step + Tokens::STEPS);
            }
            tokens = later;
            if (step == 0) {
                next = receiver.next();
                next_tokens.load(p, next, 0);
                acquire(next, item.expert);
            }
        }
    }
}

/* A warpgroup's sums of a piece go to memory. True for the last to come, which then has the sums of all. */
__device__ inline bool add_pieces(const Wgrad &p, const Item &item, int wg, float (&d)[128]) {
    int rows = p.plan.ends[item.expert] - fused_moe_first_row(p.plan.ends, item.expert);
    int piece_rows = p.plan.schedule.tile_rows, pieces = (rows + piece_rows - 1) / piece_rows;
    int own_piece = item.row_in_expert / piece_rows, thread = threadIdx.x % 128;
    auto index = [&](int piece) {
        return ((int64_t)item.place + (piece - own_piece) * p.plan.num_columns) * 2 + wg;
    };
    auto sums = [&](int piece) { return p.pieces + index(piece) * 32 * 128 + thread; };
    float4 *own = sums(own_piece);
#pragma unroll
    for (int i = 0; i < 32; i++)
        __stcg(own + 128 * i, make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]));
    __threadfence();
    barrier_sync(1 + wg, 128);
    bool last = thread == 0 && (int)atomicAdd(p.arrived + index(0), 1u) == pieces - 1;
    if (!barrier_or(1 + wg, 128, last)) return false;
    __threadfence();
#pragma unroll
    for (int i = 0; i < 128; i++) d[i] = 0;
    for (int piece = 0; piece < pieces; piece++) {
        const float4 *other = sums(piece);
#pragma unroll
        for (int i = 0; i < 32; i++) {
            float4 v = __ldcg(other + 128 * i);
            d[4 * i] += v.x, d[4 * i + 1] += v.y, d[4 * i + 2] += v.z, d[4 * i + 3] += v.w;
        }
    }
    return true;
}

/* A box of 64 a-lines, which a thread has as fill_box says, of which 64 b-lines become the columns. */
__device__ inline void fill_box_transposed(uint32_t box, int warp, const uint32_t (&words)[16]) {
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
__device__ inline void fill_box_f32(uint32_t box, int warp, int half, const float *d) {
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
struct WgradFinish {
    static constexpr int SLOTS = 4, NOWHERE = INT32_MAX - SLOTS;
    uint32_t words[SLOTS][16];
    Target held = {0, NOWHERE, 0};

    __device__ void take(const Wgrad &, const float (&d)[128], const Target &target,
                         WarpgroupWriter &) {
        held = target;
#pragma unroll
        for (int i = 0; i < SLOTS; i++) pack_box<T>(words[i], &d[32 * i]);
    }

    template <int slot>
    __device__ void put(const Wgrad &p, WarpgroupWriter &writer) {
        int a_box = held.box + slot;
        if (a_box >= p.boxes[1]) return;
        auto fill = [&](uint32_t box, int warp) {
            if constexpr (TRANSPOSED)
                fill_box_transposed(box, warp, words[slot]);
            else
                fill_box(box, 16 * warp, words[slot]);
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

    __device__ void put_all(const Wgrad &p, WarpgroupWriter &writer) {
        for_each_slot<0, SLOTS>([&](auto slot) { put<slot.value>(p, writer); });
        forget();
    }

    __device__ void forget() { held.box = NOWHERE; }
};

/* In f32: stored, or added, at once. */
template <bool TRANSPOSED>
struct WgradFinishF32 {
    static constexpr int SLOTS = 0;

    __device__ void take(const Wgrad &p, const float (&d)[128], const Target &target,
                         WarpgroupWriter &writer) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int half = i % 2, a_box = target.box + i / 2;
            if (a_box >= p.boxes[1]) return;
            int a_line = line_in_part(p, a_box), b_line = target.b_line;
            (TRANSPOSED ? b_line : a_line) += half * BOX / 2;
            auto fill = [&](uint32_t box, int warp) {
                fill_box_f32<TRANSPOSED>(box, warp, half, &d[i / 2 * 32]);
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
    __device__ void put(const Wgrad &, WarpgroupWriter &) {}
    __device__ void put_all(const Wgrad &, WarpgroupWriter &) {}
    __device__ void forget() {}
};

template <class Tile, class Finish>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    hopper_wgrad_kernel(const __grid_constant__ Wgrad p) {
    auto &s = begin<Tile>();
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), wg = warp / 4 - 1; /* -1: the producer */
    if (wg < 0) {
        setmaxnreg_dec<Tile::PRODUCER_REGISTERS>();
        if (warp == 3)
            draw(p.plan, s.items, nullptr, 0,
                 [&](const Plan &, Item &item, int column, int) { place_lines(p, item, column); });
        else if constexpr (Tile::GATHER)
            copy_rows<Tile>(p, s);
        else if (warp == 0)
            copy_lines<Tile>(p, s);
    } else {
        setmaxnreg_inc<Tile::CONSUMER_REGISTERS>();
        Receiver<typename Tile::Items> receiver(s.items);
        typename Tile::Stages from;
        WarpgroupWriter writer(shared_address(s.out[wg]), wg, warp % 4);
        Finish finish;
        auto put = [&](auto slot) { finish.template put<slot.value>(p, writer); };
        for (Item item = receiver.next(); item.expert >= 0; item = receiver.next()) {
            int steps = steps_of(item);
            if (steps < Finish::SLOTS) finish.put_all(p, writer);
            float d[128];
            if (steps) {
                multiply<Tile, Tile::BN, Finish::SLOTS>(d, s, from, steps, wg, put);
            } else {
#pragma unroll
                for (int i = 0; i < 128; i++) d[i] = 0;
            }
            finish.forget();
            if (item.few || add_pieces(p, item, wg, d))
                finish.take(p, d, {item.expert, item.first_box, item.first_line + wg * BOX},
                            writer);
        }
        finish.put_all(p, writer);
        writer.finish();
    }
}

/* --- launcher ----------------------------------------------------------------------------------------------- */

static int64_t boxes_of(const FusedMoeWgrad &p, int part) {
    return p.dw[part].data ? ceil_div(p.M[part], BOX) : 0;
}

static int64_t tiles_of(const FusedMoeWgrad &p) {
    return ceil_div(boxes_of(p, 0) + boxes_of(p, 1), 4) * ceil_div(p.N, 2 * BOX);
}

static int64_t arrivals_of(const FusedMoeWgrad &p, const FusedMoeSchedule &s) {
    return fused_moe_max_pieces(p.R, &s) * tiles_of(p) * 2;
}

size_t hopper_wgrad_workspace(const FusedMoeWgrad &p) {
    int workers;
    if (num_workers(&workers) != FUSED_MOE_OK) return 0;
    FusedMoeSchedule s = fused_moe_sum_schedule(p.R, tiles_of(p), workers);
    int64_t arrivals = arrivals_of(p, s);
    return plan_workspace(p.E, arrivals) + arrivals * 32 * 128 * sizeof(float4);
}

/* The map of a gradient as it lies: coordinates (consecutive line, other line, expert). */
template <typename Out>
static int gradient_map(CUtensorMap *map, const FusedMoeWeight &dw, bool transposed, int64_t M,
                        int64_t N, int32_t E, int box_columns) {
    const uint64_t sizes[] = {(uint64_t)(transposed ? N : M), (uint64_t)(transposed ? M : N),
                              (uint64_t)E};
    const uint64_t strides[] = {(transposed ? dw.stride_out : dw.stride_in) * sizeof(Out),
                                (E > 1 ? dw.stride_expert : CHUNK) * sizeof(Out)};
    const uint32_t box[] = {(uint32_t)box_columns, BOX, 1};
    return encode_tensor_map(map, map_dtype(Out()), 3, dw.data, sizes, strides, box);
}

template <typename T, bool GATHER, typename Out, bool TRANSPOSED>
static int run(const FusedMoeWgrad &p, void *stream) {
    using Tile = WgradTile<T, GATHER>;
    constexpr bool HELD = std::is_same<T, Out>::value;
    using Finish = std::conditional_t<HELD, WgradFinish<T, TRANSPOSED>, WgradFinishF32<TRANSPOSED>>;
    Wgrad q = {};
    q.b = p.b;
    q.row_token = p.b_row_token;
    q.T = p.T;
    q.N = (int32_t)p.N;
    q.tiles_n = (int32_t)ceil_div(p.N, Tile::BM);
    q.boxes[0] = (int32_t)boxes_of(p, 0);
    q.boxes[1] = q.boxes[0] + (int32_t)boxes_of(p, 1);
    q.accumulate = p.accumulate;
    int workers, status = num_workers(&workers);
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
        status = matrix_map(&operands[0].whole, (const T *)p.a, p.R, width, width, BOX);
    if (!GATHER) {
        operands[1].data = const_cast<void *>(p.b);
        operands[1].pitch_bytes = p.N * sizeof(T);
        if (status == FUSED_MOE_OK)
            status = matrix_map(&operands[1].whole, (const T *)p.b, p.R, p.N, p.N, BOX);
    }
    if (status != FUSED_MOE_OK) return status;
    q.plan.R = p.R;
    q.plan.E = p.E;
    q.plan.tile_columns = 1;
    q.plan.num_columns = (int32_t)tiles_of(p);
    q.plan.schedule = fused_moe_sum_schedule(p.R, tiles_of(p), workers);
    int64_t arrivals = arrivals_of(p, q.plan.schedule);
    status = make_plan(&q.plan, p.ends, operands, p.workspace, stream, arrivals);
    if (status != FUSED_MOE_OK) return status;
    q.plan.num_results = 0; /* the maps are of what is loaded */
    q.arrived = q.plan.counters;
    q.pieces = (float4 *)((char *)q.plan.maps + MAX_RESULTS * (size_t)p.E * MAP_BYTES);
    return launch_product<Tile>(hopper_wgrad_kernel<Tile, Finish>, q, stream);
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
