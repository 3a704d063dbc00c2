#!/usr/bin/env bash
# The runs of record of step 16 on all GPUs of this machine: bash experiments/hopper/record.sh FOLDER [SWEEP...] (default: all three).
# A sweep is divided by head dim, since a test's contenders must be timed in turn on one GPU; each GPU takes a part after the other. The parts
# are merged into experiments/SWEEP, figures are drawn, and FOLDER/SWEEP.tar has all of it. LIMIT is for each part, in seconds; a part
# that it interrupts keeps its rows, and the same command goes on from there. DEVICE=cpu runs small shapes, to show that this file works.
set -uo pipefail
cd "$(dirname "$0")/../.."
folder=$(mkdir -p "$1" && realpath "$1")
shift
sweeps=("${@:-hopper}")
[ $# -gt 0 ] || sweeps=(hopper hopper_backward hopper_deterministic)
device=${DEVICE:-cuda}
parts=(D64 D128 D256)
gpus=$(nvidia-smi -L 2>/dev/null | grep -c .)
[ "$device" = cuda ] || parts=(D64 float16) gpus=1
export PYTHONUNBUFFERED=1
python=${PYTHON:-python3}

jobs=()
for sweep in "${sweeps[@]}"; do
    for part in "${parts[@]}"; do jobs+=("$sweep $part"); done
done
work() { # the parts of one GPU: every $gpus-th
    local i sweep part only
    for ((i = $1; i < ${#jobs[@]}; i += gpus)); do
        read -r sweep part <<<"${jobs[i]}"
        only=(--only "$part")
        [ "$part" = D128 ] && only+=(--only float16)
        start=$SECONDS code=0
        CUDA_VISIBLE_DEVICES=$1 timeout --signal=INT --kill-after=20 "${LIMIT:-560}" "$python" cli.py experiment "$sweep" "${only[@]}" \
            --device "$device" --resume --no-figures --output-dir "$folder/$part" >"$folder/$sweep.$part.log" 2>&1 || code=$?
        echo "$sweep $part on GPU $1: exit code $code, $((SECONDS - start)) s"
    done
}
for ((gpu = 0; gpu < gpus; ++gpu)); do work "$gpu" & done
wait

failed=0
for sweep in "${sweeps[@]}"; do
    done=()
    for part in "${parts[@]}"; do [ -s "$folder/$part/$sweep/results.csv" ] && done+=("$folder/$part/$sweep"); done
    "$python" experiments/hopper/merge.py "$sweep" "${done[@]}" && LIMIT=${REST:-60} RESUME=1 bash experiments/record.sh "$folder" "$sweep" || failed=1
    "$python" experiments/hopper/table.py "experiments/$sweep/results.csv" >"$folder/$sweep.md" || failed=1
done
exit $failed
