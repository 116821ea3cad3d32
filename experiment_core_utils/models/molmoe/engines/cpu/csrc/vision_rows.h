// The layer norm of a vision tower.

#pragma once

#include <cmath>
#include <cstdint>

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
