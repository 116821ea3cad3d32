// In: a prompt's states [T, H] in float32; out: a decoder block's products with what lies between them.
//
// A thread takes a span of tokens, or of one expert's tokens, through all that one call does with them, so that what it
// makes stays in its second cache.

#include <cstring>

#include "products.h"
#include "rows.h"

struct Heads {
    int64_t queries, shared, width, slots;
};

// Queries [Q, T, D], keys and values where they are kept, of the normed states; normed and turned.
extern "C" void decoder_project(const float* states, const float* norm, Product joint, const float* query_norm,
                                const float* key_norm, const float* cosine, const float* sine, float* queries,
                                float* keys, float* values, Heads heads, int64_t tokens, float eps, int threads) {
    const int64_t inner = joint.inner, width = heads.width, step = in_tiles(joint.columns), slots = heads.slots * width;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t span = 0; span < in_spans(tokens); span++) {
        static thread_local Buffer taken, made;
        const int64_t first = span * SPAN, count = least(SPAN, tokens - first);
        float *normed = taken.of(SPAN * inner), *rows = made.of(SPAN * step);
        for (int64_t row = 0; row < count; row++)
            normed_row(states + (first + row) * inner, norm, normed + row * inner, inner, eps);
        const auto keep = [&](int64_t row, int64_t panel, const float* tile) {
            std::memcpy(rows + row * step + panel * TILE, tile, 4 * TILE);
        };
        multiply(normed, inner, count, joint.weights, inner, step / TILE, keep);
        for (int64_t row = 0; row < count; row++) {
            const int64_t token = first + row;
            const float *own = rows + row * step, *turns = cosine + token * width, *signs = sine + token * width;
            turn(own, query_norm, turns, signs, queries + token * width, tokens * width, heads.queries, width, eps);
            own += heads.queries * width;
            turn(own, key_norm, turns, signs, keys + token * width, slots, heads.shared, width, eps);
            own += heads.shared * width;
            for (int64_t head = 0; head < heads.shared; head++)
                std::memcpy(values + head * slots + token * width, own + head * width, 4 * width);
        }
    }
}

// states + output of attended -> summed [T, H]; from it normed [T, H] and the experts of each token, [T, k] each.
extern "C" void decoder_route(const float* states, const float* attended, Product output, const float* norm,
                              Product router, float* summed, float* normed, float* weights, int64_t* chosen,
                              int64_t top_k, int normalise, int64_t tokens, float eps, int threads) {
    const int64_t width = output.columns, inner = output.inner, experts = router.columns, step = in_tiles(experts);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t span = 0; span < in_spans(tokens); span++) {
        static thread_local Buffer taken, middle, made;
        const int64_t first = span * SPAN, count = least(SPAN, tokens - first);
        float *given = taken.of(SPAN * inner), *rows = middle.of(SPAN * width), *logits = made.of(SPAN * step);
        float* own = summed + first * width;
        // Copies, because rows behind the last are read.
        std::memcpy(given, attended + first * inner, 4 * count * inner);
        std::memcpy(own, states + first * width, 4 * count * width);
        const auto add = [&](int64_t row, int64_t panel, const float* tile) {
            add_tile(own + row * width, tile, nullptr, panel * TILE, width);
        };
        multiply(given, inner, count, output.weights, inner, in_tiles(width) / TILE, add);
        for (int64_t row = 0; row < count; row++) normed_row(own + row * width, norm, rows + row * width, width, eps);
        const auto keep = [&](int64_t row, int64_t panel, const float* tile) {
            std::memcpy(logits + row * step + panel * TILE, tile, 4 * TILE);
        };
        multiply(rows, width, count, router.weights, width, step / TILE, keep);
        std::memcpy(normed + first * width, rows, 4 * count * width);
        for (int64_t row = 0; row < count; row++) {
            const int64_t at = (first + row) * top_k;
            choose(logits + row * step, experts, top_k, normalise, weights + at, chosen + at);
        }
    }
}

// Places [T * k] of the pairs of token and expert, sorted by expert; ends [E]: where each expert's stop.
static void sort_by_expert(const int64_t* chosen, int64_t pairs, int64_t experts, int64_t* order, int64_t* ends) {
    std::memset(ends, 0, 8 * experts);
    for (int64_t pair = 0; pair < pairs; pair++) ends[chosen[pair]]++;
    for (int64_t expert = 1; expert < experts; expert++) ends[expert] += ends[expert - 1];
    for (int64_t pair = pairs - 1; pair >= 0; pair--) order[--ends[chosen[pair]]] = pair;
    // They are starts now: an expert stops where the next one starts.
    for (int64_t expert = 0; expert + 1 < experts; expert++) ends[expert] = ends[expert + 1];
    ends[experts - 1] = pairs;
}

// Panels of all experts: gates and ups [E, P, H, TILE], half of a panel each; down [E, H / TILE, I, TILE].
struct Experts {
    const float *gate_up, *down;
    int64_t count, width, inner;
};

// states [T, H] += the weighted sums of the experts of normed [T, H]; order [T * k], ends [E] and mixed [T * k, H] are
// places to work in.
extern "C" void decoder_mix(const float* normed, const float* weights, const int64_t* chosen, Experts experts,
                            float* states, int64_t* order, int64_t* ends, float* mixed, int64_t tokens, int64_t top_k,
                            int threads) {
    constexpr int HALF = TILE / 2;
    const int64_t width = experts.width, panels = (experts.inner + HALF - 1) / HALF, step = panels * HALF;
    const int64_t down_step = in_tiles(width) * experts.inner;
    sort_by_expert(chosen, tokens * top_k, experts.count, order, ends);
    int64_t items = 0;
    for (int64_t expert = 0; expert < experts.count; expert++)
        items += in_spans(ends[expert] - (expert ? ends[expert - 1] : 0));
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t item = 0; item < items; item++) {
        static thread_local Buffer taken, middle;
        int64_t expert = 0, start = 0, before = item;
        for (;; start = ends[expert++]) {
            const int64_t spans = in_spans(ends[expert] - start);
            if (before < spans) break;
            before -= spans;
        }
        const int64_t* own = order + start + before * SPAN;
        const int64_t count = least(SPAN, ends[expert] - start - before * SPAN);
        float *given = taken.of(SPAN * width), *hidden = middle.of(SPAN * step);
        for (int64_t row = 0; row < count; row++)
            std::memcpy(given + row * width, normed + own[row] / top_k * width, 4 * width);
        const auto activate = [&](int64_t row, int64_t panel, const float* tile) {
            float* to = hidden + row * step + panel * HALF;
            for (int part = 0; part < HALF; part += LANES)
                lanes(to + part) = gated(lanes(tile + part), 1.0f) * lanes(tile + HALF + part) * weights[own[row]];
        };
        multiply(given, width, count, experts.gate_up + expert * panels * width * TILE, width, panels, activate);
        const auto put = [&](int64_t row, int64_t panel, const float* tile) {
            put_tile(mixed + own[row] * width, tile, nullptr, panel * TILE, width);
        };
        multiply(hidden, step, count, experts.down + expert * down_step, experts.inner, in_tiles(width) / TILE, put);
    }
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t pair = token * top_k; pair < (token + 1) * top_k; pair++)
#pragma omp simd
            for (int64_t i = 0; i < width; i++) states[token * width + i] += mixed[pair * width + i];
}

extern "C" int tile_width() { return TILE; }
