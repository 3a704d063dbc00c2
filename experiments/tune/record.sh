#!/usr/bin/env bash
# Makes tune.csv on the GPU of this machine: the tiles of fa2 to mma_qreg_async. bash experiments/tune/record.sh [FOLDER] (default: this one).
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$(mkdir -p "${1:-experiments/tune}" && realpath "${1:-experiments/tune}")
export PYTHONPATH=.
rm -f "$out/tune.csv" "$out/tune.log"
tune() { # a kernel and the values to try, on the shape of experiments/ladder
    echo "\$ fa-cli tune $*" >>"$out/tune.log"
    ${PYTHON:-python3} cli.py tune "$@" --device cuda --output-dir "$out" >>"$out/tune.log" 2>&1
    echo "exit code $?, $SECONDS s" >>"$out/tune.log"
}
float32="--batch 8 --heads 16 --seq 2048 --dim 64"
bfloat16="--batch 4 --heads 16 --seq 4096 --dim 128 --dtype bfloat16"
tune mma_qreg_async --mode backward $bfloat16 --tile BLOCK_K=64,128 --tile BLOCK_Q=32,64,128 --tile BLOCKS=1,2
tune mma_qreg_async --mode backward --batch 4 --heads 32 --seq 4096 --dim 64 --dtype bfloat16 --tile BLOCK_K=64,128 --tile BLOCK_Q=64,128 --tile BLOCKS=1,2,3
tune mma_qreg_async --mode backward --deterministic $bfloat16 --tile DQ_KEYS=32,64,128
tune mma_qreg_async $bfloat16 --tile WARP_ROWS=16,32 --tile WARPS=4,8 --tile BLOCK_K=32,64,128 --tile BLOCKS=1,2,3
tune mma_qreg_async --batch 4 --heads 32 --seq 4096 --dim 64 --dtype bfloat16 --tile WARP_ROWS=16,32 --tile WARPS=4,8 --tile BLOCK_K=64,128 --tile BLOCKS=1,2,3
tune mma_qreg $bfloat16 --tile WARP_ROWS=16,32 --tile STEP_K=16,32,64 --tile BLOCK_K=64,128 --tile BLOCKS=2,3
tune mma_swizzle $bfloat16 --tile WARP_ROWS=16,32 --tile WARPS=4,8 --tile BLOCK_K=32,64 --tile BLOCKS=1,2,3
tune mma $bfloat16 --tile WARP_ROWS=16,32 --tile WARPS=4,8 --tile BLOCK_K=32,64 --tile BLOCKS=1,2
tune wmma_row_block $bfloat16
tune block_wmma $bfloat16
tune warp_wmma $bfloat16
tune fa2 $float32 --tile BLOCK_Q=32,64,128 --tile BLOCK_K=32,64,128 --tile LANES=8,16
cat "$out/tune.log"
