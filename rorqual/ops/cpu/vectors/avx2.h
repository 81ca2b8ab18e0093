// AVX2: included by vectors.h.

constexpr int TILE = 3, MIXED = 6, ACROSS = 6, AT_ONCE = 2, FEW_ROWS = 27;
constexpr bool HALVES = false;

inline const char *lacking() {
    return __builtin_cpu_supports("avx2") ? nullptr : "AVX2";
}

template <class V>
INLINE void hold(V &v) {
    asm("" : "+x"(v));
}

// The mask stays in memory: sums, columns and a row take all sixteen registers.
alignas(32) constexpr uint32_t UPPER[SPAN] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};

INLINE su upper_halves(su v) {
    asm("vpand %1, %0, %0" : "+x"(v) : "m"(UPPER));
    return v;
}

inline v4 fold4(sf v) {
    v4 half[2];
    memcpy(half, &v, sizeof v);
    return half[0] + half[1];
}

INLINE void sums_by_row(const sf (&v)[4][4], int count, v4 (&out)[4]) {
    UNROLLED for (int i = 0; i < 4; i++) {
        if (i >= count) continue;
        __m128 a = (__m128)fold4(v[0][i]), b = (__m128)fold4(v[1][i]), c = (__m128)fold4(v[2][i]), d = (__m128)fold4(v[3][i]);
        __m128 low = _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a)), high = _mm_add_ps(_mm_movelh_ps(c, d), _mm_movehl_ps(d, c));
        out[i] = (v4)_mm_add_ps(_mm_shuffle_ps(low, high, 0x88), _mm_shuffle_ps(low, high, 0xdd));
    }
}

inline si small_products(ub a, sb x, ub b, sb y) {  // four products below 16 bits do not overflow them
    __m256i both = _mm256_add_epi16(_mm256_maddubs_epi16((__m256i)a, (__m256i)x), _mm256_maddubs_epi16((__m256i)b, (__m256i)y));
    return (si)_mm256_madd_epi16(both, _mm256_set1_epi16(1));
}

// Bytes with a sign on one side alone: |a|, up to 128, times x with a's sign. x is not below -127: the sum of two products has 16 bits.
INLINE si add_bytes(si sums, sb a, const void *x, int64_t i) {
    __m256i b = _mm256_loadu_si256((const __m256i *)((const int8_t *)x + i));
    __m256i both = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)a), _mm256_sign_epi8(b, (__m256i)a));
    return sums + (si)_mm256_madd_epi16(both, _mm256_set1_epi16(1));
}

inline ub nibbles_above(ub v) { return (ub)_mm256_and_si256(_mm256_srli_epi16((__m256i)v, 4), _mm256_set1_epi8(15)); }

INLINE void widen_nibbles(const uint8_t *p, sf *low, sf *high) {
    __m256i word = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    *low = (sf)_mm256_cvtepi32_ps(_mm256_and_si256(word, _mm256_set1_epi32(15)));
    *high = (sf)_mm256_cvtepi32_ps(_mm256_and_si256(word, _mm256_set1_epi32(0xf0)));
}

// Groups of a block, of which `left` are in the row.
INLINE sf each_block(const float *each, int64_t, int64_t left) {
    return (sf)_mm256_insertf128_ps(_mm256_set1_ps(each[0]), _mm_set1_ps(each[left > 1]), 1);
}

inline void turn_8(__m256i (&v)[8]) {  // 8 words of 8 rows
    __m256i t[8];
    UNROLLED for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
    }
    UNROLLED for (int i = 0; i < 8; i += 4) {
        v[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        v[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        v[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        v[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    UNROLLED for (int j = 0; j < 4; j++) {  // v[4 i + j] holds word 4 q + j of rows 4 i to 4 i + 3 in half q
        t[j] = _mm256_permute2x128_si256(v[j], v[4 + j], 0x20);
        t[4 + j] = _mm256_permute2x128_si256(v[j], v[4 + j], 0x31);
    }
    UNROLLED for (int i = 0; i < 8; i++) v[i] = t[i];
}

// 32 bytes of each of 8 rows, of which `rows` exist, zeros from byte `left` on.
inline void rows_of_8(const char *from, int64_t apart, int64_t rows, int64_t left, __m256i (&v)[8]) {
    UNROLLED for (int r = 0; r < 8; r++) {
        v[r] = _mm256_setzero_si256();
        if (r < rows && left >= BYTES) v[r] = _mm256_loadu_si256((const __m256i *)(from + r * apart));
        if (r < rows && left < BYTES) memcpy(&v[r], from + r * apart, left);
    }
}

inline void turn_words(const float *w, int64_t ldw, int64_t rows, int64_t k, int64_t first, float *panel) {
    for (int64_t i = 0; i < padded(k); i += SPAN) {
        __m256i v[8];
        rows_of_8((const char *)(w + first * ldw + i), ldw * 4, rows - first, std::max<int64_t>(0, (k - i) * 4), v);
        turn_8(v);
        UNROLLED for (int j = 0; j < 8; j++) _mm256_storeu_si256((__m256i *)(panel + (i + j) * PAIR + first), v[j]);
    }
}

inline void turn_words(const bf16 *w, int64_t ldw, int64_t rows, int64_t k, int64_t first, float *panel) {
    const __m256i odd = _mm256_set1_epi32(int(0xffff0000u));
    for (int64_t i = 0; i < k; i += PAIR) {
        __m256i v[8];
        rows_of_8((const char *)(w + first * ldw + i), ldw * 2, rows - first, (k - i) * 2, v);
        turn_8(v);
        UNROLLED for (int j = 0; j < 8; j++) {
            _mm256_storeu_si256((__m256i *)(panel + (i + j) * PAIR + first), _mm256_slli_epi32(v[j], 16));
            _mm256_storeu_si256((__m256i *)(panel + (i + SPAN + j) * PAIR + first), _mm256_and_si256(v[j], odd));
        }
    }
}
