// AVX2: included by vectors.h.

constexpr int TILE = 2, ACROSS = 6, AT_ONCE = 2;
constexpr bool HALVES = true;

inline const char *lacking() {
    return __builtin_cpu_supports("avx2") ? nullptr : "AVX2";
}

inline v4 fold4(sf v) {
    v4 half[2];
    memcpy(half, &v, sizeof v);
    return half[0] + half[1];
}

INLINE void sums_by_row(const sf (&v)[4][4], int count, v4 (&out)[4]) { sums_one_by_one(v, count, out); }

inline si small_products(ub a, sb x, ub b, sb y) {  // four products below 16 bits do not overflow them
    __m256i both = _mm256_add_epi16(_mm256_maddubs_epi16((__m256i)a, (__m256i)x), _mm256_maddubs_epi16((__m256i)b, (__m256i)y));
    return (si)_mm256_madd_epi16(both, _mm256_set1_epi16(1));
}

INLINE si add_bytes(si sums, sb a, const void *x, int64_t i) {
    const int16_t *b = (const int16_t *)x + i;
    __m256i even = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)a, 8), 8), odd = _mm256_srai_epi16((__m256i)a, 8);
    __m256i first = _mm256_loadu_si256((const __m256i *)b), second = _mm256_loadu_si256((const __m256i *)(b + BYTES / 2));
    return sums + (si)_mm256_add_epi32(_mm256_madd_epi16(even, first), _mm256_madd_epi16(odd, second));
}

inline ub nibbles_above(ub v) { return (ub)_mm256_and_si256(_mm256_srli_epi16((__m256i)v, 4), _mm256_set1_epi8(15)); }

INLINE void widen_nibbles(const uint8_t *p, sf *low, sf *high) {
    __m256i word = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    *low = (sf)_mm256_cvtepi32_ps(_mm256_and_si256(word, _mm256_set1_epi32(15)));
    *high = (sf)_mm256_cvtepi32_ps(_mm256_and_si256(word, _mm256_set1_epi32(0xf0)));
}
