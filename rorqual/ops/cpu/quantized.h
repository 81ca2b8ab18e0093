// Products with weights of eight and four bits on the CPU, included by kernels.cpp. A format prepares rows of x once and multiplies them
// with some rows of its matrix; `times` and `expert_times` are the same for all of them.
//
// Integers: a register of bytes is WORDS of four columns each; a word of sums is theirs.

constexpr int WORDS = SPAN;
constexpr int BYTES = 4 * SPAN;
constexpr int64_t NIBBLES = 32;  // columns of a block of four-bit weights: byte j holds column j and, in its upper half, column j + 16
constexpr float EIGHT = 127;     // the largest activation of eight bits

typedef int32_t si __attribute__((vector_size(SPAN * 4)));
typedef int8_t sb __attribute__((vector_size(BYTES)));
typedef uint8_t ub __attribute__((vector_size(BYTES)));

template <class V, class P>
inline V fetch(const P *p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}

// sums + words of a times b, a below 16 (so that no pair of products overflows 16 bits).
inline si add_small(si sums, ub a, sb b) {
#if defined(__AVX512VNNI__)
    return (si)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    return sums + (si)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)a, (__m512i)b), _mm512_set1_epi16(1));
#elif defined(__AVX2__)
    return sums + (si)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)a, (__m256i)b), _mm256_set1_epi16(1));
#else
    for (int i = 0; i < BYTES; i++) sums[i / 4] += int32_t(a[i]) * b[i];
    return sums;
#endif
}

// The same of any signed bytes.
inline si add_signed(si sums, sb a, sb b) {
#if defined(__AVX512VNNI__)
    // bytes with a sign on one side alone: x - 128 is what a flipped upper bit makes of an unsigned x
    __m512i up = _mm512_xor_si512((__m512i)a, _mm512_set1_epi8(char(0x80)));
    __m512i found = _mm512_dpbusd_epi32((__m512i)sums, up, (__m512i)b);
    return (si)_mm512_sub_epi32(found, _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(char(0x80)), (__m512i)b));
#elif defined(__AVX512BW__)
    __m512i low = _mm512_madd_epi16(_mm512_srai_epi16(_mm512_slli_epi16((__m512i)a, 8), 8), _mm512_srai_epi16(_mm512_slli_epi16((__m512i)b, 8), 8));
    __m512i high = _mm512_madd_epi16(_mm512_srai_epi16((__m512i)a, 8), _mm512_srai_epi16((__m512i)b, 8));
    return sums + (si)_mm512_add_epi32(low, high);
#elif defined(__AVX2__)
    __m256i low = _mm256_madd_epi16(_mm256_srai_epi16(_mm256_slli_epi16((__m256i)a, 8), 8), _mm256_srai_epi16(_mm256_slli_epi16((__m256i)b, 8), 8));
    __m256i high = _mm256_madd_epi16(_mm256_srai_epi16((__m256i)a, 8), _mm256_srai_epi16((__m256i)b, 8));
    return sums + (si)_mm256_add_epi32(low, high);
#else
    for (int i = 0; i < BYTES; i++) sums[i / 4] += int32_t(a[i]) * b[i];
    return sums;
#endif
}

// Half a register of bytes to words, as floats: of their lower halves, or of their upper ones, sixteen times as large.
INLINE void widen_nibbles(const uint8_t *p, sf *low, sf *high) {
#if defined(__AVX512F__)
    __m512i word = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    *low = (sf)_mm512_cvtepi32_ps(_mm512_and_si512(word, _mm512_set1_epi32(15)));
    *high = (sf)_mm512_cvtepi32_ps(_mm512_and_si512(word, _mm512_set1_epi32(0xf0)));
#elif defined(__AVX2__)
    __m256i word = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    *low = (sf)_mm256_cvtepi32_ps(_mm256_and_si256(word, _mm256_set1_epi32(15)));
    *high = (sf)_mm256_cvtepi32_ps(_mm256_and_si256(word, _mm256_set1_epi32(0xf0)));
#else
    for (int i = 0; i < SPAN; i++) {
        (*low)[i] = float(p[i] & 15);
        (*high)[i] = float(p[i] & 0xf0);
    }
#endif
}

inline int32_t sum_words(si v) {
    typedef int32_t four __attribute__((vector_size(16)));
    four quarter[SPAN / 4], sum = {};
    memcpy(quarter, &v, sizeof v);
    UNROLLED for (int i = 0; i < SPAN / 4; i++) sum += quarter[i];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// One token to eight bits with a scale of its own, to nearest even; returns the scale. A number that is none makes the scale one.
inline float round_row(const float *x, int64_t k, int8_t *out) {
    float most = 0;
    bool broken = false;
    for (int64_t i = 0; i < k; i++) {
        most = std::max(most, std::fabs(x[i]));
        broken |= !(std::fabs(x[i]) <= std::numeric_limits<float>::max());
    }
    if (broken) {
        std::fill(out, out + k, int8_t(0));
        out[0] = 1;
        return std::numeric_limits<float>::quiet_NaN();
    }
    // divided as by the definition: times an inverse some would fall to the other side of a half
    float scale = most / EIGHT, least = std::max(scale, std::numeric_limits<float>::min());
    for (int64_t i = 0; i < k; i++) out[i] = int8_t(std::nearbyint(x[i] / least));
    return scale;
}

// A row of activations of eight bits in scratch: its scale, then, a line further, the bytes.
inline int64_t row_of_bytes(int64_t k) { return 16 + (k + BYTES - 1) / BYTES * BYTES / 4; }
inline const int8_t *bytes_of(const float *row) { return (const int8_t *)(row + 16); }

// W8A8: data [rows, k] int8 as a checkpoint has it, a scale for each row and `group` columns.
struct Int8 {
    const int8_t *data;
    const float *scales;
    int64_t k, group;

    Int8 at(int64_t expert, int64_t rows) const { return {data + expert * rows * k, scales + expert * rows * (k / group), k, group}; }
    int64_t apart_in() const { return row_of_bytes(k); }

    void prepare(const float *x, float *out) const {
        int8_t *bytes = (int8_t *)(out + 16);
        out[0] = round_row(x, k, bytes);
        std::fill(bytes + k, bytes + 4 * (apart_in() - 16), int8_t(0));
    }

    template <int N>
    void tile(int64_t r, const float *in, int64_t ld, float *y, int64_t ldy) const {
        const int8_t *w = data + r * k;
        float total[N] = {};
        for (int64_t g = 0; g < k; g += group) {
            si sums[N] = {};
            int64_t i = g;
            for (; i + BYTES <= g + group; i += BYTES) {
                sb mine = fetch<sb>(w + i);
                UNROLLED for (int n = 0; n < N; n++) sums[n] = add_signed(sums[n], mine, fetch<sb>(bytes_of(in + n * ld) + i));
            }
            int32_t rest[N] = {};
            for (; i < g + group; i++)
                UNROLLED for (int n = 0; n < N; n++) rest[n] += int32_t(w[i]) * bytes_of(in + n * ld)[i];
            UNROLLED for (int n = 0; n < N; n++) total[n] += float(sum_words(sums[n]) + rest[n]) * scales[(r * k + g) / group];
        }
        for (int n = 0; n < N; n++) y[n * ldy] = total[n] * in[n * ld];
    }

    void product(int64_t first, int64_t rows, const float *in, int64_t ld, int64_t n, float *y, int64_t ldy) const {
        for (int64_t r = 0; r < rows; r++) {
            int64_t i = 0;
            for (; i + 4 <= n; i += 4) tile<4>(first + r, in + i * ld, ld, y + i * ldy + r, ldy);
            for (; i < n; i++) tile<1>(first + r, in + i * ld, ld, y + i * ldy + r, ldy);
        }
    }
};

// Four bits: data [rows, k / 2] in blocks of NIBBLES columns; a weight is (nibble * scale - offset), both for each row and `group`
// columns. The upper nibble stays where it is in its byte, sixteen times as large, and x is divided by that.
struct Int4 {
    const uint8_t *data;
    const float *scales, *offsets;
    int64_t k, group, in_row;  // in_row: groups of a row. A division takes as long as many products

    int64_t groups() const { return in_row; }
    Int4 at(int64_t expert, int64_t rows) const {
        int64_t held = expert * rows * in_row;
        return {data + expert * rows * (k / 2), scales + held, offsets + held, k, group, in_row};
    }
};

// W4A16: activations as they are, in fp32. A row of x is followed by its sums over groups.
struct Int4Wide : Int4 {
    Int4Wide at(int64_t expert, int64_t rows) const { return {Int4::at(expert, rows)}; }
    int64_t apart_in() const { return apart(k) + padded(groups()); }

    void prepare(const float *x, float *out) const {
        float *sums = out + apart(k);
        std::fill(out + k, out + apart_in(), 0.f);
        for (int64_t i = 0; i < k; i++) {
            out[i] = i % NIBBLES < NIBBLES / 2 ? x[i] : x[i] / 16;
            sums[i / group] += x[i];
        }
    }

    // Each half block is as many registers as it takes.
    template <int R>
    void stream(int64_t first, const float *x, float *y) const {
        constexpr int PIECES = 16 / SPAN;
        sf total[R] = {};
        for (int64_t g = 0; g < groups(); g++) {
            sf acc[R] = {};
            for (int64_t i = g * group; i < (g + 1) * group; i += NIBBLES)
                UNROLLED for (int p = 0; p < PIECES; p++) {
                    sf low = get(x + i + p * SPAN), high = get(x + i + 16 + p * SPAN);
                    UNROLLED for (int r = 0; r < R; r++) {
                        const uint8_t *at = data + ((first + r) * k + i) / 2 + p * SPAN;
                        __builtin_prefetch(at + 1024);
                        sf first_half, second_half;
                        widen_nibbles(at, &first_half, &second_half);
                        acc[r] += first_half * low;
                        acc[r] += second_half * high;
                    }
                }
            UNROLLED for (int r = 0; r < R; r++) total[r] += acc[r] * scales[(first + r) * groups() + g];
        }
        UNROLLED for (int r = 0; r < R; r++) y[r] = sum_of(total[r]);
    }

    void widen_block(int64_t first, int64_t rows, int64_t from, int64_t columns, float *out, int64_t ld) const {
        int64_t begin = from / group, into_group = from % group;
        for (int64_t r = 0; r < rows; r++) {
            int64_t g = (first + r) * groups() + begin, left = group - into_group;
            for (int64_t i = 0; i < columns; i += NIBBLES, left -= NIBBLES) {
                if (!left) {
                    g++;
                    left = group;
                }
                const uint8_t *at = data + ((first + r) * k + from + i) / 2;
                float scale = scales[g], offset = offsets[g], *into = out + r * ld + i;
                for (int j = 0; j < 16; j += SPAN) {
                    sf low, high;
                    widen_nibbles(at + j, &low, &high);
                    put(low * scale - offset, into + j);
                    put(high * scale - 16 * offset, into + 16 + j);
                }
            }
        }
    }

    void product(int64_t first, int64_t rows, const float *in, int64_t ld, int64_t n, float *y, int64_t ldy) const {
        if (n <= 2) {
            for (int64_t i = 0; i < n; i++) {
                const float *x = in + i * ld;
                int64_t r = 0;
                for (; r + 4 <= rows; r += 4) stream<4>(first + r, x, y + i * ldy + r);
                for (; r < rows; r++) stream<1>(first + r, x, y + i * ldy + r);
            }
            float *less = scratch(14, n * rows);
            dots(offsets + first * groups(), groups(), rows, in + apart(k), ld, n, groups(), less, rows);
            for (int64_t i = 0; i < n * rows; i++) y[i / rows * ldy + i % rows] -= less[i];
            return;
        }
        float *wide = scratch(13, BAND * (DEPTH + PAIR));
        for (int64_t some = 0; some < n; some += HELD)
            for (int64_t band = 0; band < rows; band += BAND)
                for (int64_t deep = 0; deep < k; deep += DEPTH) {
                    int64_t high = std::min(BAND, rows - band), columns = std::min(DEPTH, k - deep);
                    widen_block(first + band, high, deep, columns, wide, DEPTH + PAIR);
                    dots_block(wide, DEPTH + PAIR, high, in + some * ld + deep, ld, std::min(HELD, n - some), columns,
                               y + some * ldy + band, ldy, deep > 0);
                }
    }
};

// W4A8: activations of eight bits, a scale a token. Bytes stand as the nibbles do: of two or four blocks first all lower halves.
struct Int4Bytes : Int4 {
    static constexpr int64_t ACROSS_BLOCKS = BYTES / 16;               // blocks whose nibbles fill a register
    static constexpr int64_t STRIDE = ACROSS_BLOCKS * NIBBLES;  // columns of it

    Int4Bytes at(int64_t expert, int64_t rows) const { return {Int4::at(expert, rows)}; }
    int64_t wide() const { return (k + STRIDE - 1) / STRIDE * STRIDE; }
    int64_t apart_in() const { return 16 + wide() / 4 + padded(groups()); }

    void prepare(const float *x, float *out) const {
        int8_t *plain = (int8_t *)scratch(13, k / 4 + 16), *bytes = (int8_t *)(out + 16);
        float *sums = out + 16 + wide() / 4;
        out[0] = round_row(x, k, plain);
        std::fill(bytes, bytes + wide(), int8_t(0));
        std::fill(sums, sums + padded(groups()), 0.f);
        for (int64_t i = 0; i < k; i++) {
            int64_t block = i / NIBBLES % ACROSS_BLOCKS, half = i % NIBBLES / 16;
            bytes[i / STRIDE * STRIDE + half * BYTES + block * 16 + i % 16] = plain[i];
            sums[i / group] += float(plain[i]);
        }
    }

    // A quarter of a register for each block from column i on, in group g.
    INLINE sf scale_words(const float *scale, int64_t i, int64_t g) const {
        if (group % STRIDE == 0) return sf{} + scale[g];
#if defined(__AVX512F__)
        int64_t left = groups() - g;
        __m512 some = _mm512_maskz_loadu_ps(left >= 4 ? 15 : (1 << left) - 1, scale + g);
        const __m512i fours = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
        if (group == NIBBLES) return (sf)_mm512_permutexvar_ps(fours, some);
        if (group == 2 * NIBBLES) return (sf)_mm512_permutexvar_ps(_mm512_srli_epi32(fours, 1), some);
#endif
        sf out;
        for (int b = 0; b < ACROSS_BLOCKS; b++)
            for (int j = 0; j < 4; j++) out[4 * b + j] = scale[std::min(i + b * NIBBLES, k - 1) / group];
        return out;
    }

    template <int R, int N>
    void tile(int64_t first, const float *in, int64_t ld, float *y, int64_t ldy) const {
        sf total[R][N] = {};
        const ub fifteen = ub{} + 15;
        for (int64_t i = 0, g = 0, end = group; i < k; i += STRIDE) {
            for (; i >= end; end += group) g++;
            int64_t held = std::min<int64_t>(BYTES, (k - i) / 2);
            UNROLLED for (int r = 0; r < R; r++) {
                const uint8_t *at = data + ((first + r) * k + i) / 2;
                ub mine = {};
                if (held == BYTES)
                    mine = fetch<ub>(at);
                else
                    memcpy(&mine, at, held);
                __builtin_prefetch(at + 1024);
                sf scale = scale_words(scales + (first + r) * groups(), i, g);
                UNROLLED for (int n = 0; n < N; n++) {
                    const int8_t *x = bytes_of(in + n * ld) + i;
                    si sums = add_small(add_small(si{}, mine & fifteen, fetch<sb>(x)), mine >> 4, fetch<sb>(x + BYTES));
                    total[r][n] += __builtin_convertvector(sums, sf) * scale;
                }
            }
        }
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int n = 0; n < N; n++) y[n * ldy + r] = sum_of(total[r][n]);
    }

    void product(int64_t first, int64_t rows, const float *in, int64_t ld, int64_t n, float *y, int64_t ldy) const {
        for (int64_t r = 0; r < rows;) {
            int64_t i = 0;
            bool four = r + 4 <= rows;
            for (; four && i + 4 <= n; i += 4) tile<4, 4>(first + r, in + i * ld, ld, y + i * ldy + r, ldy);
            for (; four && i < n; i++) tile<4, 1>(first + r, in + i * ld, ld, y + i * ldy + r, ldy);
            for (; !four && i < n; i++) tile<1, 1>(first + r, in + i * ld, ld, y + i * ldy + r, ldy);
            r += four ? 4 : 1;
        }
        float *less = scratch(14, n * rows);
        dots(offsets + first * groups(), groups(), rows, in + 16 + wide() / 4, ld, n, groups(), less, rows);
        for (int64_t i = 0; i < n * rows; i++) {
            float *into = y + i / rows * ldy + i % rows;
            *into = (*into - less[i]) * in[i / rows * ld];
        }
    }
};

template <class M, class X>
float *prepare_all(const M &m, const X *x, int64_t n, int which) {
    int64_t ld = m.apart_in();
    float *in = scratch(which, n * ld);
    split(n, 1, 4 * n * m.k, [=, &m](int64_t begin, int64_t end) {
        float *wide = scratch(11, m.k);
        for (int64_t t = begin; t < end; t++) {
            widen_all(x + t * m.k, m.k, wide);
            m.prepare(wide, in + t * ld);
        }
    });
    return in;
}

// y [n, rows] = x [n, k] times the matrix transposed, + bias.
template <class M, class T>
void times(const M &m, const T *x, const T *bias, T *y, int64_t n, int64_t rows) {
    int64_t block = block_rows(rows), ld = m.apart_in();
    const float *in = prepare_all(m, x, n, 8);
    share((rows + block - 1) / block, n * rows * m.k, [=, &m](int64_t i) {
        int64_t first = i * block, high = std::min(block, rows - first), ldy = apart(high);
        float *out = scratch(10, n * ldy);
        m.product(first, high, in, ld, n, out, ldy);
        for (int64_t t = 0; t < n; t++) {
            for (int64_t r = 0; bias && r < high; r++) out[t * ldy + r] += widen(bias[first + r]);
            keep(out + t * ldy, high, y + t * rows + first);
        }
    });
}

// As `experts`, of matrices gate_up [2 size, hidden] and down [hidden, size] an expert.
template <class M, class T>
void expert_times(const M &gate_up, const M &down, const T *x, const int64_t *ids, const float *weights, T *y, int64_t n, int64_t top_k,
                  int64_t slots) {
    int64_t picks = n * top_k, hidden = gate_up.k, size = down.k, ldx = gate_up.apart_in(), ldg = down.apart_in();
    const Grouped &grouped = group_picks(ids, picks, slots);
    const Group *groups = grouped.groups.data();
    const int64_t *order = grouped.order.data();
    int64_t used = int64_t(grouped.groups.size()), work = picks * hidden * size;
    const float *in = prepare_all(gate_up, x, n, 8);
    float *h = scratch(1, picks * 2 * size), *g = scratch(2, picks * ldg), *out = scratch(3, picks * hidden);
    int64_t width = block_rows(2 * used * size), blocks = (2 * size + width - 1) / width;
    share(used * blocks, 2 * work, [=, &gate_up](int64_t unit) {
        Group e = groups[unit / blocks];
        int64_t from = unit % blocks * width;
        float *rows = scratch(9, e.count * ldx);
        for (int64_t i = 0; i < e.count; i++) {
            const float *row = in + order[e.first + i] / top_k * ldx;
            std::copy(row, row + ldx, rows + i * ldx);
        }
        gate_up.at(e.slot, 2 * size).product(from, std::min(width, 2 * size - from), rows, ldx, e.count, h + e.first * 2 * size + from, 2 * size);
    });
    int64_t made = used ? groups[used - 1].first + groups[used - 1].count : 0;
    split(made, 1, 16 * made * size, [=, &down](int64_t begin, int64_t end) {
        float *row = scratch(11, size);
        for (int64_t i = begin; i < end; i++) {
            swiglu_rows(h + i * 2 * size, 1, size, row);
            down.prepare(row, g + i * ldg);
        }
    });
    int64_t height = block_rows(used * hidden), bands = (hidden + height - 1) / height;
    share(used * bands, work, [=, &down](int64_t unit) {
        Group e = groups[unit / bands];
        int64_t from = unit % bands * height, rows = std::min(height, hidden - from);
        float *sums = scratch(10, e.count * rows);
        down.at(e.slot, hidden).product(from, rows, g + e.first * ldg, ldg, e.count, sums, rows);
        for (int64_t i = 0; i < e.count; i++) std::copy(sums + i * rows, sums + (i + 1) * rows, out + order[e.first + i] * hidden + from);
    });
    sum_picks(ids, weights, out, y, n, top_k, hidden);
}

enum Bits { W8A8, W4A16, W4A8 };

// A matrix as native.py hands it over.
struct Packed {
    int64_t format, rows, k, group;
    const void *data;
    const float *scales, *offsets;

    Int4 four() const { return {(const uint8_t *)data, scales, offsets, k, group, k / group}; }
};

template <class F>
void with_format(const Packed &p, F body) {
    if (p.format == W8A8) body([](const Packed &m) { return Int8{(const int8_t *)m.data, m.scales, m.k, m.group}; });
    if (p.format == W4A16) body([](const Packed &m) { return Int4Wide{m.four()}; });
    if (p.format == W4A8) body([](const Packed &m) { return Int4Bytes{m.four()}; });
}
