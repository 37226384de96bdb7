// Products with weights that stay quantised in memory (see codes.h).
//
// For few rows, weights are decoded to fp32 in registers; for more, once into a scratch that stays in the cache.
// Either way a number is the sum of the same products in the same order: it does not depend on the number of rows, nor
// on threads, which split columns and never a sum. With experts, rows are taken in order of their experts, and only
// experts that have rows are read. The struct is mirrored in workers/quantization/products.py. See lanes.h
// for the arithmetic.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "codes.h"

namespace {

constexpr int64_t kRows = (kRegisters - 1) / (kColumns + 1);  // rows computed together, with a weight, in registers
constexpr int kFew = kLanes == 16 ? 4 : 2;                    // rows whose sums are kept beside weights that are decoded
constexpr int64_t kSmall = 1 << 17;                           // products for which waking other threads takes longer
constexpr int64_t kAhead = 1 << 11;                           // bytes by which codes are prefetched: further than hardware does

enum Code : int64_t { kInt8 = 0, kInt4 = 1, kFp8 = 2, kFp4 = 3 };

}  // namespace

extern "C" {

// y[m, n] = sum over k of x[m / repeats, k] * w[e, n, k], plus bias[e, n]; w[e, n, k] = (code[e, n, k] - zero[e, n, g])
// times scale[e, n, g], with g = k / group, and e = ids[m], or 0 without ids. Rows whose id is of no expert are 0.
// Scales and zeros are laid out by panels: [expert][panel][group][row].
struct Quantized {
    const void *x, *codes, *scales, *zeros, *bias;
    const int64_t* ids;
    void* y;
    int64_t rows, columns, size;  // M, N, K
    int64_t repeats, experts;
    int64_t x_stride;             // elements from row to row
    int64_t group, groups;        // inputs that share a scale: a multiple of kBlock, unless there is one group
    int64_t kind, code, threads;  // kind: dtype of x, y and bias
};

}  // extern "C"

namespace {

template <typename C>
struct Panel {
    const uint8_t* codes;
    const typename C::Scale* scales;
    const uint8_t* zeros;
};

// Rows of y that are multiplied with the same weight, as places in `Order::rows`.
struct Segment {
    int64_t expert, first, last;
};

// The rows of y by their experts. Within one, they keep their order.
struct Order {
    std::vector<int64_t> rows;
    std::vector<Segment> segments;
    int64_t longest = 0;

    explicit Order(const Quantized& call) {
        std::vector<std::vector<int64_t>> of_expert(static_cast<size_t>(call.experts));
        for (int64_t m = 0; m < call.rows; ++m) {
            const int64_t e = call.ids ? call.ids[m] : 0;
            if (e >= 0 && e < call.experts) of_expert[static_cast<size_t>(e)].push_back(m);
        }
        for (int64_t e = 0; e < call.experts; ++e) {
            const auto& own = of_expert[static_cast<size_t>(e)];
            const int64_t first = count();
            rows.insert(rows.end(), own.begin(), own.end());
            if (!own.empty()) close(e, first);
        }
    }

    int64_t count() const { return static_cast<int64_t>(rows.size()); }

    void close(int64_t expert, int64_t first) {
        segments.push_back({expert, first, count()});
        longest = std::max(longest, count() - first);
    }
};

template <typename C>
struct Decoder {
    const Panel<C>& panel;
    const Quantized& call;
    const int64_t width;

    // Calls use(k, column, weights) with every block, in the order in which blocks are stored.
    template <typename Use>
    inline __attribute__((always_inline)) void each(Use&& use) const {
        const uint8_t* code = panel.codes;
        for (int64_t g = 0; g < call.groups; ++g) {
            Affine affine[kColumns];
            for (int n = 0; n < kColumns; ++n) {
                const int64_t at = g * kColumns + n;
                affine[n] = C::affine(panel.scales[at], panel.zeros ? panel.zeros[at] : 0);
            }
            const int64_t end = g + 1 == call.groups ? width : (g + 1) * call.group;
            for (int64_t k = g * call.group; k < end; k += kBlock)
#pragma GCC unroll 4
                for (int n = 0; n < kColumns; ++n, code += C::kBytes) {
                    __builtin_prefetch(code + kAhead);
                    Lanes weight[kVectors];
                    C::decode(code, affine[n], weight);
                    use(k, n, weight);
                }
        }
    }
};

// Few rows of x, `width` apart. Not inlined: inside their callers, compilers do not keep these sums in registers. Nor do
// they where a sum is named by indices that only unrolled loops make constant.
template <int Rows, typename C>
__attribute__((noinline)) void few_rows(const float* x, const Decoder<C>& decoder, Four* result) {
    static_assert(kColumns == 4 && Rows <= 4);
    Lanes first[4], second[4], third[4], fourth[4];  // of the columns
    for (Lanes* total : {first, second, third, fourth})
        for (int n = 0; n < 4; ++n) total[n] = zeros();
    const int64_t width = decoder.width;
    decoder.each([&](int64_t k, int n, const Lanes* weight) {
        for (int v = 0; v < kVectors; ++v) {
            const float* at = x + k + v * kLanes;
            first[n] = fma(load(at), weight[v], first[n]);
            if constexpr (Rows > 1) second[n] = fma(load(at + width), weight[v], second[n]);
            if constexpr (Rows > 2) third[n] = fma(load(at + 2 * width), weight[v], third[n]);
            if constexpr (Rows > 3) fourth[n] = fma(load(at + 3 * width), weight[v], fourth[n]);
        }
    });
    result[0] = sums(first[0], first[1], first[2], first[3]);
    if constexpr (Rows > 1) result[1] = sums(second[0], second[1], second[2], second[3]);
    if constexpr (Rows > 2) result[2] = sums(third[0], third[1], third[2], third[3]);
    if constexpr (Rows > 3) result[3] = sums(fourth[0], fourth[1], fourth[2], fourth[3]);
}

template <typename C>
__attribute__((noinline)) void decode(const Decoder<C>& decoder, float* to) {
    decoder.each([&](int64_t k, int n, const Lanes* weight) {
        for (int v = 0; v < kVectors; ++v) store(weight[v], to + n * decoder.width + k + v * kLanes);
    });
}

// Rows of x, `width` apart, with the weights that `decode` left.
template <int Rows>
__attribute__((noinline)) void some_rows(const float* x, int64_t width, const float* weight, Four* result) {
    Lanes total[Rows][kColumns];
    for (auto& row : total)
        for (auto& one : row) one = zeros();
    for (int64_t k = 0; k < width; k += kLanes) {
        Lanes value[Rows];
        for (int m = 0; m < Rows; ++m) value[m] = load(x + m * width + k);
        for (int n = 0; n < kColumns; ++n) {
            const Lanes one = load(weight + n * width + k);
            for (int m = 0; m < Rows; ++m) total[m][n] = fma_of_registers(value[m], one, total[m][n]);
        }
    }
    for (int m = 0; m < Rows; ++m) result[m] = sums(total[m][0], total[m][1], total[m][2], total[m][3]);
}

template <typename T, typename C>
struct Product {
    const Quantized& call;
    const Order& order;
    const int64_t width;  // of a row, padded with zeros to whole blocks
    const int64_t panels;
    std::vector<float> wide;  // rows of x, in order

    Product(const Quantized& call, const Order& order)
        : call(call),
          order(order),
          width((call.size + kBlock - 1) / kBlock * kBlock),
          panels((call.columns + kColumns - 1) / kColumns),
          wide(static_cast<size_t>(order.count() * width)) {
        for (int64_t i = 0; i < order.count(); ++i) {
            const T* from = static_cast<const T*>(call.x) + row(i) / call.repeats * call.x_stride;
            for (int64_t k = 0; k < call.size; ++k) wide[i * width + k] = widen(from[k]);
        }
    }

    int64_t row(int64_t i) const { return order.rows[static_cast<size_t>(i)]; }

    void run() const {
        if (order.count() < call.rows) std::fill_n(static_cast<T*>(call.y), call.rows * call.columns, T{});
        const int64_t threads = call.rows * call.columns * call.size < kSmall ? 1 : std::min(call.threads, panels);
#pragma omp parallel num_threads(static_cast<int>(threads))
        {
            std::vector<float> weight(order.longest > kFew ? static_cast<size_t>(kColumns * width) : 0);
            for (const Segment& segment : order.segments) {
#pragma omp for schedule(static) nowait
                for (int64_t p = 0; p < panels; ++p) panel(segment, p, weight.data());
            }
        }
    }

    void panel(const Segment& segment, int64_t p, float* weight) const {
        const int64_t number = segment.expert * panels + p, at = number * kColumns * call.groups;
        const int64_t bytes = width / kBlock * kColumns * C::kBytes;
        const Panel<C> panel = {static_cast<const uint8_t*>(call.codes) + number * bytes,
                                static_cast<const typename C::Scale*>(call.scales) + at,
                                call.zeros ? static_cast<const uint8_t*>(call.zeros) + at : nullptr};
        const Decoder<C> decoder = {panel, call, width};
        const T* bias = call.bias ? static_cast<const T*>(call.bias) + segment.expert * call.columns : nullptr;
        if (segment.last - segment.first <= kFew) return few(segment, decoder, bias, p * kColumns);
        decode(decoder, weight);
        for (int64_t i = segment.first; i < segment.last; i += kRows) rows(i, segment.last, weight, bias, p * kColumns);
    }

    template <int Rows = kFew>
    void few(const Segment& segment, const Decoder<C>& decoder, const T* bias, int64_t n) const {
        if constexpr (Rows > 1)
            if (segment.last - segment.first < Rows) return few<Rows - 1>(segment, decoder, bias, n);
        Four result[Rows];
        few_rows<Rows>(&wide[segment.first * width], decoder, result);
        for (int r = 0; r < Rows; ++r) put(result[r], bias, segment.first + r, n);
    }

    template <int Rows = kRows>
    void rows(int64_t i, int64_t last, const float* weight, const T* bias, int64_t n) const {
        if constexpr (Rows > 1)
            if (last - i < Rows) return rows<Rows - 1>(i, last, weight, bias, n);
        Four result[Rows];
        some_rows<Rows>(&wide[i * width], width, weight, result);
        for (int r = 0; r < Rows; ++r) put(result[r], bias, i + r, n);
    }

    void put(const Four& result, const T* bias, int64_t i, int64_t n) const {
        const int64_t count = std::min(kColumns, call.columns - n);
        T* y = static_cast<T*>(call.y) + row(i) * call.columns + n;
        for (int64_t c = 0; c < count; ++c) narrow(bias ? result.at[c] + widen(bias[n + c]) : result.at[c], y[c]);
    }
};

template <typename T>
void with_code(const Quantized& call) {
    const Order order(call);
    if (call.code == kInt8)
        Product<T, Int8Code>(call, order).run();
    else if (call.code == kInt4)
        Product<T, Int4Code>(call, order).run();
    else if (call.code == kFp8)
        Product<T, Fp8Code>(call, order).run();
    else
        Product<T, Fp4Code>(call, order).run();
}

void multiply(const Quantized& call) {
    if (call.rows == 0) return;
    if (call.kind == 1)
        with_code<Bf16>(call);
    else if (call.kind == 2)
        with_code<Fp16>(call);
    else
        with_code<float>(call);
}

}  // namespace
