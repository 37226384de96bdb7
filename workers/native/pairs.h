// Quantised weights as bf16 numbers, for inputs of bf16: one instruction multiplies 32 and adds the products by pairs, in
// fp32. Bf16 holds all values of the formats of codes.h. Where processors lack the instruction, `Floats` do it.
#pragma once
#include "codes.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define SLIPSTREAM_PAIRS

// 32 numbers that are looked up.
struct alignas(64) Looked {
    Bf16 at[kBlock];

    template <typename F>
    explicit Looked(F&& f) {
        for (int i = 0; i < kBlock; ++i) narrow(static_cast<float>(f(i)), at[i]);
    }
    __m512i operator[](__m512i indices) const { return _mm512_permutexvar_epi16(indices, _mm512_load_si512(at)); }
};

const Looked kSmallIntegers([](int i) { return i < 16 ? i : i - 32; });
const Looked kFp8Subnormals([](int i) { return static_cast<float>(i) / (512 * kFp8Unit); });
const Looked kFp4Values([](int i) {
    constexpr float kSizes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    return i & 8 ? -kSizes[i & 7] : kSizes[i & 7];
});

struct Pairs {
    using Input = Bf16;
    using Block = Pairs;
    using Part = Pairs;
    using Int4Values = __m512i;

    static constexpr int64_t kParts = 1;

    __m512i bits;

    static Int4Values int4_values(uint8_t zero) {
        const __m256i codes = _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        return kSmallIntegers[_mm512_sub_epi16(_mm512_broadcast_i64x4(codes), _mm512_set1_epi16(zero))];
    }
    static Pairs of_int8(const uint8_t* codes) {
        const Lanes low = of_integers(of_signed_bytes(codes)), high = of_integers(of_signed_bytes(codes + kLanes));
        return {(__m512i)_mm512_cvtne2ps_pbh(high.v, low.v)};
    }
    // E4m3's exponents are counted from 7, bf16's from 127: 112 makes 2^-8 of the number. Subnormal numbers are looked up.
    static Pairs of_fp8(const uint8_t* codes) {
        const __m512i words = of_signed_words(codes), sign = _mm512_set1_epi16(static_cast<int16_t>(0x8000));
        const __m512i size = _mm512_and_si512(words, _mm512_set1_epi16(0x7f));
        const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(112 << 7));
        const __mmask32 subnormal = _mm512_cmplt_epi16_mask(size, _mm512_set1_epi16(8));
        const __m512i found = _mm512_mask_mov_epi16(normal, subnormal, kFp8Subnormals[size]);
        return {_mm512_ternarylogic_epi32(sign, words, found, kSelect)};
    }
    static Pairs of_int4(const uint8_t* codes, Int4Values values) {
        return {_mm512_permutexvar_epi16(halves(codes), values)};
    }
    static Pairs of_fp4(const uint8_t* codes) { return {kFp4Values[halves(codes)]}; }
    static Pairs load(const Bf16* from) {
        Pairs result = {_mm512_loadu_si512(from)};
        asm("" : "+v"(result.bits));  // see `in_register`
        return result;
    }
    void store(int64_t, Bf16* to) const { _mm512_storeu_si512(to, bits); }
    Lanes times(const Pairs& x, Lanes sum) const { return {_mm512_dpbf16_ps(sum.v, (__m512bh)x.bits, (__m512bh)bits)}; }

private:
    static constexpr int kSelect = 0xca;  // a ? b : c, bit by bit

    static __m512i of_signed_words(const uint8_t* codes) {
        return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    }
    // The low halves of 16 bytes, then the high halves, with other bits above the fifth of each, or in it: tables have
    // their 16 values twice, and permutations read five bits.
    static __m512i halves(const uint8_t* codes) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
        const __m512i twice = _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(bytes));
        const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
        return _mm512_srlv_epi16(twice, shifts);
    }
};

#endif
