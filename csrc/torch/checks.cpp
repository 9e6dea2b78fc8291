#include "checks.h"

#include <algorithm>

std::string shape_text(const int64_t *sizes, int64_t dim) {
    std::string s = "(";
    for (int64_t i = 0; i < dim; i++) s += (i ? ", " : "") + std::to_string(sizes[i]);
    return s + (dim == 1 ? ",)" : ")");
}

std::string shape_text(const Tensor &x) {
    return shape_text(x.sizes().data(), x.dim());
}

static std::string device_text(const Tensor &x) {
    return x.is_cuda() ? "cuda:" + std::to_string(x.get_device_index()) : "cpu";
}

void check(bool ok, const char *op, const char *expected, const char *found) {
    if (!ok) fail(op, "expected ", expected, ", found ", found);
}

void check_dim(const char *op, const char *name, const Tensor &x, int64_t dim) {
    if (x.dim() != dim) fail(op, "expected ", name, " of ", dim, " dimensions, found shape ", shape_text(x));
}

void check_shape(const char *op, const char *name, const Tensor &x, std::initializer_list<int64_t> shape) {
    auto sizes = x.sizes();
    if (!std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end()))
        fail(op, "expected ", name, " of shape ", shape_text(shape.begin(), (int64_t)shape.size()),
             ", found ", shape_text(x));
}

void check_dtype(const char *op, const char *name, const Tensor &x, ScalarType dtype) {
    if (x.scalar_type() != dtype)
        fail(op, "expected ", name, " of dtype ", toString(dtype), ", found ", toString(x.scalar_type()));
}

void check_device(const char *op, const char *name, const Tensor &x, const Tensor &like) {
    if (x.is_cuda() != like.is_cuda() || x.get_device_index() != like.get_device_index())
        fail(op, "expected ", name, " on the device of the first tensor, ", device_text(like), ", found ",
             device_text(x));
}

void check_size(const char *op, const char *name, int64_t found, int64_t low, int64_t high) {
    if (found < low || found > high)
        fail(op, "expected ", name, " from ", low, " to ", high, ", found ", found);
}

void check_widths(const char *op, const char *name, const Tensor &x, int64_t first) {
    for (int64_t i = first; i < x.dim(); i++)
        if (x.size(i) < 1) fail(op, "expected ", name, " of sizes >= 1, found ", shape_text(x));
}
