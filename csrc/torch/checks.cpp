#include "checks.h"

#include <algorithm>

static std::string text(const int64_t *sizes, int64_t dim) {
    std::string s = "(";
    for (int64_t i = 0; i < dim; i++) s += (i ? ", " : "") + std::to_string(sizes[i]);
    return s + ")";
}

std::string shape_text(const Tensor &x) {
    return text(x.sizes().data(), x.dim());
}

void check(bool ok, const char *op, const char *expected) {
    STD_TORCH_CHECK(ok, "fused_moe::", op, ": expected ", expected);
}

void check_dim(const char *op, const char *name, const Tensor &x, int64_t dim) {
    STD_TORCH_CHECK(x.dim() == dim, "fused_moe::", op, ": expected ", name, " of ", dim,
                    " dimensions, found shape ", shape_text(x));
}

void check_shape(const char *op, const char *name, const Tensor &x, std::initializer_list<int64_t> shape) {
    auto sizes = x.sizes();
    STD_TORCH_CHECK(std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end()), "fused_moe::", op,
                    ": expected ", name, " of shape ", text(shape.begin(), (int64_t)shape.size()), ", found ",
                    shape_text(x));
}

void check_dtype(const char *op, const char *name, const Tensor &x, ScalarType dtype) {
    STD_TORCH_CHECK(x.scalar_type() == dtype, "fused_moe::", op, ": expected ", name, " of dtype ",
                    toString(dtype), ", found ", toString(x.scalar_type()));
}

void check_device(const char *op, const char *name, const Tensor &x, const Tensor &like) {
    STD_TORCH_CHECK(x.is_cuda() == like.is_cuda() && x.get_device_index() == like.get_device_index(),
                    "fused_moe::", op, ": expected ", name, " on the device of the first tensor");
}

void check_size(const char *op, const char *name, int64_t found, int64_t low, int64_t high) {
    STD_TORCH_CHECK(found >= low && found <= high, "fused_moe::", op, ": expected ", name, " from ", low,
                    " to ", high, ", found ", found);
}

void check_widths(const char *op, const char *name, const Tensor &x, int64_t first) {
    for (int64_t i = first; i < x.dim(); i++)
        STD_TORCH_CHECK(x.size(i) >= 1, "fused_moe::", op, ": expected ", name, " of sizes >= 1, found ",
                        shape_text(x));
}
