// The only file that sees torch: schemas, and for every operator check -> fill struct -> call.
//
// Written against PyTorch's stable ABI (target 2.10), so that one library dispatches_to_sm90 every PyTorch from there
// on. The checks here are those that memory safety needs when torch.ops is called directly; friendly
// ones, with TypeError and ValueError, stand in fused_moe/function.py. Shapes are those of fused_moe.h.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "activation.h"
#include "fused_moe.h"
#include "plan.h"

// Weak, because a CPU build of PyTorch has none: the same library loads there.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t,
                                                                                   void **);

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptTensor = std::optional<Tensor>;
using Shape = std::vector<int64_t>;

// --- checks ------------------------------------------------------------------------------------------

std::string text(const Shape &shape) {
    std::string s = "(";
    for (size_t i = 0; i < shape.size(); i++) s += (i ? ", " : "") + std::to_string(shape[i]);
    return s + ")";
}

Shape shape_of(const Tensor &x) {
    return Shape(x.sizes().begin(), x.sizes().end());
}

void check_dim(const char *op, const char *name, const Tensor &x, int64_t dim) {
    STD_TORCH_CHECK(x.dim() == dim, "fused_moe::", op, ": expected ", name, " of ", dim,
                    " dimensions, found shape ", text(shape_of(x)));
}

void check_shape(const char *op, const char *name, const Tensor &x, const Shape &shape) {
    STD_TORCH_CHECK(shape_of(x) == shape, "fused_moe::", op, ": expected ", name, " of shape ",
                    text(shape), ", found ", text(shape_of(x)));
}

void check_dtype(const char *op, const char *name, const Tensor &x, ScalarType dtype) {
    STD_TORCH_CHECK(x.scalar_type() == dtype, "fused_moe::", op, ": expected ", name, " of dtype ",
                    toString(dtype), ", found ", toString(x.scalar_type()));
}

void check_device(const char *op, const char *name, const Tensor &x, const Tensor &like) {
    STD_TORCH_CHECK(x.device() == like.device(), "fused_moe::", op, ": expected ", name,
                    " on the device of the first tensor");
}

// Kernels count rows and columns in 32 bits, some tiles past the last one, and two numbers a column.
constexpr int64_t MAX_ROWS = INT32_MAX - 1024, MAX_WIDTH = INT32_MAX / 2 - 1024;

void check_size(const char *op, const char *name, int64_t found, int64_t low, int64_t high) {
    STD_TORCH_CHECK(found >= low && found <= high, "fused_moe::", op, ": expected ", name, " from ",
                    low, " to ", high, ", found ", found);
}

void check_status(const char *op, int status) {
#ifdef FUSED_MOE_WITH_CUDA
    STD_TORCH_CHECK(status != FUSED_MOE_CUDA_ERROR, "fused_moe::", op,
                    ": CUDA: ", fused_moe_cuda_error());
#endif
    STD_TORCH_CHECK(status == FUSED_MOE_OK, "fused_moe::", op, ": ",
                    fused_moe_status_string(status));
}

#ifdef FUSED_MOE_WITH_CUDA
// On x's device, whichever is current, and on its current stream.
template <typename Params>
void run_cuda(const char *op, int (*kernel)(const Params *, void *), const Params &p,
              const Tensor &x) {
    torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    FusedMoeCudaDevice device;
    check_status(op, fused_moe_cuda_device(x.get_device_index(), &device));
    void *stream = nullptr;
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream &&
                        !aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream),
                    "fused_moe::", op, ": PyTorch gave no CUDA stream");
    check_status(op, kernel(&p, stream));
}

// The tier that will serve the call on x's device decides.
template <typename Params>
size_t workspace_cuda(size_t (*bytes)(const Params *), const Params &p, const Tensor &x) {
    torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    return bytes(&p);
}

#define RUN(op, params, x)                                                                         \
    ((x).is_cuda() ? run_cuda(#op, fused_moe_cuda_##op, params, x)                                 \
                   : check_status(#op, fused_moe_cpu_##op(&(params))))
#define WORKSPACE(op, params, x)                                                                   \
    workspace((x).is_cuda() ? workspace_cuda(fused_moe_cuda_##op##_workspace, params, x) : 0, x)
#else
#define RUN(op, params, x) check_status(#op, fused_moe_cpu_##op(&(params)))
#define WORKSPACE(op, params, x) workspace(0, x)
#endif

FusedMoeDtype dtype_of(const char *op, const char *name, const Tensor &x, bool floating) {
    static const struct {
        ScalarType torch;
        FusedMoeDtype ours;
        bool floating;
    } table[] = {
        {ScalarType::Float, FUSED_MOE_F32, true},  {ScalarType::Double, FUSED_MOE_F64, true},
        {ScalarType::Half, FUSED_MOE_F16, true},   {ScalarType::BFloat16, FUSED_MOE_BF16, true},
        {ScalarType::Int, FUSED_MOE_I32, false},   {ScalarType::Long, FUSED_MOE_I64, false},
        {ScalarType::Short, FUSED_MOE_I16, false}, {ScalarType::Char, FUSED_MOE_I8, false},
        {ScalarType::Byte, FUSED_MOE_U8, false},
    };
    for (const auto &row : table)
        if (row.torch == x.scalar_type() && row.floating == floating) return row.ours;
    STD_TORCH_CHECK(false, "fused_moe::", op, ": expected ", name, " of ",
                    floating ? "a floating" : "an integer", " dtype, found ",
                    toString(x.scalar_type()));
}

FusedMoeDtype float_dtype(const char *op, const Tensor &x) {
    return dtype_of(op, "the first tensor", x, true);
}

ScalarType score_dtype(const Tensor &x) {
    return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// --- tensors -----------------------------------------------------------------------------------------

// A fresh tensor whose memory is about to be written as a aligned.
Tensor prepared(Tensor x) {
    if (x.is_cpu())
        fused_moe_cpu_prepare(x.mutable_data_ptr(), x.numel() * (int64_t)x.element_size());
    return x;
}

Tensor new_like(const Tensor &like, const Shape &shape, std::optional<ScalarType> dtype = {}) {
    return prepared(torch::stable::new_empty(like, shape, dtype));
}

// In w's own strides: the gradient of a weight lies as the weight does.
Tensor grad_like(const Tensor &w) {
    return prepared(torch::stable::empty_like(w));
}

Tensor workspace(size_t bytes, const Tensor &like) {
    return torch::stable::new_empty(like, Shape{(int64_t)bytes}, ScalarType::Byte);
}

Tensor nothing(const Tensor &like, std::optional<ScalarType> dtype = {}) {
    return new_like(like, {0}, dtype);
}

const void *data(const Tensor &x) {
    return x.const_data_ptr();
}

const void *data(const OptTensor &x) {
    return x ? x->const_data_ptr() : nullptr;
}

void *mutable_data(const Tensor &x) {
    return x.mutable_data_ptr();
}

const int32_t *ints(const Tensor &x) {
    return static_cast<const int32_t *>(x.const_data_ptr());
}

int32_t *mutable_ints(const Tensor &x) {
    return static_cast<int32_t *>(x.mutable_data_ptr());
}

Tensor dense(const Tensor &x) {
    return x.is_contiguous() ? x : torch::stable::contiguous(x);
}

// x as a dense matrix or vector of x's dtype on like's device.
Tensor operand(const char *op, const char *name, const Tensor &x, const Tensor &like,
               const Shape &shape) {
    check_shape(op, name, x, shape);
    check_dtype(op, name, x, like.scalar_type());
    check_device(op, name, x, like);
    return dense(x);
}

OptTensor operand(const char *op, const char *name, const OptTensor &x, const Tensor &like,
                  const Shape &shape) {
    return x ? OptTensor(operand(op, name, *x, like, shape)) : x;
}

OptTensor scores_of(const char *op, const OptTensor &scores, const Tensor &x, const Shape &shape) {
    if (!scores) return scores;
    check_shape(op, "scores", *scores, shape);
    check_dtype(op, "scores", *scores, score_dtype(x));
    check_device(op, "scores", *scores, x);
    return dense(*scores);
}

// A weight (E, out, in), in whatever strides it has.
FusedMoeWeight weight(const Tensor &w) {
    return {const_cast<void *>(w.const_data_ptr()), w.stride(0), w.stride(1), w.stride(2)};
}

FusedMoeWeight weight(const char *op, const char *name, const Tensor &w, const Tensor &like,
                      const Shape &shape) {
    check_shape(op, name, w, shape);
    check_dtype(op, name, w, like.scalar_type());
    check_device(op, name, w, like);
    for (int i = 1; i < 3; i++) check_size(op, "a weight's width", w.size(i), 0, MAX_WIDTH);
    return weight(w);
}

// The gradient of a weight (E, out, in) that a product of `like` is added to, in whatever strides it has.
FusedMoeWeight main_grad(const char *op, const char *name, const Tensor &grad, const Tensor &like,
                         const Shape &shape) {
    check_shape(op, name, grad, shape);
    check_dtype(op, name, grad, ScalarType::Float);
    check_device(op, name, grad, like);
    STD_TORCH_CHECK(like.scalar_type() != ScalarType::Double, "fused_moe::", op,
                    ": expected operands of dtype Float, BFloat16 or Half with ", name, ", found ",
                    toString(like.scalar_type()));
    return {mutable_data(grad), grad.stride(0), grad.stride(1), grad.stride(2)};
}

FusedMoeWeight transposed(FusedMoeWeight w) {
    return {w.data, w.stride_expert, w.stride_in, w.stride_out};
}

// --- the plan ----------------------------------------------------------------------------------------

// Checked maps, kept alive, and the struct that points into them. Without row_token row r is token r.
struct Maps {
    Tensor offsets;
    OptTensor row_token, row_slot, token_row, tiles;
    FusedMoeRowMap row_map;
};

Tensor index_map(const char *op, const char *name, const Tensor &map, const Tensor &x,
                 int64_t dim) {
    check_dim(op, name, map, dim);
    check_dtype(op, name, map, ScalarType::Int);
    check_device(op, name, map, x);
    return dense(map);
}

OptTensor index_map(const char *op, const char *name, const OptTensor &map, const Tensor &x,
                    int64_t dim) {
    return map ? OptTensor(index_map(op, name, *map, x, dim)) : map;
}

// x is a tensor of T tokens where tokens is true, of R rows otherwise.
Maps maps_of(const char *op, const Tensor &x, bool tokens, int64_t E, const Tensor &offsets,
             const OptTensor &row_token, const OptTensor &row_slot, const OptTensor &token_row,
             const OptTensor &tiles = {}) {
    STD_TORCH_CHECK(row_token.has_value() == row_slot.has_value() &&
                        row_token.has_value() == token_row.has_value(),
                    "fused_moe::", op, ": expected row_token, row_slot and token_row together");
    check_size(op, "experts", E, 1, INT32_MAX / 4);
    Maps m = {
        index_map(op, "offsets", offsets, x, 1),   index_map(op, "row_token", row_token, x, 1),
        index_map(op, "row_slot", row_slot, x, 1), index_map(op, "token_row", token_row, x, 2),
        index_map(op, "tiles", tiles, x, 1),       {}};
    check_shape(op, "offsets", m.offsets, {E + 1});
    if (m.tiles) check_shape(op, "tiles", *m.tiles, {fused_moe_tiles_length(E)});
    FusedMoeRowMap &p = m.row_map;
    p.ends = ints(m.offsets) + 1;
    p.tiles = static_cast<const int32_t *>(data(m.tiles));
    p.E = (int32_t)E;
    p.T = p.R = x.size(0);
    p.K = 1;
    if (m.row_token) {
        p.T = m.token_row->size(0);
        p.K = m.token_row->size(1);
        p.R = m.row_slot->size(0);
        check_shape(op, "row_token", *m.row_token, {p.R});
        check_size(op, "rows of the first tensor", x.size(0), tokens ? p.T : p.R,
                   tokens ? p.T : p.R);
        p.row_token = ints(*m.row_token);
        p.row_slot = ints(*m.row_slot);
        p.token_row = ints(*m.token_row);
    }
    check_size(op, "rows", p.R, 0, MAX_ROWS);
    check_size(op, "tokens", p.T, 0, INT32_MAX);
    return m;
}

// --- experts' shapes -----------------------------------------------------------------------------------

struct Width {
    int64_t E, D, F, H, w1_rows;
};

// From w1 (E, F or 2F, D).
Width width_of(const char *op, const Tensor &w1, const OptTensor &w3, int64_t layout) {
    check_dim(op, "w1", w1, 3);
    check_size(op, "layout", layout, FUSED_MOE_SEPARATE, FUSED_MOE_UNGATED);
    STD_TORCH_CHECK((layout == FUSED_MOE_SEPARATE) == w3.has_value(), "fused_moe::", op,
                    ": expected w3 with layout separate and with no other");
    bool packed = layout == FUSED_MOE_HALVES || layout == FUSED_MOE_INTERLEAVED;
    int64_t rows = w1.size(1);
    STD_TORCH_CHECK(w1.size(0) >= 1 && w1.size(2) >= 1 && rows >= 1 && !(packed && rows % 2),
                    "fused_moe::", op, ": expected w1 of E, D, F >= 1 (2F even), found ",
                    text(shape_of(w1)));
    int64_t F = packed ? rows / 2 : rows;
    return {w1.size(0), w1.size(2), F, layout == FUSED_MOE_UNGATED ? F : 2 * F, rows};
}

FusedMoeActivation activation_of(const char *op, int64_t kind, double alpha, double limit) {
    check_size(op, "activation", kind, 0, FUSED_MOE_NUM_ACTIVATIONS - 1);
    return {(int32_t)kind, alpha, limit};
}

// --- routing --------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> route(const Tensor &logits_, const OptTensor &bias_, int64_t top_k,
                                 int64_t score_func, bool route_norm, double route_scale,
                                 int64_t num_groups, int64_t num_limited_groups) {
    check_dim("route", "logits", logits_, 2);
    int64_t T = logits_.size(0), E = logits_.size(1);
    check_size("route", "experts", E, 1, 1024);
    check_size("route", "top_k", top_k, 1, E < 32 ? E : 32);
    check_size("route", "score_func", score_func, FUSED_MOE_SOFTMAX, FUSED_MOE_SIGMOID);
    if (num_groups) {
        check_size("route", "num_expert_groups", num_groups, 1, E);
        STD_TORCH_CHECK(E % num_groups == 0,
                        "fused_moe::route: expected num_expert_groups to divide ", E,
                        " experts, found ", num_groups);
        check_size("route", "num_limited_groups", num_limited_groups, 1, num_groups);
        check_size("route", "top_k", top_k, 1, num_limited_groups * (E / num_groups));
    }
    Tensor logits = dense(logits_);
    OptTensor bias = bias_;
    if (bias) {
        check_shape("route", "bias", *bias, {E});
        check_dtype("route", "bias", *bias, ScalarType::Float);
        check_device("route", "bias", *bias, logits);
        bias = dense(*bias);
    }
    Tensor scores = new_like(logits, {T, top_k}, score_dtype(logits));
    Tensor ids = new_like(logits, {T, top_k}, ScalarType::Int);

    FusedMoeRoute p = {};
    p.logits = data(logits);
    p.bias = static_cast<const float *>(data(bias));
    p.scores = mutable_data(scores);
    p.ids = mutable_ints(ids);
    p.dtype = float_dtype("route", logits);
    p.score_func = (FusedMoeScoreFunc)score_func;
    p.route_norm = route_norm;
    p.route_scale = route_scale;
    p.num_groups = (int32_t)num_groups;
    p.num_limited_groups = (int32_t)num_limited_groups;
    p.T = T;
    p.E = (int32_t)E;
    p.K = (int32_t)top_k;
    RUN(route, p, logits);
    return {scores, ids};
}

Tensor route_backward(const Tensor &dscores_, const Tensor &logits_, const Tensor &ids_,
                      int64_t score_func, bool route_norm, double route_scale) {
    const char *op = "route_backward";
    check_dim(op, "logits", logits_, 2);
    check_dim(op, "ids", ids_, 2);
    check_size(op, "score_func", score_func, FUSED_MOE_SOFTMAX, FUSED_MOE_SIGMOID);
    Tensor logits = dense(logits_), ids = index_map(op, "ids", ids_, logits, 2);
    check_shape(op, "ids", ids, {logits.size(0), ids.size(1)});
    Tensor dscores = *scores_of(op, dscores_, logits, shape_of(ids));
    Tensor dlogits = new_like(logits, shape_of(logits));

    FusedMoeRouteBackward p = {};
    p.dscores = data(dscores);
    p.logits = data(logits);
    p.ids = ints(ids);
    p.dlogits = mutable_data(dlogits);
    p.dtype = float_dtype(op, logits);
    p.score_func = (FusedMoeScoreFunc)score_func;
    p.route_norm = route_norm;
    p.route_scale = route_scale;
    p.T = logits.size(0);
    p.E = (int32_t)logits.size(1);
    p.K = (int32_t)ids.size(1);
    RUN(route_backward, p, logits);
    return dlogits;
}

using PlanTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

PlanTensors route_plan(const Tensor &ids_, int64_t num_experts) {
    const char *op = "route_plan";
    check_dim(op, "ids", ids_, 2);
    check_size(op, "num_experts", num_experts, 1, INT32_MAX / 4);
    Tensor ids = dense(ids_);
    int64_t slots = ids.numel();
    check_size(op, "T*K", slots, 0, MAX_ROWS);
    auto map = [&](const Shape &shape) { return new_like(ids, shape, ScalarType::Int); };
    Tensor counts = map({num_experts}), offsets = map({num_experts + 1}), row_token = map({slots});
    Tensor row_slot = map({slots}), token_row = map(shape_of(ids));
    Tensor tiles = map({fused_moe_tiles_length(num_experts)});

    FusedMoeRoutePlan p = {};
    p.ids = data(ids);
    p.ids_dtype = dtype_of(op, "ids", ids, false);
    p.counts = mutable_ints(counts);
    p.offsets = mutable_ints(offsets);
    p.row_token = mutable_ints(row_token);
    p.row_slot = mutable_ints(row_slot);
    p.token_row = mutable_ints(token_row);
    p.tiles = mutable_ints(tiles);
    p.T = ids.size(0);
    p.K = (int32_t)ids.size(1);
    p.E = (int32_t)num_experts;
    Tensor scratch = WORKSPACE(route_plan, p, ids);
    p.workspace = mutable_data(scratch);
    RUN(route_plan, p, ids);
    return {counts, offsets, row_token, row_slot, token_row, tiles};
}

std::tuple<Tensor, Tensor, Tensor> count_plan(const Tensor &counts_, int64_t num_rows) {
    const char *op = "count_plan";
    check_dim(op, "counts", counts_, 1);
    check_size(op, "experts", counts_.size(0), 1, INT32_MAX / 4);
    check_size(op, "num_rows", num_rows, 0, MAX_ROWS);
    Tensor given = dense(counts_);
    int64_t E = given.size(0);
    Tensor counts = new_like(given, {E}, ScalarType::Int);
    Tensor offsets = new_like(given, {E + 1}, ScalarType::Int);
    Tensor tiles = new_like(given, {fused_moe_tiles_length(E)}, ScalarType::Int);

    FusedMoeCountPlan p = {};
    p.counts_in = data(given);
    p.counts_dtype = dtype_of(op, "counts", given, false);
    p.counts = mutable_ints(counts);
    p.offsets = mutable_ints(offsets);
    p.tiles = mutable_ints(tiles);
    p.R = num_rows;
    p.E = (int32_t)E;
    RUN(count_plan, p, given);
    return {counts, offsets, tiles};
}

// --- rows -------------------------------------------------------------------------------------------------

int64_t experts_of(const char *op, const Tensor &offsets) {
    check_dim(op, "offsets", offsets, 1);
    return offsets.size(0) - 1;
}

Tensor permute(const Tensor &x_, const Tensor &offsets, const Tensor &row_token,
               const Tensor &row_slot, const Tensor &token_row) {
    check_dim("permute", "x", x_, 2);
    Tensor x = dense(x_);
    Maps m = maps_of("permute", x, true, experts_of("permute", offsets), offsets, row_token,
                     row_slot, token_row);
    Tensor rows = new_like(x, {m.row_map.R, x.size(1)});

    FusedMoePermute p = {};
    p.x = data(x);
    p.rows = mutable_data(rows);
    p.row_map = m.row_map;
    p.D = x.size(1);
    p.dtype = float_dtype("permute", x);
    RUN(permute, p, x);
    return rows;
}

void run_unpermute(const Tensor &rows, const OptTensor &scores, const Maps &m, const Tensor &out) {
    FusedMoeUnpermute p = {};
    p.rows = data(rows);
    p.scores = data(scores);
    p.out = mutable_data(out);
    p.row_map = m.row_map;
    p.D = rows.size(1);
    p.dtype = float_dtype("unpermute", rows);
    RUN(unpermute, p, rows);
}

Tensor unpermute(const Tensor &rows_, const OptTensor &scores_, const Tensor &offsets,
                 const Tensor &row_token, const Tensor &row_slot, const Tensor &token_row) {
    const char *op = "unpermute";
    check_dim(op, "rows", rows_, 2);
    Tensor rows = dense(rows_);
    Maps m =
        maps_of(op, rows, false, experts_of(op, offsets), offsets, row_token, row_slot, token_row);
    OptTensor scores = scores_of(op, scores_, rows, {m.row_map.T, m.row_map.K});
    Tensor out = new_like(rows, {m.row_map.T, rows.size(1)});
    run_unpermute(rows, scores, m, out);
    return out;
}

// drows and dscores may be absent; rows only matter to dscores.
void run_unpermute_backward(const Tensor &dout, const OptTensor &rows, const OptTensor &scores,
                            const Maps &m, const OptTensor &drows, const OptTensor &dscores) {
    FusedMoeUnpermuteBackward p = {};
    p.dout = data(dout);
    p.rows = data(rows);
    p.scores = data(scores);
    p.drows = drows ? mutable_data(*drows) : nullptr;
    p.dscores = dscores ? mutable_data(*dscores) : nullptr;
    p.row_map = m.row_map;
    p.D = dout.size(1);
    p.dtype = float_dtype("unpermute_backward", dout);
    RUN(unpermute_backward, p, dout);
}

std::tuple<Tensor, Tensor> unpermute_backward(const Tensor &dout_, const OptTensor &rows_,
                                              const OptTensor &scores_, const Tensor &offsets,
                                              const Tensor &row_token, const Tensor &row_slot,
                                              const Tensor &token_row, bool need_drows,
                                              bool need_dscores) {
    const char *op = "unpermute_backward";
    check_dim(op, "dout", dout_, 2);
    Tensor dout = dense(dout_);
    Maps m =
        maps_of(op, dout, true, experts_of(op, offsets), offsets, row_token, row_slot, token_row);
    const Shape rows_shape = {m.row_map.R, dout.size(1)}, scores_shape = {m.row_map.T, m.row_map.K};
    OptTensor rows = operand(op, "rows", rows_, dout, rows_shape);
    OptTensor scores = scores_of(op, scores_, dout, scores_shape);
    STD_TORCH_CHECK(rows || !need_dscores, "fused_moe::", op, ": expected rows for dscores");
    OptTensor drows, dscores;
    if (need_drows) drows = new_like(dout, rows_shape);
    if (need_dscores) dscores = new_like(dout, scores_shape, score_dtype(dout));
    run_unpermute_backward(dout, rows, scores, m, drows, dscores);
    return {drows ? *drows : nothing(dout), dscores ? *dscores : nothing(dout, score_dtype(dout))};
}

// --- grouped products ---------------------------------------------------------------------------------------

// Cumulative ends (E,), as torch._grouped_mm takes them.
Tensor ends_of(const char *op, const Tensor &ends, const Tensor &x) {
    Tensor e = index_map(op, "offsets", ends, x, 1);
    check_size(op, "experts", e.size(0), 1, INT32_MAX / 4);
    check_size(op, "rows", x.size(0), 0, MAX_ROWS);
    return e;
}

// out = a b^T + bias; with a second part b[1] the sum of both products.
void run_grouped_mm(const Tensor &a, const FusedMoeWeight b[2], const int64_t N[2],
                    const OptTensor &bias, const int32_t *ends, const int32_t *tiles, int64_t E,
                    const Tensor &out) {
    FusedMoeGroupedMM p = {};
    p.a = data(a);
    p.bias = data(bias);
    p.out = mutable_data(out);
    p.ends = ends;
    p.tiles = tiles;
    p.R = a.size(0);
    p.M = out.size(1);
    for (int i = 0; i < 2; i++) p.b[i] = b[i], p.N[i] = N[i];
    p.E = (int32_t)E;
    p.dtype = float_dtype("grouped_mm", a);
    Tensor scratch = WORKSPACE(grouped_mm, p, a);
    p.workspace = mutable_data(scratch);
    p.workspace_bytes = scratch.numel();
    RUN(grouped_mm, p, a);
}

Tensor grouped_mm(const Tensor &a_, const Tensor &b_, const Tensor &offsets) {
    const char *op = "grouped_mm";
    check_dim(op, "a", a_, 2);
    check_dim(op, "b", b_, 3);
    Tensor a = dense(a_), ends = ends_of(op, offsets, a);
    int64_t E = ends.size(0), M = b_.size(1), N[2] = {a.size(1), 0};
    STD_TORCH_CHECK(M >= 1 && N[0] >= 1, "fused_moe::grouped_mm: expected widths >= 1, found ",
                    text(shape_of(b_)));
    FusedMoeWeight b[2] = {weight(op, "b", b_, a, {E, M, N[0]}), {}};
    Tensor out = new_like(a, {a.size(0), M});
    run_grouped_mm(a, b, N, {}, ints(ends), nullptr, E, out);
    return out;
}

// b may be read through b_row_token, and multiplied by scores; either of dw may be absent. accumulate: they are
// main_grads.
void run_wgrad(const Tensor &a, const Tensor &b, const int32_t *b_row_token,
               const int32_t *row_slot, const OptTensor &scores, const FusedMoeWeight dw[2],
               bool accumulate, const int64_t M[2], const int32_t *ends, int64_t E) {
    if (!dw[0].data && !dw[1].data) return;
    FusedMoeWgrad p = {};
    p.a = data(a);
    p.b = data(b);
    p.b_row_token = b_row_token;
    p.row_slot = row_slot;
    p.b_scores = data(scores);
    p.accumulate = accumulate;
    p.ends = ends;
    p.R = a.size(0);
    p.T = b.size(0);
    p.K = scores ? scores->size(1) : 1;
    p.N = b.size(1);
    for (int i = 0; i < 2; i++) p.dw[i] = dw[i], p.M[i] = M[i];
    p.E = (int32_t)E;
    p.dtype = float_dtype("wgrad", a);
    p.dw_dtype = accumulate ? FUSED_MOE_F32 : p.dtype;
    Tensor scratch = WORKSPACE(wgrad, p, a);
    p.workspace = mutable_data(scratch);
    p.workspace_bytes = scratch.numel();
    RUN(wgrad, p, a);
}

// Of dw = wgrad(a, b, offsets), and whether such operands have one.
Shape wgrad_shape(const char *op, const Tensor &a, const Tensor &b, const Tensor &offsets) {
    check_dim(op, "a", a, 2);
    check_dim(op, "b", b, 2);
    check_dim(op, "offsets", offsets, 1);
    STD_TORCH_CHECK(a.size(1) >= 1 && b.size(1) >= 1, "fused_moe::", op,
                    ": expected widths >= 1, found ", text(shape_of(a)), " and ",
                    text(shape_of(b)));
    check_dtype(op, "b", b, a.scalar_type());
    check_device(op, "b", b, a);
    return {offsets.size(0), a.size(1), b.size(1)};
}

void wgrad_into(const char *op, const Tensor &a_, const Tensor &b_, const Tensor &offsets,
                const OptTensor &a_row_token, const OptTensor &b_row_token,
                const FusedMoeWeight &dw, bool accumulate) {
    STD_TORCH_CHECK(!a_row_token || !b_row_token, "fused_moe::", op,
                    ": expected at most one of a_row_token and b_row_token");
    Tensor a = dense(a_), b = dense(b_), ends = ends_of(op, offsets, a);
    FusedMoeWeight out[2] = {dw, {}};
    // the kernel gathers its second operand: with a_row_token the roles change, and dw is written transposed
    bool swap = a_row_token.has_value();
    if (swap) {
        std::swap(a, b);
        out[0] = transposed(out[0]);
    }
    int64_t M[2] = {a.size(1), 0};
    OptTensor row_token = index_map(op, "row_token", swap ? a_row_token : b_row_token, a, 1);
    if (row_token)
        check_shape(op, "row_token", *row_token, {a.size(0)});
    else
        check_size(op, "rows of b", b.size(0), a.size(0), a.size(0));
    run_wgrad(a, b, static_cast<const int32_t *>(data(row_token)), nullptr, {}, out, accumulate, M,
              ints(ends), ends.size(0));
}

Tensor wgrad(const Tensor &a, const Tensor &b, const Tensor &offsets, const OptTensor &a_row_token,
             const OptTensor &b_row_token) {
    Tensor dw = new_like(a, wgrad_shape("wgrad", a, b, offsets));
    wgrad_into("wgrad", a, b, offsets, a_row_token, b_row_token, weight(dw), false);
    return dw;
}

void wgrad_accumulate(const Tensor &a, const Tensor &b, const Tensor &offsets, const Tensor &dw,
                      const OptTensor &a_row_token, const OptTensor &b_row_token) {
    const char *op = "wgrad_accumulate";
    FusedMoeWeight sum = main_grad(op, "dw", dw, a, wgrad_shape(op, a, b, offsets));
    wgrad_into(op, a, b, offsets, a_row_token, b_row_token, sum, true);
}

// db[e] = sum of score * row, rows read through row_token where it is given.
void run_bias_grad(const Tensor &rows, const int32_t *row_token, const int32_t *row_slot,
                   const OptTensor &scores, const int32_t *ends, int64_t E, int64_t R,
                   const Tensor &db) {
    FusedMoeBiasGrad p = {};
    p.rows = data(rows);
    p.row_token = row_token;
    p.row_slot = row_slot;
    p.scores = data(scores);
    p.db = mutable_data(db);
    p.ends = ends;
    p.R = R;
    p.T = rows.size(0);
    p.K = scores ? scores->size(1) : 1;
    p.N = rows.size(1);
    p.E = (int32_t)E;
    p.dtype = float_dtype("bias_grad", rows);
    RUN(bias_grad, p, rows);
}

Tensor bias_grad(const Tensor &rows_, const Tensor &offsets) {
    check_dim("bias_grad", "rows", rows_, 2);
    Tensor rows = dense(rows_), ends = ends_of("bias_grad", offsets, rows);
    Tensor db = new_like(rows, {ends.size(0), rows.size(1)});
    run_bias_grad(rows, nullptr, nullptr, {}, ints(ends), ends.size(0), rows.size(0), db);
    return db;
}

// The main_grads given to experts_up and experts_down are there for the autograd formula: what it hands to the
// backward operators. No forward touches them.

// --- experts, up side -----------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor>
experts_up(const Tensor &x_, const Tensor &w1, const OptTensor &w3, const OptTensor &b1_,
           const OptTensor &b3_, const OptTensor &scores_, const Tensor &offsets,
           const OptTensor &row_token, const OptTensor &row_slot, const OptTensor &token_row,
           const Tensor &tiles, int64_t layout, int64_t activation, double alpha, double limit,
           bool save_h, const OptTensor &, const OptTensor &) {
    const char *op = "experts_up";
    check_dim(op, "x", x_, 2);
    Tensor x = dense(x_);
    Width s = width_of(op, w1, w3, layout);
    Maps m = maps_of(op, x, true, s.E, offsets, row_token, row_slot, token_row, tiles);
    OptTensor b1 = operand(op, "b1", b1_, x, {s.E, s.w1_rows});
    OptTensor b3 = operand(op, "b3", b3_, x, {s.E, s.F});
    OptTensor scores = scores_of(op, scores_, x, {m.row_map.T, m.row_map.K});
    check_size(op, "x's width", x.size(1), s.D, s.D);
    STD_TORCH_CHECK(!scores || m.row_token, "fused_moe::experts_up: expected maps with scores");
    STD_TORCH_CHECK(w3 || !b3, "fused_moe::experts_up: expected b3 with w3 and not without");
    Tensor h = new_like(x, {save_h ? m.row_map.R : 0, s.H});
    Tensor a = new_like(x, {m.row_map.R, s.F});

    FusedMoeUpGate p = {};
    p.x = data(x);
    p.scores = data(scores);
    p.w1 = weight(op, "w1", w1, x, {s.E, s.w1_rows, s.D});
    if (w3) p.w3 = weight(op, "w3", *w3, x, {s.E, s.F, s.D});
    p.b1 = data(b1);
    p.b3 = data(b3);
    p.h = save_h ? mutable_data(h) : nullptr;
    p.a = mutable_data(a);
    p.row_map = m.row_map;
    p.D = s.D;
    p.F = s.F;
    p.layout = (FusedMoeLayout)layout;
    p.activation = activation_of(op, activation, alpha, limit);
    p.dtype = float_dtype(op, x);
    Tensor scratch = WORKSPACE(up_gate, p, x);
    p.workspace = mutable_data(scratch);
    p.workspace_bytes = scratch.numel();
    RUN(up_gate, p, x);
    return {h, a};
}

std::tuple<Tensor, Tensor> up_gate(const Tensor &x, const Tensor &w1, const OptTensor &w3,
                                   const OptTensor &b1, const OptTensor &b3, const Tensor &offsets,
                                   const OptTensor &row_token, const OptTensor &row_slot,
                                   const OptTensor &token_row, const Tensor &tiles, int64_t layout,
                                   int64_t activation, double alpha, double limit) {
    return experts_up(x, w1, w3, b1, b3, {}, offsets, row_token, row_slot, token_row, tiles, layout,
                      activation, alpha, limit, true, {}, {});
}

// dx_rows = dh w1, or dgate w1 + dup w3.
void run_up_dgrad(const Tensor &dh, const FusedMoeWeight &w1, const FusedMoeWeight &w3,
                  const Width &s, const FusedMoeRowMap &row_map, const Tensor &dx_rows) {
    const FusedMoeWeight b[2] = {transposed(w1), transposed(w3)};
    const int64_t N[2] = {s.w1_rows, w3.data ? s.F : 0};
    run_grouped_mm(dh, b, N, {}, row_map.ends, row_map.tiles, s.E, dx_rows);
}

Tensor up_dgrad(const Tensor &dh_, const Tensor &w1, const OptTensor &w3, const Tensor &offsets,
                int64_t layout) {
    const char *op = "up_dgrad";
    Width s = width_of(op, w1, w3, layout);
    check_dim(op, "dh", dh_, 2);
    Tensor dh = operand(op, "dh", dh_, dh_, {dh_.size(0), s.H});
    Maps m = maps_of(op, dh, false, s.E, offsets, {}, {}, {});
    Tensor dx_rows = new_like(dh, {dh.size(0), s.D});
    FusedMoeWeight up = w3 ? weight(op, "w3", *w3, dh, {s.E, s.F, s.D}) : FusedMoeWeight{};
    run_up_dgrad(dh, weight(op, "w1", w1, dh, {s.E, s.w1_rows, s.D}), up, s, m.row_map, dx_rows);
    return dx_rows;
}

using UpGrads = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// A weight's gradient is added to its main_grad where there is one; dw1 and dw3 are then empty.
UpGrads experts_up_backward_accumulate(const Tensor &dh_, const Tensor &x_, const Tensor &w1,
                                       const OptTensor &w3, const OptTensor &scores_,
                                       const Tensor &offsets, const OptTensor &row_token,
                                       const OptTensor &row_slot, const OptTensor &token_row,
                                       const Tensor &tiles, int64_t layout, bool need_dx,
                                       bool need_dw1, bool need_dw3, bool need_db1, bool need_db3,
                                       bool need_dscores, const OptTensor &main_grad1,
                                       const OptTensor &main_grad3) {
    const char *op = "experts_up_backward";
    check_dim(op, "x", x_, 2);
    Tensor x = dense(x_);
    Width s = width_of(op, w1, w3, layout);
    Maps m = maps_of(op, x, true, s.E, offsets, row_token, row_slot, token_row, tiles);
    Tensor dh = operand(op, "dh", dh_, x, {m.row_map.R, s.H});
    OptTensor scores = scores_of(op, scores_, x, {m.row_map.T, m.row_map.K});
    check_size(op, "x's width", x.size(1), s.D, s.D);
    STD_TORCH_CHECK(!scores || m.row_token, "fused_moe::", op, ": expected maps with scores");
    STD_TORCH_CHECK((w3 || !(need_dw3 || need_db3)) && (scores || !need_dscores), "fused_moe::", op,
                    ": expected w3 and scores where their gradients are needed");
    FusedMoeWeight gate = weight(op, "w1", w1, x, {s.E, s.w1_rows, s.D}), up = {};
    if (w3) up = weight(op, "w3", *w3, x, {s.E, s.F, s.D});
    FusedMoeWeight sums[2] = {}, fresh[2] = {};
    if (need_dw1 && main_grad1) sums[0] = main_grad(op, "main_grad1", *main_grad1, x, shape_of(w1));
    if (need_dw3 && main_grad3)
        sums[1] = main_grad(op, "main_grad3", *main_grad3, x, shape_of(*w3));

    Tensor dx = nothing(x), dw1 = nothing(x), dw3 = nothing(x), db1 = nothing(x), db3 = nothing(x);
    Tensor dscores = nothing(x, score_dtype(x));
    if (need_dx || need_dscores) {
        Tensor dx_rows = new_like(x, {m.row_map.R, s.D});
        run_up_dgrad(dh, gate, up, s, m.row_map, dx_rows);
        if (need_dscores) {
            dscores = new_like(x, {m.row_map.T, m.row_map.K}, score_dtype(x));
            run_unpermute_backward(x, dx_rows, {}, m, {}, dscores);
        }
        if (need_dx && m.row_token) {
            dx = new_like(x, shape_of(x));
            run_unpermute(dx_rows, scores, m, dx);
        } else if (need_dx) {
            dx = dx_rows;
        }
    }
    if (need_dw1 && !main_grad1) fresh[0] = weight(dw1 = grad_like(w1));
    if (need_dw3 && !main_grad3) fresh[1] = weight(dw3 = grad_like(*w3));
    const int64_t M[2] = {s.w1_rows, w3 ? s.F : 0};
    auto products = [&](const FusedMoeWeight dw[2], bool accumulate) {
        run_wgrad(dh, x, m.row_map.row_token, m.row_map.row_slot, scores, dw, accumulate, M,
                  m.row_map.ends, s.E);
    };
    products(fresh, false);
    products(sums, true);
    if (need_db1 || need_db3) {
        Tensor db = new_like(x, {s.E, s.H});
        run_bias_grad(dh, nullptr, nullptr, {}, m.row_map.ends, s.E, m.row_map.R, db);
        auto half = [&](int64_t first, int64_t size) {
            return torch::stable::contiguous(torch::stable::narrow(db, 1, first, size));
        };
        if (need_db1) db1 = w3 ? half(0, s.F) : db;
        if (need_db3) db3 = half(s.F, s.F);
    }
    return {dx, dw1, dw3, db1, db3, dscores};
}

UpGrads experts_up_backward(const Tensor &dh, const Tensor &x, const Tensor &w1,
                            const OptTensor &w3, const OptTensor &scores, const Tensor &offsets,
                            const OptTensor &row_token, const OptTensor &row_slot,
                            const OptTensor &token_row, const Tensor &tiles, int64_t layout,
                            bool need_dx, bool need_dw1, bool need_dw3, bool need_db1,
                            bool need_db3, bool need_dscores) {
    return experts_up_backward_accumulate(dh, x, w1, w3, scores, offsets, row_token, row_slot,
                                          token_row, tiles, layout, need_dx, need_dw1, need_dw3,
                                          need_db1, need_db3, need_dscores, {}, {});
}

// --- experts, down side ---------------------------------------------------------------------------------------

Tensor experts_down(const Tensor &a_, const OptTensor &, const Tensor &w2, const OptTensor &b2_,
                    const OptTensor &scores_, const Tensor &offsets, const OptTensor &row_token,
                    const OptTensor &row_slot, const OptTensor &token_row, const Tensor &tiles,
                    int64_t, int64_t, double, double, const OptTensor &) {
    const char *op = "experts_down";
    check_dim(op, "a", a_, 2);
    check_dim(op, "w2", w2, 3);
    Tensor a = dense(a_);
    int64_t E = w2.size(0), D = w2.size(1), N[2] = {a.size(1), 0};
    STD_TORCH_CHECK(D >= 1 && N[0] >= 1, "fused_moe::", op, ": expected D, F >= 1, found ",
                    text(shape_of(w2)));
    Maps m = maps_of(op, a, false, E, offsets, row_token, row_slot, token_row, tiles);
    OptTensor b2 = operand(op, "b2", b2_, a, {E, D});
    OptTensor scores = scores_of(op, scores_, a, {m.row_map.T, m.row_map.K});
    STD_TORCH_CHECK(!scores || m.row_token, "fused_moe::", op, ": expected maps with scores");
    const FusedMoeWeight b[2] = {weight(op, "w2", w2, a, {E, D, N[0]}), {}};
    Tensor y = new_like(a, {m.row_map.R, D});
    run_grouped_mm(a, b, N, b2, m.row_map.ends, m.row_map.tiles, E, y);
    if (!m.row_token) return y;
    Tensor out = new_like(a, {m.row_map.T, D});
    run_unpermute(y, scores, m, out);
    return out;
}

// Everything down_dgrad needs, checked; outputs are filled in by the caller.
struct DownDgrad {
    Tensor dout, h;
    OptTensor b2, scores;
    Maps m;
    FusedMoeDownDgrad p;
};

DownDgrad down_dgrad_of(const char *op, const Tensor &dout_, const Tensor &w2, const OptTensor &b2,
                        const Tensor &h, const OptTensor &scores, const Tensor &offsets,
                        const OptTensor &row_token, const OptTensor &row_slot,
                        const OptTensor &token_row, const Tensor &tiles, int64_t layout,
                        int64_t activation, double alpha, double limit) {
    check_dim(op, "dout", dout_, 2);
    check_dim(op, "w2", w2, 3);
    check_size(op, "layout", layout, FUSED_MOE_SEPARATE, FUSED_MOE_UNGATED);
    Tensor dout = dense(dout_);
    int64_t E = w2.size(0), D = w2.size(1), F = w2.size(2);
    STD_TORCH_CHECK(D >= 1 && F >= 1, "fused_moe::", op, ": expected D, F >= 1, found ",
                    text(shape_of(w2)));
    check_shape(op, "dout", dout, {dout.size(0), D});
    Maps m = maps_of(op, dout, true, E, offsets, row_token, row_slot, token_row, tiles);
    int64_t H = layout == FUSED_MOE_UNGATED ? F : 2 * F;
    DownDgrad d = {dout,
                   operand(op, "h", h, dout, {m.row_map.R, H}),
                   operand(op, "b2", b2, dout, {E, D}),
                   scores_of(op, scores, dout, {m.row_map.T, m.row_map.K}),
                   m,
                   {}};
    STD_TORCH_CHECK(!d.scores || m.row_token, "fused_moe::", op, ": expected maps with scores");
    d.p.dout = data(d.dout);
    d.p.w2 = weight(op, "w2", w2, dout, {E, D, F});
    d.p.b2 = data(d.b2);
    d.p.h = data(d.h);
    d.p.scores = data(d.scores);
    d.p.row_map = m.row_map;
    d.p.D = D;
    d.p.F = F;
    d.p.layout = (FusedMoeLayout)layout;
    d.p.activation = activation_of(op, activation, alpha, limit);
    d.p.dtype = float_dtype(op, dout);
    return d;
}

void run_down_dgrad(DownDgrad &d) {
    Tensor scratch = WORKSPACE(down_dgrad, d.p, d.dout);
    d.p.workspace = mutable_data(scratch);
    d.p.workspace_bytes = scratch.numel();
    RUN(down_dgrad, d.p, d.dout);
}

std::tuple<Tensor, Tensor, Tensor>
down_dgrad(const Tensor &dout, const Tensor &w2, const OptTensor &b2, const Tensor &h,
           const OptTensor &scores, const Tensor &offsets, const OptTensor &row_token,
           const OptTensor &row_slot, const OptTensor &token_row, const Tensor &tiles,
           int64_t layout, int64_t activation, double alpha, double limit) {
    DownDgrad d = down_dgrad_of("down_dgrad", dout, w2, b2, h, scores, offsets, row_token, row_slot,
                                token_row, tiles, layout, activation, alpha, limit);
    const FusedMoeRowMap &row_map = d.m.row_map;
    Tensor dh = new_like(d.h, shape_of(d.h)), a_scaled = new_like(d.h, {row_map.R, d.p.F});
    Tensor dscores = new_like(d.dout, {row_map.T, row_map.K}, score_dtype(d.dout));
    d.p.dh = mutable_data(dh);
    d.p.a_scaled = mutable_data(a_scaled);
    d.p.dscores = mutable_data(dscores);
    run_down_dgrad(d);
    return {dh, a_scaled, dscores};
}

using DownGrads = std::tuple<Tensor, Tensor, Tensor, Tensor>;

DownGrads experts_down_backward_accumulate(const Tensor &dout, const Tensor &h, const Tensor &w2,
                                           const OptTensor &b2, const OptTensor &scores,
                                           const Tensor &offsets, const OptTensor &row_token,
                                           const OptTensor &row_slot, const OptTensor &token_row,
                                           const Tensor &tiles, int64_t layout, int64_t activation,
                                           double alpha, double limit, bool need_dh, bool need_dw2,
                                           bool need_db2, bool need_dscores,
                                           const OptTensor &main_grad2) {
    const char *op = "experts_down_backward";
    DownDgrad d = down_dgrad_of(op, dout, w2, b2, h, scores, offsets, row_token, row_slot,
                                token_row, tiles, layout, activation, alpha, limit);
    const FusedMoeRowMap &row_map = d.m.row_map;
    FusedMoeWeight sum = {};
    if (need_dw2 && main_grad2)
        sum = main_grad(op, "main_grad2", *main_grad2, d.dout, shape_of(w2));
    Tensor dh = nothing(d.dout), dw2 = nothing(d.dout), db2 = nothing(d.dout);
    Tensor dscores = nothing(d.dout, score_dtype(d.dout)), a_scaled = nothing(d.dout);
    if (need_dh) {
        dh = new_like(d.h, shape_of(d.h));
        d.p.dh = mutable_data(dh);
    }
    if (need_dscores) {
        dscores = new_like(d.dout, {row_map.T, row_map.K}, score_dtype(d.dout));
        d.p.dscores = mutable_data(dscores);
    }
    if (need_dw2) {
        a_scaled = new_like(d.dout, {row_map.R, d.p.F});
        d.p.a_scaled = mutable_data(a_scaled);
    }
    if (need_dh || need_dscores || need_dw2) run_down_dgrad(d);
    if (need_dw2) {
        if (!main_grad2) dw2 = grad_like(w2);
        const FusedMoeWeight dw[2] = {transposed(main_grad2 ? sum : weight(dw2)), {}};
        const int64_t M[2] = {d.p.F, 0};
        run_wgrad(a_scaled, d.dout, row_map.row_token, nullptr, {}, dw, main_grad2.has_value(), M,
                  row_map.ends, row_map.E);
    }
    if (need_db2) {
        db2 = new_like(d.dout, {row_map.E, d.p.D});
        run_bias_grad(d.dout, row_map.row_token, row_map.row_slot, d.scores, row_map.ends,
                      row_map.E, row_map.R, db2);
    }
    return {dh, dw2, db2, dscores};
}

DownGrads experts_down_backward(const Tensor &dout, const Tensor &h, const Tensor &w2,
                                const OptTensor &b2, const OptTensor &scores, const Tensor &offsets,
                                const OptTensor &row_token, const OptTensor &row_slot,
                                const OptTensor &token_row, const Tensor &tiles, int64_t layout,
                                int64_t activation, double alpha, double limit, bool need_dh,
                                bool need_dw2, bool need_db2, bool need_dscores) {
    return experts_down_backward_accumulate(dout, h, w2, b2, scores, offsets, row_token, row_slot,
                                            token_row, tiles, layout, activation, alpha, limit,
                                            need_dh, need_dw2, need_db2, need_dscores, {});
}

Tensor act_dgrad(const Tensor &da_, const Tensor &h_, int64_t layout, int64_t activation,
                 double alpha, double limit) {
    const char *op = "act_dgrad";
    check_size(op, "layout", layout, FUSED_MOE_SEPARATE, FUSED_MOE_UNGATED);
    check_dim(op, "da", da_, 2);
    Tensor da = dense(da_);
    int64_t R = da.size(0), F = da.size(1), H = layout == FUSED_MOE_UNGATED ? F : 2 * F;
    check_size(op, "da's width", F, 0, MAX_WIDTH);
    Tensor h = operand(op, "h", h_, da, {R, H}), dh = new_like(da, {R, H});

    FusedMoeActDgrad p = {};
    p.da = data(da);
    p.h = data(h);
    p.dh = mutable_data(dh);
    p.R = R;
    p.F = F;
    p.layout = (FusedMoeLayout)layout;
    p.activation = activation_of(op, activation, alpha, limit);
    p.dtype = float_dtype(op, da);
    RUN(act_dgrad, p, da);
    return dh;
}

// How many calls of an operator the Hopper engine and the portable tier had, and why the latter its last.
std::tuple<int64_t, int64_t, int64_t> cuda_calls(int64_t op) {
    check_size("cuda_calls", "op", op, 0, FUSED_MOE_NUM_TIER_OPS - 1);
    FusedMoeCalls found = {};
#ifdef FUSED_MOE_WITH_CUDA
    fused_moe_cuda_calls((FusedMoeTierOp)op, &found);
#endif
    return {found.hopper, found.portable, found.reason};
}

// What info() tells of a device: whether a CUDA tier runs there (0: it does), the driver's and the
// runtime's CUDA version, the compute capability.
std::tuple<int64_t, int64_t, int64_t, int64_t> cuda_device(int64_t index) {
#ifdef FUSED_MOE_WITH_CUDA
    FusedMoeCudaDevice found;
    int status = fused_moe_cuda_device((int)index, &found);
    return {status, found.driver_version, found.runtime_version, found.capability};
#else
    (void)index;
    return {FUSED_MOE_NO_SUCH_TIER, 0, 0, 0};
#endif
}

} // namespace

// --- schemas ----------------------------------------------------------------------------------------------------

#define MAPS "Tensor offsets, Tensor row_token, Tensor row_slot, Tensor token_row"
#define PLAN                                                                                       \
    "Tensor offsets, Tensor? row_token, Tensor? row_slot, Tensor? token_row, Tensor tiles, int "   \
    "layout"
#define ACTIVATION "int activation, float alpha, float limit"
#define UP_BACKWARD                                                                                \
    "Tensor dh, Tensor x, Tensor w1, Tensor? w3, Tensor? scores, " PLAN                            \
    ", bool need_dx, bool need_dw1, bool need_dw3, bool need_db1, bool need_db3, bool "            \
    "need_dscores"
#define UP_GRADS "(Tensor dx, Tensor dw1, Tensor dw3, Tensor db1, Tensor db3, Tensor dscores)"
#define DOWN_BACKWARD                                                                              \
    "Tensor dout, Tensor h, Tensor w2, Tensor? b2, Tensor? scores, " PLAN ", " ACTIVATION          \
    ", bool need_dh, bool need_dw2, bool need_db2, bool need_dscores"
#define DOWN_GRADS "(Tensor dh, Tensor dw2, Tensor db2, Tensor dscores)"

STABLE_TORCH_LIBRARY(fused_moe, m) {
    m.def("cuda_device(int index) -> (int status, int driver, int runtime, int capability)");
    m.def("cuda_calls(int op) -> (int hopper, int portable, int reason)");
    m.def("route(Tensor logits, Tensor? bias, int top_k, int score_func, bool route_norm, float "
          "route_scale, int num_groups, int num_limited_groups) -> (Tensor scores, Tensor ids)");
    m.def("route_backward(Tensor dscores, Tensor logits, Tensor ids, int score_func, bool "
          "route_norm, float route_scale) -> Tensor");
    m.def("route_plan(Tensor ids, int num_experts) -> (Tensor counts, Tensor offsets, Tensor "
          "row_token, Tensor row_slot, Tensor token_row, Tensor tiles)");
    m.def(
        "count_plan(Tensor counts, SymInt num_rows) -> (Tensor counts_out, Tensor offsets, Tensor "
        "tiles)");
    m.def("permute(Tensor x, " MAPS ") -> Tensor");
    m.def("unpermute(Tensor rows, Tensor? scores, " MAPS ") -> Tensor");
    m.def("unpermute_backward(Tensor dout, Tensor? rows, Tensor? scores, " MAPS
          ", bool need_drows, bool need_dscores) -> (Tensor drows, Tensor dscores)");
    m.def("grouped_mm(Tensor a, Tensor b, Tensor offsets) -> Tensor");
    m.def("wgrad(Tensor a, Tensor b, Tensor offsets, Tensor? a_row_token=None, Tensor? "
          "b_row_token=None) -> Tensor");
    m.def("wgrad_accumulate(Tensor a, Tensor b, Tensor offsets, Tensor(a!) dw, Tensor? "
          "a_row_token=None, Tensor? b_row_token=None) -> ()");
    m.def("bias_grad(Tensor rows, Tensor offsets) -> Tensor");
    m.def("up_gate(Tensor x, Tensor w1, Tensor? w3, Tensor? b1, Tensor? b3, " PLAN ", " ACTIVATION
          ") -> (Tensor h, Tensor a)");
    m.def("up_dgrad(Tensor dh, Tensor w1, Tensor? w3, Tensor offsets, int layout) -> Tensor");
    m.def("down_dgrad(Tensor dout, Tensor w2, Tensor? b2, Tensor h, Tensor? scores, " PLAN
          ", " ACTIVATION ") -> (Tensor dh, Tensor a_scaled, Tensor dscores)");
    m.def("act_dgrad(Tensor da, Tensor h, int layout, " ACTIVATION ") -> Tensor");
    m.def("experts_up(Tensor x, Tensor w1, Tensor? w3, Tensor? b1, Tensor? b3, Tensor? "
          "scores, " PLAN ", " ACTIVATION ", bool save_h, Tensor? main_grad1=None, Tensor? "
          "main_grad3=None) -> (Tensor h, Tensor a)");
    m.def("experts_up_backward(" UP_BACKWARD ") -> " UP_GRADS);
    m.def("experts_up_backward_accumulate(" UP_BACKWARD
          ", Tensor(a!)? main_grad1, Tensor(b!)? main_grad3) -> " UP_GRADS);
    m.def("experts_down(Tensor a, Tensor? h, Tensor w2, Tensor? b2, Tensor? scores, " PLAN
          ", " ACTIVATION ", Tensor? main_grad2=None) -> Tensor");
    m.def("experts_down_backward(" DOWN_BACKWARD ") -> " DOWN_GRADS);
    m.def("experts_down_backward_accumulate(" DOWN_BACKWARD
          ", Tensor(a!)? main_grad2) -> " DOWN_GRADS);
}

// The same functions serve both devices: RUN looks at the tensors.
#define IMPL(op) m.impl(#op, TORCH_BOX(&op))
#define IMPL_ALL                                                                                   \
    IMPL(route);                                                                                   \
    IMPL(route_backward);                                                                          \
    IMPL(route_plan);                                                                              \
    IMPL(count_plan);                                                                              \
    IMPL(permute);                                                                                 \
    IMPL(unpermute);                                                                               \
    IMPL(unpermute_backward);                                                                      \
    IMPL(grouped_mm);                                                                              \
    IMPL(wgrad);                                                                                   \
    IMPL(wgrad_accumulate);                                                                        \
    IMPL(bias_grad);                                                                               \
    IMPL(up_gate);                                                                                 \
    IMPL(up_dgrad);                                                                                \
    IMPL(down_dgrad);                                                                              \
    IMPL(act_dgrad);                                                                               \
    IMPL(experts_up);                                                                              \
    IMPL(experts_up_backward);                                                                     \
    IMPL(experts_up_backward_accumulate);                                                          \
    IMPL(experts_down);                                                                            \
    IMPL(experts_down_backward);                                                                   \
    IMPL(experts_down_backward_accumulate)

STABLE_TORCH_LIBRARY_IMPL(fused_moe, CPU, m) {
    IMPL_ALL;
}

#ifdef FUSED_MOE_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(fused_moe, CUDA, m) {
    IMPL_ALL;
}
#endif

STABLE_TORCH_LIBRARY_IMPL(fused_moe, CompositeExplicitAutograd, m) {
    IMPL(cuda_device);
    IMPL(cuda_calls);
}
