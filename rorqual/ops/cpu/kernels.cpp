// CPU kernels of layers of any shape. Everything is computed in fp32 from fp32 or bf16 storage. Threads are OpenMP's, so that they are
// the very threads torch uses; without OpenMP one thread does it all.
// Built by native.py with the system's C++ compiler for the processor it runs on; called through the C functions at the end. Pointers
// are row-major and dense: weights are read as a checkpoint holds them (products.h).

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AVX2__
#include <immintrin.h>
#endif
#ifdef __AVX512BF16__
#include <cpuid.h>
#endif
#ifdef __AMX_TILE__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

// Asks for what is read later. A Zen 4 has AVX512-BF16 and a first cache of 32 KB, which would lose rows of x by it: there in the second.
#ifndef FIRST_CACHE
#define FIRST_CACHE 0
#endif
#if defined(__AVX512BF16__) && FIRST_CACHE > 0 && FIRST_CACHE <= 32 * 1024
#define ASK_FOR(place) __builtin_prefetch(place, 0, 2)
#else
#define ASK_FOR(place) __builtin_prefetch(place)
#endif

namespace {

constexpr int LANES = 16;
typedef float vf __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));

struct bf16 {
    uint16_t bits;
};

inline float widen(float x) { return x; }

inline float widen(bf16 x) {
    uint32_t u = uint32_t(x.bits) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

inline void narrow(float x, float *out) { *out = x; }

inline void narrow(float x, bf16 *out) {  // to nearest even, as torch rounds
    uint32_t u;
    memcpy(&u, &x, 4);
    if ((u & 0x7fffffff) > 0x7f800000) {
        out->bits = 0x7fc0;
        return;
    }
    out->bits = uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

inline vf load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

inline vf load(const bf16 *p) {
    vh h;
    memcpy(&h, p, sizeof h);
    vu u = __builtin_convertvector(h, vu) << 16;
    vf v;
    memcpy(&v, &u, sizeof v);
    return v;
}

typedef float v8 __attribute__((vector_size(32)));
typedef float v4 __attribute__((vector_size(16)));

inline v4 fold(vf v) {  // 16 lanes to 4
    v8 half[2];
    memcpy(half, &v, sizeof v);
    v8 sum = half[0] + half[1];
    v4 quarter[2];
    memcpy(quarter, &sum, sizeof sum);
    return quarter[0] + quarter[1];
}

#include "vectors.h"

// Comparisons, choices and conversions are made register by register: of wider vectors the compiler makes them number by number.
constexpr int REGISTERS = LANES / SPAN;
typedef uint16_t sh __attribute__((vector_size(SPAN * 2)));

INLINE sf register_at(const float *p) { return get(p); }

INLINE sf register_at(const bf16 *p) {
    su u = __builtin_convertvector(fetch<sh>(p), su) << 16;
    sf v;
    memcpy(&v, &u, sizeof v);
    return v;
}

INLINE sf larger(sf a, sf b) { return a > b ? a : b; }

INLINE vf lanes_of(const sf (&registers)[REGISTERS]) {
    vf v;
    memcpy(&v, registers, sizeof v);
    return v;
}

inline float total(vf v) {
    v4 x = fold(v);
    return (x[0] + x[2]) + (x[1] + x[3]);
}

inline float highest(vf v) {
    v8 half[2];
    memcpy(half, &v, sizeof v);
    v8 x = half[0] > half[1] ? half[0] : half[1];
    v4 quarter[2];
    memcpy(quarter, &x, sizeof x);
    v4 y = quarter[0] > quarter[1] ? quarter[0] : quarter[1];
    return std::max(std::max(y[0], y[1]), std::max(y[2], y[3]));
}

// Four sums at once: small products are mostly sums of lanes.
inline v4 totals(vf a, vf b, vf c, vf d) {
    v4 p = fold(a), q = fold(b), r = fold(c), s = fold(d);
    v4 first = {p[0], q[0], r[0], s[0]}, second = {p[1], q[1], r[1], s[1]};
    v4 third = {p[2], q[2], r[2], s[2]}, fourth = {p[3], q[3], r[3], s[3]};
    return (first + third) + (second + fourth);
}

// exp to about one part in 10^7: 2^n times a polynomial in the rest (coefficients: Taylor on |x| <= ln 2 / 2).
INLINE sf exp_register(sf x) {
    const sf zero = {};
    sf low = zero - 87.f, high = zero + 88.f;
    x = x < low ? low : x;
    x = x > high ? high : x;
    sf n = x * 1.44269504f + 12582912.f;  // adding 1.5 * 2^23 rounds to an integer
    n = n - 12582912.f;
    sf r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    sf y = 1.f + r * (1.f + r * (0.5f + r * (1 / 6.f + r * (1 / 24.f + r * (1 / 120.f + r * (1 / 720.f))))));
    si bits = (__builtin_convertvector(n, si) + 127) << 23;
    sf power;
    memcpy(&power, &bits, sizeof bits);
    return y * power;
}

template <class T>
inline void widen_all(const T *x, int64_t n, float *out) {
    int64_t i = 0;
    for (; i + SPAN <= n; i += SPAN) put(register_at(x + i), out + i);
    for (; i < n; i++) out[i] = widen(x[i]);
}

inline void narrow_all(const float *x, int64_t n, float *out) { std::copy(x, x + n, out); }

INLINE su narrow_register(sf x) {  // `narrow`, bits of bf16 in words
    su u, odd;
    memcpy(&u, &x, sizeof u);
    odd = (u >> 16) & 1;
    return si(u & 0x7fffffff) > 0x7f800000 ? su{} + 0x7fc0 : (u + 0x7fff + odd) >> 16;
}

INLINE void put_register(sf x, float *out) { put(x, out); }

INLINE void put_register(sf x, bf16 *out) {
    sh h = __builtin_convertvector(narrow_register(x), sh);
    memcpy(out, &h, sizeof h);
}

inline void narrow_all(const float *x, int64_t n, bf16 *out) {
    int64_t i = 0;
    for (; i + SPAN <= n; i += SPAN) put_register(get(x + i), out + i);
    for (; i < n; i++) narrow(x[i], out + i);
}

constexpr int SCRATCHES = 16;

struct alignas(64) Line {  // of the cache: no load of scratch falls into two
    float data[16];
};

// Scratch that grows and stays: a decode step makes hundreds of calls.
float *scratch(int which, int64_t size) {
    static thread_local std::vector<Line> buffers[SCRATCHES];
    size_t lines = size_t(size * 4 + sizeof(Line) - 1) / sizeof(Line);
    if (buffers[which].size() < lines) buffers[which].resize(lines);
    return buffers[which].data()->data;
}

#include "crew.h"

int max_threads = 1;
Crew crew;

// Below this many multiply-adds a thread more costs more than it brings.
constexpr int64_t THREAD_WORK = 150000;

// body(part, parts) in up to `parts` threads, fewer where the crew is smaller.
template <class F>
void together(int parts, F body) {
#ifdef _OPENMP
    parts = std::min(parts, crew.size(max_threads));
    if (parts > 1) {
        int64_t start = Crew::now(), began = start, done = start;
#pragma omp parallel num_threads(parts)
        {
            int64_t part = omp_get_thread_num();
            if (part == 0) began = Crew::now();
            body(part, int64_t(omp_get_num_threads()));
            if (part == 0) done = Crew::now();
        }
        crew.note(max_threads, start, began, done);
        return;
    }
#endif
    body(0, 1);
}

// Split `count` items into one contiguous range a thread, in multiples of `grain`, where the work is worth it.
template <class F>
void split(int64_t count, int64_t grain, int64_t operations, F body) {
    int64_t units = (count + grain - 1) / grain;
    int parts = int(std::min<int64_t>({max_threads, units, operations / THREAD_WORK}));
    if (parts <= 1) return body(0, count);
    together(parts, [&](int64_t part, int64_t all) {
        int64_t first = units * part / all * grain, last = std::min(count, units * (part + 1) / all * grain);
        if (first < last) body(first, last);
    });
}

#include "products.h"
#include "units.h"
void swiglu_rows(const float *x, int64_t n, int64_t size, float *out) {
    for (int64_t t = 0; t < n; t++) {
        const float *gate = x + t * 2 * size, *up = gate + size;
        float *y = out + t * size;
        int64_t j = 0;
        for (; j + LANES <= size; j += LANES)
            UNROLLED for (int i = 0; i < LANES; i += SPAN) {
                sf g = get(gate + j + i);
                put(g / (1.f + exp_register(-g)) * get(up + j + i), y + j + i);
            }
        for (; j < size; j++) y[j] = gate[j] / (1 + std::exp(-gate[j])) * up[j];
    }
}

#include "gemm.h"

template <class T>
float dot(const float *a, const T *b, int64_t d) {
    sf acc[REGISTERS] = {};
    int64_t i = 0;
    for (; i + LANES <= d; i += LANES)
        UNROLLED for (int r = 0; r < REGISTERS; r++) acc[r] += get(a + i + r * SPAN) * register_at(b + i + r * SPAN);
    float s = total(lanes_of(acc));
    for (; i < d; i++) s += a[i] * widen(b[i]);
    return s;
}

// RMSNorm in place on one row.
template <class T>
void norm_row(float *x, int64_t d, const T *weight, float eps) {
    float r = 1 / std::sqrt(dot(x, x, d) / float(d) + eps);
    int64_t i = 0;
    for (; i + SPAN <= d; i += SPAN) put(get(x + i) * (r * register_at(weight + i)), x + i);
    for (; i < d; i++) x[i] *= r * widen(weight[i]);
}

// Rotate pairs in place; cos and sin hold d / 2 values.
void rope_row(float *x, int64_t d, const float *cos, const float *sin, bool interleaved) {
    int64_t half = d / 2;
    for (int64_t i = 0; i < half; i++) {
        float *a = interleaved ? x + 2 * i : x + i, *b = interleaved ? a + 1 : a + half;
        float first = *a, second = *b;
        *a = first * cos[i] - second * sin[i];
        *b = second * cos[i] + first * sin[i];
    }
}

// y = y * shrink + sum of weights[i] * rows[i], four vectors of columns at a time so that the additions do not wait for each other.
template <class T>
inline void add_rows(float *y, float shrink, const float *weights, const T *rows, int64_t stride, int64_t count, int64_t d) {
    constexpr int WIDE = 4;
    int64_t j = 0;
    for (; j + WIDE * LANES <= d; j += WIDE * LANES) {
        vf sum[WIDE];
        for (int c = 0; c < WIDE; c++) sum[c] = load(y + j + c * LANES) * shrink;
        for (int64_t i = 0; i < count; i++)
            for (int c = 0; c < WIDE; c++) sum[c] += weights[i] * load(rows + i * stride + j + c * LANES);
        memcpy(y + j, sum, sizeof sum);
    }
    for (; j < d; j++) {
        y[j] *= shrink;
        for (int64_t i = 0; i < count; i++) y[j] += weights[i] * widen(rows[i * stride + j]);
    }
}

#include "attention.h"

}  // namespace

// What does not change from step to step, filled once a layer by native.py. q_rank 0: no query latent, q_b is unused and the
// first rows of `down` make the queries.
struct MlaLayer {
    int64_t hidden, q_rank, heads, nope, rope, v_dim, rank, interleaved;
    double eps;
    const void *down, *down_bias, *q_norm, *q_b, *kv_norm, *kv_b;
};

struct Router {
    int64_t experts, top_k, groups, top_groups, sigmoid, best_two, grouped, normalize, rounded;
    double scaling;
    const void *gate;
    const float *bias;
};

namespace {

template <class T>
void add_norm(const T *x, const T *residual, const T *weight, T *normed, T *sum, int64_t n, int64_t d, float eps) {
    split(n, 1, 32 * n * d, [=](int64_t begin, int64_t end) {  // as many operations by the time they take
        float *row = scratch(0, d);
        for (int64_t t = begin; t < end; t++) {
            int64_t i = 0;
            for (; i + SPAN <= d; i += SPAN) {
                sf value = register_at(x + t * d + i);
                if (residual) {
                    put_register(value + register_at(residual + t * d + i), sum + t * d + i);
                    value = register_at(sum + t * d + i);
                }
                put(value, row + i);
            }
            for (; i < d; i++) {
                float value = widen(x[t * d + i]);
                if (residual) {  // the stream is stored rounded, so the norm sees the rounded sum
                    T stored;
                    narrow(value + widen(residual[t * d + i]), &stored);
                    sum[t * d + i] = stored;
                    value = widen(stored);
                }
                row[i] = value;
            }
            norm_row(row, d, weight, eps);
            narrow_all(row, d, normed + t * d);
        }
    });
}

template <class T>
void add_to(T *y, const T *x, int64_t n) {
    int64_t i = 0;
    for (; i + SPAN <= n; i += SPAN) put_register(register_at(y + i) + register_at(x + i), y + i);
    for (; i < n; i++) narrow(widen(y[i]) + widen(x[i]), y + i);
}

template <class T>
void linear(const T *x, const T *w, const T *bias, T *y, int64_t n, int64_t rows, int64_t k) {
    gemm(x, n, w, rows, k, y, bias);
}

template <class T>
void mlp(const T *x, const T *gate_up, const T *down, T *y, int64_t n, int64_t hidden, int64_t size) {
    if (on_unit(gate_up, n) && n >= PACKED) return mlp_units(x, gate_up, down, y, n, hidden, size);
    float *h = scratch(1, n * 2 * size), *g = scratch(2, n * size);
    gemm(x, n, gate_up, 2 * size, hidden, h);
    split(n, 1, 16 * n * size, [=](int64_t begin, int64_t end) { swiglu_rows(h + begin * 2 * size, end - begin, size, g + begin * size); });
    gemm(g, n, down, hidden, size, y);
}

// down(low [n, rows]) and up(latents, queries [n, heads qk]) are the two products; without a query latent there is but the first.
template <class T, class Down, class Up>
void mla_prologue(const MlaLayer &m, Down down, Up up, const float *cos, const float *sin, T *plane, const int64_t *slots, T *q, int64_t n) {
    int64_t qk = m.nope + m.rope, wide_q = m.heads * qk, first = m.q_rank ? m.q_rank : wide_q, entry = m.rank + m.rope;
    int64_t rows = first + entry;
    float *low = scratch(1, n * rows), *latent = scratch(2, n * first), *queries = scratch(3, n * wide_q);
    down(low, rows);
    split(n, 1, n * first, [=, &m](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            std::copy(low + t * rows, low + t * rows + first, latent + t * first);
            if (m.q_rank) norm_row(latent + t * first, first, (const T *)m.q_norm, float(m.eps));
        }
    });
    if (m.q_rank)
        up(latent, queries, wide_q, first);
    else
        queries = latent;
    split(n, 1, 4 * n * (wide_q + entry), [=, &m](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            const float *c = cos + t * m.rope / 2, *s = sin + t * m.rope / 2;
            for (int64_t h = 0; h < m.heads; h++) rope_row(queries + t * wide_q + h * qk + m.nope, m.rope, c, s, m.interleaved);
            float *kv = low + t * rows + first;
            norm_row(kv, m.rank, (const T *)m.kv_norm, float(m.eps));
            rope_row(kv + m.rank, m.rope, c, s, m.interleaved);
            narrow_all(kv, entry, plane + slots[t] * entry);
            narrow_all(queries + t * wide_q, wide_q, q + t * wide_q);
        }
    });
}

template <class T>
void mla_prologue(const MlaLayer &m, const T *x, const float *cos, const float *sin, T *plane, const int64_t *slots, T *q, int64_t n) {
    auto down = [=, &m](float *low, int64_t rows) { gemm(x, n, (const T *)m.down, rows, m.hidden, low, (const T *)m.down_bias); };
    auto up = [=, &m](const float *latent, float *queries, int64_t rows, int64_t k) { gemm(latent, n, (const T *)m.q_b, rows, k, queries); };
    mla_prologue(m, down, up, cos, sin, plane, slots, q, n);
}

template <class T>
void mla_absorbed(const MlaLayer &m, const T *q, const T *plane, const int64_t *tables, int64_t width, const int64_t *lens, int64_t page,
                  float scale, T *out, int64_t n) {
    int64_t qk = m.nope + m.rope, entry = m.rank + m.rope, up_rows = m.nope + m.v_dim;
    int64_t ldq = apart(entry), ldr = apart(m.rank);
    float *query = scratch(0, n * m.heads * ldq), *latent = scratch(1, n * m.heads * ldr);
    share(m.heads, n * m.heads * m.nope * m.rank, [=, &m](int64_t h) {  // W_UK moves to the query
        const T *up = (const T *)m.kv_b + h * up_rows * m.rank;
        float *wide = scratch(3, n * qk), *sums = scratch(4, n * ldr), *row = scratch(5, entry);
        std::fill(sums, sums + n * ldr, 0.f);
        for (int64_t t = 0; t < n; t++) {
            widen_all(q + (t * m.heads + h) * qk, qk, wide + t * qk);
            for (int64_t i = 0; i < qk; i++) wide[t * qk + i] *= scale;
        }
        mixes(wide, qk, n, up, m.rank, m.nope, m.rank, sums, ldr);
        for (int64_t t = 0; t < n; t++) {
            gathered<T>(sums + t * ldr, m.rank, row);
            std::copy(wide + t * qk + m.nope, wide + (t + 1) * qk, row + m.rank);
            spread<T>(row, entry, query + (t * m.heads + h) * ldq);
        }
    });
    Paged<T> cache = {plane, plane, entry, entry, tables, width, page};
    attend_all(query, ldq, n, 1, m.heads, entry, m.rank, cache, 0, lens, latent, ldr);
    share(m.heads, n * m.heads * m.v_dim * m.rank, [=, &m](int64_t h) {  // W_UV follows the sum
        const T *up = (const T *)m.kv_b + (h * up_rows + m.nope) * m.rank;
        float *made = scratch(3, n * m.v_dim), *row = scratch(5, m.rank);
        if (on_unit(up, n)) {
            int64_t ldx = unit_apart(m.rank);
            bf16 *rows = (bf16 *)scratch(4, n * ldx / 2);
            for (int64_t t = 0; t < n; t++) {
                gathered<T>(latent + (t * m.heads + h) * ldr, m.rank, row);
                unit_row(row, m.rank, rows + t * ldx, ldx);
            }
            unit_dots(up, m.rank, m.v_dim, rows, ldx, n, m.rank, made, m.v_dim);
        } else {
            dots(up, m.rank, m.v_dim, latent + h * ldr, m.heads * ldr, n, m.rank, made, m.v_dim);
        }
        for (int64_t t = 0; t < n; t++) narrow_all(made + t * m.v_dim, m.v_dim, out + (t * m.heads + h) * m.v_dim);
    });
}

// qkv [n, heads + 2 groups, d]: queries and keys are normed and rotated, keys and values go to the cache.
template <class T>
void gqa_prologue(const T *qkv, const T *q_norm, const T *k_norm, float eps, const float *cos, const float *sin, T *keys, T *values,
                  const int64_t *slots, T *q, int64_t n, int64_t heads, int64_t groups, int64_t d) {
    split(n, 1, 8 * n * (heads + groups) * d, [=](int64_t begin, int64_t end) {
        float *row = scratch(0, d);
        for (int64_t t = begin; t < end; t++) {
            const T *mine = qkv + t * (heads + 2 * groups) * d;
            for (int64_t h = 0; h < heads + groups; h++) {
                widen_all(mine + h * d, d, row);
                norm_row(row, d, h < heads ? q_norm : k_norm, eps);
                rope_row(row, d, cos + t * d / 2, sin + t * d / 2, false);
                narrow_all(row, d, h < heads ? q + (t * heads + h) * d : keys + (slots[t] * groups + h - heads) * d);
            }
            memcpy(values + slots[t] * groups * d, mine + (heads + groups) * d, groups * d * sizeof(T));
        }
    });
}

template <class T>
void gqa_decode(const T *q, const T *keys, const T *values, const int64_t *tables, int64_t width, const int64_t *lens, int64_t page,
                float scale, T *out, int64_t n, int64_t heads, int64_t groups, int64_t d) {
    int64_t ldq = apart(d);
    float *query = scratch(0, n * heads * ldq), *sums = scratch(1, n * heads * ldq);
    split(n * heads, 1, 8 * n * heads * d, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            float *row = query + i * ldq;
            spread<T>(q + i * d, d, row);
            for (int64_t j = 0; j < padded(d); j++) row[j] *= scale;
        }
    });
    Paged<T> cache = {keys, values, groups * d, groups * d, tables, width, page};
    attend_all(query, ldq, n, groups, heads / groups, d, d, cache, d, lens, sums, ldq);
    split(n * heads, 1, 8 * n * heads * d, [=](int64_t begin, int64_t end) {
        float *row = scratch(3, d);
        for (int64_t i = begin; i < end; i++) {
            gathered<T>(sums + i * ldq, d, row);
            narrow_all(row, d, out + i * d);
        }
    });
}

struct Ranked {
    uint32_t key;  // larger for larger values, largest for those that are none, the same for both zeros
    int32_t second;
};

inline uint32_t rank_of(float x) {
    uint32_t u;
    x += 0.f;
    memcpy(&u, &x, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return 0xffffffff;
    return u >> 31 ? ~u : u | 0x80000000;
}

// The k best of n values, in the order in which torch.topk(sorted=False) leaves them on the CPU:
// the same algorithm of the standard library, so that of equal values (rounded logits often are)
// the same ones are taken as by the definition. Valid until the next call on this thread.
const Ranked *best(const float *x, int64_t n, int64_t k) {
    static thread_local std::vector<Ranked> queue;
    queue.resize(n);
    for (int64_t i = 0; i < n; i++) queue[i] = {rank_of(x[i]), int32_t(i)};
    auto before = [](Ranked a, Ranked b) { return a.key > b.key; };
    if (k * 64 <= n)
        std::partial_sort(queue.begin(), queue.begin() + k, queue.end(), before);
    else
        std::nth_element(queue.begin(), queue.begin() + k - 1, queue.end(), before);
    return queue.data();
}

// Keep the groups whose best expert (or best two together) score highest; the others cannot be chosen.
void limit_groups(const Router &r, float *choice) {
    constexpr float NEVER = -std::numeric_limits<float>::infinity();
    int64_t size = r.experts / r.groups;
    float *value = scratch(4, r.groups);
    for (int64_t g = 0; g < r.groups; g++) {
        float first = NEVER, second = NEVER;
        for (int64_t e = g * size; e < (g + 1) * size; e++) {
            if (choice[e] > first) {
                second = first;
                first = choice[e];
            } else {
                second = std::max(second, choice[e]);
            }
        }
        value[g] = r.best_two ? first + second : first;
    }
    const auto *kept = best(value, r.groups, r.top_groups);
    for (int64_t i = 0; i < r.top_groups; i++) value[kept[i].second] = NEVER;  // the kept ones
    for (int64_t g = 0; g < r.groups; g++)
        if (value[g] != NEVER) std::fill(choice + g * size, choice + (g + 1) * size, NEVER);
}

// Logits to scores, in place.
void score_all(const Router &r, float *score) {
    if (r.sigmoid) {
        for (int64_t e = 0; e < r.experts; e++) score[e] = 1 / (1 + std::exp(-score[e]));
        return;
    }
    float peak = *std::max_element(score, score + r.experts), mass = 0;
    for (int64_t e = 0; e < r.experts; e++) mass += score[e] = std::exp(score[e] - peak);
    for (int64_t e = 0; e < r.experts; e++) score[e] /= mass;
}

template <class T, class G>
void route(const Router &r, const T *x, int64_t *ids, float *weights, int64_t n, int64_t hidden) {
    float *scores = scratch(0, n * r.experts);
    gemm(x, n, (const G *)r.gate, r.experts, hidden, scores);
    split(n, 1, 32 * n * r.experts, [=, &r](int64_t begin, int64_t end) {
        float *choice = scratch(2, r.experts);
        for (int64_t t = begin; t < end; t++) {
            float *score = scores + t * r.experts;
            for (int64_t e = 0; r.rounded && e < r.experts; e++) {  // logits of the gate's type
                G rounded;
                narrow(score[e], &rounded);
                score[e] = widen(rounded);
            }
            score_all(r, score);
            for (int64_t e = 0; e < r.experts; e++) choice[e] = score[e] + (r.bias ? r.bias[e] : 0);
            if (r.grouped) limit_groups(r, choice);
            float sum = 0;
            const auto *picks = best(choice, r.experts, r.top_k);
            for (int64_t i = 0; i < r.top_k; i++) {
                int64_t e = picks[i].second;
                ids[t * r.top_k + i] = e;
                sum += weights[t * r.top_k + i] = score[e];
            }
            float factor = float(r.scaling) / (r.normalize ? sum + 1e-20f : 1);
            for (int64_t i = 0; i < r.top_k; i++) {
                T rounded;
                float &weight = weights[t * r.top_k + i];
                narrow(weight * factor, &rounded);
                weight = r.rounded ? widen(rounded) : weight * factor;
            }
        }
    });
}

#include "experts.h"
#include "quantized.h"
#include "sampling.h"

// As `mla_prologue`, of weights of eight or four bits. Between two products rows are what they would be in memory.
template <class T>
void mla_prologue_packed(const MlaLayer &m, const Packed &down, const Packed &q_b, const T *x, const float *cos, const float *sin, T *plane,
                         const int64_t *slots, T *q, int64_t n) {
    auto first = [=, &m, &down](float *low, int64_t) { times_packed(down, x, (const T *)m.down_bias, low, n); };
    auto second = [=, &q_b](const float *latent, float *queries, int64_t, int64_t k) {
        T *rows = (T *)scratch(4, n * k);
        narrow_all(latent, n * k, rows);
        times_packed(q_b, rows, (const T *)nullptr, queries, n);
    };
    mla_prologue(m, first, second, cos, sin, plane, slots, q, n);
}

template <class T>
void mlp_packed(const Packed &gate_up, const Packed &down, const T *x, T *y, int64_t n) {
    int64_t size = down.k;
    float *h = scratch(1, n * 2 * size), *g = scratch(2, n * size);
    T *rows = (T *)scratch(4, n * size);
    times_packed(gate_up, x, (const T *)nullptr, h, n);
    swiglu_rows(h, n, size, g);
    narrow_all(g, n * size, rows);
    times_packed(down, rows, (const T *)nullptr, y, n);
}

}  // namespace

// `wide` picks the storage type: 1 for fp32, 0 for bf16.
#define PICK(call_float, call_bf16) \
    if (wide) {                     \
        call_float;                 \
    } else {                        \
        call_bf16;                  \
    }
#define F(p) ((const float *)(p))
#define B(p) ((const bf16 *)(p))
#define FW(p) ((float *)(p))
#define BW(p) ((bf16 *)(p))

extern "C" {

// An instruction without which no other function here can be called; null where the processor has all of them.
const char *rq_lacking() { return lacking(); }

// How many threads a call may use, the caller's included.
void rq_threads(int threads) {
    max_threads = threads;
    crew.all();
}

// How many of them calls use at present.
int rq_threads_used() { return crew.size(max_threads); }

void rq_add_norm(int wide, const void *x, const void *residual, const void *weight, void *normed, void *sum, int64_t n, int64_t d, double eps) {
    PICK(add_norm(F(x), F(residual), F(weight), FW(normed), FW(sum), n, d, float(eps)),
         add_norm(B(x), B(residual), B(weight), BW(normed), BW(sum), n, d, float(eps)))
}

// out [n, row] = rows `ids` of table [rows, row], `row` bytes each. Returns the first id that is none, and then copies nothing; else n.
int64_t rq_embed(const void *table, const int64_t *ids, void *out, int64_t n, int64_t rows, int64_t row) {
    for (int64_t t = 0; t < n; t++)
        if (ids[t] < 0 || ids[t] >= rows) return t;
    for (int64_t t = 0; t < n; t++) memcpy((char *)out + t * row, (const char *)table + ids[t] * row, row);
    return n;
}

// out: n rows, each the `first` bytes of a row of a and then the `second` bytes of one of b.
void rq_concat_columns(const void *a, const void *b, void *out, int64_t n, int64_t first, int64_t second) {
    for (int64_t t = 0; t < n; t++) {
        char *row = (char *)out + t * (first + second);
        memcpy(row, (const char *)a + t * first, first);
        memcpy(row + first, (const char *)b + t * second, second);
    }
}

// y += x, of n numbers.
void rq_add(int wide, void *y, const void *x, int64_t n) { PICK(add_to(FW(y), F(x), n), add_to(BW(y), B(x), n)) }

void rq_linear(int wide, const void *x, const void *w, const void *bias, void *y, int64_t n, int64_t rows, int64_t k) {
    PICK(linear(F(x), F(w), F(bias), FW(y), n, rows, k), linear(B(x), B(w), B(bias), BW(y), n, rows, k))
}

void rq_mlp(int wide, const void *x, const void *gate_up, const void *down, void *y, int64_t n, int64_t hidden, int64_t size) {
    PICK(mlp(F(x), F(gate_up), F(down), FW(y), n, hidden, size), mlp(B(x), B(gate_up), B(down), BW(y), n, hidden, size))
}

void rq_mla_prologue(int wide, const MlaLayer *m, const void *x, const float *cos, const float *sin, void *plane, const int64_t *slots, void *q, int64_t n) {
    PICK(mla_prologue(*m, F(x), cos, sin, FW(plane), slots, FW(q), n), mla_prologue(*m, B(x), cos, sin, BW(plane), slots, BW(q), n))
}

void rq_mla_absorbed(int wide, const MlaLayer *m, const void *q, const void *plane, const int64_t *tables, int64_t width, const int64_t *lens,
                     int64_t page, double scale, void *out, int64_t n) {
    PICK(mla_absorbed(*m, F(q), F(plane), tables, width, lens, page, float(scale), FW(out), n),
         mla_absorbed(*m, B(q), B(plane), tables, width, lens, page, float(scale), BW(out), n))
}

void rq_gqa_prologue(int wide, const void *qkv, const void *q_norm, const void *k_norm, double eps, const float *cos, const float *sin, void *keys,
                     void *values, const int64_t *slots, void *q, int64_t n, int64_t heads, int64_t groups, int64_t d) {
    PICK(gqa_prologue(F(qkv), F(q_norm), F(k_norm), float(eps), cos, sin, FW(keys), FW(values), slots, FW(q), n, heads, groups, d),
         gqa_prologue(B(qkv), B(q_norm), B(k_norm), float(eps), cos, sin, BW(keys), BW(values), slots, BW(q), n, heads, groups, d))
}

void rq_gqa_decode(int wide, const void *q, const void *keys, const void *values, const int64_t *tables, int64_t width, const int64_t *lens,
                   int64_t page, double scale, void *out, int64_t n, int64_t heads, int64_t groups, int64_t d) {
    PICK(gqa_decode(F(q), F(keys), F(values), tables, width, lens, page, float(scale), FW(out), n, heads, groups, d),
         gqa_decode(B(q), B(keys), B(values), tables, width, lens, page, float(scale), BW(out), n, heads, groups, d))
}

// strides: from one entry to the next and from one head to the next, of keys and of values.
void rq_causal(int wide, const void *q, const void *keys, const void *values, const int64_t *strides, void *out, int64_t n, int64_t length,
               int64_t heads, int64_t groups, int64_t d, int64_t dv, double scale) {
    Strides k = {strides[0], strides[1]}, v = {strides[2], strides[3]};
    PICK(causal(F(q), F(keys), k, F(values), v, FW(out), n, length, heads, groups, d, dv, float(scale)),
         causal(B(q), B(keys), k, B(values), v, BW(out), n, length, heads, groups, d, dv, float(scale)))
}

// The gate may be fp32 beside bf16 activations.
void rq_route(int wide, int wide_gate, const Router *r, const void *x, int64_t *ids, float *weights, int64_t n, int64_t hidden) {
    if (wide) {
        route<float, float>(*r, F(x), ids, weights, n, hidden);
    } else if (wide_gate) {
        route<bf16, float>(*r, B(x), ids, weights, n, hidden);
    } else {
        route<bf16, bf16>(*r, B(x), ids, weights, n, hidden);
    }
}

// Returns the first pick that names no expert, and then computes nothing; n * top_k where all are known.
int64_t rq_experts(int wide, const void *x, const int64_t *ids, const float *weights, const void *gate_up, const void *down, void *y, int64_t n,
                   int64_t top_k, int64_t slots, int64_t hidden, int64_t size) {
    int64_t unknown = unknown_pick(ids, n * top_k, slots);
    if (unknown < n * top_k) return unknown;
    PICK(experts(F(x), ids, weights, F(gate_up), F(down), FW(y), n, top_k, slots, hidden, size),
         experts(B(x), ids, weights, B(gate_up), B(down), BW(y), n, top_k, slots, hidden, size))
    return unknown;
}

void rq_linear_packed(int wide, const Packed *w, const void *x, const void *bias, void *y, int64_t n) {
    PICK(times_packed(*w, F(x), F(bias), FW(y), n), times_packed(*w, B(x), B(bias), BW(y), n))
}

void rq_mlp_packed(int wide, const Packed *gate_up, const Packed *down, const void *x, void *y, int64_t n) {
    PICK(mlp_packed(*gate_up, *down, F(x), FW(y), n), mlp_packed(*gate_up, *down, B(x), BW(y), n))
}

// q_b is not looked at where there is no query latent.
void rq_mla_prologue_packed(int wide, const MlaLayer *m, const Packed *down, const Packed *q_b, const void *x, const float *cos, const float *sin,
                            void *plane, const int64_t *slots, void *q, int64_t n) {
    PICK(mla_prologue_packed(*m, *down, *q_b, F(x), cos, sin, FW(plane), slots, FW(q), n),
         mla_prologue_packed(*m, *down, *q_b, B(x), cos, sin, BW(plane), slots, BW(q), n))
}

int64_t rq_experts_packed(int wide, const Packed *gate_up, const Packed *down, const void *x, const int64_t *ids, const float *weights, void *y,
                          int64_t n, int64_t top_k, int64_t slots) {
    int64_t unknown = unknown_pick(ids, n * top_k, slots);
    if (unknown < n * top_k) return unknown;
    auto run = [=](auto *rows, auto *out) {
        with_format(*gate_up, n * top_k / slots, rows,
                    [=](auto matrix) { expert_times(matrix(*gate_up), matrix(*down), rows, ids, weights, out, n, top_k, slots); });
    };
    PICK(run(F(x), FW(y)), run(B(x), BW(y)))
    return unknown;
}

// Sampling: m rows of v logits, `stride` apart.

constexpr int64_t TOKEN_WORK = 16;  // multiply-adds that a token of the vocabulary counts as

void rq_uniform(const int64_t *seeds, const int64_t *positions, int64_t stream, double *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = uniform(uint64_t(seeds[i]), uint64_t(positions[i]), uint64_t(stream));
}

// out [rows, columns], rows `stride` apart; the element in row r and column c is number first + r * width + c.
void rq_draw_normal(int wide, void *out, int64_t stride, int64_t rows, int64_t columns, int64_t key, double factor, int64_t first, int64_t width) {
    split(rows, 1, rows * columns * TOKEN_WORK, [=](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            uint64_t number = uint64_t(first) + uint64_t(r) * uint64_t(width);
            PICK(draw_normal_row(uint64_t(key), float(factor), number, columns, FW(out) + r * stride),
                 draw_normal_row(uint64_t(key), float(factor), number, columns, BW(out) + r * stride))
        }
    });
}

void rq_distribution(const float *logits, int64_t stride, int64_t m, int64_t v, const double *settings, int cuts, double *summary, double *parts,
                     int64_t *best) {
    split(m, 1, m * v * TOKEN_WORK, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++)
            best[i] = distribute(logits + i * stride, v, settings + 4 * i, cuts, summary + 4 * i, parts + i * blocks_of(v));
    });
}

void rq_draw(const float *logits, int64_t stride, int64_t m, int64_t v, const double *summary, const double *parts, const int64_t *best,
             const double *numbers, int64_t *out) {
    for (int64_t i = 0; i < m; i++) out[i] = draw_row(row_of(logits, stride, summary, i), v, parts + i * blocks_of(v), numbers[i], best[i]);
}

// Token `out[i]` from row rows[i], -1 where that is -1; q may be null, else its row q_rows[i] is meant.
void rq_draw_rest(const float *logits, int64_t stride, int64_t v, const double *summary, const double *parts, const int64_t *rows,
                  const double *numbers, const int64_t *refused, const float *q, const int64_t *q_rows, int64_t *out, int64_t n) {
    split(n, 1, n * v * TOKEN_WORK, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            out[i] = -1;
            if (rows[i] < 0) continue;
            const double *masses = parts + rows[i] * blocks_of(v);
            out[i] = rest_row(row_of(logits, stride, summary, rows[i]), v, masses, numbers[i], refused[i], q ? q + q_rows[i] * v : nullptr);
        }
    });
}

void rq_write_probs(const float *logits, int64_t stride, int64_t m, int64_t v, const double *summary, const double *parts, float *plane,
                    const int64_t *rows) {
    split(m, 1, m * v * TOKEN_WORK, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) probs_row(row_of(logits, stride, summary, i), v, parts + i * blocks_of(v), plane + rows[i] * v);
    });
}
}

#include "captured.h"
