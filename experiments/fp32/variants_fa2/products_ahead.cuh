// The two products of keys.cuh, loads one step ahead.
#pragma once

// score_reg[j][i] = Q of query i * K of key 16 j; q_from [column][BLOCK_Q], k_from [key][K_PITCH] at the thread's first query and key.
// The first HELD keys and queries of a step are loaded in the step before.
__device__ __forceinline__ void multiply_q_k(float (&score_reg)[KEYS][ROWS], const float* q_from, const float* k_from) {
    constexpr int HELD = 2;
    fa::Vec<float, 4> k_next[HELD], q_next[2] = {fa::load_vec<4>(q_from), fa::load_vec<4>(q_from + 4)};
#pragma unroll
    for (int j = 0; j < HELD; ++j) k_next[j] = fa::load_vec<4>(k_from + j * LANES * K_PITCH);
#pragma unroll 1
    for (int round = 0; round < HEAD_DIM / (4 * S_STEPS); ++round) {
        const bool last = round + 1 == HEAD_DIM / (4 * S_STEPS);
        const float* q_after = q_from + (last ? 0 : 4 * S_STEPS * BLOCK_Q);
        const float* k_after = k_from + 4 * S_STEPS;
#pragma unroll
        for (int s = 0; s < 4 * S_STEPS; s += 4) {
            fa::Vec<float, 4> k[KEYS];
#pragma unroll
            for (int j = 0; j < KEYS; ++j) k[j] = j < HELD ? k_next[j] : fa::load_vec<4>(k_from + s + j * LANES * K_PITCH);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                fa::Vec<float, 4> q[2] = {q_next[0], q_next[1]};
                const float* from = s + e + 1 < 4 * S_STEPS ? q_from + (s + e + 1) * BLOCK_Q : q_after;
                q_next[0] = fa::load_vec<4>(from), q_next[1] = fa::load_vec<4>(from + 4);
                if (e == 3)
#pragma unroll
                    for (int j = 0; j < HELD; ++j)
                        k_next[j] = fa::load_vec<4>((s + 4 < 4 * S_STEPS ? k_from + s + 4 : k_after) + j * LANES * K_PITCH);
#pragma unroll
                for (int j = 0; j < KEYS; ++j)
#pragma unroll
                    for (int i = 0; i < ROWS; ++i) score_reg[j][i] += q[i / 4][i % 4] * k[j][e];
            }
        }
        q_from = q_after, k_from = k_after;
    }
}

// tile_reg[i][c] += P of query i * V of column 4 lane + 64 (c / 4) + c % 4, over P_KEYS keys. A key is loaded in the step before.
__device__ __forceinline__ void multiply_p_v(float (&tile_reg)[ROWS][COLUMNS], const float* p_from, const float* v_from) {
    fa::Vec<float, 4> p_next[2] = {fa::load_vec<4>(p_from), fa::load_vec<4>(p_from + 4)};
    fa::Vec<float, 4> v_next[2] = {fa::load_vec<4>(v_from), fa::load_vec<4>(v_from + 64)};
#pragma unroll 1
    for (int round = 0; round < P_KEYS / P_STEPS; ++round) {
        const bool last = round + 1 == P_KEYS / P_STEPS;
        const float* p_after = p_from + (last ? 0 : P_STEPS * P_PITCH);
        const float* v_after = v_from + (last ? 0 : P_STEPS * HEAD_DIM);
#pragma unroll
        for (int s = 0; s < P_STEPS; ++s) {
            fa::Vec<float, 4> p[2] = {p_next[0], p_next[1]}, v[2] = {v_next[0], v_next[1]};
            const float* p_at = s + 1 < P_STEPS ? p_from + (s + 1) * P_PITCH : p_after;
            const float* v_at = s + 1 < P_STEPS ? v_from + (s + 1) * HEAD_DIM : v_after;
            p_next[0] = fa::load_vec<4>(p_at), p_next[1] = fa::load_vec<4>(p_at + 4);
            v_next[0] = fa::load_vec<4>(v_at), v_next[1] = fa::load_vec<4>(v_at + 64);
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) tile_reg[i][c] += p[i / 4][i % 4] * v[c / 4][c % 4];
        }
        p_from = p_after, v_from = v_after;
    }
}
