// In: queries, keys and values in float32, heads HEAD wide; out: softmax(q k^T / sqrt(HEAD)) v, causal or not.
//
// Rows of scores are kept whole (ROWS of them at a time lie in the first or second cache), so that their maximum is
// known before the exponentials are taken and nothing is scaled twice. Compiled with -DHEAD=... for one head width, a
// multiple of 2 * LANES.

#include <cmath>
#include <cstdint>
#include <vector>

#ifdef __AVX512F__
constexpr int LANES = 16, ROWS = 12;
#else
constexpr int LANES = 8, ROWS = 6;
#endif
// The width of a tile of keys, and the queries of a work item: a multiple of ROWS.
constexpr int TILE = 2 * LANES, SPAN = 192;
static_assert(HEAD % TILE == 0 && SPAN % ROWS == 0, "see above");

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Bits __attribute__((vector_size(4 * LANES), aligned(4)));

// Elements from one batch entry, head or token to the next; the elements of a head are neighbours.
struct Strides {
    int64_t batch, head, token;
};

static inline Lanes all(float value) { return Lanes{} + value; }
static inline Lanes& lanes(float* at) { return *(Lanes*)at; }
static inline const Lanes& lanes(const float* at) { return *(const Lanes*)at; }

// e^x for x <= 0, to about one unit in the last place; 0 below -87. x = n ln 2 + r, e^r by a polynomial (Cephes).
static inline Lanes exponential(Lanes x) {
    // Adding it leaves the nearest whole number in the low bits.
    const Lanes rounder = all(12582912.0f);
    const Bits tiny = x < all(-87.0f);
    const Lanes shifted = x * 1.44269504f + rounder, n = shifted - rounder;
    const Lanes r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Lanes p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return (Lanes)(((Bits)p + ((Bits)shifted << 23)) & ~tiny);
}

// Keys tile by tile with the tokens of a tile side by side, zeros behind the last; values token by token.
static void pack(const float* keys, int64_t key_step, const float* values, int64_t value_step, int64_t tokens,
                 int64_t padded, float* packed_keys, float* packed_values) {
    for (int64_t token = 0; token < padded; token++)
        for (int d = 0; d < HEAD; d++)
            packed_keys[(token / TILE * HEAD + d) * TILE + token % TILE] =
                token < tokens ? keys[token * key_step + d] : 0.0f;
    for (int64_t token = 0; token < tokens; token++)
        for (int d = 0; d < HEAD; d++) packed_values[token * HEAD + d] = values[token * value_step + d];
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

// A row of scores becomes exponentials over the row's maximum, zeros behind `seen`; returns one over their sum.
static float soften(float* row, int64_t seen) {
    const int64_t end = (seen + LANES - 1) / LANES * LANES;
    for (int64_t token = seen; token < end; token++) row[token] = -INFINITY;
    Lanes most = all(-INFINITY), sum = {};
    for (int64_t token = 0; token < end; token += LANES) most = lanes(row + token) > most ? lanes(row + token) : most;
    float maximum = most[0], total = 0.0f;
    for (int lane = 1; lane < LANES; lane++) maximum = most[lane] > maximum ? most[lane] : maximum;
    for (int64_t token = 0; token < end; token += LANES) {
        const Lanes weight = exponential(lanes(row + token) - maximum);
        lanes(row + token) = weight;
        sum += weight;
    }
    for (int lane = 0; lane < LANES; lane++) total += sum[lane];
    return 1.0f / total;
}

// Weights [ROWS, padded] times the first `seen` values, each row times its factor -> the first `rows` of out.
static void mix(const float* weights, int64_t padded, const float* values, int64_t seen, const float* factors,
                float* out, int64_t out_step, int rows) {
    for (int column = 0; column < HEAD; column += TILE) {
        Lanes sums[ROWS][2] = {};
        for (int64_t token = 0; token < seen; token++) {
            const float* value = values + token * HEAD + column;
            const Lanes left = lanes(value), right = lanes(value + LANES);
#pragma GCC unroll 12
            for (int row = 0; row < ROWS; row++) {
                sums[row][0] += left * weights[row * padded + token];
                sums[row][1] += right * weights[row * padded + token];
            }
        }
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; row++) {
            if (row >= rows) continue;
            lanes(out + row * out_step + column) = sums[row][0] * factors[row];
            lanes(out + row * out_step + column + LANES) = sums[row][1] * factors[row];
        }
    }
}

// What a thread works in; kept between calls.
struct Space {
    std::vector<float> held;
    float *keys, *values, *scores, *queries;

    void fit(int64_t padded) {
        const size_t wanted = (2 * HEAD + ROWS) * padded + ROWS * HEAD + 16;
        if (held.size() < wanted) held.resize(wanted);
        // At a boundary of 64 bytes, where no load lies across two lines of the cache.
        keys = (float*)(((uintptr_t)held.data() + 63) & ~(uintptr_t)63);
        values = keys + HEAD * padded;
        scores = values + HEAD * padded;
        queries = scores + ROWS * padded;
    }
};

// [B, N, T, HEAD] each, keys and values with N / `sharing` heads, anywhere by their strides.
extern "C" void attend(const float* queries, const float* keys, const float* values, float* out, int64_t batch,
                       int64_t heads, int64_t sharing, int64_t tokens, Strides query, Strides key, Strides value,
                       Strides mixed, int causal, int threads) {
    const int64_t spans = (tokens + SPAN - 1) / SPAN, items = batch * heads * spans;
    const int64_t padded = (tokens + TILE - 1) / TILE * TILE;
    const float scale = 1.0f / std::sqrt((float)HEAD);
#pragma omp parallel num_threads(threads)
    {
        static thread_local Space space;
        space.fit(padded);
        int64_t packed = -1;
#pragma omp for schedule(static)
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
                const int64_t seen = causal ? at + rows : tokens;
                for (int row = 0; row < ROWS; row++)
                    for (int d = 0; d < HEAD; d++)
                        space.queries[row * HEAD + d] = row < rows ? own[(at + row) * query.token + d] * scale : 0.0f;
                score(space.queries, space.keys, seen, padded, space.scores);
                float factors[ROWS];
                for (int row = 0; row < ROWS; row++) {
                    float* scores = space.scores + row * padded;
                    factors[row] = soften(scores, causal && row < rows ? at + row + 1 : seen);
                    // Those of the block that a row does not see; its last vector is zero there already.
                    for (int64_t token = causal && row < rows ? at + row + 1 : seen; token < seen; token++)
                        scores[token] = 0.0f;
                }
                mix(space.scores, padded, space.values, seen, factors, to + at * mixed.token, mixed.token, rows);
            }
        }
    }
}
