// Vectors of the processor that compiles, included by kernels.cpp: their width, and the few steps that no vector type of the
// compiler's has. A header a family of instructions defines those; what all kernels are made of is written once, in terms of them.
//
// Integers: a register of bytes is SPAN words of four columns each.

#if defined(__AVX512BW__)
constexpr int SPAN = 16;  // floats of a register
#elif defined(__AVX__)
constexpr int SPAN = 8;
#else
constexpr int SPAN = 4;
#endif
// Accumulators stay in registers only where the loops over them are gone.
#ifdef __clang__
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif
#define INLINE inline __attribute__((always_inline))
constexpr int PAIR = 2 * SPAN;
constexpr int BYTES = 4 * SPAN;

typedef float sf __attribute__((vector_size(SPAN * 4)));
typedef uint32_t su __attribute__((vector_size(SPAN * 4)));
typedef int32_t si __attribute__((vector_size(SPAN * 4)));
typedef int8_t sb __attribute__((vector_size(BYTES)));
typedef uint8_t ub __attribute__((vector_size(BYTES)));

inline int64_t padded(int64_t k) { return (k + PAIR - 1) / PAIR * PAIR; }

inline sf get(const float *p) {
    sf v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE sf all_lanes(float x) { return x - sf{}; }

inline void put(sf v, float *p) { memcpy(p, &v, sizeof v); }

template <class V, class P>
inline V fetch(const P *p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}

// Where column j of a row stands after `spread` for weights of a type.
inline int64_t place(int64_t j, const bf16 *) { return j / PAIR * PAIR + j % 2 * SPAN + j % PAIR / 2; }
inline int64_t place(int64_t j, const float *) { return j; }

// Many rows of x pay for turning a band of the matrix first: a lane is then an output, nothing is widened twice or summed across lanes.
// A panel holds PAIR rows column by column, columns in the order of `spread`, zeros where the matrix ends. This turns rows `first` to
// first + SPAN of it; families with an overload of their own do it in registers.
template <class W>
void turn_words(const W *w, int64_t ldw, int64_t rows, int64_t k, int64_t first, float *panel) {
    for (int64_t r = first; r < first + SPAN; r++) {
        for (int64_t i = 0; i < padded(k); i++) panel[i * PAIR + r] = 0;
        for (int64_t i = 0; r < rows && i < k; i++) panel[place(i, w) * PAIR + r] = widen(w[r * ldw + i]);
    }
}

inline v4 fold4(sf v);

INLINE void sums_one_by_one(const sf (&v)[4][4], int count, v4 (&out)[4]) {
    UNROLLED for (int i = 0; i < 4; i++) {
        if (i >= count) continue;
        v4 a = fold4(v[0][i]), b = fold4(v[1][i]), c = fold4(v[2][i]), d = fold4(v[3][i]);
        v4 first = {a[0], b[0], c[0], d[0]}, second = {a[1], b[1], c[1], d[1]};
        v4 third = {a[2], b[2], c[2], d[2]}, fourth = {a[3], b[3], c[3], d[3]};
        out[i] = (first + third) + (second + fourth);
    }
}

// What a family defines:
// TILE             rows of x in registers against four of a matrix, of floats
// MIXED            rows of weights in registers, times rows of a matrix as they lie (values of attention)
// ACROSS           rows of x in registers against a panel
// AT_ONCE          rows of x in registers against four of a matrix, of integers
// FEW_ROWS         rows of bf16 up to which two planes of bytes are faster than floats, times weights of four bits
// HALVES           whether products of bytes want the even and the odd bytes of a row of x as words, a register of either in turn
// hold             keeps a value in its register, where the compiler would take it from memory for each product, or sums to it
// upper_halves     words without their lower 16 bits
// lacking          an instruction that was compiled in and that this processor lacks; null: none
// fold4            a register to four sums
// sums_by_row      out[i] = the totals of v[0 to 3][i], for i < count
// small_products   words of a times x and of b times y, a and b below 16: each of its own four columns
// add_bytes        sums + bytes times columns i and on of a row of x, which is as HALVES says; which word gets what is left open
// nibbles_above    the upper halves of bytes
// widen_nibbles    SPAN bytes to floats: their lower halves, and their upper ones, sixteen times as large
// each_block       with AVX2 and AVX-512, of groups of at most half a register: a word of `each` for every word of nibbles
#if defined(__AVX512BW__)
#include "vectors/avx512.h"
#elif defined(__AVX2__)
#include "vectors/avx2.h"
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include "vectors/neon.h"
#else
#include "vectors/plain.h"
#endif

inline float sum_of(sf v) {
    v4 x = fold4(v);
    return (x[0] + x[2]) + (x[1] + x[3]);
}
