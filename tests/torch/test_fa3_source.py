"""The peer fa3-source on a CPU: its interface compiled around a stand-in of FlashAttention-3 that computes by the formulas of a backward pass."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness import peers
from harness.backends.host.build import compiler
from harness.check import baselines, budget, reference
from harness.dataset import generate as dataset
from harness.fault import EnvironmentFault, KernelFault, UsageFault
from harness.peers import base, fa3_source
from harness.problem import Problem

torch = pytest.importorskip("torch")

INTERFACE = Path(__file__).resolve().parents[2] / "experiments" / "peers" / "fa3_backward"
PEER = peers.find("fa3-source")
assert isinstance(PEER, fa3_source.Fa3Source)
STREAM = 0x77

#: The headers that the interface is compiled with, in place of CUDA's, CUTLASS's and FlashAttention-3's.
STAND_IN = {
    "cuda_runtime.h": """
#include <cstring>
using cudaError_t = int;
using cudaStream_t = void*;
enum { cudaSuccess, cudaDevAttrComputeCapabilityMajor, cudaDevAttrMultiProcessorCount };
extern "C" { inline int stand_in_error = 0, stand_in_device = -1, stand_in_major = 9; }
inline const char* cudaGetErrorString(int) { return "CUDA driver version is insufficient for CUDA runtime version"; }
inline int cudaSetDevice(int device) { stand_in_device = device; return stand_in_error; }
inline int cudaDeviceGetAttribute(int* value, int which, int) {
    *value = which == cudaDevAttrComputeCapabilityMajor ? stand_in_major : 132;
    return 0;
}
inline int cudaPeekAtLastError() { return 0; }
inline int cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) { std::memset(to, value, bytes); return 0; }
""",
    "cutlass/numeric_types.h": """
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
namespace cutlass {
namespace platform { using std::is_same; }
struct half_t {
    _Float16 x;
    operator float() const { return x; }
    half_t& operator=(float y) { x = y; return *this; }
};
struct bfloat16_t {
    uint16_t bits;
    operator float() const { const uint32_t y = uint32_t(bits) << 16; float z; std::memcpy(&z, &y, 4); return z; }
    bfloat16_t& operator=(float y) {
        uint32_t z;
        std::memcpy(&z, &y, 4);
        bits = (z + 0x7FFF + (z >> 16 & 1)) >> 16;
        return *this;
    }
};
}
""",
    "flash.h": """
#include <cassert>
#include <cmath>
#include <vector>
struct Flash_bwd_params {
    void *q_ptr, *k_ptr, *v_ptr, *o_ptr, *do_ptr, *dq_ptr, *dk_ptr, *dv_ptr, *softmax_lse_ptr;
    void *softmax_lse_log2_ptr, *dsoftmax_sum, *dq_accum_ptr, *dk_accum_ptr, *dv_accum_ptr;
    int *dq_semaphore, *dk_semaphore, *dv_semaphore;
    int64_t q_batch_stride, k_batch_stride, v_batch_stride, o_batch_stride, do_batch_stride, dq_batch_stride, dk_batch_stride, dv_batch_stride;
    int64_t q_row_stride, k_row_stride, v_row_stride, o_row_stride, do_row_stride, dq_row_stride, dk_row_stride, dv_row_stride;
    int64_t q_head_stride, k_head_stride, v_head_stride, o_head_stride, do_head_stride, dq_head_stride, dk_head_stride, dv_head_stride;
    int64_t v_dim_stride;
    int b, h, h_k, seqlen_q, seqlen_k, seqlen_q_rounded, seqlen_k_rounded, total_q, total_k, d, dv, d_rounded, dv_rounded;
    int window_size_left, window_size_right, arch, num_sm;
    float scale_softmax, softcap, p_dropout, rp_dropout;
    uint8_t p_dropout_in_uint8_t;
    bool is_bf16, is_causal, is_local, deterministic;
};
extern "C" { inline void* stand_in_stream; }

template <int Arch, typename T, int kHeadDim, bool Has_softcap>
void run_mha_bwd_(Flash_bwd_params& x, cudaStream_t stream) {
    stand_in_stream = stream;
    const int shift = x.seqlen_k - x.seqlen_q, group = x.h / x.h_k, rows_q = x.seqlen_q_rounded, rows_k = x.seqlen_k_rounded, D = kHeadDim;
#define AT(name, b, i, h, c) static_cast<T*>(x.name##_ptr)[b * x.name##_batch_stride + i * x.name##_row_stride + h * x.name##_head_stride + c]
    auto *delta = (float*)x.dsoftmax_sum, *lse2 = (float*)x.softmax_lse_log2_ptr, *dq = (float*)x.dq_accum_ptr;
    auto *dk = (float*)x.dk_accum_ptr, *dv = (float*)x.dv_accum_ptr;
    std::vector<float> own_k, own_v;
    if (group == 1) {  // the kernel needs no sums over heads
        own_k.resize(int64_t(x.b) * x.h * rows_k * D);
        own_v = own_k;
        dk = own_k.data();
        dv = own_v.data();
    }
    if (x.d_rounded != D || x.is_bf16 != std::is_same<T, cutlass::bfloat16_t>::value || Has_softcap != (x.softcap > 0)) return;
    for (int64_t i = 0; i < int64_t(x.b) * x.h * rows_q; ++i) delta[i] = lse2[i] = 0;
    for (int64_t i = 0; i < int64_t(x.b) * x.h * rows_q * D; ++i) dq[i] = 0;
    for (int64_t i = 0; i < int64_t(x.b) * x.h * (rows_q / 128); ++i) x.dq_semaphore[i] = -1;
    if (x.deterministic && group > 1)  // whose turn it is, from 0 on
        for (int i = 0; i < x.b * x.h_k * (rows_k / 128); ++i)
            if (x.dk_semaphore[i]++ || x.dv_semaphore[i]++) return;
    for (int b = 0; b < x.b; ++b)
        for (int h = 0; h < x.h; ++h)
            for (int i = 0; i < x.seqlen_q; ++i) {
                const int64_t row = (int64_t(b) * x.h + h) * rows_q + i;
                const float lse = ((float*)x.softmax_lse_ptr)[(int64_t(b) * x.h + h) * x.seqlen_q + i];
                lse2[row] = lse == -INFINITY ? 0 : lse * float(M_LOG2E);
                for (int c = 0; c < x.dv; ++c) delta[row] += AT(o, b, i, h, c) * AT(do, b, i, h, c);
            }
    for (int b = 0; b < x.b; ++b)
        for (int h = 0; h < x.h; ++h)
            for (int i = 0; i < x.seqlen_q; ++i)
                for (int j = 0, g = h / group; j < x.seqlen_k; ++j) {
                    const int64_t row = (int64_t(b) * x.h + h) * rows_q + i, key = ((int64_t(b) * x.h_k + g) * rows_k + j) * D;
                    if ((x.is_causal && j > i + shift) ||
                        (x.is_local && (j > i + shift + x.window_size_right || j < i + shift - x.window_size_left)))
                        continue;
                    float s = 0, dp = 0;
                    for (int c = 0; c < x.d; ++c) s += AT(q, b, i, h, c) * AT(k, b, j, g, c);
                    for (int c = 0; c < x.dv; ++c) dp += AT(do, b, i, h, c) * AT(v, b, j, g, c);
                    s *= x.scale_softmax;
                    const float t = Has_softcap ? std::tanh(s / x.softcap) : 0;
                    const float p = std::exp2((Has_softcap ? x.softcap * t : s) * float(M_LOG2E) - lse2[row]);
                    const float ds = p * (dp - delta[row]) * (1 - t * t) * x.scale_softmax;
                    for (int c = 0; c < x.d; ++c) dq[row * D + c] += ds * AT(k, b, j, g, c), dk[key + c] += ds * AT(q, b, i, h, c);
                    for (int c = 0; c < x.dv; ++c) dv[key + c] += p * AT(do, b, i, h, c);
                }
    for (int b = 0; b < x.b; ++b) {
        for (int h = 0; h < x.h; ++h)
            for (int i = 0; i < x.seqlen_q; ++i)
                for (int c = 0; c < x.d; ++c) AT(dq, b, i, h, c) = dq[((int64_t(b) * x.h + h) * rows_q + i) * D + c];
        for (int g = 0; g < x.h_k; ++g)
            for (int j = 0; j < x.seqlen_k; ++j) {
                const int64_t key = ((int64_t(b) * x.h_k + g) * rows_k + j) * D;
                for (int c = 0; c < x.d; ++c) AT(dk, b, j, g, c) = dk[key + c];
                for (int c = 0; c < x.dv; ++c) AT(dv, b, j, g, c) = dv[key + c];
            }
    }
}
""",
    "built.inc": """
BUILT(cutlass::bfloat16_t, 64, false)
BUILT(cutlass::bfloat16_t, 64, true)
BUILT(cutlass::bfloat16_t, 256, false)
BUILT(cutlass::half_t, 64, false)
""",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interface as a library."""
    folder = tmp_path_factory.mktemp("fa3")
    (folder / "cutlass").mkdir()
    for name, text in STAND_IN.items():
        (folder / name).write_text(text)
    wanted = ["-O1", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unused-but-set-variable", "-I", folder, "-I", INTERFACE]
    source = ['-DFA3_SOURCE="a stand-in"', "-x", "c++", INTERFACE / "fa3_backward.cu"]
    subprocess.run([*compiler(), *wanted, *source, "-o", folder / "fa3.so"], check=True)
    return folder / "fa3.so"


@pytest.fixture
def library(built: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """The library of the environment, and a current stream."""
    monkeypatch.setenv(fa3_source.LIBRARY, str(built))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=STREAM))
    found = fa3_source.library()
    yield found
    ctypes.c_int.in_dll(found, "stand_in_error").value = 0
    ctypes.c_int.in_dll(found, "stand_in_major").value = 9


def here(**changes: Any) -> fa3_source.Fa3Source:
    """The peer, told to run on the CPU."""
    return dataclasses.replace(PEER, device="cpu", **changes)


@pytest.mark.parametrize(
    "shape",
    [
        {"seq": 130, "dim": 64, "causal": True},
        {"seq": 65, "dim": 40, "dtype": "float16"},
        {"seq": 48, "dim": 16, "heads": 6, "heads_kv": 2, "scale": -0.3},
        {"seq": 140, "dim": 16, "heads": 4, "heads_kv": 2, "causal": True, "deterministic": True},
        {"seq": 40, "seq_kv": 70, "dim": 64, "dim_v": 32, "causal": True},
        {"seq": 40, "seq_kv": 70, "dim": 16, "dim_v": 24, "heads_kv": 1, "dtype": "float16"},
        {"seq": 70, "seq_kv": 40, "dim": 16, "causal": True},  # the first 30 rows see no key
        {"seq": 40, "seq_kv": 70, "dim": 16, "mask": "-5 <= q - k <= 17"},
        {"seq": 70, "seq_kv": 40, "dim": 16, "mask": "-5 <= q - k <= 17", "causal": True},
        {"seq": 50, "dim": 16, "mask": "-5 <= q - k <= 49"},  # no key is that far before
        {"seq": 50, "dim": 16, "mask": "0 <= q - k <= 60"},  # the causal mask
        {"seq": 50, "dim": 16, "score": "3.0 * tanh(s / 3.0)", "causal": True},
        {"seq": 20, "dim": 200},
    ],
    ids=str,
)
def test_right(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]) -> None:
    """Its gradients within the error budget, with O and logsumexp in two blocks of rows and more; in the current stream and device."""
    made = {**shape}
    peer = here(deterministic=made.pop("deterministic", False))
    problem = Problem.of(**{"batch": 2, "heads": 2, "dtype": "bfloat16", **made})
    monkeypatch.setattr(fa3_source, "SCORES", problem.heads_q * problem.seq_kv * 37)
    inputs = dataset.generate(problem, 3)
    expected, ways = reference.reference(np, problem, inputs), baselines.baselines(np, problem, inputs, "p16")
    modes, real = list[int](), fa3_source.forward
    monkeypatch.setattr(fa3_source, "forward", lambda *given: (modes.append(torch.get_deterministic_debug_mode()), real(*given))[1])
    prepared = peer.prepare(problem, inputs, "backward")
    assert modes == [0]  # a product by cuBLAS is an error in torch's deterministic mode
    outputs = prepared.outputs()
    for name in ("dQ", "dK", "dV"):
        assert (outputs[name].shape, outputs[name].dtype) == (problem.shape(name), dataset.STORAGE[problem.dtype])
    verdicts = budget.compare(expected, outputs, ways, arithmetic="p16")
    assert set(verdicts) == {"dQ", "dK", "dV"}
    assert all(v.passed for v in verdicts.values()), [budget.message(v) for v in verdicts.values()]
    assert prepared.ran == "run_mha_bwd of a stand-in" + ", deterministic" * peer.deterministic
    assert ctypes.c_void_p.in_dll(library, "stand_in_stream").value == STREAM
    assert ctypes.c_int.in_dll(library, "stand_in_device").value == 0


@pytest.mark.parametrize("shape", [{"seq": 70, "seq_kv": 40, "causal": True}, {"heads_kv": 1, "score": "2.0 * tanh(s / 2.0)"}], ids=str)
def test_what_the_backward_pass_reads(monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]) -> None:
    """O and logsumexp are those of the reference."""
    monkeypatch.setattr(fa3_source, "SCORES", 2000)
    problem = Problem.of(**{"batch": 2, "heads": 2, "seq": 50, "dim": 16, "dtype": "bfloat16", **shape})
    inputs = dataset.generate(problem, 3)
    tensors = (torch.from_numpy(inputs[name].astype(np.float32)).bfloat16().transpose(1, 2) for name in ("Q", "K", "V"))
    o, logsumexp = fa3_source.forward(problem, *tensors)
    expected = reference.reference(np, problem, inputs)
    np.testing.assert_allclose(o.transpose(1, 2).float(), expected["O"], rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(logsumexp, expected["logsumexp"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "deterministic", "why"),
    [
        ({"dim": 64, "dtype": "float16", "score": "3.0 * tanh(s / 3.0)"}, False, "no code for float16, head dims up to 64, with softcap"),
        ({"dim": 72}, False, "no code for bfloat16, head dims up to 96, without softcap"),
        ({"dim": 64, "dim_v": 104}, False, "head dims up to 128"),
        ({"dim": 200}, True, "no deterministic backward pass above head dim 192"),
        ({"dim": 264}, False, "widest head dim is 256"),
        ({"dim": 60}, False, "multiple of 8 in bfloat16"),
        ({"dim": 64, "mask": "k % 2 == 0"}, False, "is given no mask"),
    ],
)
def test_refusals(library: ctypes.CDLL, shape: dict[str, Any], deterministic: bool, why: str) -> None:
    """What the build has no code for is refused before anything runs, in the library's words."""
    with pytest.raises(UsageFault, match="fa3-source does not take") as caught:
        here(deterministic=deterministic).refuse(Problem.of(**{"dtype": "bfloat16", **shape}), "backward")
    assert why in caught.value.why and caught.value.hint
    with pytest.raises(UsageFault, match="fa3-source does not take"):
        here().refuse(Problem.of(dtype="bfloat16"), "forward")


@pytest.mark.parametrize(("variable", "value", "why"), [("error", 35, "driver version is insufficient"), ("major", 8, "capability 9.0")])
def test_a_machine_that_cannot(library: ctypes.CDLL, variable: str, value: int, why: str) -> None:
    """What CUDA says comes back as a fault of the peer: FlashAttention-3 itself would end the process."""
    ctypes.c_int.in_dll(library, f"stand_in_{variable}").value = value
    problem = Problem.of(1, 1, 8, 8, dtype="bfloat16")
    with pytest.raises(KernelFault, match="fa3-source failed") as caught:
        here().prepare(problem, dataset.generate(problem, 0), "backward")
    assert why in caught.value.why


def test_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a library the script that builds one is the hint; a file that is none is told with the loader's words."""
    monkeypatch.setattr(base, "torch_has_cuda", lambda: True)
    monkeypatch.delenv(fa3_source.LIBRARY, raising=False)
    for value, why in ((None, f"{fa3_source.LIBRARY} names no build"), (str(tmp_path / "none.so"), "none.so is no file")):
        if value:
            monkeypatch.setenv(fa3_source.LIBRARY, value)
        found = PEER.absent("cuda")
        assert found is not None and why in found[0] and found[1] == fa3_source.BUILD
    other = tmp_path / "other.so"
    other.write_bytes(b"\x7fELF")
    monkeypatch.setenv(fa3_source.LIBRARY, str(other))
    assert PEER.absent("cuda") is None
    with pytest.raises(EnvironmentFault, match=r"other\.so does not load") as caught:
        PEER.refuse(Problem.of(dtype="bfloat16"), "backward")
    assert "other.so" in caught.value.why and caught.value.hint == fa3_source.BUILD


def test_the_script_is_there_and_runs_its_checks(tmp_path: Path) -> None:
    """Sources of another commit are refused by their digest, before nvcc."""
    for folder in ("flash/hopper", "cutlass/include/cute", "cutlass/include/cutlass"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("flash.h", "tile.hpp"):
        (tmp_path / "flash/hopper" / name).write_text("")
    command = ["bash", INTERFACE / "build.sh", tmp_path / "out", tmp_path / "flash", tmp_path / "cutlass"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "NVCC": "false"})
    assert done.returncode == 3 and "flash/hopper is not that of 0251105a" in done.stderr
