// Decoding of quantised weights to fp32, kBlock at a time.
//
// A panel is four rows of the weight, whose blocks alternate: `codes[panel][block][row][bytes]`. It is read as one
// stream. Int8: a signed byte each. Fp8: float8_e4m3fn, a byte each. Int4: byte j of 16 holds weight j in its low half
// and weight j + 16 in its high half, 0 to 15. Fp4: e2m1 in the same places, with e8m0 scales (OCP Microscaling).
#pragma once
#include <cstdint>
#include <cstring>

#include "lanes.h"

constexpr int64_t kBlock = 32;
constexpr int64_t kVectors = kBlock / kLanes;
constexpr int64_t kColumns = 4;  // of a panel

// What a group shares: its scale, and what is added to scaled codes.
struct Affine {
    Lanes scale, offset;
};

// E4m3 becomes fp16 with an exponent that is 8 too small: the sign, a zero, and the 7 other bits. A signed byte that was
// widened and shifted by 7 has its sign in both places.
constexpr int16_t kHalfOfFp8 = static_cast<int16_t>(0xbfff);

#ifdef SLIPSTREAM_X86
#ifdef __AVX512F__
using Integers = __m512i;
inline Lanes of_integers(Integers x) { return {_mm512_cvtepi32_ps(x)}; }
inline Integers of_bytes(const uint8_t* from) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Integers of_signed_bytes(const uint8_t* from) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Integers low_half(Integers x) { return x; }  // permutations read four bits of an index alone
inline Integers high_half(Integers x) { return _mm512_srli_epi32(x, 4); }
inline Lanes of_fp4(Integers x) {
    const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,  //
                                         -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
    return {_mm512_permutexvar_ps(x, values)};
}
// All 16 values of a group, which are then looked up.
inline Affine int4_group(float scale, float offset) {
    const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return {fma({codes}, all(scale), all(offset)), zeros()};
}
inline Lanes of_int4(Integers x, const Affine& values) { return {_mm512_permutexvar_ps(x, values.scale.v)}; }
inline Lanes of_fp8(const uint8_t* from) {
    const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return {_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(kHalfOfFp8)))};
}
#else
using Integers = __m256i;
inline Lanes of_integers(Integers x) { return {_mm256_cvtepi32_ps(x)}; }
inline Integers of_bytes(const uint8_t* from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
inline Integers of_signed_bytes(const uint8_t* from) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
inline Integers low_half(Integers x) { return _mm256_and_si256(x, _mm256_set1_epi32(15)); }
inline Integers high_half(Integers x) { return _mm256_srli_epi32(x, 4); }
inline Lanes of_fp4(Integers x) {
    const __m256 sizes = _mm256_permutevar8x32_ps(_mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f), x);
    const __m256i signs = _mm256_slli_epi32(_mm256_srli_epi32(x, 3), 31);
    return {_mm256_xor_ps(sizes, _mm256_castsi256_ps(signs))};
}
inline Lanes of_fp8(const uint8_t* from) {
    const __m128i words = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    return {_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(words, 7), _mm_set1_epi16(kHalfOfFp8)))};
}
#endif
#else
struct Integers {
    int32_t at[kLanes];
};
template <typename F>
inline Integers each_integer(F&& f) {
    Integers result;
    for (int i = 0; i < kLanes; ++i) result.at[i] = f(i);
    return result;
}
inline Lanes of_integers(const Integers& x) {
    return each([&](int i) { return static_cast<float>(x.at[i]); });
}
inline Integers of_bytes(const uint8_t* from) {
    return each_integer([&](int i) { return int32_t{from[i]}; });
}
inline Integers of_signed_bytes(const uint8_t* from) {
    return each_integer([&](int i) { return int32_t{static_cast<int8_t>(from[i])}; });
}
inline Integers low_half(const Integers& x) {
    return each_integer([&](int i) { return x.at[i] & 15; });
}
inline Integers high_half(const Integers& x) {
    return each_integer([&](int i) { return x.at[i] >> 4; });
}
inline Lanes of_fp4(const Integers& x) {
    constexpr float kSizes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    return each([&](int i) { return x.at[i] & 8 ? -kSizes[x.at[i] & 7] : kSizes[x.at[i] & 7]; });
}
inline Lanes of_fp8(const uint8_t* from) {
    return each([&](int i) {
        Fp16 half;
        half.bits = static_cast<uint16_t>(static_cast<int8_t>(from[i]) * 128 & kHalfOfFp8);
        return widen(half);
    });
}
#endif

#ifndef __AVX512F__
inline Affine int4_group(float scale, float offset) { return {all(scale), all(offset)}; }
inline Lanes of_int4(const Integers& x, const Affine& affine) { return fma(of_integers(x), affine.scale, affine.offset); }
#endif

struct Int8Code {
    using Scale = float;
    static constexpr int64_t kBytes = 32;
    static Affine affine(float scale, uint8_t) { return {all(scale), zeros()}; }
    static void decode(const uint8_t* codes, const Affine& affine, Lanes* to) {
        for (int v = 0; v < kVectors; ++v) to[v] = of_integers(of_signed_bytes(codes + v * kLanes)) * affine.scale;
    }
};

struct Int4Code {
    using Scale = float;
    static constexpr int64_t kBytes = 16;
    static Affine affine(float scale, uint8_t zero) { return int4_group(scale, -(static_cast<float>(zero) * scale)); }
    static void decode(const uint8_t* codes, const Affine& affine, Lanes* to) {
        constexpr int kHalf = kVectors / 2;
        for (int v = 0; v < kHalf; ++v) {
            const Integers both = of_bytes(codes + v * kLanes);
            to[v] = of_int4(low_half(both), affine);
            to[v + kHalf] = of_int4(high_half(both), affine);
        }
    }
};

struct Fp4Code {
    using Scale = uint8_t;
    static constexpr int64_t kBytes = 16;
    static Affine affine(uint8_t exponent, uint8_t) {
        const uint32_t bits = exponent ? static_cast<uint32_t>(exponent) << 23 : 1u << 22;  // 2^-127 is subnormal
        float scale;
        std::memcpy(&scale, &bits, sizeof scale);
        return {all(scale), zeros()};
    }
    static void decode(const uint8_t* codes, const Affine& affine, Lanes* to) {
        constexpr int kHalf = kVectors / 2;
        for (int v = 0; v < kHalf; ++v) {
            const Integers both = of_bytes(codes + v * kLanes);
            to[v] = of_fp4(low_half(both)) * affine.scale;
            to[v + kHalf] = of_fp4(high_half(both)) * affine.scale;
        }
    }
};

struct Fp8Code {
    using Scale = float;
    static constexpr int64_t kBytes = 32;
    static Affine affine(float scale, uint8_t) { return {all(scale * 256.0f), zeros()}; }
    static void decode(const uint8_t* codes, const Affine& affine, Lanes* to) {
        for (int v = 0; v < kVectors; ++v) to[v] = of_fp8(codes + v * kLanes) * affine.scale;
    }
};
