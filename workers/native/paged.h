// Shared by all kernels of paged attention: block tables, masks, and writing K and V.
// The struct layouts are mirrored in workers/attention/native.py.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "halves.h"
#include "quantized_kv.h"

extern "C" {

struct Plan {
    int64_t rows, tasks, table_stride, block_size, threads;
    const int64_t *starts, *lengths, *offsets, *slots;
    const int32_t* blocks;      // ids by slot, `table_stride` from slot to slot
    const int64_t* short_rows;  // the `tasks` rows to attend, null for all; K and V of all rows are written
    // Rows with a mask other than the causal one (`TreeMasks` in workers/attention/batch.py); null if there are none.
    const int64_t* first_valid;         // by row: the first place whose K and V are in the cache
    const int64_t *trees, *tree_sizes;  // by row: the first place that the tree mask covers, and their number
    const int64_t* tree_positions;      // of the covered places, `tree_stride` from row to row
    const uint64_t* visible;            // by token: a bit for each covered place, `visible_words` words
    int64_t tree_stride, visible_words;
    int64_t kv_window, kv_sinks;  // `KVWindow` in protos/config/kv_window.py, in all layers; a window of 0: none
};

struct Layer {
    void *keys, *values;
    void *key_scales, *value_scales;  // bf16, one for each token and head; null if the dtype has none
    // Dtypes of the cache, and of queries, new keys and values, and the output (workers/native/dtypes.py).
    int64_t heads, kv_heads, key_size, value_size, stored, computed;
};

struct Call {
    const void *query, *key, *value;
    void* output;
    int64_t query_head, query_token, key_head, key_token, value_head, value_token;  // strides, in elements
    const float* sinks;
    float scaling, softcap;
    int64_t window, window_from_block, causal_block;  // `Options` in workers/attention/backend.py
};

}  // extern "C"

namespace {

// The block table of one row. A cache index is counted in tokens: block * block_size + offset.
struct Table {
    const int32_t* blocks;
    int64_t block_size;
    Table(const Plan& plan, int64_t row)
        : blocks(plan.blocks + plan.slots[row] * plan.table_stride), block_size(plan.block_size) {}
    int64_t index(int64_t place) const {
        return blocks[place / block_size] * block_size + place % block_size;
    }
    // Calls `visit(i, index)` for i = 0, 1 ... and the cache indices of the places from .. to, without a division each.
    template <typename Visit>
    void for_each(int64_t from, int64_t to, Visit&& visit) const {
        int64_t block = from / block_size, within = from % block_size;
        for (int64_t i = 0; i < to - from; ++i) {
            visit(i, blocks[block] * block_size + within);
            if (++within < block_size) continue;
            within = 0;
            ++block;
        }
    }
};

// The mask of one row. Tokens attend to the known places from `first_valid` up to their own, and to those of the `size`
// places from `tree` on whose bits are set in `visible`.
struct Mask {
    int64_t first_valid, tree, size;
    const int64_t* positions;
    Mask(const Plan& plan, int64_t row)
        : first_valid(plan.first_valid ? plan.first_valid[row] : 0),
          tree(plan.trees ? plan.trees[row] : plan.starts[row] + plan.lengths[row]),
          size(plan.trees ? plan.tree_sizes[row] : 0),
          positions(plan.trees ? plan.tree_positions + row * plan.tree_stride : nullptr) {}
    int64_t position(int64_t place) const { return place < tree ? place : positions[place - tree]; }
    // The position from which the window of a token at this one counts.
    int64_t window_end(const Call& call, int64_t position) const {
        return call.window_from_block ? std::min(position, tree) : position;
    }
};

// Keys and values are scattered over the cache, so the hardware prefetcher does not find them.
template <typename T>
void prefetch(const T* from, int64_t size) {
    for (int64_t byte = 0; byte < size * static_cast<int64_t>(sizeof(T)); byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(from) + byte);
}

// Calls `work` with a number of the dtype that the model computes in.
template <typename Work>
void as_computed(const Layer& layer, Work&& work) {
    if (layer.computed == 1)
        work(Bf16{});
    else if (layer.computed == 2)
        work(Fp16{});
    else
        work(0.0f);
}

// Stores the K or V of one token and head; `scale` is written if the dtype has scales.
template <typename T, typename S>
void store_head(const T* from, int64_t size, float* scratch, S* to, [[maybe_unused]] Bf16* scale) {
    if constexpr (std::is_same_v<T, S>)
        std::memcpy(to, from, static_cast<size_t>(size) * sizeof(T));
    else if constexpr (kIsQuantized<S>)
        quantize(from, size, scratch, to, scale);
    else
        for (int64_t i = 0; i < size; ++i) narrow(widen(from[i]), to[i]);
}

template <typename T, typename S>
void write(const void* source, int64_t head_stride, int64_t token_stride, void* pages, void* scales, int64_t heads,
           int64_t size, const Plan& plan) {
    thread_local std::vector<float> scratch;
    scratch.resize(static_cast<size_t>(size));
    const T* from = static_cast<const T*>(source);
    S* to = static_cast<S*>(pages);
    Bf16* scale = static_cast<Bf16*>(scales);
    for (int64_t row = 0; row < plan.rows; ++row) {
        const int64_t start = plan.starts[row];
        Table(plan, row).for_each(start, start + plan.lengths[row], [&](int64_t i, int64_t index) {
            const T* token = from + (plan.offsets[row] + i) * token_stride;
            for (int64_t h = 0; h < heads; ++h)
                store_head(token + h * head_stride, size, scratch.data(), to + (index * heads + h) * size,
                           scale + (index * heads + h));
        });
    }
}

// Writes the K and V of all tokens of the plan.
template <typename S>
void write_tokens(const Plan& plan, const Layer& layer, const Call& call) {
    as_computed(layer, [&](auto number) {
        using T = decltype(number);
        write<T, S>(call.key, call.key_head, call.key_token, layer.keys, layer.key_scales, layer.kv_heads,
                    layer.key_size, plan);
        write<T, S>(call.value, call.value_head, call.value_token, layer.values, layer.value_scales, layer.kv_heads,
                    layer.value_size, plan);
    });
}

// Reads a query of `size` numbers, multiplied by the scale of scores.
template <typename S>
void read_query(const Layer& layer, const Call& call, int64_t token, int64_t head, int64_t size, float* to) {
    const float factor = call.scaling * kUnit<S>;
    as_computed(layer, [&](auto number) {
        using T = decltype(number);
        const T* from = static_cast<const T*>(call.query) + token * call.query_token + head * call.query_head;
        for (int64_t d = 0; d < size; ++d) to[d] = widen(from[d]) * factor;
    });
}

// Writes the result of one query, `from` by the `total` of its weights.
template <typename S>
void write_result(const Layer& layer, const Call& call, int64_t token, int64_t head, const float* from, float total) {
    const float factor = kUnit<S> / total;
    as_computed(layer, [&](auto number) {
        using T = decltype(number);
        T* to = static_cast<T*>(call.output) + (token * layer.heads + head) * layer.value_size;
        for (int64_t e = 0; e < layer.value_size; ++e) narrow(from[e] * factor, to[e]);
    });
}

// The scale of the K or V of one token and head, times the other unit of the dtype.
template <typename S>
float scale_of(const void* scales, int64_t index) {
    return widen(static_cast<const Bf16*>(scales)[index]) * kUnit<S>;
}

}  // namespace
