// Attention to a paged cache on the CPU, included by kernels.cpp: queries of heads that share keys against one request's entries.

template <class T>
struct Paged {  // where a request's entries are: slot * stride, by its block table
    const T *keys, *values;
    int64_t key_stride, value_stride;
    const int64_t *tables;
    int64_t width, page;
};

constexpr int64_t STEP = 4 * LANES;  // entries between two looks at the running softmax
// Entries that one thread goes through. Fixed, so that a sum does not depend on the threads or the requests beside it.
constexpr int64_t PART = 512;

struct Run {  // entries that lie side by side
    int64_t slot, count;
};

// Entries `first` and on of a request, at most `most`, in runs; returns how many runs.
template <class T>
int64_t runs_of(const Paged<T> &cache, const int64_t *table, int64_t first, int64_t most, Run *runs) {
    int64_t found = 0;
    for (int64_t done = 0; done < most; found++) {
        int64_t at = first + done, within = at % cache.page;
        runs[found] = {table[at / cache.page] * cache.page + within, std::min(most - done, cache.page - within)};
        done += runs[found].count;
    }
    return found;
}

// The new weights of one head, in place, and what they do to its peak and mass; returns the factor for what was summed before.
inline float weigh_step(float *scores, int64_t count, float *peak, float *mass) {
    constexpr float NEVER = -std::numeric_limits<float>::infinity();
    std::fill(scores + count, scores + STEP, NEVER);
    sf high[REGISTERS], sum[REGISTERS] = {};
    UNROLLED for (int r = 0; r < REGISTERS; r++) high[r] = get(scores + r * SPAN);
    for (int64_t i = LANES; i < STEP; i += LANES)
        UNROLLED for (int r = 0; r < REGISTERS; r++) high[r] = larger(get(scores + i + r * SPAN), high[r]);
    float top = std::max(*peak, highest(lanes_of(high)));
    // what is beyond `count` weighs nothing in the sum
    for (int64_t i = 0; i < count; i += LANES)
        UNROLLED for (int r = 0; r < REGISTERS; r++) {
            float *some = scores + i + r * SPAN;
            sf w = exp_register(get(some) - top);
            put(w, some);
            if (i + LANES > count)
                for (int j = 0; j < SPAN; j++)
                    if (i + r * SPAN + j >= count) w[j] = 0;
            sum[r] += w;
        }
    float shrink = *peak == top ? 1 : std::exp(*peak - top);
    *mass = *mass * shrink + total(lanes_of(sum));
    *peak = top;
    return shrink;
}

// Queries [heads, d], spread and scaled, against entries `first` to `last`; keys and values begin `offset` into an entry. sums [heads,
// dv], spread, are divided by nothing yet; state holds a peak and a mass a head.
template <class T>
void attend(const float *q, int64_t ldq, int64_t heads, int64_t d, int64_t dv, const Paged<T> &cache, int64_t offset, const int64_t *table,
            int64_t first, int64_t last, float *sums, int64_t lds, float *state) {
    float *scores = scratch(6, heads * STEP);
    Run runs[STEP];
    std::fill(sums, sums + heads * lds, 0.f);
    for (int64_t h = 0; h < heads; h++) {
        state[2 * h] = -std::numeric_limits<float>::infinity();
        state[2 * h + 1] = 0;
    }
    for (int64_t start = first; start < last; start += STEP) {
        int64_t count = std::min(STEP, last - start), found = runs_of(cache, table, start, count, runs);
        for (int64_t r = 0, at = 0; r < found; at += runs[r++].count)
            dots(cache.keys + offset + runs[r].slot * cache.key_stride, cache.key_stride, runs[r].count, q, ldq, heads, d, scores + at, STEP);
        for (int64_t h = 0; h < heads; h++) {
            float shrink = weigh_step(scores + h * STEP, count, state + 2 * h, state + 2 * h + 1);
            for (int64_t i = 0; shrink != 1 && i < padded(dv); i++) sums[h * lds + i] *= shrink;
        }
        for (int64_t r = 0, at = 0; r < found; at += runs[r++].count)
            mixes(scores + at, STEP, heads, cache.values + offset + runs[r].slot * cache.value_stride, cache.value_stride, runs[r].count, dv,
                  sums, lds);
    }
}

// One head's parts, `apart_` floats apart, as one: out [dv], spread.
inline void join_parts(const float *sums, int64_t apart_, const float *state, int64_t state_apart, int64_t parts, int64_t size, float *out) {
    float peak = state[0], mass = 0;
    for (int64_t p = 1; p < parts; p++) peak = std::max(peak, state[p * state_apart]);
    std::fill(out, out + size, 0.f);
    for (int64_t p = 0; p < parts; p++) {
        const float *own = state + p * state_apart;
        float factor = own[0] == peak ? 1 : std::exp(own[0] - peak);
        mass += own[1] * factor;
        for (int64_t i = 0; i < size; i++) out[i] += sums[p * apart_ + i] * factor;
    }
    for (int64_t i = 0; i < size; i++) out[i] /= mass;
}

// Into how many blocks of heads each of `count` units is cut, so that every thread has work. Where there are PACKED heads, from which on
// products add up in another order, every block has as many: so sums are the same.
inline int64_t head_blocks(int64_t count, int64_t heads) {
    int64_t least = heads < PACKED ? 4 : PACKED;
    return std::max<int64_t>(1, std::min<int64_t>((max_threads + count - 1) / count, heads / least));
}

// Queries [n, groups, heads, d], spread and scaled, of n requests; `group_offset`: from a group's entries to the next's. out [n, groups,
// heads, dv], spread, ldo apart. Long requests are cut into parts for several threads, and a few short ones into blocks of heads.
template <class T>
void attend_all(const float *q, int64_t ldq, int64_t n, int64_t groups, int64_t heads, int64_t d, int64_t dv, const Paged<T> &cache,
                int64_t group_offset, const int64_t *lens, float *out, int64_t ldo) {
    struct Unit {
        int64_t request, group, part;
    };
    static thread_local std::vector<Unit> all;
    static thread_local std::vector<int64_t> firsts;  // of a request's group, its first unit
    all.clear();
    firsts.clear();
    int64_t cached = 0;
    for (int64_t t = 0; t < n; t++) {
        cached += lens[t];
        for (int64_t g = 0; g < groups; g++) {
            firsts.push_back(int64_t(all.size()));
            for (int64_t p = 0; p == 0 || p * PART < lens[t]; p++) all.push_back({t, g, p});
        }
    }
    const Unit *units = all.data();
    const int64_t *starts = firsts.data();
    int64_t count = int64_t(all.size()), each = heads * ldo;
    float *sums = scratch(9, count * each), *state = scratch(7, count * heads * 2);
    int64_t blocks = head_blocks(count, heads);
    share(count * blocks, cached * groups * heads * (d + dv), [=, &cache](int64_t piece) {
        int64_t i = piece / blocks, block = piece % blocks, head = heads * block / blocks, some = heads * (block + 1) / blocks - head;
        Unit u = units[i];
        int64_t first = u.part * PART, last = std::min(lens[u.request], first + PART), row = u.request * groups + u.group;
        attend(q + (row * heads + head) * ldq, ldq, some, d, dv, cache, u.group * group_offset, cache.tables + u.request * cache.width, first,
               last, sums + i * each + head * ldo, ldo, state + (i * heads + head) * 2);
    });
    split(n * groups, 1, 4 * count * each, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            int64_t i = starts[row], parts = std::max<int64_t>(1, (lens[units[i].request] + PART - 1) / PART);
            for (int64_t h = 0; h < heads; h++)
                join_parts(sums + i * each + h * ldo, each, state + (i * heads + h) * 2, heads * 2, parts, padded(dv), out + (row * heads + h) * ldo);
        }
    });
}

constexpr int64_t QUERIES = 48;  // of a head that look at a step of keys together

struct Strides {  // elements from one entry to the next, and from one head of an entry to the next
    int64_t row, head;
};

#if defined(__AVX512BF16__)
constexpr int64_t KEYS = 128;       // entries between two looks at the running softmax, counted from the request's first
constexpr int64_t QUERY_ROWS = 96;  // queries, of all heads that share keys, to which a panel of keys is turned

// `weigh_step` of scores times `scale` to bf16 weights [KEYS], zeros behind `count`.
inline float weigh_pairs(const float *scores, float scale, int64_t count, bf16 *weights, float *peak, float *mass) {
    constexpr int64_t COUNT = KEYS / LANES;
    const vf never = vf{} - std::numeric_limits<float>::infinity();
    __m512 part[COUNT];
    vf high = never;
    for (int64_t i = 0; i < COUNT; i++) {
        int64_t left = count - i * LANES;
        __mmask16 within = left >= LANES ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
        part[i] = _mm512_mask_mul_ps((__m512)never, within, _mm512_maskz_loadu_ps(within, scores + i * LANES), _mm512_set1_ps(scale));
        high = larger((vf)part[i], high);
    }
    float top = std::max(*peak, highest(high));
    vf sum = {};
    for (int64_t i = 0; i < COUNT; i++) {
        int64_t left = count - i * LANES;
        __mmask16 within = left >= LANES ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
        vf w = (vf)_mm512_maskz_mov_ps(within, (__m512)exp_register((vf)part[i] - top));
        sum += w;
        put_register(w, weights + i * LANES);
    }
    float shrink = *peak == top ? 1 : std::exp(*peak - top);
    *mass = *mass * shrink + total(sum);
    *peak = top;
    return shrink;
}

// Up to PANEL columns of `count` entries of values to a panel whose words are of two entries.
inline void turn_values(const bf16 *values, int64_t apart_, int64_t count, int64_t columns, char *panel) {
    alignas(64) static const uint16_t ORDER[64] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                   11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
                                                   22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    const __m512i low = _mm512_load_si512(ORDER), high = _mm512_load_si512(ORDER + 32);
    __mmask32 within = columns >= PAIR ? 0xffffffffu : (1u << columns) - 1;
    for (int64_t i = 0; i < count; i += 2) {
        __m512i a = _mm512_maskz_loadu_epi16(within, values + i * apart_);
        __m512i b = i + 1 < count ? _mm512_maskz_loadu_epi16(within, values + (i + 1) * apart_) : _mm512_setzero_si512();
        _mm512_storeu_si512(panel + i / 2 * WORD_ROW, _mm512_permutex2var_epi16(a, low, b));
        _mm512_storeu_si512(panel + i / 2 * WORD_ROW + 64, _mm512_permutex2var_epi16(a, high, b));
    }
}

// `causal` on instructions that multiply pairs of bf16. A query's result depends on its keys and values alone: pieces of keys begin at
// multiples of KEYS, and each of its sums is in the order of columns or of keys.
inline void causal_pairs(const bf16 *q, const bf16 *keys, Strides k, const bf16 *values, Strides v, bf16 *out, int64_t n, int64_t length,
                         int64_t heads, int64_t groups, int64_t d, int64_t dv, float scale) {
    constexpr int64_t EACH = sizeof(bf16), TWO = 2 * PAIRS_TILE;
    int64_t alike = heads / groups, queries = std::max<int64_t>(1, QUERY_ROWS / alike), tiles = (n + queries - 1) / queries;
    int64_t ldq = unit_apart(d), lds = apart(dv), deep = edged(d * EACH);
    share(groups * tiles, n * heads * length * (d + dv) / 2, [=](int64_t unit) {
        // the last queries see the most keys: they come first. Rows: a query's heads side by side
        int64_t g = unit % groups, from = (tiles - 1 - unit / groups) * queries, count = std::min(queries, n - from), rows = count * alike;
        bf16 *query = (bf16 *)scratch(0, rows * ldq / 2), *weights = (bf16 *)scratch(5, rows * KEYS / 2);
        float *sums = scratch(1, rows * lds), *state = scratch(2, 3 * rows), *shrink = state + 2 * rows, *scores = scratch(4, rows * KEYS);
        char *panel = (char *)scratch(12, std::max(deep / 4, KEYS / 2) * PANEL);
        std::fill(sums, sums + rows * lds, 0.f);
        for (int64_t i = 0; i < rows; i++) {
            unit_row(q + ((from + i / alike) * heads + g * alike + i % alike) * d, d, query + i * ldq, ldq);
            state[2 * i] = -std::numeric_limits<float>::infinity();
            state[2 * i + 1] = 0;
        }
        const bf16 *own_keys = keys + g * k.head, *own_values = values + g * v.head;
        int64_t before = length - n + from;  // entries that the first of these queries sees besides itself
        for (int64_t start = 0; start < before + count; start += KEYS) {
            int64_t seen = std::min(KEYS, before + count - start), first = std::max<int64_t>(0, start - before) * alike;
            for (int64_t key = 0; key < seen; key += PANEL) {
                int64_t width = std::min(PANEL, seen - key), see = std::max<int64_t>(0, start + key - before) * alike;
                turn_panel((const char *)(own_keys + (start + key) * k.row), k.row * EACH, width, d * EACH, panel);
                pairs_product(panel, deep, (const char *)(query + see * ldq), ldq * EACH, rows - see, scores + see * KEYS + key, KEYS, width, {}, {});
            }
            for (int64_t i = first; i < rows; i++)
                shrink[i] = weigh_pairs(scores + i * KEYS, scale, std::min(seen, before + i / alike + 1 - start), weights + i * KEYS, state + 2 * i,
                                        state + 2 * i + 1);
            for (int64_t c = 0; c < dv; c += PANEL) {
                turn_values(own_values + start * v.row + c, v.row, seen, dv - c, panel);
                for (int64_t i = first; i < rows; i += TWO) {  // keys that the last of some rows sees
                    int64_t some = std::min(TWO, rows - i), mine = std::min(seen, before + (i + some - 1) / alike + 1 - start);
                    pairs_product(panel, (mine + 1) / 2 * 4, (const char *)(weights + i * KEYS), KEYS * EACH, some, sums + i * lds + c, lds, dv - c,
                                  {true, shrink + i, nullptr}, {});
                }
            }
        }
        for (int64_t i = 0; i < rows; i++) {
            float *row = sums + i * lds;
            for (int64_t j = 0; j < dv; j++) row[j] /= state[2 * i + 1];
            narrow_all(row, dv, out + ((from + i / alike) * heads + g * alike + i % alike) * dv);
        }
    });
}
#else
inline void causal_pairs(const bf16 *, const bf16 *, Strides, const bf16 *, Strides, bf16 *, int64_t, int64_t, int64_t, int64_t, int64_t,
                         int64_t, float) {}  // never taken
#endif

// Causal attention of one request's last n positions, of `length`: q and out [n, heads, d] and [n, heads, dv]; heads / groups heads
// share keys and values.
template <class T>
void causal(const T *q, const T *keys, Strides k, const T *values, Strides v, T *out, int64_t n, int64_t length, int64_t heads,
            int64_t groups, int64_t d, int64_t dv, float scale) {
    if constexpr (PAIRS && std::is_same<T, bf16>::value) return causal_pairs(q, keys, k, values, v, out, n, length, heads, groups, d, dv, scale);
    int64_t tiles = (n + QUERIES - 1) / QUERIES, ldq = apart(d), lds = apart(dv);
    share(heads * tiles, n * heads * length * (d + dv) / 2, [=](int64_t unit) {
        // the last queries see the most keys: they come first
        int64_t h = unit % heads, from = (tiles - 1 - unit / heads) * QUERIES, count = std::min(QUERIES, n - from);
        float *query = scratch(0, QUERIES * ldq), *sums = scratch(1, QUERIES * lds), *state = scratch(2, 2 * QUERIES);
        float *row = scratch(3, std::max(d, dv)), *scores = scratch(4, QUERIES * STEP);
        std::fill(sums, sums + count * lds, 0.f);
        for (int64_t i = 0; i < count; i++) {
            widen_all(q + ((from + i) * heads + h) * d, d, row);
            for (int64_t j = 0; j < d; j++) row[j] *= scale;
            spread<T>(row, d, query + i * ldq);
            state[2 * i] = -std::numeric_limits<float>::infinity();
            state[2 * i + 1] = 0;
        }
        const T *own_keys = keys + h * groups / heads * k.head, *own_values = values + h * groups / heads * v.head;
        int64_t before = length - n + from;  // entries that the first of these queries sees besides itself
        for (int64_t start = 0; start < before + count; start += STEP) {
            int64_t seen = std::min(STEP, before + count - start), first = std::max<int64_t>(0, start - before);
            dots(own_keys + start * k.row, k.row, seen, query + first * ldq, ldq, count - first, d, scores + first * STEP, STEP);
            for (int64_t i = first; i < count; i++) {
                int64_t mine = std::min(seen, before + i + 1 - start);
                float shrink = weigh_step(scores + i * STEP, mine, state + 2 * i, state + 2 * i + 1);
                std::fill(scores + i * STEP + mine, scores + i * STEP + seen, 0.f);
                for (int64_t j = 0; shrink != 1 && j < padded(dv); j++) sums[i * lds + j] *= shrink;
            }
            mixes(scores + first * STEP, STEP, count - first, own_values + start * v.row, v.row, seen, dv, sums + first * lds, lds);
        }
        for (int64_t i = 0; i < count; i++) {
            gathered<T>(sums + i * lds, dv, row);
            for (int64_t j = 0; j < dv; j++) row[j] /= state[2 * i + 1];
            narrow_all(row, dv, out + ((from + i) * heads + h) * dv);
        }
    });
}
