// Products in which a lane is a row of x, on instructions that multiply pairs of bf16 (AVX512-BF16), included by units.h: for experts
// with too few rows to pay for turning their weights. Rows of x are turned instead, once for a whole matrix, which is read as it lies.
//
// A turned row of x stands in words of two columns, LANES of them from row to row; up to three such registers are a group, whose words
// of a pair of columns lie side by side. Results are turned likewise: what follows a SwiGLU is packed for the next product as it is.
//
// Sums are those of `unit_dots` to the last bit: every result adds up its pairs of columns in order, in the same pieces.

#if defined(__AVX512BF16__)
constexpr int64_t MOST_LANES = 112;  // rows up to which it pays

inline int64_t registers_of(int64_t count) { return (count + LANES - 1) / LANES; }
inline int64_t spare_lanes(int64_t count) { return registers_of(count) * LANES - count; }
inline int64_t groups_of(int64_t registers) { return (registers + 2) / 3; }

struct LaneGroup {
    int64_t first, registers;  // the group's first register, and how many
};

inline LaneGroup lane_group(int64_t which, int64_t registers) {
    int64_t groups = groups_of(registers), first = registers * which / groups;
    return {first, registers * (which + 1) / groups - first};
}

// y [R, C registers], ldy apart (added to where `more`) = w [R, k] times a group of C registers of turned rows; `next`: rows that are
// read later.
template <int R, int C>
INLINE void lane_tile(const bf16 *w, int64_t ldw, const uint32_t *x, int64_t k, float *y, int64_t ldy, bool more, const bf16 *next) {
    __m512 acc[R][C] = {};
    int64_t i = 0;
    for (; i + 2 <= k; i += 2) {
        __m512bh lane[C];
        UNROLLED for (int c = 0; c < C; c++) lane[c] = (__m512bh)_mm512_loadu_si512(x + (i / 2 * C + c) * LANES);
        if (i % 32 < 2 * R) _mm_prefetch((const char *)(next + i % 32 / 2 * ldw + i / 32 * 32), _MM_HINT_T1);
        UNROLLED for (int r = 0; r < R; r++) {
            __m512bh pair = (__m512bh)_mm512_set1_epi32(fetch<int32_t>(w + r * ldw + i));
            UNROLLED for (int c = 0; c < C; c++) acc[r][c] = _mm512_dpbf16_ps(acc[r][c], lane[c], pair);
        }
    }
    if (i < k)  // what lies behind the last column may be anything
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int c = 0; c < C; c++) {
                __m512bh pair = (__m512bh)_mm512_set1_epi32(w[r * ldw + i].bits), lane = (__m512bh)_mm512_loadu_si512(x + (i / 2 * C + c) * LANES);
                acc[r][c] = _mm512_dpbf16_ps(acc[r][c], lane, pair);
            }
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int c = 0; c < C; c++) {
            float *into = y + r * ldy + c * LANES;
            _mm512_storeu_ps(into, more ? _mm512_add_ps(_mm512_loadu_ps(into), acc[r][c]) : acc[r][c]);
        }
}

template <int C>
void lane_rows(const bf16 *w, int64_t ldw, int64_t rows, const uint32_t *x, int64_t k, float *y, int64_t ldy, bool more, int64_t left) {
    constexpr int R = C == 1 ? 16 : 8;
    int64_t r = 0;
    for (; r + R <= rows; r += R) lane_tile<R, C>(w + r * ldw, ldw, x, k, y + r * ldy, ldy, more, w + (r + 2 * R <= left ? r + R : r) * ldw);
    for (; r + 4 <= rows; r += 4) lane_tile<4, C>(w + r * ldw, ldw, x, k, y + r * ldy, ldy, more, w + r * ldw);
    for (; r < rows; r++) lane_tile<1, C>(w + r * ldw, ldw, x, k, y + r * ldy, ldy, more, w + r * ldw);
}

// y [rows, registers], ldy apart = w [rows, k] times turned rows of x, by one thread. `left`: rows of the matrix that there are.
inline void lane_dots(const bf16 *w, int64_t ldw, int64_t rows, const uint32_t *x, int64_t registers, int64_t k, float *y, int64_t ldy, int64_t left) {
    int64_t words = (k + 1) / 2;
    constexpr int64_t DEEP = UNIT_DEPTH / int64_t(sizeof(bf16));
    for (int64_t deep = 0; deep < k; deep += DEEP)
        for (int64_t g = 0; g < groups_of(registers); g++) {
            LaneGroup group = lane_group(g, registers);
            const uint32_t *in = x + (group.first * words + deep / 2 * group.registers) * LANES;
            float *out = y + group.first * LANES;
            int64_t columns = std::min(DEEP, k - deep);
            if (group.registers == 1) lane_rows<1>(w + deep, ldw, rows, in, columns, out, ldy, deep > 0, left);
            if (group.registers == 2) lane_rows<2>(w + deep, ldw, rows, in, columns, out, ldy, deep > 0, left);
            if (group.registers == 3) lane_rows<3>(w + deep, ldw, rows, in, columns, out, ldy, deep > 0, left);
        }
}

// Rows of x, row(i) for i < count, to words of turned rows.
template <class F>
inline void turn_rows(F row, int64_t count, int64_t k, uint32_t *out) {
    int64_t registers = registers_of(count), words = (k + 1) / 2;
    for (int64_t g = 0; g < groups_of(registers); g++) {
        LaneGroup group = lane_group(g, registers);
        for (int64_t c = 0; c < group.registers; c++) {
            const bf16 *rows[LANES];
            int64_t first = (group.first + c) * LANES, here = std::min<int64_t>(LANES, count - first);
            for (int64_t i = 0; i < here; i++) rows[i] = row(first + i);
            for (int64_t i = 0; i < k; i += PAIR) {
                __mmask32 within = k - i >= PAIR ? 0xffffffffu : (1u << (k - i)) - 1;
                __m512i v[LANES];
                UNROLLED for (int r = 0; r < LANES; r++) v[r] = r < here ? _mm512_maskz_loadu_epi16(within, rows[r] + i) : _mm512_setzero_si512();
                turn_16(v);
                uint32_t *to = out + (group.first * words + i / 2 * group.registers + c) * LANES;
                UNROLLED for (int j = 0; j < LANES; j++)
                    if (i / 2 + j < words) _mm512_storeu_si512(to + j * group.registers * LANES, v[j]);
            }
        }
    }
}

// silu(gate) * up of turned rows, `rows` of each, ldh apart, to words of turned rows of `columns`, from column `from` on, an even one.
inline void lane_swiglu(const float *gates, const float *ups, int64_t ldh, int64_t rows, int64_t registers, int64_t from, int64_t columns, uint32_t *out) {
    int64_t words = (columns + 1) / 2;
    for (int64_t g = 0; g < groups_of(registers); g++) {
        LaneGroup group = lane_group(g, registers);
        for (int64_t r = 0; r < rows; r += 2)
            for (int64_t c = 0; c < group.registers; c++) {
                vf made[2] = {};
                for (int64_t j = 0; j < 2 && r + j < rows; j++) {
                    int64_t at = (r + j) * ldh + (group.first + c) * LANES;
                    vf gate = load(gates + at);
                    made[j] = gate / (1.f + exp_register(-gate)) * load(ups + at);
                }
                uint32_t *to = out + (group.first * words + (from + r) / 2 * group.registers + c) * LANES;
                vu both = narrow_register(made[0]) | narrow_register(made[1]) << 16;
                memcpy(to, &both, sizeof both);
            }
    }
}

// Turned rows of y [rows, lanes], ldy apart, to columns of out(i), i < count.
template <class F>
inline void turn_back(const float *y, int64_t ldy, int64_t rows, int64_t count, F out) {
    for (int64_t first = 0; first < count; first += LANES)
        for (int64_t r = 0; r < rows; r += 16) {
            __m512i v[16];
            UNROLLED for (int j = 0; j < 16; j++) v[j] = r + j < rows ? _mm512_loadu_si512(y + (r + j) * ldy + first) : _mm512_setzero_si512();
            turn_16(v);
            __mmask16 within = rows - r >= 16 ? 0xffff : (1u << (rows - r)) - 1;
            UNROLLED for (int i = 0; i < 16; i++)
                if (first + i < count) _mm512_mask_storeu_epi32(out(first + i) + r, within, v[i]);
        }
}
#endif
