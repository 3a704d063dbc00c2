#!/usr/bin/env bash
# Makes this folder's record on the GPU of this machine: bash experiments/verify/record.sh [FOLDER] (default: this one).
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$(realpath "${1:-experiments/verify}")
export PYTHONPATH=. PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
cli="$python cli.py"
failed=0

expected=0
step() { # a log and a command: shown, run, timed, its exit code noted
    local log=$out/$1
    shift
    echo "\$ $*" | sed 's/python[^ ]* cli.py/fa-cli/' >>"$log"
    local start=$SECONDS code=0
    "$@" >>"$log" 2>&1 || code=$?
    [ $code = $expected ] || failed=1
    echo "exit code $code (expected $expected), $((SECONDS - start)) s" | tee -a "$log"
    echo >>"$log"
}

rm -f "$out"/*.log
step verify.log $cli verify --matrix full --device cuda -v
for shape in "--batch 2 --heads 8 --seq 512" "--batch 8 --heads 16 --seq 2048"; do
    for dtype in float32 bfloat16; do
        step run.log $cli run --compute fa2 --mode both $shape --dim 64 --dtype $dtype --device cuda --output-dir "$(mktemp -d)"
    done
done
for tool in memcheck racecheck initcheck synccheck; do
    FA_CLI_NO_POOL=1 step sanitizer.log compute-sanitizer --tool $tool --error-exitcode 99 --target-processes all $python experiments/verify/sanitize.py
done
expected=99 # a planted fault: the tools are awake
for tool in memcheck racecheck; do
    FA_CLI_NO_POOL=1 step sanitizer.log compute-sanitizer --tool $tool --print-limit 2 --error-exitcode 99 --target-processes all \
        $python experiments/verify/sanitize.py planted
done
$python - "$out" <<'PYTHON'
import sys
from pathlib import Path
from harness import backends, environment
facts = environment.environment(**backends.pick("cuda").environment())
environment.write_env(Path(sys.argv[1]) / "env.json", facts | {"command": "bash experiments/verify/record.sh"})
PYTHON
tail -n 12 "$out/verify.log"
grep -E "ERROR SUMMARY|RACECHECK SUMMARY|exit code" "$out/sanitizer.log"
exit $failed
