/* The operators, one function per schema of library.cpp. */
#ifndef FUSED_MOE_TORCH_OPERATORS_H
#define FUSED_MOE_TORCH_OPERATORS_H

#include <string>
#include <tuple>

#include "bindings.h"

/* --- facts.cpp ------------------------------------------------------------------------------------------ */

std::string facts();
/* The number of calls of an operator that each tier ran, best first, then the reason why the last call was
 * not dispatched to the best. */
Tensor cuda_calls(int64_t op);
/* Whether a CUDA tier runs on a device (status 0: it does), and the versions that decide that. */
std::tuple<int64_t, int64_t, int64_t, int64_t> cuda_device(int64_t index);
void cuda_reset();

/* --- workspace.cpp -------------------------------------------------------------------------------------- */

/* The result of cuda_device as the end of an error message; empty for status 0. */
std::string cuda_problem(int64_t status, int64_t driver, int64_t runtime, int64_t capability);

/* --- route.cpp, plan.cpp -------------------------------------------------------------------------------- */

Tensor router_logits(const Tensor &x, const Tensor &weight, const OptTensor &bias);
Tensor router_dgrad(const Tensor &dlogits, const Tensor &weight);
std::tuple<Tensor, Tensor> route(const Tensor &logits, const OptTensor &bias, int64_t top_k,
                                 int64_t score_func, bool route_norm, double route_scale,
                                 double route_norm_eps, int64_t num_groups, int64_t num_limited_groups,
                                 int64_t group_score, const OptTensor &given_ids, const OptTensor &num_tokens,
                                 const OptTensor &expert_scale);
Tensor route_backward(const Tensor &dscores, const Tensor &logits, const Tensor &ids, int64_t score_func,
                      bool route_norm, double route_scale, double route_norm_eps,
                      const OptTensor &expert_scale);
PlanResult route_plan(const Tensor &ids, int64_t num_experts, const OptTensor &expert_map,
                      const std::optional<int64_t> &max_rows);
PlanResult route_plan_dropped(const Tensor &ids, int64_t num_experts, const OptTensor &expert_map,
                              int64_t max_rows, const Tensor &dropped_rows);
/* For tests alone: the plan that experts makes itself, of ids or with the router. */
std::tuple<Tensor, Tensor, Tensor, Tensor>
private_plan(const OptTensor &logits, const OptTensor &ids, int64_t num_experts, const OptTensor &expert_map,
             const OptTensor &bias, int64_t top_k, int64_t score_func, bool route_norm, double route_scale,
             double route_norm_eps, int64_t num_groups, int64_t num_limited_groups, int64_t group_score,
             const OptTensor &num_tokens, const OptTensor &expert_scale);
std::tuple<Tensor, Tensor, Tensor> count_plan(const Tensor &counts, int64_t num_rows, const OptTensor &rows);

/* --- pad.cpp -------------------------------------------------------------------------------------------- */

Tensor pad(const Tensor &x, int64_t a, int64_t b, int64_t c);

/* --- rows.cpp ------------------------------------------------------------------------------------------- */

Tensor permute(const Tensor &x, const TensorList &plan);
Tensor unpermute(const Tensor &rows, const OptTensor &scores, const TensorList &plan, const OptTensor &shared,
                 const OptTensor &shared_gate);
std::tuple<Tensor, Tensor> unpermute_backward(const Tensor &dout, const OptTensor &rows,
                                              const OptTensor &scores, const TensorList &plan,
                                              bool need_drows, bool need_dscores);
std::tuple<Tensor, Tensor> shared_backward(const Tensor &dout, const OptTensor &shared,
                                           const Tensor &shared_gate, bool need_dshared,
                                           bool need_dshared_gate);

/* --- peers.cpp ------------------------------------------------------------------------------------------ */

Tensor sum_peers(const TensorList &rows, const Tensor &index, const OptTensor &scores);

/* --- gemm.cpp ------------------------------------------------------------------------------------------- */

Tensor grouped_mm(const Tensor &a, const Tensor &b, const Tensor &offsets, const OptTensor &bias);
Tensor wgrad(const Tensor &a, const Tensor &b, const Tensor &offsets, const OptTensor &a_row_token,
             const OptTensor &b_row_token);
void wgrad_accumulate(const Tensor &a, const Tensor &b, const Tensor &offsets, const Tensor &dw,
                      const OptTensor &a_row_token, const OptTensor &b_row_token);
Tensor bias_grad(const Tensor &rows, const Tensor &offsets);

/* --- quantized.cpp -------------------------------------------------------------------------------------- */

Tensor quantized_mm(const Tensor &a, const Tensor &data, const Tensor &scale, const OptTensor &zero,
                    const Tensor &offsets, int64_t format, bool transposed, const OptTensor &data_t,
                    const OptTensor &scale_t, const OptTensor &zero_t, const OptTensor &bias);

/* --- activate.cpp --------------------------------------------------------------------------------------- */

Tensor activate(const Tensor &h, const OptTensor &up, int64_t layout, int64_t activation,
                const Constants &constants);
std::tuple<Tensor, Tensor> activate_backward(const Tensor &da, const Tensor &h, const OptTensor &up,
                                             int64_t layout, int64_t activation, const Constants &constants);

/* --- sides.cpp, experts_backward.cpp -------------------------------------------------------------------- */

using UpGrads = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using DownGrads = std::tuple<Tensor, Tensor, Tensor, Tensor>;

std::tuple<Tensor, Tensor> up_gate(const Tensor &x, const Tensor &w1, const OptTensor &w3,
                                   const OptTensor &b1, const OptTensor &b3, const TensorList &plan,
                                   int64_t layout, int64_t activation, const Constants &constants);
Tensor up_dgrad(const Tensor &dh, const Tensor &w1, const OptTensor &w3, const TensorList &plan,
                int64_t layout);
std::tuple<Tensor, Tensor> experts_up(const Tensor &x, const Tensor &w1, const OptTensor &w3,
                                      const OptTensor &b1, const OptTensor &b3, const OptTensor &scores,
                                      const TensorList &plan, int64_t layout, int64_t activation,
                                      const Constants &constants, bool save_h, const OptTensor &main_grad1,
                                      const OptTensor &main_grad3);
std::tuple<Tensor, Tensor> quantized_up(const Tensor &x, const TensorList &w1, int64_t format1,
                                        const TensorList &w3, int64_t format3, const OptTensor &b1,
                                        const OptTensor &b3, const OptTensor &scores, const OptTensor &addend,
                                        const TensorList &plan, int64_t layout, int64_t activation,
                                        const Constants &constants, bool save_h);
UpGrads experts_up_backward(const Tensor &dh, const Tensor &x, const Tensor &w1, const OptTensor &w3,
                            const OptTensor &scores, const TensorList &plan, int64_t layout, bool need_dx,
                            bool need_dw1, bool need_dw3, bool need_db1, bool need_db3, bool need_dscores,
                            const OptTensor &dlogits, const OptTensor &gate);
UpGrads experts_up_backward_accumulate(const Tensor &dh, const Tensor &x, const Tensor &w1,
                                       const OptTensor &w3, const OptTensor &scores, const TensorList &plan,
                                       int64_t layout, bool need_dx, bool need_dw1, bool need_dw3,
                                       bool need_db1, bool need_db3, bool need_dscores,
                                       const OptTensor &main_grad1, const OptTensor &main_grad3,
                                       const OptTensor &dlogits, const OptTensor &gate);

std::tuple<Tensor, Tensor, Tensor> down_dgrad(const Tensor &dout, const Tensor &w2, const OptTensor &b2,
                                              const Tensor &h, const OptTensor &scores,
                                              const TensorList &plan, int64_t layout, int64_t activation,
                                              const Constants &constants);
Tensor experts_down(const Tensor &a, const OptTensor &h, const Tensor &w2, const OptTensor &b2,
                    const OptTensor &scores, const TensorList &plan, int64_t layout, int64_t activation,
                    const Constants &constants, const OptTensor &main_grad2, const OptTensor &shared,
                    const OptTensor &shared_gate);
DownGrads experts_down_backward(const Tensor &dout, const Tensor &h, const Tensor &w2, const OptTensor &b2,
                                const OptTensor &scores, const TensorList &plan, int64_t layout,
                                int64_t activation, const Constants &constants, bool need_dh, bool need_dw2,
                                bool need_db2, bool need_dscores);
DownGrads experts_down_backward_accumulate(const Tensor &dout, const Tensor &h, const Tensor &w2,
                                           const OptTensor &b2, const OptTensor &scores,
                                           const TensorList &plan, int64_t layout, int64_t activation,
                                           const Constants &constants, bool need_dh, bool need_dw2,
                                           bool need_db2, bool need_dscores, const OptTensor &main_grad2);

/* dx, dlogits, dlogits in the dtype of a 16-bit x, and those of dw1, dw3, dw2, db1, db3, db2 and dscores that
 * are needed. */
TensorList experts_backward(const Tensor &dout, const Tensor &x, const Tensor &w1, const OptTensor &w3,
                            const Tensor &w2, const Tensor &gate, const Tensor &h, const Tensor &scores,
                            const Tensor &logits, const TensorList &plan, int64_t layout, int64_t activation,
                            const Constants &constants, const Ints &routing, const Ints &needs,
                            const OptTensor &b2, const OptTensor &expert_scale);

/* --- experts.cpp ---------------------------------------------------------------------------------------- */

/* The arguments of experts and experts_out behind x: EXPERTS of library.cpp, in its order, each as
 * X(type, name). */
#define EXPERTS_ARGUMENTS(X)                                                                                 \
    X(TensorList, w1)                                                                                        \
    X(TensorList, w3)                                                                                        \
    X(TensorList, w2)                                                                                        \
    X(OptTensor, scores)                                                                                     \
    X(OptTensor, ids)                                                                                        \
    X(int64_t, layout)                                                                                       \
    X(int64_t, activation)                                                                                   \
    X(Constants, constants)                                                                                  \
    X(OptTensor, gate)                                                                                       \
    X(OptTensor, gate_bias)                                                                                  \
    X(OptTensor, expert_bias)                                                                                \
    X(OptTensor, expert_scale)                                                                               \
    X(OptTensor, num_tokens)                                                                                 \
    X(std::optional<Ints>, routing)                                                                          \
    X(bool, keeps)                                                                                           \
    X(bool, score_on_input)                                                                                  \
    X(Ints, formats)                                                                                         \
    X(OptTensor, b1)                                                                                         \
    X(OptTensor, b3)                                                                                         \
    X(OptTensor, b2)                                                                                         \
    X(OptTensor, expert_map)                                                                                 \
    X(OptTensor, shared)                                                                                     \
    X(OptTensor, shared_gate)                                                                                \
    X(bool, eight_bits)                                                                                      \
    X(bool, power_of_two)

struct ExpertsArguments {
    const Tensor &x;
#define X(type, name) const type &name;
    EXPERTS_ARGUMENTS(X)
#undef X
};

/* out, counts, and of a router [ids, logits], with keeps [ids, logits, scores, h, plan]. */
using ExpertsResult = std::tuple<Tensor, Tensor, TensorList>;

#define PARAMETER(type, name) , const type &name
ExpertsResult experts(const Tensor &x EXPERTS_ARGUMENTS(PARAMETER));
/* counts, ids, logits; without a router the last two are empty. */
std::tuple<Tensor, Tensor, Tensor> experts_out(const Tensor &out,
                                               const Tensor &x EXPERTS_ARGUMENTS(PARAMETER));
#undef PARAMETER

/* --- fp8_training.cpp ----------------------------------------------------------------------------------- */

using Fp8DownGrads = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

std::tuple<Tensor, Tensor, Tensor, Tensor> fp8_weight(const Tensor &w, const OptTensor &w3, int64_t layout,
                                                      int64_t orders);
std::tuple<Tensor, Tensor> fp8_up_weights(const Tensor &x, const Tensor &w1, const OptTensor &w3,
                                          const TensorList &plan, int64_t layout, int64_t wgrad,
                                          const OptTensor &main_grad1, const OptTensor &main_grad3);
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> fp8_up(const Tensor &x, const Tensor &w1,
                                                                  const OptTensor &w3, const TensorList &plan,
                                                                  const TensorList &quantized, int64_t layout,
                                                                  int64_t activation,
                                                                  const Constants &constants, bool save_h);
Tensor fp8_down(const Tensor &link, const Tensor &link_scale, const Tensor &h, const Tensor &a_codes,
                const Tensor &a_scale, const Tensor &x_scale, const Tensor &w2, const OptTensor &link_t,
                const OptTensor &link_t_scale, const OptTensor &scores, const TensorList &plan,
                const TensorList &quantized, int64_t layout, int64_t activation, const Constants &constants,
                int64_t wgrad, const OptTensor &main_grad2, const OptTensor &shared,
                const OptTensor &shared_gate);
Tensor fp8_up_backward(const Tensor &dlink, const Tensor &dlink_scale, const Tensor &x,
                       const TensorList &plan, const TensorList &quantized);
std::tuple<Tensor, Tensor> fp8_up_weights_backward(const Tensor &dlink_t, const Tensor &dlink_t_scale,
                                                   const Tensor &x, const Tensor &w1, const OptTensor &w3,
                                                   const TensorList &plan, int64_t layout, int64_t wgrad,
                                                   bool need_dw1, bool need_dw3);
std::tuple<Tensor, Tensor>
fp8_up_weights_backward_accumulate(const Tensor &dlink_t, const Tensor &dlink_t_scale, const Tensor &x,
                                   const Tensor &w1, const OptTensor &w3, const TensorList &plan,
                                   int64_t layout, int64_t wgrad, bool need_dw1, bool need_dw3,
                                   const OptTensor &main_grad1, const OptTensor &main_grad3);
Fp8DownGrads fp8_down_backward(const Tensor &dout, const Tensor &h, const Tensor &x_scale, const Tensor &w2,
                               const OptTensor &scores, const TensorList &plan, const TensorList &quantized,
                               int64_t layout, int64_t activation, const Constants &constants, int64_t wgrad,
                               bool need_dlink, bool need_dlink_t, bool need_dw2, bool need_dscores);
Fp8DownGrads fp8_down_backward_accumulate(const Tensor &dout, const Tensor &h, const Tensor &x_scale,
                                          const Tensor &w2, const OptTensor &scores, const TensorList &plan,
                                          const TensorList &quantized, int64_t layout, int64_t activation,
                                          const Constants &constants, int64_t wgrad, bool need_dlink,
                                          bool need_dlink_t, bool need_dw2, bool need_dscores,
                                          const OptTensor &main_grad2);

#endif
