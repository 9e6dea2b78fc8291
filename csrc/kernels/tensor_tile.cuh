/* A CTA's tile of C = A B^T for 16-bit dtypes on tensor cores: mma.sync fed by a ring of cp.async stages.
 *
 *   C 128 x 256 by eight warps of 64 x 64; or 128 x 128 by four, and two CTAs an SM, so that one's epilogue
 *   hides under the other's loop
 *   stage: 32 of k of A and of B, in the order they have in memory:
 *     k-major     [lines][32 k],  16-byte chunk c of line i at place c ^ (i/2 % 4)
 *     line-major  [32 k][lines],  chunk c of k at place c ^ (k % 8)
 *   so that neither the copies nor ldmatrix meet a bank conflict. ldmatrix transposes line-major ones.
 *
 * The loop issues 64 mma a warp and stage, so every other instruction counts: a thread's addresses are
 * made before it, and differ inside it by constants.
 *
 * With vectors = false the operands may have any strides and alignment: numbers are copied one by one,
 * into the k-major order. With scaled = true A's numbers are multiplied on the way, through registers. */
#pragma once

#include <type_traits>

#include "operand.cuh"

namespace fused_moe {

template <typename T_, bool a_k_major, bool b_k_major, bool vectors, bool scaled = false,
          int columns = 256>
struct TensorTile {
    using T = T_;
    using R = float;
    static constexpr bool FAST = vectors && !scaled; /* copies are cp.async, the loop is unrolled */
    static constexpr int BM = 128, BN = columns, BK = 32, THREADS = BN, CTAS = 256 / BN;
    static constexpr int STAGES = FAST && a_k_major ? 4 : 3;
    static constexpr int WARPS_N = BN / 64, WARP_M = 64, SLICES = 4, SLICE_ROWS = 16;
    static constexpr bool A_K = a_k_major || !vectors, B_K = b_k_major || !vectors;
    /* Of TileShared. Four wide stages leave no room for scales in the 99 KiB of a small GPU. */
    static constexpr bool HAS_SCALES = !FAST || BN == 128, HAS_STRIDES = !vectors;

    struct Shared {
        T a[STAGES][BM * BK], b[STAGES][BN * BK];
    };

    float acc[4][8][4];

    __device__ static int warp_m() { return threadIdx.x / 32 / WARPS_N; }
    __device__ static int warp_n() { return threadIdx.x / 32 % WARPS_N; }

    __device__ void zero() {
#pragma unroll
        for (int i = 0; i < 4 * 8 * 4; i++) (&acc[0][0][0])[i] = 0;
    }

    template <bool k_major, int lines>
    __device__ static int place(int line, int k) {
        return k_major ? line * BK + ((k / 8 ^ line / 2) % 4) * 8 + k % 8
                       : k * lines + (line / 8 ^ k % 8) * 8 + line % 8;
    }

    /* --- from global memory to a stage: this thread's part of one operand -----------------------------
     *
     * copy(stage, ahead) takes the chunks `ahead` stages past the present one; both are constants where the
     * loop calls it, and advance() moves on by a aligned ring. Past depth it writes zeros. */

    static constexpr int RING_K = STAGES * BK;

    __device__ static void copy_scaled(T *dst, const T *src, bool valid, float scale) {
        Pack<T> pack = {};
        if (valid) pack = *reinterpret_cast<const Pack<T> *>(src);
#pragma unroll
        for (int i = 0; i < CHUNK; i++)
            pack.v[i] = from_accum<T>(valid ? to_accum(pack.v[i]) * scale : 0);
        *reinterpret_cast<Pack<T> *>(dst) = pack;
    }

    /* Consecutive threads along k. */
    template <int lines, bool with_scale>
    struct AlongK {
        static constexpr int AT_ONCE = THREADS * CHUNK / BK, COPIES = lines / AT_ONCE;
        const Operand<T> &x;
        T *ring;
        const T *next[COPIES];
        int first_line, k, left; /* left: numbers from this thread's k to depth */
        unsigned valid = 0;
        uint32_t dst;

        __device__ AlongK(const Operand<T> &operand, int depth, T *ring_)
            : x(operand), ring(ring_), first_line(threadIdx.x / (BK / CHUNK)),
              k(threadIdx.x % (BK / CHUNK) * CHUNK), left(depth - k) {
            ring += place<true, lines>(first_line, k);
            dst = opaque(shared_address(ring));
#pragma unroll
            for (int i = 0; i < COPIES; i++) {
                const T *line = x.origin[first_line + i * AT_ONCE];
                if (line) valid |= 1u << i;
                next[i] = line + k;
            }
        }

        __device__ void copy(int stage, int ahead) {
            unsigned here = left > ahead * BK ? valid : 0;
#pragma unroll
            for (int i = 0; i < COPIES; i++) {
                int to = (stage * lines + i * AT_ONCE) * BK;
                if constexpr (with_scale)
                    copy_scaled(ring + to, next[i] + ahead * BK, here >> i & 1,
                                x.scale(first_line + i * AT_ONCE, k + ahead * BK));
                else
                    cp_async(dst + to * (int)sizeof(T), next[i] + ahead * BK, here >> i & 1);
            }
        }

        __device__ void advance() {
            k += RING_K;
            left -= RING_K;
#pragma unroll
            for (int i = 0; i < COPIES; i++) next[i] += RING_K;
        }
    };

    /* Consecutive threads along the lines. A map's rows are fetched a stage before they are needed. */
    template <int lines, bool with_scale>
    struct AlongLines {
        static constexpr int WIDTH = lines / CHUNK, AT_ONCE = THREADS / WIDTH,
                             COPIES = BK / AT_ONCE;
        const Operand<T> &x;
        T *ring;
        const char *line;
        unsigned stride; /* in bytes */
        unsigned limit;  /* rows below it are there */
        int k, depth;
        int row[COPIES];
        uint32_t dst;

        __device__ AlongLines(const Operand<T> &operand, int depth_, T *ring_)
            : x(operand), ring(ring_), stride((unsigned)x.stride_k * (unsigned)sizeof(T)),
              k(threadIdx.x / WIDTH), depth(depth_) {
            int first_line = threadIdx.x % WIDTH * CHUNK;
            line = (const char *)x.origin[first_line];
            limit = !line ? 0 : x.row ? (unsigned)x.num_rows : depth;
            ring += place<false, lines>(first_line, k);
            dst = opaque(shared_address(ring));
            fetch_rows(0);
        }

        __device__ void fetch_rows(int ahead) {
#pragma unroll
            for (int i = 0; i < COPIES; i++) row[i] = k + ahead * BK + i * AT_ONCE;
            if (x.row)
#pragma unroll
                for (int i = 0; i < COPIES; i++) row[i] = row[i] < depth ? x.row[row[i]] : -1;
        }

        __device__ void copy(int stage, int ahead) {
#pragma unroll
            for (int i = 0; i < COPIES; i++) {
                bool here = (unsigned)row[i] < limit;
                const T *src = (const T *)(line + (uint64_t)(unsigned)row[i] * stride);
                int to = (stage * BK + i * AT_ONCE) * lines;
                if constexpr (with_scale)
                    copy_scaled(ring + to, src, here,
                                here ? x.scale(0, k + ahead * BK + i * AT_ONCE) : 0.0f);
                else
                    cp_async(dst + to * (int)sizeof(T), src, here);
            }
            fetch_rows(ahead + 1);
        }

        __device__ void advance() { k += RING_K; }
    };

    template <int lines>
    struct OneByOne {
        const Operand<T> &x;
        T *ring;
        int k = 0, depth;

        __device__ OneByOne(const Operand<T> &operand, int depth_, T *ring_)
            : x(operand), ring(ring_), depth(depth_) {}

        __device__ void copy(int stage, int ahead) {
            bool along_k = x.stride_k == 1;
#pragma unroll 1
            for (int i = threadIdx.x; i < lines * BK; i += THREADS) {
                int line = along_k ? i / BK : i % lines, at = along_k ? i % BK : i / lines;
                ring[stage * lines * BK + place<true, lines>(line, at)] =
                    x.at(line, k + ahead * BK + at, depth);
            }
        }

        __device__ void advance() { k += RING_K; }
    };

    template <int lines, bool k_major, bool with_scale>
    using Copier = std::conditional_t<
        !vectors, OneByOne<lines>,
        std::conditional_t<k_major, AlongK<lines, with_scale>, AlongLines<lines, with_scale>>>;

    /* --- from a stage to registers --------------------------------------------------------------------- */

    /* Fragments of four 16-line groups. lines_first: the quarters of a warp address lines 0-7 | 8-15 and
     * then the same at k + 8, as mma's A wants them; else k | k + 8 first, as two of its B do. */
    template <int lines, bool k_major, bool lines_first>
    struct Fragments {
        static constexpr int NUM = k_major ? BK / 16 : 4;
        uint32_t at[NUM]; /* address in the first stage */

        __device__ Fragments(int first_line, const T *ring) {
            int row = threadIdx.x % 8, low = threadIdx.x / 8 % 2 * 8,
                high = threadIdx.x / 16 % 2 * 8;
            int line = first_line + (lines_first ? low : high), k = lines_first ? high : low;
#pragma unroll
            for (int i = 0; i < NUM; i++) {
                int from = k_major ? place<true, lines>(line + row, k + 16 * i)
                                   : place<false, lines>(line + 16 * i, k + row);
                at[i] = opaque(shared_address(ring + from));
            }
        }

        __device__ void load(uint32_t (&r)[4], int stage, int i, int k) const {
            if constexpr (k_major)
                ldmatrix_x4(r, at[k / 16] + (stage * lines + i * 16) * BK * (int)sizeof(T));
            else
                ldmatrix_x4_trans(r, at[i] + (stage * BK + k) * lines * (int)sizeof(T));
        }
    };

    /* --- the loop --------------------------------------------------------------------------------------- */

    /* acc += A B^T over k < depth. Origins are in shared memory and synchronised. */
    __device__ void multiply(Shared &s, const Operand<T> &a, const Operand<T> &b, int depth) {
        Copier<BM, A_K, scaled> copy_a(a, depth, s.a[0]);
        Copier<BN, B_K, false> copy_b(b, depth, s.b[0]);
        Fragments<BM, A_K, true> fragments_a(warp_m() * WARP_M, s.a[0]);
        Fragments<BN, B_K, false> fragments_b(warp_n() * 64, s.b[0]);
        auto copy = [&](int stage, int ahead) {
            copy_a.copy(stage, ahead);
            copy_b.copy(stage, ahead);
            cp_async_commit_group();
        };
        /* Fragments of the next 16 k are on their way while these are multiplied, across stages too. */
        uint32_t fa[2][4][4], fb[2][4][4];
        auto load = [&](int half, int stage) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                fragments_a.load(fa[half][i], stage, i, 16 * half);
                fragments_b.load(fb[half][i], stage, i, 16 * half);
            }
        };
        auto multiply_half = [&](int half) {
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 8; j++)
                    mma_m16n8k16(acc[i][j], fa[half][i], fb[half][j / 2][j % 2 * 2],
                                 fb[half][j / 2][j % 2 * 2 + 1], T());
        };
#pragma unroll(FAST ? STAGES - 1 : 1)
        for (int stage = 0; stage < STAGES - 1; stage++) copy(stage, stage);
        cp_async_wait_group<STAGES - 2>();
        __syncthreads();
        load(0, 0);
        auto step = [&](int stage) {
            load(1, stage);
            copy((stage + STAGES - 1) % STAGES, stage + STAGES - 1);
            multiply_half(0);
            cp_async_wait_group<STAGES - 2>();
            __syncthreads();
            load(0, (stage + 1) % STAGES);
            multiply_half(1);
        };
        /* A ring at a time: where it is unrolled, the stage and so every address is a constant. */
        for (int left = (depth + BK - 1) / BK; left > 0; left -= STAGES) {
            if constexpr (FAST) {
#pragma unroll
                for (int stage = 0; stage < STAGES; stage++) {
                    if (stage >= left) break;
                    step(stage);
                }
            } else {
#pragma unroll 1
                for (int stage = 0; stage < min(left, STAGES); stage++) step(stage);
            }
            copy_a.advance();
            copy_b.advance();
        }
        cp_async_wait_group<0>();
        __syncthreads();
    }

    /* --- the result ------------------------------------------------------------------------------------- */

    /* Row of the tile that is row i of this warp's slice q. */
    __device__ static int slice_row(int q, int i) { return warp_m() * WARP_M + q * 16 + i; }

    /* Slice q of the warp's accumulators, 16 rows of 64 columns, into shared memory. */
    __device__ void store_slice(int q, float *out, int stride) const {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < SLICES; i++)
            if (i == q) /* a run-time index would put acc into local memory */
#pragma unroll
                for (int j = 0; j < 8; j++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        *reinterpret_cast<float2 *>(out + (lane / 4 + 8 * half) * stride + j * 8 +
                                                    lane % 4 * 2) =
                            make_float2(acc[i][j][2 * half], acc[i][j][2 * half + 1]);
    }
};

} // namespace fused_moe
