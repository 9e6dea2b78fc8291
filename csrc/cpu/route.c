/* route: scores of every expert, fused with the choice of the K best, or of given ones; and its gradient.
 *
 * A row of E <= 1024 logits fits a thread's scratch. Scores are computed in double and rounded once to
 * float, as are the groups' sums, and the choice is made on the rounded ones, as the contract says (float64
 * logits stay double).
 * Without bias and groups the choice is made on the logits: it cannot depend on how exp rounds. */
#include "../integer.h"
#include "cpu.h"

#include <math.h>
#include <string.h>

enum { BLOCK = 32 };    /* tokens a task */
enum { EXP_WORK = 16 }; /* an exponential, in multiplications */

static void softmax(double *p, const double *logits, int32_t E) {
    double max = -INFINITY, sum = 0;
    for (int32_t e = 0; e < E; e++) max = logits[e] > max || isnan(logits[e]) ? logits[e] : max;
    for (int32_t e = 0; e < E; e++) sum += p[e] = exp(logits[e] - max);
    for (int32_t e = 0; e < E; e++) p[e] /= sum;
}

/* The square root of softplus. Far below zero that is exp(x / 2), which does not underflow as exp(x) does. */
static double sqrtsoftplus(double x) {
    return x < -37 ? exp(x / 2) : sqrt(fmax(x, 0) + log1p(exp(-fabs(x))));
}

/* Its derivative, sigmoid(x) / (2 s), from s = sqrtsoftplus(x): sigmoid(x) = 1 - exp(-s^2). */
static double sqrtsoftplus_derivative(double s) {
    return s < 1e-8 ? s / 2 : -expm1(-s * s) / (2 * s);
}

static void all_scores(FusedMoeScoreFunc f, double *p, const double *logits, int32_t E) {
    if (f == FUSED_MOE_SOFTMAX)
        softmax(p, logits, E);
    else if (f == FUSED_MOE_SQRTSOFTPLUS)
        for (int32_t e = 0; e < E; e++) p[e] = sqrtsoftplus(logits[e]);
    else
        for (int32_t e = 0; e < E; e++) p[e] = 1 / (1 + exp(-logits[e]));
}

static double score_of(const double *score, int32_t id) {
    return id < 0 ? 0 : score[id];
}

/* The factor on the scores of an expert. */
static double scale_of(const FmRows *v, const void *expert_scale, int32_t id) {
    return expert_scale ? v->get(expert_scale, id) : 1;
}

static void load_logits(const FmRows *v, double *logits, void *accum, const void *row, int32_t E) {
    v->load(accum, row, E);
    for (int32_t e = 0; e < E; e++) logits[e] = v->get(accum, e);
}

/* --- forward -------------------------------------------------------------------------------------------- */

/* NaN is the greatest, as in torch.topk: a poisoned logit is chosen and shows in the scores. */
static bool is_better(double a, double b) {
    return a > b || (isnan(a) && !isnan(b));
}

/* best[0..n): indices of the best of value[0..size), best first; an equal later one does not displace. */
static void insert(int32_t *best, int32_t *n, int32_t k, const double *value, int32_t i) {
    if (*n == k && !is_better(value[i], value[best[k - 1]])) return;
    int32_t rank = *n < k ? (*n)++ : k - 1;
    for (; rank > 0 && is_better(value[i], value[best[rank - 1]]); rank--) best[rank] = best[rank - 1];
    best[rank] = i;
}

/* Marks the experts of the best groups; a group is worth its two best experts, or its best one. */
static void keep_groups(const FusedMoeRoute *p, const FmRows *v, const double *choice, double *worth,
                        int32_t *best, bool *kept) {
    int32_t size = p->E / p->num_groups, num_best = 0;
    for (int32_t g = 0; g < p->num_groups; g++) {
        int32_t two[2], n = 0;
        for (int32_t i = 0; i < size; i++) insert(two, &n, 2, choice + g * size, i);
        bool adds = n > 1 && p->group_score == FUSED_MOE_TOP2;
        worth[g] = choice[g * size + two[0]] + (adds ? choice[g * size + two[1]] : 0);
        if (v->accum_bytes == sizeof(float)) worth[g] = (float)worth[g];
        insert(best, &num_best, p->num_limited_groups, worth, g);
    }
    for (int32_t e = 0; e < p->E; e++) kept[e] = false;
    for (int32_t b = 0; b < num_best; b++)
        for (int32_t i = 0; i < size; i++) kept[best[b] * size + i] = true;
}

/* A bias of -infinity bars an expert, whatever its score. */
static bool is_allowed(const FusedMoeRoute *p, int32_t e) {
    return !p->bias || p->bias[e] != -INFINITY;
}

/* Whether a token's ids are given: not if all of them are -1, nor if there are none. */
static bool take_given(const FusedMoeRoute *p, int64_t t, int32_t *ids) {
    bool is_given = false;
    for (int32_t k = 0; p->given_ids && k < p->K; k++) {
        int64_t id = integer(p->given_ids, p->given_dtype, t * p->K + k);
        ids[k] = id >= 0 && id < p->E ? (int32_t)id : -1;
        is_given |= id != -1;
    }
    return is_given;
}

static int route_block(int64_t block, const void *ctx, char *scratch) {
    const FusedMoeRoute *p = ctx;
    const FmRows *v = fm_rows(p->dtype);
    size_t unused = 0;
    void *accum = fm_take(&scratch, &unused, p->E * v->accum_bytes);
    double *logits = fm_take(&scratch, &unused, p->E * sizeof(double));
    double *score = fm_take(&scratch, &unused, p->E * sizeof(double));
    double *choice = fm_take(&scratch, &unused, p->E * sizeof(double));
    double *worth = fm_take(&scratch, &unused, p->E * sizeof(double));
    int32_t *groups = fm_take(&scratch, &unused, p->E * sizeof(int32_t));
    bool *kept = fm_take(&scratch, &unused, p->E * sizeof(bool));
    bool limited = p->num_groups > 0, by_score = p->bias || limited;
    int64_t num_tokens = num_real_tokens(p->num_tokens, p->num_tokens_dtype, p->T);

    for (int64_t t = block * BLOCK; t < fm_min(p->T, (block + 1) * BLOCK); t++) {
        int32_t *ids = p->ids + t * p->K, n = 0;
        if (t >= num_tokens) { /* padding: its logits are not read */
            for (int32_t k = 0; k < p->K; k++) {
                ids[k] = -1;
                v->set(p->scores, t * p->K + k, 0);
            }
            continue;
        }
        load_logits(v, logits, accum, fm_at(p->logits, v->elem_bytes, t * p->E), p->E);
        all_scores(p->score_func, score, logits, p->E);
        for (int32_t e = 0; e < p->E; e++) {
            if (v->accum_bytes == sizeof(float)) score[e] = (float)score[e];
            choice[e] = by_score ? score[e] : logits[e];
            if (!p->bias) continue;
            choice[e] = is_allowed(p, e) ? choice[e] + p->bias[e] : -INFINITY;
            if (v->accum_bytes == sizeof(float)) choice[e] = (float)choice[e];
        }
        if (!take_given(p, t, ids)) {
            if (limited) keep_groups(p, v, choice, worth, groups, kept);
            for (int32_t e = 0; e < p->E; e++)
                if (!limited || kept[e]) insert(ids, &n, p->K, choice, e);
            for (int32_t k = 0; k < p->K; k++)
                if (!is_allowed(p, ids[k])) ids[k] = -1;
        }
        double sum = p->norm_eps;
        for (int32_t k = 0; k < p->K; k++) sum += score_of(score, ids[k]);
        double factor = p->route_norm ? p->route_scale / sum : p->route_scale;
        for (int32_t k = 0; k < p->K; k++)
            v->set(p->scores, t * p->K + k,
                   ids[k] < 0 ? 0 : score[ids[k]] * factor * scale_of(v, p->expert_scale, ids[k]));
    }
    return FUSED_MOE_OK;
}

int fused_moe_cpu_route(const FusedMoeRoute *p) {
    const FmRows *v = fm_rows(p->dtype);
    if (!v) return FUSED_MOE_UNSUPPORTED_DTYPE;
    size_t bytes = p->E * (v->accum_bytes + 4 * sizeof(double) + sizeof(int32_t) + 1) + 7 * 64;
    return fm_parallel(fm_blocks(p->T, BLOCK), p->T * p->E * EXP_WORK, route_block, p, bytes);
}

/* --- backward ------------------------------------------------------------------------------------------- */

/* The gradient of a slot's score before the expert's factor. The slot has an expert. */
static double unscaled(const FusedMoeRouteBackward *p, const FmRows *v, int64_t t, int32_t k) {
    int64_t slot = t * p->K + k;
    return v->get(p->dscores, slot) * scale_of(v, p->expert_scale, p->ids[slot]);
}

static int route_backward_block(int64_t block, const void *ctx, char *scratch) {
    const FusedMoeRouteBackward *p = ctx;
    const FmRows *v = fm_rows(p->dtype), *narrow = fm_rows(p->rounded_dtype);
    size_t unused = 0;
    void *accum = fm_take(&scratch, &unused, p->E * v->accum_bytes);
    double *logits = fm_take(&scratch, &unused, p->E * sizeof(double));
    double *score = fm_take(&scratch, &unused, p->E * sizeof(double));
    double *dscore = fm_take(&scratch, &unused, p->E * sizeof(double));

    for (int64_t t = block * BLOCK; t < fm_min(p->T, (block + 1) * BLOCK); t++) {
        const int32_t *ids = p->ids + t * p->K;
        void *dlogits = fm_at(p->dlogits, v->elem_bytes, t * p->E);
        void *rounded = p->rounded ? fm_at(p->rounded, narrow->elem_bytes, t * p->E) : NULL;
        bool has_expert = false;
        for (int32_t k = 0; k < p->K; k++) has_expert |= ids[k] >= 0;
        if (!has_expert) { /* padding, say: its logits may be NaN */
            memset(dlogits, 0, p->E * v->elem_bytes);
            if (rounded) memset(rounded, 0, p->E * narrow->elem_bytes);
            continue;
        }
        load_logits(v, logits, accum, fm_at(p->logits, v->elem_bytes, t * p->E), p->E);
        all_scores(p->score_func, score, logits, p->E);
        for (int32_t e = 0; e < p->E; e++) dscore[e] = 0;

        /* through scales and norm: q_k = score_k / sum, dscore_k = (dq_k - sum_j dq_j q_j) / sum */
        double sum = p->norm_eps, shift = 0;
        if (p->route_norm) {
            for (int32_t k = 0; k < p->K; k++) sum += score_of(score, ids[k]);
            for (int32_t k = 0; k < p->K; k++)
                if (ids[k] >= 0) shift += unscaled(p, v, t, k) * score[ids[k]] / sum;
        }
        double factor = p->route_norm ? p->route_scale / sum : p->route_scale;
        for (int32_t k = 0; k < p->K; k++)
            if (ids[k] >= 0) dscore[ids[k]] += (unscaled(p, v, t, k) - shift) * factor;

        if (p->score_func == FUSED_MOE_SOFTMAX) {
            double mean = 0;
            for (int32_t e = 0; e < p->E; e++) mean += dscore[e] * score[e];
            for (int32_t e = 0; e < p->E; e++) v->set(accum, e, (dscore[e] - mean) * score[e]);
        } else if (p->score_func == FUSED_MOE_SQRTSOFTPLUS) {
            for (int32_t e = 0; e < p->E; e++)
                v->set(accum, e, dscore[e] * sqrtsoftplus_derivative(score[e]));
        } else {
            for (int32_t e = 0; e < p->E; e++) v->set(accum, e, dscore[e] * score[e] * (1 - score[e]));
        }
        v->store(dlogits, accum, p->E);
        if (rounded) narrow->store(rounded, accum, p->E);
    }
    return FUSED_MOE_OK;
}

int fused_moe_cpu_route_backward(const FusedMoeRouteBackward *p) {
    const FmRows *v = fm_rows(p->dtype);
    if (!v) return FUSED_MOE_UNSUPPORTED_DTYPE;
    for (int64_t i = 0; i < p->T * p->K; i++)
        if (p->ids[i] < -1 || p->ids[i] >= p->E) return FUSED_MOE_INVALID_ROWS;
    size_t bytes = p->E * (v->accum_bytes + 3 * sizeof(double)) + 4 * 64;
    return fm_parallel(fm_blocks(p->T, BLOCK), p->T * p->E * EXP_WORK, route_backward_block, p, bytes);
}
