#!/usr/bin/env bash
# The ring on the N GPUs of this machine, in under ten minutes: bash experiments/ring/record.sh [FOLDER] [N] (default: this one, 2).
# Right at small sizes, a killed and a stopped rank, then the sweep beside torch's context_parallel (measure.py).
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$(realpath "${1:-experiments/ring}")
gpus=${2:-2}
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1
failed=0

step() { # what to expect, and a command: its output and exit code in the log
    local expected=$1 code=0 start=$SECONDS
    shift
    echo "\$ $*" | sed 's/python[^ ]* cli.py/fa-cli/'
    "$@" 2>&1 || code=$?
    echo "exit code $code (expected $expected), $((SECONDS - start)) s"
    [ $code = "$expected" ] || failed=1
}
interrupted() { # a signal for rank 1 while the ring runs: the run must end with exit code 4 and name the rank
    local folder
    folder=$(mktemp -d)
    (
        for _ in $(seq 600); do
            sleep 0.1
            if pid=$(cat "$folder"/fa_cli_ring_*/pid.1 2>/dev/null); then break; fi
        done
        sleep 15  # inputs made, the kernel compiled: the steps take some seconds
        kill "-$1" "$pid"
    ) &
    TMPDIR=$folder step 4 $python cli.py ring --gpus "$gpus" --compute fa2 --heads 16 --seq 131072 --dim 128 --timeout 10 -q
    wait
}

{
    nvidia-smi topo -m
    step 0 $python cli.py doctor --ring --gpus "$gpus"
    step 0 $python cli.py ring --gpus "$gpus" --mode both --compute fa2 --heads 4 --kv-heads 2 --seq 1003 --causal --output-dir "$out"
    tensor="--compute mma_qreg_async --heads 8 --dim 128"
    step 0 $python cli.py ring --gpus "$gpus" --mode both $tensor --seq 4096 --dtype bfloat16 --causal --output-dir "$out"
    step 0 $python cli.py ring --gpus "$gpus" --mode both $tensor --seq 4001 --dtype float16 --no-overlap --output-dir "$out"
    step 0 $python cli.py ring --gpus "$gpus" --mode both $tensor --seq 4096 --dtype bfloat16 --causal --deterministic -q
    interrupted KILL
    interrupted STOP
} 2>&1 | tee "$out/checks.log"
rm -f "$out/ring.jsonl"
timeout 420 $python -m torch.distributed.run --nproc-per-node "$gpus" experiments/ring/measure.py --output "$out/ring.jsonl" 2>"$out/measure.log" || failed=1
tail -5 "$out/measure.log"
grep -q "(expected" "$out/checks.log" || failed=1
if grep "^exit code" "$out/checks.log" | grep -vE "exit code ([0-9]+) \(expected \1\)"; then failed=1; fi
exit $failed
