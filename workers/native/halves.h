// 16-bit floating-point numbers, and their conversion from and to fp32.
#pragma once
#include <cstdint>
#include <cstring>

struct Bf16 {
    uint16_t bits;
};
struct Fp16 {
    uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(Bf16 x) {
    uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}
inline float widen(Fp16 x) {
    _Float16 half;
    std::memcpy(&half, &x, sizeof half);
    return static_cast<float>(half);
}
inline void narrow(float x, float& to) { to = x; }
inline void narrow(float x, Bf16& to) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    to.bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}
inline void narrow(float x, Fp16& to) {
    const _Float16 half = static_cast<_Float16>(x);
    std::memcpy(&to, &half, sizeof half);
}
