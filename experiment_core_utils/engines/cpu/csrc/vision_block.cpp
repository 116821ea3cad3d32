// In: states of a vision tower [R, W] in float32; out: a block's products with what lies between them.
//
// A thread takes a span of rows through all that one call does, so that what it makes stays in its second cache.

#include "products.h"
#include "rows.h"

static float* normed_span(const float* states, const Norm& norm, int64_t count, int64_t width, Buffer& buffer) {
    float* normed = buffer.of(SPAN * width);
    for (int64_t row = 0; row < count; row++) layer_norm(states + row * width, norm, normed + row * width, width);
    return normed;
}

// Joint rows [R, N] of queries, keys and values of the normed states.
extern "C" void vision_project(const float* states, Norm norm, Product joint, float* out, int64_t rows, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t span = 0; span < in_spans(rows); span++) {
        static thread_local Buffer buffer;
        const int64_t first = span * SPAN, count = least(SPAN, rows - first), columns = joint.columns;
        const float* normed = normed_span(states + first * joint.inner, norm, count, joint.inner, buffer);
        const auto take = [&](int64_t row, int64_t panel, const float* tile) {
            put_tile(out + (first + row) * columns, tile, joint.bias, panel * TILE, columns);
        };
        multiply(normed, joint.inner, count, joint.weights, joint.inner, in_tiles(columns) / TILE, take);
    }
}

// The block behind its attention: states [R, W] += output of attended [R, A], then += the products around the quick GELU.
extern "C" void vision_finish(const float* attended, float* states, Product output, Norm norm, Product inner,
                              Product outer, int64_t rows, int threads) {
    const int64_t width = output.columns, step = in_tiles(inner.columns);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t span = 0; span < in_spans(rows); span++) {
        static thread_local Buffer taken, buffer, middle;
        const int64_t first = span * SPAN, count = least(SPAN, rows - first);
        float *own = states + first * width, *rows_in = taken.of(SPAN * output.inner), *hidden = middle.of(SPAN * step);
        // A copy, because the rows behind the last are read.
        for (int64_t i = 0; i < count * output.inner; i++) rows_in[i] = attended[first * output.inner + i];
        const auto add = [&](const Product& product) {
            return [&](int64_t row, int64_t panel, const float* tile) {
                add_tile(own + row * width, tile, product.bias, panel * TILE, width);
            };
        };
        multiply(rows_in, output.inner, count, output.weights, output.inner, in_tiles(width) / TILE, add(output));
        const float* normed = normed_span(own, norm, count, width, buffer);
        const auto activate = [&](int64_t row, int64_t panel, const float* tile) {
            for (int part = 0; part < TILE; part += LANES) {
                const int64_t column = panel * TILE + part;
                lanes(hidden + row * step + column) = gated(lanes(tile + part) + lanes(inner.bias + column), 1.702f);
            }
        };
        multiply(normed, width, count, inner.weights, width, step / TILE, activate);
        multiply(hidden, step, count, outer.weights, outer.inner, in_tiles(width) / TILE, add(outer));
    }
}

extern "C" int tile_width() { return TILE; }
