#!/bin/bash
# The CPU tier under sanitizers: its kernels in harness.c under ThreadSanitizer, then under AddressSanitizer
# and UndefinedBehaviorSanitizer; then the test suite with a library built for the latter two.
#
#   tests/sanitize/run.sh [PYTEST_ARGS...]
#
# Exits with 1 at the first finding. Before each part a planted fault has to be reported, so silence means that
# nothing was found. Needs gcc and git. Everything is built in build/sanitize: the suite runs there on a copy of the
# checkout, whose own build stays as it is. $PYTHON has what the tests need. compute-sanitizer, for the CUDA
# kernels, is in tests/gpu/run.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
if [[ $python == */* ]]; then python=$(realpath --no-symlinks "$python"); fi
out=$PWD/build/sanitize tree=$PWD/build/sanitize/tree
memory="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g"
# ThreadSanitizer instruments what the loader calls to choose among a function's target_clones, and that crashes:
# it runs before ThreadSanitizer's set-up.
threads="-fsanitize=thread -g -Dtarget_clones(...)=unused"
export TSAN_OPTIONS=halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1
mkdir -p "$out"

step() { # step TITLE COMMAND...
    local start=$SECONDS
    "${@:2}"
    echo "--- $1: $((SECONDS - start)) s"
}

must_report() { # must_report FINDING COMMAND...
    if "${@:2}" >"$out/planted.log" 2>&1 || ! grep -q "$1" "$out/planted.log"; then
        cat "$out/planted.log"
        echo "a planted fault was missed: expected a report of $1 from ${*:2}"
        return 1
    fi
}

# torch.c is the one file that needs PyTorch; the harness replaces it.
harness() { # harness FLAGS FAULT=FINDING...
    local flags kernels fault program=$out/harness
    read -ra flags <<<"$1"
    mapfile -t kernels < <(find csrc/cpu -name '*.c' ! -name torch.c)
    ${CC:-gcc} -std=gnu11 -O2 -Wall -Wextra -Icsrc "${flags[@]}" -o "$program" tests/sanitize/harness.c \
        "${kernels[@]}" -lm -lpthread
    for fault in "${@:2}"; do
        must_report "${fault#*=}" "$program" --plant "${fault%%=*}"
    done
    "$program"
}

# What changed is copied anew and compiled again. CUDA sources are left out, and warnings are no errors: with
# sanitizers gcc warns of what is not so.
build_library() {
    mkdir -p "$tree"
    find "$tree" -mindepth 1 -maxdepth 1 ! -name build -exec rm -r {} +
    git ls-files -z --cached --others --exclude-standard | tar -c --null --ignore-failed-read -T - | tar -x -C "$tree"
    (cd "$tree" && CUDA_HOME=/none CFLAGS=$memory CXXFLAGS=$memory LDFLAGS=$memory FUSED_MOE_HOST=1 FUSED_MOE_WERROR=0 \
        FUSED_MOE_OBJECTS=build/objects "$python" setup.py --quiet build_ext --inplace)
}

# Python is not linked with the runtimes, so they are preloaded; with libstdc++, else AddressSanitizer does not
# find the function that throws C++ exceptions. Python's own leaks are of no interest. An allocation that is too
# large fails, as it does without a sanitizer: tests ask for some.
sanitized() { # sanitized COMMAND...
    local preload=() library
    for library in libasan.so libubsan.so libstdc++.so; do
        preload+=("$(${CC:-gcc} -print-file-name="$library")")
    done
    (cd "$tree" && env LD_PRELOAD="${preload[*]}" ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 PYTHONPATH="$tree" CUDA_HOME=/none "$@")
}

# Reports go to the standard error, which pytest must not capture: a finding ends the process. Two files of tests
# look at the normal library, not at this one, and nvcc crashes beside the preloaded runtimes.
suite() {
    must_report "heap-buffer-overflow" sanitized "$python" -c '
import numpy, torch, fused_moe
beyond = numpy.lib.stride_tricks.as_strided(numpy.zeros(80, numpy.float32), (9, 9), (36, 4))  # of 81 elements
fused_moe.route(torch.from_numpy(beyond), top_k=2)'
    sanitized "$python" -m pytest --capture=sys -p no:cacheprovider --ignore=tests/test_build.py \
        --ignore=tests/test_cuda_build.py "$@"
}

step "kernels under ThreadSanitizer" harness "$threads" "race=data race"
step "kernels under AddressSanitizer and UndefinedBehaviorSanitizer" harness "$memory" \
    "heap=heap-buffer-overflow" "overflow=signed integer overflow"
step "a library with both" build_library
step "the test suite with it" suite "$@"
