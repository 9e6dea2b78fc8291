/* Runs every kernel of the CPU tier without PyTorch, for sanitizers; run.sh compiles and starts it.
 *
 *   harness                 every operator over all cases, and calls with maps that are wrong
 *   harness --plant FAULT   one call with a fault that a sanitizer has to report: heap, overflow or race
 *
 * A case runs on 1, 2 and 4 threads, and its results must be the same bits. Before each run, outputs and
 * scratch are filled with other bytes, so an element that no kernel wrote shows as a difference. Every tensor
 * is a heap block of exactly its size, so AddressSanitizer notices one byte past its end.
 *
 * This file replaces csrc/cpu/torch.c. A thread's tasks are fixed in advance: a queue would synchronise the
 * threads at every task, and ThreadSanitizer would miss races between them. */
#include "activation.h"
#include "cpu/cpu.h"
#include "eight_bit.h"
#include "integer.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(ok, ...)                                                                                       \
    do {                                                                                                     \
        if (ok) break;                                                                                       \
        fprintf(stderr, "harness: " __VA_ARGS__);                                                            \
        fputc('\n', stderr);                                                                                 \
        exit(1);                                                                                             \
    } while (0)

/* --- what torch.c has ----------------------------------------------------------------------------------- */

enum { MAX_THREADS = 4 };
static int64_t num_threads = 1;
static int poison; /* the byte in fresh outputs and scratch */

typedef struct {
    pthread_t id;
    FmTask *task;
    const void *ctx;
    size_t scratch_bytes;
    int64_t first, end, step;
    int status;
} Thread;

static void *run_tasks(void *thread) {
    Thread *t = thread;
    void *scratch = NULL;
    if (t->scratch_bytes) {
        CHECK(!posix_memalign(&scratch, 64, t->scratch_bytes), "out of memory");
        memset(scratch, poison, t->scratch_bytes);
    }
    for (int64_t i = t->first; i < t->end && t->status == FUSED_MOE_OK; i += t->step)
        t->status = t->task(i, t->ctx, scratch);
    free(scratch);
    return NULL;
}

int fm_parallel(int64_t n, int64_t work, FmTask *task, const void *ctx, size_t scratch_bytes) {
    CHECK(work >= 0, "negative work");
    int64_t threads = fm_min(n, num_threads);
    int status = FUSED_MOE_OK;
    Thread thread[MAX_THREADS];
    for (int64_t i = 0; i < threads; i++) {
        thread[i] = (Thread){0, task, ctx, scratch_bytes, i, n, threads, FUSED_MOE_OK};
        CHECK(!pthread_create(&thread[i].id, NULL, run_tasks, &thread[i]), "no thread");
    }
    for (int64_t i = 0; i < threads; i++) {
        pthread_join(thread[i].id, NULL);
        if (status == FUSED_MOE_OK) status = thread[i].status;
    }
    return status;
}

int64_t fm_parts(int64_t tiles, int64_t width) {
    return tiles > 0 ? fm_min(fm_blocks(width, FM_TILE_COLS), fm_blocks(4 * num_threads, tiles)) : 1;
}

/* What would take most of this file's time. Its accesses are checked elsewhere, or are to its own data. */
#define UNCHECKED __attribute__((no_sanitize("thread", "address", "undefined")))

/* Sanitizers see each element of a, b and out once, not at each product. */
#define TOUCH(type)                                                                                          \
    static void touch_##type(FmMatrix m, bool writes) {                                                      \
        for (int64_t i = 0; i < m.rows; i++)                                                                 \
            for (int64_t j = 0; j < m.cols; j++) {                                                           \
                volatile type *at = (type *)m.data + i * m.row_stride + j * m.col_stride, value = *at;       \
                if (writes) *at = value;                                                                     \
            }                                                                                                \
    }
TOUCH(uint16_t)
TOUCH(float)
TOUCH(double)

#define MATMUL(accum)                                                                                        \
    UNCHECKED static void products_##accum(FmMatrix out, FmMatrix a, FmMatrix b, bool accumulate) {          \
        accum *y = out.data;                                                                                 \
        const accum *x = a.data, *w = b.data;                                                                \
        for (int64_t i = 0; i < out.rows; i++)                                                               \
            for (int64_t j = 0; j < out.cols; j++) {                                                         \
                accum *to = &y[i * out.row_stride + j * out.col_stride], sum = accumulate ? *to : 0;         \
                for (int64_t k = 0; k < a.cols; k++)                                                         \
                    sum += x[i * a.row_stride + k * a.col_stride] * w[k * b.row_stride + j * b.col_stride];  \
                *to = sum;                                                                                   \
            }                                                                                                \
    }                                                                                                        \
    static void matmul_##accum(FmMatrix out, FmMatrix a, FmMatrix b, bool accumulate) {                      \
        touch_##accum(a, false), touch_##accum(b, false), touch_##accum(out, true);                          \
        products_##accum(out, a, b, accumulate);                                                             \
    }
MATMUL(float)
MATMUL(double)

int fm_matmul(const FmRows *v, FmMatrix out, FmMatrix a, FmMatrix b, bool accumulate) {
    CHECK(out.rows == a.rows && a.cols == b.rows && b.cols == out.cols, "matmul of unlike sizes");
    if (v->operand_bytes < v->accum_bytes) {
        touch_uint16_t(a, false), touch_uint16_t(b, false), touch_float(out, true);
        return fm_bf16_matmul(out, a, b, accumulate);
    }
    (v->accum_bytes == sizeof(float) ? matmul_float : matmul_double)(out, a, b, accumulate);
    return FUSED_MOE_OK;
}

/* --- memory --------------------------------------------------------------------------------------------- */

enum { MAX_BLOCKS = 32 };
static void *blocks[MAX_BLOCKS];
static int num_blocks;
static int64_t missing_bytes; /* of every output: a planted fault */
static uint64_t hash;         /* of the outputs of an operator */
static struct {
    const uint8_t *data;
    int64_t bytes;
} outputs[MAX_BLOCKS];
static int num_outputs;

static void *block(int64_t bytes) {
    if (bytes == 0) return NULL; /* as the data of an empty tensor */
    CHECK(num_blocks < MAX_BLOCKS, "too many blocks");
    void *data = blocks[num_blocks++] = malloc((size_t)bytes);
    CHECK(data, "out of memory");
    return data;
}

/* Result `data`, written or not so far. */
static void *result(void *data, int64_t bytes) {
    outputs[num_outputs].data = data, outputs[num_outputs++].bytes = bytes;
    return data;
}

static void *output(int64_t bytes) {
    void *data = block(bytes - missing_bytes);
    if (data) memset(data, poison, (size_t)(bytes - missing_bytes));
    fused_moe_cpu_prepare(data, bytes - missing_bytes);
    return result(data, bytes - missing_bytes);
}

/* Adds the outputs to the hash (FNV-1a). */
UNCHECKED static void add_outputs(void) {
    for (int i = 0; i < num_outputs; i++)
        for (int64_t b = 0; b < outputs[i].bytes; b++) hash = (hash ^ outputs[i].data[b]) * 0x100000001b3;
    num_outputs = 0;
}

/* Adds the outputs to the hash and frees all blocks but the first `keep`. */
static void finish(int keep) {
    add_outputs();
    while (num_blocks > keep) free(blocks[--num_blocks]);
}

/* --- inputs --------------------------------------------------------------------------------------------- */

static uint64_t random_state;
static bool every_option;

UNCHECKED static int32_t draw(int32_t n) { /* 0 .. n-1 */
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (int32_t)((random_state >> 33) % (uint64_t)n);
}

static bool option(void) {
    return draw(2) || every_option;
}

/* A width of rows where 0 is one, too: tensors without elements have no memory. */
static int64_t width(int64_t usual) {
    return draw(8) || every_option ? usual : 0;
}

static void *values(FusedMoeDtype dtype, int64_t n) {
    const FmRows *v = fm_rows(dtype);
    void *data = block(n * (int64_t)v->elem_bytes);
    double accum[64]; /* or 64 floats */
    for (int64_t first = 0, count; first < n; first += count) {
        count = fm_min(64, n - first);
        for (int64_t i = 0; i < count; i++) v->set(accum, i, draw(2001) / 1000.0 - 1);
        v->store(fm_at(data, v->elem_bytes, first), accum, count);
    }
    return data;
}

/* The inverse of integer(). */
static void set_integer(void *data, FusedMoeDtype dtype, int64_t i, int64_t value) {
    switch (dtype) {
    case FUSED_MOE_I64: ((int64_t *)data)[i] = value; break;
    case FUSED_MOE_I32: ((int32_t *)data)[i] = (int32_t)value; break;
    case FUSED_MOE_I16: ((int16_t *)data)[i] = (int16_t)value; break;
    case FUSED_MOE_I8: ((int8_t *)data)[i] = (int8_t)value; break;
    default: ((uint8_t *)data)[i] = (uint8_t)value; break;
    }
}

static int64_t integer_bytes(FusedMoeDtype dtype) {
    return dtype == FUSED_MOE_I64 ? 8 : dtype == FUSED_MOE_I32 ? 4 : dtype == FUSED_MOE_I16 ? 2 : 1;
}

/* (E, out, in), dense in either order, or with gaps between all elements. */
static FusedMoeWeight weight(FusedMoeDtype dtype, int64_t E, int64_t out, int64_t in) {
    FusedMoeWeight w = {NULL, out * in, in, 1, NULL};
    switch (draw(3)) {
    case 1: w.stride_out = 1, w.stride_in = out; break;
    case 2: w.stride_expert = 2 * out * in + 1, w.stride_out = 2 * in, w.stride_in = 2; break;
    }
    w.data = values(dtype, (E - 1) * w.stride_expert + (out - 1) * w.stride_out + (in - 1) * w.stride_in + 1);
    return w;
}

static void *bytes(int64_t n, int32_t end) {
    uint8_t *data = block(n);
    for (int64_t i = 0; i < n; i++) data[i] = (uint8_t)draw(end);
    return data;
}

static FusedMoeWeight weight_of_codes(FusedMoeQuantizedWeight *w, FusedMoeFormat of, int64_t E, int64_t out,
                                      int64_t in, bool transposed) {
    const FusedMoeFormatFacts format = fused_moe_format(of);
    *w = (FusedMoeQuantizedWeight){.out = out, .in = in, .transposed = transposed, .format = of};
    bool is_square = format.block == FUSED_MOE_BLOCK_SQUARE_128;
    w->scale_dtype = format.scales == FUSED_MOE_SCALES_E8M0 ? FUSED_MOE_U8
                     : draw(2)                              ? FUSED_MOE_BF16
                                                            : FUSED_MOE_F32;
    w->block_out = is_square ? 128 : !format.is_grouped && draw(2) ? out : 1;
    w->block_in = is_square ? 128 : format.is_grouped ? 32 : in;
    int64_t blocks = E * fm_blocks(out, w->block_out) * fm_blocks(in, w->block_in);
    w->data = bytes(E * out * in * format.bits / 8, format.bits == 4 ? 256 : 127); /* 127 is NaN in e4m3 */
    w->scale = w->scale_dtype == FUSED_MOE_U8 ? bytes(blocks, 130) : values(w->scale_dtype, blocks);
    w->zero = format.has_zeros && draw(2) ? bytes(blocks, 8) : NULL;
    return (FusedMoeWeight){(void *)w->data, out * in, transposed ? 1 : in, transposed ? in : 1, w};
}

/* Formats with groups of 32 columns where the width allows it. */
static FusedMoeWeight quantized_weight(FusedMoeQuantizedWeight *w, int64_t E, int64_t out, int64_t in,
                                       bool transposed) {
    FusedMoeFormat format;
    do format = (FusedMoeFormat)draw(FUSED_MOE_NUM_FORMATS);
    while (fused_moe_format(format).is_grouped && in % 32);
    return weight_of_codes(w, format, E, out, in, transposed);
}

/* --- cases ---------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t T, K;
    int32_t E, chosen; /* ids are those of the first `chosen` experts, or outside [0, E) */
    int64_t D, F;
} Shape;

static const Shape shapes[] = {
    {0, 2, 3, 3, 8, 16},    /* no tokens */
    {6, 2, 4, 0, 8, 8},     /* no rows */
    {1, 1, 1, 1, 1, 1},     /* one of everything */
    {5, 2, 4, 4, 3, 7},     /* odd widths */
    {40, 4, 9, 6, 17, 9},   /* the last experts have no rows */
    {130, 3, 5, 5, 8, 24},  /* rows and tokens of several tasks */
    {240, 2, 3, 3, 5, 260}, /* an expert of two row tiles; F of two blocks of columns */
    {600, 1, 1, 1, 260, 6}, /* an expert of more than FM_TILE_DEPTH rows; D of two blocks of columns */
};
enum { NUM_SHAPES = sizeof shapes / sizeof shapes[0] };

typedef struct {
    Shape s;
    FusedMoeDtype dtype, scores; /* of tensors; of scores */
    int64_t elem, accum;         /* their bytes */
    FusedMoeLayout layout;
    FusedMoeRowMap map;    /* by route_plan */
    const int32_t *counts; /* likewise */
} Case;

static Case case_of(int index) {
    Case c = {.s = shapes[index / 16], .layout = (FusedMoeLayout)(index % 4)};
    c.dtype = (FusedMoeDtype)(index / 4 % 4);
    c.scores = c.dtype == FUSED_MOE_F64 ? FUSED_MOE_F64 : FUSED_MOE_F32;
    c.elem = (int64_t)fm_rows(c.dtype)->elem_bytes, c.accum = (int64_t)fm_rows(c.dtype)->accum_bytes;
    return c;
}
enum { NUM_CASES = 16 * NUM_SHAPES };

/* --- operators ------------------------------------------------------------------------------------------ */

/* A value of [0, n), or in one of eight calls one outside. */
static int32_t draw_outside(int32_t n) {
    return draw(8) ? draw(n) : draw(2) ? n : -1;
}

/* One slot of eight has an id outside [0, E). Expert 1 has no rows if there are other experts. In some cases
 * the ids go through a map, with which the last expert may have rows, too. In one of four there may be fewer
 * rows than slots. */
static int route_plan(Case *c) {
    const Shape *s = &c->s;
    int64_t slots = s->T * s->K;
    FusedMoeRoutePlan p = {.T = s->T, .K = (int32_t)s->K, .E = s->E, .tile_rows = FUSED_MOE_TILE_ROWS};
    p.ids_dtype = FUSED_MOE_I32 + draw(5);
    void *ids = block(slots * integer_bytes(p.ids_dtype));
    for (int64_t slot = 0; slot < slots; slot++) {
        bool outside = s->chosen == 0 || draw(8) == 0;
        int32_t e = outside ? draw(2) ? s->E : -1 : draw(s->chosen);
        set_integer(ids, p.ids_dtype, slot, e == 1 && s->E > 2 ? 0 : e);
    }
    p.ids = ids;
    if (s->chosen && option()) {
        int32_t *map = block(s->E * 4);
        for (int32_t e = 0; e < s->E; e++) map[e] = e ? draw_outside(s->E) : 0;
        p.expert_map = map, p.map_size = s->E;
    }
    p.counts = output(s->E * 4), p.offsets = output((s->E + 1) * 4);
    FusedMoeBoundedPlan bounded = {.R = draw(4) ? slots : slots - draw((int32_t)slots / 2 + 1)};
    p.row_token = output(bounded.R * 4), p.row_slot = output(bounded.R * 4), p.token_row = output(slots * 4);
    p.schedule = output(fused_moe_schedule_words(s->E) * 4);
    bounded.plan = p;
    int status = fused_moe_cpu_route_plan(&bounded);
    c->map = (FusedMoeRowMap){p.offsets + 1, p.row_token, p.row_slot, p.token_row, p.schedule,
                              s->T,          s->K,        bounded.R,  s->E};
    c->counts = p.counts;
    return status;
}

static int count_plan(Case *c) {
    FusedMoeCountPlan p = {.counts_dtype = c->map.R < 100 ? FUSED_MOE_I32 + draw(5) : FUSED_MOE_I64};
    void *counts = block(c->s.E * integer_bytes(p.counts_dtype));
    for (int32_t e = 0; e < c->s.E; e++) set_integer(counts, p.counts_dtype, e, c->counts[e]);
    p.counts_in = counts;
    p.counts = output(c->s.E * 4), p.offsets = output((c->s.E + 1) * 4);
    p.schedule = output(fused_moe_schedule_words(c->s.E) * 4);
    p.R = c->map.R, p.E = c->s.E;
    return fused_moe_cpu_count_plan(&p);
}

static int router_logits(Case *c) {
    const Shape *s = &c->s;
    FusedMoeRouterLogits p = {.dtype = c->dtype, .T = s->T, .D = s->D, .E = s->E};
    p.weight_dtype = c->elem == 2 && option() ? FUSED_MOE_F32 : c->dtype;
    p.x = values(c->dtype, s->T * s->D);
    p.weight = values(p.weight_dtype, s->E * s->D);
    p.bias = option() ? values(p.weight_dtype, s->E) : NULL;
    p.logits = output(s->T * s->E * c->accum);
    return fused_moe_cpu_router_logits(&p);
}

static int route(Case *c) {
    const Shape *s = &c->s;
    FusedMoeRoute p = {.dtype = c->dtype, .T = s->T, .E = s->E, .K = (int32_t)s->K, .route_scale = 2.5};
    p.logits = values(c->dtype, s->T * s->E);
    p.bias = option() ? values(FUSED_MOE_F32, s->E) : NULL;
    p.expert_scale = option() ? values(c->scores, s->E) : NULL;
    p.group_score = option() ? FUSED_MOE_TOP2 : FUSED_MOE_MAX;
    p.score_func = (FusedMoeScoreFunc)draw(FUSED_MOE_SQRTSOFTPLUS + 1);
    p.route_norm = option();
    if (s->E % 2 == 0 && s->K <= s->E / 2 && option()) p.num_groups = 2, p.num_limited_groups = 1;
    if (option()) {
        p.given_dtype = FUSED_MOE_I32 + draw(2);
        void *ids = block(s->T * s->K * integer_bytes(p.given_dtype));
        for (int64_t slot = 0; slot < s->T * s->K; slot++)
            set_integer(ids, p.given_dtype, slot, draw_outside(s->E));
        p.given_ids = ids;
    }
    if (option()) {
        p.num_tokens_dtype = FUSED_MOE_I32 + draw(2);
        void *num_tokens = block(integer_bytes(p.num_tokens_dtype));
        set_integer(num_tokens, p.num_tokens_dtype, 0, draw((int32_t)s->T + 3) - 1);
        p.num_tokens = num_tokens;
    }
    p.scores = output(s->T * s->K * c->accum);
    p.ids = output(s->T * s->K * 4);
    return fused_moe_cpu_route(&p);
}

static int route_backward(Case *c) {
    const Shape *s = &c->s;
    FusedMoeRouteBackward p = {
        .dtype = c->dtype, .T = s->T, .E = s->E, .K = (int32_t)s->K, .route_scale = 2.5};
    p.dscores = values(c->scores, s->T * s->K);
    p.expert_scale = option() ? values(c->scores, s->E) : NULL;
    p.logits = values(c->dtype, s->T * s->E);
    int32_t *ids = block(s->T * s->K * 4);
    for (int64_t slot = 0; slot < s->T * s->K; slot++) ids[slot] = draw(8) ? draw(s->E) : -1;
    p.ids = ids;
    p.score_func = (FusedMoeScoreFunc)draw(FUSED_MOE_SQRTSOFTPLUS + 1);
    p.route_norm = option();
    p.dlogits = output(s->T * s->E * c->elem);
    if (c->dtype == FUSED_MOE_F32 && option()) {
        p.rounded_dtype = FUSED_MOE_BF16;
        p.rounded = output(s->T * s->E * 2);
    }
    return fused_moe_cpu_route_backward(&p);
}

static int permute(Case *c) {
    FusedMoePermute p = {.row_map = c->map, .D = width(c->s.D), .dtype = c->dtype};
    p.x = values(c->dtype, c->map.T * p.D);
    p.rows = output(c->map.R * p.D * c->elem);
    return fused_moe_cpu_permute(&p);
}

static int pad(Case *c) {
    FusedMoePad p = {.E = c->map.E, .elem_bytes = (int64_t)c->elem};
    for (int i = 0; i < 3; i++) p.x_sizes[i] = draw(9), p.sizes[i] = draw(9);
    if (option()) p.sizes[1] = c->s.T; /* several tasks */
    const int64_t *n = p.x_sizes, *s = p.x_strides;
    p.x_strides[2] = n[2] + draw(3), p.x_strides[1] = n[1] * s[2], p.x_strides[0] = n[0] * s[1];
    const int64_t last = (p.E - 1) * s[0] + (n[0] - 1) * s[1] + (n[1] - 1) * s[2] + n[2];
    p.x = values(c->dtype, n[0] && n[1] && n[2] ? last : 0);
    p.out = output(p.E * p.sizes[0] * p.sizes[1] * p.sizes[2] * c->elem);
    return fused_moe_cpu_pad(&p);
}

static int unpermute(Case *c) {
    FusedMoeUnpermute p = {.row_map = c->map, .D = width(c->s.D), .dtype = c->dtype};
    p.rows = values(c->dtype, c->map.R * p.D);
    p.scores = option() ? values(c->scores, c->map.T * c->map.K) : NULL;
    p.out = output(c->map.T * p.D * c->elem);
    return fused_moe_cpu_unpermute(&p);
}

static int sum_peers(Case *c) {
    FusedMoeSumPeers p = {.T = c->map.T, .D = width(c->s.D), .C = c->map.R, .N = 2, .K = (int32_t)c->map.K};
    p.dtype = c->dtype;
    for (int n = 0; n < p.N; n++) p.rows[n] = values(c->dtype, p.C * p.D);
    p.index = c->map.token_row;
    p.scores = option() ? values(c->scores, p.T * p.K) : NULL;
    p.out = output(p.T * p.D * c->elem);
    return fused_moe_cpu_sum_peers(&p);
}

static int unpermute_backward(Case *c) {
    FusedMoeUnpermuteBackward p = {.row_map = c->map, .D = width(c->s.D), .dtype = c->dtype};
    p.dout = values(c->dtype, c->map.T * p.D);
    p.rows = values(c->dtype, c->map.R * p.D);
    p.scores = option() ? values(c->scores, c->map.T * c->map.K) : NULL;
    p.drows = option() ? output(c->map.R * p.D * c->elem) : NULL;
    p.dscores = option() ? output(c->map.T * c->map.K * c->accum) : NULL;
    return fused_moe_cpu_unpermute_backward(&p);
}

static int grouped_mm(Case *c) {
    FusedMoeGroupedMM p = {.offs = c->map.offs, .R = c->map.R, .M = c->s.D, .E = c->s.E, .dtype = c->dtype};
    for (int i = 0; i < 1 + option(); i++) {
        p.N[i] = c->s.F + i;
        p.b[i] = weight(c->dtype, p.E, p.M, p.N[i]);
    }
    p.a = values(c->dtype, p.R * (p.N[0] + p.N[1]));
    p.bias = option() ? values(c->dtype, p.E * p.M) : NULL;
    p.out = output(p.R * p.M * c->elem);
    return fused_moe_cpu_grouped_mm(&p);
}

static int quantized_mm(Case *c) {
    FusedMoeGroupedMM p = {.offs = c->map.offs, .R = c->map.R, .E = c->s.E, .dtype = c->dtype};
    FusedMoeQuantizedWeight codes;
    bool transposed = option();
    p.b[0] = quantized_weight(&codes, p.E, c->s.D, draw(2) ? 32 * (c->s.F / 32 + 1) : c->s.F, transposed);
    p.M = transposed ? codes.in : codes.out;
    p.N[0] = transposed ? codes.out : codes.in;
    p.a = values(c->dtype, p.R * p.N[0]);
    p.bias = option() ? values(c->dtype, p.E * p.M) : NULL;
    p.out = output(p.R * p.M * c->elem);
    return fused_moe_cpu_grouped_mm(&p);
}

static int router_dgrad(Case *c) {
    FusedMoeRouterDgrad p = {.T = c->s.T, .D = c->s.D, .E = c->s.E, .dtype = c->dtype};
    p.dlogits = values(c->dtype, p.T * p.E);
    p.weight = values(c->dtype, p.E * p.D);
    p.accumulate = option();
    p.dx = p.accumulate ? values(c->dtype, p.T * p.D) : output(p.T * p.D * c->elem);
    return fused_moe_cpu_router_dgrad(&p);
}

/* The rows of a layer without routing: row r is token r. */
static FusedMoeRowMap grouped_rows(FusedMoeRowMap map) {
    return (FusedMoeRowMap){.offs = map.offs, .T = map.R, .K = 1, .R = map.R, .E = map.E};
}

static int wgrad(Case *c) {
    FusedMoeRowMap map = option() ? c->map : grouped_rows(c->map);
    FusedMoeWgrad p = {.offs = map.offs, .R = map.R, .T = map.T, .K = map.K, .E = map.E, .dtype = c->dtype};
    p.N = c->s.D, p.M[0] = c->s.F, p.M[1] = option() ? c->s.F + 1 : 0;
    p.a = values(c->dtype, p.R * (p.M[0] + p.M[1]));
    p.b = values(c->dtype, p.T * p.N);
    p.b_row_token = map.row_token, p.row_slot = map.row_slot;
    p.b_scores = map.row_token && option() ? values(c->scores, p.T * p.K) : NULL;
    p.accumulate = c->dtype != FUSED_MOE_F64 && draw(2);
    p.dw_dtype = p.accumulate ? FUSED_MOE_F32 : c->dtype;
    bool first_absent = p.M[1] && draw(3) == 0;
    int64_t bytes = p.accumulate ? (int64_t)sizeof(float) : c->elem;
    for (int i = first_absent; i < 1 + (p.M[1] > 0); i++) {
        if (p.accumulate) { /* in any strides */
            p.dw[i] = weight(FUSED_MOE_F32, p.E, p.M[i], p.N);
            int64_t last = (p.E - 1) * p.dw[i].stride_expert + (p.M[i] - 1) * p.dw[i].stride_out +
                           (p.N - 1) * p.dw[i].stride_in;
            result(p.dw[i].data, (last + 1) * bytes);
        } else {
            bool swapped = draw(2);
            p.dw[i] = (FusedMoeWeight){output(p.E * p.M[i] * p.N * bytes), p.M[i] * p.N, swapped ? 1 : p.N,
                                       swapped ? p.M[i] : 1, NULL};
        }
    }
    return fused_moe_cpu_wgrad(&p);
}

static int bias_grad(Case *c) {
    FusedMoeRowMap map = option() ? c->map : grouped_rows(c->map);
    FusedMoeBiasGrad p = {
        .offs = map.offs, .R = map.R, .T = map.T, .K = map.K, .E = map.E, .dtype = c->dtype};
    p.N = width(c->s.D);
    p.rows = values(c->dtype, p.T * p.N);
    p.row_token = map.row_token, p.row_slot = map.row_slot;
    p.scores = map.row_token && option() ? values(c->scores, p.T * p.K) : NULL;
    p.db = output(p.E * p.N * c->elem);
    return fused_moe_cpu_bias_grad(&p);
}

/* h and up of the case's layout. */
static void draw_activated(Case *c, int64_t F, const void **h, const void **up) {
    bool separate = c->layout == FUSED_MOE_SEPARATE;
    *h = values(c->dtype, c->map.R * (separate ? F : fm_h_width(c->layout, F)));
    *up = separate ? values(c->dtype, c->map.R * F) : NULL;
}

static int activate(Case *c) {
    FusedMoeActivate p = {.R = c->map.R, .F = width(c->s.F), .layout = c->layout, .dtype = c->dtype};
    p.activation = (FusedMoeActivation){draw(FUSED_MOE_NUM_ACTIVATIONS), 1.702, 0.5, 1 / 1.702, 1 / 0.5};
    draw_activated(c, p.F, &p.h, &p.up);
    p.a = output(p.R * p.F * c->elem);
    return fused_moe_cpu_activate(&p);
}

static int activate_backward(Case *c) {
    FusedMoeActivateBackward p = {.R = c->map.R, .F = width(c->s.F), .layout = c->layout, .dtype = c->dtype};
    p.activation = (FusedMoeActivation){draw(FUSED_MOE_NUM_ACTIVATIONS), 1.702, 0.5, 1 / 1.702, 1 / 0.5};
    draw_activated(c, p.F, &p.h, &p.up);
    p.da = values(c->dtype, p.R * p.F);
    p.dh = output(p.R * (p.up ? p.F : fm_h_width(p.layout, p.F)) * c->elem);
    p.dup = p.up ? output(p.R * p.F * c->elem) : NULL;
    return fused_moe_cpu_activate_backward(&p);
}

static int up_gate(Case *c) {
    FusedMoeUpGate p = {.D = c->s.D, .F = c->s.F, .layout = c->layout, .dtype = c->dtype};
    bool separate = p.layout == FUSED_MOE_SEPARATE;
    int64_t h_width = fm_h_width(p.layout, p.F), w1_rows = separate ? p.F : h_width;
    p.row_map = option() ? c->map : grouped_rows(c->map);
    p.activation = (FusedMoeActivation){draw(FUSED_MOE_NUM_ACTIVATIONS), 1.702, 0.5, 1 / 1.702, 1 / 0.5};
    p.x = values(c->dtype, p.row_map.T * p.D);
    p.scores = p.row_map.row_token && option() ? values(c->scores, p.row_map.T * p.row_map.K) : NULL;
    FusedMoeQuantizedWeight codes[2];
    p.w1 = draw(4) ? weight(c->dtype, c->s.E, w1_rows, p.D)
                   : quantized_weight(&codes[0], c->s.E, w1_rows, p.D, false);
    if (separate)
        p.w3 = draw(4) ? weight(c->dtype, c->s.E, p.F, p.D)
                       : quantized_weight(&codes[1], c->s.E, p.F, p.D, false);
    p.b1 = option() ? values(c->dtype, c->s.E * w1_rows) : NULL;
    p.b3 = separate && option() ? values(c->dtype, c->s.E * p.F) : NULL;
    p.h = option() ? output(p.row_map.R * h_width * c->elem) : NULL;
    p.a = output(p.row_map.R * p.F * c->elem);
    return fused_moe_cpu_up_gate(&p);
}

static int down_dgrad(Case *c) {
    FusedMoeDownDgrad p = {.D = c->s.D, .F = c->s.F, .layout = c->layout, .dtype = c->dtype};
    int64_t h_width = fm_h_width(p.layout, p.F);
    p.row_map = option() ? c->map : grouped_rows(c->map);
    p.activation = (FusedMoeActivation){draw(FUSED_MOE_NUM_ACTIVATIONS), 1.702, 0.5, 1 / 1.702, 1 / 0.5};
    p.dout = values(c->dtype, p.row_map.T * p.D);
    p.w2 = weight(c->dtype, c->s.E, p.D, p.F);
    p.b2 = option() ? values(c->dtype, c->s.E * p.D) : NULL;
    p.h = values(c->dtype, p.row_map.R * h_width);
    p.scores = p.row_map.row_token && option() ? values(c->scores, p.row_map.T * p.row_map.K) : NULL;
    p.dh = option() ? output(p.row_map.R * h_width * c->elem) : NULL;
    p.a_scaled = option() ? output(p.row_map.R * p.F * c->elem) : NULL;
    p.dscores = option() ? output(p.row_map.T * p.row_map.K * c->accum) : NULL;
    return fused_moe_cpu_down_dgrad(&p);
}

/* The dtype of rows that become codes: not float64. */
static FusedMoeDtype row_dtype(const Case *c) {
    return c->dtype == FUSED_MOE_F64 ? FUSED_MOE_F32 : c->dtype;
}

static int64_t row_bytes(const Case *c, int64_t n) {
    return n * (int64_t)fm_rows(row_dtype(c))->elem_bytes;
}

static FusedMoeFormat eight_bit_format(void) {
    return (FusedMoeFormat)draw(FUSED_MOE_FORMAT_int8 + 1);
}

static int quantize_rows(Case *c) {
    FusedMoeQuantizeRows p = {.D = width(c->s.D), .dtype = row_dtype(c), .power_of_two = draw(2)};
    p.code = draw(2) ? FUSED_MOE_CODE_E4M3 : FUSED_MOE_CODE_INT8;
    p.row_map = option() ? c->map : grouped_rows(c->map);
    p.x = values(p.dtype, p.row_map.T * p.D);
    p.scores = p.row_map.row_token && option() ? values(FUSED_MOE_F32, p.row_map.T * p.row_map.K) : NULL;
    p.smooth = option() ? values(FUSED_MOE_F32, c->s.E * p.D) : NULL;
    if (!p.row_map.row_token && !p.smooth && draw(2)) p.row_map.offs = NULL;
    p.codes = output(p.row_map.R * p.D);
    p.scale = output(p.row_map.R * 4);
    if (p.row_map.row_token && !p.scores && !p.smooth && option()) p.token_codes = output(p.row_map.T * p.D);
    return fused_moe_cpu_quantize_rows(&p);
}

static int eight_bit_up_gate(Case *c) {
    FusedMoeEightBitUpGate p = {.power_of_two = draw(2)};
    FusedMoeUpGate *up = &p.up;
    *up = (FusedMoeUpGate){.D = c->s.D, .F = c->s.F, .layout = c->layout, .dtype = row_dtype(c)};
    bool separate = up->layout == FUSED_MOE_SEPARATE;
    int64_t w1_rows = separate ? up->F : fm_h_width(up->layout, up->F);
    up->row_map = option() ? c->map : grouped_rows(c->map);
    up->activation = (FusedMoeActivation){draw(FUSED_MOE_NUM_ACTIVATIONS), 1.702, 0.5, 1 / 1.702, 1 / 0.5};
    FusedMoeFormat format = eight_bit_format();
    FusedMoeQuantizedWeight codes[2];
    up->x = bytes(up->row_map.T * up->D, 127);
    p.x_scale = values(FUSED_MOE_F32, up->row_map.T);
    up->w1 = weight_of_codes(&codes[0], format, c->s.E, w1_rows, up->D, false);
    if (separate) up->w3 = weight_of_codes(&codes[1], format, c->s.E, up->F, up->D, false);
    up->b1 = option() ? values(up->dtype, c->s.E * w1_rows) : NULL;
    up->b3 = separate && option() ? values(up->dtype, c->s.E * up->F) : NULL;
    bool in_blocks = format == FUSED_MOE_FORMAT_fp8_block;
    up->a = output(in_blocks ? up->row_map.R * up->F : row_bytes(c, up->row_map.R * up->F));
    if (in_blocks) p.a_scale = output(fm_blocks(up->F, 128) * up->row_map.R * 4);
    int64_t h_width = fm_h_width(up->layout, up->F);
    up->h = option() ? output(row_bytes(c, up->row_map.R * h_width)) : NULL;
    return fused_moe_cpu_eight_bit_up_gate(&p);
}

static int eight_bit_mm(Case *c) {
    FusedMoeEightBitMM p = {0};
    FusedMoeGroupedMM *down = &p.down;
    *down = (FusedMoeGroupedMM){.offs = c->map.offs, .R = c->map.R, .E = c->map.E, .dtype = row_dtype(c)};
    down->M = c->s.D, down->N[0] = c->s.F;
    FusedMoeFormat format = eight_bit_format();
    FusedMoeQuantizedWeight codes;
    down->a = bytes(down->R * down->N[0], 127);
    down->b[0] = weight_of_codes(&codes, format, down->E, down->M, down->N[0], false);
    down->bias = option() ? values(down->dtype, down->E * down->M) : NULL;
    p.a_has_row_scales = draw(2);
    bool has_blocks = format == FUSED_MOE_FORMAT_fp8_block && !p.a_has_row_scales;
    int64_t blocks = has_blocks ? fm_blocks(down->N[0], 128) : 1;
    p.a_scale = values(FUSED_MOE_F32, blocks * down->R);
    down->out = output(row_bytes(c, down->R * down->M));
    return fused_moe_cpu_eight_bit_mm(&p);
}

/* --- FP8 training --------------------------------------------------------------------------------------- */

static FusedMoeDtype training_dtype(const Case *c) {
    return c->elem == 2 ? FUSED_MOE_BF16 : FUSED_MOE_F32;
}

/* A multiple of 128. */
static int64_t blocks_width(int64_t usual) {
    return width(128 * (1 + usual % 3));
}

/* A call leaves some row blocks as they were: those that no expert has. */
static void clear_unwritten(FusedMoeRowMap map, void *data, int64_t block_bytes) {
    int64_t next = 0;
    for (int32_t e = 0; e < map.E; e++) {
        int32_t start = fused_moe_expert_start(map.offs, e), first = fused_moe_first_row_block(start, e);
        fm_clear(fm_at(data, block_bytes, next), (first - next) * block_bytes);
        next = first + fm_blocks(map.offs[e] - start, 128);
    }
    fm_clear(fm_at(data, block_bytes, next), (fused_moe_num_row_blocks(map.R, map.E) - next) * block_bytes);
}

static int quantize_weight(Case *c) {
    FusedMoeQuantizeWeight p = {.E = c->s.E, .dtype = training_dtype(c)};
    p.M[0] = 128, p.M[1] = 128 * draw(2), p.N = 128 * (1 + draw(3));
    int64_t M = p.M[0] + p.M[1], elements = p.E * M * p.N;
    for (int i = 0; i < 2; i++)
        if (p.M[i]) p.part[i] = weight(p.dtype, p.E, p.M[i], p.N);
    if (option()) p.codes = output(elements), p.scale = output(elements / (128 * 128) * 4);
    if (option()) p.codes_t = output(elements), p.scale_t = output(elements / (128 * 128) * 4);
    return fused_moe_cpu_quantize_weight(&p);
}

static int transpose_codes(Case *c) {
    FusedMoeTransposeCodes p = {.row_map = option() ? c->map : grouped_rows(c->map)};
    p.num_columns = blocks_width(c->s.D), p.first = 128 * draw(2);
    p.D = p.first + p.num_columns + 128 * draw(2);
    p.codes = values(FUSED_MOE_F32, p.row_map.T * p.D / 4);
    p.columns = output(fused_moe_num_row_blocks(p.row_map.R, p.row_map.E) * p.num_columns * 128);
    int status = fused_moe_cpu_transpose_codes(&p);
    if (status == FUSED_MOE_OK) clear_unwritten(p.row_map, p.columns, p.num_columns * 128);
    return status;
}

static int quantize_dh(Case *c) {
    FusedMoeQuantizeDh p = {.F = blocks_width(c->s.F), .dtype = training_dtype(c)};
    p.layout = draw(2) ? FUSED_MOE_HALVES : FUSED_MOE_UNGATED;
    p.row_map = option() ? c->map : grouped_rows(c->map);
    p.activation = (FusedMoeActivation){draw(FUSED_MOE_NUM_ACTIVATIONS), 1.702, 0.5, 1 / 1.702, 1 / 0.5};
    int64_t T = p.row_map.T, K = p.row_map.K, R = p.row_map.R, F = p.F, H = fm_h_width(p.layout, F);
    int64_t blocks = fused_moe_num_row_blocks(R, p.row_map.E);
    int64_t elem = (int64_t)fm_rows(p.dtype)->elem_bytes;
    p.g = values(p.dtype, R * F), p.h = values(p.dtype, R * H);
    p.scores = p.row_map.row_token && option() ? values(FUSED_MOE_F32, T * K) : NULL;
    p.x_scale = values(FUSED_MOE_F32, R), p.dout_scale = values(FUSED_MOE_F32, R);
    if (option()) p.dh = output(R * H), p.dh_scale = output(H / 128 * R * 4);
    if (option()) p.dh_t = output(blocks * H * 128), p.dh_t_scale = output(blocks * (H / 128) * 4);
    if (option()) p.a_t = output(blocks * F * 128), p.a_t_scale = output(blocks * (F / 128) * 4);
    p.dh_rows = option() ? output(R * H * elem) : NULL;
    p.a_rows = option() ? output(R * F * elem) : NULL;
    if (option()) p.dscores = output(T * K * 4), p.partials = block(R * (F / 128) * 4);
    int status = fused_moe_cpu_quantize_dh(&p);
    if (status == FUSED_MOE_OK && p.dh_t) {
        clear_unwritten(p.row_map, p.dh_t, H * 128);
        clear_unwritten(p.row_map, p.dh_t_scale, H / 128 * 4);
    }
    if (status == FUSED_MOE_OK && p.a_t) {
        clear_unwritten(p.row_map, p.a_t, F * 128);
        clear_unwritten(p.row_map, p.a_t_scale, F / 128 * 4);
    }
    return status;
}

static int eight_bit_wgrad(Case *c) {
    FusedMoeEightBitWgrad p = {.offs = c->map.offs, .R = c->map.R, .E = c->map.E, .dtype = training_dtype(c)};
    p.M[0] = 128, p.M[1] = 128 * !draw(4), p.N = draw(4) ? 128 : 384;
    p.scale_is_of_b = draw(2), p.accumulate = draw(2);
    p.dw_dtype = p.accumulate || draw(2) ? FUSED_MOE_F32 : p.dtype;
    int64_t blocks = fused_moe_num_row_blocks(p.R, p.E), M = p.M[0] + p.M[1];
    p.a = bytes(blocks * M * 128, 127), p.b = bytes(blocks * p.N * 128, 127);
    p.scale = values(FUSED_MOE_F32, blocks * ((p.scale_is_of_b ? p.N : M) / 128));
    int64_t elem = (int64_t)fm_rows(p.dw_dtype)->elem_bytes;
    for (int i = 0; i < 2; i++) {
        if (!p.M[i]) continue;
        if (p.accumulate) { /* in any strides */
            p.dw[i] = weight(FUSED_MOE_F32, p.E, p.M[i], p.N);
            const FusedMoeWeight w = p.dw[i];
            result(w.data,
                   ((p.E - 1) * w.stride_expert + (p.M[i] - 1) * w.stride_out + (p.N - 1) * w.stride_in + 1) *
                       elem);
        } else {
            p.dw[i] = (FusedMoeWeight){output(p.E * p.M[i] * p.N * elem), p.M[i] * p.N, p.N, 1, NULL};
        }
    }
    return fused_moe_cpu_eight_bit_wgrad(&p);
}

enum { OFFS = 1, ROW_TOKEN = 2, ROW_SLOT = 4, TOKEN_ROW = 8, ALL_MAPS = 15 };

static const struct {
    const char *name;
    int (*run)(Case *);
    int maps; /* that it has to check */
} operators[] = {
    {"count_plan", count_plan, 0},
    {"router_logits", router_logits, 0},
    {"route", route, 0},
    {"route_backward", route_backward, 0},
    {"pad", pad, 0},
    {"permute", permute, ALL_MAPS},
    {"unpermute", unpermute, ALL_MAPS},
    {"sum_peers", sum_peers, 0},
    {"unpermute_backward", unpermute_backward, ALL_MAPS},
    {"grouped_mm", grouped_mm, OFFS},
    {"quantized_mm", quantized_mm, OFFS},
    {"router_dgrad", router_dgrad, 0},
    {"wgrad", wgrad, OFFS | ROW_TOKEN | ROW_SLOT},
    {"bias_grad", bias_grad, OFFS | ROW_TOKEN | ROW_SLOT},
    {"activate", activate, 0},
    {"activate_backward", activate_backward, 0},
    {"up_gate", up_gate, ALL_MAPS},
    {"down_dgrad", down_dgrad, ALL_MAPS},
    {"quantize_rows", quantize_rows, ALL_MAPS},
    {"eight_bit_up_gate", eight_bit_up_gate, ALL_MAPS},
    {"eight_bit_mm", eight_bit_mm, OFFS},
    {"quantize_weight", quantize_weight, 0},
    {"transpose_codes", transpose_codes, ALL_MAPS},
    {"quantize_dh", quantize_dh, ALL_MAPS},
    {"eight_bit_wgrad", eight_bit_wgrad, OFFS},
};
enum { NUM_OPERATORS = sizeof operators / sizeof operators[0] };

/* --- runs ----------------------------------------------------------------------------------------------- */

/* route_plan, which makes the case's maps; the blocks that hold them. */
static int begin(Case *c, int index) {
    random_state = (uint64_t)index;
    CHECK(route_plan(c) == FUSED_MOE_OK, "case %d: route_plan", index);
    return num_blocks;
}

static void run_case(int index) {
    static const struct {
        int64_t threads;
        int poison;
    } runs[] = {{1, 0xff}, {2, 0x00}, {MAX_THREADS, 0x55}};
    uint64_t first[NUM_OPERATORS];
    Case c = case_of(index);
    for (int r = 0; r < 3; r++) {
        num_threads = runs[r].threads, poison = runs[r].poison;
        int maps = begin(&c, index);
        for (int op = 0; op < NUM_OPERATORS; op++) {
            random_state = (uint64_t)(NUM_OPERATORS * index + op);
            hash = 0xcbf29ce484222325; /* of the maps, too, in the first operator */
            int status = operators[op].run(&c);
            CHECK(status == FUSED_MOE_OK, "case %d: %s: %s", index, operators[op].name,
                  fused_moe_status_string(status));
            finish(maps);
            if (r == 0) first[op] = hash;
            CHECK(hash == first[op], "case %d: %s: other bits on %d threads than on 1", index,
                  operators[op].name, (int)num_threads);
        }
        finish(0);
    }
}

/* An operator says INVALID_ROWS to every entry of a map that leads outside, and touches nothing there. */
static void run_wrong_maps(int index) {
    Case c = case_of(index);
    int maps = begin(&c, index);
    FusedMoeRowMap *m = &c.map;
    int32_t last = m->E - 1, num_rows = m->offs[last], slots = (int32_t)(m->T * m->K);
    const struct {
        int map;
        const int32_t *data;
        int32_t i, value;
    } wrong[] = {
        {OFFS, m->offs, last, (int32_t)m->R + 1}, {OFFS, m->offs, 0, -1},
        {OFFS, m->offs, 0, num_rows + 1},         {ROW_TOKEN, m->row_token, 0, (int32_t)m->T},
        {ROW_TOKEN, m->row_token, 0, -1},         {ROW_SLOT, m->row_slot, num_rows - 1, slots},
        {ROW_SLOT, m->row_slot, 0, -1},           {TOKEN_ROW, m->token_row, slots - 1, num_rows},
        {TOKEN_ROW, m->token_row, 0, -2},
    };
    every_option = true;
    for (int op = 0; op < NUM_OPERATORS; op++)
        for (size_t w = 0; w < sizeof wrong / sizeof wrong[0]; w++) {
            if (!(operators[op].maps & wrong[w].map)) continue;
            int32_t *entry = (int32_t *)wrong[w].data + wrong[w].i, right = *entry;
            *entry = wrong[w].value;
            int status = operators[op].run(&c);
            CHECK(status == FUSED_MOE_INVALID_ROWS, "%s: wrong map %d: %s", operators[op].name, (int)w,
                  fused_moe_status_string(status));
            *entry = right;
            finish(maps);
        }
    every_option = false;
    finish(0);
}

/* A shape whose rows are of several tasks. */
enum { CASE_OF_TASKS = 16 * 5 + 4 * FUSED_MOE_BF16 };

static void plant(const char *fault) {
    Case c = case_of(CASE_OF_TASKS);
    num_threads = 2, every_option = true;
    begin(&c, CASE_OF_TASKS);
    if (!strcmp(fault, "heap")) {
        missing_bytes = 1;
        unpermute(&c);
    } else if (!strcmp(fault, "overflow")) {
        FusedMoeRowMap map = {.offs = (int32_t[]){0}, .R = 2, .E = 1};
        fused_moe_cpu_unpermute(&(FusedMoeUnpermute){.row_map = map, .D = INT64_MAX, .dtype = c.dtype});
    } else if (!strcmp(fault, "race")) { /* all rows give the score of one slot its gradient */
        for (int64_t r = 0; r < c.map.R; r++) ((int32_t *)c.map.row_slot)[r] = 0;
        unpermute_backward(&c);
    } else {
        CHECK(false, "no fault is called %s", fault);
    }
    finish(0);
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "--plant")) {
        plant(argv[2]);
        return 0;
    }
    CHECK(argc == 1, "expected no arguments, or --plant FAULT");
    for (int index = 0; index < NUM_CASES; index++) run_case(index);
    for (int dtype = 0; dtype < 4; dtype++) run_wrong_maps(16 * 4 + 4 * dtype);
    printf("harness: %d operators in %d cases\n", NUM_OPERATORS + 1, NUM_CASES);
}
