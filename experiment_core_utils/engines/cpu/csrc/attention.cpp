// In: queries, keys and values in float32, heads HEAD wide; out: softmax(q k^T / sqrt(HEAD)) v, causal or not.
//
// Rows of scores are kept whole (ROWS of them at a time lie in the first or second cache), so that their maximum is
// known before the exponentials are taken and nothing is scaled twice. Compiled with -DHEAD=... for one head width.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "lanes.h"

#ifdef __AVX512F__
constexpr int ROWS = 12;
#else
constexpr int ROWS = 6;
#endif
// The width of a tile of keys, and the queries of a work item: a multiple of ROWS.
constexpr int TILE = 2 * LANES, SPAN = 192;
static_assert(SPAN % ROWS == 0, "see above");
// A head's values in whole vectors, zeros behind the last.
constexpr int WHOLE = (HEAD + LANES - 1) / LANES * LANES;

// Elements from one batch entry, head or token to the next; the elements of a head are neighbours.
struct Strides {
    int64_t batch, head, token;
};

// Keys tile by tile with the tokens of a tile side by side, zeros behind the last; values token by token.
static void pack(const float* keys, int64_t key_step, const float* values, int64_t value_step, int64_t tokens,
                 int64_t padded, float* packed_keys, float* packed_values) {
    for (int64_t first = 0; first < padded; first += TILE, packed_keys += TILE * HEAD) {
        const int64_t there = tokens - first < TILE ? tokens - first : TILE;
        if (there < TILE) std::memset(packed_keys, 0, 4 * TILE * HEAD);
        for (int64_t token = 0; token < there; token++)
            for (int d = 0; d < HEAD; d++) packed_keys[d * TILE + token] = keys[(first + token) * key_step + d];
    }
    for (int64_t token = 0; token < tokens; token++, packed_values += WHOLE) {
        std::memcpy(packed_values, values + token * value_step, 4 * HEAD);
        for (int d = HEAD; d < WHOLE; d++) packed_values[d] = 0.0f;
    }
}

// ROWS queries [ROWS, HEAD] against the first `seen` keys -> scores [ROWS, padded].
static void score(const float* queries, const float* keys, int64_t seen, int64_t padded, float* scores) {
    for (int64_t token = 0; token < seen; token += TILE) {
        Lanes sums[ROWS][2] = {};
        const float* key = keys + token * HEAD;
        for (int d = 0; d < HEAD; d++, key += TILE) {
            const Lanes left = lanes(key), right = lanes(key + LANES);
#pragma GCC unroll 12
            for (int row = 0; row < ROWS; row++) {
                sums[row][0] += left * queries[row * HEAD + d];
                sums[row][1] += right * queries[row * HEAD + d];
            }
        }
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; row++) {
            lanes(scores + row * padded + token) = sums[row][0];
            lanes(scores + row * padded + token + LANES) = sums[row][1];
        }
    }
}

// Rows of scores become powers of two over their maximum, zeros before and behind what each has seen; factors: one over
// their sums.
// Lanes are joined for all rows at once: one row's chain of dependent steps would take as long as its exponentials.
static void soften(float* scores, int64_t padded, const int64_t* unseen, const int64_t* seen, float* factors) {
    float most[ROWS][LANES], sums[ROWS][LANES], maxima[ROWS], totals[ROWS] = {};
    for (int row = 0; row < ROWS; row++) {
        float* own = scores + row * padded;
        const int64_t end = (seen[row] + LANES - 1) / LANES * LANES;
        for (int64_t token = seen[row]; token < end; token++) own[token] = -INFINITY;
        for (int64_t token = 0; token < unseen[row]; token++) own[token] = -INFINITY;
        Lanes found = all(-INFINITY);
        for (int64_t token = 0; token < end; token += LANES) found = larger(found, lanes(own + token));
        lanes(most[row]) = found;
        maxima[row] = -INFINITY;
    }
    for (int lane = 0; lane < LANES; lane++)
        for (int row = 0; row < ROWS; row++) maxima[row] = most[row][lane] > maxima[row] ? most[row][lane] : maxima[row];
    for (int row = 0; row < ROWS; row++) {
        float* own = scores + row * padded;
        const int64_t end = (seen[row] + LANES - 1) / LANES * LANES;
        Lanes sum = {};
#pragma GCC unroll 2
        for (int64_t token = 0; token < end; token += LANES) {
            const Lanes weight = power_of_two(lanes(own + token) - maxima[row]);
            lanes(own + token) = weight;
            sum += weight;
        }
        lanes(sums[row]) = sum;
        for (int64_t token = seen[row]; token < end; token++) own[token] = 0.0f;
    }
    for (int lane = 0; lane < LANES; lane++)
        for (int row = 0; row < ROWS; row++) totals[row] += sums[row][lane];
    for (int row = 0; row < ROWS; row++) factors[row] = 1.0f / totals[row];
}

// Weights [ROWS, padded] times P vectors of each of the first `seen` values, each row times its factor -> the first
// `rows` of out, as far as the head goes.
template <int P>
static void mix_columns(const float* weights, int64_t padded, const float* values, int64_t seen, const float* factors,
                        float* out, int64_t out_step, int rows, int column) {
    Lanes sums[ROWS][P] = {};
    for (int64_t token = 0; token < seen; token++) {
        Lanes value[P];
#pragma GCC unroll 2
        for (int part = 0; part < P; part++) value[part] = lanes(values + token * WHOLE + column + part * LANES);
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 2
            for (int part = 0; part < P; part++) sums[row][part] += value[part] * weights[row * padded + token];
    }
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 2
        for (int part = 0; part < P; part++) {
            if (row >= rows) continue;
            const int at = column + part * LANES;
            const Lanes found = sums[row][part] * factors[row];
            if (at + LANES <= HEAD)
                lanes(out + row * out_step + at) = found;
            else
                for (int d = at; d < HEAD; d++) out[row * out_step + d] = found[d - at];
        }
}

static void mix(const float* weights, int64_t padded, const float* values, int64_t seen, const float* factors,
                float* out, int64_t out_step, int rows) {
    for (int column = 0; column + TILE <= WHOLE; column += TILE)
        mix_columns<2>(weights, padded, values, seen, factors, out, out_step, rows, column);
    if (WHOLE % TILE) mix_columns<1>(weights, padded, values, seen, factors, out, out_step, rows, WHOLE - LANES);
}

// What a thread works in; kept between calls.
struct Space {
    Buffer held;
    float *keys, *values, *scores, *queries;

    void fit(int64_t padded) {
        keys = held.of((HEAD + WHOLE + ROWS) * padded + ROWS * HEAD);
        values = keys + HEAD * padded;
        scores = values + WHOLE * padded;
        queries = scores + ROWS * padded;
    }
};

// [B, N, T, HEAD] each, keys and values with N / `sharing` heads, anywhere by their strides. With a window (0: none) a
// causal query sees itself and the window - 1 keys before it.
extern "C" void attend(const float* queries, const float* keys, const float* values, float* out, int64_t batch,
                       int64_t heads, int64_t sharing, int64_t tokens, Strides query, Strides key, Strides value,
                       Strides mixed, int causal, int64_t window, int threads) {
    const int64_t spans = (tokens + SPAN - 1) / SPAN, items = batch * heads * spans;
    const int64_t padded = (tokens + TILE - 1) / TILE * TILE;
    // Exponentials are taken as powers of two.
    const float scale = 1.44269504f / std::sqrt((float)HEAD);
#pragma omp parallel num_threads(threads)
    {
        static thread_local Space space;
        space.fit(padded);
        float *const asked = space.queries, *const scores = space.scores;
        int64_t packed = -1;
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < items; item++) {
            const int64_t entry = item / spans / heads, head = item / spans % heads, shared = head / sharing;
            if (packed != item / spans) {
                pack(keys + entry * key.batch + shared * key.head, key.token,
                     values + entry * value.batch + shared * value.head, value.token, tokens, padded, space.keys,
                     space.values);
                packed = item / spans;
            }
            const float* own = queries + entry * query.batch + head * query.head;
            float* to = out + entry * mixed.batch + head * mixed.head;
            const int64_t first = item % spans * SPAN, last = first + SPAN < tokens ? first + SPAN : tokens;
            for (int64_t at = first; at < last; at += ROWS) {
                const int rows = last - at < ROWS ? (int)(last - at) : ROWS;
                // Keys that none of these rows sees, in whole tiles, are left out.
                const int64_t left = window && at >= window ? (at + 1 - window) / TILE * TILE : 0;
                const int64_t seen = (causal ? at + rows : tokens) - left;
                std::memset(asked, 0, 4 * ROWS * HEAD);
                for (int row = 0; row < rows; row++)
                    for (int d = 0; d < HEAD; d++)
                        asked[row * HEAD + d] = own[(at + row) * query.token + d] * scale;
                score(asked, space.keys + left * HEAD, seen, padded, scores);
                float factors[ROWS];
                int64_t own_seen[ROWS], unseen[ROWS] = {};
                for (int row = 0; row < ROWS; row++) own_seen[row] = causal && row < rows ? at + row + 1 - left : seen;
                if (window)
                    for (int row = 0; row < rows; row++) unseen[row] = std::max<int64_t>(0, own_seen[row] - window);
                soften(scores, padded, unseen, own_seen, factors);
                // Those of the block that a row does not see; its last vector is zero there already.
                for (int row = 0; row < ROWS; row++)
                    for (int64_t token = own_seen[row]; token < seen; token++)
                        scores[row * padded + token] = 0.0f;
                mix(scores, padded, space.values + left * WHOLE, seen, factors, to + at * mixed.token, mixed.token, rows);
            }
        }
    }
}
