// In: crops, or patch features, in float32; out: the states in front of a vision tower's blocks, or pooled windows.

#include <cstring>

#include "products.h"
#include "rows.h"

struct Crops {
    int64_t count, channels, side, patch;
};

// Crops [K, channels, side, side] -> states [K, P + 1, W]: the class token and patches, positions [P + 1, W] added, normed.
extern "C" void vision_embed(const float* pixels, Product patches, const float* class_token, const float* positions,
                             Norm norm, float* states, Crops crops, int threads) {
    const int64_t grid = crops.side / crops.patch, tokens = grid * grid, width = patches.columns;
    const int64_t spans = in_spans(tokens), plane = crops.side * crops.side, inner = patches.inner;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t item = 0; item < crops.count * spans; item++) {
        static thread_local Buffer buffer;
        const int64_t crop = item / spans, first = item % spans * SPAN, count = least(SPAN, tokens - first);
        float *given = buffer.of(SPAN * inner), *own = states + crop * (tokens + 1) * width;
        for (int64_t row = 0; row < count; row++) {
            const int64_t at = first + row, corner = at / grid * crops.patch * crops.side + at % grid * crops.patch;
            const float* from = pixels + crop * crops.channels * plane + corner;
            float* to = given + row * inner;
            for (int64_t channel = 0; channel < crops.channels; channel++)
                for (int64_t line = 0; line < crops.patch; line++, to += crops.patch)
                    std::memcpy(to, from + channel * plane + line * crops.side, 4 * crops.patch);
        }
        std::memcpy(own + (first + 1) * width, positions + (first + 1) * width, 4 * count * width);
        const auto add = [&](int64_t row, int64_t panel, const float* tile) {
            add_tile(own + (first + 1 + row) * width, tile, nullptr, panel * TILE, width);
        };
        multiply(given, inner, count, patches.weights, inner, in_tiles(width) / TILE, add);
        if (!first)
            for (int64_t i = 0; i < width; i++) own[i] = class_token[i] + positions[i];
        for (int64_t row = first ? first + 1 : 0; row <= first + count; row++)
            layer_norm(own + row * width, norm, own + row * width, width);
    }
}

struct Windows {
    int64_t crops, cells, side, heads;
};

// One query [D] over `count` keys and values, `step` apart -> out [D].
static void pool(const float* query, const float* keys, const float* values, const int64_t* places, int64_t count,
                 int64_t step, int64_t width, float* weights, float* out) {
    const float scale = 1.0f / std::sqrt((float)width);
    float most = -INFINITY, total = 0.0f;
    for (int64_t i = 0; i < count; i++) {
        const float* key = keys + places[i] * step;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t d = 0; d < width; d++) sum += query[d] * key[d];
        weights[i] = sum * scale;
        most = weights[i] > most ? weights[i] : most;
    }
    for (int64_t i = 0; i < count; i++) total += weights[i] = std::exp(weights[i] - most);
    std::memset(out, 0, 4 * width);
    for (int64_t i = 0; i < count; i++) {
        const float *value = values + places[i] * step, weight = weights[i] / total;
#pragma omp simd
        for (int64_t d = 0; d < width; d++) out[d] += weight * value[d];
    }
}

static int64_t in_rows(int64_t rows) { return (rows + ROWS - 1) / ROWS * ROWS; }

// Features [K, P, C] on a square grid of cells, `side` patches wide each -> attended [K * cells * cells, W]: a cell's
// patches by attention, the query from their mean. To patches whose mask [K, P] is 0 the first of pads [2, C] is added
// before, to those below 1 the second.
extern "C" void vision_pool(const float* features, const float* masks, const float* pads, Product query,
                            Product key_value, float* attended, Windows windows, int threads) {
    const int64_t cells = windows.cells, side = windows.side, inner = query.inner, width = query.columns;
    const int64_t patches = cells * side * side, own_patches = side * side, head_width = width / windows.heads;
    const int64_t query_step = in_tiles(width), step = in_tiles(2 * width);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t item = 0; item < windows.crops * cells; item++) {
        static thread_local Buffer taken, averaged, asked, made, small;
        static thread_local std::vector<int64_t> places;
        // A row of cells is a run of patches.
        float *given = taken.of(in_rows(patches) * inner), *means = averaged.of(in_rows(cells) * inner);
        float *queries = asked.of(cells * query_step), *joint = made.of(patches * step);
        std::memcpy(given, features + item * patches * inner, 4 * patches * inner);
        for (int64_t row = 0; row < patches; row++) {
            const float mask = masks[item * patches + row], *pad = mask == 0.0f ? pads : pads + inner;
            for (int64_t d = 0; mask < 1.0f && d < inner; d++) given[row * inner + d] += pad[d];
        }
        places.resize(patches);
        for (int64_t cell = 0; cell < cells; cell++) {
            float* mean = means + cell * inner;
            std::memset(mean, 0, 4 * inner);
            for (int64_t i = 0; i < own_patches; i++) {
                const int64_t place = (i / side * cells + cell) * side + i % side;
                places[cell * own_patches + i] = place;
                for (int64_t d = 0; d < inner; d++) mean[d] += given[place * inner + d];
            }
            for (int64_t d = 0; d < inner; d++) mean[d] /= own_patches;
        }
        const auto put = [](float* to, int64_t to_step, const float* bias) {
            return [=](int64_t row, int64_t panel, const float* tile) {
                put_tile(to + row * to_step, tile, bias, panel * TILE, to_step);
            };
        };
        multiply(means, inner, cells, query.weights, inner, query_step / TILE, put(queries, query_step, query.bias));
        multiply(given, inner, patches, key_value.weights, inner, step / TILE, put(joint, step, key_value.bias));
        for (int64_t cell = 0; cell < cells; cell++)
            for (int64_t head = 0; head < windows.heads; head++)
                pool(queries + cell * query_step + head * head_width, joint + head * head_width,
                     joint + width + head * head_width, places.data() + cell * own_patches, own_patches, step,
                     head_width, small.of(own_patches), attended + (item * cells + cell) * width + head * head_width);
    }
}

extern "C" int tile_width() { return TILE; }
