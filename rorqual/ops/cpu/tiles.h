// Products of some rows of bf16 on AMX, included by units.h: too few to pay for turning the matrix. 16 rows of it are a tile as they lie
// in memory, and the rows of x are turned instead, once for all of a call's bands.
//
// A row's result does not depend on those beside it: a sum goes through the columns in order, whatever the tile.

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
constexpr int64_t MOST_TURNED = 128;  // rows of x up to which it pays

template <class E>
inline bool tiles_take(const E *, int64_t n) {
    return std::is_same<E, bf16>::value && n > 1 && n <= MOST_TURNED && amx_here();
}

// sums [PANEL, 16 or 32] = PANEL rows of a matrix, ldw bytes apart, times turned rows of x, over `bytes` (a multiple of EDGE) of a row.
// Added to where `more`. next: rows of the matrix that are read later.
template <bool BOTH, bool ASKS>
INLINE void tiles_band(const char *w, int64_t ldw, int64_t bytes, const char *x, int64_t ldx, float *sums, bool more, const char *next) {
    constexpr int64_t WIDE = BOTH ? 128 : 64;  // bytes from a row of the matrix to the next in sums
    // what tiles read is in memory by now: a compiler does not know of it
    __asm__ volatile("" ::: "memory");
    if (more) {
        _tile_loadd(0, sums, WIDE);
        _tile_loadd(1, (char *)sums + TILE_ROWS * WIDE, WIDE);
        if (BOTH) {
            _tile_loadd(2, sums + 16, WIDE);
            _tile_loadd(3, (char *)sums + TILE_ROWS * WIDE + 64, WIDE);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t i = 0; i < bytes; i += EDGE) {
        if (ASKS)
            UNROLLED for (int r = 0; r < PANEL; r++) _mm_prefetch(next + r * ldw + i, _MM_HINT_T0);
        _tile_loadd(6, x + i / 4 * ldx, ldx);
        _tile_loadd(4, w + i, ldw);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, w + TILE_ROWS * ldw + i, ldw);
        _tile_dpbf16ps(1, 5, 6);
        if (BOTH) {
            _tile_loadd(7, x + i / 4 * ldx + 64, ldx);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, WIDE);
    _tile_stored(1, (char *)sums + TILE_ROWS * WIDE, WIDE);
    if (!BOTH) return;
    _tile_stored(2, sums + 16, WIDE);
    _tile_stored(3, (char *)sums + TILE_ROWS * WIDE + 64, WIDE);
}

template <bool ASKS>
inline void tiles_group(bool both, const char *w, int64_t ldw, int64_t bytes, const char *x, int64_t ldx, float *sums, bool more, const char *next) {
    if (both)
        tiles_band<true, ASKS>(w, ldw, bytes, x, ldx, sums, more, next);
    else
        tiles_band<false, ASKS>(w, ldw, bytes, x, ldx, sums, more, next);
}

// y [n, rows], ldy apart = x [n, k], unit_rows of it, times w [rows, k] transposed, by one thread.
inline void tile_dots(const bf16 *w, int64_t ldw, int64_t rows, const bf16 *x, int64_t ldx, int64_t n, int64_t k, float *y, int64_t ldy) {
    UnitScope scope;
    (void)scope;
    constexpr int64_t EACH = sizeof(bf16), STEP = EDGE / EACH;
    int64_t whole = k / STEP * STEP, deep = edged(k * EACH) / EACH, groups = (n + CHUNK - 1) / CHUNK;
    // turned rows of x, a group of CHUNK after the other; the last may be half as wide
    uint32_t *turned = (uint32_t *)scratch(12, groups * CHUNK * deep / 2);
    for (int64_t g = 0; g < groups; g++) {
        int64_t first = g * CHUNK;
        turn_rows([=](int64_t i) { return x + (first + i) * ldx; }, std::min(CHUNK, n - first), deep, turned + g * CHUNK * deep / 2);
    }
    alignas(64) float sums[PANEL * CHUNK];
    alignas(64) bf16 rest[PANEL * STEP];
    for (int64_t band = 0; band < rows; band += PANEL) {
        int64_t width = std::min(PANEL, rows - band), apart_ = ldw, full = whole;
        const bf16 *mine = w + band * ldw;
        if (width < PANEL) {  // tiles read all rows of a band
            bf16 *copy = (bf16 *)scratch(15, PANEL * deep / 2);
            for (int64_t r = 0; r < PANEL; r++) {
                if (r < width) memcpy(copy + r * deep, mine + r * ldw, k * EACH);
                std::fill(copy + r * deep + (r < width ? k : 0), copy + (r + 1) * deep, bf16{0});
            }
            mine = copy;
            apart_ = full = deep;
        } else if (whole < k)
            for (int64_t r = 0; r < PANEL; r++) {
                memcpy(rest + r * STEP, mine + r * ldw + whole, (k - whole) * EACH);
                std::fill(rest + r * STEP + k - whole, rest + (r + 1) * STEP, bf16{0});
            }
        for (int64_t g = 0; g < groups; g++) {
            int64_t count = std::min(CHUNK, n - g * CHUNK), lanes = count > TILE_ROWS ? CHUNK : TILE_ROWS;
            const char *in = (const char *)(turned + g * CHUNK * deep / 2), *later = (const char *)(mine + PANEL * ldw);
            bool both = count > TILE_ROWS;
            if (g == 0 && width == PANEL)
                tiles_group<true>(both, (const char *)mine, apart_ * EACH, full * EACH, in, lanes * 4, sums, false, later);
            else
                tiles_group<false>(both, (const char *)mine, apart_ * EACH, full * EACH, in, lanes * 4, sums, false, later);
            if (full < deep)
                tiles_group<false>(both, (const char *)rest, EDGE, EDGE, in + full * EACH / 4 * lanes * 4, lanes * 4, sums, true, later);
            float *out = y + g * CHUNK * ldy + band;
            turn_back(sums, lanes, width, count, [=](int64_t i) { return out + i * ldy; });
        }
    }
}
#else
template <class E>
inline bool tiles_take(const E *, int64_t) {
    return false;
}
inline void tile_dots(const bf16 *, int64_t, int64_t, const bf16 *, int64_t, int64_t, int64_t, float *, int64_t) {}  // never taken
#endif
