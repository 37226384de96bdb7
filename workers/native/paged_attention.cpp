// Paged attention for CPUs: reads K and V in place instead of gathering them first.
//
// One task is one row x one K/V head x a few query tokens. It reads the row's keys in tiles of 32 with an online
// softmax in fp32. The scales of a quantised cache multiply scores and weights, one for each key, not K and V.
// Compiled for the machine it runs on (workers/native/build.py), with QUANTIZED_KV for int8 and fp8 caches, else for
// fp32 and bf16. No exceptions, no allocation beyond thread-local scratch.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "exp.h"
#include "halves.h"
#include "lanes.h"
#include "paged.h"

namespace {

constexpr int64_t kTile = 32;
constexpr int64_t kQueryHeads = 32;  // query tokens x heads handled by one task, at most (one token at least)

// Vector sums that stay in registers together with their operands.
#if defined(__AVX512F__)
constexpr int kSums = 16;
#else
constexpr int kSums = 8;
#endif
constexpr int kKeys = 4;  // scored at a time: `sums` reduces four vectors in the time of two

struct Scratch {
    std::vector<float> query, output, scores, largest, total;
    std::vector<int64_t> positions;       // from which the windows of the layer count, by query
    std::vector<int64_t> lowest, recent;  // the first places of the layer's window, and of the KV window as well
};

// Attends the M queries of one task to the row's keys, a tile of n keys at a time. S is the dtype of the cache. Size is
// the head size of keys and values if it is known at compile time, else 0.
template <typename S, int Size>
struct Task {
    const Plan& plan;
    const Layer& layer;
    const Call& call;
    const int64_t group, start, token, share, M, D, E;  // `start`: the first query's place; `token`: its flat index
    const Table table;
    const Mask mask;
    Scratch& s;
    int64_t base = 0, n = 0;  // the tile: places base .. base + n
    const int64_t* from_place = nullptr;  // the first place that each query attends to in this pass
    const S *keys[kTile], *values[kTile];
    float key_scales[kTile], value_scales[kTile];  // of a quantised cache

    Task(const Plan& plan, const Layer& layer, const Call& call, int64_t row, int64_t group, int64_t first,
         int64_t count, Scratch& s)
        : plan(plan), layer(layer), call(call), group(group), start(plan.starts[row] + first),
          token(plan.offsets[row] + first), share(layer.heads / layer.kv_heads), M(count * share),
          D(Size ? Size : layer.key_size), E(Size ? Size : layer.value_size), table(plan, row), mask(plan, row), s(s) {
        read_queries();
        const int64_t end = std::min(mask.tree, *std::max_element(s.positions.begin(), s.positions.end()) + 1);
        const bool has_gap = plan.kv_window > 0 && *std::max_element(s.recent.begin(), s.recent.end()) > plan.kv_sinks;
        attend_known(s.lowest, 0, has_gap ? std::min(end, plan.kv_sinks) : end);
        if (has_gap) attend_known(s.recent, plan.kv_sinks, end);
        if (mask.size > 0) attend_tree(count);
        write_output();
    }

    // Attends every query to the keys of the places from .. to, from its `first_place` up to its own position.
    void attend_known(const std::vector<int64_t>& first_place, int64_t from, int64_t to) {
        from_place = first_place.data();
        from = std::max({from, mask.first_valid, *std::min_element(first_place.begin(), first_place.end())});
        for (base = from; base < to; base += kTile) {
            n = std::min(kTile, to - base);
            find_keys(to);
            score();
            for (int64_t m = 0; m < M; ++m) softmax_step(m, first(m), last(m));
            add_values();
        }
    }

    void attend_tree(int64_t count) {
        const int64_t end = mask.tree + mask.size;
        for (base = mask.tree; base < end; base += kTile) {
            n = std::min(kTile, end - base);
            find_keys(end);
            score();
            for (int64_t i = 0; i < count; ++i) attend_runs(i * share, visible(i));
        }
    }

    // Returns a bit for each key of this tile of the tree: whether token i attends to it.
    uint32_t visible(int64_t i) const {
        const int64_t offset = base - mask.tree;  // a whole number of tiles
        uint32_t bits = static_cast<uint32_t>(plan.visible[(token + i) * plan.visible_words + offset / 64] >>
                                              (offset % 64));
        if (n < kTile) bits &= (1u << n) - 1;
        if (call.window > 0)
            for (int64_t j = 0; j < n; ++j)
                if (s.positions[i * share] - mask.positions[offset + j] >= call.window) bits &= ~(1u << j);
        if (plan.kv_window > 0)
            for (int64_t j = 0; j < n; ++j)
                if (mask.position(start + i) - mask.positions[offset + j] >= plan.kv_window &&
                    mask.positions[offset + j] >= plan.kv_sinks)
                    bits &= ~(1u << j);
        if (call.causal_block)
            for (int64_t j = 0; j < n; ++j)
                if (mask.positions[offset + j] > mask.position(start + i)) bits &= ~(1u << j);
        return bits;
    }

    // Attends a token's heads, the first of which is query m, to these keys: one run of consecutive keys at a time.
    void attend_runs(int64_t m, uint32_t bits) {
        while (bits) {
            const int64_t from = __builtin_ctz(bits), to = from + __builtin_ctzll(~(uint64_t{bits} >> from));
            for (int64_t i = 0; i < share; ++i) softmax_step(m + i, from, to);
            for (int64_t i = 0; i < share;) i += add_some(m + i, share - i, from, to);
            bits = to < kTile ? bits & (~0u << to) : 0;
        }
    }

    int64_t head(int64_t m) const { return group * share + m % share; }
    // The keys of the tile that query m attends to are first(m) .. last(m) - 1.
    int64_t last(int64_t m) const { return std::min(n, s.positions[m] + 1 - base); }
    int64_t first(int64_t m) const { return std::max<int64_t>(0, from_place[m] - base); }

    void read_queries() {
        s.query.resize(M * D);
        s.output.assign(M * E, 0.0f);
        s.scores.resize(M * kTile);
        s.largest.assign(M, -std::numeric_limits<float>::infinity());
        s.total.assign(M, 0.0f);
        s.positions.resize(M);
        s.lowest.assign(M, 0);
        s.recent.resize(M);
        for (int64_t m = 0; m < M; ++m) {
            const int64_t own = mask.position(start + m / share);
            s.positions[m] = mask.window_end(call, own);
            if (call.window > 0) s.lowest[m] = s.positions[m] - call.window + 1;
            s.recent[m] = std::max(s.lowest[m], plan.kv_window > 0 ? own - plan.kv_window + 1 : 0);
            read_query<S>(layer, call, token + m / share, head(m), D, &s.query[m * D]);
            if (!call.sinks) continue;
            s.largest[m] = call.sinks[head(m)];
            s.total[m] = 1.0f;
        }
    }

    // Finds the tile's keys and values, and prefetches the keys of the next tile as far as `to`.
    void find_keys(int64_t to) {
        table.for_each(base, base + n, [&](int64_t j, int64_t index) {
            keys[j] = key(index);
            const int64_t at = index * layer.kv_heads + group;
            values[j] = static_cast<const S*>(layer.values) + at * E;
            prefetch(values[j], E);
            if constexpr (kIsQuantized<S>) {
                key_scales[j] = scale_of<S>(layer.key_scales, at);
                value_scales[j] = scale_of<S>(layer.value_scales, at);
            }
        });
        std::fill(keys + n, keys + kTile, keys[n - 1]);
        if constexpr (kIsQuantized<S>) std::fill(key_scales + n, key_scales + kTile, 0.0f);
        table.for_each(base + n, std::min(base + n + kTile, to),
                       [&](int64_t, int64_t index) { prefetch(key(index), D); });
    }
    const S* key(int64_t index) const {
        return static_cast<const S*>(layer.keys) + (index * layer.kv_heads + group) * D;
    }

    // Scores every query against every key of the tile, masked ones included.
    void score() {
        if constexpr (Size > 0) {
            constexpr int kQueries = kSums / kKeys;
            for (int64_t j = 0; j < n; j += kKeys) {
                int64_t m = 0;
                for (; m + kQueries <= M; m += kQueries) score_some<kQueries>(m, j);
                for (; m < M; ++m) score_some<1>(m, j);
            }
        } else {
            for (int64_t j = 0; j < n; ++j)
                for (int64_t m = 0; m < M; ++m) {
                    float total = 0.0f;
                    for (int64_t d = 0; d < D; ++d) total += s.query[m * D + d] * widen(keys[j][d]);
                    s.scores[m * kTile + j] = kIsQuantized<S> ? total * key_scales[j] : total;
                }
        }
    }

    template <int Queries>
    void score_some(int64_t m, int64_t j) {
        Lanes products[Queries][kKeys];
        for (int q = 0; q < Queries; ++q)
            for (int k = 0; k < kKeys; ++k) products[q][k] = zeros();
        for (int64_t d = 0; d < Size; d += kLanes) {
            Lanes query[Queries];
            for (int q = 0; q < Queries; ++q) query[q] = load(&s.query[(m + q) * Size + d]);
            for (int k = 0; k < kKeys; ++k) {
                const Lanes key = load(keys[j + k] + d);
                for (int q = 0; q < Queries; ++q) products[q][k] = fma(query[q], key, products[q][k]);
            }
        }
        for (int q = 0; q < Queries; ++q) {
            Four scores = sums(products[q][0], products[q][1], products[q][2], products[q][3]);
            if constexpr (kIsQuantized<S>)
                for (int k = 0; k < kKeys; ++k) scores.at[k] *= key_scales[j + k];
            std::memcpy(&s.scores[(m + q) * kTile + j], &scores, sizeof scores);
        }
    }

    // Turns a query's scores of some keys into weights relative to its largest score so far: one step of the softmax.
    [[gnu::noinline]] void softmax_step(int64_t m, int64_t from, int64_t to) {
        if (from >= to) return;
        float* score = &s.scores[m * kTile];
        if (call.softcap > 0.0f)
            for (int64_t j = from; j < to; ++j) score[j] = std::tanh(score[j] / call.softcap) * call.softcap;
        float largest = s.largest[m];
        int is_broken = 0;
#pragma omp simd reduction(max : largest) reduction(| : is_broken)
        for (int64_t j = from; j < to; ++j) {
            largest = score[j] > largest ? score[j] : largest;
            is_broken |= !(score[j] - score[j] == 0.0f);
        }
        if (is_broken) {  // an infinite or NaN score: this query's result is NaN
            s.total[m] = std::numeric_limits<float>::quiet_NaN();
            std::fill(score + from, score + to, 0.0f);
            return;
        }
        const float shrink = s.largest[m] == largest ? 1.0f : exp_negative(s.largest[m] - largest);
        float total = 0.0f;
#pragma omp simd reduction(+ : total)
        for (int64_t j = from; j < to; ++j) {
            const float weight = exp_negative(score[j] - largest);
            total += weight;
            score[j] = kIsQuantized<S> ? weight * value_scales[j] : weight;
        }
        s.total[m] = s.total[m] * shrink + total;
        s.largest[m] = largest;
        if (shrink != 1.0f)
            for (int64_t e = 0; e < E; ++e) s.output[m * E + e] *= shrink;
    }

    // Adds the weighted values, together for queries that attend to the same keys. Masked values are never read: they
    // may be NaN.
    void add_values() {
        for (int64_t m = 0; m < M;) {
            const int64_t from = first(m), to = last(m);
            int64_t same = 1;
            while (same < 4 && m + same < M && first(m + same) == from && last(m + same) == to) ++same;
            m += add_some(m, same, from, to);
        }
    }

    [[gnu::noinline]] int64_t add_some(int64_t m, int64_t same, int64_t from, int64_t to) {
        if (same >= 4) return add<4>(m, from, to);
        return same >= 2 ? add<2>(m, from, to) : add<1>(m, from, to);
    }

    template <int Queries>
    int64_t add(int64_t m, int64_t from, int64_t to) {
        float* output = &s.output[m * E];
        const float* weight = &s.scores[m * kTile];
        if constexpr (Size > 0) {
            constexpr int kParts = std::min<int>(Size / kLanes, kSums / Queries);
            for (int64_t e = 0; e < Size; e += kParts * kLanes) {
                Lanes totals[Queries][kParts];
                for (int q = 0; q < Queries; ++q)
                    for (int i = 0; i < kParts; ++i) totals[q][i] = load(output + q * Size + e + i * kLanes);
                for (int64_t j = from; j < to; ++j) {
                    Lanes value[kParts];
                    for (int i = 0; i < kParts; ++i) value[i] = load(values[j] + e + i * kLanes);
                    for (int q = 0; q < Queries; ++q)
                        for (int i = 0; i < kParts; ++i)
                            totals[q][i] = fma(all(weight[q * kTile + j]), value[i], totals[q][i]);
                }
                for (int q = 0; q < Queries; ++q)
                    for (int i = 0; i < kParts; ++i) store(totals[q][i], output + q * Size + e + i * kLanes);
            }
        } else {
            for (int64_t j = from; j < to; ++j)
                for (int q = 0; q < Queries; ++q)
                    for (int64_t e = 0; e < E; ++e) output[q * E + e] += weight[q * kTile + j] * widen(values[j][e]);
        }
        return Queries;
    }

    void write_output() const {
        for (int64_t m = 0; m < M; ++m)
            write_result<S>(layer, call, token + m / share, head(m), &s.output[m * E], s.total[m]);
    }
};

template <typename S, int Size>
void attend(const Plan& plan, const Layer& layer, const Call& call, int64_t row, int64_t group, int64_t first,
            int64_t count, Scratch& s) {
    Task<S, Size>(plan, layer, call, row, group, first, count, s);
}

template <typename S>
void run(const Plan& plan, const Layer& layer, const Call& call) {
    write_tokens<S>(plan, layer, call);
    auto work = attend<S, 0>;
    if (layer.key_size == 64 && layer.value_size == 64) work = attend<S, 64>;
    if (layer.key_size == 128 && layer.value_size == 128) work = attend<S, 128>;
    const int64_t step = std::max<int64_t>(1, kQueryHeads * layer.kv_heads / layer.heads);
    const int64_t tasks = plan.tasks * layer.kv_heads;
    // A row's heads are adjacent in memory: if there are rows enough, one thread reads them all.
    const int64_t chunk = plan.tasks >= 4 * plan.threads ? layer.kv_heads : 1;
#pragma omp parallel for num_threads(static_cast<int>(std::min(plan.threads, tasks))) schedule(dynamic, chunk)
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
#ifdef QUANTIZED_KV
    if (layer->stored == 3)
        run<Int8>(*plan, *layer, *call);
    else
        run<Fp8>(*plan, *layer, *call);
#else
    if (layer->stored == 1)
        run<Bf16>(*plan, *layer, *call);
    else
        run<float>(*plan, *layer, *call);
#endif
}
