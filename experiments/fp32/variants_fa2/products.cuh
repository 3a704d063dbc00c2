// The two products of keys.cuh.
#pragma once

// score_reg[j][i] = Q of query i * K of key 16 j; q_from [column][BLOCK_Q], k_from [key][K_PITCH] at the thread's first query and key.
__device__ __forceinline__ void multiply_q_k(float (&score_reg)[KEYS][ROWS], const float* q_from, const float* k_from) {
#pragma unroll 1
    for (int round = 0; round < HEAD_DIM / (4 * S_STEPS); ++round, q_from += 4 * S_STEPS * BLOCK_Q, k_from += 4 * S_STEPS) {
#pragma unroll
        for (int s = 0; s < 4 * S_STEPS; s += 4) {
            fa::Vec<float, 4> k[KEYS];
#pragma unroll
            for (int j = 0; j < KEYS; ++j) k[j] = fa::load_vec<4>(k_from + s + j * LANES * K_PITCH);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float* from = q_from + (s + e) * BLOCK_Q;
                fa::Vec<float, 4> q[2] = {fa::load_vec<4>(from), fa::load_vec<4>(from + 4)};
#pragma unroll
                for (int j = 0; j < KEYS; ++j)
#pragma unroll
                    for (int i = 0; i < ROWS; ++i) score_reg[j][i] += q[i / 4][i % 4] * k[j][e];
            }
        }
    }
}

// tile_reg[i][c] += P of query i * V of column 4 lane + 64 (c / 4) + c % 4, over P_KEYS keys.
__device__ __forceinline__ void multiply_p_v(float (&tile_reg)[ROWS][COLUMNS], const float* p_from, const float* v_from) {
#pragma unroll 1
    for (int round = 0; round < P_KEYS / P_STEPS; ++round, p_from += P_STEPS * P_PITCH, v_from += P_STEPS * HEAD_DIM) {
#pragma unroll
        for (int s = 0; s < P_STEPS; ++s) {
            fa::Vec<float, 4> p[2] = {fa::load_vec<4>(p_from + s * P_PITCH), fa::load_vec<4>(p_from + s * P_PITCH + 4)};
            fa::Vec<float, 4> v[2] = {fa::load_vec<4>(v_from + s * HEAD_DIM), fa::load_vec<4>(v_from + s * HEAD_DIM + 64)};
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) tile_reg[i][c] += p[i / 4][i % 4] * v[c / 4][c % 4];
        }
    }
}
