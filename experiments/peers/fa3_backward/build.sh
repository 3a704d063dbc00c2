#!/usr/bin/env bash
# Builds FlashAttention-3's backward pass, which is in no wheel, for the peer fa3-source: bash experiments/peers/fa3_backward/build.sh FOLDER
# [FLASH_ATTENTION CUTLASS]. They are checkouts at the commits below, without which they are cloned into FOLDER. It writes
# FOLDER/fa3_backward.so and its compressed copy. No GPU is needed, but nvcc (13.0 here) and 3 GB of memory; a file takes about two minutes on one
# core, and those that are there already are kept. PARTS="128_bf16 64_fp16_softcap" builds these files only.
# The flags are those of FlashAttention-3's setup.py without -lineinfo; lengths that differ within a batch (varlen) are left out.
set -euo pipefail
export LC_ALL=C
folder=${1:?"usage: bash experiments/peers/fa3_backward/build.sh FOLDER [FLASH_ATTENTION CUTLASS]"}
flash=${2:-$folder/flash-attention} cutlass=${3:-$folder/cutlass}
flash_commit=0251105a2fb19d2957484b7f023cd8c115286ced   # 2026-08-15
cutlass_commit=7127592069c2fe01b041e174ba4345ef9b279671 # its submodule: CUTLASS 4.3.4
flash_digest=04d84a1dab723006f14cffe7bf663952d68b30b3c8b967aa337dedad07d08fc8
cutlass_digest=46a575aba60abcf4f88763794bacb99c01ac51f6f535b2e6f8d275ad5d135766
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$folder"

clone() { # a repository, a commit and a folder
    [ -d "$3" ] && return
    git init -q "$3"
    git -C "$3" fetch -q --depth 1 "https://github.com/$1" "$2"
    git -C "$3" checkout -q FETCH_HEAD
}
same() { # a text that names a source, its digest and the digest that it should have
    [ "$2" = "$3" ] || { echo "$1: digest $2, not $3" >&2; exit 3; }
}
clone Dao-AILab/flash-attention $flash_commit "$flash"
clone NVIDIA/cutlass $cutlass_commit "$cutlass"
same "$flash/hopper is not that of $flash_commit" "$(cat "$flash"/hopper/{*.h,*.hpp} | sha256sum | cut -d' ' -f1)" $flash_digest
digest=$(cd "$cutlass/include" && find cute cutlass -type f | sort | xargs cat | sha256sum | cut -d' ' -f1)
same "$cutlass/include is not that of $cutlass_commit" "$digest" $cutlass_digest

nvcc=${NVCC:-nvcc}
release=$("$nvcc" --version | sed -n 's/.*V\([0-9.]*\)$/\1/p')
flags=(-std=c++17 -O3 --use_fast_math -gencode "arch=compute_90a,code=sm_90a" -Xcompiler -fPIC
    --expt-relaxed-constexpr --expt-extended-lambda -DNDEBUG -DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED -DCUTLASS_ENABLE_GDC_FOR_SM90
    -DCUTLASS_DEBUG_TRACE_LEVEL=0 -DFLASHATTENTION_DISABLE_VARLEN -I"$flash/hopper" -I"$cutlass/include")

: >"$folder/built.inc"
parts=({64,96,128,192,256}_{bf16,fp16}{,_softcap}) objects=()
[ -z "${PARTS:-}" ] || read -ra parts <<<"$PARTS"
for part in "${parts[@]}"; do
    object=$folder/$part.o start=$SECONDS
    if [ ! -s "$object" ]; then
        "$nvcc" "${flags[@]}" --resource-usage -c -o "$object.part" "$flash/hopper/instantiations/flash_bwd_hdim${part}_sm90.cu" >"$folder/$part.log" 2>&1 ||
            { tail -n 5 "$folder/$part.log" >&2; exit 5; }
        mv "$object.part" "$object"
        echo "$part: $((SECONDS - start)) s, $(stat -c %s "$object") bytes, $(grep -c ' [1-9][0-9]* bytes spill stores' "$folder/$part.log" || true) kernels spill"
    fi
    IFS=_ read -r dim type softcap <<<"$part"
    case $type in bf16) type=cutlass::bfloat16_t ;; fp16) type=cutlass::half_t ;; esac
    echo "BUILT($type, $dim, $([ "$softcap" ] && echo true || echo false))" >>"$folder/built.inc"
    objects+=("$object")
done

source="flash-attention ${flash_commit:0:8}, CUTLASS ${cutlass_commit:0:8}, nvcc $release"
"$nvcc" "${flags[@]}" -I"$folder" -DFA3_SOURCE="\"$source\"" -c -o "$folder/fa3_backward.o" "$here/fa3_backward.cu"
"$nvcc" -shared -cudart static -Xlinker -s -o "$folder/fa3_backward.so" "$folder/fa3_backward.o" "${objects[@]}"
xz -kf -T1 "$folder/fa3_backward.so"
sha256sum "$folder"/fa3_backward.so{,.xz}
echo "$source: ${#objects[@]} files in $SECONDS s, $(stat -c %s "$folder/fa3_backward.so") bytes, $(stat -c %s "$folder/fa3_backward.so.xz") by xz"
echo "export FA_CLI_FA3_BACKWARD=$(realpath "$folder")/fa3_backward.so"
