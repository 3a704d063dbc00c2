#!/usr/bin/env bash
# Makes tune.csv on the GPU of this machine: the tiles of steps 07 to 14. bash experiments/tune/record.sh [FOLDER] (default: this one).
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$(realpath "${1:-experiments/tune}")
export PYTHONPATH=.
rm -f "$out/tune.csv" "$out/tune.log"
tune() { # a kernel and the values to try, on the shape of experiments/ladder
    echo "\$ fa-cli tune $*" >>"$out/tune.log"
    ${PYTHON:-python3} cli.py tune "$@" --device cuda --output-dir "$out" >>"$out/tune.log" 2>&1
    echo "exit code $?, $SECONDS s" >>"$out/tune.log"
}
float32="--batch 8 --heads 16 --seq 2048 --dim 64"
bfloat16="--batch 4 --heads 16 --seq 4096 --dim 128 --dtype bfloat16"
tune 14 --mode backward $bfloat16 --tile BLOCK_K=64,128 --tile BLOCK_Q=32,64,128 --tile BLOCKS=1,2
tune 14 --mode backward --batch 4 --heads 32 --seq 4096 --dim 64 --dtype bfloat16 --tile BLOCK_K=64,128 --tile BLOCK_Q=64,128 --tile BLOCKS=1,2,3
tune 14 --mode backward --deterministic $bfloat16 --tile DQ_KEYS=32,64,128
tune 14 $bfloat16 --tile WARP_ROWS=16,32 --tile WARPS=4,8 --tile BLOCK_K=32,64,128 --tile BLOCKS=1,2,3
tune 14 --batch 4 --heads 32 --seq 4096 --dim 64 --dtype bfloat16 --tile WARP_ROWS=16,32 --tile WARPS=4,8 --tile BLOCK_K=64,128 --tile BLOCKS=1,2,3
tune 13 $bfloat16 --tile WARP_ROWS=16,32 --tile STEP_K=16,32,64 --tile BLOCK_K=64,128 --tile BLOCKS=2,3
tune 12 $bfloat16 --tile WARP_ROWS=16,32 --tile WARPS=4,8 --tile BLOCK_K=32,64 --tile BLOCKS=1,2,3
tune 11 $bfloat16 --tile WARP_ROWS=16,32 --tile WARPS=4,8 --tile BLOCK_K=32,64 --tile BLOCKS=1,2
tune 10 $bfloat16
tune 09 $bfloat16
tune 08 $bfloat16
tune 07 $float32 --tile BLOCK_Q=32,64,128 --tile BLOCK_K=32,64,128 --tile LANES=8,16
cat "$out/tune.log"
