/* Strided matrices and tiles of rows: what is between the tensors and the GEMMs. */
#include "cpu.h"

#include <stdlib.h>
#include <string.h>

/* --- matrices ------------------------------------------------------------------------------------------- */

FmMatrix fm_dense(void *data, int64_t rows, int64_t cols) {
    return (FmMatrix){data, rows, cols, cols, 1};
}

FmMatrix fm_transposed(FmMatrix m) {
    return (FmMatrix){m.data, m.cols, m.rows, m.col_stride, m.row_stride};
}

FmMatrix fm_part(FmMatrix m, size_t elem_bytes, int64_t row, int64_t rows, int64_t col, int64_t cols) {
    void *data = fm_at(m.data, elem_bytes, row * m.row_stride + col * m.col_stride);
    return (FmMatrix){data, rows, cols, m.row_stride, m.col_stride};
}

FmMatrix fm_expert(const FusedMoeWeight *w, size_t elem_bytes, int32_t e, int64_t out, int64_t in) {
    void *data = fm_at(w->data, elem_bytes, e * w->stride_expert);
    return (FmMatrix){data, out, in, w->stride_out, w->stride_in};
}

/* Everything below walks along the unit stride, so a matrix is first transposed to have it in its columns. */
static bool is_transposed(FmMatrix m) {
    return m.col_stride != 1 && m.row_stride == 1;
}

static void *element(FmMatrix m, size_t bytes, int64_t i, int64_t j) {
    return fm_at(m.data, bytes, i * m.row_stride + j * m.col_stride);
}

/* Calls the conversion on whole rows where they are dense, else on one element at a time. */
#define FOR_RUNS(m, run, i, j)                                                                               \
    for (int64_t i = 0, run = (m).col_stride == 1 ? (m).cols : 1; i < (m).rows; i++)                         \
        for (int64_t j = 0; j < (m).cols; j += run)

FmMatrix fm_dense_as(FmMatrix m, void *buffer) {
    if (is_transposed(m)) return fm_transposed(fm_dense(buffer, m.cols, m.rows));
    return fm_dense(buffer, m.rows, m.cols);
}

FmMatrix fm_accum_for(const FmRows *v, FmMatrix m, void *buffer) {
    return v->is_accum && (m.col_stride == 1 || m.row_stride == 1) ? m : fm_dense_as(m, buffer);
}

FmMatrix fm_to_accum(const FmRows *v, FmMatrix m, void *buffer) {
    if (v->is_accum) return m;
    if (is_transposed(m)) return fm_transposed(fm_to_accum(v, fm_transposed(m), buffer));
    FmMatrix accum = fm_dense_as(m, buffer);
    FOR_RUNS(m, run, i, j)
    v->load(element(accum, v->accum_bytes, i, j), element(m, v->elem_bytes, i, j), run);
    return accum;
}

FmMatrix fm_operand(const FmRows *v, FmMatrix m, void *buffer) {
    if (!fm_operands_are_elements(v)) return fm_to_accum(v, m, buffer);
    /* PyTorch's matmul takes any strides */
    if (v->is_accum || fm_is_row_major(m) || fm_is_row_major(fm_transposed(m))) return m;
    FmMatrix copy = fm_dense(buffer, m.rows, m.cols);
    for (int64_t i = 0; i < m.rows; i++)
        for (int64_t j = 0; j < m.cols; j++)
            memcpy(element(copy, v->elem_bytes, i, j), element(m, v->elem_bytes, i, j), v->elem_bytes);
    return copy;
}

void fm_from_accum(const FmRows *v, FmMatrix m, FmMatrix accum) {
    if (accum.data == m.data) return;
    if (is_transposed(m)) m = fm_transposed(m), accum = fm_transposed(accum);
    FOR_RUNS(m, run, i, j)
    v->store(element(m, v->elem_bytes, i, j), element(accum, v->accum_bytes, i, j), run);
}

void fm_add(const FmRows *v, FmMatrix m, FmMatrix accum) {
    if (is_transposed(m)) m = fm_transposed(m), accum = fm_transposed(accum);
    FOR_RUNS(m, run, i, j)
    v->add(element(m, v->accum_bytes, i, j), element(accum, v->accum_bytes, i, j), run);
}

void fm_zero(const FmRows *v, FmMatrix m) {
    if (is_transposed(m)) m = fm_transposed(m);
    FOR_RUNS(m, run, i, j)
    memset(element(m, v->elem_bytes, i, j), 0, (size_t)run * v->elem_bytes);
}

/* --- rows through a map --------------------------------------------------------------------------------- */

static void *gathered(const FmRows *v, const FmGather *g, int64_t r, int64_t col) {
    return fm_at(g->x, v->elem_bytes, (g->row_token ? g->row_token[r] : r) * g->width + col);
}

void fm_gather_row(const FmRows *v, const FmGather *g, int64_t r, int64_t col, int64_t cols, void *accum) {
    v->load(accum, gathered(v, g, r, col), cols);
    if (!g->row_token || !g->scores) return;
    v->scale(accum, v->get(g->scores, g->row_slot[r]), accum, cols);
    v->round(accum, cols); /* as the host library does */
}

static void gather_elements(const FmRows *v, const FmGather *g, int64_t r, int64_t col, int64_t cols,
                            void *row) {
    double accum[FM_TILE_COLS]; /* or of float */
    for (int64_t j = 0; j < cols; j += FM_TILE_COLS) {
        int64_t n = fm_min(FM_TILE_COLS, cols - j);
        fm_gather_row(v, g, r, col + j, n, accum);
        v->store(fm_at(row, v->elem_bytes, j), accum, n);
    }
}

FmMatrix fm_gather(const FmRows *v, const FmGather *g, int64_t first, int64_t rows, int64_t col, int64_t cols,
                   void *buffer) {
    if (!g->row_token) {
        FmMatrix rows_of_x = {fm_at(g->x, v->elem_bytes, first * g->width + col), rows, cols, g->width, 1};
        return fm_operand(v, rows_of_x, buffer);
    }
    for (int64_t i = 0; i < rows; i++) {
        int64_t r = first + i;
        void *row = fm_at(buffer, v->operand_bytes, i * cols);
        if (fm_operands_are_elements(v) && !g->scores)
            fm_copy(row, gathered(v, g, r, col), cols * (int64_t)v->elem_bytes);
        else if (v->operand_bytes == v->accum_bytes)
            fm_gather_row(v, g, r, col, cols, row);
        else
            gather_elements(v, g, r, col, cols, row);
    }
    return fm_dense(buffer, rows, cols);
}

/* --- experts' rows -------------------------------------------------------------------------------------- */

bool fm_offs_are_valid(const int32_t *offs, int32_t E, int64_t R) {
    for (int32_t e = 0; e < E; e++)
        if (offs[e] < fused_moe_expert_start(offs, e) || offs[e] > R) return false;
    return true;
}

bool fm_map_is_valid(const int32_t *map, int64_t n, int32_t low, int64_t end) {
    bool valid = true;
    for (int64_t i = 0; map && i < n; i++) valid &= map[i] >= low && map[i] < end;
    return valid;
}

bool fm_row_map_is_valid(const FusedMoeRowMap *row_map) {
    if (!fm_offs_are_valid(row_map->offs, row_map->E, row_map->R)) return false;
    int64_t num_rows = row_map->offs[row_map->E - 1];
    return fm_map_is_valid(row_map->row_token, num_rows, 0, row_map->T) &&
           fm_map_is_valid(row_map->row_slot, num_rows, 0, row_map->T * row_map->K) &&
           fm_map_is_valid(row_map->token_row, row_map->T * row_map->K, -1, num_rows);
}

int32_t *fm_make_schedule(const int32_t *offs, int32_t E) {
    int32_t *schedule = malloc((size_t)fused_moe_schedule_words(E) * sizeof *schedule);
    if (schedule) fused_moe_schedule_row_tiles(schedule, offs, E, FM_TILE_ROWS);
    return schedule;
}

FusedMoeWorkTile fm_row_tile(const int32_t *schedule, const int32_t *offs, int32_t E, int64_t index) {
    const FusedMoeTileOrder order = {.tile_rows = FM_TILE_ROWS, .num_n_tiles = 1, .group = 1};
    return fused_moe_work_tile(schedule, offs, E, offs[E - 1], &order, (uint32_t)index);
}

FmCols fm_cols_of(int64_t width, int64_t parts, int64_t part) {
    int64_t blocks = fm_blocks(width, FM_TILE_COLS);
    return (FmCols){blocks * part / parts * FM_TILE_COLS,
                    fm_min(width, blocks * (part + 1) / parts * FM_TILE_COLS)};
}

/* --- a row of h ----------------------------------------------------------------------------------------- */

void fm_load_pair(const FmRows *v, FusedMoeLayout layout, const void *gates, const void *ups, int64_t j,
                  int64_t n, void *gate, void *up, void *pairs) {
    if (layout == FUSED_MOE_INTERLEAVED) {
        v->load(pairs, fm_at(gates, v->elem_bytes, 2 * j), 2 * n);
        v->split(gate, up, pairs, n);
        return;
    }
    v->load(gate, fm_at(gates, v->elem_bytes, j), n);
    if (layout != FUSED_MOE_UNGATED) v->load(up, fm_at(ups, v->elem_bytes, j), n);
}

void fm_store_pair(const FmRows *v, FusedMoeLayout layout, void *gates, void *ups, int64_t j, int64_t n,
                   const void *gate, const void *up, void *pairs) {
    if (layout == FUSED_MOE_INTERLEAVED) {
        v->merge(pairs, gate, up, n);
        v->store(fm_at(gates, v->elem_bytes, 2 * j), pairs, 2 * n);
        return;
    }
    v->store(fm_at(gates, v->elem_bytes, j), gate, n);
    if (layout != FUSED_MOE_UNGATED) v->store(fm_at(ups, v->elem_bytes, j), up, n);
}
