// Vectors of float32 as wide as the processor's, by the vector types of GCC and clang, what is done with one, and a
// thread's memory for them.

#pragma once

#include <cstdint>
#include <vector>

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Bits __attribute__((vector_size(4 * LANES), aligned(4)));

static inline Lanes all(float value) { return Lanes{} + value; }
static inline Lanes& lanes(float* at) { return *(Lanes*)at; }
static inline const Lanes& lanes(const float* at) { return *(const Lanes*)at; }
static inline Lanes larger(Lanes left, Lanes right) { return left > right ? left : right; }

// 2^x for x <= 127, to about one unit in the last place; 0 below -126.
// x = n + r with n whole, 2^r by a polynomial (Cephes).
static inline Lanes power_of_two(Lanes x) {
    // Adding it leaves the nearest whole number in the low bits.
    const Lanes rounder = all(12582912.0f);
    const Bits tiny = x < all(-126.0f);
    const Lanes shifted = x + rounder, r = x - (shifted - rounder);
    Lanes p = all(1.535336188319500e-4f);
    p = p * r + 1.339887440266574e-3f;
    p = p * r + 9.618437357674640e-3f;
    p = p * r + 5.550332471162809e-2f;
    p = p * r + 2.402264791363012e-1f;
    p = p * r + 6.931472028550421e-1f;
    p = p * r + 1.0f;
    return (Lanes)(((Bits)p + ((Bits)shifted << 23)) & ~tiny);
}

// x / (1 + e^(-slope x))
static inline Lanes gated(Lanes x, float slope) {
    const Lanes power = x * (-1.44269504f * slope);
    return x / (power_of_two(power < all(126.0f) ? power : all(126.0f)) + 1.0f);
}

// x / 2 (1 + erf(x / sqrt(2))), erf as of Abramowitz and Stegun 7.1.26, which is off by 1.5e-7 at most.
static inline Lanes gelu(Lanes x) {
    const Lanes y = (x < 0.0f ? -x : x) * 0.70710678f, t = 1.0f / (y * 0.3275911f + 1.0f);
    Lanes p = all(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    // What the normal distribution has beyond |x|.
    const Lanes tail = p * t * power_of_two(y * y * -1.44269504f) * 0.5f;
    return x * (x < 0.0f ? tail : 1.0f - tail);
}

// x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), by tanh z = 2 / (1 + e^(-2 z)) - 1
static inline Lanes tanh_gelu(Lanes x) {
    const Lanes power = x * (x * x * 0.044715f + 1.0f) * (-2.0f * 1.44269504f * 0.79788456f);
    return x / (power_of_two(power < all(126.0f) ? power : all(126.0f)) + 1.0f);
}

// Memory of a thread, kept between calls, at a boundary of 64 bytes, where no load lies across two lines of the cache.
class Buffer {
    std::vector<float> held;

  public:
    float* of(int64_t elements) {
        if ((int64_t)held.size() < elements + 16) held.resize(elements + 16);
        return (float*)(((uintptr_t)held.data() + 63) & ~(uintptr_t)63);
    }
};
