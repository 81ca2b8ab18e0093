// AVX512-BF16, VNNI, and AMX where the processor has it and Linux lets this process use it: included by units.h. A panel holds words of four
// bytes, PANEL rows side by side.

constexpr int64_t WORD_ROW = PANEL * 4;  // bytes of a panel that are one word of every row

inline void turn_panel(const char *w, int64_t apart_, int64_t rows, int64_t bytes, char *panel) {
    for (int64_t i = 0; i < bytes; i += EDGE) {
        __mmask64 within = bytes - i >= EDGE ? ~0ull : (1ull << (bytes - i)) - 1;
        for (int64_t half = 0; half < PANEL; half += 16) {
            __m512i v[16];
            UNROLLED for (int r = 0; r < 16; r++)
                v[r] = half + r < rows ? _mm512_maskz_loadu_epi8(within, w + (half + r) * apart_ + i) : _mm512_setzero_si512();
            turn_16(v);
            UNROLLED for (int j = 0; j < 16; j++) _mm512_storeu_si512(panel + (i / 4 + j) * WORD_ROW + half * 4, v[j]);
        }
    }
}

// Rows of the matrix that come after those of a panel: asked for while the panel is multiplied.
struct NextBand {
    const char *rows;
    int64_t apart, last;  // bytes from row to row; the last row that there is
};

constexpr int64_t PAIRS_TILE = 14;  // rows of x in registers

// What becomes of what y was: nothing, a summand, or a summand times a factor a row. scales: of PANEL rows of the matrix, what the new
// sums are multiplied with.
struct Before {
    bool added;
    const float *factors, *scales;
};

// y [N, PANEL], ldy apart = N rows of x, in pairs of bf16, times a panel; half 0 or 1 of the next one's rows.
template <int N>
INLINE void pairs_tile(const char *panel, int64_t bytes, const char *x, int64_t ldx, float *y, int64_t ldy, Before before, __mmask32 within,
                       NextBand next, int64_t half) {
    __m512 acc[N][2] = {};
    for (int64_t i = 0; i < bytes; i += 4) {
        __m512bh low = (__m512bh)_mm512_loadu_si512(panel + i / 4 * WORD_ROW), high = (__m512bh)_mm512_loadu_si512(panel + i / 4 * WORD_ROW + 64);
        if (next.rows) _mm_prefetch(next.rows + std::min(half * 16 + i / 4 % 16, next.last) * next.apart + i / 64 * 64, _MM_HINT_T1);
        UNROLLED for (int n = 0; n < N; n++) {
            __m512bh pair = (__m512bh)_mm512_set1_epi32(fetch<int32_t>(x + n * ldx + i));
            acc[n][0] = _mm512_dpbf16_ps(acc[n][0], low, pair);
            acc[n][1] = _mm512_dpbf16_ps(acc[n][1], high, pair);
        }
    }
    UNROLLED for (int n = 0; n < N; n++)
        UNROLLED for (int c = 0; c < 2; c++) {
            float *into = y + n * ldy + c * 16;
            __mmask16 mine = __mmask16(within >> (c * 16));
            __m512 sum = acc[n][c];
            if (before.scales) {
                __m512 own = _mm512_loadu_ps(before.scales + c * 16);
                sum = before.added ? _mm512_fmadd_ps(sum, own, _mm512_maskz_loadu_ps(mine, into)) : _mm512_mul_ps(sum, own);
            } else if (before.factors)
                sum = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mine, into), _mm512_set1_ps(before.factors[n]), sum);
            else if (before.added)
                sum = _mm512_add_ps(_mm512_maskz_loadu_ps(mine, into), sum);
            _mm512_mask_storeu_ps(into, mine, sum);
        }
}

// y [count, width] = count rows of x times a panel, tiles of even sizes.
inline void pairs_product(const char *panel, int64_t bytes, const char *x, int64_t ldx, int64_t count, float *y, int64_t ldy, int64_t width,
                          Before before, NextBand next) {
    int64_t tiles = (count + PAIRS_TILE - 1) / PAIRS_TILE;
    __mmask32 within = width >= PANEL ? 0xffffffffu : (1u << width) - 1;
    for (int64_t t = 0; t < tiles; t++) {
        int64_t from = count * t / tiles, rows = count * (t + 1) / tiles - from;
        if (t == 2) next.rows = nullptr;
        const char *in = x + from * ldx;
        float *out = y + from * ldy;
        Before own = {before.added, before.factors ? before.factors + from : nullptr, before.scales};
        switch (rows) {
#define ROWS(N) \
    case N: pairs_tile<N>(panel, bytes, in, ldx, out, ldy, own, within, next, t); break;
            ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12) ROWS(13) ROWS(14)
#undef ROWS
        }
    }
}

#if defined(__AVX512VNNI__)
constexpr bool VNNI = true;

// sums [N, PANEL] = N rows of x times a panel, both in bytes. The instruction takes a sign on one side alone: x + 128 is what a flipped
// upper bit makes of x, and sums begin with 128 times the panel's own, taken away.
template <int N>
INLINE void bytes_tile(const char *panel, int64_t bytes, const char *x, int64_t ldx, __m512i low, __m512i high, int32_t *sums) {
    __m512i acc[N][2];
    UNROLLED for (int n = 0; n < N; n++) {
        acc[n][0] = low;
        acc[n][1] = high;
    }
    const __m512i flipped = _mm512_set1_epi8(char(0x80));
    for (int64_t i = 0; i < bytes; i += 4) {
        __m512i first = _mm512_loadu_si512(panel + i / 4 * WORD_ROW), second = _mm512_loadu_si512(panel + i / 4 * WORD_ROW + 64);
        UNROLLED for (int n = 0; n < N; n++) {
            __m512i word = _mm512_xor_si512(_mm512_set1_epi32(fetch<int32_t>(x + n * ldx + i)), flipped);
            acc[n][0] = _mm512_dpbusd_epi32(acc[n][0], word, first);
            acc[n][1] = _mm512_dpbusd_epi32(acc[n][1], word, second);
        }
    }
    UNROLLED for (int n = 0; n < N; n++)
        UNROLLED for (int c = 0; c < 2; c++) _mm512_storeu_si512(sums + n * PANEL + c * 16, acc[n][c]);
}

inline void bytes_product(const char *panel, int64_t bytes, const char *x, int64_t ldx, int64_t count, int32_t *sums) {
    const __m512i flipped = _mm512_set1_epi8(char(0x80));
    __m512i low = _mm512_setzero_si512(), high = low;
    for (int64_t i = 0; i < bytes; i += 4) {
        low = _mm512_dpbusd_epi32(low, flipped, _mm512_loadu_si512(panel + i / 4 * WORD_ROW));
        high = _mm512_dpbusd_epi32(high, flipped, _mm512_loadu_si512(panel + i / 4 * WORD_ROW + 64));
    }
    low = _mm512_sub_epi32(_mm512_setzero_si512(), low);
    high = _mm512_sub_epi32(_mm512_setzero_si512(), high);
    int64_t tiles = (count + 10) / 11;  // of even sizes, at most 11 rows: CHUNK rows are three of them
    for (int64_t t = 0; t < tiles; t++) {
        int64_t from = count * t / tiles, rows = count * (t + 1) / tiles - from;
        const char *in = x + from * ldx;
        int32_t *out = sums + from * PANEL;
        switch (rows) {
#define ROWS(N) \
    case N: bytes_tile<N>(panel, bytes, in, ldx, low, high, out); break;
            ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11)
#undef ROWS
        }
    }
}
#else
constexpr bool VNNI = false;
inline void bytes_product(const char *, int64_t, const char *, int64_t, int64_t, int32_t *) {}
#endif

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
constexpr int64_t TILE_ROWS = 16;

// Tiles are part of a thread's state that Linux holds back until a process asks for it. False: no AMX, and AVX-512 does it.
inline bool amx_granted() {
#if defined(EMULATED_AMX)
    return true;
#else
    constexpr long REQUEST = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned WANTED = 1u << 22 | 1u << 24 | 1u << 25;  // bf16, tiles, bytes
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & WANTED) != WANTED) return false;
    return syscall(SYS_arch_prctl, REQUEST, TILES) == 0;
#endif
}

inline bool amx_here() {
    static const bool granted = amx_granted();
    return granted;
}

struct alignas(64) TileShapes {  // as LDTILECFG reads them: eight tiles of 16 rows of 64 bytes
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};

    TileShapes() = default;
    // For fitted_product of `count` rows of x.
    TileShapes(int64_t step, int64_t count) {
        row_bytes[4] = row_bytes[5] = uint16_t(step);
        for (int i : {0, 1, 4}) rows[i] = uint8_t(std::min<int64_t>(count, 16));
        for (int i : {2, 3, 5}) rows[i] = uint8_t(count > 16 ? count - 16 : 16);
        rows[6] = rows[7] = uint8_t(step / 4);
    }
};

struct UnitScope {
    UnitScope() {
        static const TileShapes shapes;
        if (amx_here()) _tile_loadconfig(&shapes);
    }
    ~UnitScope() {
        if (amx_here()) _tile_release();
    }
};

// Tiles have as many rows as there are rows of x: fewer take less time, and nothing is copied to fill a tile.
struct FittedScope {
    int64_t step, count = 0;

    explicit FittedScope(int64_t step) : step(step) {}
    ~FittedScope() {
        if (count) _tile_release();
    }
    void fit(int64_t wanted) {
        if (wanted == 16 && count > 16) return;  // the first 16 rows of any shape
        if (!amx_here() || count == wanted) return;
        TileShapes shapes(step, wanted);
        _tile_loadconfig(&shapes);
        count = wanted;
    }
};

// Tiles 0 to 3 are sums, 4 and 5 two times 16 rows of x, 6 and 7 two times 16 of the panel.
#define TILES_TIMES(product, x_tile, first, second) \
    product(first, x_tile, 6);                      \
    product(second, x_tile, 7);

template <class E, int64_t STEP>
void tiles_product(const char *panel, int64_t bytes, const char *x, int64_t ldx, bool both, typename SumOf<E>::type *sums) {
    constexpr bool BF16 = std::is_same<E, bf16>::value;
    // what tiles read is in memory by now: a compiler does not know of it
    __asm__ volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < bytes; i += STEP) {
        _tile_loadd(6, panel + i / 4 * WORD_ROW, WORD_ROW);
        _tile_loadd(7, panel + i / 4 * WORD_ROW + 64, WORD_ROW);
        _tile_loadd(4, x + i, ldx);
        if (BF16) {
            TILES_TIMES(_tile_dpbf16ps, 4, 0, 1)
        } else {
            TILES_TIMES(_tile_dpbssd, 4, 0, 1)
        }
        if (!both) continue;
        _tile_loadd(5, x + TILE_ROWS * ldx + i, ldx);
        if (BF16) {
            TILES_TIMES(_tile_dpbf16ps, 5, 2, 3)
        } else {
            TILES_TIMES(_tile_dpbssd, 5, 2, 3)
        }
    }
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + 16, PANEL * 4);
    if (!both) return;
    _tile_stored(2, sums + TILE_ROWS * PANEL, PANEL * 4);
    _tile_stored(3, sums + TILE_ROWS * PANEL + 16, PANEL * 4);
}

template <class E>
inline void amx_product(const char *panel, int64_t bytes, const char *x, int64_t ldx, int64_t count, typename SumOf<E>::type *sums) {
    bool both = count > TILE_ROWS;
    int64_t read = both ? CHUNK : TILE_ROWS;
    if (count < read) {  // tiles read 16 rows
        char *whole = (char *)scratch(15, read * bytes / 4);
        for (int64_t i = 0; i < count; i++) memcpy(whole + i * bytes, x + i * ldx, bytes);
        std::fill(whole + count * bytes, whole + read * bytes, char(0));
        x = whole;
        ldx = bytes;
    }
    tiles_product<E, EDGE>(panel, bytes, x, ldx, both, sums);
}

inline bool unit_takes(const bf16 *) { return true; }
inline bool unit_takes(const int8_t *) { return VNNI || amx_here(); }
#else
struct UnitScope {};
struct FittedScope {
    explicit FittedScope(int64_t) {}
    void fit(int64_t) {}
};
inline bool amx_here() { return false; }
template <class E>
inline void amx_product(const char *, int64_t, const char *, int64_t, int64_t, typename SumOf<E>::type *) {}
inline bool unit_takes(const bf16 *) { return true; }
inline bool unit_takes(const int8_t *) { return VNNI; }
#endif
inline bool unit_takes(const float *) { return false; }

template <class E>
inline void panel_product(const char *panel, int64_t, int64_t from, int64_t bytes, const char *x, int64_t ldx, int64_t count,
                          typename SumOf<E>::type *sums) {
    const char *start = panel + from / 4 * WORD_ROW;
    if (amx_here())
        amx_product<E>(start, bytes, x + from, ldx, count, sums);
    else if constexpr (std::is_same<E, bf16>::value)
        pairs_product(start, bytes, x + from, ldx, count, sums, PANEL, PANEL, {}, {});
    else
        bytes_product(start, bytes, x + from, ldx, count, sums);
}

template <class E, int64_t STEP>
inline void fitted_product(const char *panel, int64_t length, int64_t from, int64_t bytes, const char *x, int64_t ldx, int64_t count,
                           typename SumOf<E>::type *sums) {
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
    if (amx_here()) return tiles_product<E, STEP>(panel + from / 4 * WORD_ROW, bytes, x + from, ldx, count > TILE_ROWS, sums);
#endif
    panel_product<E>(panel, length, from, bytes, x, ldx, count, sums);
}
