#!/usr/bin/env bash
# The operator's record on the GPU of this machine: bash experiments/torch_op/record.sh [FOLDER] (default: where each file is committed).
# In at most eight minutes: its tests, the slow ones too, beside a training with torch's attention and one with ours; then, alone, what a
# call costs on the host and what a training step costs. Each part has a time limit; one that fails does not stop the others.
set -uo pipefail
cd "$(dirname "$0")/../.."
own=experiments/torch_op training=experiments/training launch=experiments/launch plots=plots
if [ $# -gt 0 ]; then
    mkdir -p "$1"
    own=$(realpath "$1") training=$own launch=$own plots=$own
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
failed=0

part() { # seconds, a log and a command: its command, output and exit code in the log
    local limit=$1 log=$2 start=$SECONDS code=0
    shift 2
    echo "\$ $*" | sed 's/python[^ ]* cli.py/fa-cli/' >"$log"
    timeout --kill-after=5 "$limit" "$@" >>"$log" 2>&1 || code=$?
    echo "exit code $code, $((SECONDS - start)) s" >>"$log"
    [ $code = 0 ]
}

many=()
$python -c "import xdist" 2>/dev/null && many=(-n 6 -p no:benchmark) || many=(-p no:xdist)
tests="$python -m pytest -q -m= -k cuda -p no:cacheprovider --tb=short --durations=5"
part 230 "$work/1.log" $tests "${many[@]}" tests/torch/test_torch_op.py tests/torch/test_torch_op_inside.py tests/torch/test_training.py &
ours=$!
part 230 "$work/2.log" $tests "${many[@]}" tests/torch/test_torch_op_as_theirs.py &
theirs=$!
part 230 "$work/3.log" $python experiments/training/train.py --device cuda --output-dir "$work" &
losses=$!
wait $ours || failed=1
wait $theirs || failed=1
wait $losses || failed=1
part 70 "$work/overhead.txt" $python experiments/launch/overhead.py --device cuda || failed=1
part 150 "$work/4.log" $python cli.py experiment training --device cuda --output-dir "$work/speed" || failed=1

cat "$work"/[1-4].log | sed -e "s#$PWD/##g" -e "s#$work#FOLDER#g" >"$own/suite.log"
sed -e '1d;$d' "$work/overhead.txt" >"$launch/overhead.txt"  # as the command prints it
for file in "$work"/loss.csv "$work"/loss_env.json "$work"/speed/training/speed.csv "$work"/speed/training/env.json; do
    if [ -e "$file" ]; then cp "$file" "$training"; fi
done
for file in "$work"/training_loss.png "$work"/speed/training/training_speed.png; do
    if [ -e "$file" ]; then cp "$file" "$plots"; fi
done
grep -hE "passed|failed|^FAILED|^ERROR|exit code|after .* steps" "$own/suite.log"
grep -A3 -E "^ *attention|above the empty" "$launch/overhead.txt" | grep -E "attention|above"
cat "$training/speed.csv"
exit $failed
