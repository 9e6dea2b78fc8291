/* Declarations that the files of the bindings share. An operator checks its arguments, fills a struct of
 * fused_moe.h and runs it.
 *
 * Only the bindings include torch. They are written against PyTorch's stable ABI (target 2.10), so one
 * library runs with every PyTorch from 2.10 on. Shapes are those of fused_moe.h. */
#ifndef FUSED_MOE_TORCH_BINDINGS_H
#define FUSED_MOE_TORCH_BINDINGS_H

#include <initializer_list>
#include <optional>
#include <type_traits>
#include <vector>

#include "../activation.h"
#include "../fused_moe.h"
#include "../rules.h"
#include "checks.h"

using Constants = std::vector<double>; /* alpha, limit */
using Ints = std::vector<int64_t>;

/* A function of the CUDA tiers; NULL in a CPU build. */
#ifdef FUSED_MOE_WITH_CUDA
#define CUDA(function) function
#else
#define CUDA(function) nullptr
#endif

/* --- running: workspace.cpp ----------------------------------------------------------------------------- */

/* One call of an operator, on x's device, which it makes current, and on that device's current stream. It
 * begins after all arguments are checked, so that no launch precedes an error about an argument. */
struct Call {
    const char *op;
    bool is_cuda;
    int32_t device;
    void *stream;
    std::optional<torch::stable::accelerator::DeviceGuard> guard;
};

Call begin_call(const char *op, const Tensor &x);
void check_status(const Call &call, int status);
/* Throws where no tier has the kernels of FP8 training. */
void check_trains_fp8(const Call &call);

template <typename Params>
using CpuFunction = int (*)(const Params *);
template <typename Params>
using CudaFunction = int (*)(const Params *, void *stream);
template <typename Params>
using SelectFunction = void (*)(Params *);

template <typename Params>
void run(const Call &call, const Params &p, std::type_identity_t<CpuFunction<Params>> cpu,
         std::type_identity_t<CudaFunction<Params>> cuda) {
    check_status(call, call.is_cuda ? cuda(&p, call.stream) : cpu(&p));
}

/* FUSED_MOE_NUM_COUNTERS counters: the stream's, which are zeros, or new ones, which are to be zeroed. None
 * on the CPU. */
struct Counters {
    uint32_t *data;
    OptTensor to_zero;
};

Counters find_counters(const Call &call, const Tensor &x);

/* A workspace's memory. It has to live until the call is launched. */
struct WorkspaceTensors {
    OptTensor data, counters;
};

/* Allocates the memory that the selected tier needs, and zeroed counters unless the workspace has some. */
void provide_workspace(const Call &call, const Tensor &x, FusedMoeWorkspace *workspace,
                       WorkspaceTensors *tensors);

/* Runs an operator that several tiers have. */
template <typename Params>
void run_tiered(const Call &call, Params &p, const Tensor &x, std::type_identity_t<CpuFunction<Params>> cpu,
                std::type_identity_t<SelectFunction<Params>> select,
                std::type_identity_t<CudaFunction<Params>> cuda) {
    WorkspaceTensors tensors;
    if (call.is_cuda) {
        select(&p);
        provide_workspace(call, x, &p.workspace, &tensors);
    }
    run(call, p, cpu, cuda);
}

/* --- registering ---------------------------------------------------------------------------------------- */

/* Throws unless the argument's storage holds all elements that its offset, sizes and strides reach. A storage
 * that was freed or shrunk, as FSDP does, would be read or written past its end. */
void check_storage(const char *op, int argument, const Tensor &x);
void check_storage(const char *op, int argument, const OptTensor &x);
void check_storage(const char *op, int argument, const TensorList &list);
template <typename T>
void check_storage(const char *, int, const T &) {}

/* An operator's function, after the check of all its tensors. */
template <const char *name, auto function>
struct Checked;
template <const char *name, typename Result, typename... Args, Result (*function)(Args...)>
struct Checked<name, function> {
    static Result call(Args... args) {
        int argument = 0;
        (check_storage(name, argument++, args), ...);
        return function(args...);
    }
};

#define REGISTER(library, function)                                                                          \
    do {                                                                                                     \
        static constexpr char name[] = #function;                                                            \
        library.impl(name, TORCH_BOX((&Checked<name, &function>::call)));                                    \
    } while (0)

/* --- tensors: tensors.cpp ------------------------------------------------------------------------------- */

/* A new tensor on like's device, in like's dtype unless another one is given. */
Tensor new_tensor(const Tensor &like, std::initializer_list<int64_t> shape,
                  std::optional<ScalarType> dtype = {});
/* A new tensor in w's strides: the gradient of a weight has the weight's layout. */
Tensor new_grad(const Tensor &w);
/* A matrix of zeros in one element's memory: what a result is in forward whose gradient alone has values. */
Tensor new_zeros(const Call &call, const Tensor &like, std::initializer_list<int64_t> shape,
                 ScalarType dtype);
/* A tensor to return for a result that is not needed. */
Tensor new_empty_result(const Tensor &like, std::optional<ScalarType> dtype = {});

ScalarType score_dtype(const Tensor &x); /* of the scores of x's tokens */
FusedMoeDtype dtype_of(const char *op, const char *name, const Tensor &x, bool floating);
FusedMoeDtype float_dtype(const char *op, const Tensor &x); /* x is the operator's first tensor */

const void *data(const Tensor &x);
const void *data(const OptTensor &x);
const int32_t *ints(const Tensor &x);
int32_t *mutable_ints(const Tensor &x);

Tensor dense(const Tensor &x);
/* x, dense, and on a GPU at an address that every tier takes. So the tier, and with it the bits of a result,
 * do not depend on where in its storage a view begins. */
Tensor aligned(const Tensor &x);
bool is_16_bit(const Tensor &x);
/* x as a dense, aligned matrix or vector of like's dtype on like's device. */
Tensor operand(const char *op, const char *name, const Tensor &x, const Tensor &like,
               std::initializer_list<int64_t> shape);
OptTensor operand(const char *op, const char *name, const OptTensor &x, const Tensor &like,
                  std::initializer_list<int64_t> shape);
OptTensor scores_of(const char *op, const OptTensor &scores, const Tensor &x,
                    std::initializer_list<int64_t> shape);

/* The shared experts' part of a combine: their output (T, D), and their gate's logits, (T,) or (T, 1). Either
 * may be absent. */
struct Shared {
    OptTensor rows, gate;
};
/* The same, checked and dense. `like` has the dtype and device of the rows that are combined. */
Shared shared_of(const char *op, const Shared &given, const Tensor &like, int64_t T, int64_t D);
Tensor shared_gate_of(const char *op, const Tensor &gate, const Tensor &like, int64_t T);

/* A weight (E, out, in), in any strides. */
FusedMoeWeight weight(const Tensor &w);
FusedMoeWeight weight(const char *op, const char *name, const Tensor &w, const Tensor &like,
                      std::initializer_list<int64_t> shape);
FusedMoeWeight transposed(FusedMoeWeight w);
/* The float32 gradient of a weight, in any strides. A GEMM of operands like `like` adds to it. */
FusedMoeWeight main_grad(const char *op, const char *name, const Tensor &grad, const Tensor &like,
                         std::initializer_list<int64_t> shape);

/* A quantised weight (E, out, in) as an operator gets it, and checked: the struct that points into its
 * tensors. */
struct QuantizedTensors {
    Tensor data, scale;
    OptTensor zero;
    int64_t format;
    OptTensor data_t = {}, scale_t = {}, zero_t = {}; /* the second packing */
};

struct QuantizedWeight {
    FusedMoeQuantizedWeight p;
    Tensor data, scale;
    OptTensor zero, data_t, scale_t, zero_t;
};

/* quantized.cpp. Transposed: it is read as (E, in, out). */
QuantizedWeight quantized_weight(const char *op, const QuantizedTensors &given, const Tensor &like,
                                 bool is_transposed = false);
/* Points into w. */
FusedMoeWeight weight(const QuantizedWeight &w);

/* A dense int32 tensor on x's device. */
Tensor index_tensor(const char *op, const char *name, const Tensor &map, const Tensor &x, int64_t dim);
/* Cumulative ends (E,), as torch._grouped_mm takes them. */
Tensor offs_of(const char *op, const Tensor &offsets, const Tensor &x);

/* A checked plan: the struct that points into its tensors, and copies of those that are not dense. */
struct RowMap {
    FusedMoeRowMap p;
    bool has_maps; /* p's pointers do not tell: those of empty tensors are NULL */
    std::vector<Tensor> copies;
};

/* Whether x has a row for each token, or for each row. */
enum class RowsOf { TOKENS, ROWS };

/* Checks a plan, a list as library.cpp has it. E: its number of experts, or 0 for any; of a packed plan it is
 * given. */
RowMap row_map_of(const char *op, const Tensor &x, RowsOf rows_of, int64_t E, const TensorList &plan);
/* The same for a plan that must have all five tensors. */
RowMap full_row_map_of(const char *op, const Tensor &x, RowsOf rows_of, const TensorList &plan);

/* --- padded copies: pad.cpp ----------------------------------------------------------------------------- */

/* 16-bit elements in 16 bytes, and in a line of L2. fused_moe/widths.py has the reasons and the same numbers;
 * a test compares them. */
inline constexpr int64_t PAD_CHUNK = 8, PAD_LINE = 64;
/* The zeros to put behind a width in a GPU's GEMM of x's dtype, 16 bits, so that TMA reads its operands. */
int64_t zeros_behind(const Tensor &x, int64_t width);
/* x (rows, columns), dense, or a copy with zeros below and to the right. */
Tensor with_zeros(const Call &call, const Tensor &x, int64_t below, int64_t right);
/* Copies x (rows, columns) into out. Both are dense; x is cut to out's sizes, or zeros are put behind it. */
void pad_into(const Call &call, const Tensor &x, const Tensor &out);

/* --- parts of operators --------------------------------------------------------------------------------- */

/* route.cpp */
/* A router's GEMM before it runs: operands are checked, memory is allocated. p points into the tensors. */
struct PreparedLogits {
    FusedMoeRouterLogits p;
    Tensor x, weight, logits;
    OptTensor bias;
};

PreparedLogits prepare_logits(const Tensor &x, const Tensor &weight, const OptTensor &bias);
void run_logits(const Call &call, const PreparedLogits &logits);

/* How experts are chosen and scored: ROUTING of library.cpp. */
struct Routing {
    int64_t top_k, score_func;
    bool route_norm;
    double route_scale, route_norm_eps;
    int64_t num_groups, num_limited_groups, group_score;
};

/* The same, its integers of one list. */
Routing routing_of(const char *op, const std::optional<Ints> &ints, double route_scale,
                   double route_norm_eps);

/* A choice of experts that has not run: operands are checked, memory is allocated. p points into the tensors
 * and num_tokens. */
struct PreparedRoute {
    FusedMoeRoute p;
    Tensor logits, scores, ids;
    OptTensor bias, given_ids, expert_scale;
};

PreparedRoute prepare_route(const Tensor &logits, const OptTensor &bias, const Routing &routing,
                            const OptTensor &given_ids, const OptTensor &num_tokens,
                            const OptTensor &expert_scale);
void run_route(const Call &call, const FusedMoeRoute &p);

/* The gradient of the router's logits before it runs. All operands are checked but dscores, which an earlier
 * kernel of the same call may write. */
struct PreparedRouteBackward {
    FusedMoeRouteBackward p;
    Tensor logits, ids;
    OptTensor expert_scale;
};

PreparedRouteBackward prepare_route_backward(const char *op, const Tensor &logits, const Tensor &ids,
                                             int64_t score_func, bool route_norm, double route_scale,
                                             double route_norm_eps, const OptTensor &expert_scale);
/* rounded: dlogits itself if that has rounded_dtype. */
struct RouteGrads {
    Tensor dlogits, rounded;
};

/* dscores: a dense (T, K), of the scores' dtype. */
RouteGrads run_route_backward(const Call &call, const PreparedRouteBackward &route, const Tensor &dscores,
                              ScalarType rounded_dtype);

/* dx = dlogits weight, or dx += dlogits weight; weight is a dense (E, D). */
void run_router_dgrad(const Call &call, const Tensor &dlogits, const Tensor &weight, const Tensor &dx,
                      bool accumulate);

/* plan.cpp */
/* counts, offsets, schedule, row_token, row_slot, token_row */
using PlanResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
/* The plan of a call that does not return it, not made yet: ids are checked, memory is allocated. p and rows
 * point into the tensors. Behind the plan is memory for two matrices of R rows, in one allocation with it. */
struct PrivatePlan {
    FusedMoeRoutePlan p;
    RowMap rows;
    void *matrix[2];
    Tensor ids, counts, memory;
    OptTensor expert_map;
};

/* Where a part of an allocation may begin, for every kernel. */
int64_t part_end(int64_t bytes);
/* Words of a packed plan, and the row map of one: offsets, schedule, row_token, row_slot and token_row. */
int64_t plan_words(int64_t E, int64_t R);
FusedMoeRowMap row_map_in(const int32_t *packed, int64_t T, int64_t K, int64_t E);

PrivatePlan prepare_plan(const char *op, const Tensor &ids, const Tensor &x, int64_t num_experts,
                         const OptTensor &expert_map, int64_t row_bytes0 = 0, int64_t row_bytes1 = 0);
/* Who makes the plan, decided once per call. up, down: the GEMMs that may make it. (Training does not ask:
 * a cluster has to wait for eight free SMs of one GPC, which work on other streams may hold.) */
FusedMoePlanner planner_of(const Call &call, const FusedMoeRoutePlan &p, const FusedMoeRoute *route,
                           const FusedMoeUpGate *up = nullptr, const FusedMoeGroupedMM *down = nullptr);
/* Runs the choice of the ids, if one is given, and makes the plan, unless the GEMMs do. */
void run_private_plan(const Call &call, PrivatePlan &plan, const FusedMoeRoute *route,
                      FusedMoePlanner planner);

/* activate.cpp */
FusedMoeActivation activation_of(const char *op, int64_t kind, const Constants &constants);

/* sides.cpp */
struct Width {
    int64_t E, D, F, H, w1_rows;
};

/* From w1 (E, rows, D), where rows is F or 2F. */
Width width_of(const char *op, int64_t E, int64_t rows, int64_t D, bool has_w3, int64_t layout);

/* rows.cpp */
FusedMoeUnpermute unpermute_of(const char *op, const Tensor &rows, const OptTensor &scores, const RowMap &map,
                               const Tensor &out, const Shared &shared = {});
FusedMoeUnpermute unpermute_of(const void *rows, FusedMoeDtype dtype, int64_t D, const OptTensor &scores,
                               const RowMap &map, const Tensor &out, const Shared &shared);
void run_unpermute(const Call &call, const FusedMoeUnpermute &p);
/* drows and dscores may be absent. Only dscores needs rows. */
void run_unpermute_backward(const Call &call, const Tensor &dout, const OptTensor &rows,
                            const OptTensor &scores, const RowMap &map, const OptTensor &drows,
                            const OptTensor &dscores);

/* eight_bit.cpp */
/* Rows of codes, and their scales. */
struct Codes {
    Tensor codes, scale;
};

/* x is of like's dtype. p has the map, D and what x is multiplied by. */
Codes quantize_rows(const Call &call, FusedMoeQuantizeRows &p, const Tensor &like, const void *x,
                    FusedMoeCode code);
/* The map of R rows that are grouped already. */
FusedMoeRowMap grouped(const FusedMoeRowMap &map);

/* gemm.cpp */
/* The experts' rows. schedule is NULL if offs comes from the caller, unchecked. */
struct Grouping {
    const int32_t *offs, *schedule;
    int64_t E;
};

Grouping grouping_of(const RowMap &map);
/* out = a b[0]^T + bias; with b[1] the sum of both GEMMs, each on its part of a's columns. */
FusedMoeGroupedMM grouped_mm_of(const void *a, FusedMoeDtype dtype, int64_t R, const FusedMoeWeight b[2],
                                const int64_t N[2], const OptTensor &bias, const Grouping &grouping,
                                void *out, int64_t M);
void run_grouped_mm(const Call &call, FusedMoeGroupedMM &p, const Tensor &like);
void run_grouped_mm(const Call &call, const Tensor &a, const FusedMoeWeight b[2], const int64_t N[2],
                    const OptTensor &bias, const Grouping &grouping, const Tensor &out);

/* The second operand of a weight gradient: read through row_token, and multiplied by its scores. */
struct GatheredRows {
    const Tensor *rows;
    const int32_t *row_token, *row_slot; /* NULL: row r is token r, slot r */
    const Tensor *scores;                /* NULL: ones */
};

/* Either of dw may be absent. accumulate: they are main_grads. dw_dtype: a's, unless it is given. */
void run_wgrad(const Call &call, const Tensor &a, const GatheredRows &b, const FusedMoeWeight dw[2],
               const int64_t M[2], bool accumulate, const Grouping &grouping,
               std::optional<FusedMoeDtype> dw_dtype = {});
/* db[e] = sum of score * row, over R rows. */
void run_bias_grad(const Call &call, const GatheredRows &rows, int64_t R, const Grouping &grouping,
                   const Tensor &db);

#endif
