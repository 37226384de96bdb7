// Products with weights that stay quantised in memory (see codes.h).
//
// For few rows, weights are decoded in registers; for more, once into a scratch that stays in the cache: as fp32 numbers,
// or as bf16 numbers where inputs are that, too, and processors multiply them (see pairs.h). Scales multiply the sums of
// groups. Either way a number is the sum of the same products in the same order: it does not depend on the number of rows,
// nor on threads, which split columns and never a sum. With experts, rows are taken in order of their experts, and only
// experts that have rows are read. The struct is mirrored in workers/quantization/products.py. See lanes.h
// for the arithmetic.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "pairs.h"

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

// The weights of a panel, a block of a column at a time, in the order in which they are stored.
template <typename W, typename C>
struct Stored {
    using Part = typename W::Block;
    static constexpr int64_t kSize = kBlock;

    // What codes mean in a group of inputs.
    struct Values {
        typename W::Int4Values of[kColumns];
    };

    const uint8_t *codes, *zeros;

    Values values(int64_t g) const {
        Values result;
        for (int n = 0; n < kColumns; ++n) result.of[n] = W::int4_values(zeros ? zeros[g * kColumns + n] : 0);
        return result;
    }
    Part next(int n, const Values& values) {
        __builtin_prefetch(codes + kAhead);
        const Part part = C::template decode<W>(codes, values.of[n]);
        codes += C::kBytes;
        return part;
    }
};

// The same, once they are decoded, a part of a block of a column at a time.
template <typename W>
struct Decoded {
    using Part = typename W::Part;
    static constexpr int64_t kSize = kBlock / W::kParts;
    struct Values {};

    const typename W::Input* at;

    Values values(int64_t) const { return {}; }
    Part next(int, const Values&) {
        const Part part = Part::load(at);
        at += kSize;
        return part;
    }
};

// Groups of inputs, `width` inputs in all, and what the sums of each are multiplied by.
template <typename C>
struct Groups {
    const typename C::Scale* scales;
    int64_t group, groups, width;

    int64_t end(int64_t g) const { return g + 1 == groups ? width : (g + 1) * group; }
    Lanes scale(int64_t g, int n) const { return all(C::scale(scales[g * kColumns + n])); }
};

// Products of Rows rows of x, `width` apart, with a panel. Not inlined: inside their callers, compilers do not keep the
// sums in registers.
template <int Rows, typename C, typename Source>
__attribute__((noinline)) void multiply_rows(const typename Source::Part::Input* x, const Groups<C>& of, Source source,
                                             Four* result) {
    using Part = typename Source::Part;
    const int64_t width = of.width;
    Lanes total[Rows][kColumns];
    for (auto& row : total)
        for (auto& one : row) one = zeros();
    for (int64_t g = 0, k = 0; g < of.groups; ++g) {
        const auto values = source.values(g);
        Lanes sum[Rows][kColumns];
#pragma GCC unroll 8
        for (int m = 0; m < Rows; ++m)
#pragma GCC unroll 4
            for (int n = 0; n < kColumns; ++n) sum[m][n] = zeros();
        for (const int64_t end = of.end(g); k < end; k += Source::kSize) {
            Part value[Rows];
#pragma GCC unroll 8
            for (int m = 0; m < Rows; ++m) value[m] = Part::load(x + m * width + k);
#pragma GCC unroll 4
            for (int n = 0; n < kColumns; ++n) {
                const Part weight = source.next(n, values);
#pragma GCC unroll 8
                for (int m = 0; m < Rows; ++m) sum[m][n] = weight.times(value[m], sum[m][n]);
            }
        }
#pragma GCC unroll 4
        for (int n = 0; n < kColumns; ++n) {
            const Lanes scale = of.scale(g, n);
#pragma GCC unroll 8
            for (int m = 0; m < Rows; ++m) total[m][n] = fma(sum[m][n], scale, total[m][n]);
        }
    }
    for (int m = 0; m < Rows; ++m) result[m] = sums(total[m][0], total[m][1], total[m][2], total[m][3]);
}

template <typename W, typename C>
__attribute__((noinline)) void decode(const Groups<C>& of, Stored<W, C> source, typename W::Input* to) {
    for (int64_t g = 0, k = 0; g < of.groups; ++g) {
        const auto values = source.values(g);
        for (const int64_t end = of.end(g); k < end; k += kBlock, to += kColumns * kBlock)
            for (int n = 0; n < kColumns; ++n) {
                const typename W::Block block = source.next(n, values);
                for (int64_t v = 0; v < W::kParts; ++v) block.store(v, to + (v * kColumns + n) * (kBlock / W::kParts));
            }
    }
}

// Numbers at the boundary of a cache line.
template <typename T>
class Aligned {
    struct alignas(64) Line {
        T at[64 / sizeof(T)];
    };
    std::vector<Line> lines_;

public:
    explicit Aligned(int64_t count) : lines_(static_cast<size_t>(count * sizeof(T) + 63) / 64) {}
    T* data() { return reinterpret_cast<T*>(lines_.data()); }
    const T* data() const { return reinterpret_cast<const T*>(lines_.data()); }
};

#ifdef SLIPSTREAM_PAIRS
template <typename T>
using WeightsFor = std::conditional_t<std::is_same_v<T, Bf16>, Pairs, Floats>;
#else
template <typename T>
using WeightsFor = Floats;
#endif

template <typename T, typename C>
struct Product {
    using W = WeightsFor<T>;
    using Input = typename W::Input;

    const Quantized& call;
    const Order& order;
    const int64_t width;  // of a row, padded with zeros to whole blocks
    const int64_t panels;
    Aligned<Input> inputs;  // rows of x, in order

    Product(const Quantized& call, const Order& order)
        : call(call),
          order(order),
          width((call.size + kBlock - 1) / kBlock * kBlock),
          panels((call.columns + kColumns - 1) / kColumns),
          inputs(order.count() * width) {
        for (int64_t i = 0; i < order.count(); ++i) {
            const T* from = static_cast<const T*>(call.x) + row(i) / call.repeats * call.x_stride;
            Input* to = inputs.data() + i * width;
            if constexpr (std::is_same_v<T, Input>)
                std::copy_n(from, call.size, to);
            else
                for (int64_t k = 0; k < call.size; ++k) to[k] = widen(from[k]);
        }
    }

    int64_t row(int64_t i) const { return order.rows[static_cast<size_t>(i)]; }

    void run() const {
        if (order.count() < call.rows) std::fill_n(static_cast<T*>(call.y), call.rows * call.columns, T{});
        const int64_t threads = call.rows * call.columns * call.size < kSmall ? 1 : std::min(call.threads, panels);
#pragma omp parallel num_threads(static_cast<int>(threads))
        {
            Aligned<Input> decoded(order.longest > kFew ? kColumns * width : 0);
            for (const Segment& segment : order.segments) {
#pragma omp for schedule(static) nowait
                for (int64_t p = 0; p < panels; ++p) panel(segment, p, decoded.data());
            }
        }
    }

    void panel(const Segment& segment, int64_t p, Input* decoded) const {
        const int64_t number = segment.expert * panels + p, at = number * kColumns * call.groups;
        const int64_t bytes = width / kBlock * kColumns * C::kBytes;
        const Stored<W, C> stored = {static_cast<const uint8_t*>(call.codes) + number * bytes,
                                     call.zeros ? static_cast<const uint8_t*>(call.zeros) + at : nullptr};
        const Groups<C> of = {static_cast<const typename C::Scale*>(call.scales) + at, call.group, call.groups, width};
        if (segment.last - segment.first <= kFew) return rows<kFew>(segment, segment.first, p, of, stored);
        decode(of, stored, decoded);
        for (int64_t i = segment.first; i < segment.last; i += kRows) rows<kRows>(segment, i, p, of, Decoded<W>{decoded});
    }

    template <int Rows, typename Source>
    void rows(const Segment& segment, int64_t i, int64_t p, const Groups<C>& of, const Source& source) const {
        if constexpr (Rows > 1)
            if (segment.last - i < Rows) return rows<Rows - 1>(segment, i, p, of, source);
        Four result[Rows];
        multiply_rows<Rows>(inputs.data() + i * width, of, source, result);
        const T* bias = call.bias ? static_cast<const T*>(call.bias) + segment.expert * call.columns : nullptr;
        for (int r = 0; r < Rows; ++r) put(result[r], bias, i + r, p * kColumns);
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
