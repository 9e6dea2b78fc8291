#!/bin/bash
# The records of this machine's GPU, for a release: each program in turn, the most important first.
#
#   benchmarks/measure.sh FOLDER [--limit SECONDS] [ARGS...]
#
# ARGS go to the programs that time layers: --peers sonicmoe, for instance. A program gets PROGRAM_LIMIT seconds (120),
# all of them together --limit (no limit). What did not run or failed is listed at the end, the exit status is then 1,
# and a second call adds to the same FOLDER: records of the same key are replaced. COMMIT names the commit where there
# is no git. Copy what is to stay to benchmarks/results, and renew docs/performance.md with table.py.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

[ $# -gt 0 ] || { sed -n '2,/^set/s/^# \?//p' "$0" && exit 2; }
folder=$(cd "$OLDPWD" && realpath -m "$1") && shift
limit=$((1 << 30)) failed=()
if [ "${1-}" = --limit ]; then limit=$2 && shift 2; fi
mkdir -p "$folder"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

program() { # program RECORDS NAME ARGS...: benchmarks/NAME.py, its records added to FOLDER/RECORDS.json
    local left=$((limit - SECONDS)) allowed=${PROGRAM_LIMIT:-120}
    if [ $left -lt "$allowed" ]; then allowed=$left; fi
    echo "=== ${*:2} ($SECONDS s)"
    if [ "$allowed" -le 0 ] || ! timeout --kill-after 5 "$allowed" \
        "${PYTHON:-python3}" "benchmarks/$2.py" "${@:3}" --json "$folder/$1.json" --append; then
        failed+=("${*:2}")
    fi
}

# One program for each shape: a peer that fails or takes long costs no other shape.
shapes=${SHAPES:-qwen3-30b dsv2-lite olmoe mixtral-8x7b dsv3-8ranks sonic-120b sonic-30b sonic-7b sonic-1.4b}
for shape in $shapes; do
    program layer bench_layer --shape "$shape" --mode queued --mode eager --profile "$@"
done
# This year's models, and many small experts; then skew.
models="qwen3.6-35b qwen4-exp gemma4-26b gpt-oss-20b deepseek-v4-flash dsv4-pro-8ranks glm5-next minimax-m3"
models+=" kimi-k3-16ranks nemotron3-nano nemotron3-super hunyuan-v4"
for shape in ${OTHER_SHAPES-$models 16384,512,8,2048,768}; do program other bench_layer --shape "$shape" "$@"; done
for shape in $shapes; do program zipf bench_layer --shape "$shape" --routing zipf:1.2 "$@"; done
for shape in $shapes; do program dtypes bench_layer --shape "$shape" --dtype fp16 --dtype fp32 --repeats 5 "$@"; done
for shape in $shapes; do program gemm bench_gemm --shape "$shape" --routing random --routing balanced; done
for shape in $shapes; do program kernels bench_kernels --shape "$shape"; done
for shape in $shapes; do program decode bench_decode --shape "$shape"; done
for shape in $shapes; do program eight_bits bench_eight_bits --shape "$shape"; done
for shape in $shapes; do program fp8_training bench_fp8_training --shape "$shape"; done
for system in 1 2 3 4 5; do
    program evaluations bench_evaluations --system $system ${SYSTEM_SHAPE:+--shape "$SYSTEM_SHAPE"} --repeats 7
done

if [ ${#failed[@]} -gt 0 ]; then
    echo && echo "failed or not run, after $SECONDS s:"
    printf '  %s\n' "${failed[@]}"
    exit 1
fi
echo "all done in $SECONDS s: $folder"
