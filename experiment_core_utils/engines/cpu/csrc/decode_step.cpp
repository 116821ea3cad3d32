// In: the state [H] of one token in float32 and a store of keys and values; out: the logits behind all blocks.
//
// Weights are read where they lie, once each: the time is that of their bytes. Threads share only what is large enough.

#include <algorithm>

#include "lanes.h"
#include "rows.h"

// Gates and ups [E, 2 I, H] and downs [E, H, I] of experts.
struct Experts {
    const float *gate_up, *down;
    int64_t inner;
};

// Of one block; its keys and values [KV, slots, D], and where the experts that it chooses are noted. Null: it has none
// of that. Without a router its first expert has weight 1; without a window it sees all positions.
struct DecodeBlock {
    const float *input_norm, *qkv, *qkv_bias;
    HeadNorm query_norm, key_norm;
    const float *output, *post_attention_norm, *ffn_norm, *router;
    Experts routed, shared;
    const float *shared_gate, *post_ffn_norm;
    float *keys, *values;
    int64_t* chosen;
    int64_t top_k, experts, window, has_rope;
};

struct DecodeSizes {
    int64_t blocks, width, heads, shared, head_width, vocabulary, slots, position;
};

// Elements below which waking a thread costs more than it brings.
constexpr int64_t LARGE = 1 << 18;
// Rows of weights that are read at a time.
constexpr int TOGETHER = 4;

// N rows of weights [K], which row(i) finds, times x [K] -> out [N]. Memory gives several rows at a time faster than one
// after the other.
template <int N, typename Row>
static inline void dots(Row row, const float* x, int64_t inner, float* out) {
    const float* rows[N];
    Lanes sums[N] = {};
    for (int i = 0; i < N; i++) rows[i] = row(i);
    int64_t d = 0;
    for (; d + LANES <= inner; d += LANES) {
        const Lanes factors = lanes(x + d);
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) sums[i] += lanes(rows[i] + d) * factors;
    }
    for (int i = 0; i < N; i++) {
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int lane = 0; lane < LANES; lane++) sum += sums[i][lane];
        for (int64_t at = d; at < inner; at++) sum += rows[i][at] * x[at];
        out[i] = sum;
    }
}

static inline float dot(const float* left, const float* right, int64_t count) {
    float sum;
    dots<1>([&](int) { return left; }, right, count, &sum);
    return sum;
}

// Weights [N, K] times x [K], and a bias [N] (null: none) -> out [N].
static void apply(const float* weights, const float* bias, const float* x, float* out, int64_t rows, int64_t inner,
                  int threads) {
#pragma omp parallel for num_threads(threads) if (rows * inner >= LARGE)
    for (int64_t first = 0; first < rows; first += TOGETHER) {
        float made[TOGETHER];
        // Behind the last row it is taken again.
        dots<TOGETHER>([&](int i) { return weights + std::min(first + i, rows - 1) * inner; }, x, inner, made);
        for (int64_t row = first; row < std::min(first + TOGETHER, rows); row++)
            out[row] = made[row - first] + (bias ? bias[row] : 0.0f);
    }
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
static void attend_heads(const DecodeBlock& block, const DecodeSizes& sizes, float* joint, const Rotary& rotary,
                         float* queries, float* out, float eps, int threads) {
    const int64_t width = sizes.head_width, head_step = sizes.slots * width, own = sizes.position * width;
    turn(joint, block.query_norm, rotary, queries, width, sizes.heads, width, eps);
    joint += sizes.heads * width;
    turn(joint, block.key_norm, rotary, block.keys + own, head_step, sizes.shared, width, eps);
    joint += sizes.shared * width;
    for (int64_t head = 0; head < sizes.shared; head++)
        std::memcpy(block.values + head * head_step + own, joint + head * width, 4 * width);
    const int64_t all = sizes.position + 1, seen = block.window && block.window < all ? block.window : all;
    const int64_t first = (all - seen) * width, sharing = sizes.heads / sizes.shared;
#pragma omp parallel for num_threads(threads) if (2 * sizes.heads * seen * width >= LARGE)
    for (int64_t head = 0; head < sizes.heads; head++) {
        static thread_local Buffer buffer;
        const int64_t at = head / sharing * head_step + first;
        attend_one(queries + head * width, block.keys + at, block.values + at, seen, width, buffer.of(seen + LANES),
                   out + head * width);
    }
}

// out [H] += the weighted sum of the top_k chosen experts of normed [H].
static void mix(const Experts& experts, const int64_t* chosen, const float* weights, int64_t top_k, const float* normed,
                int64_t width, float* hidden, float* out, int threads) {
    const int64_t inner = experts.inner;
#pragma omp parallel for num_threads(threads) if (2 * top_k * inner * width >= LARGE)
    for (int64_t first = 0; first < top_k * inner; first += TOGETHER) {
        float made[2 * TOGETHER];
        dots<2 * TOGETHER>(
            [&](int i) {
                const int64_t row = std::min(first + i % TOGETHER, top_k * inner - 1);
                return experts.gate_up + ((2 * chosen[row / inner] + i / TOGETHER) * inner + row % inner) * width;
            },
            normed, width, made);
        for (int64_t row = first; row < std::min(first + TOGETHER, top_k * inner); row++) {
            const float gate = made[row - first], up = made[row - first + TOGETHER];
            hidden[row] = gate / (1.0f + std::exp(-gate)) * up * weights[row / inner];
        }
    }
#pragma omp parallel for num_threads(threads) if (top_k * inner * width >= LARGE)
    for (int64_t first = 0; first < width; first += TOGETHER)
        for (int64_t k = 0; k < top_k; k++) {
            float made[TOGETHER];
            const float* own = experts.down + chosen[k] * width * inner;
            dots<TOGETHER>([&](int i) { return own + std::min(first + i, width - 1) * inner; }, hidden + k * inner,
                           inner, made);
            for (int64_t i = first; i < std::min(first + TOGETHER, width); i++) out[i] += made[i - first];
        }
}

// made [H] = the experts of normed [H], chosen by the router, and the one that they share.
static void feed_forward(const DecodeBlock& block, const float* normed, int64_t width, bool normalise, float* shares,
                         float* weights, float* hidden, float* made, int threads) {
    weights[0] = 1.0f;
    block.chosen[0] = 0;
    if (block.router) {
        apply(block.router, nullptr, normed, shares, block.experts, width, threads);
        choose(shares, block.experts, block.top_k, normalise, weights, block.chosen);
    }
    std::memset(made, 0, 4 * width);
    mix(block.routed, block.chosen, weights, block.top_k, normed, width, hidden, made, threads);
    if (!block.shared.gate_up) return;
    const int64_t only = 0;
    const float weight = block.shared_gate ? 1.0f / (1.0f + std::exp(-dot(block.shared_gate, normed, width))) : 1.0f;
    mix(block.shared, &only, &weight, 1, normed, width, hidden, made, threads);
}

// A token at `position`, its state [H] (overwritten) and rotary factors [D] -> logits [V] of the next.
extern "C" void decode(const DecodeBlock* blocks, DecodeSizes sizes, float* states, const float* cosine,
                       const float* sine, const float* final_norm, const float* head, float* logits, float eps,
                       int normalise, int threads) {
    static thread_local Buffer buffer;
    const int64_t width = sizes.width, asked = sizes.heads * sizes.head_width;
    const int64_t joined = asked + 2 * sizes.shared * sizes.head_width;
    int64_t experts = 1, inner = 0;
    for (int64_t row = 0; row < sizes.blocks; row++) {
        experts = std::max(experts, blocks[row].experts);
        inner = std::max({inner, blocks[row].top_k * blocks[row].routed.inner, blocks[row].shared.inner});
    }
    float* normed = buffer.of(2 * width + joined + 2 * asked + 2 * experts + inner);
    float *made = normed + width, *joint = made + width, *queries = joint + joined, *attended = queries + asked;
    float *shares = attended + asked, *weights = shares + experts, *hidden = weights + experts;
    for (int64_t row = 0; row < sizes.blocks; row++) {
        const DecodeBlock& block = blocks[row];
        const Rotary rotary = {block.has_rope ? cosine : nullptr, sine};
        normed_row(states, block.input_norm, normed, width, eps);
        apply(block.qkv, block.qkv_bias, normed, joint, joined, width, threads);
        attend_heads(block, sizes, joint, rotary, queries, attended, eps, threads);
        apply(block.output, nullptr, attended, made, width, asked, threads);
        add_normed(made, block.post_attention_norm, states, width, eps);
        normed_row(states, block.ffn_norm, normed, width, eps);
        feed_forward(block, normed, width, normalise, shares, weights, hidden, made, threads);
        add_normed(made, block.post_ffn_norm, states, width, eps);
    }
    normed_row(states, final_norm, normed, width, eps);
    apply(head, nullptr, normed, logits, sizes.vocabulary, width, threads);
}
