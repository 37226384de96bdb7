// Vectors of fp32 numbers with explicit arithmetic.
//
// Compiled with -ffp-contract=off and without -ffast-math, so operations run as written: a multiply-add is fused only
// where `fma` is called, and sums are added only in the order of `sums`. So every path that computes a number gives the
// same bits, however the compiler transforms the loops around it.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "halves.h"
#include "quantized_kv.h"

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))
#include <immintrin.h>
#endif

// What holds f(i) at each place i of its array.
template <typename Array, typename F>
inline Array filled(F&& f) {
    Array result;
    for (int i = 0; i < static_cast<int>(std::size(result.at)); ++i) result.at[i] = f(i);
    return result;
}

// Four sums.
struct Four {
    float at[4];
};
inline Four operator+(const Four& a, const Four& b) {
    return {{a.at[0] + b.at[0], a.at[1] + b.at[1], a.at[2] + b.at[2], a.at[3] + b.at[3]}};
}

#if defined(__AVX512F__)

constexpr int64_t kLanes = 16;
constexpr int64_t kRegisters = 32;
struct Lanes {
    __m512 v;
};
inline Lanes zeros() { return {_mm512_setzero_ps()}; }
inline Lanes all(float x) { return {_mm512_set1_ps(x)}; }
inline Lanes load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline Lanes load(const Bf16* from) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
inline Lanes load(const Fp16* from) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}
inline Lanes load(const Int8* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bits))};
}
inline Lanes load(const Fp8* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const __m512i shifted = _mm512_slli_epi32(_mm512_cvtepi8_epi32(bits), 20);
    return {_mm512_castsi512_ps(_mm512_and_si512(shifted, _mm512_set1_epi32(static_cast<int32_t>(0x87f00000))))};
}
inline void store(Lanes a, float* to) { _mm512_storeu_ps(to, a.v); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
#define SLIPSTREAM_IN_REGISTER
inline Lanes in_register(Lanes a) {
    asm("" : "+v"(a.v));
    return a;
}
inline Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline __m256 halves(Lanes a) {
    const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
    return _mm256_add_ps(_mm512_castps512_ps256(a.v), high);
}
#define SLIPSTREAM_X86

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

constexpr int64_t kLanes = 8;
constexpr int64_t kRegisters = 16;
struct Lanes {
    __m256 v;
};
inline Lanes zeros() { return {_mm256_setzero_ps()}; }
inline Lanes all(float x) { return {_mm256_set1_ps(x)}; }
inline Lanes load(const float* from) { return {_mm256_loadu_ps(from)}; }
inline Lanes load(const Bf16* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
}
inline Lanes load(const Fp16* from) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
}
inline Lanes load(const Int8* from) {
    const __m128i bits = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bits))};
}
inline Lanes load(const Fp8* from) {
    const __m128i bits = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    const __m256i shifted = _mm256_slli_epi32(_mm256_cvtepi8_epi32(bits), 20);
    return {_mm256_castsi256_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(static_cast<int32_t>(0x87f00000))))};
}
inline void store(Lanes a, float* to) { _mm256_storeu_ps(to, a.v); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
#define SLIPSTREAM_IN_REGISTER
inline Lanes in_register(Lanes a) {
    asm("" : "+x"(a.v));
    return a;
}
inline Lanes operator+(Lanes a, Lanes b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline __m256 halves(Lanes a) { return a.v; }
#define SLIPSTREAM_X86

#else

constexpr int64_t kLanes = 8;
constexpr int64_t kRegisters = 16;
struct Lanes {
    float at[kLanes];
};
template <typename F>
inline Lanes each(F&& f) {
    return filled<Lanes>(f);
}
inline Lanes zeros() { return each([](int) { return 0.0f; }); }
inline Lanes all(float x) { return each([&](int) { return x; }); }
template <typename T>
inline Lanes load(const T* from) {
    return each([&](int i) { return widen(from[i]); });
}
inline void store(const Lanes& a, float* to) { std::memcpy(to, a.at, sizeof a.at); }
inline Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {
    return each([&](int i) { return std::fma(a.at[i], b.at[i], c.at[i]); });
}
inline Lanes operator+(const Lanes& a, const Lanes& b) { return each([&](int i) { return a.at[i] + b.at[i]; }); }
inline Lanes operator*(const Lanes& a, const Lanes& b) { return each([&](int i) { return a.at[i] * b.at[i]; }); }

#endif

// Keeps what was loaded. Otherwise compilers load it again for each of its products, which takes longer than the
// arithmetic.
#ifndef SLIPSTREAM_IN_REGISTER
inline Lanes in_register(const Lanes& a) { return a; }
#endif

// The sum of each of four vectors: adjacent lanes first, then pairs of these sums, then the two halves.
#ifdef SLIPSTREAM_X86
inline Four sums(Lanes a, Lanes b, Lanes c, Lanes d) {
    const __m256 pairs_ab = _mm256_hadd_ps(halves(a), halves(b)), pairs_cd = _mm256_hadd_ps(halves(c), halves(d));
    const __m256 quads = _mm256_hadd_ps(pairs_ab, pairs_cd);
    Four result;
    _mm_storeu_ps(result.at, _mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps(quads, 1)));
    return result;
}
#else
inline float sum_of(const Lanes& a) {
    return ((a.at[0] + a.at[1]) + (a.at[2] + a.at[3])) + ((a.at[4] + a.at[5]) + (a.at[6] + a.at[7]));
}
inline Four sums(const Lanes& a, const Lanes& b, const Lanes& c, const Lanes& d) {
    return {{sum_of(a), sum_of(b), sum_of(c), sum_of(d)}};
}
#endif
inline float sum(Lanes a) { return sums(a, zeros(), zeros(), zeros()).at[0]; }

// Loads `count` numbers, padded with zeros.
template <typename T>
inline Lanes load_some(const T* from, int64_t count) {
    T some[kLanes] = {};
    std::memcpy(some, from, static_cast<size_t>(count) * sizeof(T));
    return load(some);
}
