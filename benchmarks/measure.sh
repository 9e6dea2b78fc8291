#!/bin/bash
# Makes the records of benchmarks/results again on this machine: on its GPU, or without one those of a CPU.
#
#   benchmarks/measure.sh FOLDER [--limit SECONDS] [ARGS...]
#
# ARGS go to the programs that time layers: --peers sonicmoe, for instance. A program gets PROGRAM_LIMIT seconds (120),
# all of them together --limit (no limit), the most important first. What did not run or failed is listed at the end, the
# exit status is then 1, and a second call adds to the same FOLDER: records of the same key are replaced. COMMIT names
# the commit where there is no git. `benchmarks/records.py FOLDER -o benchmarks/results` keeps what pages read.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

[ $# -gt 0 ] || { sed -n '2,/^set/s/^# \?//p' "$0" && exit 2; }
folder=$(cd "$OLDPWD" && realpath -m "$1") && shift
limit=$((1 << 30)) failed=()
if [ "${1-}" = --limit ]; then limit=$2 && shift 2; fi
mkdir -p "$folder"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
card=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | sed -n '1s/NVIDIA \([A-Za-z0-9]*\).*/\L\1/p')
gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU')
python=${PYTHON:-python3}

program() { # program RECORDS NAME ARGS...: benchmarks/NAME.py, its records added to FOLDER/RECORDS_CARD.json
    local left=$((limit - SECONDS)) allowed=${PROGRAM_LIMIT:-120} run=("$python")
    if [ $left -lt "$allowed" ]; then allowed=$left; fi
    if [ "$2" = bench_expert_parallel ]; then run=("$python" -m torch.distributed.run --nproc-per-node 2); fi
    echo "=== ${*:2} ($SECONDS s)"
    if [ "$allowed" -le 0 ] || ! timeout --kill-after 5 "$allowed" \
        "${run[@]}" "benchmarks/$2.py" "${@:3}" --json "$folder/$1_${card:-cpu}.json" --append; then
        failed+=("${*:2}")
    fi
}

# One program for each shape: a peer that fails or takes long costs no other shape.
shapes=${SHAPES:-qwen3-30b dsv2-lite olmoe mixtral-8x7b dsv3-8ranks sonic-120b sonic-30b sonic-7b sonic-1.4b}
# This year's models, and many small experts.
models="qwen3.6-35b qwen4-exp gemma4-26b gpt-oss-20b deepseek-v4-flash dsv4-pro-8ranks glm5-next minimax-m3"
models+=" kimi-k3-16ranks nemotron3-nano nemotron3-super hunyuan-v4"
many="16384,512,10,2048,512 16384,512,8,2048,768 8192,32,4,2880,2880"
few=1,2,4,8,16,32,64,128,256,512,1024,2048
experts=${EXPERTS:-qwen3-30b mixtral-8x7b deepseek-v3}

on_gpu() {
    for s in $shapes; do program layer bench_layer --shape "$s" --mode queued --mode eager "$@"; done
    for s in $experts; do program decode bench_decode --shape "$s" --tokens $few --peers torch,vllm,vllm-invariant; done
    for s in ${OTHER_SHAPES-$models}; do
        program models bench_layer --shape "$s" "$@"
        program models bench_decode --shape "$s" --tokens 8,64 --format fp8_block,mxfp4
    done
    for s in $experts; do
        program quantised bench_decode --shape "$s" --tokens 1,8,32,64,128,512,2048 --format fp8_block,int8,int4,mxfp4 \
            --peers marlin,humming
    done
    for s in $shapes; do program eight_bits bench_eight_bits --shape "$s"; done
    for s in $experts; do
        program eight_bits bench_decode --shape "$s" --tokens 1,8,32,128 --format fp8_block --compute codes,fp8
    done
    for s in $shapes; do program fp8_training bench_fp8_training --shape "$s"; done
    program linear bench_linear --tokens 1,8,64,512,2048,4096,8192,16384
    for s in ${OTHER_SHAPES-$many}; do program other_layers bench_layer --shape "$s" "$@"; done
    for s in $shapes; do
        program other_layers bench_layer --shape "$s" --routing zipf:1.2 "$@"
        program other_layers bench_layer --shape "$s" --dtype fp16 --repeats 5 "$@"
    done
    for system in 1 2 3 4 5; do
        program evaluations bench_evaluations --system $system ${SYSTEM_SHAPE:+--shape "$SYSTEM_SHAPE"} --repeats 7
    done
    program transformers bench_transformers
    program transformers bench_transformers --generate --batch 1,32
    program transformers bench_lora
    program vllm bench_vllm
    program vllm bench_continuous_batching
    if [ "$gpus" -gt 1 ]; then
        for s in $shapes; do program expert_parallel bench_expert_parallel --shape "$s"; done
        program torchtitan bench_torchtitan --torchtitan "${TORCHTITAN:-torchtitan}" --local-batch 1,2,4,8
    fi
}

on_cpu() {
    program layer bench_layer "$@"
    program quantised bench_quantised --quality
}

if [ -n "$card" ]; then on_gpu "$@"; else on_cpu "$@"; fi
if [ ${#failed[@]} -gt 0 ]; then
    echo && echo "failed or not run, after $SECONDS s:"
    printf '  %s\n' "${failed[@]}"
    exit 1
fi
echo "all done in $SECONDS s: $folder"
