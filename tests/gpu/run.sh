#!/bin/bash
# The suite on a GPU, then compute-sanitizer over the tests marked `sanitizer`, then fuzzing and soaking where
# they are asked for, and a summary of all.
#
#   tests/gpu/run.sh [-o FILE] [--no-suite] [--tools "memcheck racecheck initcheck synccheck"]
#                    [--fuzz MINUTES [--jobs N]] [--soak MINUTES] [--seed N] [--record FILE] [PYTEST_ARGS...]
#
# -o FILE appends the summary to FILE. --tools "" leaves the sanitizer out. --fuzz runs tests/trust/fuzz.py with
# 12 jobs, or N; --soak runs tests/trust/soak.py, for 8 minutes at most. --record FILE takes a record of each.
# --seed, 0 by default, is the suite's, too; another seed is another part of a soak, and records add up. For one
# part alone: --no-suite --tools "" --soak 8 --seed 1. Everything else goes to the suite's pytest: -n 4 --dist
# loadfile, -k graph, ... fused_moe/_ops.so is taken as it is; where it is missing it is built. Exits with 1 when
# a test failed, a tool, the fuzzer or the soak found something, or one of them could not run.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit

out=/dev/null suite=1 tools="memcheck racecheck initcheck synccheck" pytest_args=()
fuzz='' soak='' seed=0 jobs=12 record=()
while [ $# -gt 0 ]; do
    case $1 in
    -o) out=$(cd "$OLDPWD" && realpath -m "$2") && shift ;;
    --no-suite) suite= ;;
    --tools) tools=$2 && shift ;;
    --fuzz) fuzz=$2 && shift ;;
    --soak) soak=$2 && shift ;;
    --seed) seed=$2 pytest_args+=(--seed "$2") && shift ;;
    --jobs) jobs=$2 && shift ;;
    --record) record=(--record "$(cd "$OLDPWD" && realpath -m "$2")") && shift ;;
    *) pytest_args+=("$1") ;;
    esac
    shift
done

python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
PATH=$PATH:/usr/local/cuda/bin
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
failed=0 summary=()

say() {
    echo "$*"
    summary+=("$*")
}

counts() { # the closing line of pytest's log, less its decoration
    grep -E '[0-9]+ (passed|failed|skipped|errors?|deselected).* in [0-9.]+s' "$1" | tail -1 | tr -d '='
}

if [ ! -e fused_moe/_ops.so ]; then
    FUSED_MOE_HOST=1 $python setup.py build_ext --inplace || exit 1
fi
say "$(date -u '+%Y-%m-%d %H:%M UTC'), commit ${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}"
say "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | paste -sd '+')"
say "$($python -c 'import platform, torch; print(f"PyTorch {torch.__version__}, Python {platform.python_version()}")')"

if [ -n "$suite" ]; then
    $python -m pytest --device cuda "${pytest_args[@]}" 2>&1 | tee "$logs/suite"
    [ "${PIPESTATUS[0]}" -eq 0 ] || failed=1
    say "suite: $(counts "$logs/suite")"
fi

# Only our kernels are looked at. Not so in initcheck: it has to see what PyTorch's kernels write, so there
# the reports are sifted instead, all of them: tests copy rows that nothing wrote. Without PyTorch's cache every
# tensor is an allocation of its own, so that one element past its end is seen.
for tool in $tools; do
    options=(--tool "$tool" --target-processes all --report-api-errors no --show-backtrace device)
    select=() tier=${FUSED_MOE_TIER:-auto}
    # Garbage maps name rows that nothing wrote, and what TMA writes initcheck does not see.
    if [ "$tool" = initcheck ]; then
        select=(-k "not garbage and not other_routings and not sm90 and not tiers") tier=portable
    else
        options+=(--error-exitcode 1 --kernel-name kns=fused_moe)
    fi
    # synccheck reserves memory per instruction that initialises a barrier, and aborts when there are more barriers:
    # one instruction can initialise eight. This is enough for 132 CTAs.
    if [ "$tool" = synccheck ]; then options+=(--num-cuda-barriers 4096); fi
    log=$logs/$tool start=$SECONDS
    FUSED_MOE_TIER=$tier PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer "${options[@]}" --print-limit 1000000 \
        "$python" -m pytest --device cuda -m sanitizer -q -p no:cacheprovider "${select[@]}" tests/cuda 2>&1 | tee "$log"
    [ "${PIPESTATUS[0]}" -eq 0 ] || failed=1
    # A report ends with an empty line; one of its lines names the kernel: "at void fused_moe::..."
    found=$(awk '/=+ .*(Invalid|Uninitialized|Race reported|hazard detected|Barrier error)/ { is_open = 1 }
                 is_open && /fused_moe/ { found++; is_open = 0 }
                 /^=+ *$/ { is_open = 0 }
                 END { print found + 0 }' "$log")
    total=$(sed -En 's/^=+ (ERROR|RACECHECK) SUMMARY: //p' "$log" | paste -sd ';')
    passed=$(counts "$log")
    if [ "$found" -ne 0 ] || [ -z "$total" ] || [[ $passed != *passed* ]]; then failed=1; fi
    say "$tool ($tier): ${total:-did not run}, $found in our kernels; ${passed:-no tests}, $((SECONDS - start)) s"
done

# Their last line is their result.
run_trust() { # NAME ARGS...
    local name=$1 log=$logs/$1
    shift
    $python "tests/trust/$name.py" --device cuda --seed "$seed" "${record[@]}" "$@" 2>&1 | tee "$log"
    [ "${PIPESTATUS[0]}" -eq 0 ] || failed=1
    say "$name: $(tail -n 1 "$log")"
}
if [ -n "$fuzz" ]; then run_trust fuzz --minutes "$fuzz" --jobs "$jobs"; fi
if [ -n "$soak" ]; then run_trust soak --minutes "$soak"; fi

result="passed"
[ $failed -eq 0 ] || result="FAILED"
say "result: $result"
printf '%s\n' "${summary[@]}" >>"$out"
echo && printf '%s\n' "${summary[@]}"
exit $failed
