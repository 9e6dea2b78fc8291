/* Codes by columns: tiles of 128 rows and 128 columns, in which a column's 128 codes are contiguous. Weight
 * gradients read them (eight_bit.h).
 *
 * Eight warps make a tile. Warp w has rows 16 w to 16 w + 15. Lane 8 q + c has rows 4 q to 4 q + 3 of these,
 * and columns 8 c to 8 c + 7 of each 64, so it makes one word of four codes per column. In shared memory,
 * groups of eight columns are padded by 16 bytes: a warp's stores of words have no bank conflicts. */
#pragma once

#include "../../eight_bit.h"
#include "../common/codes.cuh"
#include "ptx.cuh"

namespace fused_moe {
namespace sm90 {

constexpr int TILE_ROWS = FUSED_MOE_BLOCK, TILE_COLUMNS = FUSED_MOE_BLOCK;
constexpr int TILE_WARPS = 8, LANE_ROWS = 4; /* rows of a lane */
constexpr int GROUP_BYTES = CHUNK * TILE_ROWS, GROUP_PITCH = GROUP_BYTES + 16;
constexpr int NUM_GROUPS = TILE_COLUMNS / CHUNK, COLUMNS_BYTES = NUM_GROUPS * GROUP_PITCH;

__device__ inline int lane_chunk() {
    return threadIdx.x % 8;
}

/* The first of this lane's rows in the tile, where eight warps make it. */
__device__ inline int lane_row() {
    return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 8 * LANE_ROWS;
}

/* The row block of a row tile: one that exists, whatever offs holds. */
__device__ inline int32_t row_block_of(const FusedMoeRowMap &map, const FusedMoeWorkTile &tile) {
    const FusedMoeRows rows = fused_moe_expert_rows(map.offs, tile.expert, (int32_t)map.R);
    return fused_moe_first_row_block(rows.first, tile.expert) + (tile.first_row - rows.first) / TILE_ROWS;
}

/* The words of eight columns, of rows v[i] times factor[i]. */
__device__ inline void make_column_words(uint32_t *words, const float (&v)[LANE_ROWS][CHUNK],
                                         const float (&factor)[LANE_ROWS]) {
#pragma unroll
    for (int j = 0; j < CHUNK; j++)
        words[j] =
            word_of_e4m3(v[0][j] * factor[0], v[1][j] * factor[1], v[2][j] * factor[2], v[3][j] * factor[3]);
}

/* Stores them to a tile in shared memory; row: the first of the lane's. */
__device__ inline void store_column_words(uint32_t tile, int half, int row, const uint32_t *words) {
    uint32_t group = tile + (half * NUM_GROUPS / 2 + lane_chunk()) * GROUP_PITCH + row;
#pragma unroll
    for (int j = 0; j < CHUNK; j++) st_shared_u32(group + j * TILE_ROWS, words[j]);
}

/* Copies a tile to its contiguous 16 KiB in memory, when all eight warps have stored their words. TMA would
 * keep the shared memory until the stores have got through: a quarter of quantize_dh's time. */
__device__ inline void copy_columns(void *dst, uint32_t tile) {
    constexpr int THREADS = 32 * TILE_WARPS, GROUPS = THREADS / (GROUP_BYTES / 16); /* in a turn of all */
    const uint32_t group = threadIdx.x / (GROUP_BYTES / 16), of_group = threadIdx.x % (GROUP_BYTES / 16);
    const uint32_t from = tile + group * GROUP_PITCH + of_group * 16;
    uint4 *const to = (uint4 *)dst + threadIdx.x;
#pragma unroll
    for (int i = 0; i < NUM_GROUPS / GROUPS; i++)
        st_global_v4(to + THREADS * i, ld_shared_v4(from + GROUPS * GROUP_PITCH * i));
}

} // namespace sm90
} // namespace fused_moe
