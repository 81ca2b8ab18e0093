// Products of fewer than PACKED rows of bf16 on instructions that multiply pairs of bf16 and sum in fp32 (AVX512-BF16), included by
// units.h. Rows of x are as units read them. One row of x reads a matrix as it lies in memory, more rows read four of its rows at a time.
//
// A row's result does not depend on those beside it: a lane adds up every 32nd pair of columns, whatever the tile.

#if defined(__AVX512BF16__)
constexpr bool PAIRS = true;
typedef __m512bh sp;  // PAIR of bf16

INLINE sf add_pairs(sf sums, sp a, sp b) { return (sf)_mm512_dpbf16_ps((__m512)sums, a, b); }
INLINE sp pairs_at(const void *p) { return (sp)_mm512_loadu_si512(p); }
INLINE sp pairs_within(const bf16 *p, int64_t left) {  // the first `left` of them, zeros behind
    return (sp)_mm512_maskz_loadu_epi16(left >= PAIR ? 0xffffffffu : (1u << left) - 1, p);
}
// Numbers 4 j + J of 128 in four bits, less 8 where there are no zero points. An index of the permutation has five bits: the next
// number's lowest bit chooses between two equal halves of the table.
template <int J>
INLINE sp nibble_pairs(__m512i v, __m512i table) {
    return (sp)_mm512_permutexvar_epi16(J ? _mm512_srli_epi16(v, 4 * J) : v, table);
}
#else
constexpr bool PAIRS = false;
#endif

template <class E>
inline bool pairs_take(const E *) {
    return PAIRS && std::is_same<E, bf16>::value;
}

constexpr int64_t AHEAD = 16384;  // bytes of a matrix between what is read and what is asked for

// bf16 of rows of x that stay in the first cache: with rows of the matrix that were asked for long before, or with the next four.
constexpr int64_t HELD_PAIRS = 10240, MOST_PAIRS = 16384;
constexpr int64_t HELD_SUMS = 256;  // registers of sums, one for a row of x and one of the matrix, that wait for the next columns

// The same in rows of so many bytes.
inline int64_t rows_ahead(int64_t bytes) { return std::max<int64_t>(1, AHEAD / bytes); }

#if defined(__AVX512BF16__)
// y [N, R] = x [N, k] times w [R, k] transposed. `next`: rows that are read later, of which P are asked for.
template <int R, int N, int P>
INLINE void pair_sums(const bf16 *w, int64_t ldw, const bf16 *x, int64_t ldx, int64_t k, const bf16 *next, sf (&acc)[R][N]) {
    int64_t i = 0;
    for (; i + PAIR <= k; i += PAIR) {
        sp column[N];
        UNROLLED for (int n = 0; n < N; n++) column[n] = pairs_at(x + n * ldx + i);
        UNROLLED for (int r = 0; r < R; r++) {
            if (r < P) ASK_FOR(next + r * ldw + i);
            sp mine = pairs_at(w + r * ldw + i);
            UNROLLED for (int n = 0; n < N; n++) acc[r][n] = add_pairs(acc[r][n], mine, column[n]);
        }
    }
    if (i == k) return;
    UNROLLED for (int r = 0; r < R; r++) {
        sp mine = pairs_within(w + r * ldw + i, k - i);
        UNROLLED for (int n = 0; n < N; n++) acc[r][n] = add_pairs(acc[r][n], mine, pairs_at(x + n * ldx + i));
    }
}

// y [4] = x [k] times w [4, k] transposed, two rows of the matrix at a time: what comes later is asked for as it lies in memory, and no
// sum waits for the one before.
INLINE void pair_stream(const bf16 *w, int64_t ldw, const bf16 *x, int64_t k, float *y) {
    sf acc[4][1] = {};
    UNROLLED for (int half = 0; half < 4; half += 2) {
        const bf16 *mine = w + half * ldw, *later = mine + STREAM_AHEAD / int64_t(sizeof(bf16));
        int64_t i = 0;
        for (; i + PAIR <= k; i += PAIR) {
            sp column = pairs_at(x + i);
            UNROLLED for (int r = 0; r < 2; r++) {
                ASK_FOR(later + 2 * i + r * PAIR);
                acc[half + r][0] = add_pairs(acc[half + r][0], pairs_at(mine + r * ldw + i), column);
            }
        }
        if (i < k)
            UNROLLED for (int r = 0; r < 2; r++)
                acc[half + r][0] = add_pairs(acc[half + r][0], pairs_within(mine + r * ldw + i, k - i), pairs_at(x + i));
    }
    put_sums(acc, 0, 0, y, 4, false);
}

// Columns of rows that are multiplied at a time, and where sums [4, N] wait until all are.
struct Piece {
    int64_t columns;
    bool first, last;
    float *held;
};

template <int N, int P>
INLINE void pair_tile(const bf16 *w, int64_t ldw, const bf16 *x, int64_t ldx, Piece piece, const bf16 *next, float *y, int64_t ldy) {
    sf acc[4][N] = {};
    if (!piece.first)
        UNROLLED for (int r = 0; r < 4; r++)
            UNROLLED for (int n = 0; n < N; n++) acc[r][n] = get(piece.held + (r * N + n) * SPAN);
    pair_sums<4, N, P>(w, ldw, x, ldx, piece.columns, next, acc);
    if (piece.last) return put_sums(acc, 0, 0, y, ldy, false);
    UNROLLED for (int r = 0; r < 4; r++)
        UNROLLED for (int n = 0; n < N; n++) put(acc[r][n], piece.held + (r * N + n) * SPAN);
}

// Four rows of the matrix with all n rows of x, in tiles of even sizes. `next`, four rows too: each tile asks for P of them. A function
// of its own: where its caller took it in, all its forms together, gcc 12's inner loops were half as fast.
template <int P>
__attribute__((noinline)) void pair_group(const bf16 *w, int64_t ldw, const bf16 *x, int64_t ldx, int64_t n, Piece piece, const bf16 *next, float *y, int64_t ldy) {
    int64_t tiles = (n + 3) / 4;
    for (int64_t t = 0; t < tiles; t++) {
        int64_t from = n * t / tiles, count = n * (t + 1) / tiles - from;
        Piece own = {piece.columns, piece.first, piece.last, piece.held + from * 4 * SPAN};
        const bf16 *then = next + std::min<int64_t>(t * P, 4 - P) * ldw, *in = x + from * ldx;
        if (count == 2) pair_tile<2, P>(w, ldw, in, ldx, own, then, y + from * ldy, ldy);
        if (count == 3) pair_tile<3, P>(w, ldw, in, ldx, own, then, y + from * ldy, ldy);
        if (count == 4) pair_tile<4, P>(w, ldw, in, ldx, own, then, y + from * ldy, ldy);
    }
}

// y [n, rows], ldy apart = x [n, k], unit_rows of it, times w [rows, k] transposed, by one thread.
inline void pair_dots(const bf16 *w, int64_t ldw, int64_t rows, const bf16 *x, int64_t ldx, int64_t n, int64_t k, float *y, int64_t ldy) {
    int64_t whole = rows / 4 * 4, r = 0;
    for (; n == 1 && r < whole; r += 4) pair_stream(w + r * ldw, ldw, x, k, y + r);
    // Rows of x that do not stay in the first cache are multiplied in pieces of even sizes with as many rows of the matrix as their sums
    // leave room for. What is read next is asked for behind the matrix's end too, where the next block often is.
    int64_t pieces = n * k <= MOST_PAIRS ? 1 : (n * k + HELD_PAIRS - 1) / HELD_PAIRS, deep = padded((k + pieces - 1) / pieces);
    int64_t high = deep < k ? std::max<int64_t>(4, HELD_SUMS / n / 4 * 4) : 4, tiles = (n + 3) / 4;
    int64_t ahead = std::max<int64_t>(8, (rows_ahead(ldw * int64_t(sizeof(bf16))) + 3) / 4 * 4);
    // A processor has few places for lines on their way, and what does not find one is lost: each tile asks for all four rows again. Of
    // many tiles, whose rows of x take none of these places, each asks for one row.
    bool spread_out = tiles > 3 && n * k <= HELD_PAIRS;
    float *held = scratch(14, deep < k ? high * n * SPAN : 0);
    for (; r < whole; r += high)
        for (int64_t i = 0; i < k; i += deep)
            for (int64_t band = r; band < std::min(whole, r + high); band += 4) {
                Piece piece = {std::min(deep, k - i), i == 0, i + deep >= k, held + (band - r) * n * SPAN};
                const bf16 *mine = w + band * ldw + i, *next = mine + (deep >= k ? ahead * ldw : piece.last ? high * ldw - i : deep);
                if (spread_out)
                    pair_group<1>(mine, ldw, x + i, ldx, n, piece, next, y + band, ldy);
                else
                    pair_group<4>(mine, ldw, x + i, ldx, n, piece, next, y + band, ldy);
            }
    r = whole;
    for (; r < rows; r++)
        for (int64_t i = 0; i < n; i++) {
            sf own[1][1] = {};
            pair_sums<1, 1, 0>(w + r * ldw, ldw, x + i * ldx, ldx, k, nullptr, own);
            y[i * ldy + r] = sum_of(own[0][0]);
        }
}
#else
inline void pair_dots(const bf16 *, int64_t, int64_t, const bf16 *, int64_t, int64_t, int64_t, float *, int64_t) {}  // never taken
#endif
