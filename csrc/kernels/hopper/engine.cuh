/* The engine of the Hopper products: d[r, :] = a[r, :] b[e(r)]^T on a persistent grid, one CTA an SM.
 *
 *   producer      a warpgroup of few registers: one warp draws the queue, one (three for a gather) keeps the stages full
 *   consumers     two warpgroups: each multiplies 64 of the tile's 128 rows by its 256 columns, and then hands
 *                 its sums, in registers, to the epilogue
 *
 *   stage   0      1      2      3      0      1 ...              64 numbers of k each
 *   load    |A B   |A B   |A B   |A B   |A B (waits until both consumers have left stage 0)
 *   wg 0           |k 0   |k 1   |k 2   |...        |take |k 0 of the next tile |k 1 ..
 *   wg 1           |k 0   |k 1   |k 2   |...        |take |k 0                  |k 1 ..
 *   results                                               |put 0                |put 1 ..
 *
 * A finish with SUBTILES (grouped_mm) has a tile's results on their way while the next tile is multiplied: it takes
 * the sums out of the accumulators, and puts what it has claimed to memory slice by slice, each under the products of
 * one k_tile. Between two tiles there is rounding alone, also where a tile has few num_k_tiles, and there is one schedule
 * for every shape where others choose between ping-pong and cooperative. Without subtiles (up_gate) take() stores at
 * once. A consumer waits for each of its own num_k_tiles: the other's are under way, and holding a stage longer is worse.
 *
 * Which CTA computes which tile matters more than anything in the loop: CTAs that run in k_tile, neighbours beside
 * neighbours, have their common lines read once (schedule.h). So all full tiles are made to last equally long: both
 * consumers multiply, also where the rows of the second are past the expert's end. Less is computed only where it
 * is much less: a last tile of at most 128 columns, or half a tile of the last turn, at that width, and an expert of
 * at most 64 rows with its operands swapped (run_mainloop_swapped).
 *
 * A comes by the copy engine, or, gathered through row_token, by cp.async of 96 threads that write the swizzle
 * themselves. Their copies arrive at the stage's barrier when they are complete. They are ordinary writes, so
 * a consumer fences them for wgmma after it has waited.
 *
 * Tried and dropped (docs/performance.md): clusters of two CTAs that share B by multicast, prefetches into L2,
 * results stored from registers past the copy engine, three stages and more room on the way out. */
#pragma once

#include <type_traits>

#include "epilogue.cuh"
#include "tile_scheduler.cuh"

namespace fused_moe {

/* What every gemm has; a kernel's parameters begin with it. */
typedef struct {
    CUtensorMap a[2];         /* (R, k of part i); not with a gather                        */
    CUtensorMap b[2];         /* (E, columns, k of part i), or (E, F, k) of gate and of up  */
    const void *x;            /* [T, k] A before the gather                                 */
    const int32_t *row_token; /* [R]; NULL: row r is token r                                */
    int64_t T;
    int32_t k;              /* of x                                                         */
    int32_t num_k_tiles[2]; /* of K_TILE numbers of k, of part i                               */
    bool gate_up;           /* b holds gate and up, which share a tile's columns            */
    TileSchedule schedule;
} Gemm;

template <typename T_, Major B_MAJOR_, bool GATHER_>
struct Tile {
    using T = T_;
    static constexpr Major A_MAJOR = MAJOR_K, B_MAJOR = B_MAJOR_;
    static constexpr bool GATHER = GATHER_;

    static constexpr int WARPGROUPS = 2; /* of consumers */
    static constexpr int BM = SUBTILE * WARPGROUPS, BN = 256, STAGES = 4, WGMMA_N = BN;
    static constexpr int THREADS = 128 * (1 + WARPGROUPS), CONSUMER_WARPS = 4 * WARPGROUPS;
    static constexpr int LOAD_WARPS = GATHER ? 3 : 1; /* of the producer; its last warp draws */
    /* of the 384 x 168 that the launch gives: claimed from the producer for the consumers */
    static constexpr int PRODUCER_REGISTERS = GATHER ? 72 : 40;
    static constexpr int CONSUMER_REGISTERS = GATHER ? 216 : 232;
    static_assert(PRODUCER_REGISTERS + WARPGROUPS * CONSUMER_REGISTERS <= 3 * 168, "or it hangs");
    static constexpr int STAGING_BYTES = Writer::BYTES; /* a warpgroup's way out */
    using Queue = TileQueue<CONSUMER_WARPS + LOAD_WARPS, GATHER ? BM : 0>;
    using Stages = PipelineState<STAGES>;
};

template <class Tile>
struct alignas(1024) Shared {
    struct Stage {
        uint8_t a[Tile::WARPGROUPS * SUBTILE_BYTES]; /* boxes of 64 rows                      */
        uint8_t b[4 * SUBTILE_BYTES];                /* boxes of 64 columns                   */
    } stage[Tile::STAGES];
    uint8_t staging[Tile::WARPGROUPS][Tile::STAGING_BYTES];
    uint64_t full[Tile::STAGES], empty[Tile::STAGES];
    typename Tile::Queue queue;
};

/* --- producer ------------------------------------------------------------------------------------------------ */

/* Bytes of B in a stage: a half_n tile has half. */
__device__ inline int bytes_of_b(const WorkTile &tile) {
    return (tile.half_n ? 2 : 4) * SUBTILE_BYTES;
}

/* The weights of a k_tile: boxes of 128 lines, or two of 64. One thread calls it. */
template <class Tile>
__device__ inline void load_b(const Gemm &p, uint32_t dst, uint32_t full, int part, int k_tile,
                              const WorkTile &tile) {
    int k = K_TILE * k_tile;
    for (int half = 0; half <= !tile.half_n; half++, dst += 2 * SUBTILE_BYTES) {
        const CUtensorMap *map = &p.b[p.gate_up ? half : part];
        int line = tile.first_column + (p.gate_up ? 0 : 2 * SUBTILE * half);
        if constexpr (Tile::B_MAJOR == MAJOR_K) {
            cp_async_bulk_tensor_load(dst, map, full, k, line, tile.expert);
        } else {
            cp_async_bulk_tensor_load(dst, map, full, line, k, tile.expert);
            cp_async_bulk_tensor_load(dst + SUBTILE_BYTES, map, full, line + SUBTILE, k,
                                      tile.expert);
        }
    }
}

/* One warp. */
template <class Tile>
__device__ inline void load_tma(const Gemm &p, Shared<Tile> &s) {
    TileReader<typename Tile::Queue> reader(s.queue);
    typename Tile::Stages pipe;
    int num_k_tiles = p.num_k_tiles[0] + p.num_k_tiles[1];
    for (WorkTile tile = reader.next(); tile.expert >= 0; tile = reader.next()) {
        int boxes = tile.skinny ? 1 : 2;
        for (int i = 0; i < num_k_tiles; i++, pipe.advance()) {
            auto &stage = s.stage[pipe.index];
            int part = i >= p.num_k_tiles[0], k_tile = part ? i - p.num_k_tiles[0] : i;
            uint32_t full = shared_address(&s.full[pipe.index]);
            mbarrier_wait(shared_address(&s.empty[pipe.index]), pipe.phase ^ 1);
            if (elect_sync()) {
                mbarrier_arrive_expect_tx(full, boxes * SUBTILE_BYTES + bytes_of_b(tile));
                for (int box = 0; box < boxes; box++)
                    cp_async_bulk_tensor_load(shared_address(stage.a) + box * SUBTILE_BYTES,
                                              &p.a[part], full, K_TILE * k_tile,
                                              tile.first_row + SUBTILE * box);
                load_b<Tile>(p, shared_address(stage.b), full, part, k_tile, tile);
            }
            __syncwarp();
        }
    }
}

/* Three warps, which gather A: thread i copies chunk i % 8 of rows i / 8, i / 8 + 12, ... Rows that are not
 * there are copies of x's first, and so are rows whose token is out of range, which no plan of ours has. */
template <class Tile>
__device__ inline void load_gather(const Gemm &p, Shared<Tile> &s) {
    constexpr int EVERY = 4 * Tile::LOAD_WARPS, ROWS = (Tile::BM + EVERY - 1) / EVERY;
    int chunk = threadIdx.x % 8, first = threadIdx.x / 8;
    bool leads = __shfl_sync(~0u, threadIdx.x / 32, 0) == 0;
    uint32_t swizzled[2]; /* rows 12 apart take turns between two swizzles */
    for (int i = 0; i < 2; i++) {
        int row = first + EVERY * i;
        swizzled[i] = 128 * row + 16 * (chunk ^ row % 8);
    }
    TileReader<typename Tile::Queue> reader(s.queue);
    typename Tile::Stages pipe;
    for (;;) {
        const char *source[ROWS];
        const int32_t *token = reader.wait_for_tokens();
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            int row = min(first + EVERY * i, Tile::BM - 1);
            source[i] = (const char *)p.x + token[row] * (int64_t)p.k * 2 + chunk * 16;
        }
        WorkTile tile = reader.next();
        if (tile.expert < 0) break;
#pragma unroll 1
        for (int k_tile = 0; k_tile < p.num_k_tiles[0]; k_tile++, pipe.advance()) {
            auto &stage = s.stage[pipe.index];
            uint32_t full = shared_address(&s.full[pipe.index]), a = shared_address(stage.a);
            mbarrier_wait(shared_address(&s.empty[pipe.index]), pipe.phase ^ 1);
            if (leads && elect_sync()) {
                mbarrier_arrive_expect_tx(full, bytes_of_b(tile));
                load_b<Tile>(p, shared_address(stage.b), full, 0, k_tile, tile);
            }
            bool inside = k_tile * K_TILE + chunk * CHUNK < p.k;
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                if ((i + 1) * EVERY <= Tile::BM || first + EVERY * i < Tile::BM)
                    cp_async(a + swizzled[i % 2] + i / 2 * 2 * EVERY * 128, source[i], inside);
                source[i] += 2 * K_TILE;
            }
            cp_async_mbarrier_arrive_noinc(full);
        }
    }
}

/* --- consumers ------------------------------------------------------------------------------------------------- */

/* Tells the producer that this warp has left a stage. */
template <class Tile>
__device__ inline void release(Shared<Tile> &s, int stage) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&s.empty[stage]));
}

/* Calls fn(first), .., fn(end - 1) with constants. */
template <int first, int end, typename Fn>
__device__ inline void for_each_subtile(Fn fn) {
    if constexpr (first < end) {
        fn(std::integral_constant<int, first>());
        for_each_subtile<first + 1, end>(fn);
    }
}

/* Calls issue(stage, first k or not) for every k_tile of k, whose wgmmas it issues, and while they are under way
 * meanwhile(number of the k_tile), for the first `subtiles` num_k_tiles. */
template <class Tile, int subtiles, typename Issue, typename Meanwhile>
__device__ inline void for_each_k_tile(Shared<Tile> &s, typename Tile::Stages &pipe,
                                       int num_k_tiles, Issue issue, Meanwhile meanwhile) {
    auto k_tile = [&](auto first, auto slot) {
        mbarrier_wait(shared_address(&s.full[pipe.index]), pipe.phase);
        if constexpr (Tile::GATHER) fence_proxy_async(); /* the copies were ordinary writes */
        wgmma_fence();
        issue(s.stage[pipe.index], first);
        wgmma_commit_group();
        if constexpr (slot.value < subtiles) meanwhile(slot);
        wgmma_wait_group<0>();
        release<Tile>(s, pipe.index);
        pipe.advance();
    };
    k_tile(std::true_type(), std::integral_constant<int, 0>());
    for_each_subtile<1, subtiles>([&](auto slot) {
        if (slot.value < num_k_tiles) k_tile(std::false_type(), slot);
    });
    for (int i = subtiles > 1 ? subtiles : 1; i < num_k_tiles; i++)
        k_tile(std::false_type(), std::integral_constant<int, subtiles>());
}

/* d = the 64 rows of warpgroup `wg` times the tile's first `columns` columns. */
template <class Tile, int columns, int subtiles, typename Meanwhile>
__device__ inline void run_mainloop(float *d, Shared<Tile> &s, typename Tile::Stages &pipe,
                                    int num_k_tiles, int wg, Meanwhile meanwhile) {
    auto issue = [&](auto &stage, auto first) {
        constexpr int r = K16_STEP<Tile::A_MAJOR>, w = K16_STEP<Tile::B_MAJOR>;
        uint64_t a = matrix_descriptor<Tile::A_MAJOR>(shared_address(stage.a) + wg * SUBTILE_BYTES);
        uint64_t b = matrix_descriptor<Tile::B_MAJOR>(shared_address(stage.b));
        typename Tile::T t = {};
        constexpr int n = columns < Tile::WGMMA_N ? columns : Tile::WGMMA_N;
        constexpr int next = (SUBTILE_BYTES >> 4) * n / SUBTILE; /* the descriptor's n columns on */
#pragma unroll
        for (int i = 0; i < columns / n; i++, b += next) {
            float *sums = d + n / 2 * i;
            wgmma<n, !first.value, Tile::A_MAJOR, Tile::B_MAJOR>(sums, a, b, t);
#pragma unroll
            for (int k = 1; k < K_TILE / 16; k++)
                wgmma<n, 1, Tile::A_MAJOR, Tile::B_MAJOR>(sums, a + k * r, b + k * w, t);
        }
    };
    for_each_k_tile<Tile, subtiles>(s, pipe, num_k_tiles, issue, meanwhile);
}

/* An expert of few rows, with the operands swapped, so that no arithmetic goes into rows that are not there: 64
 * lines of the weight are wgmma's 64 rows, the expert's rows, up to `tokens`, its columns. A warpgroup has two
 * boxes of lines: the sums of the first are d[0 .. tokens / 2), of the second those after it. */
template <class Tile, int tokens>
__device__ inline void run_mainloop_swapped(float (&d)[tokens], Shared<Tile> &s,
                                            typename Tile::Stages &pipe, int num_k_tiles,
                                            int first_box, int second_box) {
    auto issue = [&](auto &stage, auto first) {
        constexpr int r = K16_STEP<MAJOR_K>, w = K16_STEP<Tile::B_MAJOR>;
        uint64_t rows = matrix_descriptor<MAJOR_K>(shared_address(stage.a));
        uint64_t a =
            matrix_descriptor<Tile::B_MAJOR>(shared_address(stage.b) + first_box * SUBTILE_BYTES);
        uint64_t b =
            matrix_descriptor<Tile::B_MAJOR>(shared_address(stage.b) + second_box * SUBTILE_BYTES);
        typename Tile::T t = {};
        wgmma<tokens, !first.value, Tile::B_MAJOR, MAJOR_K>(d, a, rows, t);
        wgmma<tokens, !first.value, Tile::B_MAJOR, MAJOR_K>(d + tokens / 2, b, rows, t);
#pragma unroll
        for (int k = 1; k < K_TILE / 16; k++) {
            wgmma<tokens, 1, Tile::B_MAJOR, MAJOR_K>(d, a + k * w, rows + k * r, t);
            wgmma<tokens, 1, Tile::B_MAJOR, MAJOR_K>(d + tokens / 2, b + k * w, rows + k * r, t);
        }
    };
    for_each_k_tile<Tile, 0>(s, pipe, num_k_tiles, issue, [](auto) {});
}

/* --- the aligned kernel ------------------------------------------------------------------------------------------- */

template <class Tile>
__device__ inline Shared<Tile> &prologue() {
    extern __shared__ __align__(1024) uint8_t memory[];
    auto &s = *reinterpret_cast<Shared<Tile> *>(memory);
    if (threadIdx.x == 0) {
        for (int i = 0; i < Tile::STAGES; i++) {
            /* the copy engine's bytes, and every gathering thread */
            mbarrier_init(shared_address(&s.full[i]), 1 + Tile::GATHER * 32 * Tile::LOAD_WARPS);
            mbarrier_init(shared_address(&s.empty[i]), Tile::CONSUMER_WARPS);
        }
        s.queue.init();
        fence_mbarrier_init();
    }
    __syncthreads();
    griddepcontrol_wait(); /* for the plan */
    return s;
}

/* epilogue.hold(d, tile, row, writer) takes a warpgroup's 64 rows, of which `row` is the first in the expert;
 * epilogue.store_subtile<slot>(writer), for the subtiles 0 to SUBTILES - 1, and flush(writer) store what it holds of them.
 * HALF_N: there are tiles of half a tile's columns.
 * epilogue.store_swapped(d, tile, wg, warp, writer) stores what run_mainloop_swapped left: a warp of 4 has lines 16 warp to
 * 16 warp + 15 of each of its warpgroup's two boxes. */
template <class Tile, typename Epilogue>
__device__ inline void persistent_gemm(const Gemm &p, Epilogue epilogue) {
    auto &s = prologue<Tile>();
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), wg = warp / 4 - 1; /* -1: the producer */
    if (wg < 0) {
        setmaxnreg_dec<Tile::PRODUCER_REGISTERS>();
        if (warp == 3)
            fetch_tiles(p.schedule, s.queue, p.row_token, p.T);
        else if constexpr (Tile::GATHER)
            load_gather<Tile>(p, s);
        else if (warp == 0)
            load_tma<Tile>(p, s);
    } else {
        setmaxnreg_inc<Tile::CONSUMER_REGISTERS>();
        int num_k_tiles = p.num_k_tiles[0] + p.num_k_tiles[1];
        TileReader<typename Tile::Queue> reader(s.queue);
        typename Tile::Stages pipe;
        typename Epilogue::Writer writer(shared_address(s.staging[wg]), wg, warp % 4);
        auto store_subtile = [&](auto slot) {
            epilogue.template store_subtile<slot.value>(writer);
        };
        for (WorkTile tile = reader.next(); tile.expert >= 0; tile = reader.next()) {
            if (tile.skinny || num_k_tiles < Epilogue::SUBTILES) epilogue.flush(writer);
            if (tile.skinny) {
                int first = p.gate_up ? wg : 2 * wg, second = p.gate_up ? wg + 2 : 2 * wg + 1;
                auto few = [&](auto tokens) {
                    float d[tokens.value];
                    run_mainloop_swapped<Tile>(d, s, pipe, num_k_tiles, first, second);
                    writer.drain();
                    epilogue.store_swapped(d, tile, wg, warp % 4, writer);
                };
                if (tile.num_rows <= 8)
                    few(std::integral_constant<int, 8>());
                else if (tile.num_rows <= 32)
                    few(std::integral_constant<int, 32>());
                else
                    few(std::integral_constant<int, 64>());
                continue;
            }
            float d[128];
            if (Epilogue::HALF_N && tile.half_n)
                run_mainloop<Tile, Tile::BN / 2, Epilogue::SUBTILES>(d, s, pipe, num_k_tiles, wg,
                                                                     store_subtile);
            else
                run_mainloop<Tile, Tile::BN, Epilogue::SUBTILES>(d, s, pipe, num_k_tiles, wg,
                                                                 store_subtile);
            epilogue.hold(d, tile, tile.row_in_expert + SUBTILE * wg, writer);
        }
        epilogue.flush(writer);
        writer.drain_all();
    }
}

/* Zeroes rows [ends[E-1], R) of a result, which no tile covers. Called by all threads. */
template <typename T>
__device__ inline void zero_rows_past(const TileSchedule &p, T *out, int64_t width) {
    int64_t first = (int64_t)p.ends[p.E - 1] * width, end = p.R * width;
    int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int64_t threads = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = first / CHUNK + thread; i < end / CHUNK; i += threads)
        st_global_v4((uint4 *)out + i, make_uint4(0, 0, 0, 0));
}

/* --- launcher ---------------------------------------------------------------------------------------------------- */

/* One CTA a multiprocessor. */
inline int num_sms(int *num_ctas) {
    int device;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(num_ctas, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess && *num_ctas > MAX_CTAS) *num_ctas = MAX_CTAS;
    return cuda_status(error);
}

/* Launches a gemm behind its plan: it may start while the plan is made, and waits for it itself. */
template <class Tile, class Memory = Shared<Tile>, typename Params>
int launch_gemm(void (*kernel)(Params), const Params &p, void *stream) {
    constexpr size_t bytes = sizeof(Memory);
    static_assert(bytes <= 227 * 1024, "what a CTA of sm_90 has");
    int num_ctas, status = num_sms(&num_ctas);
    if (status != FUSED_MOE_OK) return status;
    cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return cuda_status(error);
    cudaLaunchAttribute behind = {};
    behind.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    behind.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = num_ctas;
    config.blockDim = Tile::THREADS;
    config.dynamicSmemBytes = bytes;
    config.stream = (cudaStream_t)stream;
    config.attrs = &behind;
    config.numAttrs = 1;
    return cuda_status(cudaLaunchKernelEx(&config, kernel, p));
}

} // namespace fused_moe
