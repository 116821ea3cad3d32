// From a router's logits of one token to its experts.

#pragma once

#include <cmath>
#include <cstdint>

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
