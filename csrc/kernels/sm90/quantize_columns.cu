/* quantize_columns: the codes that quantize_rows makes of rows, by columns, for weight gradients.
 *
 * A CTA makes one tile of 128 rows and 128 columns (columns.cuh). Row tiles of the same columns are
 * neighbours in the grid: what they read of x, 256 bytes of each token, stays in L2 for the token's other
 * rows. */
#include "columns.cuh"
#include "launch.cuh"

namespace fused_moe {
namespace sm90 {
namespace {

constexpr int THREADS = 32 * TILE_WARPS, CTAS_PER_SM = 4;

typedef struct {
    FusedMoeQuantizeColumns p;
    FusedMoeTileOrder order;
} QuantizeColumns;

struct alignas(128) Memory {
    uint8_t codes[COLUMNS_BYTES];
    FusedMoeWorkTile tile;
    int32_t block;
};

__global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    quantize_columns_kernel(const __grid_constant__ QuantizeColumns q) {
    using T = __nv_bfloat16;
    __shared__ Memory s;
    const FusedMoeQuantizeColumns &p = q.p;
    const FusedMoeRowMap &map = p.row_map;
    const int first = lane_row();
    griddepcontrol_wait();
    if (threadIdx.x < 32) {
        const uint32_t index = blockIdx.x;
        const bool exists = index < fused_moe_num_work_tiles(map.schedule, map.E, (int32_t)map.R, &q.order);
        FusedMoeWorkTile tile = {};
        if (exists)
            tile = fused_moe_work_tile(map.schedule, map.offs, map.E, (int32_t)map.R, &q.order, index);
        const int32_t start = fused_moe_expert_start(map.offs, tile.expert);
        if (threadIdx.x == 0) {
            s.tile = tile;
            s.block = fused_moe_first_row_block(start, tile.expert) + (tile.first_row - start) / TILE_ROWS;
        }
    }
    __syncthreads();
    const int num_rows = s.tile.num_rows, n_tile = blockIdx.y;
    if (num_rows == 0) return;

    uint4 packed[2][LANE_ROWS] = {};
    float inverse[LANE_ROWS] = {};
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
        if (first + i >= num_rows) continue;
        const int32_t row = s.tile.first_row + first + i;
        uint32_t token = map.row_token ? __ldg(map.row_token + row) : row;
        if (token >= (uint32_t)map.T) token = 0; /* a wrong plan */
        const T *x = (const T *)p.x + token * p.D + p.first + n_tile * TILE_COLUMNS + CHUNK * lane_chunk();
        for (int half = 0; half < 2; half++) packed[half][i] = ld_global_v4(x + half * SUBTILE, true);
        inverse[i] = 1 / __ldg(p.scale + row);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float v[LANE_ROWS][CHUNK];
        uint32_t words[CHUNK];
#pragma unroll
        for (int i = 0; i < LANE_ROWS; i++) {
            const uint32_t pair[] = {packed[half][i].x, packed[half][i].y, packed[half][i].z,
                                     packed[half][i].w};
#pragma unroll
            for (int j = 0; j < CHUNK; j += 2) {
                const float2 two = floats_of_bf16(pair[j / 2]);
                v[i][j] = two.x, v[i][j + 1] = two.y;
            }
        }
        make_column_words(words, v, inverse);
        store_column_words(shared_address(s.codes), half, first, words);
    }
    __syncthreads();
    const int64_t column = (int64_t)s.block * p.columns + n_tile * TILE_COLUMNS;
    copy_columns((uint8_t *)p.codes + column * TILE_ROWS, shared_address(s.codes));
}

} // namespace

int quantize_columns(const FusedMoeQuantizeColumns &p, void *stream) {
    const FusedMoeRowMap &map = p.row_map;
    if (map.R == 0 || map.T == 0) return FUSED_MOE_OK;
    QuantizeColumns q = {p, fused_moe_default_order(1, 0)};
    q.order.interleave = 0;
    dim3 grid(fused_moe_max_row_tiles((int32_t)map.R, map.E, TILE_ROWS),
              (unsigned)(p.columns / TILE_COLUMNS));
    quantize_columns_kernel<<<grid, THREADS, 0, (cudaStream_t)stream>>>(q);
    return launch_status();
}

} // namespace sm90
} // namespace fused_moe
