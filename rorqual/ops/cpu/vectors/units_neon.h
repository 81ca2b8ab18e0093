// BFMMLA and SMMLA, included by units.h: two rows of eight bytes times two of eight give 2 x 2 sums. A panel holds its rows by eights;
// of each eight bytes of them, the pairs of rows one after the other.

constexpr int64_t EIGHT_ROWS = 8, PIECE_BYTES = 8;  // rows of a tile either way, bytes of a row in half a register

struct UnitScope {};
struct FittedScope {
    explicit FittedScope(int64_t) {}
    void fit(int64_t) {}
};

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
inline bool unit_takes(const bf16 *) { return true; }
INLINE float32x4_t times_2x2(float32x4_t sums, uint8x16_t x, uint8x16_t w, const bf16 *) {
    return vbfmmlaq_f32(sums, vreinterpretq_bf16_u8(x), vreinterpretq_bf16_u8(w));
}
#else
inline bool unit_takes(const bf16 *) { return false; }
INLINE float32x4_t times_2x2(float32x4_t sums, uint8x16_t, uint8x16_t, const bf16 *) { return sums; }
#endif

#if defined(__ARM_FEATURE_MATMUL_INT8)
inline bool unit_takes(const int8_t *) { return true; }
INLINE int32x4_t times_2x2(int32x4_t sums, uint8x16_t x, uint8x16_t w, const int8_t *) {
    return vmmlaq_s32(sums, vreinterpretq_s8_u8(x), vreinterpretq_s8_u8(w));
}
#else
inline bool unit_takes(const int8_t *) { return false; }
INLINE int32x4_t times_2x2(int32x4_t sums, uint8x16_t, uint8x16_t, const int8_t *) { return sums; }
#endif
inline bool unit_takes(const float *) { return false; }

inline void turn_panel(const char *w, int64_t apart_, int64_t rows, int64_t bytes, char *panel) {
    int64_t length = edged(bytes);
    for (int64_t r = 0; r < PANEL; r++) {
        char *into = panel + r / EIGHT_ROWS * EIGHT_ROWS * length + r % EIGHT_ROWS * PIECE_BYTES;
        for (int64_t i = 0; i < length; i += PIECE_BYTES) {
            char *piece = into + i * EIGHT_ROWS;
            int64_t held = r < rows ? std::max<int64_t>(0, std::min(PIECE_BYTES, bytes - i)) : 0;
            if (held == PIECE_BYTES) {
                memcpy(piece, w + r * apart_ + i, PIECE_BYTES);
                continue;
            }
            memset(piece, 0, PIECE_BYTES);
            if (held) memcpy(piece, w + r * apart_ + i, held);
        }
    }
}

// Eight rows of x, given one by one, with eight of the panel: sums [8, 8], ld apart.
template <class E, class V>
INLINE void eight_by_eight(const char *panel, int64_t bytes, const char *const (&x)[EIGHT_ROWS], typename SumOf<E>::type *sums, int64_t ld,
                           int64_t count) {
    V acc[4][4] = {};
    for (int64_t i = 0; i < bytes; i += 2 * PIECE_BYTES) {
        uint8x16_t first[4], second[4];
        UNROLLED for (int p = 0; p < 4; p++) {
            uint64x2_t even = fetch<uint64x2_t>(x[2 * p] + i), odd = fetch<uint64x2_t>(x[2 * p + 1] + i);
            first[p] = vreinterpretq_u8_u64(vzip1q_u64(even, odd));
            second[p] = vreinterpretq_u8_u64(vzip2q_u64(even, odd));
        }
        UNROLLED for (int q = 0; q < 4; q++) {
            const uint8_t *at = (const uint8_t *)panel + i * EIGHT_ROWS + q * 2 * PIECE_BYTES;
            uint8x16_t low = vld1q_u8(at), high = vld1q_u8(at + EIGHT_ROWS * PIECE_BYTES);
            UNROLLED for (int p = 0; p < 4; p++) {
                acc[p][q] = times_2x2(acc[p][q], first[p], low, (const E *)nullptr);
                acc[p][q] = times_2x2(acc[p][q], second[p], high, (const E *)nullptr);
            }
        }
    }
    UNROLLED for (int p = 0; p < 4; p++)
        UNROLLED for (int q = 0; q < 4; q++) {
            typename SumOf<E>::type four[4];
            memcpy(four, &acc[p][q], sizeof four);
            for (int row = 0; row < 2; row++)
                if (2 * p + row < count) memcpy(sums + (2 * p + row) * ld + 2 * q, four + 2 * row, 8);
        }
}

template <class E>
inline void panel_product(const char *panel, int64_t length, int64_t from, int64_t bytes, const char *x, int64_t ldx, int64_t count,
                          typename SumOf<E>::type *sums) {
    typedef typename std::conditional<std::is_same<E, int8_t>::value, int32x4_t, float32x4_t>::type V;
    for (int64_t i = 0; i < count; i += EIGHT_ROWS) {
        const char *rows[EIGHT_ROWS];  // rows that are missing are the last one again
        for (int64_t n = 0; n < EIGHT_ROWS; n++) rows[n] = x + std::min(i + n, count - 1) * ldx + from;
        for (int64_t r = 0; r < PANEL; r += EIGHT_ROWS)
            eight_by_eight<E, V>(panel + r * length + from * EIGHT_ROWS, bytes, rows, sums + i * PANEL + r, PANEL, count - i);
    }
}

template <class E, int64_t STEP>
inline void fitted_product(const char *panel, int64_t length, int64_t from, int64_t bytes, const char *x, int64_t ldx, int64_t count,
                           typename SumOf<E>::type *sums) {
    panel_product<E>(panel, length, from, bytes, x, ldx, count, sums);
}
