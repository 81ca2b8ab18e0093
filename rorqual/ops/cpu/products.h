// Products on the CPU, included by kernels.cpp: rows of x with rows of a matrix as a checkpoint holds it, so that no weight is packed
// or kept twice. Any shape: one row of x is a stream through the matrix, many rows are tiles in registers.
//
// Contractions run along the rows of both. A vector of pairs of bf16 is two of floats by a shift and by a mask, its even and its odd
// columns; x is spread the same way once (`spread`), so that no lane has to move.

// The even (0) or odd (1) columns of PAIR bf16; of floats the first or second half.
template <int HALF>
inline sf half_of(const bf16 *p) {
    su u;
    memcpy(&u, p, sizeof u);
    u = HALF ? u & 0xffff0000u : u << 16;
    sf v;
    memcpy(&v, &u, sizeof v);
    return v;
}

template <int HALF>
inline sf half_of(const float *p) {
    return get(p + HALF * SPAN);
}

// Floats from one row of scratch to the next: never a whole page, at which rows would push each other out of the first cache.
inline int64_t apart(int64_t k) { return padded(k) % 1024 ? padded(k) : padded(k) + 2 * SPAN; }

// A row of x in the order in which weights of type W are read, zeros up to padded(k).
template <class W>
void spread(const bf16 *x, int64_t k, float *out) {
    int64_t i = 0;
    for (; i + PAIR <= k; i += PAIR) {
        sf even = half_of<0>(x + i), odd = half_of<1>(x + i);
        if (std::is_same<W, bf16>::value) {
            put(even, out + i);
            put(odd, out + i + SPAN);
        } else {
            for (int j = 0; j < PAIR; j++) out[i + j] = widen(x[i + j]);
        }
    }
    if (i < k) std::fill(out + i, out + padded(k), 0.f);
    for (; i < k; i++) out[place(i, (const W *)nullptr)] = widen(x[i]);
}

template <class W>
void spread(const float *x, int64_t k, float *out) {
    int64_t i = 0;
    for (; i + PAIR <= k; i += PAIR)
        for (int j = 0; j < SPAN; j++) {
            bool pairs = std::is_same<W, bf16>::value;
            out[i + j] = x[pairs ? i + 2 * j : i + j];
            out[i + SPAN + j] = x[pairs ? i + 2 * j + 1 : i + SPAN + j];
        }
    if (i < k) std::fill(out + i, out + padded(k), 0.f);
    for (; i < k; i++) out[place(i, (const W *)nullptr)] = x[i];
}

// half_of, where registers are scarce.
template <int HALF>
INLINE sf row_half(const bf16 *p) {
    if (!HALF) return half_of<0>(p);
    su u = upper_halves(fetch<su>(p));
    sf v;
    memcpy(&v, &u, sizeof v);
    return v;
}

template <int HALF>
INLINE sf row_half(const float *p) {
    return half_of<HALF>(p);
}

template <int R, int N, int HALF, class W>
INLINE void add_half(sf (&acc)[R][N], const W *w, int64_t ldw, const float *x, int64_t ldx) {
    if constexpr (SPAN == 8) {  // sixteen registers: as few rows of the matrix in them as can be
        sf column[N];
        UNROLLED for (int n = 0; n < N; n++) {
            column[n] = get(x + n * ldx + HALF * SPAN);
            hold(column[n]);
        }
        UNROLLED for (int r = 0; r < R; r++) {
            sf row = row_half<HALF>(w + r * ldw);
            UNROLLED for (int n = 0; n < N; n++) {
                acc[r][n] += row * column[n];
                hold(acc[r][n]);
            }
        }
    } else {
        sf rows[R];
        UNROLLED for (int r = 0; r < R; r++) rows[r] = half_of<HALF>(w + r * ldw);
        UNROLLED for (int n = 0; n < N; n++) {
            sf column = get(x + n * ldx + HALF * SPAN);
            UNROLLED for (int r = 0; r < R; r++) acc[r][n] += rows[r] * column;
        }
    }
}

inline void put4(v4 four, float *into, bool more) {
    v4 before = {};
    if (more) memcpy(&before, into, sizeof before);
    four += before;
    memcpy(into, &four, sizeof four);
}

// The sums of four rows' accumulators, from r on, with up to four rows of x, from n on.
template <int R, int N>
INLINE void put_sums(sf (&acc)[R][N], int r, int n, float *y, int64_t ldy, bool more) {
    int count = std::min(4, N - n);
    sf some[4][4] = {};
    UNROLLED for (int i = 0; i < 4; i++)
        UNROLLED for (int j = 0; j < 4; j++)
            if (j < count) some[i][j] = acc[r + i][n + j];
    v4 four[4];
    sums_by_row(some, count, four);
    UNROLLED for (int i = 0; i < 4; i++)
        if (i < count) put4(four[i], y + i * ldy, more);
}

constexpr int LINE_BYTES = 64;          // of the caches
constexpr int64_t STREAM_AHEAD = 8192;  // bytes of a matrix between what one row of x is multiplied with and what is asked for

// y [N, R] (added to where `more`) = x [N, k] spread, times w [R, k] transposed. `ahead`: elements to what is read next, row by row, or
// where LINE as it lies in memory.
template <int R, int N, class W, bool LINE = false>
void dot_tile(const W *w, int64_t ldw, const float *x, int64_t ldx, int64_t k, float *y, int64_t ldy, bool more, int64_t ahead) {
    sf acc[R][N] = {};
    int64_t i = 0;
    for (; i + PAIR <= k; i += PAIR) {
        if (LINE)
            UNROLLED for (int j = 0; j < R * PAIR; j += LINE_BYTES / int(sizeof(W))) __builtin_prefetch(w + ahead + i * R + j);
        else
            UNROLLED for (int r = 0; r < R; r++) __builtin_prefetch(w + r * ldw + i + ahead);
        add_half<R, N, 0>(acc, w + i, ldw, x + i, ldx);
        add_half<R, N, 1>(acc, w + i, ldw, x + i, ldx);
    }
    if (i < k) {  // what lies behind the last column may be anything
        W rest[R][PAIR] = {};
        for (int r = 0; r < R; r++) memcpy(rest[r], w + r * ldw + i, (k - i) * sizeof(W));
        add_half<R, N, 0>(acc, rest[0], PAIR, x + i, ldx);
        add_half<R, N, 1>(acc, rest[0], PAIR, x + i, ldx);
    }
    if constexpr (R % 4 == 0)
        UNROLLED for (int r = 0; r < R; r += 4)
            UNROLLED for (int n = 0; n < N; n += 4) put_sums(acc, r, n, y + n * ldy + r, ldy, more);
    else if constexpr (LINE) {  // in the order in which `put_sums` adds up
        sf some[4][4] = {};
        v4 four[4];
        UNROLLED for (int r = 0; r < R; r++) some[r][0] = acc[r][0];
        sums_by_row(some, 1, four);
        UNROLLED for (int r = 0; r < R; r++) y[r] = (more ? y[r] : 0) + four[0][r];
    } else
        UNROLLED for (int n = 0; n < N; n++)
            UNROLLED for (int r = 0; r < R; r++) y[n * ldy + r] = (more ? y[n * ldy + r] : 0) + sum_of(acc[r][n]);
}

template <int N, class W>
void dot_rows(const W *w, int64_t ldw, int64_t rows, const float *x, int64_t ldx, int64_t k, float *y, int64_t ldy, bool more) {
    constexpr int R = N <= 2 && SPAN == 16 ? 8 : 4;
    int64_t r = 0;
    for (; r + R <= rows; r += R) dot_tile<R, N>(w + r * ldw, ldw, x, ldx, k, y + r, ldy, more, r + 2 * R <= rows ? R * ldw : 0);
    for (; R > 4 && r + 4 <= rows; r += 4) dot_tile<4, N>(w + r * ldw, ldw, x, ldx, k, y + r, ldy, more, 0);
    for (; r < rows; r++) dot_tile<1, N>(w + r * ldw, ldw, x, ldx, k, y + r, ldy, more, 0);
}

constexpr int64_t DEPTH = 512;  // columns at once: TILE rows of x stay in the first cache

// How many columns are summed up at once from `deep` on: the same for any number of rows of x, so that below PACKED of them a row's
// result does not depend on those beside it.
inline int64_t columns_from(int64_t deep, int64_t k) { return k - deep < 3 * DEPTH / 2 ? k - deep : DEPTH; }

// One row of x: two rows of the matrix at a time, each to its end, so that it is read as it lies in memory. Sums are those of `dot_few`.
template <class W>
void dot_stream(const W *w, int64_t ldw, int64_t rows, const float *x, int64_t k, float *y) {
    constexpr int64_t R = 2, AHEAD_ELEMENTS = STREAM_AHEAD / int64_t(sizeof(W));
    int64_t r = 0;
    for (; r < rows / 4 * 4; r += R)
        for (int64_t deep = 0, columns; deep < k; deep += columns) {
            columns = columns_from(deep, k);
            dot_tile<R, 1, W, true>(w + r * ldw + deep, ldw, x + deep, 0, columns, y + r, 0, deep > 0, AHEAD_ELEMENTS + deep * (R - 1));
        }
    for (; r < rows; r++)
        for (int64_t deep = 0, columns; deep < k; deep += columns) {
            columns = columns_from(deep, k);
            dot_tile<1, 1>(w + r * ldw + deep, ldw, x + deep, 0, columns, y + r, 0, deep > 0, 0);
        }
}

// Up to TILE rows of x.
template <class W>
void dot_few(const W *w, int64_t ldw, int64_t rows, const float *x, int64_t ldx, int64_t n, int64_t k, float *y, int64_t ldy, bool more) {
    if (n == 1) dot_rows<1>(w, ldw, rows, x, ldx, k, y, ldy, more);
    if (n == 2) dot_rows<2>(w, ldw, rows, x, ldx, k, y, ldy, more);
    if (TILE > 2 && n == 3) dot_rows<3>(w, ldw, rows, x, ldx, k, y, ldy, more);
    if (TILE > 2 && n == 4) dot_rows<4>(w, ldw, rows, x, ldx, k, y, ldy, more);
    if (TILE > 4 && n == 5) dot_rows<5>(w, ldw, rows, x, ldx, k, y, ldy, more);
    if (TILE > 4 && n == 6) dot_rows<6>(w, ldw, rows, x, ldx, k, y, ldy, more);
}

constexpr int64_t BAND = SPAN == 8 ? 16 : 32;  // rows of the matrix at once: they stay in the second, of AVX2 in the first
constexpr int64_t HELD = 256;                  // rows of x at once: they too

constexpr int64_t PACKED = 28;  // rows of x from which a matrix is turned for them

template <int N>
void panel_tile(const float *panel, const float *x, int64_t ldx, int64_t k, float *y, int64_t ldy, int64_t width, bool more) {
    sf acc[N][2] = {};
    for (int64_t i = 0; i < k; i++) {
        sf low = get(panel + i * PAIR), high = get(panel + i * PAIR + SPAN);
        UNROLLED for (int n = 0; n < N; n++) {
            float factor = x[n * ldx + i];
            acc[n][0] += low * factor;
            acc[n][1] += high * factor;
        }
    }
    UNROLLED for (int n = 0; n < N; n++) {
        float *into = y + n * ldy;
        if (width == PAIR) {
            put(more ? acc[n][0] + get(into) : acc[n][0], into);
            put(more ? acc[n][1] + get(into + SPAN) : acc[n][1], into + SPAN);
            continue;
        }
        float made[PAIR];
        put(acc[n][0], made);
        put(acc[n][1], made + SPAN);
        for (int64_t r = 0; r < width; r++) into[r] = (more ? into[r] : 0) + made[r];
    }
}

template <int N>
void panel_some(const float *panel, const float *x, int64_t ldx, int64_t n, int64_t k, float *y, int64_t ldy, int64_t width, bool more) {
    if (n == N) return panel_tile<N>(panel, x, ldx, k, y, ldy, width, more);
    if constexpr (N > 1) panel_some<N - 1>(panel, x, ldx, n, k, y, ldy, width, more);
}

// Tiles of even sizes: a small one would wait for its own sums.
inline void panel_rows(const float *panel, const float *x, int64_t ldx, int64_t n, int64_t k, float *y, int64_t ldy, int64_t width, bool more) {
    int64_t tiles = (n + ACROSS - 1) / ACROSS;
    for (int64_t t = 0; t < tiles; t++) {
        int64_t from = n * t / tiles, count = n * (t + 1) / tiles - from;
        panel_some<ACROSS>(panel, x + from * ldx, ldx, count, k, y + from * ldy, ldy, width, more);
    }
}

// y [n, rows] (added to where `more`) = x [n, columns] spread, times w [rows, columns] transposed; what is read stays in the caches.
template <class W>
void dots_block(const W *w, int64_t ldw, int64_t rows, const float *x, int64_t ldx, int64_t n, int64_t columns, float *y, int64_t ldy,
                bool more) {
    if (n >= PACKED) {
        float *panel = scratch(12, padded(columns) * PAIR);
        for (int64_t band = 0; band < rows; band += PAIR) {
            int64_t width = std::min<int64_t>(PAIR, rows - band);
            for (int64_t half = 0; half < PAIR; half += SPAN) turn_words(w + band * ldw, ldw, width, columns, half, panel);
            panel_rows(panel, x, ldx, n, padded(columns), y + band, ldy, width, more);
        }
        return;
    }
    int64_t tiles = (n + TILE - 1) / TILE;
    for (int64_t band = 0; band < rows; band += BAND)
        for (int64_t t = 0; t < tiles; t++) {  // tiles of even sizes
            int64_t from = n * t / tiles, count = n * (t + 1) / tiles - from;
            dot_few(w + band * ldw, ldw, std::min(BAND, rows - band), x + from * ldx, ldx, count, columns, y + from * ldy + band, ldy, more);
        }
}

// y [n, rows], ldy apart = x [n, k] spread, ldx apart, times w [rows, k] transposed, by one thread.
template <class W>
void dots(const W *w, int64_t ldw, int64_t rows, const float *x, int64_t ldx, int64_t n, int64_t k, float *y, int64_t ldy) {
    if (n == 1) return dot_stream(w, ldw, rows, x, k, y);
    int64_t high = n <= TILE ? BAND : rows;  // few rows of x: a stream, each row of the matrix to its end
    for (int64_t some = 0; some < n; some += HELD)
        for (int64_t band = 0; band < rows; band += high)
            for (int64_t deep = 0, columns; deep < k; deep += columns) {
                columns = columns_from(deep, k);
                dots_block(w + band * ldw + deep, ldw, std::min(high, rows - band), x + some * ldx + deep, ldx, std::min(HELD, n - some),
                           columns, y + some * ldy + band, ldy, deep > 0);
            }
}

// PARTS halves of PAIR columns of y [N, columns], spread, += p [N, count] times rows [count, columns].
template <int N, int PARTS, class W>
INLINE void mix_tile(const float *p, int64_t ldp, const W *rows, int64_t ldr, int64_t count, float *y, int64_t ldy) {
    sf acc[N][PARTS][2];
    UNROLLED for (int n = 0; n < N; n++)
        UNROLLED for (int c = 0; c < PARTS; c++) {
            acc[n][c][0] = get(y + n * ldy + c * PAIR);
            acc[n][c][1] = get(y + n * ldy + c * PAIR + SPAN);
        }
    for (int64_t i = 0; i < count; i++) {
        if (PARTS > 2)
            UNROLLED for (int c = 0; c < PARTS; c++) __builtin_prefetch(rows + std::min(i + 16, count - 1) * ldr + c * PAIR);
        sf row[PARTS][2];
        UNROLLED for (int c = 0; c < PARTS; c++) {
            row[c][0] = half_of<0>(rows + i * ldr + c * PAIR);
            row[c][1] = half_of<1>(rows + i * ldr + c * PAIR);
        }
        UNROLLED for (int n = 0; n < N; n++) {
            float factor = p[n * ldp + i];
            UNROLLED for (int c = 0; c < PARTS; c++) {
                acc[n][c][0] += row[c][0] * factor;
                acc[n][c][1] += row[c][1] * factor;
            }
        }
    }
    UNROLLED for (int n = 0; n < N; n++)
        UNROLLED for (int c = 0; c < PARTS; c++) {
            put(acc[n][c][0], y + n * ldy + c * PAIR);
            put(acc[n][c][1], y + n * ldy + c * PAIR + SPAN);
        }
}

template <int N, class W>
void mix_few(const float *p, int64_t ldp, const W *rows, int64_t ldr, int64_t count, int64_t columns, float *y, int64_t ldy) {
    int64_t c = 0;
    // one row of x: as much of a row as there are registers for, so that a matrix out of memory is read in long pieces
    constexpr int WIDE = SPAN == 16 && N <= 2 ? 8 / N : 2;
    for (; WIDE > 2 && c + WIDE * PAIR <= columns; c += WIDE * PAIR) mix_tile<N, WIDE>(p, ldp, rows + c, ldr, count, y + c, ldy);
    constexpr bool NARROW = SPAN == 8 && N > 2;  // sums of one pair take the registers
    for (; !NARROW && c + 2 * PAIR <= columns; c += 2 * PAIR) mix_tile<N, 2>(p, ldp, rows + c, ldr, count, y + c, ldy);
    for (; c + PAIR <= columns; c += PAIR) mix_tile<N, 1>(p, ldp, rows + c, ldr, count, y + c, ldy);
    for (int64_t i = 0; c < columns && i < count; i++) {
        W rest[PAIR] = {};
        memcpy(rest, rows + i * ldr + c, (columns - c) * sizeof(W));
        mix_tile<N, 1>(p + i, ldp, rest, 0, 1, y + c, ldy);
    }
}

// y [n, padded(columns)], spread, += p [n, count] times rows [count, columns], by one thread. Tiles of even sizes.
template <class W>
void mixes(const float *p, int64_t ldp, int64_t n, const W *rows, int64_t ldr, int64_t count, int64_t columns, float *y, int64_t ldy) {
    int64_t tiles = (n + MIXED - 1) / MIXED;
    for (int64_t t = 0; t < tiles; t++) {
        int64_t from = n * t / tiles, few = n * (t + 1) / tiles - from;
        const float *own = p + from * ldp;
        float *into = y + from * ldy;
        if (few == 1) mix_few<1>(own, ldp, rows, ldr, count, columns, into, ldy);
        if (few == 2) mix_few<2>(own, ldp, rows, ldr, count, columns, into, ldy);
        if (MIXED > 2 && few == 3) mix_few<3>(own, ldp, rows, ldr, count, columns, into, ldy);
        if (MIXED > 2 && few == 4) mix_few<4>(own, ldp, rows, ldr, count, columns, into, ldy);
        if (MIXED > 4 && few == 5) mix_few<5>(own, ldp, rows, ldr, count, columns, into, ldy);
        if (MIXED > 4 && few == 6) mix_few<6>(own, ldp, rows, ldr, count, columns, into, ldy);
    }
}

struct alignas(64) Range {  // of items that one thread begins with; what others take of them they take from its front, too
    std::atomic<int64_t> next;
    int64_t last;
};

// Items shared out one at a time, so that a thread that comes late does less. Each thread has a contiguous range of them, so that what it
// reads of a matrix lies side by side, and helps the others when it is through.
template <class F>
void share(int64_t count, int64_t operations, F body) {
    int64_t parts = std::min<int64_t>({max_threads, count, operations / THREAD_WORK});
    if (parts > 1) {
        static thread_local std::vector<Range> kept;
        if (int64_t(kept.size()) < parts) kept = std::vector<Range>(parts);
        Range *ranges = kept.data();
        for (int64_t p = 0; p < parts; p++) {
            ranges[p].next.store(count * p / parts, std::memory_order_relaxed);
            ranges[p].last = count * (p + 1) / parts;
        }
        together(int(parts), [=](int64_t me, int64_t) {
            for (int64_t p = 0; p < parts; p++) {
                Range &mine = ranges[(me + p) % parts];
                for (int64_t i; (i = mine.next.fetch_add(1, std::memory_order_relaxed)) < mine.last;) body(i);
            }
        });
        return;
    }
    for (int64_t i = 0; i < count; i++) body(i);
}

// Rows of a matrix that a thread takes at a time, of so many in all, for n rows of x: a multiple of PAIR. Few rows are a stream through
// the matrix, which may be cut anywhere; for many a block is read again and again.
inline int64_t block_rows(int64_t rows, int64_t n) {
    int64_t blocks = (n < PACKED ? 16 : 4) * max_threads, even = (rows + blocks - 1) / blocks;
    return std::min<int64_t>(256, std::max<int64_t>(1, (even + PAIR - 1) / PAIR) * PAIR);
}

// A spread row in its own order.
template <class W>
void gathered(const float *x, int64_t k, float *out) {
    int64_t i = 0;
    for (; i + PAIR <= k; i += PAIR)
        for (int j = 0; j < SPAN; j++) {
            bool pairs = std::is_same<W, bf16>::value;
            out[pairs ? i + 2 * j : i + j] = x[i + j];
            out[pairs ? i + 2 * j + 1 : i + SPAN + j] = x[i + SPAN + j];
        }
    for (; i < k; i++) out[i] = x[place(i, (const W *)nullptr)];
}

// Results as they are kept, `ldy` apart.
inline void keep(const float *from, int64_t n, float *y) { std::copy(from, from + n, y); }
inline void keep(const float *from, int64_t n, bf16 *y) { narrow_all(from, n, y); }
