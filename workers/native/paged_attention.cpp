// Paged attention for CPUs: reads K and V where they lie instead of gathering them first.
//
// One task is one row x one K/V head x a tile of query tokens. It walks the row's keys in tiles of 64 with an
// online softmax in fp32. Compiled for the machine it runs on (workers/native_library.py); the struct layouts
// are mirrored in workers/attention_native.py. No exceptions, no allocation beyond thread-local scratch.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "exp.h"

namespace {

constexpr int64_t kTile = 64;
constexpr int64_t kQueryHeads = 32;  // query tokens x heads handled by one task, at most (one token at least)

struct Bf16 {
    uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(Bf16 x) {
    uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}
inline void narrow(float x, float& to) { to = x; }
inline void narrow(float x, Bf16& to) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        to.bits = static_cast<uint16_t>((bits >> 16) | 0x40u);  // stays a NaN
        return;
    }
    to.bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace

extern "C" {

struct Plan {
    int64_t rows, tasks, table_stride, block_size, threads;
    const int64_t *starts, *lengths, *offsets, *slots;
    const int32_t* blocks;      // ids by slot, `table_stride` from slot to slot
    const int64_t* short_rows;  // the `tasks` rows this kernel attends, null for all; K and V of all rows are written
};

struct Layer {
    void *keys, *values;
    int64_t heads, kv_heads, key_size, value_size, is_bf16;
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
};

template <typename T>
void write(const void* source, int64_t head_stride, int64_t token_stride, void* pages, int64_t heads, int64_t size,
           const Plan& plan) {
    const T* from = static_cast<const T*>(source);
    T* to = static_cast<T*>(pages);
    for (int64_t row = 0; row < plan.rows; ++row) {
        const Table table(plan, row);
        for (int64_t i = 0; i < plan.lengths[row]; ++i)
            for (int64_t h = 0; h < heads; ++h)
                std::memcpy(to + (table.place(plan.starts[row] + i) * heads + h) * size,
                            from + (plan.offsets[row] + i) * token_stride + h * head_stride,
                            static_cast<size_t>(size) * sizeof(T));
    }
}

struct Scratch {
    std::vector<float> query, output, keys, values, scores, largest, total;
};

template <typename T, int KeySize, int ValueSize>
void attend(const Plan& plan, const Layer& layer, const Call& call, int64_t row, int64_t group, int64_t first,
            int64_t count, Scratch& s) {
    const int64_t D = KeySize ? KeySize : layer.key_size, E = ValueSize ? ValueSize : layer.value_size;
    const int64_t share = layer.heads / layer.kv_heads, M = count * share;
    const int64_t start = plan.starts[row] + first, token = plan.offsets[row] + first;
    const Table table(plan, row);
    s.query.resize(M * D);
    s.output.assign(M * E, 0.0f);
    s.keys.resize(kTile * D);
    s.values.resize(kTile * E);
    s.scores.resize(kTile);
    s.largest.assign(M, -std::numeric_limits<float>::infinity());
    s.total.assign(M, 0.0f);
    const T* query = static_cast<const T*>(call.query);
    for (int64_t m = 0; m < M; ++m) {
        const int64_t head = group * share + m % share;
        const T* from = query + (token + m / share) * call.query_token + head * call.query_head;
        float* to = &s.query[m * D];
        for (int64_t d = 0; d < D; ++d) to[d] = widen(from[d]) * call.scaling;
        if (call.sinks) {
            s.largest[m] = call.sinks[head];
            s.total[m] = 1.0f;
        }
    }
    const int64_t end = start + count;
    const int64_t begin = call.window > 0 ? std::max<int64_t>(0, start - call.window + 1) : 0;
    for (int64_t base = begin; base < end; base += kTile) {
        const int64_t n = std::min(kTile, end - base);
        int64_t block = base / plan.block_size, offset = base % plan.block_size;
        for (int64_t j = 0; j < n; ++j) {
            const int64_t place = table.blocks[block] * plan.block_size + offset;
            if (++offset == plan.block_size) {
                offset = 0;
                ++block;
            }
            const T* k = static_cast<const T*>(layer.keys) + (place * layer.kv_heads + group) * D;
            const T* v = static_cast<const T*>(layer.values) + (place * layer.kv_heads + group) * E;
            float *kf = &s.keys[j * D], *vf = &s.values[j * E];
            for (int64_t d = 0; d < D; ++d) kf[d] = widen(k[d]);
            for (int64_t e = 0; e < E; ++e) vf[e] = widen(v[e]);
        }
        for (int64_t m = 0; m < M; ++m) {
            const int64_t position = start + m / share;
            const int64_t lowest = call.window > 0 ? std::max<int64_t>(0, position - call.window + 1) : 0;
            const int64_t from = std::max<int64_t>(0, lowest - base), to = std::min(n, position + 1 - base);
            if (from >= to) continue;
            const float* q = &s.query[m * D];
            float* score = s.scores.data();
            for (int64_t j = from; j < to; ++j) {
                const float* k = &s.keys[j * D];
                float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
                for (int64_t d = 0; d < D; ++d) sum += q[d] * k[d];
                score[j] = sum;
            }
            if (call.softcap > 0.0f)
                for (int64_t j = from; j < to; ++j) score[j] = std::tanh(score[j] / call.softcap) * call.softcap;
            float largest = s.largest[m];
            bool broken = false;
            for (int64_t j = from; j < to; ++j) {
                largest = score[j] > largest ? score[j] : largest;
                broken |= !(score[j] - score[j] == 0.0f);
            }
            float* out = &s.output[m * E];
            if (broken) {  // an infinite or NaN score: this query's result is NaN, as it would be anywhere
                s.total[m] = std::numeric_limits<float>::quiet_NaN();
                continue;
            }
            const float shrink = s.largest[m] == largest ? 1.0f : exp_negative(s.largest[m] - largest);
            float total = 0.0f;
#pragma omp simd reduction(+ : total)
            for (int64_t j = from; j < to; ++j) {
                score[j] = exp_negative(score[j] - largest);
                total += score[j];
            }
            s.total[m] = s.total[m] * shrink + total;
            s.largest[m] = largest;
            if (shrink != 1.0f)
                for (int64_t e = 0; e < E; ++e) out[e] *= shrink;
            int64_t j = from;
            for (; j + 4 <= to; j += 4) {
                const float *v = &s.values[j * E], a = score[j], b = score[j + 1], c = score[j + 2], d = score[j + 3];
#pragma omp simd
                for (int64_t e = 0; e < E; ++e)
                    out[e] += a * v[e] + b * v[e + E] + c * v[e + 2 * E] + d * v[e + 3 * E];
            }
            for (; j < to; ++j) {
                const float *v = &s.values[j * E], a = score[j];
#pragma omp simd
                for (int64_t e = 0; e < E; ++e) out[e] += a * v[e];
            }
        }
    }
    T* output = static_cast<T*>(call.output);
    for (int64_t m = 0; m < M; ++m) {
        const float scale = 1.0f / s.total[m];
        T* to = output + ((token + m / share) * layer.heads + group * share + m % share) * E;
        for (int64_t e = 0; e < E; ++e) narrow(s.output[m * E + e] * scale, to[e]);
    }
}

template <typename T>
void run(const Plan& plan, const Layer& layer, const Call& call) {
    write<T>(call.key, call.key_head, call.key_token, layer.keys, layer.kv_heads, layer.key_size, plan);
    write<T>(call.value, call.value_head, call.value_token, layer.values, layer.kv_heads, layer.value_size, plan);
    auto work = attend<T, 0, 0>;
    if (layer.key_size == 64 && layer.value_size == 64) work = attend<T, 64, 64>;
    if (layer.key_size == 128 && layer.value_size == 128) work = attend<T, 128, 128>;
    const int64_t step = std::max<int64_t>(1, kQueryHeads * layer.kv_heads / layer.heads);
    const int64_t tasks = plan.tasks * layer.kv_heads;
#pragma omp parallel for num_threads(static_cast<int>(std::min(plan.threads, tasks))) schedule(dynamic, 1)
    for (int64_t task = 0; task < tasks; ++task) {
        thread_local Scratch scratch;
        const int64_t index = task / layer.kv_heads, row = plan.short_rows ? plan.short_rows[index] : index;
        const int64_t length = plan.lengths[row];
        for (int64_t first = 0; first < length; first += step)
            work(plan, layer, call, row, task % layer.kv_heads, first, std::min(step, length - first), scratch);
    }
}

}  // namespace

extern "C" void slipstream_attention(const Plan* plan, const Layer* layer, const Call* call) {
    if (layer->is_bf16)
        run<Bf16>(*plan, *layer, *call);
    else
        run<float>(*plan, *layer, *call);
}
