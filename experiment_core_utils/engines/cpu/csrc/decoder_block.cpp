// In: a prompt's states [T, H] in float32; out: a decoder block's products with what lies between them.
//
// Threads take some tokens, or some of one expert's tokens, through all that one call does with them.

#include "in_place.h"
#include "rows.h"

// Weights [N, K].
struct Matrix {
    const float* weights;
    int64_t columns, inner;
};

struct Heads {
    HeadNorm query_norm, key_norm;
    int64_t queries, shared, width, slots;
};

// Queries [Q, T, D], keys and values where they are kept, of the normed states; normed and turned by factors [T, D].
extern "C" void decoder_project(const float* states, const float* norm, Matrix joint, const float* bias, Heads heads,
                                const float* cosine, const float* sine, float* queries, float* keys, float* values,
                                int64_t tokens, float eps, int threads) {
    const int64_t inner = joint.inner, width = heads.width, joined = joint.columns, slots = heads.slots * width;
    const Division division(tokens, inner * joined, threads);
    const int64_t span = division.span;
    each_item(division.spans(tokens), division.by_tokens, [&](int64_t item) {
        const int64_t first = item * span;
        static thread_local Buffer one, taken, made;
        const int64_t count = least(span, tokens - first);
        float *normed = one.of(span * inner), *panels = taken.of(span * inner), *rows = made.of(span * joined);
        in_parts(count, division.by_columns, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; row++)
                normed_row(states + (first + row) * inner, norm, normed + row * inner, inner, eps);
        });
        pack(count, inner, panels, [&](int64_t row) { return normed + row * inner; }, division.by_columns);
        apply(joint.weights, joined, inner, panels, count, [&](int64_t row) { return rows + row * joined; },
              division.by_columns);
        in_parts(count, division.by_columns, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; row++) {
                const int64_t token = first + row;
                const Rotary rotary = {cosine ? cosine + token * width : nullptr, sine + token * width};
                float* own = rows + row * joined;
                if (bias)
                    for (int64_t i = 0; i < joined; i++) own[i] += bias[i];
                turn(own, heads.query_norm, rotary, queries + token * width, tokens * width, heads.queries, width, eps);
                own += heads.queries * width;
                turn(own, heads.key_norm, rotary, keys + token * width, slots, heads.shared, width, eps);
                own += heads.shared * width;
                for (int64_t head = 0; head < heads.shared; head++)
                    std::memcpy(values + head * slots + token * width, own + head * width, 4 * width);
            }
        });
    });
}

// Of both parts of a block, each [H] or null: before attention's sum is added, and before the experts.
struct Norms {
    const float *post_attention, *ffn;
};

// states + output of attended -> summed [T, H]; from it normed [T, H] and the experts of each token, [T, k] each: the
// first, of weight 1, where there is no router.
extern "C" void decoder_route(const float* states, const float* attended, Matrix output, Norms norms,
                              const float* router, int64_t experts, float* summed, float* normed, float* weights,
                              int64_t* chosen, int64_t top_k, int normalise, int64_t tokens, float eps, int threads) {
    const int64_t width = output.columns, inner = output.inner;
    const Division division(tokens, inner * width, threads);
    const int64_t span = division.span;
    each_item(division.spans(tokens), division.by_tokens, [&](int64_t item) {
        const int64_t first = item * span;
        static thread_local Buffer taken, made;
        const int64_t count = least(span, tokens - first);
        float *panels = taken.of(span * std::max(inner, width)), *logits = made.of(span * experts);
        float *own = summed + first * width, *rows = normed + first * width;
        pack(count, inner, panels, [&](int64_t row) { return attended + (first + row) * inner; }, division.by_columns);
        apply(output.weights, width, inner, panels, count, [&](int64_t row) { return rows + row * width; },
              division.by_columns);
        in_parts(count, division.by_columns, [&](int64_t begin, int64_t end) {
            std::memcpy(own + begin * width, states + (first + begin) * width, 4 * (end - begin) * width);
            for (int64_t at = begin * width; at < end * width; at += width) {
                add_normed(rows + at, norms.post_attention, own + at, width, eps);
                normed_row(own + at, norms.ffn, rows + at, width, eps);
            }
        });
        if (!router) {
            std::fill_n(weights + first, count, 1.0f);
            std::fill_n(chosen + first, count, 0);
            return;
        }
        pack(count, width, panels, [&](int64_t row) { return rows + row * width; }, division.by_columns);
        apply(router, experts, width, panels, count, [&](int64_t row) { return logits + row * experts; },
              division.by_columns);
        for (int64_t row = 0; row < count; row++) {
            const int64_t at = (first + row) * top_k;
            choose(logits + row * experts, experts, top_k, normalise, weights + at, chosen + at);
        }
    });
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

// Gates and ups [E, 2 I, H] and downs [E, H, I].
struct Experts {
    const float *gate_up, *down;
    int64_t count, width, inner;
};

// Tokens in panels through the gates and ups [2 I, H] of an expert -> panels [I, TILE], times each token's weight.
static void activate(const float* gate_up, const float* panels, const float* weights, int64_t count, int64_t width,
                     int64_t inner, float* hidden, int threads) {
    in_parts((inner + ROWS - 1) / ROWS, threads, [&](int64_t begin, int64_t stop) {
        alignas(64) float tile[COLUMNS * TILE];
        for (int64_t from = begin * ROWS; from < least(stop * ROWS, inner); from += ROWS)
            for (int64_t first = 0; first < count; first += TILE) {
                const auto own = [&](int i) {
                    return gate_up + (i / ROWS * inner + least(from + i % ROWS, inner - 1)) * width;
                };
                const int64_t tokens = least(TILE, count - first), end = least(ROWS, inner - from);
                multiply_group(own, ROWS * width, panels + first * width, tokens, width, tile);
                for (int64_t i = 0; i < end; i++) {
                    const float *gates = tile + i * TILE, *ups = gates + ROWS * TILE;
                    float* to = hidden + first * inner + (from + i) * TILE;
                    for (int64_t part = 0; part < tokens; part += LANES)
                        lanes(to + part) =
                            gated(lanes(gates + part), 1.0f) * lanes(ups + part) * lanes(weights + first + part);
                }
            }
    });
}

// states [T, H] += the weighted sums of the experts of normed [T, H], which have a norm [H] or null; order [T * k],
// ends [E] and mixed [T * k, H] are places to work in.
extern "C" void decoder_mix(const float* normed, const float* weights, const int64_t* chosen, Experts experts,
                            const float* norm, float* states, int64_t* order, int64_t* ends, float* mixed,
                            int64_t tokens, int64_t top_k, float eps, int threads) {
    sort_by_expert(chosen, tokens * top_k, experts.count, order, ends);
    int64_t used = 0, items = 0;
    for (int64_t expert = 0; expert < experts.count; expert++) used += ends[expert] > (expert ? ends[expert - 1] : 0);
    const int64_t width = experts.width, inner = experts.inner;
    const Division division(tokens * top_k, 3 * width * inner, threads, used - 1);
    const int64_t span = division.span;
    for (int64_t expert = 0; expert < experts.count; expert++)
        items += division.spans(ends[expert] - (expert ? ends[expert - 1] : 0));
    each_item(items, division.by_tokens, [&](int64_t item) {
        static thread_local Buffer taken, middle;
        int64_t expert = 0, start = 0, before = item;
        for (;; start = ends[expert++]) {
            const int64_t of_expert = division.spans(ends[expert] - start);
            if (before < of_expert) break;
            before -= of_expert;
        }
        const int64_t* own = order + start + before * span;
        const int64_t count = least(span, ends[expert] - start - before * span);
        float *panels = taken.of(span * width), *hidden = middle.of(span * inner);
        alignas(64) float of_tokens[MOST_TOKENS];
        for (int64_t row = 0; row < count; row++) of_tokens[row] = weights[own[row]];
        pack(count, width, panels, [&](int64_t row) { return normed + own[row] / top_k * width; },
             division.by_columns);
        activate(experts.gate_up + expert * 2 * inner * width, panels, of_tokens, count, width, inner, hidden,
                 division.by_columns);
        apply(experts.down + expert * width * inner, width, inner, hidden, count,
              [&](int64_t row) { return mixed + own[row] * width; }, division.by_columns);
    });
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t token = 0; token < tokens; token++) {
        float* sum = mixed + token * top_k * width;
        for (int64_t k = 1; k < top_k; k++)
#pragma omp simd
            for (int64_t i = 0; i < width; i++) sum[i] += sum[k * width + i];
        add_normed(sum, norm, states + token * width, width, eps);
    }
}
