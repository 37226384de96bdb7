// Paged attention whose bits depend on a query and the keys it sees alone: not on its neighbours, on how many tokens were
// fed at once, on whether the last keys are those of a chain or a branch of a tree, nor on threads and ranks.
//
// A query's keys, in order of position, come in tiles of 32 that begin at multiples of 32. Each tile is one step of an
// online softmax in fp32, with sums in one fixed order (lanes.h). Places that all queries of a task know by the same
// index are read together; what lies in the last tiles of a tree is gathered for each of its nodes.
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
    std::vector<int64_t> positions, places;
};

template <typename T>
struct Task {
    const Plan& plan;
    const Layer& layer;
    const Call& call;
    const int64_t group, start, token, share, M, D, E, DP, EP;  // DP, EP: D and E in whole vectors
    const Table table;
    const View view;
    Scratch& s;
    const T *keys[kTile], *values[kTile];

    Task(const Plan& plan, const Layer& layer, const Call& call, int64_t row, int64_t group, int64_t first,
         int64_t count, Scratch& s)
        : plan(plan), layer(layer), call(call), group(group), start(plan.starts[row] + first),
          token(plan.offsets[row] + first), share(layer.heads / layer.kv_heads), M(count * share), D(layer.key_size),
          E(layer.value_size), DP(padded(D)), EP(padded(E)), table(plan, row), view(plan, row), s(s) {
        read_queries();
        // Whole tiles of known places are the same for everybody. Where there is no tree, the last one is, too.
        const int64_t common = view.size > 0 ? view.area / kTile * kTile : view.area;
        see_known(common);
        if (view.size > 0)
            for (int64_t i = 0; i < count; ++i) see_own(i, common);
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
            s.positions[m] = view.position(start + m / share);
            const T* from = static_cast<const T*>(call.query) + (token + m / share) * call.query_token +
                            head(m) * call.query_head;
            for (int64_t d = 0; d < D; ++d) s.query[m * DP + d] = widen(from[d]) * call.scaling;
            if (!call.sinks) continue;
            s.largest[m] = call.sinks[head(m)];
            s.total[m] = 1.0f;
        }
    }

    // The first place that a query at `position` sees.
    int64_t lowest(int64_t position) const {
        return std::max(view.lowest, call.window > 0 ? position - call.window + 1 : 0);
    }

    void see_known(int64_t common) {
        const auto [least, most] = std::minmax_element(s.positions.begin(), s.positions.end());
        const int64_t behind = std::min(common, *most + 1);
        for (int64_t base = lowest(*least) / kTile * kTile; base < behind; base += kTile) {
            const int64_t n = std::min(kTile, behind - base), skipped = std::max<int64_t>(0, view.lowest - base);
            table.walk(base + skipped, base + n, [&](int64_t j, int64_t place) { find(skipped + j, place); });
            score(0, M, skipped, n);
            for (int64_t m = 0; m < M; ++m)
                take(m, std::max<int64_t>(0, lowest(s.positions[m]) - base), std::min(n, s.positions[m] + 1 - base));
        }
    }

    // What token i sees from `common` on, in order: known places, and then its branch.
    void see_own(int64_t i, int64_t common) {
        const int64_t place = start + i, known = std::min(view.area, place + 1);
        s.places.clear();
        for (int64_t p = common; p < known; ++p) s.places.push_back(p);
        if (place >= view.area)
            for (int64_t node = 0; node < view.size; ++node)
                if (plan.seen[(token + i) * plan.seen_words + node / 64] >> (node % 64) & 1)
                    s.places.push_back(view.area + node);
        // What it does not see comes first. In a tree it does anyway, since positions rise along a branch.
        const int64_t all = static_cast<int64_t>(s.places.size()), least = lowest(s.positions[i * share]);
        std::stable_partition(s.places.begin(), s.places.end(), [&](int64_t p) { return view.position(p) < least; });
        for (int64_t base = 0; base < all; base += kTile) {
            const int64_t n = std::min(kTile, all - base);
            int64_t from = 0;
            while (from < n && view.position(s.places[base + from]) < least) ++from;
            for (int64_t j = from; j < n; ++j) find(j, table.place(s.places[base + j]));
            score(i * share, share, from, n);
            for (int64_t m = i * share; m < (i + 1) * share; ++m) take(m, from, n);
        }
    }

    void find(int64_t j, int64_t place) {
        const int64_t at = place * layer.kv_heads + group;
        keys[j] = static_cast<const T*>(layer.keys) + at * D;
        values[j] = static_cast<const T*>(layer.values) + at * E;
        prefetch(keys[j], D);
        prefetch(values[j], E);
    }

    // Scores queries m .. m + count against the keys from .. to of the tile.
    void score(int64_t m, int64_t count, int64_t from, int64_t to) {
        for (int64_t j = from; j < to; j += 4) {
            const T* some[4];
            for (int64_t i = 0; i < 4; ++i) some[i] = keys[std::min(j + i, to - 1)];
            int64_t q = m;
            for (; q + 2 <= m + count; q += 2) score_some<2>(q, j, to, some);
            if (q < m + count) score_some<1>(q, j, to, some);
        }
    }

    template <int Queries>
    void score_some(int64_t m, int64_t j, int64_t to, const T* const* some) {
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
        for (; d + kLanes <= D; d += kLanes) add(d, [](const T* at) { return load(at); });
        if (d < D) add(d, [&](const T* at) { return load_some(at, D - d); });
        for (int q = 0; q < Queries; ++q) {
            const Four found = sums(total[q][0], total[q][1], total[q][2], total[q][3]);
            std::copy(found.at, found.at + std::min<int64_t>(4, to - j), &s.scores[(m + q) * kTile + j]);
        }
    }

    // One step of query m's softmax: the keys from .. to of the tile are those it sees. Others are never touched: they may
    // not even be numbers.
    void take(int64_t m, int64_t from, int64_t to) {
        if (from >= to) return;
        float* score = &s.scores[m * kTile];
        if (call.softcap > 0.0f)
            for (int64_t j = from; j < to; ++j) score[j] = std::tanh(score[j] / call.softcap) * call.softcap;
        float largest = s.largest[m];
        bool broken = false;
        for (int64_t j = from; j < to; ++j) {
            largest = score[j] > largest ? score[j] : largest;
            broken |= !(score[j] - score[j] == 0.0f);
        }
        if (broken) {  // an infinite or NaN score: this query's result is NaN, as it would be anywhere
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
        add(m, from, to, shrink);
    }

    void add(int64_t m, int64_t from, int64_t to, float shrink) {
        const auto whole = [](const T* at) { return load(at); };
        int64_t e = 0;
        for (; e + 8 * kLanes <= E; e += 8 * kLanes) add_some<8>(m, e, from, to, shrink, whole);
        for (; e + 4 * kLanes <= E; e += 4 * kLanes) add_some<4>(m, e, from, to, shrink, whole);
        for (; e + kLanes <= E; e += kLanes) add_some<1>(m, e, from, to, shrink, whole);
        if (e < E) add_some<1>(m, e, from, to, shrink, [&](const T* at) { return load_some(at, E - e); });
    }

    // Adds the weighted values, Parts vectors of them, key after key.
    template <int Parts, typename Read>
    void add_some(int64_t m, int64_t e, int64_t from, int64_t to, float shrink, Read&& read) {
        float* output = &s.output[m * EP + e];
        const float* weight = &s.scores[m * kTile];
        Lanes total[Parts];
        for (int i = 0; i < Parts; ++i) total[i] = load(output + i * kLanes) * all(shrink);
        for (int64_t j = from; j < to; ++j) {
            const Lanes factor = all(weight[j]);
            for (int i = 0; i < Parts; ++i) total[i] = fma(factor, read(values[j] + e + i * kLanes), total[i]);
        }
        for (int i = 0; i < Parts; ++i) store(total[i], output + i * kLanes);
    }

    void write_output() const {
        T* output = static_cast<T*>(call.output);
        for (int64_t m = 0; m < M; ++m) {
            const float scale = 1.0f / s.total[m];
            T* to = output + ((token + m / share) * layer.heads + head(m)) * E;
            for (int64_t e = 0; e < E; ++e) narrow(s.output[m * EP + e] * scale, to[e]);
        }
    }
};

struct Part {
    int64_t row, first, count;
};

template <typename T>
void run(const Plan& plan, const Layer& layer, const Call& call) {
    write<T>(call.key, call.key_head, call.key_token, layer.keys, layer.kv_heads, layer.key_size, plan);
    write<T>(call.value, call.value_head, call.value_token, layer.values, layer.kv_heads, layer.value_size, plan);
    thread_local std::vector<Part> kept;
    std::vector<Part>& parts = kept;
    parts.clear();
    const int64_t step = std::max<int64_t>(1, kQueryHeads * layer.kv_heads / layer.heads);
    for (int64_t row = 0; row < plan.rows; ++row)
        for (int64_t first = 0; first < plan.lengths[row]; first += step)
            parts.push_back({row, first, std::min(step, plan.lengths[row] - first)});
    const int64_t tasks = static_cast<int64_t>(parts.size()) * layer.kv_heads;
#pragma omp parallel for num_threads(static_cast<int>(std::min(plan.threads, tasks))) schedule(dynamic)
    for (int64_t task = 0; task < tasks; ++task) {
        thread_local Scratch scratch;
        const Part& part = parts[task / layer.kv_heads];
        Task<T>(plan, layer, call, part.row, task % layer.kv_heads, part.first, part.count, scratch);
    }
}

}  // namespace

extern "C" void slipstream_invariant_attention(const Plan* plan, const Layer* layer, const Call* call) {
    if (layer->kind == 1)
        run<Bf16>(*plan, *layer, *call);
    else if (layer->kind == 2)
        run<Fp16>(*plan, *layer, *call);
    else
        run<float>(*plan, *layer, *call);
}
