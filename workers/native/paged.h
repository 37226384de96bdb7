// What all kernels of paged attention share: where K and V lie, what a token sees, and how K and V are written.
// The struct layouts are mirrored in workers/attention/native.py.
#pragma once
#include <cstdint>
#include <cstring>

extern "C" {

struct Plan {
    int64_t rows, tasks, table_stride, block_size, threads;
    const int64_t *starts, *lengths, *offsets, *slots;
    const int32_t* blocks;      // ids by slot, `table_stride` from slot to slot
    const int64_t* short_rows;  // the `tasks` rows this kernel attends, null for all; K and V of all rows are written
    // Of rows that do not simply see all places up to their own (workers/attention/batch.py, `Area`); null where there are none.
    const int64_t* lowest;              // by row: the first place that is there
    const int64_t *areas, *area_sizes;  // by row: the first place of its area, and their number
    const int64_t* area_positions;      // of the area's places, `area_stride` from row to row
    const uint64_t* seen;               // by token: bits of the places it sees, `seen_words` words
    int64_t area_stride, seen_words;
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
    int64_t window;
};

}  // extern "C"

namespace {

// Where a position's K and V lie, counted in tokens.
struct Table {
    const int32_t* blocks;
    int64_t block_size;
    Table(const Plan& plan, int64_t row)
        : blocks(plan.blocks + plan.slots[row] * plan.table_stride), block_size(plan.block_size) {}
    int64_t place(int64_t position) const {
        return blocks[position / block_size] * block_size + position % block_size;
    }
    // Calls `visit(0, place)`, `visit(1, place)` ... for the positions from .. to, without a division for each.
    template <typename Visit>
    void walk(int64_t from, int64_t to, Visit&& visit) const {
        int64_t block = from / block_size, within = from % block_size;
        for (int64_t i = 0; i < to - from; ++i) {
            visit(i, blocks[block] * block_size + within);
            if (++within < block_size) continue;
            within = 0;
            ++block;
        }
    }
};

// What the tokens of one row see: the known places from `lowest` up to their own position, then what `seen` says of the
// places from `area` on.
struct View {
    int64_t lowest, area, size;
    const int64_t* positions;
    View(const Plan& plan, int64_t row)
        : lowest(plan.lowest ? plan.lowest[row] : 0),
          area(plan.areas ? plan.areas[row] : plan.starts[row] + plan.lengths[row]),
          size(plan.areas ? plan.area_sizes[row] : 0),
          positions(plan.areas ? plan.area_positions + row * plan.area_stride : nullptr) {}
    int64_t position(int64_t place) const { return place < area ? place : positions[place - area]; }
};

// Rows lie all over the cache: without being told, the processor would wait for each.
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
        Table(plan, row).walk(start, start + plan.lengths[row], [&](int64_t i, int64_t place) {
            const T* token = from + (plan.offsets[row] + i) * token_stride;
            for (int64_t h = 0; h < heads; ++h)
                std::memcpy(to + (place * heads + h) * size, token + h * head_stride,
                            static_cast<size_t>(size) * sizeof(T));
        });
    }
}

}  // namespace
