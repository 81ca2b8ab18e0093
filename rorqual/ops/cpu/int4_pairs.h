// Four-bit weights in groups of whole blocks, times fewer than PACKED rows that are bf16 and stay so, on pairs of bf16 (pairs.h): included
// by quantized.h. A number less 8, or less nothing where there are zero points, is exact in bf16, and so is each product in fp32.
//
// 128 columns are four registers of x: columns 4 j, then 4 j + 1, 4 j + 2 and 4 j + 3, as nibbles stand in words of two bytes. Where
// there are zero points a row is followed by the sums of eight columns each, in fp32.

#if defined(__AVX512BF16__)
struct Int4Pairs : Int4 {
    static constexpr int64_t STRIDE = 2 * BYTES;  // columns of a register of nibbles

    Int4Pairs at(int64_t expert, int64_t rows) const { return {Int4::at(expert, rows)}; }
    int64_t registers() const { return (k + STRIDE - 1) / STRIDE; }
    int64_t apart_in() const { return apart(registers() * (STRIDE / 2 + (zeros ? SPAN : 0))); }

    void prepare(const float *given, float *out) const {
        int64_t columns = registers() * STRIDE;
        bf16 *x = (bf16 *)scratch(13, columns / 2), *turned = (bf16 *)out;
        narrow_all(given, k, x);
        std::fill(x + k, x + columns, bf16{0});
        for (int64_t i = 0; i < columns; i += STRIDE)
            for (int64_t j = 0; j < STRIDE / 4; j++)
                for (int64_t part = 0; part < 4; part++) turned[i + part * (STRIDE / 4) + j] = x[i + 4 * j + part];
        float *sums = out + columns / 2;
        for (int64_t i = 0; zeros && i < columns; i += 8) {
            float sum = 0;
            for (int64_t j = i; j < i + 8; j++) sum += widen(x[j]);
            sums[i / 8] = sum;
        }
    }

    __m512i table() const {
        struct alignas(64) Numbers {
            bf16 of[2][PAIR];  // less 8, as they are
            Numbers() {
                for (int i = 0; i < PAIR; i++) {
                    narrow(float(i % 16 - 8), of[0] + i);
                    narrow(float(i % 16), of[1] + i);
                }
            }
        };
        static const Numbers numbers;
        return _mm512_load_si512(numbers.of[zeros ? 1 : 0]);
    }

    // One register of R rows times N of x. ONE: a scale and a zero point are those of the whole register.
    template <int R, int N, bool ONE, bool ZEROS>
    INLINE void step(const __m512i (&v)[R], const float *scale, const float *zero, const bf16 *in, int64_t ld, int64_t i, int64_t g,
                     __m512i numbers, sf (&total)[R][N]) const {
        const float *less = (const float *)in + registers() * STRIDE / 2;
        UNROLLED for (int r = 0; r < R; r++) {
            const float *own = scale + r * in_row, *none = zero + r * in_row;
            sp mine[4] = {nibble_pairs<0>(v[r], numbers), nibble_pairs<1>(v[r], numbers), nibble_pairs<2>(v[r], numbers),
                          nibble_pairs<3>(v[r], numbers)};
            sf by = {}, nothing = {};
            if (!ONE) by = by_word(own, i, g);
            if (!ONE && ZEROS) nothing = by_word(none, i, g);
            UNROLLED for (int n = 0; n < N; n++) {
                const bf16 *x = in + 2 * n * ld + i;
                sf found = {};
                UNROLLED for (int part = 0; part < 4; part++) found = add_pairs(found, mine[part], pairs_at(x + part * PAIR));
                if (ZEROS) found -= get(less + n * ld + i / 8) * (ONE ? all_lanes(none[g]) : nothing);
                total[r][n] += found * (ONE ? all_lanes(own[g]) : by);
            }
        }
    }

    struct Later {  // with byte b of row r, what lies at from + b * step + r * row is asked for
        const uint8_t *from;
        int64_t row, step;
    };

    // Sums of R rows with N of x; grids are those of the first.
    template <int R, int N, bool ONE, bool ZEROS>
    INLINE void sums(const uint8_t *first, Later later, const float *scale, const float *zero, const bf16 *in, int64_t ld,
                     __m512i numbers, sf (&total)[R][N]) const {
        int64_t i = 0, g = 0, end = group;
        __m512i v[R];
        for (; i + STRIDE <= k; i += STRIDE) {
            for (; i >= end; end += group) g++;
            UNROLLED for (int r = 0; r < R; r++) {
                __builtin_prefetch(later.from + i / 2 * later.step + r * later.row);
                v[r] = _mm512_loadu_si512(first + (r * k + i) / 2);
            }
            step<R, N, ONE, ZEROS>(v, scale, zero, in, ld, i, g, numbers, total);
        }
        if (i == k) return;
        for (; i >= end; end += group) g++;
        UNROLLED for (int r = 0; r < R; r++) v[r] = _mm512_maskz_loadu_epi8((1ull << (k - i) / 2) - 1, first + (r * k + i) / 2);
        step<R, N, ONE, ZEROS>(v, scale, zero, in, ld, i, g, numbers, total);
    }

    template <int N, bool ONE, bool ZEROS>
    void tile(const uint8_t *first, Later later, const float *scale, const float *zero, const float *in, int64_t ld,
              __m512i numbers, float *y, int64_t ldy) const {
        sf total[4][N] = {};
        const bf16 *x = (const bf16 *)in;
        sums<4, N, ONE, ZEROS>(first, later, scale, zero, x, ld, numbers, total);
        put_sums(total, 0, 0, y, ldy, false);
    }

    // At most BAND rows. What is asked for goes on behind them: another block of the matrix is read next.
    template <bool ONE, bool ZEROS>
    void band(int64_t first, int64_t rows, const float *in, int64_t ld, int64_t n, float *y, int64_t ldy) const {
        int64_t count = rows * in_row, tiles = (n + 3) / 4;
        float *scale = scratch(14, 2 * count), *zero = scale + count;
        const __m512i numbers = table();
        grid(first, rows, scale, nullptr);
        for (int64_t i = 0; ZEROS && i < count; i++) zero[i] = float(zeros[first * in_row + i]);
        ask_for_grid(first + rows, rows);
        int64_t r = 0;
        for (; r + 4 <= rows; r += 4) {
            const uint8_t *from = data + (first + r) * k / 2;
            // of one tile as it lies in memory; of several, each of which asks again, row by row
            Later later = tiles == 1 ? Later{from + STREAM_AHEAD, BYTES, 4} : Later{from + AHEAD, k / 2, 1};
            const float *by = scale + r * in_row, *none = zero + r * in_row;
            for (int64_t t = 0; t < tiles; t++) {  // tiles of even sizes
                int64_t begin = n * t / tiles, held = n * (t + 1) / tiles - begin;
                const float *x = in + begin * ld;
                float *out = y + begin * ldy + r;
                if (held == 1) tile<1, ONE, ZEROS>(from, later, by, none, x, ld, numbers, out, ldy);
                if (held == 2) tile<2, ONE, ZEROS>(from, later, by, none, x, ld, numbers, out, ldy);
                if (held == 3) tile<3, ONE, ZEROS>(from, later, by, none, x, ld, numbers, out, ldy);
                if (held == 4) tile<4, ONE, ZEROS>(from, later, by, none, x, ld, numbers, out, ldy);
            }
        }
        for (; r < rows; r++)
            for (int64_t i = 0; i < n; i++) {
                sf own[1][1] = {};
                const uint8_t *from = data + (first + r) * k / 2;
                const bf16 *x = (const bf16 *)(in + i * ld);
                sums<1, 1, ONE, ZEROS>(from, {from + STREAM_AHEAD, 0, 1}, scale + r * in_row, zero + r * in_row, x, ld, numbers, own);
                y[i * ldy + r] = sum_of(own[0][0]);
            }
    }

    void product(int64_t first, int64_t rows, const float *in, int64_t ld, int64_t n, float *y, int64_t ldy) const {
        bool one = group % STRIDE == 0 || in_row == 1;
        for (int64_t from = 0; from < rows; from += BAND) {
            int64_t some = std::min(BAND, rows - from);
            if (one && !zeros) band<true, false>(first + from, some, in, ld, n, y + from, ldy);
            if (one && zeros) band<true, true>(first + from, some, in, ld, n, y + from, ldy);
            if (!one && !zeros) band<false, false>(first + from, some, in, ld, n, y + from, ldy);
            if (!one && zeros) band<false, true>(first + from, some, in, ld, n, y + from, ldy);
        }
    }
};
#endif
