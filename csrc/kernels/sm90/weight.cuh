/* A dense weight as a GEMM's B: loaded by TMA, read by wgmma through descriptors.
 *
 * A weight is a type that gives a GEMM
 *   Params                  what the host fills: the member `weight` of Gemm
 *   STAGE_BYTES             of B in a stage
 *   PARTS                   of k, at most
 *   num_stages(p, tile)     k-tiles, or pairs of them, of a work tile
 *   bytes(p, tile)          that a stage's loads bring
 *   load(p, ..)             issues these loads
 *   descriptor(b, subtile)  for wgmma, of a subtile of the stage
 *   HAS_SCALES              whether a stage has scales, which copy_scales(p, ..) copies by cp.async
 * With IN_REGISTERS it has no descriptor, but what makes fragments: weight_quantized.cuh. */
#pragma once

#include "wgmma.cuh"

namespace fused_moe {
namespace sm90 {

typedef struct {
    CUtensorMap map[2]; /* (E, N, k of part i), or (E, F, k) of gate and of up */
} DenseParams;

/* BN is 256, 128 or 64 columns. */
template <typename Operand, Major MAJOR, int BN>
struct DenseWeight {
    using Params = DenseParams;
    static constexpr bool IN_REGISTERS = false, HAS_SCALES = false;
    static constexpr int PARTS = 2; /* of k: up_dgrad's */
    static constexpr int STAGE_BYTES = BN / SUBTILE * SUBTILE_BYTES;
    static constexpr int BOX = BN / (BN > SUBTILE ? 2 : 1); /* columns that one map's loads bring */

    template <class Gemm, class Tile>
    __device__ static int num_stages(const Gemm &p, const Tile &) {
        return p.num_k_tiles[0] + p.num_k_tiles[1];
    }

    template <class Gemm, class Tile>
    __device__ static int bytes(const Gemm &, const Tile &tile) {
        return tile.half_n ? STAGE_BYTES / 2 : STAGE_BYTES;
    }

    /* One k-tile: a box or two, or one of each subtile where N is contiguous. One thread calls it. */
    template <class Gemm, class Tile>
    __device__ static void load(const Gemm &p, uint32_t dst, uint32_t full, int part, int k_tile,
                                const Tile &tile) {
        int k = K_TILE<Operand> * k_tile, boxes = tile.half_n ? 1 : BN / BOX;
        for (int box = 0; box < boxes; box++, dst += BOX * STAGE_BYTES / BN) {
            const CUtensorMap *map = &p.weight.map[p.gate_up ? box : part];
            int n = tile.first_column + (p.gate_up ? 0 : BOX * box);
            if constexpr (MAJOR == Major::K) {
                cp_async_bulk_tensor_load(dst, map, full, k, n, tile.expert);
            } else {
                cp_async_bulk_tensor_load(dst, map, full, n, k, tile.expert);
                if (BOX > SUBTILE)
                    cp_async_bulk_tensor_load(dst + SUBTILE_BYTES, map, full, n + SUBTILE, k, tile.expert);
            }
        }
    }

    /* The subtile of a stage's b at `address`. */
    __device__ static uint64_t descriptor(uint32_t b, int subtile) {
        return matrix_descriptor<MAJOR>(b + subtile * SUBTILE_BYTES);
    }
};

} // namespace sm90
} // namespace fused_moe
