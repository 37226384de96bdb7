// Batch-invariant paged attention: the result of a query depends only on the query and the keys it attends to. It does
// not depend on other rows, on how many tokens are fed at once, on whether the last keys are a chain or a branch of a
// tree, nor on the number of threads and ranks.
//
// A query's keys, in order of position, form tiles of 32 that begin at multiples of 32. Each tile is one step of an
// online softmax in fp32, with sums in one fixed order (lanes.h). Tiles that are the same for all queries of a task are
// read once; the last tiles of a tree are gathered for each of its nodes. The scales of a quantised cache multiply scores
// and weights, one for each key. Compiled with QUANTIZED_KV for int8 and fp8 caches, else for the others.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "exp.h"
#include "lanes.h"
#include "paged.h"

namespace {

constexpr int64_t kTile = 32;
constexpr int64_t kQueryHeads = 32;  // query tokens x heads handled by one task, at most (one token at least)

inline int64_t padded(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

struct Scratch {
    std::vector<float> query, output, scores, largest, total;
    std::vector<int64_t> positions, places;  // from which the queries' windows count; that a query attends to
};

template <typename S>
struct Task {
    const Plan& plan;
    const Layer& layer;
    const Call& call;
    const int64_t group, start, token, share, M, D, E, DP, EP;  // DP, EP: D and E rounded up to whole vectors
    const Table table;
    const Mask mask;
    Scratch& s;
    const S *keys[kTile], *values[kTile];
    float key_scales[kTile], value_scales[kTile];  // of a quantised cache

    Task(const Plan& plan, const Layer& layer, const Call& call, int64_t row, int64_t group, int64_t first,
         int64_t count, Scratch& s)
        : plan(plan), layer(layer), call(call), group(group), start(plan.starts[row] + first),
          token(plan.offsets[row] + first), share(layer.heads / layer.kv_heads), M(count * share), D(layer.key_size),
          E(layer.value_size), DP(padded(D)), EP(padded(E)), table(plan, row), mask(plan, row), s(s) {
        read_queries();
        // Whole tiles of known places are the same for all queries. Without a tree, the last tile is, too.
        const int64_t common = mask.size > 0 ? mask.tree / kTile * kTile : mask.tree;
        attend_known(common);
        if (mask.size > 0)
            for (int64_t i = 0; i < count; ++i) attend_own(i, common);
        write_output();
    }

    int64_t head(int64_t m) const { return group * share + m % share; }

    void read_queries() {
        s.query.assign(M * DP, 0.0f);
        s.output.assign(M * EP, 0.0f);
        s.scores.resize(M * kTile);
        s.largest.assign(M, -std::numeric_limits<float>::infinity());
        s.total.assign(M, 0.0f);
        s.positions.resize(M);
        for (int64_t m = 0; m < M; ++m) {
            s.positions[m] = mask.window_end(call, mask.position(start + m / share));
            read_query<S>(layer, call, token + m / share, head(m), D, &s.query[m * DP]);
            if (!call.sinks) continue;
            s.largest[m] = call.sinks[head(m)];
            s.total[m] = 1.0f;
        }
    }

    // Returns the first place that a query at `position` attends to.
    int64_t first_visible(int64_t position) const {
        return std::max(mask.first_valid, call.window > 0 ? position - call.window + 1 : 0);
    }

    // Attends all queries to the places before `common`.
    void attend_known(int64_t common) {
        const auto [least, most] = std::minmax_element(s.positions.begin(), s.positions.end());
        const int64_t end = std::min(common, *most + 1);
        for (int64_t base = first_visible(*least) / kTile * kTile; base < end; base += kTile) {
            const int64_t n = std::min(kTile, end - base), skipped = std::max<int64_t>(0, mask.first_valid - base);
            table.for_each(base + skipped, base + n, [&](int64_t j, int64_t index) { find(skipped + j, index); });
            score(0, M, skipped, n);
            for (int64_t m = 0; m < M; ++m)
                softmax_step(m, std::max<int64_t>(0, first_visible(s.positions[m]) - base),
                             std::min(n, s.positions[m] + 1 - base));
        }
    }

    // Attends token i to the places from `common` on: known ones, then those of its branch.
    void attend_own(int64_t i, int64_t common) {
        const int64_t place = start + i, known = std::min(mask.tree, place + 1);
        s.places.clear();
        for (int64_t p = common; p < known; ++p) s.places.push_back(p);
        if (place >= mask.tree)
            for (int64_t node = 0; node < mask.size; ++node)
                if ((plan.visible[(token + i) * plan.visible_words + node / 64] >> (node % 64) & 1) &&
                    !(call.causal_block && mask.positions[node] > mask.position(place)))
                    s.places.push_back(mask.tree + node);
        // Places outside the window go first. In a tree they are first already, since positions rise along a branch.
        const int64_t all = static_cast<int64_t>(s.places.size()), least = first_visible(s.positions[i * share]);
        std::stable_partition(s.places.begin(), s.places.end(), [&](int64_t p) { return mask.position(p) < least; });
        for (int64_t base = 0; base < all; base += kTile) {
            const int64_t n = std::min(kTile, all - base);
            int64_t from = 0;
            while (from < n && mask.position(s.places[base + from]) < least) ++from;
            for (int64_t j = from; j < n; ++j) find(j, table.index(s.places[base + j]));
            score(i * share, share, from, n);
            for (int64_t m = i * share; m < (i + 1) * share; ++m) softmax_step(m, from, n);
        }
    }

    void find(int64_t j, int64_t index) {
        const int64_t at = index * layer.kv_heads + group;
        keys[j] = static_cast<const S*>(layer.keys) + at * D;
        values[j] = static_cast<const S*>(layer.values) + at * E;
        if constexpr (kIsQuantized<S>) {
            key_scales[j] = scale_of<S>(layer.key_scales, at);
            value_scales[j] = scale_of<S>(layer.value_scales, at);
        }
        prefetch(keys[j], D);
        prefetch(values[j], E);
    }

    // Scores queries m .. m + count against the keys from .. to of the tile.
    void score(int64_t m, int64_t count, int64_t from, int64_t to) {
        for (int64_t j = from; j < to; j += 4) {
            const S* some[4];
            for (int64_t i = 0; i < 4; ++i) some[i] = keys[std::min(j + i, to - 1)];
            int64_t q = m;
            for (; q + 2 <= m + count; q += 2) score_some<2>(q, j, to, some);
            if (q < m + count) score_some<1>(q, j, to, some);
        }
    }

    template <int Queries>
    void score_some(int64_t m, int64_t j, int64_t to, const S* const* some) {
        Lanes total[Queries][4];
        for (int q = 0; q < Queries; ++q)
            for (int i = 0; i < 4; ++i) total[q][i] = zeros();
        const auto add = [&](int64_t d, auto&& read) {
            Lanes key[4];
            for (int i = 0; i < 4; ++i) key[i] = read(some[i] + d);
            for (int q = 0; q < Queries; ++q) {
                const Lanes query = load(&s.query[(m + q) * DP + d]);
                for (int i = 0; i < 4; ++i) total[q][i] = fma(query, key[i], total[q][i]);
            }
        };
        int64_t d = 0;
        for (; d + kLanes <= D; d += kLanes) add(d, [](const S* at) { return load(at); });
        if (d < D) add(d, [&](const S* at) { return load_some(at, D - d); });
        for (int q = 0; q < Queries; ++q) {
            const Four found = sums(total[q][0], total[q][1], total[q][2], total[q][3]);
            float* scores = &s.scores[(m + q) * kTile + j];
            for (int64_t i = 0; i < std::min<int64_t>(4, to - j); ++i)
                scores[i] = kIsQuantized<S> ? found.at[i] * key_scales[j + i] : found.at[i];
        }
    }

    // One step of query m's softmax over the keys from .. to of the tile. Values of other keys, which may be NaN, are
    // never read.
    void softmax_step(int64_t m, int64_t from, int64_t to) {
        if (from >= to) return;
        float* score = &s.scores[m * kTile];
        if (call.softcap > 0.0f)
            for (int64_t j = from; j < to; ++j) score[j] = std::tanh(score[j] / call.softcap) * call.softcap;
        float largest = s.largest[m];
        bool is_broken = false;
        for (int64_t j = from; j < to; ++j) {
            largest = score[j] > largest ? score[j] : largest;
            is_broken |= !(score[j] - score[j] == 0.0f);
        }
        if (is_broken) {  // an infinite or NaN score: this query's result is NaN
            s.total[m] = std::numeric_limits<float>::quiet_NaN();
            return;
        }
        const float shrink = s.largest[m] == largest ? 1.0f : exp_negative(s.largest[m] - largest);
        std::fill(score, score + from, largest);
        std::fill(score + to, score + kTile, largest);
        for (int64_t j = 0; j < kTile; ++j) score[j] = exp_negative(score[j] - largest);
        std::fill(score, score + from, 0.0f);
        std::fill(score + to, score + kTile, 0.0f);
        Lanes total = zeros();
        for (int64_t j = 0; j < kTile; j += kLanes) total = total + load(score + j);
        s.total[m] = s.total[m] * shrink + sum(total);
        s.largest[m] = largest;
        if constexpr (kIsQuantized<S>)
            for (int64_t j = from; j < to; ++j) score[j] *= value_scales[j];
        add(m, from, to, shrink);
    }

    void add(int64_t m, int64_t from, int64_t to, float shrink) {
        const auto whole = [](const S* at) { return load(at); };
        int64_t e = 0;
        for (; e + 8 * kLanes <= E; e += 8 * kLanes) add_some<8>(m, e, from, to, shrink, whole);
        for (; e + 4 * kLanes <= E; e += 4 * kLanes) add_some<4>(m, e, from, to, shrink, whole);
        for (; e + kLanes <= E; e += kLanes) add_some<1>(m, e, from, to, shrink, whole);
        if (e < E) add_some<1>(m, e, from, to, shrink, [&](const S* at) { return load_some(at, E - e); });
    }

    // Adds the weighted values key by key, `Vectors` vectors of each.
    template <int Vectors, typename Read>
    void add_some(int64_t m, int64_t e, int64_t from, int64_t to, float shrink, Read&& read) {
        float* output = &s.output[m * EP + e];
        const float* weight = &s.scores[m * kTile];
        Lanes total[Vectors];
        for (int i = 0; i < Vectors; ++i) total[i] = load(output + i * kLanes) * all(shrink);
        for (int64_t j = from; j < to; ++j) {
            const Lanes factor = all(weight[j]);
            for (int i = 0; i < Vectors; ++i) total[i] = fma(factor, read(values[j] + e + i * kLanes), total[i]);
        }
        for (int i = 0; i < Vectors; ++i) store(total[i], output + i * kLanes);
    }

    void write_output() const {
        for (int64_t m = 0; m < M; ++m)
            write_result<S>(layer, call, token + m / share, head(m), &s.output[m * EP], s.total[m]);
    }
};

struct Chunk {
    int64_t row, first, count;
};

template <typename S>
void run(const Plan& plan, const Layer& layer, const Call& call) {
    write_tokens<S>(plan, layer, call);
    thread_local std::vector<Chunk> kept;
    std::vector<Chunk>& chunks = kept;
    chunks.clear();
    const int64_t step = std::max<int64_t>(1, kQueryHeads * layer.kv_heads / layer.heads);
    for (int64_t row = 0; row < plan.rows; ++row)
        for (int64_t first = 0; first < plan.lengths[row]; first += step)
            chunks.push_back({row, first, std::min(step, plan.lengths[row] - first)});
    const int64_t tasks = static_cast<int64_t>(chunks.size()) * layer.kv_heads;
#pragma omp parallel for num_threads(static_cast<int>(std::min(plan.threads, tasks))) schedule(dynamic)
    for (int64_t task = 0; task < tasks; ++task) {
        thread_local Scratch scratch;
        const Chunk& chunk = chunks[task / layer.kv_heads];
        Task<S>(plan, layer, call, chunk.row, task % layer.kv_heads, chunk.first, chunk.count, scratch);
    }
}

}  // namespace

extern "C" void slipstream_invariant_attention(const Plan* plan, const Layer* layer, const Call* call) {
#ifdef QUANTIZED_KV
    if (layer->stored == 3)
        run<Int8>(*plan, *layer, *call);
    else
        run<Fp8>(*plan, *layer, *call);
#else
    if (layer->stored == 1)
        run<Bf16>(*plan, *layer, *call);
    else if (layer->stored == 2)
        run<Fp16>(*plan, *layer, *call);
    else
        run<float>(*plan, *layer, *call);
#endif
}
