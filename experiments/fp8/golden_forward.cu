// /// kernel
// title = "products and conversions of 8 bits, a step of K each"
// dtypes = ["float32"]
// head_dims = [64]
// arch = "sm_90a"
// causal = false
// gqa = false
// cross = false
// logits = "any"
// deterministic = true
// [tile]
// FORMAT = 0  # 0: e4m3, 1: e5m2
// WORD = 0    # 0: wgmma, A from shared memory; 1: A from registers; 2: mma.sync; 3: conversions
// [[launch]]
// entry = "forward"
// grid = "seq_q // 1024"
// block = 128
// shared = "1024 + 40960"
// ///
//
// A block has 64 rows of A (Q) and 256 columns of B (K), 128 bytes each, and makes 4 products of 32 bytes of both: D = C + A B, each with
// 64 x 256 elements of C (V) and D (O). Bytes and floats lie in tensors of float32. golden.py makes them.
#include <fa/tma.cuh>
#include <fa/wgmma_float8.cuh>

using fa::uint16_t;
using fa::uint32_t;
using fa::uint64_t;
template <int> struct Number {
    using type = fa::float8_e4m3;
};
template <> struct Number<1> {
    using type = fa::float8_e5m2;
};
using number = Number<FORMAT>::type;

__device__ void convert(const fa::Args& args) {
    const uint32_t* in = static_cast<const uint32_t*>(args.V.data);
    uint32_t* out = static_cast<uint32_t*>(args.O.data);
    for (int i = threadIdx.x; i < 65536; i += 128) {
        const int at = blockIdx.x * 65536 + i;
        const float x = __uint_as_float(in[at]), other = __uint_as_float(in[at ^ 1]);
        const uint16_t two = FORMAT == 0 ? fa::cvt_rn_satfinite_e4m3x2_f32(x, other) : fa::cvt_rn_satfinite_e5m2x2_f32(x, other);
        const uint16_t byte = uint16_t(at & 0xff);
        const uint32_t half = FORMAT == 0 ? fa::cvt_rn_f16x2_e4m3x2(byte) : fa::cvt_rn_f16x2_e5m2x2(byte);
        out[at] = two | half << 16;
    }
}

extern "C" __global__ void __launch_bounds__(128) forward(const __grid_constant__ fa::Args args) {
    if constexpr (WORD == 3) {
        convert(args);
        return;
    }
    unsigned char* a_smem = fa::dynamic_shared_1024();
    unsigned char* b_smem = a_smem + 8192;
    const uint32_t* a = static_cast<const uint32_t*>(args.Q.data) + blockIdx.x * 64 * 32;
    const uint32_t* b = static_cast<const uint32_t*>(args.K.data) + blockIdx.x * 256 * 32;
    // As TMA lays them out: chunks of 16 bytes of a row are swapped by its number.
    for (int i = threadIdx.x; i < (64 + 256) * 32; i += 128) {
        const int row = i / 32, chunk = i % 32 / 4 ^ row % 8;
        reinterpret_cast<uint32_t*>(a_smem)[row * 32 + 4 * chunk + i % 4] = row < 64 ? a[i] : b[i - 64 * 32];
    }
    fa::fence_proxy_async_shared();
    __syncthreads();
    const int t = threadIdx.x, row = t / 32 * 16 + t % 32 / 4, pair = t % 4 * 2;
    for (int step = 0; step < 4; ++step) {
        const float* c = static_cast<const float*>(args.V.data) + (blockIdx.x * 4 + step) * 64 * 256;
        float* out = static_cast<float*>(args.O.data) + (blockIdx.x * 4 + step) * 64 * 256;
        auto at = [&](int i) { return (row + i / 2 % 2 * 8) * 256 + i / 4 * 8 + pair + i % 2; };
        float d[128];
        uint32_t a_reg[4];
#pragma unroll
        for (int i = 0; i < 128; ++i) d[i] = c[at(i)];
#pragma unroll
        for (int i = 0; i < 4; ++i) a_reg[i] = a[(row + i % 2 * 8) * 32 + 8 * step + t % 4 + i / 2 * 4];
        if constexpr (WORD == 2) {
#pragma unroll
            for (int n = 0; n < 32; ++n) {
                const uint32_t* column = b + (8 * n + t % 32 / 4) * 32 + 8 * step + t % 4;
                float (&part)[4] = reinterpret_cast<float (&)[4]>(d[4 * n]);
                if constexpr (FORMAT == 0) fa::mma_m16n8k32_e4m3(part, a_reg, column[0], column[4]);
                else fa::mma_m16n8k32_e5m2(part, a_reg, column[0], column[4]);
            }
        } else {
            const uint64_t a_step = fa::descriptor_advance(fa::smem_descriptor_k_major(a_smem), 32 * step);
            const uint64_t b_step = fa::descriptor_advance(fa::smem_descriptor_k_major(b_smem), 32 * step);
            fa::wgmma_fence();
            if constexpr (WORD == 0) fa::wgmma_ss<number>(d, a_step, b_step, true);
            else fa::wgmma_rs<number>(d, a_reg, b_step, true);
            fa::wgmma_commit();
            fa::wgmma_wait<0>(d, a_reg);
        }
#pragma unroll
        for (int i = 0; i < 128; ++i) out[at(i)] = d[i];
    }
}
