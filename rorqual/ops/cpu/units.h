// Products of many rows on instructions that multiply pieces of two matrices at once, included by kernels.cpp: AMX, BFMMLA and SMMLA,
// and AVX-512 for its pairs of bf16 and its bytes in fours. Both sides are bf16, or bytes; sums are fp32, or whole numbers.
//
// These instructions round otherwise than fp32 does: numbers too small for its exponents are zero, and sums of two or four products may
// be rounded on their own. A weight and a row of bf16 are taken as they are; rows in fp32 are rounded to bf16, as by the definition in
// bf16, where every op's result is rounded.
//
// PANEL rows of a matrix are turned into the order in which the instructions take them; CHUNK rows of x meet a panel at a time. Rows of
// x are plain and end with zeros up to a multiple of EDGE bytes.

constexpr int64_t PANEL = 32, CHUNK = 32, EDGE = 64;
constexpr int64_t AT_UNIT = 1024;      // rows of x that stay in the second cache meanwhile
#if defined(__AMX_TILE__)
constexpr int64_t UNIT_DEPTH = 4096;  // bytes of a row at once: a panel of them stays in it too
#else
constexpr int64_t UNIT_DEPTH = 2048;
#endif

inline int64_t edged(int64_t bytes) { return (bytes + EDGE - 1) / EDGE * EDGE; }

template <class E>
struct SumOf {
    typedef float type;
};
template <>
struct SumOf<int8_t> {
    typedef int32_t type;
};

// What a family defines:
// UnitScope            what a thread needs while it calls the others
// unit_takes           whether there is such an instruction for a type of weights
// turn_panel           rows < PANEL of so many bytes, `apart` bytes apart, to a panel whose rows are edged(bytes) long; zeros elsewhere
// panel_product        sums [count, PANEL] = count <= CHUNK rows of x, `ldx` bytes apart, times a panel whose rows are `length` bytes
//                      long, over `bytes` of them (a multiple of EDGE) from `from` on
// FittedScope          as UnitScope, for fitted_product of STEP bytes of a row at a time
// fitted_product       as panel_product, over a multiple of STEP bytes (EDGE or half of it), for as many rows as were given to `fit` last
#if defined(__AVX512BF16__)
#include "vectors/units_avx512.h"
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) || defined(__ARM_FEATURE_MATMUL_INT8)
#include "vectors/units_neon.h"
#else
struct UnitScope {};
struct FittedScope {
    explicit FittedScope(int64_t) {}
    void fit(int64_t) {}
};
template <class E>
inline bool unit_takes(const E *) {
    return false;
}
inline void turn_panel(const char *, int64_t, int64_t, int64_t, char *) {}
template <class E>
inline void panel_product(const char *, int64_t, int64_t, int64_t, const char *, int64_t, int64_t, typename SumOf<E>::type *) {}
template <class E, int64_t STEP>
inline void fitted_product(const char *, int64_t, int64_t, int64_t, const char *, int64_t, int64_t, typename SumOf<E>::type *) {}
#endif

#include "pairs.h"
#include "lanes.h"
#include "tiles.h"

template <class E>
inline bool on_unit(const E *weights, int64_t n) {
    return unit_takes(weights) && (n >= PACKED || pairs_take(weights));
}

inline bool on_unit(const int8_t *weights, int64_t n) {
#if defined(__AVX512BF16__)
    if (amx_here()) return n >= 12;
#endif
    return unit_takes(weights) && n >= PACKED;
}

// bf16 from one row of x to the next: never a whole page.
inline int64_t unit_apart(int64_t k) {
    int64_t bytes = edged(k * int64_t(sizeof(bf16)));
    return (bytes % 4096 ? bytes : bytes + EDGE) / int64_t(sizeof(bf16));
}

// A row of x as units read it, zeros up to column `last`.
inline void unit_row(const float *x, int64_t k, bf16 *out, int64_t last) {
    narrow_all(x, k, out);
    std::fill(out + k, out + last, bf16{0});
}

inline void unit_row(const bf16 *x, int64_t k, bf16 *out, int64_t last) {
    memcpy(out, x, k * sizeof(bf16));
    std::fill(out + k, out + last, bf16{0});
}

template <class X>
const bf16 *unit_rows(const X *x, int64_t n, int64_t k, int which) {
    int64_t ldx = unit_apart(k);
    if constexpr (std::is_same<X, bf16>::value)
        if (ldx == k) return x;  // as they lie
    bf16 *in = (bf16 *)scratch(which, n * ldx / 2);
    split(n, 1, n * k, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) unit_row(x + i * k, k, in + i * ldx, ldx);
    });
    return in;
}

inline void put_chunk(const float *sums, int64_t count, int64_t width, float *y, int64_t ldy, bool more) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t r = 0; r < width; r++) y[i * ldy + r] = (more ? y[i * ldy + r] : 0) + sums[i * PANEL + r];
}

// y [n, rows], ldy apart = x [n, k], unit_rows of it, times w [rows, k] transposed, by one thread.
inline void unit_dots(const bf16 *w, int64_t ldw, int64_t rows, const bf16 *x, int64_t ldx, int64_t n, int64_t k, float *y, int64_t ldy) {
    constexpr int64_t EACH = sizeof(bf16), DEEP = UNIT_DEPTH / EACH;
    if (tiles_take(w, n)) return tile_dots(w, ldw, rows, x, ldx, n, k, y, ldy);
    if (n < PACKED && pairs_take(w)) return pair_dots(w, ldw, rows, x, ldx, n, k, y, ldy);
    UnitScope scope;
    (void)scope;
    char *panel = (char *)scratch(12, PANEL * UNIT_DEPTH / 4);
    alignas(64) float sums[CHUNK * PANEL];
    for (int64_t some = 0; some < n; some += AT_UNIT)
        for (int64_t deep = 0; deep < k; deep += DEEP)
            for (int64_t band = 0; band < rows; band += PANEL) {
                int64_t width = std::min(PANEL, rows - band), bytes = std::min(DEEP, k - deep) * EACH, last = std::min(n, some + AT_UNIT);
                turn_panel((const char *)(w + band * ldw + deep), ldw * EACH, width, bytes, panel);
#if defined(__AVX512BF16__)
                if (!amx_here()) {
                    int64_t left = rows - band - PANEL;
                    NextBand next = {left > 0 ? (const char *)(w + (band + PANEL) * ldw + deep) : nullptr, ldw * EACH, std::min(PANEL, left) - 1};
                    pairs_product(panel, edged(bytes), (const char *)(x + some * ldx + deep), ldx * EACH, last - some, y + some * ldy + band, ldy,
                                  width, {deep > 0, nullptr, nullptr}, next);
                    continue;
                }
#endif
                for (int64_t i = some; i < last; i += CHUNK) {
                    int64_t count = std::min(CHUNK, last - i), length = edged(bytes);
                    panel_product<bf16>(panel, length, 0, length, (const char *)(x + i * ldx + deep), ldx * EACH, count, sums);
                    put_chunk(sums, count, width, y + i * ldy + band, ldy, deep > 0);
                }
            }
}

inline void unit_dots(const float *, int64_t, int64_t, const bf16 *, int64_t, int64_t, int64_t, float *, int64_t) {}  // never taken
