// Products with weights of eight and four bits on the CPU, included by kernels.cpp. A format prepares rows of x once and multiplies them
// with some rows of its matrix; `times` and `expert_times` are the same for all of them.

constexpr int64_t NIBBLES = 32;  // columns of a block of four-bit weights

// Rows of x are rounded before the product as config/quant.py names it. A scale covers a token or ACROSS_SCALE columns; UE8M0: a power
// of two.
enum Rounding { AS_GIVEN, FP8_TOKEN, FP8_GROUP, FP8_GROUP_UE8M0, INT8_TOKEN, INT8_GROUP };
constexpr int64_t ACROSS_SCALE = 128;
constexpr float LEAST_AMAX = 1e-4f;
constexpr float EIGHT = 127, WORD = 32512, E4M3 = 448;  // the largest numbers

// To e4m3's nearest, even where two are; |x| is not beyond its largest number.
inline float nearest_e4m3(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    u = (u + 0x7ffff + ((u >> 20) & 1)) & 0xfff00000;
    float normal;
    memcpy(&normal, &u, 4);
    // below 2^-6 numbers are 2^-9 apart
    return std::fabs(x) < 0.015625f ? std::nearbyint(x * 512) / 512 : normal;
}

inline float power_of_two(float scale) {  // the least that is not smaller
    int exponent;
    return std::frexp(scale, &exponent) == 0.5f ? scale : std::ldexp(1.f, exponent);
}

// The largest of |x|, NaN where a number is none: of such a token nothing is left, as by the definition.
inline float largest(const float *x, int64_t n) {
    uint32_t most = 0;  // numbers without a sign are in the order of their bits
    for (int64_t i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, x + i, 4);
        most = std::max(most, u & 0x7fffffff);
    }
    float found;
    memcpy(&found, &most, 4);
    return most < 0x7f800000 ? std::max(found, LEAST_AMAX) : std::numeric_limits<float>::quiet_NaN();
}

inline void round_in_place(float *x, int64_t k, int64_t kind) {
    if (kind == AS_GIVEN) return;
    bool whole = kind == FP8_TOKEN || kind == INT8_TOKEN, bytes = kind == INT8_TOKEN || kind == INT8_GROUP;
    int64_t step = whole ? k : ACROSS_SCALE;
    for (int64_t from = 0; from < k; from += step) {
        int64_t n = std::min(step, k - from);
        float *some = x + from, scale = largest(some, n) / (bytes ? EIGHT : E4M3);
        if (kind == FP8_GROUP_UE8M0 && scale == scale) scale = power_of_two(scale);
        for (int64_t i = 0; i < n; i++) {
            float steps = some[i] / scale;
            some[i] = (bytes ? std::nearbyint(steps) : nearest_e4m3(steps)) * scale;
        }
    }
}

// One token to eight bits with a scale of its own, to nearest even; returns the scale, NaN where a number is none.
template <class B>
float round_row(const float *x, int64_t k, B *out) {
    float scale = largest(x, k) / EIGHT;
    if (scale != scale) {
        std::fill(out, out + k, B(0));
        out[0] = 1;
        return scale;
    }
    // divided as by the definition: times an inverse some would fall to the other side of a half
    for (int64_t i = 0; i < k; i++) out[i] = B(std::nearbyint(x[i] / scale));
    return scale;
}

// W8A8: data [rows, k] int8, a scale for each row and `group` columns. A row of x is its scale and, a line further, its bytes; where
// no instruction multiplies bytes with a sign (HALVES), its even and its odd bytes as words, a register of either in turn.
struct Int8 {
    const int8_t *data;
    const float *scales;
    int64_t k, group;

    Int8 at(int64_t expert, int64_t rows) const { return {data + expert * rows * k, scales + expert * rows * (k / group), k, group}; }
    int64_t whole() const { return edged(k); }  // bytes of a row of x, a register's and a unit's edge
    int64_t apart_in() const { return 16 + padded(whole() / (HALVES ? 2 : 4)); }

    void prepare(const float *x, float *out) const {
        if (!HALVES) {
            int8_t *bytes = (int8_t *)(out + 16);
            out[0] = round_row(x, k, bytes);
            std::fill(bytes + k, (int8_t *)(out + apart_in()), int8_t(0));
            return;
        }
        int16_t *words = (int16_t *)(out + 16), *plain = (int16_t *)scratch(13, whole() / 2);
        std::fill(plain, plain + whole(), int16_t(0));
        out[0] = round_row(x, k, plain);
        for (int64_t i = 0; i < whole(); i += BYTES)
            for (int j = 0; j < BYTES / 2; j++) {
                words[i + j] = plain[i + 2 * j];
                words[i + BYTES / 2 + j] = plain[i + 2 * j + 1];
            }
    }

    // The products of a register of bytes, `mine`, with columns i and on of every row of x.
    template <int R, int N>
    static INLINE void add(si (&sums)[R][N], const sb (&mine)[R], const float *in, int64_t ld, int64_t i) {
        UNROLLED for (int n = 0; n < N; n++)
            UNROLLED for (int r = 0; r < R; r++) sums[r][n] = add_bytes(sums[r][n], mine[r], in + n * ld + 16, i);
    }

    // A group begins on a register's edge, or is the only one.
    template <int R, int N>
    void tile(int64_t r0, const float *in, int64_t ld, float *y, int64_t ldy) const {
        const int8_t *w = data + r0 * k;
        sf total[R][N] = {};
        for (int64_t g = 0; g < k; g += group) {
            si sums[R][N] = {};
            int64_t i = g;
            for (; i + BYTES <= g + group; i += BYTES) {
                sb mine[R];
                UNROLLED for (int r = 0; r < R; r++) {
                    mine[r] = fetch<sb>(w + r * k + i);
                    ASK_FOR(w + STREAM_AHEAD + i * R + r * BYTES);
                }
                add<R, N>(sums, mine, in, ld, i);
            }
            if (i < g + group) {
                sb mine[R] = {};
                UNROLLED for (int r = 0; r < R; r++) memcpy(&mine[r], w + r * k + i, g + group - i);
                add<R, N>(sums, mine, in, ld, i);
            }
            UNROLLED for (int r = 0; r < R; r++) {
                float scale = scales[((r0 + r) * k + g) / group];
                UNROLLED for (int n = 0; n < N; n++) total[r][n] += __builtin_convertvector(sums[r][n], sf) * scale;
            }
        }
        UNROLLED for (int n = 0; n < N; n++)
            UNROLLED for (int r = 0; r < R; r++) total[r][n] *= in[n * ld];
        if constexpr (R == 4)
            put_sums(total, 0, 0, y, ldy, false);
        else
            UNROLLED for (int n = 0; n < N; n++)
                UNROLLED for (int r = 0; r < R; r++) y[n * ldy + r] = sum_of(total[r][n]);
    }

    template <int R>
    void some_rows(int64_t first, const float *in, int64_t ld, int64_t n, float *y, int64_t ldy) const {
        int64_t i = 0;
        for (; i + AT_ONCE <= n; i += AT_ONCE) tile<R, AT_ONCE>(first, in + i * ld, ld, y + i * ldy, ldy);
        for (; i < n; i++) tile<R, 1>(first, in + i * ld, ld, y + i * ldy, ldy);
    }

    // PANEL rows at most, on a unit that multiplies bytes.
    void unit_band(int64_t first, int64_t rows, const float *in, int64_t ld, int64_t n, char *panel, float *y, int64_t ldy) const {
        int64_t length = whole(), groups = k / group;
        alignas(64) int32_t sums[CHUNK * PANEL];
        alignas(64) float total[CHUNK * PANEL];
        turn_panel((const char *)(data + first * k), k, rows, k, panel);
        float *own = scratch(14, groups * PANEL);
        for (int64_t r = 0; r < PANEL; r++)
            for (int64_t g = 0; g < groups; g++) own[g * PANEL + r] = scales[(first + std::min(r, rows - 1)) * groups + g];
        for (int64_t i = 0; i < n; i += CHUNK) {
            int64_t count = std::min(CHUNK, n - i);
            std::fill(total, total + count * PANEL, 0.f);
            for (int64_t g = 0; g < groups; g++) {
                int64_t bytes = groups == 1 ? length : group;
                panel_product<int8_t>(panel, length, g * group, bytes, (const char *)(in + i * ld + 16), ld * 4, count, sums);
                for (int64_t t = 0; t < count; t++)
                    for (int64_t r = 0; r < PANEL; r++) total[t * PANEL + r] += float(sums[t * PANEL + r]) * own[g * PANEL + r];
            }
            for (int64_t t = 0; t < count; t++)
                for (int64_t r = 0; r < rows; r++) y[(i + t) * ldy + r] = total[t * PANEL + r] * in[(i + t) * ld];
        }
    }

    void product(int64_t first, int64_t rows, const float *in, int64_t ld, int64_t n, float *y, int64_t ldy) const {
        if (on_unit(data, n)) {
            UnitScope scope;
            (void)scope;
            char *panel = (char *)scratch(12, PANEL * whole() / 4);
            for (int64_t r = 0; r < rows; r += PANEL) unit_band(first + r, std::min(PANEL, rows - r), in, ld, n, panel, y + r, ldy);
            return;
        }
        for (int64_t some = 0; some < n; some += HELD) {
            const float *x = in + some * ld;
            float *into = y + some * ldy;
            int64_t r = 0, count = std::min(HELD, n - some);
            for (; r + 4 <= rows; r += 4) some_rows<4>(first + r, x, ld, count, into + r, ldy);
            for (; r < rows; r++) some_rows<1>(first + r, x, ld, count, into + r, ldy);
        }
    }
};

// Four bits: data [rows, k / 2], column 2 j in the lower half of byte j; a weight is (nibble - zero) * scale, both for each row and
// `group` columns, the last of which may be cut off. As reference.Weight has them: nothing is packed, and a weight that is written
// anew needs no one to know.
//
// Where groups are whole blocks of NIBBLES columns, x stands in blocks of their even, then of their odd columns. The upper half stays
// where it is in its byte, sixteen times as large, and x is divided by that.
struct Int4 {
    const uint8_t *data;
    const void *scales;
    const uint8_t *zeros;  // none: 8
    int64_t k, group, in_row, wide_scales, rounding;  // in_row: groups of a row. A division takes as long as many products

    static constexpr int64_t ACROSS_BLOCKS = BYTES / 16;  // blocks whose nibbles fill a register

    int64_t groups() const { return in_row; }
    bool blocks() const { return group % NIBBLES == 0 && in_row * group == k; }
    Int4 at(int64_t expert, int64_t rows) const {
        int64_t held = expert * rows * in_row;
        Int4 other = *this;
        other.data += expert * rows * (k / 2);
        other.scales = (const char *)scales + held * (wide_scales ? 4 : 2);
        if (zeros) other.zeros += held;
        return other;
    }

    // Of some rows: scales, and, unless they are not wanted, scales times zero points.
    void grid(int64_t first, int64_t rows, float *scale, float *offset) const {
        int64_t from = first * in_row, count = rows * in_row;
        if (wide_scales)
            widen_all((const float *)scales + from, count, scale);
        else
            widen_all((const bf16 *)scales + from, count, scale);
        for (int64_t i = 0; offset && i < count; i++) offset[i] = scale[i] * (zeros ? float(zeros[from + i]) : 8.f);
    }

    // Of PANEL rows, `rows` of which there are, scales and zero points of `count` groups, group by group; zero points as `word` has them.
    // Room for padded(count) * PANEL numbers each.
    template <class F>
    void turned_grid(int64_t first, int64_t rows, int64_t group_, int64_t count, float *scale, uint32_t *zero, F word) const {
        float *plain = scratch(11, 2 * PANEL * count);
        uint32_t *words = (uint32_t *)(plain + PANEL * count);
        for (int64_t r = 0; r < rows; r++) {
            int64_t from = (first + r) * in_row + group_;
            if (wide_scales)
                widen_all((const float *)scales + from, count, plain + r * count);
            else
                widen_all((const bf16 *)scales + from, count, plain + r * count);
            for (int64_t g = 0; zeros && g < count; g++) words[r * count + g] = word(zeros[from + g]);
        }
        turn_grid(plain, rows, count, scale);
        if (zeros) turn_grid((const float *)words, rows, count, (float *)zero);
    }

    // Words of any kind: nothing is computed.
    static void turn_grid(const float *plain, int64_t rows, int64_t count, float *out) {
#if defined(__AVX512BW__)
        for (int64_t half = 0; half < PANEL; half += SPAN) turn_words(plain, count, rows, count, half, out);
#else
        for (int64_t r = 0; r < rows; r++)
            for (int64_t g = 0; g < count; g++) memcpy(out + g * PANEL + r, plain + r * count + g, sizeof(float));
#endif
    }

    // Scales and zero points of some rows are read soon: no one waits for them then.
    void ask_for_grid(int64_t first, int64_t rows) const {
        constexpr int64_t STEP_BYTES = 64;  // of a cache line
        int64_t each = wide_scales ? 4 : 2, from = first * in_row, count = rows * in_row;
        for (int64_t i = 0; i < count * each; i += STEP_BYTES) __builtin_prefetch((const char *)scales + from * each + i);
        for (int64_t i = 0; zeros && i < count; i += STEP_BYTES) __builtin_prefetch(zeros + from + i);
    }

    // Of each word of the register from column i on, in group g.
    INLINE sf by_word(const float *each, int64_t i, int64_t g) const {
        if (group % (ACROSS_BLOCKS * NIBBLES) == 0 || in_row == 1) return all_lanes(each[g]);
#if defined(__AVX2__)
        if (group <= ACROSS_BLOCKS / 2 * NIBBLES) return each_block(each + g, group / NIBBLES, groups() - g);
#endif
        sf out;
        for (int b = 0; b < ACROSS_BLOCKS; b++)
            for (int j = 0; j < 4; j++) out[4 * b + j] = each[std::min(i + b * NIBBLES, k - 1) / group];
        return out;
    }
};

// W4A16, or activations rounded and multiplied in fp32. A row of x is followed by its sums over groups.
struct Int4Wide : Int4 {
    Int4Wide at(int64_t expert, int64_t rows) const { return {Int4::at(expert, rows)}; }
    int64_t apart_in() const { return apart(k) + padded(groups()); }

    void prepare(const float *given, float *out) const {
        float *sums = out + apart(k), *x = scratch(13, k);
        std::copy(given, given + k, x);
        round_in_place(x, k, rounding);
        std::fill(out + k, out + apart_in(), 0.f);
        if (!blocks()) {
            std::copy(x, x + k, out);
            return;
        }
        for (int64_t i = 0; i < k; i += NIBBLES) {
            float sum = 0;
            for (int64_t j = 0; j < 16; j++) {
                out[i + j] = x[i + 2 * j];
                out[i + 16 + j] = x[i + 2 * j + 1] / 16;
                sum += x[i + 2 * j] + x[i + 2 * j + 1];
            }
            sums[i / group] += sum;
        }
    }

    // Each half block is as many registers as it takes.
    template <int R>
    void stream(int64_t first, const float *scale, const float *x, float *y) const {
        constexpr int PIECES = 16 / SPAN;
        const uint8_t *later = data + first * k / 2 + STREAM_AHEAD;
        sf total[R] = {};
        for (int64_t g = 0; g < groups(); g++) {
            sf acc[R] = {};
            for (int64_t i = g * group; i < (g + 1) * group; i += NIBBLES)
                UNROLLED for (int p = 0; p < PIECES; p++) {
                    sf low = get(x + i + p * SPAN), high = get(x + i + 16 + p * SPAN);
                    UNROLLED for (int r = 0; r < R; r++) {
                        const uint8_t *at = data + ((first + r) * k + i) / 2 + p * SPAN;
                        __builtin_prefetch(later + i / 2 * R + (r * PIECES + p) * SPAN);
                        sf first_half, second_half;
                        widen_nibbles(at, &first_half, &second_half);
                        acc[r] += first_half * low;
                        acc[r] += second_half * high;
                    }
                }
            UNROLLED for (int r = 0; r < R; r++) total[r] += acc[r] * scale[r * groups() + g];
        }
        UNROLLED for (int r = 0; r < R; r++) y[r] = sum_of(total[r]);
    }

    // Columns `from` and on of some rows, widened, in the order of x.
    void widen_block(int64_t first, int64_t rows, const float *scales_, const float *offsets, int64_t from, int64_t columns, float *out,
                     int64_t ld) const {
        int64_t begin = from / group, into_group = from % group;
        for (int64_t r = 0; r < rows; r++) {
            int64_t g = r * groups() + begin, left = group - into_group;
            for (int64_t i = 0; i < columns; i += NIBBLES, left -= NIBBLES) {
                if (!left) {
                    g++;
                    left = group;
                }
                const uint8_t *at = data + ((first + r) * k + from + i) / 2;
                float scale = scales_[g], offset = offsets[g], *into = out + r * ld + i;
                for (int j = 0; j < 16; j += SPAN) {
                    sf low, high;
                    widen_nibbles(at + j, &low, &high);
                    put(low * scale - offset, into + j);
                    put(high * scale - 16 * offset, into + 16 + j);
                }
            }
        }
    }

    // The same of any group, in the order of columns.
    void widen_any(int64_t first, int64_t rows, const float *scales_, const float *offsets, int64_t from, int64_t columns, float *out,
                   int64_t ld) const {
        for (int64_t r = 0; r < rows; r++) {
            const uint8_t *row = data + (first + r) * k / 2;
            for (int64_t i = from, end; i < from + columns; i = end) {
                int64_t g = i / group;
                end = std::min(from + columns, (g + 1) * group);
                float scale = scales_[r * groups() + g], offset = offsets[r * groups() + g], *into = out + r * ld + i - from;
                for (int64_t j = 0; j < (end - i) / 2; j++) {
                    into[2 * j] = float(row[i / 2 + j] & 15) * scale - offset;
                    into[2 * j + 1] = float(row[i / 2 + j] >> 4) * scale - offset;
                }
            }
        }
    }

    // At most BAND rows.
    void band(int64_t first, int64_t rows, const float *in, int64_t ld, int64_t n, float *y, int64_t ldy) const {
        float *scale = scratch(14, 2 * rows * in_row + n * rows), *offset = scale + rows * in_row, *less = offset + rows * in_row;
        grid(first, rows, scale, offset);
        if (n <= 2 && blocks()) {
            for (int64_t i = 0; i < n; i++) {
                const float *x = in + i * ld;
                int64_t r = 0;
                for (; r + 4 <= rows; r += 4) stream<4>(first + r, scale + r * in_row, x, y + i * ldy + r);
                for (; r < rows; r++) stream<1>(first + r, scale + r * in_row, x, y + i * ldy + r);
            }
            dots(offset, in_row, rows, in + apart(k), ld, n, in_row, less, rows);
            for (int64_t i = 0; i < n * rows; i++) y[i / rows * ldy + i % rows] -= less[i];
            return;
        }
        float *wide = scratch(13, BAND * (DEPTH + PAIR));
        for (int64_t deep = 0; deep < k; deep += DEPTH) {
            int64_t columns = std::min(DEPTH, k - deep);
            if (blocks())
                widen_block(first, rows, scale, offset, deep, columns, wide, DEPTH + PAIR);
            else
                widen_any(first, rows, scale, offset, deep, columns, wide, DEPTH + PAIR);
            dots_block(wide, DEPTH + PAIR, rows, in + deep, ld, n, columns, y, ldy, deep > 0);
        }
    }

    void product(int64_t first, int64_t rows, const float *in, int64_t ld, int64_t n, float *y, int64_t ldy) const {
        for (int64_t some = 0; some < n; some += HELD)
            for (int64_t from = 0; from < rows; from += BAND)
                band(first + from, std::min(BAND, rows - from), in + some * ld, ld, std::min(HELD, n - some), y + some * ldy + from, ldy);
    }
};

// Activations as whole numbers, groups of whole blocks. One plane: eight bits with a scale a token (W4A8). Two: sixteen bits, an upper
// and a lower byte, with a scale a register of nibbles: for activations that were bf16, of which far more is lost before.
//
// Bytes stand as the nibbles do: of two or four blocks first the even columns. Behind them, in floats: of each word of a register the
// sum of its columns, times the zero point where that is 8 for all; then the scales.
template <int PLANES>
struct Int4Bytes : Int4 {
    static constexpr int64_t STRIDE = ACROSS_BLOCKS * NIBBLES;  // columns of a register of nibbles

    Int4Bytes at(int64_t expert, int64_t rows) const { return {Int4::at(expert, rows)}; }
    int64_t registers() const { return (k + STRIDE - 1) / STRIDE; }
    int64_t apart_in() const { return registers() * (STRIDE * PLANES / 4 + SPAN) + padded(registers()); }

    void prepare(const float *given, float *out) const {
        int64_t count = registers();
        int8_t *bytes = (int8_t *)out;
        float *sums = out + count * STRIDE * PLANES / 4, *scale = sums + count * SPAN, *x = scratch(13, count * STRIDE);
        std::copy(given, given + k, x);
        std::fill(x + k, x + count * STRIDE, 0.f);
        if (PLANES > 1) round_in_place(x, k, rounding);
        float most = PLANES > 1 ? 0 : largest(x, k);
        for (int64_t i = 0; i < count; i++, bytes += STRIDE * PLANES) {
            float *some = x + i * STRIDE;
            scale[i] = PLANES > 1 ? largest(some, STRIDE) / WORD : most / EIGHT;
            int32_t whole[STRIDE];
            if (scale[i] == scale[i])
                for (int64_t j = 0; j < STRIDE; j++) whole[j] = int32_t(std::nearbyint(some[j] / scale[i]));
            else
                std::fill(whole, whole + STRIDE, 1);
            for (int64_t w = 0; w < SPAN; w++) {
                int32_t sum = 0;
                for (int64_t j = 8 * w; j < 8 * w + 8; j++) sum += whole[j];
                sums[i * SPAN + w] = float(zeros ? sum : 8 * sum);
            }
            for (int64_t half = 0; half < 2; half++)
                for (int64_t j = 0; j < BYTES; j++) {
                    int32_t number = whole[2 * j + half], upper = (number + 128) >> 8;
                    bytes[half * BYTES + j] = int8_t(PLANES > 1 ? number - 256 * upper : number);
                    if (PLANES > 1) bytes[STRIDE + half * BYTES + j] = int8_t(upper);
                }
        }
    }

    // Adds the products of register number `at` of R rows, which begins in group g. ONE: its columns are of one group.
    template <int R, int N, bool ZEROS, bool ONE>
    INLINE void add_register(const ub (&mine)[R], const float *scale, const float *zero, const float *in, int64_t ld, int64_t at, int64_t g,
                             sf (&total)[R][N]) const {
        const ub fifteen = ub{} + 15;
        const float *sums = in + registers() * STRIDE * PLANES / 4, *factors = sums + registers() * SPAN;
        constexpr int EACH = 2 * PLANES;  // registers of a row of x
        sb one[EACH] = {};
        UNROLLED for (int j = 0; N == 1 && j < EACH; j++) {
            one[j] = fetch<sb>((const int8_t *)in + at * STRIDE * PLANES + j * BYTES);
            hold(one[j]);
        }
        UNROLLED for (int r = 0; r < R; r++) {
            ub own = mine[r];
            hold(own);
            ub even = own & fifteen, odd = nibbles_above(own);
            int64_t first = r * groups();
            sf by = ONE ? all_lanes(scale[first + g]) : by_word(scale + first, at * STRIDE, g), none = {};
            if (ZEROS) none = ONE ? all_lanes(zero[first + g]) : by_word(zero + first, at * STRIDE, g);
            UNROLLED for (int n = 0; n < N; n++) {
                sb x[EACH];
                UNROLLED for (int j = 0; j < EACH; j++)
                    x[j] = N == 1 ? one[j] : fetch<sb>((const int8_t *)(in + n * ld) + at * STRIDE * PLANES + j * BYTES);
                si found = small_products(even, x[0], odd, x[1]);
                if (PLANES > 1) found += small_products(even, x[EACH - 2], odd, x[EACH - 1]) << 8;
                sf less = get(sums + n * ld + at * SPAN);
                sf wide = __builtin_convertvector(found, sf) - (ZEROS ? none * less : less);
                total[r][n] += PLANES > 1 ? wide * (by * factors[n * ld + at]) : wide * by;
            }
        }
    }

    // R rows, whose scales and zero points are given.
    template <int R, int N, bool ZEROS, bool ONE>
    void tile(int64_t first, const float *scale, const float *zero, const float *in, int64_t ld, float *y, int64_t ldy) const {
        sf total[R][N] = {};
        int64_t half = k / 2, at = 0, g = 0, end = group;
        const uint8_t *from = data + first * half, *later = from + STREAM_AHEAD;
        for (; (at + 1) * STRIDE <= k; at++) {
            for (; at * STRIDE >= end; end += group) g++;
            ub mine[R];
            UNROLLED for (int r = 0; r < R; r++) {
                mine[r] = fetch<ub>(from + r * half + at * BYTES);
                __builtin_prefetch(later + (at * R + r) * BYTES);
            }
            add_register<R, N, ZEROS, ONE>(mine, scale, zero, in, ld, at, g, total);
        }
        if (at * STRIDE < k) {
            for (; at * STRIDE >= end; end += group) g++;
            ub mine[R] = {};
            UNROLLED for (int r = 0; r < R; r++) memcpy(&mine[r], from + r * half + at * BYTES, half - at * BYTES);
            add_register<R, N, ZEROS, ONE>(mine, scale, zero, in, ld, at, g, total);
        }
        const float *factors = in + registers() * (STRIDE * PLANES / 4 + SPAN);
        for (int n = 0; PLANES == 1 && n < N; n++)
            for (int r = 0; r < R; r++) total[r][n] *= factors[n * ld];
        if constexpr (R == 4)
            put_sums(total, 0, 0, y, ldy, false);
        else
            UNROLLED for (int r = 0; r < R; r++)
                UNROLLED for (int n = 0; n < N; n++) y[n * ldy + r] = sum_of(total[r][n]);
    }

    void product(int64_t first, int64_t rows, const float *in, int64_t ld, int64_t n, float *y, int64_t ldy) const {
        for (int64_t from = 0; from < rows; from += BAND) band(first + from, std::min(BAND, rows - from), in, ld, n, y + from, ldy);
    }

    // At most BAND rows.
    void band(int64_t first, int64_t rows, const float *in, int64_t ld, int64_t n, float *y, int64_t ldy) const {
        bool one = group % STRIDE == 0 || in_row == 1;
        if (one && !zeros) some_rows<false, true>(first, rows, in, ld, n, y, ldy);
        if (one && zeros) some_rows<true, true>(first, rows, in, ld, n, y, ldy);
        if (!one && !zeros) some_rows<false, false>(first, rows, in, ld, n, y, ldy);
        if (!one && zeros) some_rows<true, false>(first, rows, in, ld, n, y, ldy);
    }

    template <bool ZEROS, bool ONE>
    void some_rows(int64_t first, int64_t rows, const float *in, int64_t ld, int64_t n, float *y, int64_t ldy) const {
        int64_t count = rows * in_row;
        float *scale = scratch(14, 2 * count), *zero = scale + count;
        grid(first, rows, scale, nullptr);
        for (int64_t i = 0; ZEROS && i < count; i++) zero[i] = float(zeros[first * in_row + i]);
        for (int64_t r = 0; r < rows;) {
            int64_t i = 0, row = first + r;
            const float *own = scale + r * in_row, *none = zero + r * in_row;
            bool four = r + 4 <= rows;
            for (; four && i + AT_ONCE <= n; i += AT_ONCE) tile<4, AT_ONCE, ZEROS, ONE>(row, own, none, in + i * ld, ld, y + i * ldy + r, ldy);
            for (; four && i < n; i++) tile<4, 1, ZEROS, ONE>(row, own, none, in + i * ld, ld, y + i * ldy + r, ldy);
            for (; !four && i < n; i++) tile<1, 1, ZEROS, ONE>(row, own, none, in + i * ld, ld, y + i * ldy + r, ldy);
            r += four ? 4 : 1;
        }
    }
};

inline sf as_floats(const float *at) { return get(at); }
inline sf as_floats(const int32_t *at) { return __builtin_convertvector(fetch<si>(at), sf); }

// Sums of G groups, each [n, PANEL], times the groups' scales of PANEL rows: added to `total` [n, PANEL], or put there.
template <int G, class S>
INLINE void add_groups(const S (&sums)[G][CHUNK * PANEL], const float *scale, int64_t n, float *total, bool more) {
    for (int64_t c = 0; c < PANEL; c += SPAN) {
        sf own[G];
        UNROLLED for (int i = 0; i < G; i++) own[i] = get(scale + i * PANEL + c);
        for (int64_t t = 0; t < n; t++) {
            float *at = total + t * PANEL + c;
            sf sum = {};
            if (more) sum = get(at);
            UNROLLED for (int i = 0; i < G; i++) sum += as_floats(sums[i] + t * PANEL + c) * own[i];
            put(sum, at);
        }
    }
}

#include "int4_pairs.h"
#include "int4_panels.h"
#include "int4_byte_panels.h"

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
template <class M, class T, class Y>
void times(const M &m, const T *x, const T *bias, Y *y, int64_t n, int64_t rows) {
    int64_t block = block_rows(rows, n), ld = m.apart_in();
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

// The rows of one expert's picks side by side.
inline const float *copied_rows(const float *in, const int64_t *picks, int64_t count, int64_t top_k, int64_t ldx) {
    float *rows = scratch(9, count * ldx);
    for (int64_t i = 0; i < count; i++) {
        const float *row = in + picks[i] / top_k * ldx;
        std::copy(row, row + ldx, rows + i * ldx);
    }
    return rows;
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
    int64_t width = block_rows(2 * used * size, n * top_k / std::max<int64_t>(1, used)), blocks = (2 * size + width - 1) / width;
    share(used * blocks, 2 * work, [=, &gate_up](int64_t unit) {
        Group e = groups[unit / blocks];
        int64_t from = unit % blocks * width;
        const float *rows = e.count == 1 ? in + order[e.first] / top_k * ldx : copied_rows(in, order + e.first, e.count, top_k, ldx);
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
    int64_t height = block_rows(used * hidden, n * top_k / std::max<int64_t>(1, used)), bands = (hidden + height - 1) / height;
    share(used * bands, work, [=, &down](int64_t unit) {
        Group e = groups[unit / bands];
        int64_t from = unit % bands * height, rows = std::min(height, hidden - from);
        float *sums = scratch(10, e.count * rows);
        down.at(e.slot, hidden).product(from, rows, g + e.first * ldg, ldg, e.count, sums, rows);
        for (int64_t i = 0; i < e.count; i++) std::copy(sums + i * rows, sums + (i + 1) * rows, out + order[e.first + i] * hidden + from);
    });
    sum_picks(ids, weights, out, y, n, top_k, hidden);
}

enum Bits { W8A8, W4A16, W4A16_BLOCKS, W4A8 };  // blocks: groups of whole ones

// A matrix as native.py hands it over.
struct Packed {
    int64_t format, rows, k, group, wide_scales, rounding;
    const void *data, *scales;
    const uint8_t *zeros;

    Int4 four() const { return {(const uint8_t *)data, scales, zeros, k, group, (k + group - 1) / group, wide_scales, rounding}; }
};

constexpr int64_t FEWEST_FOUR = 5;  // rows from which int4 is widened to a panel for AMX

// Whether int4 becomes a panel of bytes, for n rows of bytes.
inline bool bytes_on_unit(int64_t n) {
#if defined(__AVX512BF16__)
    if (amx_here()) return n >= 7;
#endif
    return unit_takes((const int8_t *)nullptr) && n >= PACKED;
}

// `given` and `n`: the type and number of the rows to multiply with. Whole numbers are the faster form of few rows.
template <class X, class F>
void with_format(const Packed &p, int64_t n, const X *given, F body) {
    (void)given;
    if (p.format == W8A8) return body([](const Packed &m) { return Int8{(const int8_t *)m.data, (const float *)m.scales, m.k, m.group}; });
#if defined(__AVX512BF16__)
    if (p.format == W4A16_BLOCKS && p.rounding == AS_GIVEN && std::is_same<X, bf16>::value) {
        if (n < (amx_here() ? FEWEST_FOUR : PACKED)) return body([](const Packed &m) { return Int4Pairs{m.four()}; });
        return body([](const Packed &m) { return Int4Panels{m.four()}; });
    }
#endif
    if (p.format == W4A8 && bytes_on_unit(n)) return body([](const Packed &m) { return Int4BytePanels{m.four()}; });
    if (p.format == W4A8 && n < PACKED) return body([](const Packed &m) { return Int4Bytes<1>{m.four()}; });
    if (p.format == W4A16_BLOCKS && n <= FEW_ROWS && std::is_same<X, bf16>::value)
        return body([](const Packed &m) { return Int4Bytes<2>{m.four()}; });
    body([](const Packed &m) { return Int4Wide{m.four()}; });
}

template <class T, class Y>
void times_packed(const Packed &p, const T *x, const T *bias, Y *y, int64_t n) {
    with_format(p, n, x, [=, &p](auto matrix) { times(matrix(p), x, bias, y, n, p.rows); });
}
