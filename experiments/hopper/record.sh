#!/usr/bin/env bash
# The runs of record of hopper on all GPUs of this machine: bash experiments/hopper/record.sh FOLDER [SWEEP...] (default: all three).
# A sweep is divided by head dim and mask, since a test's contenders must be timed in turn on one GPU; each GPU takes the next part that is
# left. merge.py makes one run of them, which needs no GPU. LIMIT is when the last part must have ended, in seconds from the start: what it
# interrupts keeps its rows, and the same command goes on from there. Ours of hopper was one run with LIMIT=900, of hopper_backward
# two with 570. DEVICE=cpu runs small shapes, to show that this file works.
set -uo pipefail
cd "$(dirname "$0")/../.."
folder=$(mkdir -p "$1" && realpath "$1")
shift
sweeps=("$@")
[ $# -gt 0 ] || sweeps=(hopper hopper_backward hopper_deterministic)
dims=(D64 "D128 float16" D256) device=${DEVICE:-cuda}
gpus=$(nvidia-smi -L 2>/dev/null | grep -c "^GPU")
[ "$device" = cuda ] || dims=("D64 float16") gpus=1
[ "$gpus" -gt 0 ] || { echo "no GPU: nvidia-smi -L names none" && exit 4; }
export PYTHONUNBUFFERED=1
python=${PYTHON:-python3}

jobs=() # sweep, mask, tests
for sweep in "${sweeps[@]}"; do
    for dim in "${dims[@]}"; do jobs+=("$sweep full $dim" "$sweep causal $dim"); done
    mkdir -p "$folder/$sweep" # the ceilings are measured once, by the first part
    sed 's/^ceilings = true/ceilings = false/' "experiments/$sweep/sweep.toml" >"$folder/$sweep/sweep.toml"
done
rm -rf "$folder"/taken.*

# FlashAttention-4 and Triton compile for each head dim and mask: all of it at once, into their caches, not between the measurements.
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1
ahead() { # a sweep
    local mode=backward form=() peers=fa4 dim peer mask
    [ "$1" != hopper ] || mode=forward peers="fa4 triton"
    [ "$1" != hopper_deterministic ] || form=(--deterministic)
    for dim in 64 128 256; do
        for peer in $peers; do
            for mask in "" --causal; do
                "$python" cli.py run $peer --mode $mode --batch 1 --heads 2 --seq 512 --dim $dim --dtype bfloat16 $mask "${form[@]}" \
                    --device cuda --output-dir "$(mktemp -d)" >/dev/null 2>&1 &
            done
        done
    done
}
if [ "$device" = cuda ]; then
    for sweep in "${sweeps[@]}"; do ahead "$sweep"; done
    wait
    echo "the peers are compiled: $SECONDS s"
fi

work() { # the parts of one GPU
    local i sweep mask dim tests which spec code start
    for i in "${!jobs[@]}"; do
        mkdir "$folder/taken.$i" 2>/dev/null || continue
        read -r sweep mask tests <<<"${jobs[i]}"
        dim=${tests%% *} which=() spec=$folder/$sweep/sweep.toml start=$SECONDS code=0
        for test in $tests; do [ "$mask" = full ] && which+=(--only "$test") || which+=(--only "$test*causal"); done
        [ "$mask" = full ] && which+=(--skip causal)
        [ "$dim $mask" = "${dims[0]%% *} full" ] && spec=$sweep
        CUDA_VISIBLE_DEVICES=$1 timeout --signal=INT --kill-after=20 $((${LIMIT:-540} - SECONDS)) "$python" cli.py experiment "$spec" \
            "${which[@]}" --device "$device" --resume --no-figures --output-dir "$folder/$dim.$mask" >"$folder/$sweep.$dim.$mask.log" 2>&1 || code=$?
        echo "$sweep $dim $mask on GPU $1: exit code $code, $((SECONDS - start)) s"
        [ $((${LIMIT:-540} - SECONDS)) -gt 5 ] || return
    done
}
for ((gpu = 0; gpu < gpus; ++gpu)); do work "$gpu" & done
wait

echo "python experiments/hopper/merge.py SWEEP FOLDER/*/SWEEP makes a run of record of the parts, on any machine"
grep -L "^PASS\|^FAIL" "$folder"/*.log | sed 's/^/NOT FINISHED: /'
