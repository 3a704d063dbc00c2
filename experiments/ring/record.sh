#!/usr/bin/env bash
# The ring on the N GPUs of this machine: bash experiments/ring/record.sh [FOLDER] [N] [HALF] (default: this folder, 2, first). PYTHON names the
# Python. Each half takes about seven minutes, at most nine (LIMIT=540 seconds); the most important comes first.
# first: doctor --ring, the sweep by NCCL beside torch's context_parallel (measure.py), a ring by NCCL, errors against ranks (errors.py), a killed
#   and a stopped rank, where a message's time goes (messages.py), rings of other types and options. Eight files in FOLDER.
# second: ring_attention by its forms beside context_parallel by its rotations and, where it is installed, yunchang's Ulysses (forms.py), and the
#   sweep by peer copies (FOLDER/peer).
# A part that fails or takes too long does not stop the others. Everything that is printed is in checks.log (second.log), each command with its
# exit code. DEVICE=cpu runs all but messages.py, peer copies and context_parallel on processes and small shapes, to show that this file works.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$(realpath "${1:-experiments/ring}")
ranks=${2:-2}
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
export PYTHONUNBUFFERED=1
mkdir -p "$out"
facts=$(mktemp)
trap '[ -s "$facts" ] && cp "$facts" "$out/env.json"' EXIT # of the sweep, also where this is cut off: the other parts write their own
half=${3:-first}
[ "$half" = second ] || rm -f "$out"/ring.jsonl "$out"/ring.csv "$out"/ring_steps.csv "$out"/ring_timeline.csv

part() { # exit code and words to expect, seconds it may take, and a command
    local expected=$1 words=$2 limit=$3 code=0 start=$SECONDS left=$((${LIMIT:-540} - SECONDS)) said
    shift 3
    [ $limit -lt $left ] || limit=$left
    echo
    echo "\$ $*" | sed "s#$python cli.py#fa-cli#; s#$python #python #; s#$out#FOLDER#g"
    [ $limit -gt 5 ] || { echo "NOT AS EXPECTED: no time was left"; return; }
    said=$(mktemp)
    timeout -k 10 $limit "$@" 2>&1 | tee "$said" || code=$?
    echo "exit code $code (expected $expected), $((SECONDS - start)) s"
    [ $code = "$expected" ] || echo "NOT AS EXPECTED: exit code"
    grep -qE "$words" "$said" || echo "NOT AS EXPECTED: it does not say '$words'"
    rm "$said"
}
ring() { # words to expect, and the options of a ring that ends well
    local words=$1
    shift
    part 0 "$words" 60 $python cli.py ring "$@"
}
interrupted() { # a signal for rank 1 and the words to expect: the run must end with exit code 4 and name the rank
    local folder
    folder=$(mktemp -d)
    (
        for _ in $(seq 300); do
            sleep 0.1
            if pid=$(cat "$folder"/fa_cli_ring_*/pid.1 2>/dev/null); then break; fi
        done
        sleep "$delay" # inputs made, the kernel compiled: the runs last some 12 seconds (on the CPU more)
        kill "-$1" "$pid"
    ) &
    TMPDIR=$folder part 4 "$2" 90 $python cli.py ring "${long[@]}" -q
    wait
    rm -rf "$folder"
}
nccl=(env FA_CLI_RING_TRANSPORT=nccl $python cli.py)
if [ "$device" = cpu ]; then
    start=(mpiexec -n "$ranks" "$python" experiments/ring/measure.py --device cpu --no-torch)
    started=(--gpus "$ranks" --device cpu) delay=2 dead="(rank 1|one of the ranks ([0-9]+, )*1(, [0-9]+)*) died"
    long=("${started[@]}" --compute naive --seq 3000 --dim 64 --mode both --timeout 10)
    tensor=(--compute auto --heads 2 --dim 64) large=(--compute auto --heads 2 --seq 320 --dim 64) S=512
    silent="did not answer" errors="1 2" copies="once round" compared='"what": "verdict"' odd=203
    forms=forms_cpu.jsonl
else
    start=("$python" -m torch.distributed.run --nproc-per-node "$ranks" experiments/ring/measure.py)
    started=(--gpus "$ranks") delay=12 dead="rank 1 died: SIGKILL"
    long=("${started[@]}" --compute fa2 --heads $((8 * ranks)) --seq 131072 --dim 128 --timeout 6)
    tensor=(--compute auto --heads 8 --dim 128) large=(--compute auto --heads 16 --seq 32768 --dim 128) S=4096
    silent="rank 1 did not answer" errors="1 $ranks" copies="by peer copies" compared='"what": "context_parallel"' odd=1003
    forms=forms.jsonl
fi

if [ "$half" = second ]; then
    {
        rm -f "$out/$forms" "$out/peer/ring.jsonl" # lines are added
        part 0 '"passed": true' 400 "$python" -m torch.distributed.run --nproc-per-node "$ranks" experiments/ring/forms.py \
            --device "$device" --output "$out" --last-start 250
        mkdir -p "$out/peer"
        [ "$device" = cpu ] || part 0 '"what": "verdict".*"transport": "peer copies"' 120 "${start[@]}" --output "$out/peer" \
            --brief --no-torch --transport peer --only 32k-causal 32k 128k-causal 128k
    } 2>&1 | tee "$out/second.log"
    echo "$SECONDS s"
    ! grep "NOT AS EXPECTED" "$out/second.log"
    exit
fi

{
    [ "$device" = cpu ] || nvidia-smi topo -m
    part 0 "$copies" 60 $python cli.py doctor --ring --gpus "$ranks" --device "$device"
    part 0 "$compared" 270 "${start[@]}" --transport nccl --output "$out" --last-start 185
    cp "$out/env.json" "$facts"
    if [ "$device" != cpu ]; then
        part 0 "OK +peer copies" 60 "${nccl[@]}" doctor --ring --gpus "$ranks"
        part 0 "^PASS" 60 "${nccl[@]}" ring "${started[@]}" --mode both "${tensor[@]}" --seq $S --dtype bfloat16 --causal
    fi
    part 0 bfloat16 120 $python experiments/ring/errors.py --device "$device" --ranks $errors --output "$out/errors.csv"
    interrupted KILL "$dead"
    interrupted STOP "$silent"
    [ "$device" = cpu ] || part 0 '^peer exchange +[0-9]' 120 $python experiments/ring/messages.py --gpus "$ranks" --output "$out/messages.jsonl"
    ring "^PASS" "${started[@]}" --mode both --compute fa2 --heads 4 --kv-heads 2 --seq "$odd" --causal --output-dir "$out"
    ring "^PASS" "${started[@]}" --mode both "${tensor[@]}" --seq $((S - 95)) --dtype float16 --no-overlap --output-dir "$out"
    ring '"repeated": true' "${started[@]}" --mode both "${tensor[@]}" --seq $S --dtype bfloat16 --causal --deterministic --json
    ring "simulated" --simulate "$ranks" --device "$device" --mode both "${large[@]}" --dtype bfloat16 --causal --output-dir "$out"
} 2>&1 | tee "$out/checks.log"
echo "$SECONDS s"
! grep "NOT AS EXPECTED" "$out/checks.log"
