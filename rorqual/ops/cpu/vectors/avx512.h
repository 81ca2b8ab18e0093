// AVX-512 (F and BW), with VNNI where it is there: included by vectors.h.

constexpr int TILE = 6, MIXED = 6, ACROSS = 14, AT_ONCE = 4, FEW_ROWS = 4;
#if defined(__AVX512VNNI__)
constexpr bool HALVES = false;
#else
constexpr bool HALVES = true;
#endif

inline const char *lacking() {
#if defined(__AVX512BF16__) && !defined(EMULATED_BF16)
    unsigned a = 0, b = 0, c = 0, d = 0;  // older compilers have no name for it
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return "AVX512-BF16";
#endif
#if defined(__AVX512VNNI__) && !defined(EMULATED_VNNI)
    if (!__builtin_cpu_supports("avx512vnni")) return "AVX512-VNNI";
#endif
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") ? nullptr : "AVX512-BW";
}

template <class V>
INLINE void hold(V &) {}

INLINE su upper_halves(su v) { return v & 0xffff0000u; }

inline v4 fold4(sf v) { return fold(v); }

// 16 sums take as many steps as two would alone.
INLINE void sums_by_row(const sf (&v)[4][4], int count, v4 (&out)[4]) {
    __m512 each[4] = {};  // a quarter of a register a row of the matrix
    UNROLLED for (int i = 0; i < 4; i++) {
        if (i >= count) continue;
        __m512 p = (__m512)v[0][i], q = (__m512)v[1][i], s = (__m512)v[2][i], t = (__m512)v[3][i];
        __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(p, q, 0x44), _mm512_shuffle_f32x4(p, q, 0xee));
        __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(s, t, 0x44), _mm512_shuffle_f32x4(s, t, 0xee));
        each[i] = _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
    }
    __m512 low = _mm512_add_ps(_mm512_unpacklo_ps(each[0], each[1]), _mm512_unpackhi_ps(each[0], each[1]));
    __m512 high = _mm512_add_ps(_mm512_unpacklo_ps(each[2], each[3]), _mm512_unpackhi_ps(each[2], each[3]));
    __m512 all = _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee));
    __m512i turned = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    all = _mm512_permutexvar_ps(turned, all);
    memcpy(out, &all, sizeof all);
}

inline si small_products(ub a, sb x, ub b, sb y) {  // four products below 16 bits do not overflow them
#if defined(__AVX512VNNI__)
    return (si)_mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), (__m512i)a, (__m512i)x), (__m512i)b, (__m512i)y);
#else
    __m512i both = _mm512_add_epi16(_mm512_maddubs_epi16((__m512i)a, (__m512i)x), _mm512_maddubs_epi16((__m512i)b, (__m512i)y));
    return (si)_mm512_madd_epi16(both, _mm512_set1_epi16(1));
#endif
}

#if defined(__AVX512VNNI__)
// Bytes with a sign on one side alone: x - 128 is what a flipped upper bit makes of an unsigned x.
INLINE si add_bytes(si sums, sb a, const void *x, int64_t i) {
    sb b = fetch<sb>((const int8_t *)x + i);
    __m512i up = _mm512_xor_si512((__m512i)a, _mm512_set1_epi8(char(0x80)));
    __m512i found = _mm512_dpbusd_epi32((__m512i)sums, up, (__m512i)b);
    return (si)_mm512_sub_epi32(found, _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(char(0x80)), (__m512i)b));
}
#else
INLINE si add_bytes(si sums, sb a, const void *x, int64_t i) {
    const int16_t *b = (const int16_t *)x + i;
    __m512i even = _mm512_srai_epi16(_mm512_slli_epi16((__m512i)a, 8), 8), odd = _mm512_srai_epi16((__m512i)a, 8);
    __m512i first = _mm512_loadu_si512(b), second = _mm512_loadu_si512(b + BYTES / 2);
    return sums + (si)_mm512_add_epi32(_mm512_madd_epi16(even, first), _mm512_madd_epi16(odd, second));
}
#endif

inline ub nibbles_above(ub v) { return (ub)_mm512_and_si512(_mm512_srli_epi16((__m512i)v, 4), _mm512_set1_epi8(15)); }

INLINE void widen_nibbles(const uint8_t *p, sf *low, sf *high) {
    // of an index the permutation takes four bits: one step for the mask and the conversion
    const __m512 ones = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i word = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    *low = (sf)_mm512_permutexvar_ps(word, ones);
    *high = (sf)_mm512_permutexvar_ps(_mm512_srli_epi32(word, 4), _mm512_mul_ps(ones, _mm512_set1_ps(16)));
}

// Groups of one or two blocks, of which `left` are in the row.
INLINE sf each_block(const float *each, int64_t blocks, int64_t left) {
    __m512 some = _mm512_maskz_loadu_ps(left >= 4 ? 15 : (1 << left) - 1, each);
    __m512i fours = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return (sf)_mm512_permutexvar_ps(blocks == 1 ? fours : _mm512_srli_epi32(fours, 1), some);
}

inline void turn_16(__m512i (&v)[16]) {  // 16 words of 16 rows
    __m512i t[16];
    UNROLLED for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    UNROLLED for (int i = 0; i < 16; i += 4) {
        v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    UNROLLED for (int j = 0; j < 4; j++) {  // v[4 i + j] holds word 4 q + j of rows 4 i to 4 i + 3 in quarter q
        __m512i a = _mm512_shuffle_i32x4(v[j], v[4 + j], 0x88), b = _mm512_shuffle_i32x4(v[j], v[4 + j], 0xdd);
        __m512i c = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0x88), d = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0xdd);
        t[j] = _mm512_shuffle_i32x4(a, c, 0x88);
        t[4 + j] = _mm512_shuffle_i32x4(b, d, 0x88);
        t[8 + j] = _mm512_shuffle_i32x4(a, c, 0xdd);
        t[12 + j] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
    UNROLLED for (int i = 0; i < 16; i++) v[i] = t[i];
}

inline void turn_words(const float *w, int64_t ldw, int64_t rows, int64_t k, int64_t first, float *panel) {
    for (int64_t i = 0; i < padded(k); i += SPAN) {
        __mmask16 within = k - i >= SPAN ? 0xffff : k > i ? (1u << (k - i)) - 1 : 0;
        __m512i v[16];
        UNROLLED for (int r = 0; r < 16; r++)
            v[r] = first + r < rows ? _mm512_maskz_loadu_epi32(within, w + (first + r) * ldw + i) : _mm512_setzero_si512();
        turn_16(v);
        UNROLLED for (int j = 0; j < 16; j++) _mm512_storeu_si512(panel + (i + j) * PAIR + first, v[j]);
    }
}

inline void turn_words(const bf16 *w, int64_t ldw, int64_t rows, int64_t k, int64_t first, float *panel) {
    const __m512i odd = _mm512_set1_epi32(int(0xffff0000u));
    for (int64_t i = 0; i < k; i += PAIR) {
        __mmask32 within = k - i >= PAIR ? 0xffffffffu : (1u << (k - i)) - 1;
        __m512i v[16];
        UNROLLED for (int r = 0; r < 16; r++)
            v[r] = first + r < rows ? _mm512_maskz_loadu_epi16(within, w + (first + r) * ldw + i) : _mm512_setzero_si512();
        turn_16(v);
        UNROLLED for (int j = 0; j < 16; j++) {
            _mm512_storeu_si512(panel + (i + j) * PAIR + first, _mm512_slli_epi32(v[j], 16));
            _mm512_storeu_si512(panel + (i + SPAN + j) * PAIR + first, _mm512_and_si512(v[j], odd));
        }
    }
}
