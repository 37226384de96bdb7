// Sampling on CPUs: the ids of workers/sampling/sample.py:sample, which is the definition, at a fraction of its cost.
//
// The vocabulary is never sorted as a whole. Without limits, a lower bound of each token's score decides which tokens
// can still have the highest score, and only those are scored exactly. With limits, tokens above a falling threshold
// are sorted until the limits are settled, which usually takes a few dozen tokens.
// workers/sampling/sample_native.py mirrors the struct.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "exp.h"

extern "C" struct SampleArguments {
    const float* logits;  // rows x vocab, `stride` elements from row to row
    int64_t stride, rows, vocab, threads;
    const int64_t *slots, *index;  // of each row
    const int64_t* seeds;          // of each slot, as are the limits
    const float* temperature;      // below `min_temperature`: greedy
    const int64_t* top_k;          // 0: off
    const double *top_p, *min_p;   // 1 and 0: off
    float min_temperature;
    int64_t* sampled;  // of each row; -1 where no token can be sampled
};

namespace {

constexpr int64_t kFailed = -1;
constexpr uint64_t kStep = 0x9e3779b97f4a7c15u;
constexpr double kScale = 1.0 / 4503599627370496.0;  // 2^-52
constexpr float kUnits = 17179869184.0f;             // 2^34
constexpr double kSlack = 1.0001;                    // covers the float32 rounding of the bounds
constexpr float kThresholds[] = {1.0f / 256, 1.0f / 65536, 1e-9f, 0.0f};

inline uint64_t mix(uint64_t word) {  // splitmix64's, as in protos/seeds.py
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9u;
    word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
    return word ^ (word >> 31);
}

inline uint64_t row_key(int64_t seed, int64_t index) {
    return mix(mix(static_cast<uint64_t>(seed) + kStep) + static_cast<uint64_t>(index) * kStep);
}

inline int64_t fraction_bits(uint64_t key, int64_t id) {
    return static_cast<int64_t>(mix(key + (static_cast<uint64_t>(id) + 1) * kStep) >> 12);
}

inline double gumbel(uint64_t key, int64_t id) {
    return -std::log(-std::log1p(-(static_cast<double>(fraction_bits(key, id)) + 0.5) * kScale));
}

// The best exact score so far; the lowest id among equals.
struct Best {
    double score = -std::numeric_limits<double>::infinity();
    int64_t id = kFailed;
    void offer(double other, int64_t candidate) {
        if (other > score || (other == score && candidate < id)) {
            score = other;
            id = candidate;
        }
    }
};

struct Candidate {
    float value, weight;
    int64_t id;
};

struct Scratch {
    std::vector<float> value, weight, bound;
    std::vector<Candidate> candidates;
};

// The greatest of n values; NaN if one of them is.
float greatest_of(const float* values, int64_t n) {
    float greatest = -std::numeric_limits<float>::infinity();
    int broken = 0;
#pragma omp simd reduction(max : greatest) reduction(| : broken)
    for (int64_t v = 0; v < n; ++v) {
        greatest = values[v] > greatest ? values[v] : greatest;
        broken |= values[v] != values[v];
    }
    return broken ? std::numeric_limits<float>::quiet_NaN() : greatest;
}

int64_t greedy(const float* logits, int64_t vocab) {
    const float greatest = greatest_of(logits, vocab);
    return std::isfinite(greatest) ? std::find(logits, logits + vocab, greatest) - logits : kFailed;
}

// argmax of log p + g over all tokens. g is -log(-log(1 - u)), so the argmax has the least -log(1 - u) / p, of which
// u / p is a lower bound, tight for the few tokens with a high score.
int64_t sample_free(Scratch& s, uint64_t key, float greatest, int64_t vocab) {
    s.bound.resize(vocab);
    float *bound = s.bound.data(), least = std::numeric_limits<float>::infinity();
    const float* weight = s.weight.data();
#pragma omp simd reduction(min : least)
    for (int64_t v = 0; v < vocab; ++v) {
        bound[v] = static_cast<float>(fraction_bits(key, v)) / weight[v];
        least = bound[v] < least ? bound[v] : least;
    }
    const int64_t first = std::find(bound, bound + vocab, least) - bound;
    Best best;
    best.offer(s.value[first] + gumbel(key, first), first);
    const float limit = static_cast<float>(std::exp(greatest - best.score) * (kSlack / kScale));
    for (int64_t v = 0; v < vocab; ++v)
        if (bound[v] <= limit) best.offer(s.value[v] + gumbel(key, v), v);
    return best.id;
}

// Collects the tokens of at least `threshold` times the greatest probability, most likely first, lowest id first.
void collect(Scratch& s, float threshold, int64_t vocab) {
    s.candidates.clear();
    for (int64_t v = 0; v < vocab; ++v)
        if (s.weight[v] >= threshold && s.value[v] > -std::numeric_limits<float>::infinity())
            s.candidates.push_back({s.value[v], s.weight[v], v});
    std::sort(s.candidates.begin(), s.candidates.end(), [](const Candidate& a, const Candidate& b) {
        return a.value > b.value || (a.value == b.value && a.id < b.id);
    });
}

inline float mass(float weight) { return std::nearbyint(weight * kUnits); }

double mass_of_all(const std::vector<float>& weights, double min_p) {
    const float* weight = weights.data();
    const int64_t n = static_cast<int64_t>(weights.size());
    double total = 0.0;  // of whole numbers below 2^53: exact in any order. Impossible tokens weigh nothing.
#pragma omp simd reduction(+ : total)
    for (int64_t v = 0; v < n; ++v) total += weight[v] >= min_p ? mass(weight[v]) : 0.0f;
    return total;
}

// How many of the candidates min-p and top-k leave. `settled`: all tokens they leave are among the candidates.
int64_t count_likely(const std::vector<Candidate>& c, int64_t top_k, double min_p, bool& settled) {
    int64_t count = static_cast<int64_t>(c.size());
    if (top_k > 0 && top_k <= count) {
        const float last = c[top_k - 1].value;
        count = std::upper_bound(c.begin(), c.end(), last, [](float x, const Candidate& y) { return x > y.value; }) -
                c.begin();
        settled = true;
    }
    const int64_t likely =
        std::partition_point(c.begin(), c.end(), [&](const Candidate& x) { return x.weight >= min_p; }) - c.begin();
    if (likely < static_cast<int64_t>(c.size())) settled = true;
    return std::min(count, likely);
}

// Cuts `count` to the shortest list that holds top_p of `total`; false where the candidates end before it does.
bool cut_nucleus(const std::vector<Candidate>& c, int64_t& count, double top_p, double total) {
    double before = 0.0;
    for (int64_t i = 0; i < count; ++i) {
        if (!(before < top_p * total)) {
            count = i;
            return true;
        }
        before += mass(c[i].weight);
    }
    return false;
}

// argmax of log p + g over the tokens that the limits leave.
int64_t sample_limited(Scratch& s, uint64_t key, int64_t top_k, double top_p, double min_p, int64_t vocab) {
    int64_t count = 0;
    double all = -1.0;  // mass of the tokens that min-p leaves; negative until it is computed
    for (const float threshold : kThresholds) {
        collect(s, threshold, vocab);
        bool settled = threshold == 0.0f || min_p >= threshold;
        count = count_likely(s.candidates, top_k, min_p, settled);
        if (top_p < 1.0 && (settled || top_k <= 0)) {
            double total = 0.0;
            if (settled)
                for (int64_t i = 0; i < count; ++i) total += mass(s.candidates[i].weight);
            else
                total = all = all < 0.0 ? mass_of_all(s.weight, min_p) : all;
            settled |= cut_nucleus(s.candidates, count, top_p, total);
        }
        if (settled) break;
    }
    Best best;
    for (int64_t i = 0; i < count; ++i)
        best.offer(s.candidates[i].value + gumbel(key, s.candidates[i].id), s.candidates[i].id);
    return best.id;
}

int64_t sample(const SampleArguments& c, int64_t row, Scratch& s) {
    const float* logits = c.logits + row * c.stride;
    const int64_t slot = c.slots[row], vocab = c.vocab;
    const float temperature = c.temperature[slot];
    if (temperature < c.min_temperature) return greedy(logits, vocab);
    s.value.resize(vocab);
    s.weight.resize(vocab);
    float *value = s.value.data(), *weight = s.weight.data();
    for (int64_t v = 0; v < vocab; ++v) value[v] = logits[v] / temperature;
    const float greatest = greatest_of(value, vocab);
    if (!std::isfinite(greatest)) return kFailed;
#pragma omp simd
    for (int64_t v = 0; v < vocab; ++v) weight[v] = exp_negative(value[v] - greatest);
    const uint64_t key = row_key(c.seeds[slot], c.index[row]);
    const int64_t top_k = c.top_k[slot];
    if (top_k <= 0 && c.top_p[slot] >= 1.0 && c.min_p[slot] <= 0.0) return sample_free(s, key, greatest, vocab);
    return sample_limited(s, key, top_k < vocab ? top_k : 0, c.top_p[slot], c.min_p[slot], vocab);
}

}  // namespace

extern "C" void slipstream_sample(const SampleArguments* arguments) {
#pragma omp parallel for num_threads(static_cast<int>(arguments->threads)) schedule(static) if (arguments->rows > 3)
    for (int64_t row = 0; row < arguments->rows; ++row) {
        thread_local Scratch scratch;
        arguments->sampled[row] = sample(*arguments, row, scratch);
    }
}
