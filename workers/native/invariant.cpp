// Batch-invariant operators: each number has one fixed order of operations, for any number of rows, tiles, threads and
// ranks. Threads split rows and columns, never a sum. The structs are mirrored in workers/invariant/native.py. See
// lanes.h for the arithmetic.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "lanes.h"

namespace {

constexpr int64_t kMaxShards = 16;
constexpr int64_t kColumns = 4;           // columns computed together: `sums` reduces four vectors at once
constexpr int64_t kRows = (kRegisters - 1) / (kColumns + 1);  // rows computed together, with a weight, in registers
constexpr int64_t kPanel = 16;            // columns whose weights stay cached while all rows are computed
constexpr int64_t kChunkBytes = 1 << 18;  // of widened rows that stay cached while all columns are computed
constexpr int64_t kAhead = 1 << 13;       // bytes by which weights are prefetched: further than hardware does
constexpr int64_t kSmall = 1 << 14;       // numbers for which waking other threads takes longer

enum Kind : int64_t { kFp32 = 0, kBf16 = 1, kFp16 = 2 };

template <typename Work>
void with_kind(int64_t kind, Work&& work) {
    if (kind == kBf16)
        work(Bf16{});
    else if (kind == kFp16)
        work(Fp16{});
    else
        work(float{});
}

// Where shard s of `shards` begins in `size` numbers. On one of T ranks shards begin at the same numbers as on a single
// rank, since T divides both size and shards.
inline int64_t begin_of(int64_t s, int64_t shards, int64_t size) { return s * size / shards; }

}  // namespace

extern "C" {

// y[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n]. With experts, rows ends[e - 1] .. ends[e] - 1 are multiplied
// by the weights of expert e.
struct Linear {
    const void *x, *w, *bias;
    void* y;
    const int32_t* ends;
    int64_t rows, columns, size;           // M, N, K
    int64_t x_stride, w_stride, w_expert;  // in elements, from row to row and from expert to expert
    int64_t experts, shards, kind, is_partial, threads;  // is_partial: y is fp32, not rounded
};

struct Each {
    const void* x;
    void* y;
    int64_t count, kind, function, threads;
};

struct Rowwise {
    const void *x, *weight, *bias;
    void* y;
    int64_t rows, size, kind, threads;
    float epsilon;
};

}  // extern "C"

namespace {

// `count` rounded up to whole vectors.
inline int64_t padded(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

struct Shards {
    int64_t count, begin[kMaxShards + 1], at[kMaxShards + 1];  // offsets in the given numbers and in the padded ones
    Shards(int64_t count, int64_t size) : count(count) {
        at[0] = 0;
        for (int64_t s = 0; s <= count; ++s) begin[s] = begin_of(s, count, size);
        for (int64_t s = 0; s < count; ++s) at[s + 1] = at[s] + padded(begin[s + 1] - begin[s]);
    }
    int64_t size(int64_t s) const { return begin[s + 1] - begin[s]; }
    int64_t width() const { return at[count]; }
};

template <typename T>
void widen_row(const T* from, float* to, const Shards& shards) {
    for (int64_t s = 0; s < shards.count; ++s) {
        float* part = to + shards.at[s];
        const T* given = from + shards.begin[s];
        const int64_t size = shards.size(s);
        int64_t k = 0;
        for (; k + kLanes <= size; k += kLanes) store(load(given + k), part + k);
        if (k < size) store(load_some(given + k, size - k), part + k);
    }
}

// Adds the shards' sums pairwise, as a tree, so that each of several ranks can add up its own first.
inline Four tree(const Four* sums, int64_t count) {
    if (count == 1) return sums[0];
    const int64_t half = count / 2;
    return tree(sums, half) + tree(sums + half, count - half);
}

// Computes four columns of Rows rows: x widened and padded, weights as given. Not inlined: inside their callers,
// compilers do not keep these sums in registers.
template <int Rows, typename T>
__attribute__((noinline)) void tile(const float* const* x, const T* const* w, const Shards& shards, Four* result) {
    Four parts[Rows][kMaxShards];
    for (int64_t s = 0; s < shards.count; ++s) {
        Lanes total[Rows][kColumns];
        for (int m = 0; m < Rows; ++m)
            for (int n = 0; n < kColumns; ++n) total[m][n] = zeros();
        const int64_t at = shards.at[s], from = shards.begin[s], size = shards.size(s);
        int64_t k = 0;
        for (; k + kLanes <= size; k += kLanes) {
            Lanes value[Rows];
            for (int m = 0; m < Rows; ++m) value[m] = in_register(load(x[m] + at + k));
            for (int n = 0; n < kColumns; ++n) {
                const Lanes weight = in_register(load(w[n] + from + k));
                __builtin_prefetch(reinterpret_cast<const char*>(w[n] + from + k) + kAhead);
                for (int m = 0; m < Rows; ++m) total[m][n] = fma(value[m], weight, total[m][n]);
            }
        }
        if (k < size)
            for (int n = 0; n < kColumns; ++n) {
                const Lanes weight = load_some(w[n] + from + k, size - k);
                for (int m = 0; m < Rows; ++m) total[m][n] = fma(load(x[m] + at + k), weight, total[m][n]);
            }
        for (int m = 0; m < Rows; ++m) parts[m][s] = sums(total[m][0], total[m][1], total[m][2], total[m][3]);
    }
    for (int m = 0; m < Rows; ++m) result[m] = tree(parts[m], shards.count);
}

template <int Rows = kRows, typename T>
void some_rows(int64_t rows, const float* const* x, const T* const* w, const Shards& shards, Four* result) {
    if constexpr (Rows > 1)
        if (rows < Rows) return some_rows<Rows - 1>(rows, x, w, shards, result);
    tile<Rows>(x, w, shards, result);
}

template <typename T>
struct Product {
    const Linear& call;
    const Shards shards;
    std::vector<float> wide;  // a chunk of rows of x, padded

    explicit Product(const Linear& call) : call(call), shards(call.shards, call.size) {}

    void run() {
        const int64_t fit = kChunkBytes / static_cast<int64_t>(sizeof(float)) / std::max<int64_t>(1, shards.width());
        const int64_t chunk = std::max<int64_t>(1, fit / kRows) * kRows;
        int64_t first = 0;
        for (int64_t e = 0; e < call.experts; ++e) {
            const int64_t last = call.ends ? call.ends[e] : call.rows;
            for (int64_t m = first; m < last; m += chunk) some(e, m, std::min(chunk, last - m));
            first = last;
        }
    }

    void some(int64_t expert, int64_t first, int64_t count) {
        const int64_t width = shards.width();
        wide.resize(static_cast<size_t>(count * width));
        for (int64_t m = 0; m < count; ++m)
            widen_row(static_cast<const T*>(call.x) + (first + m) * call.x_stride, &wide[m * width], shards);
        const int64_t panels = (call.columns + kPanel - 1) / kPanel;
        const int64_t threads = count * call.columns * call.size < 8 * kSmall ? 1 : std::min(call.threads, panels);
#pragma omp parallel for num_threads(static_cast<int>(threads)) schedule(static)
        for (int64_t p = 0; p < panels; ++p) panel(p * kPanel, expert, first, count);
    }

    void panel(int64_t n, int64_t expert, int64_t first, int64_t count) const {
        const T* weights = static_cast<const T*>(call.w) + expert * call.w_expert;
        const int64_t last = call.columns - 1, end = std::min(n + kPanel, call.columns);
        const int64_t tiles = (count + kRows - 1) / kRows;
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t m = begin_of(t, tiles, count), some = begin_of(t + 1, tiles, count) - m;
            const float* x[kRows];
            for (int64_t i = 0; i < some; ++i) x[i] = &wide[(m + i) * shards.width()];
            for (int64_t c = n; c < end; c += kColumns) {
                const T* w[kColumns];
                for (int64_t i = 0; i < kColumns; ++i) w[i] = weights + std::min(c + i, last) * call.w_stride;
                Four result[kRows];
                some_rows(some, x, w, shards, result);
                for (int64_t i = 0; i < some; ++i) put(result[i], first + m + i, c, expert);
            }
        }
    }

    void put(const Four& result, int64_t m, int64_t n, int64_t expert) const {
        const int64_t count = std::min(kColumns, call.columns - n);
        if (call.is_partial) {
            std::copy(result.at, result.at + count, static_cast<float*>(call.y) + m * call.columns + n);
            return;
        }
        const T* biases = static_cast<const T*>(call.bias);
        const T* bias = biases ? biases + (call.ends ? expert * call.columns : 0) : nullptr;
        T* y = static_cast<T*>(call.y) + m * call.columns + n;
        for (int64_t i = 0; i < count; ++i) narrow(bias ? result.at[i] + widen(bias[n + i]) : result.at[i], y[i]);
    }
};

// exp(x) by the same operations for every x, with an error of about one unit in the last place: Cephes' polynomial.
// Without branches, so loops over it vectorise. Nothing is fused or reordered, so vectors and scalars agree.
inline float exp_of(float x) {
    const float bounded = x < -87.3f ? -87.3f : x > 88.7f ? 88.7f : x;
    const float shifted = bounded * 1.44269504088896341f + 12582912.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    const float n = shifted - 12582912.0f;
    float r = bounded - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    // 2^n as two factors: n may be 128.
    const int32_t whole = bits - 0x4b400000, half = whole >> 1;
    const int32_t one = (half + 127) << 23, two = (whole - half + 127) << 23;
    float first, second;
    std::memcpy(&first, &one, sizeof first);
    std::memcpy(&second, &two, sizeof second);
    const float found = p * first * second;
    const float ends = x > 88.7f ? std::numeric_limits<float>::infinity() : x < -87.3f ? 0.0f : found;
    return x != x ? x : ends;
}

inline float tanh_of(float x) { return std::tanh(x); }
inline float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }

struct Exp { static float of(float x) { return exp_of(x); } };
struct Silu { static float of(float x) { return x / (1.0f + exp_of(-x)); } };
struct Sigmoid { static float of(float x) { return sigmoid_of(x); } };
struct Tanh { static float of(float x) { return tanh_of(x); } };
struct GeluErf { static float of(float x) { return 0.5f * x * (1.0f + std::erf(x * 0.70710678118654752f)); } };
struct GeluTanh {
    static float of(float x) {
        const float inner = 0.79788456080286536f * (x + 0.044715f * (x * x * x));
        return 0.5f * x * (1.0f + tanh_of(inner));
    }
};
struct Cos { static float of(float x) { return std::cos(x); } };
struct Sin { static float of(float x) { return std::sin(x); } };
struct Rsqrt { static float of(float x) { return 1.0f / std::sqrt(x); } };

template <typename F>
void each_of(const Each& call) {
    with_kind(call.kind, [&](auto zero) {
        using T = decltype(zero);
        const T* x = static_cast<const T*>(call.x);
        T* y = static_cast<T*>(call.y);
        const int64_t threads = call.count < kSmall ? 1 : call.threads;
#pragma omp parallel for num_threads(static_cast<int>(threads)) schedule(static)
        for (int64_t i = 0; i < call.count; ++i) narrow(F::of(widen(x[i])), y[i]);
    });
}

// The sum of f(x[i]): lane by lane, then over lanes. The last vector is padded with zeros after f.
template <typename T, typename F>
inline float sum_of_row(const T* x, int64_t size, F&& f) {
    Lanes total = zeros();
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) total = total + f(load(x + i));
    if (i < size) {
        float some[kLanes] = {};
        float values[kLanes];
        store(f(load_some(x + i, size - i)), values);
        std::copy(values, values + (size - i), some);
        total = total + load(some);
    }
    return sum(total);
}

template <typename T>
void mean_of(const T* x, const Rowwise& call, int64_t row) {
    const float total = sum_of_row(x, call.size, [](Lanes a) { return a; });
    narrow(total / static_cast<float>(call.size), static_cast<T*>(call.y)[row]);
}

template <typename T>
void softmax_of(const T* x, const Rowwise& call, int64_t row) {
    thread_local std::vector<float> weights;
    weights.resize(static_cast<size_t>(call.size));
    float largest = widen(x[0]);
    for (int64_t i = 1; i < call.size; ++i) largest = std::max(largest, widen(x[i]));
    for (int64_t i = 0; i < call.size; ++i) weights[i] = exp_of(widen(x[i]) - largest);
    const float total = sum_of_row(weights.data(), call.size, [](Lanes a) { return a; });
    T* y = static_cast<T*>(call.y) + row * call.size;
    for (int64_t i = 0; i < call.size; ++i) narrow(weights[i] / total, y[i]);
}

template <typename T>
void layer_norm_of(const T* x, const Rowwise& call, int64_t row) {
    const float size = static_cast<float>(call.size);
    const float mean = sum_of_row(x, call.size, [](Lanes a) { return a; }) / size;
    const Lanes shift = all(-mean);
    const float spread = sum_of_row(x, call.size, [&](Lanes a) { return (a + shift) * (a + shift); }) / size;
    const float scale = 1.0f / std::sqrt(spread + call.epsilon);
    const T *weight = static_cast<const T*>(call.weight), *bias = static_cast<const T*>(call.bias);
    T* y = static_cast<T*>(call.y) + row * call.size;
    for (int64_t i = 0; i < call.size; ++i) {
        float found = (widen(x[i]) - mean) * scale;
        if (weight) found = found * widen(weight[i]);
        if (bias) found = found + widen(bias[i]);
        narrow(found, y[i]);
    }
}

template <typename Work>
void each_row(const Rowwise& call, Work&& work) {
    with_kind(call.kind, [&](auto zero) {
        using T = decltype(zero);
        const int64_t threads = call.rows * call.size < kSmall ? 1 : std::min(call.threads, call.rows);
#pragma omp parallel for num_threads(static_cast<int>(threads)) schedule(static)
        for (int64_t row = 0; row < call.rows; ++row) work(static_cast<const T*>(call.x) + row * call.size, row);
    });
}

}  // namespace

extern "C" void slipstream_linear(const Linear* call) {
    with_kind(call->kind, [&](auto zero) { Product<decltype(zero)>(*call).run(); });
}

extern "C" void slipstream_each(const Each* call) {
    void (*const table[])(const Each&) = {each_of<Exp>,     each_of<Silu>,     each_of<Sigmoid>,
                                          each_of<Tanh>,    each_of<GeluErf>,  each_of<GeluTanh>,
                                          each_of<Cos>,     each_of<Sin>,      each_of<Rsqrt>};
    table[call->function](*call);
}

extern "C" void slipstream_mean(const Rowwise* call) {
    each_row(*call, [&](const auto* x, int64_t row) { mean_of(x, *call, row); });
}

extern "C" void slipstream_softmax(const Rowwise* call) {
    each_row(*call, [&](const auto* x, int64_t row) { softmax_of(x, *call, row); });
}

extern "C" void slipstream_layer_norm(const Rowwise* call) {
    each_row(*call, [&](const auto* x, int64_t row) { layer_norm_of(x, *call, row); });
}
