/* PyTorch's stable headers, in which a failed C call throws without a stream. Their own macro writes the
 * line's number to one, and in a library that g++ 13 of Ubuntu 24.04 linked that crashed: out of memory ended
 * the process (checks.h: word_text). */
#ifndef FUSED_MOE_TORCH_SHIM_H
#define FUSED_MOE_TORCH_SHIM_H

#include <torch/headeronly/util/shim_utils.h>

#include <stdexcept>

#undef TORCH_ERROR_CODE_CHECK
#define TORCH_ERROR_CODE_CHECK(call)                                                                         \
    if ((call) != TORCH_SUCCESS) {                                                                           \
        throw std::runtime_error(#call " failed");                                                           \
    }

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#endif
