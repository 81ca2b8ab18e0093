// Four-bit weights in groups of whole blocks, times many rows that are rounded to eight bits with a scale a token, on a unit that multiplies
// bytes (units.h): included by quantized.h. A number less its zero point is a byte. Sums over a group are whole numbers, multiplied with
// the group's scale in fp32, and a token's with its scale at last: as Int4Bytes<1>, which is for few rows, but for the order of the sums.
//
// Of each block of NIBBLES columns first the even ones stand, then the odd ones, in a panel and in rows of x.

struct Int4BytePanels : Int4 {
    static constexpr int64_t DEEP = UNIT_DEPTH / 2;  // columns at once: a panel of them, and of rows of x, stay in the second cache
    static constexpr int64_t SUMMED = 2;  // groups whose sums wait in the first: totals are read and written once for all of them

    Int4BytePanels at(int64_t expert, int64_t rows) const { return {Int4::at(expert, rows)}; }
    int64_t length() const { return edged(k); }
    int64_t apart_in() const { return 16 + padded(length() / 4); }  // a token's scale and, a line further, its bytes

    void prepare(const float *given, float *out) const {
        int8_t *plain = (int8_t *)scratch(13, k / 4), *bytes = (int8_t *)(out + 16);
        out[0] = round_row(given, k, plain);
        for (int64_t i = 0; i < k; i += NIBBLES)
            for (int64_t j = 0; j < NIBBLES / 2; j++) {
                bytes[i + j] = plain[i + 2 * j];
                bytes[i + NIBBLES / 2 + j] = plain[i + 2 * j + 1];
            }
        std::fill(bytes + k, (int8_t *)(out + apart_in()), int8_t(0));
    }

#if defined(__AVX512BF16__)
    // Some columns of at most PANEL rows of the matrix. zero: of each group the rows' zero points, in all bytes of a word. next: what is
    // filled next, asked for meanwhile.
    template <bool ZEROS>
    void fill(int64_t first, int64_t rows, int64_t from, int64_t columns, const uint32_t *zero, const uint8_t *next, char *panel) const {
        constexpr int64_t TURNED = 2 * BYTES, WORDS = NIBBLES / 8;  // columns whose nibbles fill a register; words of a block
        const __m512i fifteen = _mm512_set1_epi8(15);
        for (int64_t i = 0; i < columns; i += TURNED) {
            __mmask64 within = columns - i >= TURNED ? ~0ull : (1ull << (columns - i) / 2) - 1;
            int64_t groups[TURNED / NIBBLES];  // of its blocks: a division takes long
            for (int64_t b = 0; ZEROS && b < TURNED / NIBBLES; b++) groups[b] = (from + i + b * NIBBLES) / group - from / group;
            for (int64_t half = 0; half < PANEL; half += 16) {
                __m512i v[16];
                UNROLLED for (int r = 0; r < 16; r++) {
                    int64_t row = half + r;
                    _mm_prefetch((const char *)next + (row * k + i) / 2, _MM_HINT_T1);
                    v[r] = row < rows ? _mm512_maskz_loadu_epi8(within, data + ((first + row) * k + from + i) / 2) : _mm512_setzero_si512();
                }
                turn_16(v);
                UNROLLED for (int b = 0; b < TURNED / NIBBLES; b++) {
                    int64_t at = i + b * NIBBLES;
                    if (at >= columns) break;
                    __m512i own = _mm512_set1_epi8(8);
                    if (ZEROS) own = _mm512_loadu_si512(zero + groups[b] * PANEL + half);
                    char *to = panel + at / 4 * WORD_ROW + half * 4;
                    UNROLLED for (int j = 0; j < WORDS; j++) {
                        __m512i word = v[b * WORDS + j], even = _mm512_and_si512(word, fifteen);
                        __m512i odd = _mm512_and_si512(_mm512_srli_epi16(word, 4), fifteen);
                        _mm512_storeu_si512(to + j * WORD_ROW, _mm512_sub_epi8(even, own));
                        _mm512_storeu_si512(to + (WORDS + j) * WORD_ROW, _mm512_sub_epi8(odd, own));
                    }
                }
            }
        }
        memset(panel + columns / 4 * WORD_ROW, 0, (edged(columns) - columns) * PANEL);
    }
#else
    template <bool ZEROS>
    void fill(int64_t first, int64_t rows, int64_t from, int64_t columns, const uint32_t *zero, const uint8_t *, char *panel) const {
        int8_t plain[PANEL * DEEP];
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < columns; i += NIBBLES) {
                const uint8_t *bytes = data + ((first + r) * k + from + i) / 2;
                int8_t *to = plain + r * DEEP + i, own = ZEROS ? int8_t(zero[((from + i) / group - from / group) * PANEL + r] & 255) : 8;
                for (int64_t j = 0; j < NIBBLES / 2; j++) {
                    to[j] = int8_t((bytes[j] & 15) - own);
                    to[NIBBLES / 2 + j] = int8_t((bytes[j] >> 4) - own);
                }
            }
        turn_panel((const char *)plain, DEEP, rows, columns, panel);
    }
#endif

    // `columns` of a panel from column `from` on: that many groups, the first of which may have begun before.
    struct Piece {
        const char *panel;
        int64_t from, columns, groups;
        const float *scale;
    };

    // Sums of G groups of a piece, the g-th and on, with n rows of x, times their scales: added to `total`, or put there.
    template <int64_t STEP, int G>
    void some_groups(const Piece &p, int64_t g, const char *x, int64_t ldx, int64_t n, float *total, bool more) const {
        alignas(64) int32_t sums[G][CHUNK * PANEL];
        for (int64_t i = 0; i < G; i++) {
            int64_t first = (g + i) * group - p.from % group, begin = std::max<int64_t>(0, first), end = std::min(p.columns, first + group);
            fitted_product<int8_t, STEP>(p.panel, edged(p.columns), begin, (end - begin + STEP - 1) / STEP * STEP, x, ldx, n, sums[i]);
        }
        add_groups(sums, p.scale + g * PANEL, n, total, more);
    }

    // A piece times n rows of x; total [n, PANEL] is added to from the second piece on.
    template <int64_t STEP>
    void piece(const Piece &p, const float *in, int64_t ld, int64_t n, float *total, FittedScope &scope) const {
        for (int64_t i = 0; i < n; i += CHUNK) {
            int64_t count = std::min(CHUNK, n - i), g = 0;
            const char *x = (const char *)(in + i * ld + 16) + p.from;
            float *into = total + i * PANEL;
            scope.fit(count);
            for (; g + SUMMED <= p.groups; g += SUMMED) some_groups<STEP, SUMMED>(p, g, x, ld * 4, count, into, p.from > 0 || g > 0);
            for (; g < p.groups; g++) some_groups<STEP, 1>(p, g, x, ld * 4, count, into, p.from > 0 || g > 0);
        }
    }

    // All rows of the matrix meet a piece of x before the next one: it stays in the second cache.
    template <int64_t STEP>
    void bands(int64_t first, int64_t rows, const float *in, int64_t ld, int64_t n, float *y, int64_t ldy) const {
        FittedScope scope(STEP);
        constexpr int64_t MOST = DEEP / NIBBLES + 1;  // groups of a piece
        char *panel = (char *)scratch(12, PANEL * DEEP / 4);
        float *totals = scratch(13, n * (rows + PANEL)), *scale = scratch(14, 2 * padded(MOST) * PANEL);
        uint32_t *zero = (uint32_t *)(scale + padded(MOST) * PANEL);
        for (int64_t from = 0; from < k; from += DEEP)
            for (int64_t r = 0; r < rows; r += PANEL) {
                int64_t columns = std::min(DEEP, k - from), row = first + r, here = std::min(PANEL, rows - r);
                int64_t begin = from / group, groups = (from + columns - 1) / group - begin + 1;
                const uint8_t *next = data + ((row + PANEL) * k + from) / 2;
                turned_grid(row, here, begin, groups, scale, zero, [](uint8_t own) { return own * 0x01010101u; });
                if (zeros)
                    fill<true>(row, here, from, columns, zero, next, panel);
                else
                    fill<false>(row, here, from, columns, zero, next, panel);
                float *total = totals + r * n;
                piece<STEP>({panel, from, columns, groups, scale}, in, ld, n, total, scope);
                for (int64_t t = 0; from + DEEP >= k && t < n; t++)
                    for (int64_t i = 0; i < here; i++) y[t * ldy + r + i] = total[t * PANEL + i] * in[t * ld];
            }
    }

    void product(int64_t first, int64_t rows, const float *in, int64_t ld, int64_t n, float *y, int64_t ldy) const {
        for (int64_t some = 0; some < n; some += AT_UNIT) {
            int64_t count = std::min(AT_UNIT, n - some);
            if (in_row == 1 || group % EDGE == 0)
                bands<EDGE>(first, rows, in + some * ld, ld, count, y + some * ldy, ldy);
            else
                bands<EDGE / 2>(first, rows, in + some * ld, ld, count, y + some * ldy, ldy);
        }
    }
};
