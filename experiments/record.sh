#!/usr/bin/env bash
# Records sweeps on the GPU of this machine, one after the other: bash experiments/record.sh FOLDER SWEEP...
# Each has LIMIT seconds (default 420). One that takes longer is interrupted: its finished rows are kept, and the next one follows.
# FOLDER/SWEEP.tar has what `fa-cli experiment SWEEP --record` wrote: results.csv, samples.jsonl, env.json, summary.md and figures;
# `tar -xf FOLDER/SWEEP.tar` in a checkout puts them where they are committed. FOLDER/SWEEP.log has what it printed.
# RESUME=1 goes on with what is in experiments/SWEEP. The exit code is 1 if a sweep failed.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:?"usage: bash experiments/record.sh FOLDER SWEEP..."}
shift
mkdir -p "$folder"
folder=$(realpath "$folder")
export PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
failed=0

for sweep in "$@"; do
    start=$SECONDS code=0
    began=$(mktemp)
    log=$folder/$sweep.log
    timeout --signal=INT --kill-after=20 "${LIMIT:-420}" "$python" cli.py experiment "$sweep" --record ${RESUME:+--resume} >"$log" 2>&1 || code=$?
    echo "exit code $code, $((SECONDS - start)) s" >>"$log"
    [ $code = 0 ] || failed=1
    find "experiments/$sweep" plots -newer "$began" -type f ! -name '.*' | tar -cf "$folder/$sweep.tar" -T -
    rm -f "$began"
    echo "$sweep: $(tail -n 1 "$log"), $(grep -c . "experiments/$sweep/results.csv" 2>/dev/null || echo 0) lines of results.csv"
done
exit $failed
