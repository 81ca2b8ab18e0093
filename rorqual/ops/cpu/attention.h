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
    vf high = load(scores);
    for (int64_t i = LANES; i < STEP; i += LANES) {
        vf here = load(scores + i);
        high = here > high ? here : high;
    }
    float top = std::max(*peak, highest(high));
    vf sum = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vf w = exp_lanes(load(scores + i) - top);
        memcpy(scores + i, &w, sizeof w);
        sum += w;
    }
    if (i < count) {
        vf w = exp_lanes(load(scores + i) - top);
        float rest[LANES] = {};
        memcpy(scores + i, &w, sizeof w);
        std::copy(scores + i, scores + count, rest);
        sum += load(rest);
    }
    float shrink = *peak == top ? 1 : std::exp(*peak - top);
    *mass = *mass * shrink + total(sum);
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

// Queries [n, groups, heads, d], spread and scaled, of n requests; `group_offset`: from a group's entries to the next's. out [n, groups,
// heads, dv], spread, ldo apart. Long requests are cut into parts for several threads.
template <class T>
void attend_all(const float *q, int64_t ldq, int64_t n, int64_t groups, int64_t heads, int64_t d, int64_t dv, const Paged<T> &cache,
                int64_t group_offset, const int64_t *lens, float *out, int64_t ldo) {
    struct Unit {
        int64_t request, group, part;
    };
    static thread_local std::vector<Unit> all;
    all.clear();
    int64_t cached = 0;
    for (int64_t t = 0; t < n; t++) {
        cached += lens[t];
        for (int64_t g = 0; g < groups; g++)
            for (int64_t p = 0; p == 0 || p * PART < lens[t]; p++) all.push_back({t, g, p});
    }
    const Unit *units = all.data();
    int64_t count = int64_t(all.size()), each = heads * ldo;
    float *sums = scratch(9, count * each), *state = scratch(7, count * heads * 2);
    share(count, cached * groups * heads * (d + dv), [=, &cache](int64_t i) {
        Unit u = units[i];
        int64_t first = u.part * PART, last = std::min(lens[u.request], first + PART), row = u.request * groups + u.group;
        attend(q + row * heads * ldq, ldq, heads, d, dv, cache, u.group * group_offset, cache.tables + u.request * cache.width, first, last,
               sums + i * each, ldo, state + i * heads * 2);
    });
    for (int64_t i = 0; i < count;) {
        Unit u = units[i];
        int64_t parts = std::max<int64_t>(1, (lens[u.request] + PART - 1) / PART), row = u.request * groups + u.group;
        for (int64_t h = 0; h < heads; h++)
            join_parts(sums + i * each + h * ldo, each, state + (i * heads + h) * 2, heads * 2, parts, padded(dv), out + (row * heads + h) * ldo);
        i += parts;
    }
}

constexpr int64_t QUERIES = 48;  // of a head that look at a step of keys together

struct Strides {  // elements from one entry to the next, and from one head of an entry to the next
    int64_t row, head;
};

// Causal attention of one request's last n positions, of `length`: q and out [n, heads, d] and [n, heads, dv]; heads / groups heads
// share keys and values.
template <class T>
void causal(const T *q, const T *keys, Strides k, const T *values, Strides v, T *out, int64_t n, int64_t length, int64_t heads,
            int64_t groups, int64_t d, int64_t dv, float scale) {
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
