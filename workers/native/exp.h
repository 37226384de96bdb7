// exp(x) for x <= 0 in fp32, with an error of about one unit in the last place. Loops over it vectorise.
#pragma once
#include <cstdint>
#include <cstring>

inline float exp_negative(float x) {
    x = x < -87.0f ? -87.0f : x;
    float shifted = x * 1.44269504088896341f + 12582912.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    float n = shifted - 12582912.0f;
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t scale_bits = ((bits - 0x4b400000) + 127) << 23;
    float scale;
    std::memcpy(&scale, &scale_bits, sizeof scale);
    return p * scale;
}
