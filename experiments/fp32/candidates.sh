#!/usr/bin/env bash
# What steps 07, 15 and 17 may gain from other tile values, in turns with what stands, judged: bash experiments/fp32/candidates.sh FOLDER.
# First step 17, which has not run on a GPU, is verified. A variant is the kernel's file with other values in its [tile]; FOLDER keeps them
# beside the rows. NOTES.md has the predictions. Two to three minutes on one H200. DEVICE=cpu runs small shapes, to show that it works.
set -uo pipefail
cd "$(dirname "$0")/../.."
folder=$(mkdir -p "$1/variants" && realpath "$1")
device=${DEVICE:-cuda} python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1
code=0

variant() { # a kernel's file, the variant's name, NAME=VALUE...
    local from=kernels_cu/$1 to pass=${1##*_} edits=() each
    to=$folder/variants/$2_$pass
    for each in "${@:3}"; do
        grep -q "^// ${each%%=*} = " "$from" || { echo "$from has no tile ${each%%=*}" && exit 2; }
        edits+=(-e "s|^// ${each%%=*} = .*|// ${each%%=*} = ${each#*=}|")
    done
    sed "${edits[@]}" "$from" >"$to"
}
hopper=17_split_hopper_forward.cu fa2=07_fa2_forward.cu fa2_back=07_fa2_backward.cu
variant $hopper turns_off PINGPONG=0
variant $hopper pin_off PIN=0
variant $hopper keys_80 BLOCK_K=80 STAGES=4
variant $hopper keys_96 BLOCK_K=96 STAGES=3
variant $hopper three CONSUMERS=3 BLOCK_K=96 STAGES=6
variant $hopper section_16 SECTION=16
variant $hopper section_64 SECTION=64
variant $fa2 two_blocks BLOCK_Q=64
variant $fa2 two_blocks_unrolled BLOCK_Q=64 PIECE=64 UNROLL=8
variant $fa2 unrolled PIECE=HEAD_DIM UNROLL=8
variant $fa2 lanes_16 LANES=16 BLOCK_Q=32 BLOCK_K=64
variant $fa2 lanes_32 LANES=32 BLOCK_Q=32 BLOCK_K=64 PIECE=64 UNROLL=8
variant $fa2 lanes_32_keys_32 LANES=32 BLOCK_Q=32 BLOCK_K=32 PIECE=64 UNROLL=8
variant 15_split_forward.cu not_fused FUSED=0
variant $fa2_back lanes_16 LANES=16 RESIDENT=32 STREAMED=64
variant $fa2_back lanes_32 LANES=32 RESIDENT=32 STREAMED=64
variant 15_split_backward.cu not_direct DIRECT=0
sed -i 's|^// PIECE = HEAD_DIM|// PIECE = "HEAD_DIM"|' "$folder/variants/unrolled_forward.cu"

shape() { # test, its keys but for the kernels, kernels: a name, or a variant as @name
    local kernels=() each
    for each in "${@:3}"; do
        [ "${each#@}" = "$each" ] || each=$folder/variants/${each#@}_$pass.cu
        kernels+=("\"$each\",")
    done
    echo "    { test = \"$1\", $2, kernels = [${kernels[*]}] },"
}
small() { # on a CPU another shape
    [ "$device" = cuda ] && echo "$1, dim = 64" || echo "batch = 1, heads = 1, seq = ${2:-65}, dim = 64"
}
large() { # the same at any head dim
    [ "$device" = cuda ] && echo "$1, dim = $2" || echo "batch = 1, heads = 1, seq = 160, dim = $2"
}
forward() {
    local pass=forward
    shape D128 "$(large "batch = 2, heads = 16, seq = 4096" 128), peers = []" split_hopper @turns_off @pin_off @keys_80 @keys_96 split
    shape D64 "$(large "batch = 8, heads = 16, seq = 2048" 64), peers = []" split_hopper @turns_off @three
    shape long-causal "$(large "batch = 1, heads = 16, seq = 16384" 128), causal = true, peers = []" split_hopper @section_16 @section_64
    shape fa2-D128 "$(large "batch = 2, heads = 16, seq = 4096" 128)" fa2 @two_blocks @two_blocks_unrolled @unrolled
    shape fa2-D64 "$(large "batch = 8, heads = 16, seq = 2048" 64), peers = []" fa2 @unrolled
    shape Edge-SmallSeq "$(small "batch = 8, heads = 16, seq = 32" 32)" split @not_fused fa2 @lanes_16 @lanes_32 @lanes_32_keys_32
    shape Small-1 "$(small "batch = 1, heads = 1, seq = 128")" split @not_fused naive fa2 @lanes_16 @lanes_32
    shape Small-3 "$(small "batch = 2, heads = 8, seq = 256")" naive fa2 @lanes_16 @lanes_32
    shape Medium-1 "$(small "batch = 2, heads = 8, seq = 512")" fa2 @lanes_16 @lanes_32
    shape Edge-NonPowerOf2 "$(small "batch = 8, heads = 16, seq = 100")" split @not_fused fa2 @lanes_16 @lanes_32
    shape Medium-2 "$(small "batch = 4, heads = 8, seq = 512")" fa2 @lanes_16 @lanes_32
}
backward() {
    local pass=backward
    shape Edge-SmallSeq "$(small "batch = 8, heads = 16, seq = 32" 32)" split @not_direct fa2 @lanes_32
    shape Small-1 "$(small "batch = 1, heads = 1, seq = 128")" split @not_direct naive fa2 @lanes_16 @lanes_32
    shape Small-2 "$(small "batch = 2, heads = 4, seq = 256")" naive fa2 @lanes_16 @lanes_32
}
for pass in forward backward; do
    peers='"torch-efficient"'
    [ "$pass" = forward ] || peers='"torch-efficient", "torch-math"'
    [ "$device" = cuda ] || peers='"numpy"'
    {
        printf 'title = "Candidates, %s"\nmode = "%s"\ncold = false\nenergy = "D128"\npeers = [%s]\nshapes = [\n' "$pass" "$pass" "$peers"
        "$pass"
        echo "]"
    } >"$folder/candidates_$pass.toml"
done

step() { # seconds, a name for its log, a command
    local start=$SECONDS exit=0
    timeout --signal=INT --kill-after=20 "$1" "$python" cli.py "${@:3}" --device "$device" >"$folder/$2.log" 2>&1 || exit=$?
    echo "$2: exit code $exit, $((SECONDS - start)) s"
    [ $exit = 0 ] || code=$exit
}
if [ "$device" = cuda ]; then step 90 verify_17 verify 17; else step 300 verify_17 verify 17 --case 1; fi
for pass in forward backward; do
    step "${LIMIT:-150}" candidates_$pass experiment "$folder/candidates_$pass.toml" --full --no-figures --output-dir "$folder"
done
exit $code
