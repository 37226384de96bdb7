// Products with weights that stay quantised in memory (see codes.h).
//
// For one row, weights are decoded to fp32 in registers; for several, once into a scratch that stays in the cache.
// Either way a number is the sum of the same products in the same order: it does not depend on the number of rows, nor
// on threads, which split columns and never a sum. The struct is mirrored in workers/quantization/native.py. See lanes.h
// for the arithmetic.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "codes.h"

namespace {

constexpr int64_t kRows = (kRegisters - 1) / (kColumns + 1);  // rows computed together, with a weight, in registers
constexpr int64_t kSmall = 1 << 17;                           // products for which waking other threads takes longer

enum Code : int64_t { kInt8 = 0, kInt4 = 1, kFp8 = 2 };

}  // namespace

extern "C" {

// y[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n]; w[n, k] = (code[n, k] - zero[n, g]) * scale[n, g] with
// g = k / group. Scales and zeros are laid out by panels: [panel][group][row].
struct Quantized {
    const void *x, *codes, *scales, *zeros, *bias;
    void* y;
    int64_t rows, columns, size;  // M, N, K
    int64_t x_stride;             // elements from row to row
    int64_t group, groups;        // inputs that share a scale: a multiple of kBlock, unless there is one group
    int64_t kind, code, threads;  // kind: dtype of x, y and bias
};

}  // extern "C"

namespace {

struct Panel {
    const uint8_t* codes;
    const float* scales;
    const uint8_t* zeros;
};

template <typename C>
struct Decoder {
    const Panel& panel;
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
                for (int n = 0; n < kColumns; ++n, code += C::kBytes) {
                    Lanes weight[kVectors];
                    C::decode(code, affine[n], weight);
                    use(k, n, weight);
                }
        }
    }
};

// One row. Not inlined: inside their callers, compilers do not keep these sums in registers.
template <typename C>
__attribute__((noinline)) Four one_row(const float* x, const Decoder<C>& decoder) {
    Lanes total[kColumns] = {zeros(), zeros(), zeros(), zeros()};
    decoder.each([&](int64_t k, int n, const Lanes* weight) {
        for (int v = 0; v < kVectors; ++v) total[n] = fma(load(x + k + v * kLanes), weight[v], total[n]);
    });
    return sums(total[0], total[1], total[2], total[3]);
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
    const int64_t width;      // of a row, padded with zeros to whole blocks
    std::vector<float> wide;  // rows of x

    explicit Product(const Quantized& call)
        : call(call), width((call.size + kBlock - 1) / kBlock * kBlock), wide(static_cast<size_t>(call.rows * width)) {
        for (int64_t m = 0; m < call.rows; ++m) {
            const T* from = static_cast<const T*>(call.x) + m * call.x_stride;
            for (int64_t k = 0; k < call.size; ++k) wide[m * width + k] = widen(from[k]);
        }
    }

    void run() const {
        const int64_t panels = (call.columns + kColumns - 1) / kColumns;
        const int64_t threads = call.rows * call.columns * call.size < kSmall ? 1 : std::min(call.threads, panels);
#pragma omp parallel num_threads(static_cast<int>(threads))
        {
            std::vector<float> weight(call.rows > 1 ? static_cast<size_t>(kColumns * width) : 0);
#pragma omp for schedule(static)
            for (int64_t p = 0; p < panels; ++p) panel(p, weight.data());
        }
    }

    void panel(int64_t p, float* weight) const {
        const int64_t at = p * kColumns * call.groups;
        const Panel panel = {static_cast<const uint8_t*>(call.codes) + p * width / kBlock * kColumns * C::kBytes,
                             static_cast<const float*>(call.scales) + at,
                             call.zeros ? static_cast<const uint8_t*>(call.zeros) + at : nullptr};
        const Decoder<C> decoder = {panel, call, width};
        if (call.rows == 1) return put(one_row(wide.data(), decoder), 0, p * kColumns);
        decode(decoder, weight);
        for (int64_t m = 0; m < call.rows; m += kRows) rows(m, weight, p * kColumns);
    }

    template <int Rows = kRows>
    void rows(int64_t m, const float* weight, int64_t n) const {
        if constexpr (Rows > 1)
            if (call.rows - m < Rows) return rows<Rows - 1>(m, weight, n);
        Four result[Rows];
        some_rows<Rows>(&wide[m * width], width, weight, result);
        for (int i = 0; i < Rows; ++i) put(result[i], m + i, n);
    }

    void put(const Four& result, int64_t m, int64_t n) const {
        const int64_t count = std::min(kColumns, call.columns - n);
        const T* bias = static_cast<const T*>(call.bias);
        T* y = static_cast<T*>(call.y) + m * call.columns + n;
        for (int64_t i = 0; i < count; ++i) narrow(bias ? result.at[i] + widen(bias[n + i]) : result.at[i], y[i]);
    }
};

template <typename T>
void with_code(const Quantized& call) {
    if (call.code == kInt8)
        Product<T, Int8Code>(call).run();
    else if (call.code == kInt4)
        Product<T, Int4Code>(call).run();
    else
        Product<T, Fp8Code>(call).run();
}

}  // namespace

extern "C" void slipstream_quantized(const Quantized* call) {
    if (call->rows == 0) return;
    if (call->kind == 1)
        with_code<Bf16>(*call);
    else if (call->kind == 2)
        with_code<Fp16>(*call);
    else
        with_code<float>(*call);
}
