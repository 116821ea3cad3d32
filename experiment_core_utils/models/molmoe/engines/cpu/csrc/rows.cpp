// In: rows of float32; out: what a block does with each row between its products, in one pass over it.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "rows.h"

// e^x, to about one unit in the last place, x taken into [-87, 87]. x = n ln 2 + r, e^r by a polynomial (Cephes).
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 87.0f ? 87.0f : x;
    // Adding 1.5 * 2^23 leaves the nearest whole number in the low bits.
    const float shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits, whole;
    std::memcpy(&bits, &p, 4);
    std::memcpy(&whole, &shifted, 4);
    bits += whole << 23;
    std::memcpy(&p, &bits, 4);
    return p;
}

// [T, W] -> [T, W], each row over its root mean square, times the weights [W].
extern "C" void normalise(const float* rows, const float* weights, float* out, int64_t tokens, int64_t width, float eps,
                          int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t token = 0; token < tokens; token++) {
        normed_row(rows + token * width, weights, out + token * width, width, eps);
    }
}

// Joint rows [T, (Q + 2 KV) * D] -> queries [Q, T, D]; keys and values where they are kept, `slots` rows of D a head.
extern "C" void place(const float* joint, const float* query_norm, const float* key_norm, const float* cosine,
                      const float* sine, float* queries, float* keys, float* values, int64_t tokens, int64_t heads,
                      int64_t kv_heads, int64_t width, int64_t slots, float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t token = 0; token < tokens; token++) {
        const float *row = joint + token * (heads + 2 * kv_heads) * width, *turns = cosine + token * width;
        turn(row, query_norm, turns, sine + token * width, queries + token * width, tokens * width, heads, width, eps);
        row += heads * width;
        turn(row, key_norm, turns, sine + token * width, keys + token * width, slots * width, kv_heads, width, eps);
        row += kv_heads * width;
        for (int64_t head = 0; head < kv_heads; head++)
            std::memcpy(values + (head * slots + token) * width, row + head * width, 4 * width);
    }
}

// [R, 2 * I], gate and up -> silu(gate) * up [R, I].
extern "C" void gate(const float* hidden, float* out, int64_t rows, int64_t inner, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *gates = hidden + row * 2 * inner, *ups = gates + inner;
        float* to = out + row * inner;
#pragma omp simd
        for (int64_t i = 0; i < inner; i++) to[i] = gates[i] / (1.0f + exponential(-gates[i])) * ups[i];
    }
}

// x * sigmoid(1.702 * x) of [R, W] + bias [W], in place.
extern "C" void quick_gelu(float* rows, const float* bias, int64_t count, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < count; row++) {
        float* own = rows + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            const float x = own[i] + bias[i];
            own[i] = x / (1.0f + exponential(-1.702f * x));
        }
    }
}

// states [T, W] += sum over k of weights [T, k] * mixed [T * k, W] at rows places [T, k].
extern "C" void add_weighted(const float* mixed, const int64_t* places, const float* weights, float* states,
                             int64_t tokens, int64_t top_k, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t token = 0; token < tokens; token++) {
        float* to = states + token * width;
        for (int64_t k = token * top_k; k < (token + 1) * top_k; k++) {
            const float *row = mixed + places[k] * width, weight = weights[k];
#pragma omp simd
            for (int64_t i = 0; i < width; i++) to[i] += weight * row[i];
        }
    }
}
