// What blocks do with one row of float32: norms and rotary positions, and a router's choice of experts.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

static inline float inverse_root(const float* row, int64_t width, float eps) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) sum += row[i] * row[i];
    return 1.0f / std::sqrt(sum / width + eps);
}

// [W] over its root mean square, times the weights [W]; null weights: as it is. `out` may be the row.
static inline void normed_row(const float* row, const float* weights, float* out, int64_t width, float eps) {
    if (!weights) {
        std::memmove(out, row, 4 * width);
        return;
    }
    const float factor = inverse_root(row, width, eps);
#pragma omp simd
    for (int64_t i = 0; i < width; i++) out[i] = row[i] * factor * weights[i];
}

// states [W] += the normed row [W], which is overwritten.
static inline void add_normed(float* row, const float* weights, float* states, int64_t width, float eps) {
    if (weights) normed_row(row, weights, row, width, eps);
#pragma omp simd
    for (int64_t i = 0; i < width; i++) states[i] += row[i];
}

// The norm of a row's queries or keys: as wide as one head or as all heads; null weights: none.
struct HeadNorm {
    const float* weights;
    int64_t width;
};

// Rotary factors [D] of a row's position, the sines negative in the first half; null cosines: no rotary positions.
struct Rotary {
    const float *cosine, *sine;
};

// Heads of one row [N * D], normed in place and turned, to `out` [N, ., D], `step` elements from head to head.
static void turn(float* row, const HeadNorm& norm, const Rotary& rotary, float* out, int64_t step, int64_t heads,
                 int64_t width, float eps) {
    if (norm.weights)
        for (int64_t at = 0; at < heads * width; at += norm.width)
            normed_row(row + at, norm.weights, row + at, norm.width, eps);
    const int64_t half = width / 2;
    for (int64_t head = 0; head < heads; head++, row += width, out += step) {
        if (!rotary.cosine) {
            std::memcpy(out, row, 4 * width);
            continue;
        }
#pragma omp simd
        for (int64_t i = 0; i < half; i++) {
            const float low = row[i], high = row[half + i];
            out[i] = low * rotary.cosine[i] + high * rotary.sine[i];
            out[half + i] = high * rotary.cosine[half + i] + low * rotary.sine[half + i];
        }
    }
}

// Logits [E] become shares in place; the top_k largest, from the largest on, and who has them. Of equals the first.
static void choose(float* shares, int64_t experts, int64_t top_k, bool normalise, float* weights, int64_t* chosen) {
    float most = shares[0], total = 0.0f, kept = 0.0f;
    for (int64_t i = 1; i < experts; i++) most = shares[i] > most ? shares[i] : most;
    for (int64_t i = 0; i < experts; i++) total += shares[i] = std::exp(shares[i] - most);
    for (int64_t k = 0; k < top_k; k++) {
        int64_t best = 0;
        for (int64_t i = 1; i < experts; i++) best = shares[i] > shares[best] ? i : best;
        kept += weights[k] = shares[best] / total;
        chosen[k] = best;
        shares[best] = -1.0f;
    }
    if (!normalise) return;
    for (int64_t k = 0; k < top_k; k++) weights[k] /= kept;
}

// The layer norm of a vision tower.
struct Norm {
    const float *weights, *bias;
    float eps;
};

// Row [W] -> out [W], which may be the row.
static void layer_norm(const float* row, const Norm& norm, float* out, int64_t width) {
    float sum = 0.0f, square = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) sum += row[i];
    const float mean = sum / width;
#pragma omp simd reduction(+ : square)
    for (int64_t i = 0; i < width; i++) square += (row[i] - mean) * (row[i] - mean);
    const float factor = 1.0f / std::sqrt(square / width + norm.eps);
#pragma omp simd
    for (int64_t i = 0; i < width; i++) out[i] = (row[i] - mean) * factor * norm.weights[i] + norm.bias[i];
}
