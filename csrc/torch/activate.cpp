/* The activation of experts that are composed of grouped GEMMs, and its gradients. With layout separate, h
 * has the gates (R, F) and up the ups (R, F). With the other layouts, h (R, H) has both, and there is no
 * up. */
#include "operators.h"

#include <cmath>

FusedMoeActivation activation_of(const char *op, int64_t kind, const Constants &constants) {
    check_size(op, "activation", kind, 0, FUSED_MOE_NUM_ACTIVATIONS - 1);
    if (constants.size() != 2)
        fail(op, "expected constants of [alpha, limit], found ", constants.size(), " of them");
    const double alpha = constants[0], limit = constants[1];
    if (kind == FUSED_MOE_ACT_situ)
        for (double constant : constants)
            if (!(constant > 0 && constant < INFINITY))
                fail(op, "expected finite constants > 0 with situ, found ", std::to_string(constant));
    if ((kind == FUSED_MOE_ACT_swiglu_clamped || kind == FUSED_MOE_ACT_swiglu_limited) && !(limit >= 0))
        fail(op, "expected a limit >= 0 with an activation that clamps, found ", std::to_string(limit));
    return {(int32_t)kind, alpha, limit, 1 / alpha, 1 / limit};
}

/* Whether a row of h has both gates and ups. */
static bool is_packed(const char *op, const OptTensor &up, int64_t layout) {
    check_size(op, "layout", layout, FUSED_MOE_SEPARATE, FUSED_MOE_UNGATED);
    check((layout == FUSED_MOE_SEPARATE) == up.has_value(), op, "up with layout separate and with no other",
          up ? "up with another" : "no up with layout separate");
    return layout == FUSED_MOE_HALVES || layout == FUSED_MOE_INTERLEAVED;
}

/* The members that both operators' structs have, from checked operands. */
template <typename Params>
static Params params_of(const char *op, const Tensor &h, const OptTensor &up, int64_t F, int64_t layout,
                        int64_t activation, const Constants &constants) {
    check_size(op, "F", F, 0, MAX_WIDTH);
    Params p = {};
    p.h = data(h);
    p.up = data(up);
    p.R = h.size(0);
    p.F = F;
    p.layout = (FusedMoeLayout)layout;
    p.activation = activation_of(op, activation, constants);
    p.dtype = float_dtype(op, h);
    return p;
}

Tensor activate(const Tensor &h_, const OptTensor &up_, int64_t layout, int64_t activation,
                const Constants &constants) {
    const char *op = "activate";
    const bool packed = is_packed(op, up_, layout);
    check_dim(op, "h", h_, 2);
    const int64_t R = h_.size(0), H = h_.size(1), F = packed ? H / 2 : H;
    if (packed && H % 2) fail(op, "expected h of an even width, found ", shape_text(h_));
    const Tensor h = aligned(h_);
    const OptTensor up = operand(op, "up", up_, h, {R, F});
    auto p = params_of<FusedMoeActivate>(op, h, up, F, layout, activation, constants);
    Call call = begin_call(op, h);
    Tensor a = new_tensor(h, {R, F});
    p.a = a.mutable_data_ptr();
    run(call, p, fused_moe_cpu_activate, CUDA(fused_moe_cuda_activate));
    return a;
}

std::tuple<Tensor, Tensor> activate_backward(const Tensor &da_, const Tensor &h_, const OptTensor &up_,
                                             int64_t layout, int64_t activation, const Constants &constants) {
    const char *op = "activate_backward";
    const bool packed = is_packed(op, up_, layout);
    check_dim(op, "da", da_, 2);
    const int64_t R = da_.size(0), F = da_.size(1), H = packed ? 2 * F : F;
    const Tensor da = aligned(da_), h = operand(op, "h", h_, da, {R, H});
    const OptTensor up = operand(op, "up", up_, da, {R, F});
    auto p = params_of<FusedMoeActivateBackward>(op, h, up, F, layout, activation, constants);
    Call call = begin_call(op, da);
    Tensor dh = new_tensor(da, {R, H}), dup = up ? new_tensor(da, {R, F}) : new_empty_result(da);
    p.da = data(da);
    p.dh = dh.mutable_data_ptr();
    p.dup = dup.mutable_data_ptr();
    run(call, p, fused_moe_cpu_activate_backward, CUDA(fused_moe_cuda_activate_backward));
    return {dh, dup};
}
