// What a decoder's blocks do with one row of float32.

#pragma once

#include <cmath>
#include <cstdint>

static inline float inverse_root(const float* row, int64_t width, float eps) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) sum += row[i] * row[i];
    return 1.0f / std::sqrt(sum / width + eps);
}

// [W] over its root mean square, times the weights [W].
static inline void normed_row(const float* row, const float* weights, float* out, int64_t width, float eps) {
    const float factor = inverse_root(row, width, eps);
#pragma omp simd
    for (int64_t i = 0; i < width; i++) out[i] = row[i] * factor * weights[i];
}

// Heads of one row [N * D], normed over the whole row and turned, to `out` [N, ., D], `step` elements from head to head.
static void turn(const float* row, const float* weights, const float* cosine, const float* sine, float* out,
                 int64_t step, int64_t heads, int64_t width, float eps) {
    const float factor = inverse_root(row, heads * width, eps);
    const int64_t half = width / 2;
    for (int64_t head = 0; head < heads; head++, row += width, weights += width, out += step) {
#pragma omp simd
        for (int64_t i = 0; i < half; i++) {
            const float low = row[i] * factor * weights[i], high = row[half + i] * factor * weights[half + i];
            out[i] = low * cosine[i] + high * sine[i];
            out[half + i] = high * cosine[half + i] + low * sine[half + i];
        }
    }
}
