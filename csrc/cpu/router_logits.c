/* router_logits: x weight^T + bias, stored in the accumulation type. A task is a block of tokens and experts.
 * A float32 weight may be beside a 16-bit x: both are converted alike. A task walks D in the slices of
 * fused_moe_router_slice, so that its buffers stay in the L2 cache. A token's block decides the shape of
 * PyTorch's matmul, and so perhaps the token's bits: they are the same in every run of a batch, but not in
 * every batch, as they are on a GPU. */
#include "cpu.h"

/* Tokens per task, and experts per task where all tokens are in one block. */
enum { BLOCK = 64, FEW_EXPERTS = 32 };

typedef struct {
    const FusedMoeRouterLogits *p;
    const FmRows *v, *w; /* x's dtype, the weight's */
    int64_t slice, block_experts, expert_blocks;
} Task;

typedef struct {
    void *x, *weight, *bias;
} Buffers;

static Buffers take(const Task *t, char *scratch, size_t *bytes) {
    const FusedMoeRouterLogits *p = t->p;
    size_t accum = t->v->accum_bytes;
    int64_t depth = fm_min(p->D, t->slice), cols = fm_min(p->E, t->block_experts);
    Buffers s;
    s.x = fm_take(&scratch, bytes, t->v->is_accum ? 0 : fm_min(p->T, BLOCK) * depth * accum);
    s.weight = fm_take(&scratch, bytes, t->w->is_accum ? 0 : cols * depth * accum);
    s.bias = fm_take(&scratch, bytes, cols * accum);
    return s;
}

static int router_logits_block(int64_t i, const void *ctx, char *scratch) {
    const Task *t = ctx;
    const FusedMoeRouterLogits *p = t->p;
    const FmRows *v = t->v, *w = t->w;
    size_t unused = 0;
    Buffers s = take(t, scratch, &unused);
    int64_t token = i / t->expert_blocks * BLOCK, tokens = fm_min(BLOCK, p->T - token);
    int64_t expert = i % t->expert_blocks * t->block_experts;
    int64_t experts = fm_min(t->block_experts, p->E - expert);

    FmMatrix all_x = fm_dense((void *)p->x, p->T, p->D), all_weight = fm_dense((void *)p->weight, p->E, p->D);
    FmMatrix logits =
        fm_part(fm_dense(p->logits, p->T, p->E), v->accum_bytes, token, tokens, expert, experts);
    for (int64_t k = 0; k < p->D; k += t->slice) {
        int64_t depth = fm_min(t->slice, p->D - k);
        FmMatrix x = fm_to_accum(v, fm_part(all_x, v->elem_bytes, token, tokens, k, depth), s.x);
        FmMatrix weight =
            fm_to_accum(w, fm_part(all_weight, w->elem_bytes, expert, experts, k, depth), s.weight);
        int status = fm_matmul(fm_accum_rows(v), logits, x, fm_transposed(weight), k > 0);
        if (status != FUSED_MOE_OK) return status;
    }
    if (!p->bias) return FUSED_MOE_OK;
    w->load(s.bias, fm_at(p->bias, w->elem_bytes, expert), experts);
    for (int64_t row = 0; row < tokens; row++)
        v->add(fm_at(logits.data, v->accum_bytes, row * logits.row_stride), s.bias, experts);
    return FUSED_MOE_OK;
}

int fused_moe_cpu_router_logits(const FusedMoeRouterLogits *p) {
    const FmRows *v = fm_rows(p->dtype), *w = fm_rows(p->weight_dtype);
    if (!v || !w) return FUSED_MOE_UNSUPPORTED_DTYPE;
    int64_t block_experts = p->T <= BLOCK ? FEW_EXPERTS : FM_TILE_COLS;
    Task task = {p, v, w, fused_moe_router_slice(p->D), block_experts, fm_blocks(p->E, block_experts)};
    size_t bytes = 0;
    take(&task, NULL, &bytes);
    return fm_parallel(fm_blocks(p->T, BLOCK) * task.expert_blocks, p->T * p->E * p->D, router_logits_block,
                       &task, bytes);
}
