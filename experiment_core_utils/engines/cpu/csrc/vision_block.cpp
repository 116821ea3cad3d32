// In: states of a vision tower [R, W] in float32; out: a block's products with what lies between them.
//
// A thread takes a span of rows through all that one call does, so that what it makes stays in its cache. Weights are
// read where they lie.

#include "in_place.h"
#include "rows.h"

// Weights [N, K] and a bias [N].
struct Layer {
    const float *weights, *bias;
    int64_t columns, inner;
};

// Of the hidden columns so many are made and used at a time: the second cache holds them.
constexpr int64_t PART = 85 * COLUMNS;

// As `ACTIVATIONS` of vision_block.py.
enum Activation { QUICK_GELU, GELU, TANH_GELU };

static inline Lanes activated(Lanes x, int activation) {
    if (activation == GELU) return gelu(x);
    return activation == TANH_GELU ? tanh_gelu(x) : gated(x, 1.702f);
}

// body(first, count) for spans of rows as equal as whole vectors allow, by so many threads.
template <typename Body>
static inline void in_row_spans(int64_t rows, int threads, Body body) {
    const int64_t vectors = (rows + LANES - 1) / LANES, most = MOST_TOKENS / LANES * threads;
    const int64_t spans = (vectors + most - 1) / most * threads;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t span = 0; span < spans; span++) {
        const int64_t first = vectors * span / spans * LANES, end = vectors * (span + 1) / spans * LANES;
        if (first < end) body(first, least(end, rows) - first);
    }
}

// Rows [C, K] -> products [C, N], the bias not added; `panels` is a place to work in.
template <typename Row>
static inline void multiply_rows(const Layer& layer, int64_t count, Row row, float* panels, float* out) {
    pack(count, layer.inner, panels, row, 1);
    apply(layer.weights, layer.columns, layer.inner, panels, count,
          [&](int64_t token) { return out + token * layer.columns; }, 1);
}

// Row [W] and a bias [W], or null, added to what is there.
static inline void add_row(float* to, const float* row, const float* bias, int64_t width) {
#pragma omp simd
    for (int64_t i = 0; i < width; i++) to[i] += bias ? row[i] + bias[i] : row[i];
}

// Joint rows [R, N] of queries, keys and values of the normed states.
extern "C" void vision_project(const float* states, Norm norm, Layer joint, float* out, int64_t rows, int threads) {
    const int64_t width = joint.inner, columns = joint.columns;
    in_row_spans(rows, threads, [&](int64_t first, int64_t count) {
        static thread_local Buffer buffer, taken;
        float *normed = buffer.of(count * width), *own = out + first * columns;
        for (int64_t row = 0; row < count; row++)
            layer_norm(states + (first + row) * width, norm, normed + row * width, width);
        multiply_rows(joint, count, [&](int64_t row) { return normed + row * width; }, taken.of(MOST_TOKENS * width), own);
        for (int64_t row = 0; row < count; row++)
#pragma omp simd
            for (int64_t i = 0; i < columns; i++) own[row * columns + i] += joint.bias[i];
    });
}

// The block behind its attention: states [R, W] += output of attended [R, A], then += the products around the activation.
extern "C" void vision_finish(const float* attended, float* states, Layer output, Norm norm, Layer inner, Layer outer,
                              int activation, int64_t rows, int threads) {
    const int64_t width = output.columns, hidden_width = inner.columns;
    in_row_spans(rows, threads, [&](int64_t first, int64_t count) {
        static thread_local Buffer taken, buffer, middle;
        float *own = states + first * width, *made = buffer.of(count * width);
        float *panels = taken.of(MOST_TOKENS * std::max(width, output.inner)), *hidden = middle.of(MOST_TOKENS * PART);
        multiply_rows(output, count, [&](int64_t row) { return attended + (first + row) * output.inner; }, panels, made);
        for (int64_t row = 0; row < count; row++) {
            add_row(own + row * width, made + row * width, output.bias, width);
            layer_norm(own + row * width, norm, made + row * width, width);
        }
        pack(count, width, panels, [&](int64_t row) { return made + row * width; }, 1);
        alignas(64) float tile[COLUMNS * TILE];
        for (int64_t begin = 0; begin < hidden_width; begin += PART) {
            const int64_t part_width = least(PART, hidden_width - begin);
            for (int64_t from = 0; from < part_width; from += COLUMNS)
                for (int64_t start = 0; start < count; start += TILE) {
                    const auto weights = [&](int i) {
                        return inner.weights + (begin + least(from + i, part_width - 1)) * width;
                    };
                    const int64_t tokens = least(TILE, count - start), end = least(COLUMNS, part_width - from);
                    multiply_group(weights, COLUMNS * width, panels + start * width, tokens, width, tile);
                    // Where they lie side by side by token, as the next product takes them.
                    float* to = hidden + start * part_width + from * TILE;
                    for (int64_t i = 0; i < end; i++)
                        for (int64_t part = i * TILE; part < i * TILE + tokens; part += LANES)
                            lanes(to + part) =
                                activated(lanes(tile + part) + inner.bias[begin + from + i], activation);
                }
            apply(outer.weights + begin, outer.inner, width, part_width, hidden, count,
                  [&](int64_t row) { return made + row * width; }, 1);
            for (int64_t row = 0; row < count; row++)
                add_row(own + row * width, made + row * width, begin ? nullptr : outer.bias, width);
        }
    });
}
