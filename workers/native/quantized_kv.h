// 8-bit numbers of a quantised KV cache, each vector of which has a scale (workers/attention/quantized_kv.py, which
// stores the same bits). The number that is meant is widen(x) * kUnit<T> * kUnit<T> * scale.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "halves.h"

struct Int8 {
    int8_t bits;
};
struct Fp8 {  // E4M3 as in the OCP 8-bit floating point specification: sign, 4 bits of exponent, 3 of mantissa
    uint8_t bits;
};

template <typename T>
constexpr bool kIsQuantized = false;
template <>
constexpr bool kIsQuantized<Int8> = true;
template <>
constexpr bool kIsQuantized<Fp8> = true;

template <typename T>
constexpr float kLargest = 0.0f;
template <>
constexpr float kLargest<Int8> = 127.0f;
template <>
constexpr float kLargest<Fp8> = 448.0f;

// The bits of an E4M3 number, as the last bits of fp32's exponent and the first of its mantissa, are 2^-120 of it: the
// exponents are counted from 7 and from 127. Subnormal numbers are subnormal in fp32. So widening takes no arithmetic.
// Half of the factor is in the queries and in the results, and half in the scales: none of them overflows.
template <typename T>
constexpr float kUnit = 1.0f;
template <>
constexpr float kUnit<Fp8> = 0x1p60f;

inline float widen(Int8 x) { return static_cast<float>(x.bits); }
inline float widen(Fp8 x) {
    const uint32_t bits = (x.bits & 0x80u) << 24 | (x.bits & 0x7fu) << 20;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

// Rounds to the nearest, ties to even. |x| is at most `kLargest`, up to rounding.
inline void narrow(float x, Int8& to) { to.bits = static_cast<int8_t>(std::nearbyint(x)); }
inline void narrow(float x, Fp8& to) {
    uint32_t bits, small;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits >> 24 & 0x80u;
    bits &= 0x7fffffffu;
    const float shifted = std::fabs(x) + 16384.0f;  // whose last bit is 2^-9, the smallest E4M3 number
    std::memcpy(&small, &shifted, sizeof small);
    const uint32_t normal = (bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20;
    to.bits = static_cast<uint8_t>(sign | (bits < 121u << 23 ? small - 0x46800000u : normal - (120u << 3)));
}

// Quantises `size` numbers; `scaled` is scratch for as many.
template <typename T, typename S>
void quantize(const T* from, int64_t size, float* scaled, S* to, Bf16* scale) {
    float largest = 0.0f;
    int is_broken = 0;
#pragma omp simd reduction(max : largest) reduction(| : is_broken)
    for (int64_t i = 0; i < size; ++i) {
        scaled[i] = widen(from[i]);
        const float magnitude = std::fabs(scaled[i]);
        largest = magnitude > largest ? magnitude : largest;
        is_broken |= !(scaled[i] - scaled[i] == 0.0f);
    }
    if (is_broken) {  // NaN or infinite: whatever attends to it becomes NaN
        std::memset(to, 0, static_cast<size_t>(size) * sizeof(S));
        scale->bits = 0x7fc0;
        return;
    }
    const float wanted = std::max(largest * (1.0f / kLargest<S>), 0x1p-100f);
    uint32_t bits;
    std::memcpy(&bits, &wanted, sizeof bits);
    scale->bits = static_cast<uint16_t>((bits + 0xffffu) >> 16);
    const float inverse = 1.0f / widen(*scale);
    for (int64_t i = 0; i < size; ++i) scaled[i] *= inverse;
    for (int64_t i = 0; i < size; ++i) narrow(scaled[i], to[i]);
}
