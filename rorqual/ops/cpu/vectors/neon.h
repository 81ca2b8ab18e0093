// NEON of aarch64, with products of bytes (DOTPROD) where they are there: included by vectors.h.

// 32 registers: 24 hold sums.
constexpr int TILE = 6, MIXED = 6, ACROSS = 12, AT_ONCE = 4, FEW_ROWS = 4;
constexpr bool HALVES = false;

// An instruction that was compiled in and that this processor lacks, by Linux' word; null: none.
inline const char *lacking() {
    unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
    (void)first, (void)second;
#if defined(__ARM_FEATURE_DOTPROD)
    if (!(first >> 20 & 1)) return "DOTPROD";
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if (!(second >> 13 & 1)) return "I8MM";
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    if (!(second >> 14 & 1)) return "BF16";
#endif
    return nullptr;
}

template <class V>
INLINE void hold(V &) {}

INLINE su upper_halves(su v) { return v & 0xffff0000u; }

inline v4 fold4(sf v) { return v; }

INLINE void sums_by_row(const sf (&v)[4][4], int count, v4 (&out)[4]) {
    UNROLLED for (int i = 0; i < 4; i++) {
        if (i >= count) continue;
        float32x4_t low = vpaddq_f32((float32x4_t)v[0][i], (float32x4_t)v[1][i]);
        float32x4_t high = vpaddq_f32((float32x4_t)v[2][i], (float32x4_t)v[3][i]);
        out[i] = (v4)vpaddq_f32(low, high);
    }
}

INLINE si small_products(ub a, sb x, ub b, sb y) {
    int8x16_t p = (int8x16_t)a, q = (int8x16_t)b, u = (int8x16_t)x, v = (int8x16_t)y;
#if defined(__ARM_FEATURE_DOTPROD)
    return (si)vdotq_s32(vdotq_s32(vdupq_n_s32(0), p, u), q, v);
#else
    // four products below 16 bits do not overflow them
    int16x8_t low = vmlal_s8(vmull_s8(vget_low_s8(p), vget_low_s8(u)), vget_low_s8(q), vget_low_s8(v));
    int16x8_t high = vmlal_high_s8(vmull_high_s8(p, u), q, v);
    return (si)vpaddlq_s16(vpaddq_s16(low, high));
#endif
}

INLINE si add_bytes(si sums, sb a, const void *x, int64_t i) {
    int8x16_t p = (int8x16_t)a, q = vld1q_s8((const int8_t *)x + i);
#if defined(__ARM_FEATURE_DOTPROD)
    return (si)vdotq_s32((int32x4_t)sums, p, q);
#else
    // one product of bytes fits 16 bits, two of -128 by -128 do not
    int32x4_t found = vpadalq_s16((int32x4_t)sums, vmull_s8(vget_low_s8(p), vget_low_s8(q)));
    return (si)vpadalq_s16(found, vmull_high_s8(p, q));
#endif
}

inline ub nibbles_above(ub v) { return v >> 4; }

INLINE void widen_nibbles(const uint8_t *p, sf *low, sf *high) {
    uint32_t four;
    memcpy(&four, p, sizeof four);
    uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(four));
    uint32x4_t word = vmovl_u16(vget_low_u16(vmovl_u8(bytes)));
    *low = (sf)vcvtq_f32_u32(vandq_u32(word, vdupq_n_u32(15)));
    *high = (sf)vcvtq_f32_u32(vandq_u32(word, vdupq_n_u32(0xf0)));
}

INLINE void turn_4(uint32x4_t (&v)[4]) {  // 4 words of 4 rows
    uint32x4_t a = vzip1q_u32(v[0], v[2]), b = vzip2q_u32(v[0], v[2]), c = vzip1q_u32(v[1], v[3]), d = vzip2q_u32(v[1], v[3]);
    v[0] = vzip1q_u32(a, c);
    v[1] = vzip2q_u32(a, c);
    v[2] = vzip1q_u32(b, d);
    v[3] = vzip2q_u32(b, d);
}

// 16 bytes of each of four rows from column i on, zeros where the matrix ends.
template <class W>
INLINE void fetch_4(const W *w, int64_t ldw, int64_t rows, int64_t k, int64_t first, int64_t i, uint32x4_t (&v)[4]) {
    constexpr int64_t EACH = 16 / sizeof(W);
    UNROLLED for (int r = 0; r < 4; r++) {
        v[r] = vdupq_n_u32(0);
        if (first + r >= rows || i >= k) continue;
        const W *from = w + (first + r) * ldw + i;
        if (k - i >= EACH)
            v[r] = fetch<uint32x4_t>(from);
        else
            memcpy(&v[r], from, (k - i) * sizeof(W));
    }
}

inline void turn_words(const float *w, int64_t ldw, int64_t rows, int64_t k, int64_t first, float *panel) {
    for (int64_t i = 0; i < padded(k); i += SPAN) {
        uint32x4_t v[4];
        fetch_4(w, ldw, rows, k, first, i, v);
        turn_4(v);
        UNROLLED for (int j = 0; j < 4; j++) put(fetch<sf>(&v[j]), panel + (i + j) * PAIR + first);
    }
}

inline void turn_words(const bf16 *w, int64_t ldw, int64_t rows, int64_t k, int64_t first, float *panel) {
    for (int64_t i = 0; i < k; i += PAIR) {
        uint32x4_t v[4];
        fetch_4(w, ldw, rows, k, first, i, v);
        turn_4(v);
        UNROLLED for (int j = 0; j < 4; j++) {
            put((sf)vreinterpretq_f32_u32(vshlq_n_u32(v[j], 16)), panel + (i + j) * PAIR + first);
            put((sf)vreinterpretq_f32_u32(vandq_u32(v[j], vdupq_n_u32(0xffff0000u))), panel + (i + SPAN + j) * PAIR + first);
        }
    }
}
