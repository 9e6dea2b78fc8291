/* Tensors as kernels take them: allocated, dense, with checked shape, dtype and device; and those of the
 * plan. */
#include <cstring>

#include "bindings.h"

/* --- allocation ----------------------------------------------------------------------------------------- */

/* The message of PyTorch's last exception. It is weak, because PyTorch has it from 2.13 on. */
extern "C" __attribute__((weak)) const char *torch_exception_get_what_without_backtrace();

/* The tensor that `allocate` returns. Out of memory, PyTorch's headers throw the C++ call that failed, not
 * the reason. */
template <typename Allocate>
static Tensor allocated(const int64_t *sizes, int64_t dim, Allocate allocate) {
    try {
        return allocate();
    } catch (const std::runtime_error &) {
        const char *reason = torch_exception_get_what_without_backtrace
                                 ? torch_exception_get_what_without_backtrace()
                                 : "PyTorch printed the reason, most often out of memory";
        fail("allocation", "expected memory for a tensor of shape ", shape_text(sizes, dim),
             ", found none: ", reason);
    }
}

static Tensor copied(const Tensor &x) {
    return allocated(x.sizes().data(), x.dim(), [&] { return torch::stable::contiguous(x); });
}

/* Calls the allocator directly: a boxed call of new_empty takes several times as long on the host. */
static Tensor new_strided(const Tensor &like, int64_t dim, const int64_t *sizes, const int64_t *strides,
                          std::optional<ScalarType> dtype) {
    int32_t type, code;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &type));
    if (dtype)
        code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(*dtype));
    else
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &code));
    AtenTensorHandle tensor;
    return allocated(sizes, dim, [&] {
        TORCH_ERROR_CODE_CHECK(
            aoti_torch_empty_strided(dim, sizes, strides, code, type, like.get_device_index(), &tensor));
        return Tensor(tensor);
    });
}

/* Prepares memory that is about to be written in full. */
static Tensor prepared(Tensor x) {
    fused_moe_cpu_prepare(x.mutable_data_ptr(), x.numel() * (int64_t)x.element_size());
    return x;
}

Tensor new_tensor(const Tensor &like, std::initializer_list<int64_t> shape, std::optional<ScalarType> dtype) {
    /* On the CPU new_strided would ignore torch.use_deterministic_algorithms, which fills memory. */
    int64_t strides[4], dim = (int64_t)shape.size();
    if (!like.is_cuda())
        return prepared(
            allocated(shape.begin(), dim, [&] { return torch::stable::new_empty(like, shape, dtype); }));
    for (int64_t i = dim - 1, stride = 1; i >= 0; i--) {
        int64_t size = shape.begin()[i];
        strides[i] = stride;
        stride *= size > 0 ? size : 1;
    }
    return new_strided(like, dim, shape.begin(), strides, dtype);
}

Tensor new_grad(const Tensor &w) {
    int64_t rows = w.size(1), cols = w.size(2);
    bool swapped = w.stride(0) == rows * cols && w.stride(1) == 1 && w.stride(2) == rows;
    if (w.is_cuda() && (swapped || w.is_contiguous()))
        return new_strided(w, 3, w.sizes().data(), w.strides().data(), {});
    Tensor grad = allocated(w.sizes().data(), 3, [&] { return torch::stable::empty_like(w); });
    return w.is_cuda() ? grad : prepared(grad);
}

Tensor new_zeros(const Call &call, const Tensor &like, std::initializer_list<int64_t> shape,
                 ScalarType dtype) {
    const int64_t strides[2] = {};
    Tensor zeros = new_strided(like, 2, shape.begin(), strides, dtype);
    void *element = zeros.mutable_data_ptr();
    const int64_t bytes = zeros.numel() ? (int64_t)zeros.element_size() : 0;
#ifdef FUSED_MOE_WITH_CUDA
    if (call.is_cuda) {
        if (bytes) check_status(call, fused_moe_cuda_zero(element, bytes, call.stream));
        return zeros;
    }
#endif
    (void)call;
    if (bytes) memset(element, 0, bytes);
    return zeros;
}

Tensor new_empty_result(const Tensor &like, std::optional<ScalarType> dtype) {
    const int64_t size = 0, stride = 1;
    return new_strided(like, 1, &size, &stride, dtype);
}

/* --- storage -------------------------------------------------------------------------------------------- */

/* Every tensor of every call is checked, so this makes C calls of two nanoseconds each. */
void check_storage(const char *op, int argument, const Tensor &x) {
    int64_t bytes, offset, dim, *sizes, *strides;
    int32_t dtype;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(x.get(), &bytes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(x.get(), &offset));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(x.get(), &dim));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(x.get(), &sizes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(x.get(), &strides));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
    int64_t last = offset;
    for (int64_t i = 0; i < dim; i++) {
        if (sizes[i] == 0) return;
        last += (sizes[i] - 1) * strides[i];
    }
    const int64_t needed = (last + 1) * (int64_t)aoti_torch_dtype_element_size(dtype);
    if (bytes < needed)
        fail(op, "expected the storage of argument ", argument, ", a tensor of shape ",
             shape_text(sizes, dim), ", to hold ", needed, " bytes, found ", bytes,
             ": it was freed or shrunk");
}

void check_storage(const char *op, int argument, const OptTensor &x) {
    if (x) check_storage(op, argument, *x);
}

void check_storage(const char *op, int argument, const TensorList &list) {
    for (const Tensor &x : list) check_storage(op, argument, x);
}

/* --- dtypes and data ------------------------------------------------------------------------------------ */

ScalarType score_dtype(const Tensor &x) {
    return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

FusedMoeDtype dtype_of(const char *op, const char *name, const Tensor &x, bool floating) {
    ScalarType dtype = x.scalar_type();
    if (floating) switch (dtype) {
        case ScalarType::Float: return FUSED_MOE_F32;
        case ScalarType::Double: return FUSED_MOE_F64;
        case ScalarType::Half: return FUSED_MOE_F16;
        case ScalarType::BFloat16: return FUSED_MOE_BF16;
        default: break;
        }
    else
        switch (dtype) {
        case ScalarType::Int: return FUSED_MOE_I32;
        case ScalarType::Long: return FUSED_MOE_I64;
        case ScalarType::Short: return FUSED_MOE_I16;
        case ScalarType::Char: return FUSED_MOE_I8;
        case ScalarType::Byte: return FUSED_MOE_U8;
        default: break;
        }
    fail(op, "expected ", name, " of ", floating ? "a floating" : "an integer", " dtype, found ",
         toString(dtype));
}

FusedMoeDtype float_dtype(const char *op, const Tensor &x) {
    return dtype_of(op, "the first tensor", x, true);
}

const void *data(const Tensor &x) {
    return x.const_data_ptr();
}

const void *data(const OptTensor &x) {
    return x ? x->const_data_ptr() : nullptr;
}

const int32_t *ints(const Tensor &x) {
    return (const int32_t *)x.const_data_ptr();
}

int32_t *mutable_ints(const Tensor &x) {
    return (int32_t *)x.mutable_data_ptr();
}

/* --- operands ------------------------------------------------------------------------------------------- */

Tensor dense(const Tensor &x) {
    return x.is_contiguous() ? x : copied(x);
}

static constexpr uintptr_t ALIGNMENT = 16; /* of a TMA address, and of a vector load */

Tensor aligned(const Tensor &x) {
    if (!x.is_contiguous() || !x.is_cuda() || (uintptr_t)x.const_data_ptr() % ALIGNMENT == 0) return dense(x);
    return allocated(x.sizes().data(), x.dim(), [&] { return torch::stable::clone(x); });
}

bool is_16_bit(const Tensor &x) {
    return x.scalar_type() == ScalarType::Half || x.scalar_type() == ScalarType::BFloat16;
}

Tensor operand(const char *op, const char *name, const Tensor &x, const Tensor &like,
               std::initializer_list<int64_t> shape) {
    check_shape(op, name, x, shape);
    check_dtype(op, name, x, like.scalar_type());
    check_device(op, name, x, like);
    return aligned(x);
}

OptTensor operand(const char *op, const char *name, const OptTensor &x, const Tensor &like,
                  std::initializer_list<int64_t> shape) {
    return x ? OptTensor(operand(op, name, *x, like, shape)) : OptTensor();
}

OptTensor scores_of(const char *op, const OptTensor &scores, const Tensor &x,
                    std::initializer_list<int64_t> shape) {
    if (!scores) return {};
    check_shape(op, "scores", *scores, shape);
    check_dtype(op, "scores", *scores, score_dtype(x));
    check_device(op, "scores", *scores, x);
    return dense(*scores);
}

Shared shared_of(const char *op, const Shared &given, const Tensor &like, int64_t T, int64_t D) {
    check(given.rows || !given.gate, op, "shared beside shared_gate", "none");
    Shared shared = {operand(op, "shared", given.rows, like, {T, D}), {}};
    if (given.gate) shared.gate = shared_gate_of(op, *given.gate, like, T);
    return shared;
}

Tensor shared_gate_of(const char *op, const Tensor &gate, const Tensor &like, int64_t T) {
    if (gate.dim() == 1)
        check_shape(op, "shared_gate", gate, {T});
    else
        check_shape(op, "shared_gate", gate, {T, 1});
    check_dtype(op, "shared_gate", gate, score_dtype(like));
    check_device(op, "shared_gate", gate, like);
    return dense(gate);
}

FusedMoeWeight weight(const Tensor &w) {
    return {const_cast<void *>(w.const_data_ptr()), w.stride(0), w.stride(1), w.stride(2), nullptr};
}

FusedMoeWeight weight(const char *op, const char *name, const Tensor &w, const Tensor &like,
                      std::initializer_list<int64_t> shape) {
    check_shape(op, name, w, shape);
    check_dtype(op, name, w, like.scalar_type());
    check_device(op, name, w, like);
    for (int i = 1; i < 3; i++) check_size(op, "a weight's width", w.size(i), 0, MAX_WIDTH);
    return weight(w);
}

FusedMoeWeight transposed(FusedMoeWeight w) {
    return {w.data, w.stride_expert, w.stride_in, w.stride_out, nullptr};
}

FusedMoeWeight main_grad(const char *op, const char *name, const Tensor &grad, const Tensor &like,
                         std::initializer_list<int64_t> shape) {
    check_shape(op, name, grad, shape);
    check_dtype(op, name, grad, ScalarType::Float);
    check_device(op, name, grad, like);
    if (like.scalar_type() == ScalarType::Double)
        fail(op, "expected operands of dtype Float, BFloat16 or Half with ", name, ", found ",
             toString(like.scalar_type()));
    return {grad.mutable_data_ptr(), grad.stride(0), grad.stride(1), grad.stride(2), nullptr};
}

/* --- the plan ------------------------------------------------------------------------------------------- */

static void check_index_tensor(const char *op, const char *name, const Tensor &map, const Tensor &x,
                               int64_t dim) {
    check_dim(op, name, map, dim);
    check_dtype(op, name, map, ScalarType::Int);
    check_device(op, name, map, x);
}

Tensor index_tensor(const char *op, const char *name, const Tensor &map, const Tensor &x, int64_t dim) {
    check_index_tensor(op, name, map, x, dim);
    return dense(map);
}

Tensor offs_of(const char *op, const Tensor &offsets, const Tensor &x) {
    Tensor offs = index_tensor(op, "offsets", offsets, x, 1);
    check_size(op, "experts", offs.size(0), 1, MAX_EXPERTS);
    check_size(op, "rows", x.size(0), 0, MAX_ROWS);
    return offs;
}

static const int32_t *map_data(const char *op, const char *name, const Tensor &map, const Tensor &x,
                               int64_t dim, RowMap *row_map) {
    check_index_tensor(op, name, map, x, dim);
    if (map.is_contiguous()) return ints(map);
    row_map->copies.push_back(copied(map));
    return ints(row_map->copies.back());
}

static void check_row_map(const char *op, const Tensor &x, RowsOf rows_of, const RowMap &map) {
    const FusedMoeRowMap &p = map.p;
    const int64_t rows = rows_of == RowsOf::TOKENS ? p.T : p.R;
    if (map.has_maps) check_size(op, "rows of the first tensor", x.size(0), rows, rows);
    check_size(op, "rows", p.R, 0, MAX_ROWS);
    check_size(op, "tokens", p.T, 0, INT32_MAX);
}

/* The row map of a plan in one tensor, which prepare_plan has made of ids (T, K). */
static void unpack_plan(const char *op, const Tensor &packed, const Tensor &ids, const Tensor &x,
                        RowsOf rows_of, int64_t E, RowMap *map) {
    check_size(op, "experts", E, 1, MAX_EXPERTS);
    check_index_tensor(op, "ids", ids, x, 2);
    const int64_t T = ids.size(0), K = ids.size(1), R = T * K;
    const int32_t *words = map_data(op, "packed", packed, x, 1, map);
    check_shape(op, "packed", packed, {plan_words(E, R)});
    map->p = row_map_in(words, T, K, E);
    check_row_map(op, x, rows_of, *map);
}

RowMap row_map_of(const char *op, const Tensor &x, RowsOf rows_of, int64_t E, const TensorList &plan) {
    if (plan.size() != 2 && plan.size() != 5)
        fail(op,
             "expected plan of [offsets, schedule] or [offsets, schedule, row_token, row_slot, token_row], "
             "found ",
             plan.size(), " tensors");
    RowMap map;
    FusedMoeRowMap &p = map.p;
    p = {};
    if (E && plan.size() == 2 && plan[1].dim() == 2) {
        map.has_maps = true;
        unpack_plan(op, plan[0], plan[1], x, rows_of, E, &map);
        return map;
    }
    map.has_maps = plan.size() == 5;
    const int32_t *offsets = map_data(op, "offsets", plan[0], x, 1, &map);
    if (!E) E = plan[0].size(0) - 1;
    check_size(op, "experts", E, 1, MAX_EXPERTS);
    check_shape(op, "offsets", plan[0], {E + 1});
    p.offs = offsets + 1;
    p.schedule = map_data(op, "schedule", plan[1], x, 1, &map);
    check_shape(op, "schedule", plan[1], {fused_moe_schedule_words(E)});
    p.E = (int32_t)E;
    p.T = p.R = x.size(0);
    p.K = 1;
    if (map.has_maps) {
        p.row_token = map_data(op, "row_token", plan[2], x, 1, &map);
        p.row_slot = map_data(op, "row_slot", plan[3], x, 1, &map);
        p.token_row = map_data(op, "token_row", plan[4], x, 2, &map);
        p.T = plan[4].size(0);
        p.K = plan[4].size(1);
        p.R = plan[3].size(0);
        check_shape(op, "row_token", plan[2], {p.R});
    }
    check_row_map(op, x, rows_of, map);
    return map;
}

RowMap full_row_map_of(const char *op, const Tensor &x, RowsOf rows_of, const TensorList &plan) {
    if (plan.size() != 5)
        fail(op, "expected plan of [offsets, schedule, row_token, row_slot, token_row], found ", plan.size(),
             " tensors");
    return row_map_of(op, x, rows_of, 0, plan);
}
