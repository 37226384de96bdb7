// Quantised weights, decoded kBlock at a time to the codes' values less their zero points: exactly, without scales.
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

// E4m3 becomes fp16 with an exponent that is 8 too small: the sign, a zero, and the 7 other bits. A signed byte that was
// widened and shifted by 7 has its sign in both places.
constexpr int16_t kHalfOfFp8 = static_cast<int16_t>(0xbfff);
constexpr float kFp8Unit = 256.0f;

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
inline Lanes of_fp8(const uint8_t* from) {
    const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return {_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(kHalfOfFp8)))};
}
// What int4 codes mean: all 16 values, which are then looked up.
inline Lanes int4_values(float zero) {
    return Lanes{_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)} + all(-zero);
}
inline Lanes of_int4(Integers x, Lanes values) { return {_mm512_permutexvar_ps(x, values.v)}; }
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
inline Lanes of_integers(const Integers& x) {
    return each([&](int i) { return static_cast<float>(x.at[i]); });
}
inline Integers of_bytes(const uint8_t* from) {
    return filled<Integers>([&](int i) { return int32_t{from[i]}; });
}
inline Integers of_signed_bytes(const uint8_t* from) {
    return filled<Integers>([&](int i) { return int32_t{static_cast<int8_t>(from[i])}; });
}
inline Integers low_half(const Integers& x) {
    return filled<Integers>([&](int i) { return x.at[i] & 15; });
}
inline Integers high_half(const Integers& x) {
    return filled<Integers>([&](int i) { return x.at[i] >> 4; });
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
inline Lanes int4_values(float zero) { return all(-zero); }
inline Lanes of_int4(const Integers& x, const Lanes& values) { return of_integers(x) + values; }
#endif

// Weights as fp32 numbers, for inputs of fp32: `Count` vectors.
template <int64_t Count>
struct FloatVectors {
    using Input = float;

    Lanes at[Count];

    static FloatVectors load(const float* from) {
        return filled<FloatVectors>([&](int v) { return in_register(::load(from + v * kLanes)); });
    }
    void store(int64_t v, float* to) const { ::store(at[v], to); }
    Lanes times(const FloatVectors& x, Lanes sum) const {
        for (int v = 0; v < Count; ++v) sum = fma(x.at[v], at[v], sum);
        return sum;
    }
};

// How blocks become such weights. Once they are decoded, vectors are multiplied one by one.
struct Floats {
    using Input = float;
    using Block = FloatVectors<kVectors>;
    using Part = FloatVectors<1>;
    using Int4Values = Lanes;
    static constexpr int64_t kParts = kVectors;

    static Int4Values int4_values(uint8_t zero) { return ::int4_values(zero); }
    static Block of_int8(const uint8_t* codes) {
        return filled<Block>([&](int v) { return of_integers(of_signed_bytes(codes + v * kLanes)); });
    }
    static Block of_fp8(const uint8_t* codes) {
        return filled<Block>([&](int v) { return ::of_fp8(codes + v * kLanes); });
    }
    static Block of_int4(const uint8_t* codes, const Int4Values& values) {
        return of_halves(codes, [&](const Integers& x) { return ::of_int4(x, values); });
    }
    static Block of_fp4(const uint8_t* codes) {
        return of_halves(codes, [](const Integers& x) { return ::of_fp4(x); });
    }

private:
    template <typename F>
    static Block of_halves(const uint8_t* codes, F&& f) {
        constexpr int kHalf = kVectors / 2;
        Block result;
        for (int v = 0; v < kHalf; ++v) {
            const Integers both = of_bytes(codes + v * kLanes);
            result.at[v] = f(low_half(both));
            result.at[v + kHalf] = f(high_half(both));
        }
        return result;
    }
};

// The formats: how a block of W, which is `Floats` or `Pairs`, is decoded, and by what the sums are multiplied.
struct Int8Code {
    using Scale = float;
    static constexpr int64_t kBytes = 32;
    static float scale(float stored) { return stored; }
    template <typename W>
    static typename W::Block decode(const uint8_t* codes, const typename W::Int4Values&) {
        return W::of_int8(codes);
    }
};

struct Int4Code {
    using Scale = float;
    static constexpr int64_t kBytes = 16;
    static float scale(float stored) { return stored; }
    template <typename W>
    static typename W::Block decode(const uint8_t* codes, const typename W::Int4Values& values) {
        return W::of_int4(codes, values);
    }
};

struct Fp8Code {
    using Scale = float;
    static constexpr int64_t kBytes = 32;
    static float scale(float stored) { return stored * kFp8Unit; }
    template <typename W>
    static typename W::Block decode(const uint8_t* codes, const typename W::Int4Values&) {
        return W::of_fp8(codes);
    }
};

struct Fp4Code {
    using Scale = uint8_t;
    static constexpr int64_t kBytes = 16;
    static float scale(uint8_t exponent) {
        const uint32_t bits = exponent ? static_cast<uint32_t>(exponent) << 23 : 1u << 22;  // 2^-127 is subnormal
        float scale;
        std::memcpy(&scale, &bits, sizeof scale);
        return scale;
    }
    template <typename W>
    static typename W::Block decode(const uint8_t* codes, const typename W::Int4Values&) {
        return W::of_fp4(codes);
    }
};
