// Four-bit weights in groups of whole blocks, times PACKED and more rows that are bf16 and stay so, on pairs of bf16: included by
// quantized.h. PANEL rows of the matrix become a panel of bf16 (units.h), each number less its zero point, which bf16 holds exactly. A
// group's products are summed in fp32 and multiplied with its scale there: what is rounded is as in int4_pairs.h.
//
// Words of four bytes are turned before they are widened. A word has eight columns; its nibbles 0 and 4 become a pair, then 1 and 5, 2 and
// 6, 3 and 7, and rows of x stand in this order.

#if defined(__AVX512BF16__)
struct Int4Panels : Int4 {
    static constexpr int64_t TURNED = 128;           // columns whose numbers fill a register
    static constexpr int64_t DEEP = UNIT_DEPTH / 2;  // columns of a panel

    Int4Panels at(int64_t expert, int64_t rows) const { return {Int4::at(expert, rows)}; }
    int64_t apart_in() const { return apart(k / 2); }

    void prepare(const float *given, float *out) const {
        bf16 *x = (bf16 *)out;
        alignas(64) uint16_t order[PAIR];
        for (int i = 0; i < PAIR; i++) order[i] = uint16_t(i / 8 * 8 + i % 2 * 4 + i % 8 / 2);
        const __m512i places = _mm512_load_si512(order);
        narrow_all(given, k, x);
        for (int64_t i = 0; i < k; i += PAIR) _mm512_storeu_si512(x + i, _mm512_permutexvar_epi16(places, _mm512_loadu_si512(x + i)));
    }

    struct alignas(64) Numbers {
        bf16 less_8[PAIR], less_16[PAIR];  // by the lowest five bits
        Numbers() {
            for (int i = 0; i < PAIR; i++) {
                narrow(float(i % 16 - 8), less_8 + i);
                narrow(float(i - 16), less_16 + i);
            }
        }
    };

    // Rows of the matrix, at most PANEL, and some of their columns. added: for each group of these columns and each row 16 less its zero
    // point, in either half of a word. next: rows that are filled next, asked for meanwhile where they are given.
    template <bool ZEROS>
    void fill(int64_t first, int64_t rows, int64_t from, int64_t columns, const uint32_t *added, const uint8_t *next, char *panel) const {
        static const Numbers numbers;
        const __m512i table = _mm512_load_si512(ZEROS ? numbers.less_16 : numbers.less_8), fifteen = _mm512_set1_epi16(15);
        for (int64_t i = 0; i < columns; i += TURNED) {
            __mmask64 within = columns - i >= TURNED ? ~0ull : (1ull << (columns - i) / 2) - 1;
            int64_t groups[TURNED / NIBBLES];  // of its blocks: a division takes long
            for (int64_t b = 0; ZEROS && b < TURNED / NIBBLES; b++) groups[b] = (from + i + b * NIBBLES) / group - from / group;
            for (int64_t half = 0; half < 2; half++) {
                __m512i v[16];
                UNROLLED for (int r = 0; r < 16; r++) {
                    int64_t row = half * 16 + r;
                    if (next) _mm_prefetch((const char *)next + (row * k + i) / 2, _MM_HINT_T1);
                    v[r] = row < rows ? _mm512_maskz_loadu_epi8(within, data + ((first + row) * k + from + i) / 2) : _mm512_setzero_si512();
                }
                turn_16(v);
                char *to = panel + i / 2 * WORD_ROW + half * 64;
                UNROLLED for (int j = 0; j < 16; j++) {
                    if (i + 8 * j >= columns) break;
                    __m512i own = {};
                    if (ZEROS) own = _mm512_loadu_si512(added + groups[j * 8 / NIBBLES] * PANEL + half * 16);
                    UNROLLED for (int part = 0; part < 4; part++) {
                        __m512i number = part ? _mm512_srli_epi16(v[j], 4 * part) : v[j];
                        if (ZEROS) number = _mm512_add_epi16(_mm512_and_si512(number, fifteen), own);
                        _mm512_storeu_si512(to + (4 * j + part) * WORD_ROW, _mm512_permutexvar_epi16(number, table));
                    }
                }
            }
        }
    }

    // Lines of some rows' columns, a share of them at each call: they are in the second cache when the next panel is made.
    struct Asked {
        const char *from;
        int64_t apart, rows, lines, next;

        void some(int64_t count) {
            for (; count > 0 && next < rows * lines; count--, next++) _mm_prefetch(from + next / lines * apart + next % lines * EDGE, _MM_HINT_T1);
        }
    };

    // G groups of a panel, the g-th and on, times at most CHUNK rows of x on AMX: added to `total`. scale: of PANEL rows, group by group.
    template <int G>
    void some_groups(const char *panel, int64_t from, int64_t columns, int64_t g, const float *scale, const bf16 *x, int64_t ldx, int64_t n,
                     float *total) const {
        alignas(64) float sums[G][CHUNK * PANEL];
        for (int64_t i = 0; i < G; i++) {
            int64_t first = (g + i) * group - from % group, begin = std::max<int64_t>(0, first), end = std::min(columns, first + group);
            fitted_product<bf16, EDGE>(panel, 0, begin * 2, (end - begin) * 2, (const char *)(x + from), ldx * 2, n, sums[i]);
        }
        add_groups(sums, scale + g * PANEL, n, total, true);
    }

    // At most CHUNK rows of x times a panel on AMX.
    void chunk(const char *panel, int64_t from, int64_t columns, const float *scale, int64_t count, const bf16 *x, int64_t ldx, int64_t n, float *y,
               int64_t ldy, int64_t rows) const {
        alignas(64) float total[CHUNK * PANEL];
        for (int64_t t = 0; t < n; t++)
            for (int64_t r = 0; r < PANEL; r++) total[t * PANEL + r] = from > 0 && r < rows ? y[t * ldy + r] : 0;
        int64_t g = 0;
        for (; g + 2 <= count; g += 2) some_groups<2>(panel, from, columns, g, scale, x, ldx, n, total);
        if (g < count) some_groups<1>(panel, from, columns, g, scale, x, ldx, n, total);
        for (int64_t t = 0; t < n; t++) std::copy(total + t * PANEL, total + t * PANEL + rows, y + t * ldy);
    }

    // One panel, times rows of x; y is added to from the second piece of columns on.
    void band(int64_t first, int64_t rows, int64_t from, int64_t columns, const bf16 *x, int64_t ldx, int64_t n, float *y, int64_t ldy,
              Asked asked, FittedScope &scope) const {
        int64_t g0 = from / group, count = (from + columns - 1) / group - g0 + 1;
        float *scale = scratch(14, 2 * padded(count) * PANEL);
        uint32_t *added = (uint32_t *)(scale + padded(count) * PANEL);
        turned_grid(first, rows, g0, count, scale, added, [](uint8_t zero) { return (16u - zero) * 0x10001u; });
        char *panel = (char *)scratch(12, PANEL * UNIT_DEPTH / 4);
        const uint8_t *next = amx_here() ? (const uint8_t *)asked.from : nullptr;
        if (zeros)
            fill<true>(first, rows, from, columns, added, next, panel);
        else
            fill<false>(first, rows, from, columns, added, next, panel);
        int64_t lines = asked.rows * asked.lines;
        if (amx_here()) {
            for (int64_t i = 0; i < n; i += CHUNK) {
                scope.fit(std::min(CHUNK, n - i));
                chunk(panel, from, columns, scale, count, x + i * ldx, ldx, std::min(CHUNK, n - i), y + i * ldy, ldy, rows);
            }
            return;
        }
        for (int64_t g = 0; g < count; g++) {
            int64_t begin = std::max<int64_t>(0, (g0 + g) * group - from), end = std::min(columns, (g0 + g + 1) * group - from);
            asked.some((lines + count - 1) / count);
            pairs_product(panel + begin / 2 * WORD_ROW, (end - begin) * 2, (const char *)(x + from + begin), ldx * 2, n, y, ldy, rows,
                          {from + begin > 0, nullptr, scale + g * PANEL}, {});
        }
    }

    void product(int64_t first, int64_t rows, const float *in, int64_t ld, int64_t n, float *y, int64_t ldy) const {
        FittedScope scope(EDGE);
        for (int64_t some = 0; some < n; some += AT_UNIT)
            for (int64_t deep = 0; deep < k; deep += DEEP)
                for (int64_t r = 0; r < rows; r += PANEL) {
                    int64_t here = std::min(PANEL, rows - r), columns = std::min(DEEP, k - deep), left = std::min(PANEL, rows - r - PANEL);
                    Asked asked = {(const char *)data + ((first + r + PANEL) * k + deep) / 2, k / 2, std::max<int64_t>(0, left),
                                   (columns / 2 + EDGE - 1) / EDGE, 0};
                    band(first + r, here, deep, columns, (const bf16 *)(in + some * ld), 2 * ld, std::min(AT_UNIT, n - some), y + some * ldy + r,
                         ldy, asked, scope);
                }
    }
};
#endif
