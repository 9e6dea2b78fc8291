/* fused_moe: the interface between the bindings (csrc/torch/) and the kernels of every tier.
 *
 * C11, no torch, no C++. One params struct and one prototype per operator, shapes in the margin.
 *
 *   T tokens, D model width, F expert hidden width, E experts, K experts per token,
 *   R capacity in rows (T*K, or the rows given), N and M the widths of a GEMM's operands.
 *   token t, slot k, row r, expert e; a map is named from_to: row_token[r] is a token.
 *   H: width of h and dh: 2F for gated experts, F for ungated ones.
 *
 * All matrices are row-major and dense unless they carry strides; strides count elements.
 * Functions return a FusedMoeStatus and never print, exit or throw.
 *
 * Kernels allocate nothing: FusedMoeWorkspace has the memory that a call needs. */
#ifndef FUSED_MOE_H
#define FUSED_MOE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "formats.h"
#include "rules.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    FUSED_MOE_OK = 0,
    FUSED_MOE_INVALID_ROWS, /* ids, maps or row counts point outside of the given tensors */
    FUSED_MOE_OUT_OF_MEMORY,
    FUSED_MOE_MATMUL_FAILED, /* PyTorch's matmul or thread pool reported an error */
    FUSED_MOE_UNSUPPORTED_DTYPE,
    FUSED_MOE_UNSUPPORTED_EIGHT_BIT, /* no tier multiplies these operands of 8 bits on this GPU */
    FUSED_MOE_DRIVER_TOO_OLD,        /* for the CUDA runtime that the library was linked with */
    FUSED_MOE_UNSUPPORTED_GPU,       /* none of the build's GPU targets runs on it */
    FUSED_MOE_NO_SUCH_TIER,          /* FUSED_MOE_TIER names none, or one that this GPU does not run */
    FUSED_MOE_CUDA_ERROR,            /* a launch failed; fused_moe_cuda_error() has the runtime's message */
} FusedMoeStatus;

const char *fused_moe_status_string(int status);

typedef enum {
    FUSED_MOE_F32,
    FUSED_MOE_F64,
    FUSED_MOE_F16,
    FUSED_MOE_BF16,
    FUSED_MOE_I32,
    FUSED_MOE_I64,
    FUSED_MOE_I16,
    FUSED_MOE_I8,
    FUSED_MOE_U8,
} FusedMoeDtype;

typedef enum { FUSED_MOE_SOFTMAX, FUSED_MOE_SIGMOID, FUSED_MOE_SQRTSOFTPLUS } FusedMoeScoreFunc;

/* What a group of experts is worth: the sum of its two best experts' scores, or its best one's. */
typedef enum { FUSED_MOE_TOP2, FUSED_MOE_MAX } FusedMoeGroupScore;

/* Columns of h, and rows of w1: separate and halves have gate | up, interleaved has gate0, up0, ...
 * Separate keeps up in w3; without w3 the expert is ungated. */
typedef enum {
    FUSED_MOE_SEPARATE,
    FUSED_MOE_HALVES,
    FUSED_MOE_INTERLEAVED,
    FUSED_MOE_UNGATED
} FusedMoeLayout;

typedef struct { /* which activation of activation.h, and its constants */
    int32_t kind;
    double alpha, limit;
    double alpha_inverse, limit_inverse; /* 1 / alpha and 1 / limit: kernels do not divide */
} FusedMoeActivation;

/* Rows, and columns, of a tile of a quantised weight. */
enum { FUSED_MOE_QUANTIZED_TILE = 64 };

typedef struct {        /* weight (E, out, in) = (code - zero) scale, in f32, rounded to the call's dtype */
    const void *data;   /* [E,out,in]; codes of 4 bits two per byte, the even column in the lower half */
    const void *scale;  /* [E,ceil(out/block_out),ceil(in/block_in)] */
    const int8_t *zero; /* like scale, -8 to 7; NULL: zeros */
    int64_t out, in;
    int64_t block_out, block_in; /* rows and columns that share a scale */
    bool transposed;             /* a GEMM reads it as (E, in, out): the gradient of its rows */
    FusedMoeFormat format;
    FusedMoeDtype scale_dtype; /* floating; u8 is e8m0 */
    /* The number of scales per tile and group, or 0: the weight is not in tiles. With tiles of 64x64
     * (fused_moe/quantized/tiles.py) data is [E,out/64,in/64] tiles, and scale and zero are
     * [E,out/64,ceil(in/block_in),tile_scales]: 64, one per row, or 4 equal ones; f32 for codes of 8 bits.
     * Only CUDA has tiles. */
    int32_t tile_scales;
    /* The second packing of a weight in tiles, or NULL: GEMMs of the transposed weight read it. data_t is
     * [E,in/64,out/64] tiles. If block_out is 1, scale_t and zero_t are [E,ceil(in/block_in),out/64,64], in
     * the order of lanes; else scale_t is [E,in/64,ceil(out/block_out),4], 4 equal ones. */
    const void *data_t, *scale_t;
    const int8_t *zero_t;
} FusedMoeQuantizedWeight;

typedef struct { /* expert weights (E, out, in); either of out and in may be the dense one */
    void *data;  /* NULL: absent */
    int64_t stride_expert, stride_out, stride_in;
    /* The quantised weight, or NULL. Only grouped_mm and up_gate read it. Strides are then those of the
     * weight in the GEMM's dtype, and data is not NULL. */
    const FusedMoeQuantizedWeight *quantized;
} FusedMoeWeight;

typedef struct {              /* the rows of all (token, slot) pairs                         */
    const int32_t *offs;      /* [E]    cumulative ends: one past the last row of each expert */
    const int32_t *row_token; /* [R]    token of each row; NULL: row r is token r            */
    const int32_t *row_slot;  /* [R]    t*K + k of each row; NULL with row_token             */
    const int32_t *token_row; /* [T,K]  row of each slot, -1: none; NULL with row_token      */
    const int32_t *schedule;  /* [8+4E] schedule.h; NULL where no GEMM reads it              */
    int64_t T, K, R;
    int32_t E;
} FusedMoeRowMap;

typedef struct {        /* tier and memory of one GEMM call on CUDA. fused_moe_cuda_select_<operator> sets: */
    int32_t tier;       /* FusedMoeTier                                                                     */
    int64_t bytes;      /* of data                                                                          */
    bool dequantizes;   /* quantised weights are dequantised into the start of data                         */
    void *data;         /* the caller sets it: uninitialised memory                                         */
    uint32_t *counters; /* the caller sets it: [FUSED_MOE_NUM_COUNTERS] zeros, zeros again after the call   */
} FusedMoeWorkspace;

/* Work stealing's counters, and split-K's semaphores. */
enum { FUSED_MOE_NUM_COUNTERS = 4096 };

/* Programmatic dependent launch (PDL), on sm_90 alone: a launch may begin before the launch before it has
 * ended. Zeros: its kernel waits for that end (griddepcontrol.wait) before it reads or writes anything. */
typedef struct {
    bool reads_before_wait; /* of what is older than the launch before it                             */
    bool lets_next_start;   /* the next launch may begin once this one has waited                     */
    bool after_any;         /* without PDL, since another library's kernel before it would let it begin */
} FusedMoePdl;

/* --- routing -------------------------------------------------------------------------------------------- */

typedef struct {        /* logits[t] = weight x[t] + bias */
    const void *x;      /* [T,D] */
    const void *weight; /* [E,D] */
    const void *bias;   /* [E]; may be NULL */
    void *logits;       /* [T,E] f32, f64 for f64 x: not rounded */
    FusedMoeWorkspace workspace;
    int64_t T, D;
    int32_t E;
    FusedMoeDtype dtype;        /* of x                                                     */
    FusedMoeDtype weight_dtype; /* of weight and bias: dtype, or f32 beside a 16-bit x     */
} FusedMoeRouterLogits;

typedef struct {         /* dx[t] = dlogits[t] weight */
    const void *dlogits; /* [T,E] */
    const void *weight;  /* [E,D] */
    void *dx;            /* [T,D] */
    bool accumulate;     /* dx += the rounded dlogits weight, as autograd adds gradients */
    FusedMoeWorkspace workspace;
    int64_t T, D;
    int32_t E;
    FusedMoeDtype dtype;
} FusedMoeRouterDgrad;

typedef struct {              /* scores and the K best experts of every token */
    const void *logits;       /* [T,E]                                                    */
    const float *bias;        /* [E] steers the choice, -inf bars an expert; or NULL      */
    const void *given_ids;    /* [T,K] taken unless a token's are all -1; or NULL         */
    const void *num_tokens;   /* [1] tokens from this one on have no expert; NULL: T      */
    const void *expert_scale; /* [E] factors on scores, of their dtype; or NULL           */
    void *scores;             /* [T,K] f32, f64 for f64 logits; 0 without an expert       */
    int32_t *ids;             /* [T,K] -1: no expert                                      */
    FusedMoeDtype dtype;      /* of logits                                                */
    FusedMoeDtype given_dtype, num_tokens_dtype;
    FusedMoeScoreFunc score_func;
    bool route_norm;
    double route_scale;
    double norm_eps;                        /* added to the sum that route_norm divides by */
    int32_t num_groups, num_limited_groups; /* equal: no limit                             */
    FusedMoeGroupScore group_score;
    int64_t T;
    int32_t E, K;
} FusedMoeRoute;

typedef struct {              /* dlogits from dscores; scores are computed again */
    const void *dscores;      /* [T,K] f32, f64 for f64 logits */
    const void *logits;       /* [T,E] */
    const int32_t *ids;       /* [T,K] -1: no gradient */
    const void *expert_scale; /* as in FusedMoeRoute */
    void *dlogits;            /* [T,E] 0 for a token without experts, whatever its logits */
    void *rounded;            /* [T,E] f32 dlogits rounded to rounded_dtype; NULL: not */
    FusedMoePdl pdl;          /* it may read all but dscores before the wait */
    FusedMoeDtype dtype, rounded_dtype;
    FusedMoeScoreFunc score_func;
    bool route_norm;
    double route_scale, norm_eps;
    int64_t T;
    int32_t E, K;
} FusedMoeRouteBackward;

typedef struct {     /* the plan from the chosen ids, stable in t*K + k */
    const void *ids; /* [T,K] i32 or i64; outside [0,E): the slot gets no row */
    FusedMoeDtype ids_dtype;
    const int32_t *expert_map; /* [map_size] the expert that an id stands for; NULL: the id itself */
    int64_t map_size;
    int32_t *counts;    /* [E]     */
    int32_t *offsets;   /* [E+1]   */
    int32_t *row_token; /* [T*K]   -1 past the last row */
    int32_t *row_slot;  /* [T*K]   -1 past the last row */
    int32_t *token_row; /* [T,K]   */
    int32_t *schedule;  /* [8+4E]  */
    void *workspace;    /* fused_moe_cuda_route_plan_workspace bytes */
    uint32_t *counters; /* [FUSED_MOE_NUM_COUNTERS] set to zero for the GEMMs after it; may be NULL */
    int64_t T;
    int32_t K, E;
    int32_t tile_rows; /* of the schedule's row tiles: FUSED_MOE_TILE_ROWS, or FusedMoeExperts' tile_rows */
} FusedMoeRoutePlan;

typedef struct {            /* route_plan, which may have fewer rows than slots */
    FusedMoeRoutePlan plan; /* its row_token and row_slot are [R] */
    int64_t R;              /* slots whose rows would be past it get none, and count as no expert's */
    int64_t *dropped;       /* the number of these slots is added to it; may be NULL */
} FusedMoeBoundedPlan;

typedef struct {           /* the plan of rows that are grouped already */
    const void *counts_in; /* [E] any integer dtype */
    FusedMoeDtype counts_dtype;
    int32_t *counts;   /* [E]     */
    int32_t *offsets;  /* [E+1]   */
    int32_t *schedule; /* [8+4E] */
    int64_t R;
    int32_t E;
} FusedMoeCountPlan;

/* --- moving rows ---------------------------------------------------------------------------------------- */

typedef struct {          /* out[e,i,j,k] = x[e,i,j,k], zero where x has none */
    const void *x;        /* [E,a,b,c] of x_sizes, stride 1 in c */
    void *out;            /* [E,A,B,C] of sizes */
    int64_t x_sizes[3];   /* a, b, c; each may be above or below out's */
    int64_t x_strides[3]; /* elements between neighbours in e, i and j */
    int64_t sizes[3];     /* A, B, C */
    int64_t E, elem_bytes;
} FusedMoePad;

typedef struct {   /* rows[r] = x[row_token[r]]; zero past the last row */
    const void *x; /* [T,D] */
    void *rows;    /* [R,D] */
    FusedMoeRowMap row_map;
    int64_t D;
    FusedMoeDtype dtype;
} FusedMoePermute;

typedef struct { /* out[t] = sum_k scores[t,k] rows[token_row[t,k]] + sigmoid(shared_gate[t]) shared[t] */
    const void *rows;        /* [R,D] */
    const void *scores;      /* [T,K] f32, f64 for f64 rows; NULL: ones */
    const void *shared;      /* [T,D] rows of the shared experts; NULL: zeros */
    const void *shared_gate; /* [T] logits, in the dtype of scores; NULL: shared times one */
    void *out;               /* [T,D] rounded once */
    FusedMoePdl pdl;         /* row_map and scores are what it may read before the wait */
    FusedMoeRowMap row_map;
    int64_t D;
    FusedMoeDtype dtype;
} FusedMoeUnpermute;

typedef struct {        /* drows[r] = s dout[row_token[r]];  dscores[t,k] = <rows[r], dout[t]> */
    const void *dout;   /* [T,D] */
    const void *rows;   /* [R,D] */
    const void *scores; /* [T,K]; NULL: ones     */
    void *drows;        /* [R,D]; may be NULL    */
    void *dscores;      /* [T,K]; may be NULL    */
    FusedMoeRowMap row_map;
    int64_t D;
    FusedMoeDtype dtype;
} FusedMoeUnpermuteBackward;

typedef struct {             /* dshared[t] = s dout[t];  dshared_gate[t] = s' <dout[t], shared[t]> */
    const void *dout;        /* [T,D] */
    const void *shared;      /* [T,D]; may be NULL without dshared_gate */
    const void *shared_gate; /* [T] s = sigmoid(shared_gate[t]) */
    void *dshared;           /* [T,D]; may be NULL */
    void *dshared_gate;      /* [T]; may be NULL   */
    int64_t T, D;
    FusedMoeDtype dtype;
} FusedMoeSharedBackward;

enum { FUSED_MOE_MAX_PEERS = 128 }; /* whose memory one process can reach: more than any NVLink domain has */

typedef struct { /* out[t] = sum_k scores[t,k] rows[index[t,k]], the rows of N ranks one after another */
    const void *rows[FUSED_MOE_MAX_PEERS]; /* N times [C,D] */
    const int32_t *index;                  /* [T,K] outside [0, N*C): adds nothing */
    const void *scores;                    /* [T,K] f32, f64 for f64 rows; NULL: ones */
    void *out;                             /* [T,D] added in the order of k, rounded once */
    int64_t T, D, C;
    int32_t N, K;
    FusedMoeDtype dtype;
} FusedMoeSumPeers;

/* --- grouped GEMMs -------------------------------------------------------------------------------------- */

typedef struct {         /* out[r] = sum_i a[r, part i] b[i][e(r)]^T + bias[e(r)]; zero past the last row */
    const void *a;       /* [R, N0+N1] */
    FusedMoeWeight b[2]; /* (E, M, Ni); b[1] may be absent */
    const void *bias;    /* [E,M]; may be NULL */
    void *out;           /* [R,M]  */
    const int32_t *offs; /* [E]    */
    const int32_t *schedule; /* [8+4E] schedule.h; NULL: offs is unchecked */
    FusedMoeWorkspace workspace;
    const FusedMoeRoutePlan *unplanned; /* as in FusedMoeUpGate, whose launch wrote counts and token_row */
    /* It may read offs, schedule or the ids of the plan, b[0] and the second half of the counters before the
     * wait; b[1] is absent then. */
    FusedMoePdl pdl;
    int64_t R, M, N[2];
    int32_t E;
    FusedMoeDtype dtype;
} FusedMoeGroupedMM;

typedef struct {                /* dw[i][e] = a[rows of e, part i]^T b[rows of e]; zero for an empty expert */
    const void *a;              /* [R, M0+M1]     */
    const void *b;              /* [R or T, N]    */
    const int32_t *b_row_token; /* [R] b is read through it; NULL: b has R rows */
    const int32_t *row_slot;    /* [R] slots, to index b_scores */
    const void *b_scores;       /* [T,K] b's rows are multiplied by them and rounded; NULL: not */
    FusedMoeWeight dw[2];       /* (E, Mi, N); either may be absent */
    FusedMoeDtype dw_dtype;     /* dtype, or f32 */
    bool accumulate;            /* dw += the result; only for f32 dw */
    const int32_t *offs;        /* [E] */
    const int32_t *schedule;    /* [8+4E] schedule.h; NULL: offs is unchecked */
    FusedMoeWorkspace workspace;
    int64_t R, T, K, N, M[2]; /* T: rows of b */
    int32_t E;
    FusedMoeDtype dtype; /* of a and b */
} FusedMoeWgrad;

typedef struct {              /* db[e] = sum over the rows of e of s rows[r] */
    const void *rows;         /* [R or T, N]            */
    const int32_t *row_token; /* [R] or NULL: rows has R rows */
    const int32_t *row_slot;  /* [R] slots, to index scores */
    const void *scores;       /* [T,K] or NULL: ones    */
    void *db;                 /* [E,N]                  */
    const int32_t *offs;      /* [E]                    */
    int64_t R, T, K, N;       /* T: rows of rows        */
    int32_t E;
    FusedMoeDtype dtype;
} FusedMoeBiasGrad;

/* --- activation ----------------------------------------------------------------------------------------- */

/* For experts that are composed of grouped GEMMs. With layout separate, gates and ups are two tensors. */

typedef struct {    /* a = act(gate) up */
    const void *h;  /* [R,H]; separate: the gates, [R,F] */
    const void *up; /* [R,F] when separate               */
    void *a;        /* [R,F] */
    int64_t R, F;
    FusedMoeLayout layout;
    FusedMoeActivation activation;
    FusedMoeDtype dtype;
} FusedMoeActivate;

typedef struct {    /* dh, dup = dact(da, h, up) */
    const void *da; /* [R,F] */
    const void *h;  /* as in FusedMoeActivate */
    const void *up;
    void *dh;  /* like h  */
    void *dup; /* like up */
    int64_t R, F;
    FusedMoeLayout layout;
    FusedMoeActivation activation;
    FusedMoeDtype dtype;
} FusedMoeActivateBackward;

/* --- experts -------------------------------------------------------------------------------------------- */

typedef struct {        /* h = x[row_token] w1^T | w3^T + b + addend;  a = act(gate) up */
    const void *x;      /* [T,D] */
    const void *scores; /* [T,K] x's rows are multiplied by them and rounded; NULL: not */
    FusedMoeWeight w1;  /* (E,F,D), (E,2F,D) when packed */
    FusedMoeWeight w3;  /* (E,F,D) when separate */
    const void *b1;     /* [E,F], [E,2F] when packed; may be NULL */
    const void *b3;     /* [E,F] when separate; may be NULL */
    const void *addend; /* [R,H] what adapters add; may be NULL */
    void *h;            /* [R,H]; NULL: not kept */
    void *a;            /* [R,F] */
    /* Few slots (slot_plan.h), whose plan the GEMM makes. It writes counts and token_row alone, and uses no
     * workspace.counters. NULL: row_map is the plan. */
    const FusedMoeRoutePlan *unplanned;
    FusedMoeWorkspace workspace;
    FusedMoePdl pdl; /* it may let the down GEMM begin */
    FusedMoeRowMap row_map;
    int64_t D, F;
    FusedMoeLayout layout;
    FusedMoeActivation activation;
    FusedMoeDtype dtype;
} FusedMoeUpGate;

typedef struct {            /* both sides without gradients in one launch: sm90, few rows */
    FusedMoeUpGate up;      /* h NULL */
    FusedMoeGroupedMM down; /* reads up.a */
    FusedMoeUnpermute
        combine; /* reads down.out; in the same launch if up.unplanned is set, else in its own */
    FusedMoeWorkspace workspace;
    int32_t tile_rows; /* of the plan's schedule */
} FusedMoeExperts;

typedef struct {        /* g = dout[row_token] w2;  dh = dact(s g, h);  a_scaled = s a;  dscores = <g, a> */
    const void *dout;   /* [T,D] */
    FusedMoeWeight w2;  /* (E,D,F) */
    const void *b2;     /* [E,D] adds <dout, b2> to dscores; may be NULL */
    const void *h;      /* [R,H] */
    const void *scores; /* [T,K]; NULL: ones */
    void *dh;           /* [R,H]; may be NULL */
    void *a_scaled;     /* [R,F]; may be NULL */
    void *dscores;      /* [T,K] zero in slots without a row; may be NULL */
    FusedMoeWorkspace workspace;
    FusedMoePdl pdl; /* for the last launch, which writes dscores */
    FusedMoeRowMap row_map;
    int64_t D, F;
    FusedMoeLayout layout;
    FusedMoeActivation activation;
    FusedMoeDtype dtype;
} FusedMoeDownDgrad;

/* --- 8 bits on both operands ---------------------------------------------------------------------------- */

/* Without gradients, of weights whose format is fp8_block, fp8 or int8, as published. x has one scale for
 * each row. So has a, but of fp8_block: one for 128 columns of a row. eight_bit.h has the arithmetic. */

typedef struct {         /* codes[r] scale[r] = s x[row_token[r]] (1 / smooth[e(r)]) */
    const void *x;       /* [T,D] */
    const void *scores;  /* [T,K] f32, s: x's rows are multiplied by them and rounded; NULL: not */
    const float *smooth; /* [E,D]; NULL: ones */
    void *codes;         /* [R,D] e4m3 or i8 */
    float *scale;        /* [R] */
    void *token_codes;   /* [T,D] tokens' codes, beside their rows'; NULL: not. Without scores and smooth */
    FusedMoeRowMap row_map; /* row_token NULL: row r is token r. offs NULL: all R rows, without smooth */
    FusedMoePdl pdl;
    int64_t D;
    FusedMoeCode code;   /* E4M3 or INT8                             */
    bool power_of_two;   /* scales are rounded up to powers of two   */
    FusedMoeDtype dtype; /* of x: f32, bf16 or f16                   */
} FusedMoeQuantizeRows;

typedef struct {
    /* x: codes [T,D]. fp8_block: a is e4m3 codes; then h, gates | ups whatever the layout, may be kept, and
     * x has a row for each row. scores and addend are NULL. */
    FusedMoeUpGate up;
    const float *x_scale; /* [T] */
    bool gathers;         /* set by its select: false if row_map must have no row_token, T being R */
    float *a_scale;       /* [ceil(F/128),R] of fp8_block; NULL: a has up.dtype */
    bool power_of_two;    /* a's scales are */
} FusedMoeEightBitUpGate;

typedef struct {
    FusedMoeGroupedMM down; /* a: codes [R,N0]; b[1] is absent */
    const float *a_scale;   /* [ceil(N0/128),R] of fp8_block, else [R] */
    bool a_has_row_scales;  /* fp8_block, and yet a_scale is [R] */
} FusedMoeEightBitMM;

/* --- FP8 training --------------------------------------------------------------------------------------- */

/* Codes are e4m3, their scales fused_moe_scale_of, no powers of two. D and F are multiples of 128. A row
 * block has 128 rows of an expert (fused_moe_num_row_blocks); `blocks` counts them. The scales of x's and of
 * dout's rows are folded into the other operand of a weight gradient, so one quantisation of x serves both
 * GEMMs that read it. */

typedef struct {            /* a weight in blocks of 128 x 128, and its transpose */
    FusedMoeWeight part[2]; /* (E,M[i],N): part 1, which may be absent, follows part 0 along M */
    void *codes;            /* [E,M,N], M = M[0] + M[1]; may be NULL, with scale */
    float *scale;           /* [E,M/128,N/128]                                   */
    void *codes_t;          /* [E,N,M] the same codes; may be NULL, with scale_t */
    float *scale_t;         /* [E,N/128,M/128]                                   */
    int64_t M[2], N;        /* multiples of 128                                  */
    int32_t E;
    FusedMoeDtype dtype; /* the weight's, f32 or bf16 */
} FusedMoeQuantizeWeight;

/* Rows' codes by columns: columns[block][c][i] = codes[row_token[r]][first + c], r being the block's row i,
 * and zeros past an expert's last row. */
typedef struct {
    const void *codes;             /* [T,D] e4m3                                */
    void *columns;                 /* [blocks,num_columns,128]                  */
    FusedMoeRowMap row_map;        /* row_token NULL: row r is token r          */
    int64_t D, first, num_columns; /* multiples of 128                          */
} FusedMoeTransposeCodes;

/* dh = dact(s g, h), a' = s a and dscores = <g, a>. dh and a' are rounded to dtype, and then
 *   by rows     dh[r] (1 / dh_scale), one scale for 128 columns of a row
 *   by columns  dh[r] (x_scale[r] (1 / dh_t_scale)), a'[r] (dout_scale[r] (1 / a_t_scale)), one scale for
 *               128 rows and 128 columns: of the largest |x_scale[r] peak[r]|, peak being a row's over
 *               the 128 columns
 * become codes. Where the weight gradients are 16-bit GEMMs, dh and a' themselves are stored instead of
 * columns. dscores is summed in float32 over 128 columns, and these sums in order. */
typedef struct {
    const void *g;                     /* [R,F] */
    const void *h;                     /* [R,H] gates | ups, or gates */
    const float *scores;               /* [T,K]; NULL: ones */
    const float *x_scale, *dout_scale; /* [R] */
    void *dh;                          /* [R,H] codes; may be NULL, with dh_scale */
    float *dh_scale;                   /* [H/128,R] */
    void *dh_t;                        /* [blocks,H,128] codes; may be NULL, with dh_t_scale */
    float *dh_t_scale;                 /* [blocks,H/128] */
    void *a_t;                         /* [blocks,F,128] codes; may be NULL, with a_t_scale */
    float *a_t_scale;                  /* [blocks,F/128] */
    void *dh_rows, *a_rows;            /* [R,H], [R,F] of dtype; may be NULL */
    float *partials;                   /* [R,F/128] scratch; NULL without dscores */
    float *dscores;                    /* [T,K] zero in slots without a row; may be NULL */
    FusedMoeRowMap row_map;
    int64_t F;
    FusedMoeLayout layout; /* HALVES or UNGATED */
    FusedMoeActivation activation;
    FusedMoeDtype dtype;
} FusedMoeQuantizeDh;

typedef struct {       /* dw[e] = sum over the row blocks b of e: scale[b] a[b] b[b]^T; zero if it has none */
    const void *a, *b; /* codes [blocks,M,128], [blocks,N,128] */
    const float *scale; /* [blocks,M/128], or [blocks,N/128] */
    bool scale_is_of_b;
    FusedMoeWeight dw[2];   /* (E,M[i],N), stride_in 1; part 1 follows part 0 along M, or is absent */
    FusedMoeDtype dw_dtype; /* dtype, or f32 */
    bool accumulate;        /* dw += the result; only for f32 dw */
    const int32_t *offs;    /* [E] */
    const int32_t *schedule;
    FusedMoeWorkspace workspace;
    int64_t R, M[2], N; /* multiples of 128 */
    int32_t E;
    FusedMoeDtype dtype; /* f32 or bf16 */
} FusedMoeEightBitWgrad;

/* --- the CPU tier (cpu/): C11 on PyTorch's thread pool -------------------------------------------------- */

/* Advises the system that a fresh tensor of this many bytes is about to be written. */
void fused_moe_cpu_prepare(void *data, int64_t bytes);
const char *fused_moe_cpu_bf16(void); /* what runs bfloat16 GEMMs: AMX, AVX512_BF16 or float32 */

int fused_moe_cpu_router_logits(const FusedMoeRouterLogits *p);
int fused_moe_cpu_router_dgrad(const FusedMoeRouterDgrad *p);
int fused_moe_cpu_route(const FusedMoeRoute *p);
int fused_moe_cpu_route_backward(const FusedMoeRouteBackward *p);
int fused_moe_cpu_route_plan(const FusedMoeBoundedPlan *p);
int fused_moe_cpu_count_plan(const FusedMoeCountPlan *p);
int fused_moe_cpu_pad(const FusedMoePad *p);
int fused_moe_cpu_permute(const FusedMoePermute *p);
int fused_moe_cpu_unpermute(const FusedMoeUnpermute *p);
int fused_moe_cpu_sum_peers(const FusedMoeSumPeers *p);
int fused_moe_cpu_unpermute_backward(const FusedMoeUnpermuteBackward *p);
int fused_moe_cpu_shared_backward(const FusedMoeSharedBackward *p);
int fused_moe_cpu_grouped_mm(const FusedMoeGroupedMM *p);
int fused_moe_cpu_wgrad(const FusedMoeWgrad *p);
int fused_moe_cpu_bias_grad(const FusedMoeBiasGrad *p);
int fused_moe_cpu_activate(const FusedMoeActivate *p);
int fused_moe_cpu_activate_backward(const FusedMoeActivateBackward *p);
int fused_moe_cpu_up_gate(const FusedMoeUpGate *p);
int fused_moe_cpu_down_dgrad(const FusedMoeDownDgrad *p);
int fused_moe_cpu_quantize_rows(const FusedMoeQuantizeRows *p);
int fused_moe_cpu_eight_bit_up_gate(const FusedMoeEightBitUpGate *p);
int fused_moe_cpu_eight_bit_mm(const FusedMoeEightBitMM *p);
int fused_moe_cpu_quantize_weight(const FusedMoeQuantizeWeight *p);
int fused_moe_cpu_transpose_codes(const FusedMoeTransposeCodes *p);
int fused_moe_cpu_quantize_dh(const FusedMoeQuantizeDh *p);
int fused_moe_cpu_eight_bit_wgrad(const FusedMoeEightBitWgrad *p);

/* --- the CUDA tiers (kernels/): launched on `stream`, a cudaStream_t of the current device -------------- */

typedef enum { /* best first */
               FUSED_MOE_TIER_SM90,
               FUSED_MOE_TIER_SM80,
               FUSED_MOE_NUM_TIERS
} FusedMoeTier;

typedef struct {
    const char *name;       /* in FUSED_MOE_TIER and info()                       */
    int32_t oldest, newest; /* compute capabilities that it runs on, 90 for sm_90 */
    bool uses_counters;     /* calls need workspace.counters                      */
    bool plans_in_gemm;     /* up_gate and grouped_mm can make the plan of few slots */
} FusedMoeTierFacts;

/* The oldest and the newest compute capability that a build has a tier's code for. setup.py gives those of
 * FUSED_MOE_ARCHS, and 0, -1 for a tier that is left out. */
#ifndef FUSED_MOE_SM90_OLDEST
#define FUSED_MOE_SM90_OLDEST 90
#define FUSED_MOE_SM90_NEWEST 90
#define FUSED_MOE_SM80_OLDEST 80
#define FUSED_MOE_SM80_NEWEST INT32_MAX
#endif

static inline FusedMoeTierFacts fused_moe_tier(int tier) {
    static const FusedMoeTierFacts tiers[FUSED_MOE_NUM_TIERS] = {
        {"hopper", FUSED_MOE_SM90_OLDEST, FUSED_MOE_SM90_NEWEST, true, true},
        {"portable", FUSED_MOE_SM80_OLDEST, FUSED_MOE_SM80_NEWEST, false, false},
    };
    return tiers[tier];
}

static inline bool fused_moe_tier_runs_on(int tier, int32_t capability) {
    FusedMoeTierFacts facts = fused_moe_tier(tier);
    return facts.oldest <= capability && capability <= facts.newest;
}

typedef struct {
    int32_t driver_version, runtime_version; /* 13000 is CUDA 13.0; driver 0: there is none */
    int32_t capability;                      /* 90 is sm_90; 0: no such device */
} FusedMoeCudaDevice;

/* Describes a device. Returns FUSED_MOE_OK if a CUDA tier runs on it. */
int fused_moe_cuda_device(int device, FusedMoeCudaDevice *description);

/* For tests: the next call reads devices and the environment again, which are else read once per process. */
void fused_moe_cuda_reset(void);

/* Why a tier is not dispatched to. */
typedef enum {
    FUSED_MOE_RUNS = 0,
    FUSED_MOE_OTHER_GPU,
    FUSED_MOE_OTHER_TIER_ASKED, /* by FUSED_MOE_TIER */
    FUSED_MOE_OTHER_DTYPE,
    FUSED_MOE_MIXED_DTYPES, /* an fp16 input and a float32 weight */
    FUSED_MOE_NO_ROWS,
    FUSED_MOE_SCORED_INPUT,
    FUSED_MOE_MANY_ROWS, /* for a kernel that reads quantised weights, or runs both sides */
    FUSED_MOE_WIDTH,     /* one is not a multiple of 8 */
    FUSED_MOE_UNALIGNED, /* rows or a bias that are not 16-byte aligned */
    FUSED_MOE_STRIDES,   /* of a weight */
    FUSED_MOE_TOO_LARGE, /* for the kernel's 32-bit arithmetic */
    FUSED_MOE_NUM_REASONS
} FusedMoeReason;

/* The operators that several tiers have. */
typedef enum {
    FUSED_MOE_OP_GROUPED_MM,
    FUSED_MOE_OP_UP_GATE,
    FUSED_MOE_OP_DOWN_DGRAD,
    FUSED_MOE_OP_WGRAD,
    FUSED_MOE_OP_ROUTER_LOGITS,
    FUSED_MOE_OP_ROUTER_DGRAD,
    FUSED_MOE_NUM_TIERED_OPS
} FusedMoeTieredOp;

typedef struct { /* calls of one operator in this process */
    int64_t of_tier[FUSED_MOE_NUM_TIERS];
    int32_t reason; /* FusedMoeReason why the last call was not dispatched to the best tier */
} FusedMoeCalls;

void fused_moe_cuda_calls(FusedMoeTieredOp op, FusedMoeCalls *calls);

/* A reason in words. */
const char *fused_moe_cuda_reason(int reason);

/* The CUDA runtime's message for the calling thread's last FUSED_MOE_CUDA_ERROR. */
const char *fused_moe_cuda_error(void);

/* The zeroed counters of a stream of the current device. They are NULL if the caller has to zero some for
 * this call: while the stream is captured, since a graph may be replayed beside other work, or if streams
 * outnumber counters. */
int fused_moe_cuda_counters(void *stream, uint32_t **counters);
int fused_moe_cuda_zero(void *data, int64_t bytes, void *stream);

size_t fused_moe_cuda_route_plan_workspace(const FusedMoeRoutePlan *p);

/* Who makes the plan of p on the current device. route: the choice of its ids, which has not run; NULL: the
 * ids are there. up, down: the GEMMs that read the plan; NULL: others may. */
FusedMoePlanner fused_moe_cuda_planner(const FusedMoeRoutePlan *p, const FusedMoeRoute *route,
                                       const FusedMoeUpGate *up, const FusedMoeGroupedMM *down);

/* Selects the tier that runs the call on the current device, and sets workspace.tier, bytes and dequantizes.
 * It is called once per call: the operator below runs on that tier. */
void fused_moe_cuda_select_router_logits(FusedMoeRouterLogits *p);
void fused_moe_cuda_select_router_dgrad(FusedMoeRouterDgrad *p);
void fused_moe_cuda_select_grouped_mm(FusedMoeGroupedMM *p);
void fused_moe_cuda_select_wgrad(FusedMoeWgrad *p);
void fused_moe_cuda_select_up_gate(FusedMoeUpGate *p);
void fused_moe_cuda_select_down_dgrad(FusedMoeDownDgrad *p);
void fused_moe_cuda_select_eight_bit_up_gate(FusedMoeEightBitUpGate *p);
void fused_moe_cuda_select_eight_bit_mm(FusedMoeEightBitMM *p);

/* Whether one launch runs both sides on the current device. If so, it sets workspace and tile_rows. The plan
 * may be made later. */
bool fused_moe_cuda_select_experts(FusedMoeExperts *p);

int fused_moe_cuda_router_logits(const FusedMoeRouterLogits *p, void *stream);
int fused_moe_cuda_router_dgrad(const FusedMoeRouterDgrad *p, void *stream);
int fused_moe_cuda_route(const FusedMoeRoute *p, void *stream);
int fused_moe_cuda_route_backward(const FusedMoeRouteBackward *p, void *stream);
int fused_moe_cuda_route_plan(const FusedMoeBoundedPlan *p, void *stream);
int fused_moe_cuda_cluster_plan(const FusedMoeRoutePlan *p, const FusedMoeRoute *route, void *stream);
int fused_moe_cuda_count_plan(const FusedMoeCountPlan *p, void *stream);
int fused_moe_cuda_pad(const FusedMoePad *p, void *stream);
int fused_moe_cuda_permute(const FusedMoePermute *p, void *stream);
int fused_moe_cuda_unpermute(const FusedMoeUnpermute *p, void *stream);
int fused_moe_cuda_sum_peers(const FusedMoeSumPeers *p, void *stream);
int fused_moe_cuda_unpermute_backward(const FusedMoeUnpermuteBackward *p, void *stream);
int fused_moe_cuda_shared_backward(const FusedMoeSharedBackward *p, void *stream);
int fused_moe_cuda_grouped_mm(const FusedMoeGroupedMM *p, void *stream);
int fused_moe_cuda_wgrad(const FusedMoeWgrad *p, void *stream);
int fused_moe_cuda_bias_grad(const FusedMoeBiasGrad *p, void *stream);
int fused_moe_cuda_activate(const FusedMoeActivate *p, void *stream);
int fused_moe_cuda_activate_backward(const FusedMoeActivateBackward *p, void *stream);
int fused_moe_cuda_up_gate(const FusedMoeUpGate *p, void *stream);
int fused_moe_cuda_experts(const FusedMoeExperts *p, void *stream);
int fused_moe_cuda_down_dgrad(const FusedMoeDownDgrad *p, void *stream);
int fused_moe_cuda_quantize_rows(const FusedMoeQuantizeRows *p, void *stream);
int fused_moe_cuda_eight_bit_up_gate(const FusedMoeEightBitUpGate *p, void *stream);
int fused_moe_cuda_eight_bit_mm(const FusedMoeEightBitMM *p, void *stream);

/* FP8 training runs on the sm90 tier alone. fused_moe_cuda_trains_fp8 says whether the current device, with
 * FUSED_MOE_TIER as it is, has it; the others return FUSED_MOE_UNSUPPORTED_EIGHT_BIT if not. */
bool fused_moe_cuda_trains_fp8(void);
int fused_moe_cuda_quantize_weight(const FusedMoeQuantizeWeight *p, void *stream);
int fused_moe_cuda_transpose_codes(const FusedMoeTransposeCodes *p, void *stream);
int fused_moe_cuda_quantize_dh(const FusedMoeQuantizeDh *p, void *stream);
void fused_moe_cuda_select_eight_bit_wgrad(FusedMoeEightBitWgrad *p); /* sets workspace.bytes */
int fused_moe_cuda_eight_bit_wgrad(const FusedMoeEightBitWgrad *p, void *stream);

#ifdef __cplusplus
}
#endif

#endif
