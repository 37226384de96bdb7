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
inline Integers low_half(Integers x) { return _mm512_and_si512(x, _mm512_set1_epi32(15)); }
inline Integers high_half(Integers x) { return _mm512_srli_epi32(x, 4); }
inline Lanes of_fp4(Integers x) {
    const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,  //
                                         -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
    return {_mm512_permutexvar_ps(x, values)};
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
    static Affine affine(float scale, uint8_t zero) { return {all(scale), all(-(static_cast<float>(zero) * scale))}; }
    static void decode(const uint8_t* codes, const Affine& affine, Lanes* to) {
        constexpr int kHalf = kVectors / 2;
        for (int v = 0; v < kHalf; ++v) {
            const Integers both = of_bytes(codes + v * kLanes);
            to[v] = fma(of_integers(low_half(both)), affine.scale, affine.offset);
            to[v + kHalf] = fma(of_integers(high_half(both)), affine.scale, affine.offset);
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

// e4m3 becomes fp16 with an exponent that is 8 too small: the sign, a zero, and the 7 other bits.
struct Fp8Code {
    using Scale = float;
    static constexpr int64_t kBytes = 32;
    static Affine affine(float scale, uint8_t) { return {all(scale * 256.0f), zeros()}; }
    static void decode(const uint8_t* codes, const Affine& affine, Lanes* to) {
        Fp16 halves[kBlock];
#ifdef SLIPSTREAM_X86
        for (int i = 0; i < 2; ++i) {
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16 * i));
            __m128i* into = reinterpret_cast<__m128i*>(halves + 16 * i);
            _mm_storeu_si128(into, halved(_mm_unpacklo_epi8(_mm_setzero_si128(), bytes)));
            _mm_storeu_si128(into + 1, halved(_mm_unpackhi_epi8(_mm_setzero_si128(), bytes)));
        }
#else
        for (int i = 0; i < kBlock; ++i)
            halves[i].bits = static_cast<uint16_t>((codes[i] & 0x80u) << 8 | (codes[i] & 0x7fu) << 7);
#endif
        for (int v = 0; v < kVectors; ++v) to[v] = load(halves + v * kLanes) * affine.scale;
    }
#ifdef SLIPSTREAM_X86
    static __m128i halved(__m128i words) {
        return _mm_and_si128(_mm_srai_epi16(words, 1), _mm_set1_epi16(static_cast<int16_t>(0xbfff)));
    }
#endif
};
