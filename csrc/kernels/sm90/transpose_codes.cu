/* transpose_codes: tokens' codes, gathered to their rows, by columns, for weight gradients.
 *
 * A CTA makes one tile of 128 rows and 128 columns. Tiles of the same columns are neighbours in the grid:
 * what they read, 128 bytes of each token, stays in L2 for the token's other rows. L2's bandwidth is the
 * limit, so codes are read, and not x, which has twice the bytes. */
#include "columns.cuh"
#include "launch.cuh"

namespace fused_moe {
namespace sm90 {
namespace {

constexpr int THREADS = 32 * TILE_WARPS, CTAS_PER_SM = 6;
constexpr int LANE_COLUMNS = 16; /* of a lane, one load of each of its rows */

typedef struct {
    FusedMoeTransposeCodes p;
    FusedMoeTileOrder order;
    int32_t row_tiles; /* at most */
} TransposeCodes;

struct alignas(128) Memory {
    uint8_t codes[COLUMNS_BYTES];
    int32_t first_row, num_rows, block;
};

/* Words of four columns, one of each row, become words of four rows, one of each column. */
__device__ inline void transpose_bytes(uint32_t (&columns)[4], const uint32_t (&rows)[4]) {
    const uint32_t low01 = __byte_perm(rows[0], rows[1], 0x5140),
                   low23 = __byte_perm(rows[2], rows[3], 0x5140);
    const uint32_t high01 = __byte_perm(rows[0], rows[1], 0x7362),
                   high23 = __byte_perm(rows[2], rows[3], 0x7362);
    columns[0] = __byte_perm(low01, low23, 0x5410);
    columns[1] = __byte_perm(low01, low23, 0x7632);
    columns[2] = __byte_perm(high01, high23, 0x5410);
    columns[3] = __byte_perm(high01, high23, 0x7632);
}

__global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    transpose_codes_kernel(const __grid_constant__ TransposeCodes q) {
    __shared__ Memory s;
    const FusedMoeTransposeCodes &p = q.p;
    const FusedMoeRowMap &map = p.row_map;
    const int first = lane_row(), chunk = lane_chunk(), n_tile = blockIdx.x / q.row_tiles;
    if (threadIdx.x < 32) {
        const uint32_t index = blockIdx.x % q.row_tiles;
        FusedMoeWorkTile tile = {};
        if (index < fused_moe_num_work_tiles(map.schedule, map.E, (int32_t)map.R, &q.order))
            tile = fused_moe_work_tile(map.schedule, map.offs, map.E, (int32_t)map.R, &q.order, index);
        if (threadIdx.x == 0) {
            s.first_row = tile.first_row, s.num_rows = tile.num_rows;
            s.block = row_block_of(map, tile);
        }
    }
    __syncthreads();
    if (s.num_rows == 0) return;

    uint4 rows[LANE_ROWS];
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
        const bool exists = first + i < s.num_rows;
        const int32_t row = s.first_row + (exists ? first + i : 0);
        uint32_t token = map.row_token ? __ldg(map.row_token + row) : row;
        if (token >= (uint32_t)map.T) token = 0; /* a wrong plan */
        const uint8_t *codes = (const uint8_t *)p.codes + token * p.D + p.first + n_tile * TILE_COLUMNS;
        rows[i] = ld_global_v4(codes + LANE_COLUMNS * chunk, exists);
    }
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS / 4; i++) {
        auto word = [&](const uint4 &v) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; };
        const uint32_t of_rows[4] = {word(rows[0]), word(rows[1]), word(rows[2]), word(rows[3])};
        uint32_t of_columns[4];
        transpose_bytes(of_columns, of_rows);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int column = LANE_COLUMNS * chunk + 4 * i + j;
            st_shared_u32(shared_address(s.codes) + column / CHUNK * GROUP_PITCH +
                              column % CHUNK * TILE_ROWS + first,
                          of_columns[j]);
        }
    }
    __syncthreads();
    const int64_t column = (int64_t)s.block * p.num_columns + n_tile * TILE_COLUMNS;
    copy_columns((uint8_t *)p.columns + column * TILE_ROWS, shared_address(s.codes));
}

} // namespace

int transpose_codes(const FusedMoeTransposeCodes &p, void *stream) {
    const FusedMoeRowMap &map = p.row_map;
    if (map.R == 0 || map.T == 0) return FUSED_MOE_OK;
    TransposeCodes q = {p, fused_moe_default_order(1, 0),
                        (int32_t)fused_moe_max_row_tiles((int32_t)map.R, map.E, TILE_ROWS)};
    q.order.interleave = 0;
    return launch(transpose_codes_kernel, q, q.row_tiles * (p.num_columns / TILE_COLUMNS), THREADS, 0,
                  stream);
}

} // namespace sm90
} // namespace fused_moe
