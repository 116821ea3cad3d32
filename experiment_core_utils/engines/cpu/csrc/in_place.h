// Products of tokens with weights [N, K] that are read where they lie: the tokens lie in panels instead.
//
// A panel holds TILE tokens side by side, [K, TILE]; what it holds behind the last token is multiplied as well and taken
// by nobody. COLUMNS products of each token are made at a time.

#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "products.h"

constexpr int COLUMNS = 2 * ROWS;
// Of a work item: these tokens use weights that the first cache holds.
constexpr int MOST_TOKENS = 192 / TILE * TILE;

// Products of two numbers from which on threads wait for each other between the steps of one call.
constexpr int64_t LARGE = 1 << 26;
// The same, from which on threads take parts of the columns of a span of tokens.
constexpr int64_t SHARED = 1 << 21;

// Threads take spans of tokens, or, where those are few and large, parts of the columns of one span after the other.
struct Division {
    int64_t span;
    int by_tokens, by_columns;

    // Of `tokens` times so many weights, which may make `parts` spans more because experts divide them.
    Division(int64_t tokens, int64_t weights, int threads, int64_t parts = 0)
        : span(least(MOST_TOKENS, in_tiles((tokens + 2 * threads - 1) / (2 * threads)))), by_tokens(threads),
          by_columns(1) {
        if (threads == 1 || spans(tokens) + parts >= 2 * threads || tokens * weights < SHARED) return;
        span = MOST_TOKENS, by_tokens = 1, by_columns = threads;
    }

    int64_t spans(int64_t tokens) const { return (tokens + span - 1) / span; }
};

// body(begin, end) for parts of 0 to `count` by so many threads.
template <typename Body>
static inline void in_parts(int64_t count, int threads, Body body) {
    if (threads == 1) return body((int64_t)0, count);
#pragma omp parallel for num_threads(threads)
    for (int part = 0; part < threads; part++) body(count * part / threads, count * (part + 1) / threads);
}

// COLUMNS rows of weights [K] times the first P * LANES tokens of a panel -> [COLUMNS, TILE]. The rows that are needed
// next lie `ahead` elements behind these: rows are too short for the processor to foresee them.
template <int P>
static __attribute__((noinline)) void multiply_columns(const float* const* weights, int64_t ahead, const float* panel,
                                                       int64_t inner, float* out) {
    constexpr int LINE = 16;
    // As many as the registers hold.
    constexpr int N = 2 * P > PARTS ? ROWS : COLUMNS;
    for (int first = 0; first < COLUMNS; first += N, weights += N, out += N * TILE) {
        Lanes sums[N][P] = {};
        const float* tokens = panel;
        for (int64_t start = 0; start < inner; start += LINE) {
#pragma GCC unroll 12
            for (int row = 0; row < N; row++) __builtin_prefetch(weights[row] + start + ahead, 0, 2);
            const int64_t end = least(start + LINE, inner);
            for (int64_t d = start; d < end; d++, tokens += TILE) {
                Lanes columns[P];
#pragma GCC unroll 4
                for (int part = 0; part < P; part++) columns[part] = lanes(tokens + part * LANES);
#pragma GCC unroll 12
                for (int row = 0; row < N; row++)
#pragma GCC unroll 4
                    for (int part = 0; part < P; part++) sums[row][part] += columns[part] * weights[row][d];
            }
        }
#pragma GCC unroll 12
        for (int row = 0; row < N; row++)
#pragma GCC unroll 4
            for (int part = 0; part < P; part++) lanes(out + row * TILE + part * LANES) = sums[row][part];
    }
}

// Of each pair of blocks STEP wide, the right one of the first row and the left one of the second change places.
template <int STEP, int... LANE>
static inline void exchange(Lanes& first, Lanes& second, std::integer_sequence<int, LANE...>) {
    const Lanes left = first, right = second;
#ifdef __clang__
    first = __builtin_shufflevector(left, right, (LANE & STEP ? LANES + LANE - STEP : LANE)...);
    second = __builtin_shufflevector(left, right, (LANE & STEP ? LANES + LANE : LANE + STEP)...);
#else
    first = __builtin_shuffle(left, right, Bits{(LANE & STEP ? LANES + LANE - STEP : LANE)...});
    second = __builtin_shuffle(left, right, Bits{(LANE & STEP ? LANES + LANE : LANE + STEP)...});
#endif
}

// Rows become columns: by blocks of 1, 2, 4 and so on.
template <int STEP = 1>
static inline void transpose(Lanes (&rows)[LANES]) {
#pragma GCC unroll 16
    for (int row = 0; row < LANES; row++)
        if (!(row & STEP)) exchange<STEP>(rows[row], rows[row + STEP], std::make_integer_sequence<int, LANES>());
    if constexpr (2 * STEP < LANES) transpose<2 * STEP>(rows);
}

// body(item) for each of `count` items, by threads that take them by turns. A single thread opens no team: the threads of
// a team within a team are started anew for each part, which takes longer than the products of a short prompt.
template <typename Body>
static inline void each_item(int64_t count, int threads, Body body) {
    if (threads == 1) {
        for (int64_t item = 0; item < count; item++) body(item);
        return;
    }
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t item = 0; item < count; item++) body(item);
}

// Rows [K] of `count` tokens, which row(token) finds, -> panels.
template <typename Row>
static void pack(int64_t count, int64_t inner, float* panels, Row row, int threads) {
    in_parts((count + LANES - 1) / LANES, threads, [&](int64_t begin, int64_t end) {
        for (int64_t first = begin * LANES; first < end * LANES; first += LANES) {
            float* to = panels + first / TILE * TILE * inner + first % TILE;
            const float* from[LANES];
            for (int i = 0; i < LANES; i++) from[i] = row(least(first + i, count - 1));
            int64_t d = 0;
            for (; d + LANES <= inner; d += LANES) {
                Lanes block[LANES];
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) block[i] = lanes(from[i] + d);
                transpose(block);
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) lanes(to + (d + i) * TILE) = block[i];
            }
            for (; d < inner; d++)
                for (int i = 0; i < LANES; i++) to[d * TILE + i] = from[i][d];
        }
    });
}

// COLUMNS rows of weights [K], which row(i) finds, times `tokens` of a panel -> [COLUMNS, TILE].
template <typename Row>
static inline void multiply_group(Row row, int64_t ahead, const float* panel, int64_t tokens, int64_t inner,
                                  float* tile) {
    const float* weights[COLUMNS];
    for (int i = 0; i < COLUMNS; i++) weights[i] = row(i);
    const int64_t parts = (tokens + LANES - 1) / LANES;
    if (parts == 1)
        multiply_columns<1>(weights, ahead, panel, inner, tile);
    else if (parts == 2)
        multiply_columns<2>(weights, ahead, panel, inner, tile);
    else if (parts == 3)
        multiply_columns<std::min(3, PARTS)>(weights, ahead, panel, inner, tile);
    else
        multiply_columns<PARTS>(weights, ahead, panel, inner, tile);
}

// A tile [columns, TILE] -> the places [columns] of its tokens, which row(token) finds.
template <typename Row>
static inline void unpack(const float* tile, int64_t columns, int64_t tokens, Row row) {
    for (int64_t first = 0; first < tokens; first += LANES) {
        const int64_t end = least(LANES, tokens - first);
        int64_t column = 0;
        for (; column + LANES <= columns; column += LANES) {
            Lanes block[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) block[i] = lanes(tile + (column + i) * TILE + first);
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                if (i < end) lanes(row(first + i) + column) = block[i];
        }
        for (; column < columns; column++)
            for (int64_t i = 0; i < end; i++) row(first + i)[column] = tile[column * TILE + first + i];
    }
}

// Weights [N, K], `step` elements from row to row, times `count` tokens in panels -> rows [N], of which row(token) finds
// the place.
template <typename Row>
static void apply(const float* weights, int64_t step, int64_t columns, int64_t inner, const float* panels,
                  int64_t count, Row row, int threads) {
    // Columns that are written together: whole lines of the cache.
    constexpr int WIDE = 4 * COLUMNS;
    static_assert(WIDE % LANES == 0, "see above");
    in_parts((columns + WIDE - 1) / WIDE, threads, [&](int64_t begin, int64_t end) {
        alignas(64) float tile[WIDE * TILE];
        for (int64_t from = begin * WIDE; from < least(end * WIDE, columns); from += WIDE) {
            const int64_t there = least(WIDE, columns - from);
            for (int64_t first = 0; first < count; first += TILE) {
                const int64_t tokens = least(TILE, count - first);
                for (int64_t column = 0; column < there; column += COLUMNS) {
                    const auto own = [&](int i) { return weights + least(from + column + i, columns - 1) * step; };
                    multiply_group(own, COLUMNS * step, panels + first * inner, tokens, inner, tile + column * TILE);
                }
                unpack(tile, there, tokens, [&](int64_t token) { return row(first + token) + from; });
            }
        }
    });
}

// The same of weights whose rows lie one behind the other.
template <typename Row>
static void apply(const float* weights, int64_t columns, int64_t inner, const float* panels, int64_t count, Row row,
                  int threads) {
    apply(weights, inner, columns, inner, panels, count, row, threads);
}
