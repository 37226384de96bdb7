// Shared by all kernels of paged attention: block tables, masks, and writing K and V.
// The struct layouts are mirrored in workers/attention/native.py.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

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
    int64_t heads, kv_heads, key_size, value_size, kind;  // kind: 0 for fp32, 1 for bf16, 2 for fp16
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

template <typename T>
void write(const void* source, int64_t head_stride, int64_t token_stride, void* pages, int64_t heads, int64_t size,
           const Plan& plan) {
    const T* from = static_cast<const T*>(source);
    T* to = static_cast<T*>(pages);
    for (int64_t row = 0; row < plan.rows; ++row) {
        const int64_t start = plan.starts[row];
        Table(plan, row).for_each(start, start + plan.lengths[row], [&](int64_t i, int64_t index) {
            const T* token = from + (plan.offsets[row] + i) * token_stride;
            for (int64_t h = 0; h < heads; ++h)
                std::memcpy(to + (index * heads + h) * size, token + h * head_stride,
                            static_cast<size_t>(size) * sizeof(T));
        });
    }
}

}  // namespace
