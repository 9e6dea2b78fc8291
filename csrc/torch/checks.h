/* The checks that memory safety needs when torch.ops is called directly. A failed check throws, and says what
 * it expected and found. Friendly ones, with TypeError and ValueError, are in fused_moe/checks.py. */
#ifndef FUSED_MOE_TORCH_CHECKS_H
#define FUSED_MOE_TORCH_CHECKS_H

#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "shim.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptTensor = std::optional<Tensor>;
using TensorList = std::vector<Tensor>;

/* Kernels count rows and columns in 32 bits, some tiles past the last one, and two elements per column. */
inline constexpr int64_t MAX_ROWS = INT32_MAX - 1024, MAX_WIDTH = INT32_MAX / 2 - 1024,
                         MAX_EXPERTS = INT32_MAX / 8;

/* Words of a message. Not a stream: in a library that g++ 13 of Ubuntu 24.04 linked, a stream crashed when it
 * wrote a number, since its locale came from another libstdc++. */
inline const std::string &word_text(const std::string &word) {
    return word;
}
inline const char *word_text(const char *word) {
    return word;
}
inline std::string word_text(int64_t word) {
    return std::to_string(word);
}

/* Throws an exception that becomes a RuntimeError in Python: "fused_moe::op: " and the message.
 * STD_TORCH_CHECK would put the C++ function, file and line in front of it. */
template <typename... Words>
[[noreturn]] void fail(const char *op, const Words &...message) {
    std::string text = std::string("fused_moe::") + op + ": ";
    ((text += word_text(message)), ...);
    throw std::runtime_error(text);
}

std::string shape_text(const Tensor &x);
std::string shape_text(const int64_t *sizes, int64_t dim);

void check(bool ok, const char *op, const char *expected, const char *found);
void check_dim(const char *op, const char *name, const Tensor &x, int64_t dim);
void check_shape(const char *op, const char *name, const Tensor &x, std::initializer_list<int64_t> shape);
void check_dtype(const char *op, const char *name, const Tensor &x, ScalarType dtype);
void check_device(const char *op, const char *name, const Tensor &x, const Tensor &like);
void check_size(const char *op, const char *name, int64_t found, int64_t low, int64_t high);
/* Checks that every size of x from dimension `first` on is at least one. */
void check_widths(const char *op, const char *name, const Tensor &x, int64_t first);

#endif
