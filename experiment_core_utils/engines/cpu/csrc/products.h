// Products of rows with weights that lie in panels, tile by tile, so that what follows a product is done to a tile at once.
//
// A panel holds TILE columns: [inner, TILE], zeros behind the last column. Rows are taken ROWS at a time; those behind
// the last are read and multiplied as well, so that buffers of rows end at a multiple of ROWS.

#pragma once

#include "lanes.h"

// A product keeps ROWS rows of TILE columns in registers.
#ifdef __AVX512F__
constexpr int ROWS = 6, PARTS = 4;
#else
constexpr int ROWS = 6, PARTS = 2;
#endif
constexpr int TILE = PARTS * LANES;
// The rows of a work item: a multiple of ROWS whose intermediates fit the second cache.
constexpr int SPAN = 96;
static_assert(SPAN % ROWS == 0, "see above");

// Weights of N columns in panels [N / TILE, inner, TILE] and a bias [N], N rounded up to a multiple of TILE.
struct Product {
    const float *weights, *bias;
    int64_t inner, columns;
};

static inline int64_t in_tiles(int64_t columns) { return (columns + TILE - 1) / TILE * TILE; }
static inline int64_t in_spans(int64_t rows) { return (rows + SPAN - 1) / SPAN; }
static inline int64_t least(int64_t left, int64_t right) { return left < right ? left : right; }

// ROWS rows, `step` elements apart, times a panel -> [ROWS, TILE].
static __attribute__((noinline)) void multiply_tile(const float* rows, int64_t step, const float* panel, int64_t inner,
                                                    float* out) {
    Lanes sums[ROWS][PARTS] = {};
    for (int64_t d = 0; d < inner; d++, panel += TILE) {
        Lanes columns[PARTS];
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) columns[part] = lanes(panel + part * LANES);
#pragma GCC unroll 6
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) sums[row][part] += columns[part] * rows[row * step + d];
    }
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) lanes(out + row * TILE + part * LANES) = sums[row][part];
}

// `count` rows times `panels` panels; take(row, panel, tile [TILE]) gets each row of each tile.
template <typename Take>
static void multiply(const float* rows, int64_t step, int64_t count, const float* weights, int64_t inner,
                     int64_t panels, Take take) {
    alignas(64) float tile[ROWS * TILE];
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t first = 0; first < count; first += ROWS) {
            multiply_tile(rows + first * step, step, weights + panel * inner * TILE, inner, tile);
            const int64_t end = least(ROWS, count - first);
            for (int64_t row = 0; row < end; row++) take(first + row, panel, tile + row * TILE);
        }
}

// What a tile holds of a row's columns, of which its first is `from`, and the bias (null: none) -> to [columns].
static inline void put_tile(float* to, const float* tile, const float* bias, int64_t from, int64_t columns) {
    for (int64_t part = from; part < from + TILE; part += LANES)
        if (part + LANES <= columns)
            lanes(to + part) = bias ? lanes(tile + part - from) + lanes(bias + part) : lanes(tile + part - from);
        else
            for (int64_t i = part; i < columns; i++) to[i] = tile[i - from] + (bias ? bias[i] : 0.0f);
}

// The same, added to what is there.
static inline void add_tile(float* to, const float* tile, const float* bias, int64_t from, int64_t columns) {
    for (int64_t part = from; part < from + TILE; part += LANES)
        if (part + LANES <= columns)
            lanes(to + part) += bias ? lanes(tile + part - from) + lanes(bias + part) : lanes(tile + part - from);
        else
            for (int64_t i = part; i < columns; i++) to[i] += tile[i - from] + (bias ? bias[i] : 0.0f);
}
