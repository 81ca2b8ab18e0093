// What a processor with AVX512-VNNI has, in instructions of one without: included before the kernels, so that the form for such
// processors is compiled and checked here.

#include <immintrin.h>

// Words of sums + four products each, of unsigned and signed bytes.
static inline __m512i emulated_dpbusd(__m512i sums, __m512i a, __m512i b) {
    alignas(64) unsigned char x[64];
    alignas(64) signed char y[64];
    alignas(64) int out[16];
    _mm512_store_si512(x, a);
    _mm512_store_si512(y, b);
    _mm512_store_si512(out, sums);
    for (int i = 0; i < 64; i++) out[i / 4] += int(x[i]) * int(y[i]);
    return _mm512_load_si512(out);
}

#ifndef __AVX512VNNI__
#define __AVX512VNNI__ 1
#endif
#define EMULATED_VNNI 1
#define _mm512_dpbusd_epi32 emulated_dpbusd
