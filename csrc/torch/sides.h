/* What both sides of the experts are made of. A call runs them as one operator, or each side as its own. */
#ifndef FUSED_MOE_TORCH_SIDES_H
#define FUSED_MOE_TORCH_SIDES_H

#include "operators.h"

/* --- shapes --------------------------------------------------------------------------------------------- */

Width width_of(const char *op, const Tensor &w1, const OptTensor &w3, int64_t layout);

/* The weights of the up side; w3's data is NULL where there is none. */
struct UpWeights {
    FusedMoeWeight w1, w3;
};

UpWeights up_weights(const char *op, const Tensor &w1, const OptTensor &w3, const Tensor &like,
                     const Width &s);
FusedMoeWeight down_weight(const char *op, const Tensor &w2, const Tensor &like, int64_t F);

/* A quantised weight as one list: data, scale, zero where there are zero points, and the same of a second
 * packing where there is one. */
QuantizedTensors tensors_of(const char *op, const char *name, const TensorList &list, int64_t format);

/* Quantised weights, checked: what their up side's parameters point to. */
struct QuantizedUp {
    QuantizedWeight w1;
    std::optional<QuantizedWeight> w3;
    Width s;
    UpWeights weights;

    QuantizedUp(const char *op, const TensorList &w1, int64_t format1, const TensorList &w3, int64_t format3,
                const Tensor &x, int64_t layout);
    QuantizedUp(const QuantizedUp &) = delete; /* weights points into this one */
};

void check_scores(const char *op, const OptTensor &scores, const RowMap &map);

/* --- up side -------------------------------------------------------------------------------------------- */

/* A call of up_gate, and the tensors that it needs alive. */
struct UpSide {
    FusedMoeUpGate p;
    OptTensor b1, b3, scores, addend;
};

/* x is aligned(). a: (R, F), where it is written. h: (R, H), if it is kept. */
UpSide up_side(const char *op, const Tensor &x, const UpWeights &weights, const Width &s, const OptTensor &b1,
               const OptTensor &b3, const OptTensor &scores, const RowMap &map, int64_t layout,
               int64_t activation, const Constants &constants, void *a, const OptTensor &h = {},
               const OptTensor &addend = {});
void run_up_side(const Call &call, UpSide &side, const Tensor &x);

/* --- down side ------------------------------------------------------------------------------------------ */

/* Calls of the down GEMM and of unpermute, and the tensors that they need alive. */
struct DownSide {
    FusedMoeGroupedMM p;
    FusedMoeUnpermute combine; /* of a plan with row maps */
    OptTensor b2, scores;
    Shared shared;
};

/* a: (R, F), aligned, of like's dtype. w2: (E, D, F). y: (R, D), where it is written. out: (T, D), of a plan
 * with row maps; without them y is the result. */
DownSide down_side(const char *op, const Tensor &like, const void *a, int64_t F, const FusedMoeWeight &w2,
                   int64_t D, const OptTensor &b2, const OptTensor &scores, const RowMap &map,
                   const Shared &shared, void *y, const OptTensor &out);
void run_down_side(const Call &call, DownSide &side, const Tensor &like);

/* Where x's result (T, D) is written: the given tensor, checked, or a new one. */
Tensor out_of(const char *op, const OptTensor &given, const Tensor &x, int64_t D);

/* --- the experts without gradients ---------------------------------------------------------------------- */

/* The experts of each token: given, or chosen by a router whose GEMM and route have not run yet. */
struct ChosenExperts {
    Tensor scores, ids;
    std::optional<PreparedLogits> logits;
    std::optional<PreparedRoute> route;
};

/* eight_bit.cpp: out and counts of experts whose GEMMs multiply 8 bits by 8 bits. x is aligned(). */
std::tuple<Tensor, Tensor> run_eight_bits(const char *op, const ExpertsArguments &given, const Tensor &x,
                                          const ChosenExperts &chosen, const OptTensor &out);

#endif
