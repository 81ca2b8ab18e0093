// What a processor with AVX512-BF16 has, in instructions of one without: included before the
// kernels, so that the form for such processors is compiled and checked here. A product of the odd
// columns is added before that of the even ones, each rounded once; too small numbers are zero.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

static inline float bf16_operand(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.f, x) : x;
}

static inline __m512 emulated_dpbf16(__m512 sums, __m512i a, __m512i b) {
    alignas(64) uint32_t x[16], y[16];
    alignas(64) float out[16];
    _mm512_store_si512(x, a);
    _mm512_store_si512(y, b);
    _mm512_store_ps(out, sums);
    for (int i = 0; i < 16; i++)
        for (int half = 1; half >= 0; half--) {
            float first = bf16_operand(half ? x[i] & 0xffff0000u : x[i] << 16);
            float second = bf16_operand(half ? y[i] & 0xffff0000u : y[i] << 16);
            float sum = std::fma(first, second, out[i]);
            out[i] = std::fabs(sum) < 1.17549435e-38f ? std::copysign(0.f, sum) : sum;
        }
    return _mm512_load_ps(out);
}

#ifndef __AVX512BF16__
#define __AVX512BF16__ 1
#endif
#define EMULATED_BF16 1
#define __m512bh __m512i
#define _mm512_dpbf16_ps emulated_dpbf16
