/* Loads of wgrad: dw[e] = a[rows of e]^T b[row_token[rows of e]]; k runs along the rows of an expert.
 *
 * Both operands are MN-major, and wgmma reads them so: nothing is transposed. stage.a, wgmma's A, is 128
 * columns of b; stage.b, its B, is 256 columns of a. TMA loads a through the expert's tensor map. b is loaded
 * by TMA, too, or gathered by three warps with cp.async. Rows past the expert's last are zero on both sides,
 * since 0 * NaN is NaN. */
#pragma once

#include "gemm.cuh"

namespace fused_moe {
namespace sm90 {

struct alignas(16) WgradTile {
    int32_t expert; /* -1: there are no more tiles */
    int32_t first_row, num_rows, row_in_expert;
    int32_t slice, num_slices; /* split-K: slice of num_slices, which are summed up     */
    int32_t split_index;       /* of the tile's semaphore and its first slice's slot    */
    int32_t first_subtile;     /* of a's columns, those of part 1 after those of part 0 */
    int32_t first_n;           /* of b's columns                                        */
    int32_t map_slot;
};

enum { MAP_OF_A, MAP_OF_B }; /* per-expert tensor maps; with a gather b has none */

typedef struct {
    CUtensorMap dw[2];        /* of part i, in its own strides   */
    const void *b;            /* [T,N] before the gather         */
    const int32_t *row_token; /* [R]                             */
    int64_t T;
    int32_t N, M[2];
    int32_t n_tiles, subtiles[2];   /* tiles of N; subtiles of M, of part 0 and of both */
    FusedMoeWgradOrder wgrad_order; /* an expert's weight tiles: n_tiles times tiles of M */
    int32_t slice_rows;             /* of a tile's slice, at most                       */
    int32_t later_slots;            /* distance of later slices' slots from the first's */
    int32_t tiles_at_once;          /* that a CTA claims                                */
    bool is_write_bound;            /* stores in a's dtype are the first to leave L2    */
    bool accumulate;
    float4 *slices; /* [slots, weight_tiles, 2] accumulators of a warpgroup */
    TileSource tiles;
} Wgrad;

/* The part that a subtile of a's columns is in, and the subtile's first column there. */
__device__ inline int part_of(const Wgrad &p, int subtile) {
    return subtile >= p.subtiles[0];
}
__device__ inline int column_in_part(const Wgrad &p, int subtile) {
    return (subtile - part_of(p, subtile) * p.subtiles[0]) * SUBTILE;
}

template <typename T>
__device__ inline int num_k_tiles_of(const WgradTile &tile) {
    return (tile.num_rows + K_TILE<T> - 1) / K_TILE<T>;
}

/* A tile's 256 columns of a, loaded one k-tile at a time. */
struct ColumnsOfA {
    const CUtensorMap *map;
    int column[4]; /* of each subtile */

    __device__ ColumnsOfA(const Wgrad &p, const WgradTile &tile)
        : map(map_of_slot(p.tiles, MAP_OF_A, tile.map_slot)) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int subtile = tile.first_subtile + i;
            column[i] = part_of(p, subtile) * p.M[0] + column_in_part(p, subtile);
        }
    }

    /* One thread calls it. */
    __device__ void load(uint32_t dst, uint32_t full, int row) const {
#pragma unroll
        for (int i = 0; i < 4; i++)
            cp_async_bulk_tensor_load(dst + i * SUBTILE_BYTES, map, full, column[i], row);
    }
};

/* One warp loads a and b, both grouped by expert, by TMA. */
template <class Config>
__device__ inline void load_wgrad_tma(const Wgrad &p, Shared<Config> &s) {
    using T = typename Config::Operand;
    TileReader<typename Config::Queue> reader(s.queue);
    typename Config::Pipeline pipe;
    int acquired = -1;
    for (WgradTile tile = reader.next(); tile.expert >= 0; tile = reader.next()) {
        ColumnsOfA columns(p, tile);
        const CUtensorMap *b = map_of_slot(p.tiles, MAP_OF_B, tile.map_slot);
        if (tile.map_slot != acquired) {
            fence_proxy_tensormap_acquire(columns.map);
            fence_proxy_tensormap_acquire(b);
        }
        acquired = tile.map_slot;
        int num_k_tiles = num_k_tiles_of<T>(tile);
        for (int k_tile = 0; k_tile < num_k_tiles; k_tile++, pipe.advance()) {
            auto &stage = s.stage[pipe.index];
            uint32_t full = s.full[pipe.index].address();
            s.empty[pipe.index].wait(pipe.phase ^ 1);
            if (elect_sync()) {
                s.full[pipe.index].expect(sizeof(stage));
                int row = tile.row_in_expert + k_tile * K_TILE<T>;
                columns.load(shared_address(stage.b), full, row);
                for (int i = 0; i < Config::CONSUMERS; i++)
                    cp_async_bulk_tensor_load(shared_address(stage.a) + i * SUBTILE_BYTES, b, full,
                                              tile.first_n + i * SUBTILE, row);
            }
            __syncwarp();
        }
    }
}

/* The tokens of the rows of two k-tiles, two rows of each k-tile per lane; -1: there is no such row. These
 * loads would wait behind the copies, so they are issued two k-tiles ahead: a tile's first ones during the
 * tile before. */
template <typename T>
struct TokensAhead {
    static constexpr int K_TILES = 2, PER_LANE = K_TILE<T> / 32;
    int token[K_TILES][PER_LANE];

    __device__ void load(const Wgrad &p, const WgradTile &tile, int first_k_tile) {
        int row = first_k_tile * K_TILE<T> + threadIdx.x % 32;
        const int32_t *row_token = p.row_token + tile.first_row + row;
#pragma unroll
        for (int i = 0; i < K_TILES * PER_LANE; i++)
            token[i / PER_LANE][i % PER_LANE] =
                ld_global_or(row_token + 32 * i, row + 32 * i < tile.num_rows, -1);
    }
};

/* Three warps gather b: each copies both subtiles' columns of four rows at a time, one chunk of a subtile per
 * lane. Warp 0 loads a by TMA, too. */
template <class Config>
__device__ inline void load_wgrad_gather(const Wgrad &p, Shared<Config> &s) {
    using T = typename Config::Operand;
    constexpr int WARPS = Config::LOAD_WARPS;
    constexpr int HALVES = TokensAhead<T>::PER_LANE;                    /* of a k-tile: 32 rows each */
    constexpr int QUADS = 32 / 4, COPIES = (QUADS + WARPS - 1) / WARPS; /* of rows in a half; of a warp */
    int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), chunk = lane % 8;
    uint32_t num_tokens = (uint32_t)p.T; /* 2^31 - 1 at most */
    auto quad_of = [&](int half, int i) { return (warp + half) % WARPS + WARPS * i; };
    TileReader<typename Config::Queue> reader(s.queue);
    typename Config::Pipeline pipe;
    int acquired = -1;
    /* The warp that uses a map acquires it, as well as the warp that built it. */
    auto acquire = [&](const WgradTile &tile) {
        if (warp == 0 && tile.expert >= 0 && tile.map_slot != acquired)
            fence_proxy_tensormap_acquire(map_of_slot(p.tiles, MAP_OF_A, tile.map_slot));
        acquired = tile.map_slot;
    };
    WgradTile next = reader.next();
    TokensAhead<T> next_tokens;
    next_tokens.load(p, next, 0);
    acquire(next);
    while (next.expert >= 0) {
        WgradTile tile = next;
        TokensAhead<T> tokens = next_tokens;
        int n = tile.first_n + chunk * CHUNK, num_k_tiles = num_k_tiles_of<T>(tile);
        const char *first_token = (const char *)p.b + n * (int)sizeof(T);
        ColumnsOfA columns(p, tile);
        bool inside = n < p.N, inside_next = n + SUBTILE < p.N; /* of the two subtiles */
        auto load_k_tile = [&](int k_tile, const int (&token)[HALVES]) {
            auto &stage = s.stage[pipe.index];
            uint32_t full = s.full[pipe.index].address(), dst_b = shared_address(stage.a);
            uint32_t source[HALVES][COPIES]; /* all are read first: shuffles would wait behind copies */
#pragma unroll
            for (int half = 0; half < HALVES; half++)
#pragma unroll
                for (int i = 0; i < COPIES; i++)
                    source[half][i] = __shfl_sync(~0u, token[half], 4 * quad_of(half, i) + lane / 8);
            s.empty[pipe.index].wait(pipe.phase ^ 1);
            if (warp == 0 && elect_sync()) {
                s.full[pipe.index].expect(sizeof(stage.b));
                columns.load(shared_address(stage.b), full, tile.row_in_expert + k_tile * K_TILE<T>);
            }
            __syncwarp();
#pragma unroll
            for (int half = 0; half < HALVES; half++)
#pragma unroll
                for (int i = 0; i < COPIES; i++) {
                    if (quad_of(half, i) >= QUADS) continue;
                    int row = 32 * half + 4 * quad_of(half, i) + lane / 8;
                    uint32_t dst = swizzled(dst_b, row, chunk);
                    const char *src = first_token + source[half][i] * (int64_t)p.N * (int)sizeof(T);
                    bool is_row = source[half][i] < num_tokens;
                    cp_async(dst, src, inside && is_row);
                    cp_async(dst + SUBTILE_BYTES, src + SWIZZLE_BYTES, inside_next && is_row);
                }
            s.full[pipe.index].template arrive_after_copies<WARPS>();
            pipe.advance();
        };
        /* at least once: a tile without rows reads the next tile, too */
        for (int k_tile = 0; k_tile == 0 || k_tile < num_k_tiles; k_tile += TokensAhead<T>::K_TILES) {
            TokensAhead<T> later;
#pragma unroll
            for (int i = 0; i < TokensAhead<T>::K_TILES; i++) {
                if (k_tile + i < num_k_tiles) load_k_tile(k_tile + i, tokens.token[i]);
                if (i == 0) later.load(p, tile, k_tile + TokensAhead<T>::K_TILES);
            }
            tokens = later;
            if (k_tile == 0) {
                next = reader.next();
                next_tokens.load(p, next, 0);
                acquire(next);
            }
        }
    }
}

} // namespace sm90
} // namespace fused_moe
