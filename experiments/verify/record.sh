#!/usr/bin/env bash
# Makes this folder's record on the GPU of this machine: bash experiments/verify/record.sh [FOLDER] (default: this one).
# Some ten minutes on an H200 with 16 cores; PARTS="verify fuzz" makes a part of it (verify, fuzz, repeat, run, sanitizer). A case that does not
# fit its memory is left out, and verify.log says so. The fuzz runs in FUZZ_PROCESSES processes (4), each at most FUZZ_SECONDS (0: no limit).
# KERNELS=mma_qreg_async,hopper restricts verify, fuzz and sanitizer to some.
# While a part is made, part.*.log have what is done so far; they stay where this script is ended.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$(mkdir -p "${1:-experiments/verify}" && realpath "${1:-experiments/verify}")
export PYTHONPATH=. PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
cli="$python cli.py"
commit=${FA_CLI_COMMIT:-$(git rev-parse --short HEAD)}
failed=0
parts=${PARTS:-verify fuzz repeat run sanitizer}
want() { [[ " $parts " == *" $1 "* ]]; }

step() { # what to expect, a log and a command: run beside the others, its command, output and exit code in the log
    local expected=$1 log=$out/$2
    shift 2
    {
        echo "\$ $*" | sed 's/.*python[^ ]* cli.py/fa-cli/'
        echo "commit $commit"
        local start=$SECONDS code=0
        "$@" 2>&1 || code=$?
        echo "exit code $code (expected $expected), $((SECONDS - start)) s"
        echo
    } >"$log"
    [ $code = $expected ]
}
join() { # waits for the steps under way and puts their logs one behind the other
    local job
    for job in $(jobs -p); do wait "$job" || failed=1; done
    cat "$out"/part.*.log | sed "s#$PWD/##g" >"$out/$1"
    rm -f "$out"/part.*.log
}

if want verify; then
    while read -r kernels mode form; do # those with a backward pass: a process a pass
        [ -z "${KERNELS:-}" ] || [[ " ${KERNELS//,/ } " == *" $kernels "* ]] || continue
        step 0 "part.$kernels.${mode:-forward}${form:+.deterministic}.log" \
            $cli verify --compute "$kernels" ${mode:+--mode $mode} ${form:+--$form} --matrix full --device cuda -v &
    done <<END
$(printf '%s\n' 01-02 03-04 05-06 08-09 10-11 12-14 16-18 19-21 split_hopper)
$(printf '%s\n' {naive,fa2,mma_qreg_async,split,hopper}" "{forward,backward} hopper_{cluster,wide}" backward" \
    {mma_qreg_async,split,hopper}" backward deterministic")
END
    join verify.log
fi
if want fuzz; then # 5,000 random cases in a few processes of one seed each, every case on every kernel that takes it
    processes=${FUZZ_PROCESSES:-4}
    set -m # without job control bash has jobs ignore SIGINT, at which a process prints what it has done so far
    for seed in $(seq "$processes"); do
        step 0 "part.$seed.log" timeout --preserve-status -s INT "${FUZZ_SECONDS:-0}" \
            $cli verify ${KERNELS:+--compute $KERNELS} --fuzz $((5000 / processes)) --seed "$seed" --device cuda &
    done
    join fuzz.log
    set +m
fi
if want repeat; then # 250 launches of the same inputs give the same bits
    for dtype in "" _float16 _bfloat16; do
        step 0 "part.x$dtype.log" $cli verify --case "B60_H4_S257_D64$dtype,causal" --repeat 250 --deterministic --device cuda &
    done
    join repeat.log
fi
if want run; then
    for shape in "--batch 2 --heads 8 --seq 512" "--batch 8 --heads 16 --seq 2048"; do
        for dtype in float32 bfloat16; do
            step 0 "part.${shape##* }.$dtype.log" $cli run --compute fa2 --mode both $shape --dim 64 --dtype $dtype --device cuda --output-dir "$(mktemp -d)" || failed=1
        done
    done
    join run.log
fi
if want sanitizer; then
    export FA_CLI_NO_POOL=1 OMP_NUM_THREADS=2 # six processes, each with the reference on the CPU
    for tool in memcheck racecheck initcheck synccheck; do
        step 0 "part.1.$tool.log" compute-sanitizer --tool $tool --error-exitcode 99 --target-processes all \
            $python experiments/verify/sanitize.py $tool ${KERNELS:+${KERNELS//,/ }} &
    done
    for tool in memcheck racecheck; do # a planted fault: the tools are awake
        step 99 "part.2.$tool.log" compute-sanitizer --tool $tool --print-limit 2 --error-exitcode 99 --target-processes all \
            $python experiments/verify/sanitize.py planted $tool &
    done
    join sanitizer.log
    unset FA_CLI_NO_POOL OMP_NUM_THREADS
fi
$python - "$out" <<'PYTHON'
import sys
from pathlib import Path
from harness import backends
from harness.files import environment
facts = environment.environment(**backends.pick("cuda").environment())
environment.write_env(Path(sys.argv[1]) / "env.json", facts | {"command": "bash experiments/verify/record.sh"})
PYTHON
grep -hE "^PASS|^FAIL|^note: fuzz.* after|exit code" "$out"/{verify,fuzz,repeat}.log
grep -E "ERROR SUMMARY|RACECHECK SUMMARY|exit code" "$out/sanitizer.log"
exit $failed
