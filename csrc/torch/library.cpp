/* The list of operators: their schemas and functions.
 *
 * An argument that has a gradient, or is written, is a separate argument: autograd makes no node for a list
 * that holds None. The others are grouped:
 *   plan       [offsets, schedule], where row r is token r; or these, row_token, row_slot and token_row; or
 *              [packed, ids]: packed is those five one after the other, of ids (T, K)
 *   constants  [alpha, limit] of the activation
 *   quantized  [codes, scale, codes_t, scale_t] of FP8 training's weights; in backward [codes_t, scale_t] */
#include "operators.h"

/* --- schemas -------------------------------------------------------------------------------------------- */

/* A backward operator and its twin, which adds weight gradients to main_grads, differ only in these
 * arguments. */
#define EXPERTS_UP_BACKWARD(main_grads)                                                                      \
    "(Tensor dh, Tensor x, Tensor w1, Tensor? w3, Tensor? scores, Tensor[] plan, int layout, bool need_dx, " \
    "bool need_dw1, bool need_dw3, bool need_db1, bool need_db3, bool need_dscores" main_grads               \
    ", Tensor? dlogits=None, Tensor? gate=None) -> (Tensor dx, Tensor dw1, Tensor dw3, Tensor db1, "         \
    "Tensor db3, Tensor dscores)"
#define EXPERTS_DOWN_BACKWARD(main_grads)                                                                    \
    "(Tensor dout, Tensor h, Tensor w2, Tensor? b2, Tensor? scores, Tensor[] plan, int layout, int "         \
    "activation, "                                                                                           \
    "float[] constants, bool need_dh, bool need_dw2, bool need_db2, bool need_dscores" main_grads            \
    ") -> (Tensor dh, Tensor dw2, Tensor db2, Tensor dscores)"

#define FP8_UP_WEIGHTS_BACKWARD(main_grads)                                                                  \
    "(Tensor dlink_t, Tensor dlink_t_scale, Tensor x, Tensor w1, Tensor? w3, Tensor[] plan, int layout, "    \
    "int wgrad, bool need_dw1, bool need_dw3" main_grads ") -> (Tensor dw1, Tensor dw3)"
#define FP8_DOWN_BACKWARD(main_grads)                                                                        \
    "(Tensor dout, Tensor h, Tensor x_scale, Tensor w2, Tensor? scores, Tensor[] plan, Tensor[] quantized, " \
    "int layout, int activation, float[] constants, int wgrad, bool need_dlink, bool need_dlink_t, "         \
    "bool need_dw2, bool need_dscores" main_grads ") -> (Tensor dlink, Tensor dlink_scale, Tensor dlink_t, " \
    "Tensor dlink_t_scale, Tensor dw2, Tensor dscores)"

/* How experts are chosen and scored. */
#define ROUTING                                                                                              \
    "int top_k, int score_func, bool route_norm, float route_scale, float route_norm_eps, int num_groups, "  \
    "int num_limited_groups, int group_score"

#define PLAN                                                                                                 \
    "-> (Tensor counts, Tensor offsets, Tensor schedule, Tensor row_token, Tensor row_slot, "                \
    "Tensor token_row)"

/* The last arguments: rows that are added to the experts' sum. */
#define SHARED ", Tensor? shared=None, Tensor? shared_gate=None"

/* Both sides of the experts. A weight is [w]; with formats, which are those of w1, w3 and w2, it is
 * [data, scale], with zero behind them where it has zero points; [] stands for no w3. With eight_bits GEMMs
 * multiply 8 bits by 8 bits, of rows whose scales are powers of two if power_of_two is set; behind the scale
 * comes what the rows are divided by. Scores and ids are given; or the router's gate is, and then scores are
 * not, and ids are a choice made before, or None:
 *   routing    [top_k, score_func, route_norm, num_groups, num_limited_groups, group_score]
 *   constants  end in route_scale and route_norm_eps
 *   routed     is [ids, logits], and [] without a router: two empty tensors would take the host 1 µs.
 *              torch.compile takes no list of an operator that writes, so experts_out returns them
 *   keeps      the call is training's: routed is [ids, logits, scores, h, packed], which backward reads. Only
 *              experts with a router and float weights takes it
 * What most calls give comes first, since a None that is passed takes longer than a default. */
#define EXPERTS                                                                                              \
    "Tensor x, Tensor[] w1, Tensor[] w3, Tensor[] w2, Tensor? scores, Tensor? ids, int layout, "             \
    "int activation, float[] constants, Tensor? gate=None, Tensor? gate_bias=None, "                         \
    "Tensor? expert_bias=None, Tensor? expert_scale=None, Tensor? num_tokens=None, int[]? routing=None, "    \
    "bool keeps=False, bool score_on_input=False, int[] formats=[], Tensor? b1=None, "                       \
    "Tensor? b3=None, Tensor? b2=None, Tensor? expert_map=None" SHARED ", bool eight_bits=False, "           \
    "bool power_of_two=False"

#ifndef FUSED_MOE_NAMESPACE
#define FUSED_MOE_NAMESPACE fused_moe /* setup.py's FUSED_MOE_NAMESPACE: another copy in the same process */
#endif

STABLE_TORCH_LIBRARY(FUSED_MOE_NAMESPACE, m) {
    m.def("facts() -> str");
    m.def("cuda_device(int index) -> (int status, int driver, int runtime, int capability)");
    m.def("cuda_problem(int status, int driver, int runtime, int capability) -> str");
    m.def("cuda_calls(int op) -> Tensor");
    m.def("cuda_reset() -> ()");
    /* For tests alone, as the operators of planners.cpp are: */
    m.def("private_plan(Tensor? logits, Tensor? ids, int num_experts, Tensor? expert_map, Tensor? "
          "bias, " ROUTING ", Tensor? num_tokens, Tensor? expert_scale=None) -> (Tensor scores, Tensor ids, "
          "Tensor counts, Tensor plan)");

    m.def("router_logits(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
    m.def("router_dgrad(Tensor dlogits, Tensor weight) -> Tensor");
    m.def("route(Tensor logits, Tensor? bias, " ROUTING ", Tensor? given_ids=None, Tensor? num_tokens=None, "
          "Tensor? expert_scale=None) -> (Tensor scores, Tensor ids)");
    m.def("route_backward(Tensor dscores, Tensor logits, Tensor ids, int score_func, bool route_norm, "
          "float route_scale, float route_norm_eps, Tensor? expert_scale=None) -> Tensor");
    m.def("route_plan(Tensor ids, int num_experts, Tensor? expert_map=None, SymInt? max_rows=None) " PLAN);
    m.def("route_plan_dropped(Tensor ids, int num_experts, Tensor? expert_map, SymInt max_rows, "
          "Tensor(a!) dropped_rows) " PLAN);
    m.def("count_plan(Tensor counts, SymInt num_rows, Tensor? rows=None) -> (Tensor counts_out, "
          "Tensor offsets, Tensor schedule)");

    m.def("pad(Tensor x, SymInt a, SymInt b, SymInt c) -> Tensor");
    m.def("permute(Tensor x, Tensor[] plan) -> Tensor");
    m.def("unpermute(Tensor rows, Tensor? scores, Tensor[] plan" SHARED ") -> Tensor");
    m.def("sum_peers(Tensor[] rows, Tensor index, Tensor? scores=None) -> Tensor");
    m.def("unpermute_backward(Tensor dout, Tensor? rows, Tensor? scores, Tensor[] plan, bool need_drows, "
          "bool need_dscores) -> (Tensor drows, Tensor dscores)");
    m.def("shared_backward(Tensor dout, Tensor? shared, Tensor shared_gate, bool need_dshared, "
          "bool need_dshared_gate) -> (Tensor dshared, Tensor dshared_gate)");

    m.def("grouped_mm(Tensor a, Tensor b, Tensor offsets, Tensor? bias=None) -> Tensor");
    m.def("quantized_mm(Tensor a, Tensor data, Tensor scale, Tensor? zero, Tensor offsets, int format, "
          "bool transposed=False, Tensor? data_t=None, Tensor? scale_t=None, Tensor? zero_t=None, "
          "Tensor? bias=None) -> Tensor");
    m.def("wgrad(Tensor a, Tensor b, Tensor offsets, Tensor? a_row_token=None, Tensor? b_row_token=None) -> "
          "Tensor");
    m.def("wgrad_accumulate(Tensor a, Tensor b, Tensor offsets, Tensor(a!) dw, Tensor? a_row_token=None, "
          "Tensor? b_row_token=None) -> ()");
    m.def("bias_grad(Tensor rows, Tensor offsets) -> Tensor");

    m.def("activate(Tensor h, Tensor? up, int layout, int activation, float[] constants) -> Tensor");
    m.def("activate_backward(Tensor da, Tensor h, Tensor? up, int layout, int activation, "
          "float[] constants) -> (Tensor dh, Tensor dup)");

    /* Parts of experts_up, of its backward and of experts_down's, for tests and benchmarks alone: */
    m.def("up_gate(Tensor x, Tensor w1, Tensor? w3, Tensor? b1, Tensor? b3, Tensor[] plan, int layout, "
          "int activation, float[] constants) -> (Tensor h, Tensor a)");
    m.def("up_dgrad(Tensor dh, Tensor w1, Tensor? w3, Tensor[] plan, int layout) -> Tensor");
    m.def(
        "down_dgrad(Tensor dout, Tensor w2, Tensor? b2, Tensor h, Tensor? scores, Tensor[] plan, int layout, "
        "int activation, float[] constants) -> (Tensor dh, Tensor a_scaled, Tensor dscores)");
    m.def(
        "experts_up(Tensor x, Tensor w1, Tensor? w3, Tensor? b1, Tensor? b3, Tensor? scores, Tensor[] plan, "
        "int layout, int activation, float[] constants, bool save_h, Tensor? main_grad1=None, "
        "Tensor? main_grad3=None) -> (Tensor h, Tensor a)");
    m.def("quantized_up(Tensor x, Tensor[] w1, int format1, Tensor[] w3, int format3, Tensor? b1, "
          "Tensor? b3, Tensor? scores, Tensor? addend, Tensor[] plan, int layout, int activation, "
          "float[] constants, bool save_h) -> (Tensor h, Tensor a)");
    m.def(
        "experts_down(Tensor a, Tensor? h, Tensor w2, Tensor? b2, Tensor? scores, Tensor[] plan, int layout, "
        "int activation, float[] constants, Tensor? main_grad2=None" SHARED ") -> Tensor");
    m.def("experts(" EXPERTS ") -> (Tensor out, Tensor counts, Tensor[] routed)");
    m.def("experts_out(Tensor(a!) out, " EXPERTS ") -> (Tensor counts, Tensor ids, Tensor logits)");
    /* The backward of experts with keeps: constants and routing are the same lists, and needs tells which of
     * dw1, dw3, dw2, db1, db3, db2 and dscores are wanted. */
    m.def("experts_backward(Tensor dout, Tensor x, Tensor w1, Tensor? w3, Tensor w2, Tensor gate, Tensor h, "
          "Tensor scores, Tensor logits, Tensor[] plan, int layout, int activation, float[] constants, "
          "int[] routing, int[] needs, Tensor? b2=None, Tensor? expert_scale=None) -> Tensor[]");
    m.def("experts_up_backward" EXPERTS_UP_BACKWARD(""));
    m.def("experts_up_backward_accumulate" EXPERTS_UP_BACKWARD(
        ", Tensor(a!)? main_grad1, Tensor(b!)? main_grad3"));
    m.def("experts_down_backward" EXPERTS_DOWN_BACKWARD(""));
    m.def("experts_down_backward_accumulate" EXPERTS_DOWN_BACKWARD(", Tensor(a!)? main_grad2"));

    m.def("fp8_weight(Tensor w, Tensor? w3, int layout, int orders=3) -> (Tensor codes, Tensor scale, "
          "Tensor codes_t, Tensor scale_t)");
    m.def("fp8_up_weights(Tensor x, Tensor w1, Tensor? w3, Tensor[] plan, int layout, int wgrad, "
          "Tensor? main_grad1=None, Tensor? main_grad3=None) -> (Tensor link_t, Tensor link_t_scale)");
    m.def("fp8_up(Tensor x, Tensor w1, Tensor? w3, Tensor[] plan, Tensor[] quantized, int layout, "
          "int activation, float[] constants, bool save_h) -> (Tensor link, Tensor link_scale, Tensor h, "
          "Tensor a_codes, Tensor a_scale, Tensor x_scale)");
    m.def("fp8_down(Tensor link, Tensor link_scale, Tensor h, Tensor a_codes, Tensor a_scale, "
          "Tensor x_scale, Tensor w2, Tensor? link_t, Tensor? link_t_scale, Tensor? scores, Tensor[] plan, "
          "Tensor[] quantized, int layout, int activation, float[] constants, int wgrad, "
          "Tensor? main_grad2=None" SHARED ") -> Tensor");
    m.def("fp8_up_backward(Tensor dlink, Tensor dlink_scale, Tensor x, Tensor[] plan, Tensor[] quantized) "
          "-> Tensor");
    m.def("fp8_up_weights_backward" FP8_UP_WEIGHTS_BACKWARD(""));
    m.def("fp8_up_weights_backward_accumulate" FP8_UP_WEIGHTS_BACKWARD(
        ", Tensor(a!)? main_grad1, Tensor(b!)? main_grad3"));
    m.def("fp8_down_backward" FP8_DOWN_BACKWARD(""));
    m.def("fp8_down_backward_accumulate" FP8_DOWN_BACKWARD(", Tensor(a!)? main_grad2"));
}

/* --- functions ------------------------------------------------------------------------------------------ */

/* Both devices have the same functions: begin_call looks at the tensors. */
template <typename Library>
static void register_functions(Library &m) {
    REGISTER(m, router_logits);
    REGISTER(m, router_dgrad);
    REGISTER(m, route);
    REGISTER(m, route_backward);
    REGISTER(m, route_plan);
    REGISTER(m, route_plan_dropped);
    REGISTER(m, count_plan);
    REGISTER(m, pad);
    REGISTER(m, permute);
    REGISTER(m, unpermute);
    REGISTER(m, sum_peers);
    REGISTER(m, unpermute_backward);
    REGISTER(m, shared_backward);
    REGISTER(m, grouped_mm);
    REGISTER(m, quantized_mm);
    REGISTER(m, wgrad);
    REGISTER(m, wgrad_accumulate);
    REGISTER(m, bias_grad);
    REGISTER(m, activate);
    REGISTER(m, activate_backward);
    REGISTER(m, up_gate);
    REGISTER(m, up_dgrad);
    REGISTER(m, down_dgrad);
    REGISTER(m, experts_up);
    REGISTER(m, quantized_up);
    REGISTER(m, experts_backward);
    REGISTER(m, experts_up_backward);
    REGISTER(m, experts_up_backward_accumulate);
    REGISTER(m, experts_down);
    REGISTER(m, experts);
    REGISTER(m, experts_out);
    REGISTER(m, experts_down_backward);
    REGISTER(m, experts_down_backward_accumulate);
    REGISTER(m, fp8_weight);
    REGISTER(m, fp8_up_weights);
    REGISTER(m, fp8_up);
    REGISTER(m, fp8_up_backward);
    REGISTER(m, fp8_up_weights_backward);
    REGISTER(m, fp8_up_weights_backward_accumulate);
    REGISTER(m, fp8_down);
    REGISTER(m, fp8_down_backward);
    REGISTER(m, fp8_down_backward_accumulate);
}

STABLE_TORCH_LIBRARY_IMPL(FUSED_MOE_NAMESPACE, CPU, m) {
    register_functions(m);
}

#ifdef FUSED_MOE_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(FUSED_MOE_NAMESPACE, CUDA, m) {
    register_functions(m);
}
#endif

STABLE_TORCH_LIBRARY_IMPL(FUSED_MOE_NAMESPACE, CompositeExplicitAutograd, m) {
    m.impl("facts", TORCH_BOX(&facts));
    m.impl("cuda_device", TORCH_BOX(&cuda_device));
    m.impl("cuda_problem", TORCH_BOX(&cuda_problem));
    m.impl("cuda_calls", TORCH_BOX(&cuda_calls));
    m.impl("cuda_reset", TORCH_BOX(&cuda_reset));
    REGISTER(m, private_plan);
}
