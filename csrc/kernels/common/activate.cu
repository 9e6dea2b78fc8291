/* activate and activate_backward: the activation of rows of h, for experts composed of grouped GEMMs.
 *
 * Both are memory-bound. A CTA has neighbouring chunks, whatever rows they are in, so short rows leave no
 * lane idle. A thread loads all its chunks before it computes the first. */
#include "activation.cuh"
#include "launch.cuh"

namespace fused_moe {
namespace {

constexpr int THREADS = 256;

template <typename T>
constexpr int CHUNKS = is_half<T> ? 2 : 1; /* per thread */

__host__ __device__ inline int64_t chunks_of_row(int64_t F) {
    return (F + CHUNK - 1) / CHUNK;
}

/* A chunk of hidden columns of a row. n of its columns exist; 0 past the last row. */
struct RowChunk {
    int64_t row;
    int column, n;
};

/* The thread's chunks. Only the division that all threads of a CTA share has 64 bits. */
template <int N>
__device__ inline void find_chunks(RowChunk (&chunks)[N], int64_t R, int64_t F) {
    uint32_t row_chunks = (uint32_t)chunks_of_row(F);
    int64_t first = (int64_t)blockIdx.x * N * THREADS, row = first / row_chunks;
    uint32_t in_row = (uint32_t)(first - row * row_chunks) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < N; i++, in_row += THREADS) {
        RowChunk &chunk = chunks[i];
        chunk.row = row + in_row / row_chunks;
        chunk.column = (int)(in_row % row_chunks) * CHUNK;
        chunk.n = chunk.row < R ? (int)min((int64_t)CHUNK, F - chunk.column) : 0;
    }
}

/* The first gate and the first up of row r; interleaved pairs begin at the gate. */
template <typename T>
struct Row {
    T *gates, *ups;

    __device__ Row(FusedMoeLayout layout, int64_t F, T *h, T *up, int64_t r) {
        gates = h + r * (layout == FUSED_MOE_SEPARATE || layout == FUSED_MOE_UNGATED ? F : 2 * F);
        ups = layout == FUSED_MOE_SEPARATE ? up + r * F : gates + F;
    }
};

template <typename T, bool aligned, typename Params>
__device__ inline void load(PackedPair<T> &pair, const Params &p, const RowChunk &chunk) {
    Row<const T> row(p.layout, p.F, (const T *)p.h, (const T *)p.up, chunk.row);
    pair.load(p.layout, row.gates, row.ups, chunk.column, chunk.n, aligned);
}

template <typename T, bool aligned>
__global__ void __launch_bounds__(THREADS) activate_kernel(const __grid_constant__ FusedMoeActivate p) {
    RowChunk chunks[CHUNKS<T>];
    PackedPair<T> pairs[CHUNKS<T>];
    find_chunks(chunks, p.R, p.F);
#pragma unroll
    for (int i = 0; i < CHUNKS<T>; i++)
        if (chunks[i].n) load<T, aligned>(pairs[i], p, chunks[i]);
#pragma unroll
    for (int i = 0; i < CHUNKS<T>; i++) {
        auto [row, column, n] = chunks[i];
        if (!n) return;
        Pair<Accum<T>> q;
        Accum<T> a[CHUNK];
        pairs[i].unpack(q, p.layout);
        activate<T>(a, q, p.activation, p.layout != FUSED_MOE_UNGATED);
        store_chunk<T>((T *)p.a + row * p.F + column, a, n, aligned);
    }
}

template <typename T, bool aligned>
__global__ void __launch_bounds__(THREADS)
    activate_backward_kernel(const __grid_constant__ FusedMoeActivateBackward p) {
    RowChunk chunks[CHUNKS<T>];
    PackedPair<T> pairs[CHUNKS<T>];
    Pack<T> packed_da[CHUNKS<T>];
    find_chunks(chunks, p.R, p.F);
#pragma unroll
    for (int i = 0; i < CHUNKS<T>; i++) {
        auto [row, column, n] = chunks[i];
        if (!n) continue;
        load<T, aligned>(pairs[i], p, chunks[i]);
        load_pack(packed_da[i], (const T *)p.da + row * p.F + column, n, aligned);
    }
#pragma unroll
    for (int i = 0; i < CHUNKS<T>; i++) {
        auto [row, column, n] = chunks[i];
        if (!n) return;
        Pair<Accum<T>> q, d;
        Accum<T> a[CHUNK], da[CHUNK];
        pairs[i].unpack(q, p.layout);
#pragma unroll
        for (int c = 0; c < CHUNK; c += 2) to_accums(da[c], da[c + 1], packed_da[i].v + c);
        activate_backward<T>(a, d, da, q, p.activation, p.layout != FUSED_MOE_UNGATED);
        Row<T> drow(p.layout, p.F, (T *)p.dh, (T *)p.dup, row);
        store_pair<T>(drow.gates, drow.ups, d, p.layout, column, n, aligned);
    }
}

/* --- launchers ------------------------------------------------------------------------------------------ */

template <typename T, typename Params>
int64_t grid_of(const Params &p) {
    return ceil_div(p.R * chunks_of_row(p.F), CHUNKS<T> * THREADS);
}

template <typename T>
int launch_activate(const FusedMoeActivate &p, void *stream) {
    bool aligned =
        rows_are_aligned<T>(p.h, p.F) && rows_are_aligned<T>(p.up, p.F) && rows_are_aligned<T>(p.a, p.F);
    if constexpr (!std::is_same_v<T, double>) /* which is for gradcheck */
        if (aligned) return launch(activate_kernel<T, true>, p, grid_of<T>(p), THREADS, 0, stream);
    return launch(activate_kernel<T, false>, p, grid_of<T>(p), THREADS, 0, stream);
}

template <typename T>
int launch_activate_backward(const FusedMoeActivateBackward &p, void *stream) {
    bool aligned = rows_are_aligned<T>(p.da, p.F) && rows_are_aligned<T>(p.h, p.F) &&
                   rows_are_aligned<T>(p.up, p.F) && rows_are_aligned<T>(p.dh, p.F) &&
                   rows_are_aligned<T>(p.dup, p.F);
    if constexpr (!std::is_same_v<T, double>)
        if (aligned) return launch(activate_backward_kernel<T, true>, p, grid_of<T>(p), THREADS, 0, stream);
    return launch(activate_backward_kernel<T, false>, p, grid_of<T>(p), THREADS, 0, stream);
}

} // namespace
} // namespace fused_moe

using namespace fused_moe;

extern "C" int fused_moe_cuda_activate(const FusedMoeActivate *p, void *stream) {
    return with_dtype(p->dtype, [&](auto t) { return launch_activate<decltype(t)>(*p, stream); });
}

extern "C" int fused_moe_cuda_activate_backward(const FusedMoeActivateBackward *p, void *stream) {
    return with_dtype(p->dtype, [&](auto t) { return launch_activate_backward<decltype(t)>(*p, stream); });
}
