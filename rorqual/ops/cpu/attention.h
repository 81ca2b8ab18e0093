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
    for (int64_t i = 0; i < STEP; i += LANES) {
        vf w = exp_lanes(load(scores + i) - top);
        memcpy(scores + i, &w, sizeof w);
        for (int64_t j = std::max<int64_t>(0, count - i); j < LANES; j++) w[j] = 0;
        sum += w;
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
