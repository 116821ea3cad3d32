// In: the state [H] of one token in float32 and a store of keys and values; out: the logits behind all blocks.
//
// Weights are read where they lie, once each: the time is that of their bytes. Threads share only what is large enough.

#include <cstring>

#include "lanes.h"
#include "rows.h"

// Of one block; its keys and values [KV, slots, D], and where the experts that it chooses are noted.
struct DecodeBlock {
    const float *input_norm, *qkv, *query_norm, *key_norm, *output, *ffn_norm, *router, *gate_up, *down;
    float *keys, *values;
    int64_t* chosen;
    int64_t top_k;
};

struct DecodeSizes {
    int64_t blocks, width, heads, shared, head_width, experts, inner, vocabulary, slots, position;
};

// Elements below which waking a thread costs more than it brings.
constexpr int64_t LARGE = 1 << 18;

static inline float dot(const float* left, const float* right, int64_t count) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) sum += left[i] * right[i];
    return sum;
}

// Weights [N, K] times x [K] -> out [N].
static void apply(const float* weights, const float* x, float* out, int64_t rows, int64_t inner, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * inner >= LARGE)
    for (int64_t row = 0; row < rows; row++) out[row] = dot(weights + row * inner, x, inner);
}

// One query [D] over the first `seen` of keys and values [., D] -> out [D].
static void attend_one(const float* query, const float* keys, const float* values, int64_t seen, int64_t width,
                       float* scores, float* out) {
    const float scale = 1.44269504f / std::sqrt((float)width);
    const int64_t end = (seen + LANES - 1) / LANES * LANES;
    float most = -INFINITY, total = 0.0f;
    for (int64_t token = 0; token < seen; token++) {
        scores[token] = dot(query, keys + token * width, width) * scale;
        most = scores[token] > most ? scores[token] : most;
    }
    for (int64_t token = seen; token < end; token++) scores[token] = -INFINITY;
    for (int64_t token = 0; token < end; token += LANES)
        lanes(scores + token) = power_of_two(lanes(scores + token) - most);
    for (int64_t token = 0; token < seen; token++) total += scores[token];
    std::memset(out, 0, 4 * width);
    for (int64_t token = 0; token < seen; token++) {
        const float weight = scores[token] / total;
#pragma omp simd
        for (int64_t d = 0; d < width; d++) out[d] += weight * values[token * width + d];
    }
}

// Attention's sum of all heads of joint [(Q + 2 KV) * D], whose keys and values come into the store first.
static void attend_heads(const DecodeBlock& block, const DecodeSizes& sizes, const float* joint, const float* cosine,
                         const float* sine, float* queries, float* out, float eps, int threads) {
    const int64_t width = sizes.head_width, head_step = sizes.slots * width, own = sizes.position * width;
    turn(joint, block.query_norm, cosine, sine, queries, width, sizes.heads, width, eps);
    joint += sizes.heads * width;
    turn(joint, block.key_norm, cosine, sine, block.keys + own, head_step, sizes.shared, width, eps);
    joint += sizes.shared * width;
    for (int64_t head = 0; head < sizes.shared; head++)
        std::memcpy(block.values + head * head_step + own, joint + head * width, 4 * width);
    const int64_t seen = sizes.position + 1, sharing = sizes.heads / sizes.shared;
#pragma omp parallel for num_threads(threads) if (2 * sizes.heads * seen * width >= LARGE)
    for (int64_t head = 0; head < sizes.heads; head++) {
        static thread_local Buffer buffer;
        const int64_t at = head / sharing * head_step;
        attend_one(queries + head * width, block.keys + at, block.values + at, seen, width, buffer.of(seen + LANES),
                   out + head * width);
    }
}

// states [H] += the weighted sum of the experts of normed [H].
static void mix_experts(const DecodeBlock& block, const DecodeSizes& sizes, const float* normed, const float* weights,
                        float* hidden, float* states, int threads) {
    const int64_t inner = sizes.inner, width = sizes.width, top_k = block.top_k;
#pragma omp parallel for num_threads(threads) if (2 * top_k * inner * width >= LARGE)
    for (int64_t row = 0; row < top_k * inner; row++) {
        const float* own = block.gate_up + (block.chosen[row / inner] * 2 * inner + row % inner) * width;
        const float gate = dot(own, normed, width), up = dot(own + inner * width, normed, width);
        hidden[row] = gate / (1.0f + std::exp(-gate)) * up * weights[row / inner];
    }
#pragma omp parallel for num_threads(threads) if (top_k * inner * width >= LARGE)
    for (int64_t i = 0; i < width; i++)
        for (int64_t k = 0; k < top_k; k++)
            states[i] += dot(block.down + (block.chosen[k] * width + i) * inner, hidden + k * inner, inner);
}

// A token at `position`, its state [H] (overwritten) and rotary factors [D] -> logits [V] of the next.
extern "C" void decode(const DecodeBlock* blocks, DecodeSizes sizes, float* states, const float* cosine,
                       const float* sine, const float* final_norm, const float* head, float* logits, float eps,
                       int normalise, int threads) {
    static thread_local Buffer buffer;
    const int64_t width = sizes.width, asked = sizes.heads * sizes.head_width;
    const int64_t joined = asked + 2 * sizes.shared * sizes.head_width;
    float* normed = buffer.of(2 * width + joined + 2 * asked + 2 * sizes.experts + sizes.experts * sizes.inner);
    float *made = normed + width, *joint = made + width, *queries = joint + joined, *attended = queries + asked;
    float *shares = attended + asked, *weights = shares + sizes.experts, *hidden = weights + sizes.experts;
    for (int64_t row = 0; row < sizes.blocks; row++) {
        const DecodeBlock& block = blocks[row];
        normed_row(states, block.input_norm, normed, width, eps);
        apply(block.qkv, normed, joint, joined, width, threads);
        attend_heads(block, sizes, joint, cosine, sine, queries, attended, eps, threads);
        apply(block.output, attended, made, width, asked, threads);
        for (int64_t i = 0; i < width; i++) states[i] += made[i];
        normed_row(states, block.ffn_norm, normed, width, eps);
        apply(block.router, normed, shares, sizes.experts, width, threads);
        choose(shares, sizes.experts, block.top_k, normalise, weights, block.chosen);
        mix_experts(block, sizes, normed, weights, hidden, states, threads);
    }
    normed_row(states, final_norm, normed, width, eps);
    apply(head, normed, logits, sizes.vocabulary, width, threads);
}
