// Sampling on the CPU, included by kernels.cpp: the ops uniform, distribution, draw, draw_rest and write_probs of reference.py.
//
// A row of the vocabulary is read once or twice. Everything is computed in doubles, so that draws are those of the reference but for
// numbers within about 1e-14 of a boundary. A row is cut into blocks of BLOCK tokens whose masses are kept: drawing adds up masses and
// looks into one block. Thresholds of top-k and top-p are found without a sort: a bound from the blocks' best logits leaves few
// candidates, and histograms over their range narrow them down.

constexpr int64_t BLOCK = 128;
constexpr int64_t FEW = 128;   // candidates that are simply sorted
constexpr int64_t BINS = 512;  // of a histogram
constexpr double GREEDY = 1e-5;
constexpr float NONE = -std::numeric_limits<float>::infinity();

constexpr int WIDE = 8;            // sums of so many doubles side by side, whatever the processor
constexpr int DOUBLES = SPAN / 2;  // of a register
typedef double vd __attribute__((vector_size(DOUBLES * 8)));
typedef int64_t vl __attribute__((vector_size(DOUBLES * 8)));
typedef float vs __attribute__((vector_size(DOUBLES * 4)));

// exp to one or two units of the last place (Taylor to x^13 on |x| <= ln 2 / 2); zero below exp(-700), which no sum would notice.
INLINE vd exp_wide(vd x) {
    const vd zero = {};
    vd whole = x * 1.4426950408889634 + 6755399441055744.0, n = whole - 6755399441055744.0;  // 1.5 * 2^52 rounds to an integer
    vd r = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
    vd y = zero + 1 / 6227020800.0;
    const double over[] = {1 / 479001600.0, 1 / 39916800.0, 1 / 3628800.0, 1 / 362880.0, 1 / 40320.0, 1 / 5040.0, 1 / 720.0,
                           1 / 120.0,       1 / 24.0,       1 / 6.0,       0.5,          1.0,         1.0};
    for (double c : over) y = y * r + c;
    vl bits;
    memcpy(&bits, &whole, sizeof bits);  // its lowest bits are the integer's
    bits = (bits + 1023) << 52;
    vd power;
    memcpy(&power, &bits, sizeof bits);
    return x < -700.0 ? zero : y * power;
}

struct Row {  // one row of a distribution
    const float *x;
    double temperature, peak, floor, mass;
};

inline double tempered(double temperature) { return 1 / std::max(temperature, GREEDY); }

INLINE vd weigh_wide(const float *x, double peak, double factor, double floor) {
    const vd zero = {};
    vs narrow;
    memcpy(&narrow, x, sizeof narrow);
    vd value = __builtin_convertvector(narrow, vd);
    return value >= floor ? exp_wide((value - peak) * factor) : zero;
}

// exp((x - peak) * factor) of n logits, zero below `floor`; returns the sum.
double weigh(const float *x, int64_t n, double peak, double factor, double floor, double *out) {
    constexpr int COUNT = WIDE / DOUBLES;
    vd sums[COUNT] = {};
    int64_t i = 0;
    for (; i + WIDE <= n; i += WIDE)
        UNROLLED for (int j = 0; j < COUNT; j++) {
            vd w = weigh_wide(x + i + j * DOUBLES, peak, factor, floor);
            sums[j] += w;
            if (out) memcpy(out + i + j * DOUBLES, &w, sizeof w);
        }
    if (i < n) {
        float rest[WIDE];
        double last[WIDE];
        std::fill(rest, rest + WIDE, NONE);
        std::copy(x + i, x + n, rest);
        for (int j = 0; j < COUNT; j++) {
            vd w = weigh_wide(rest + j * DOUBLES, peak, factor, floor);
            sums[j] += w;
            memcpy(last + j * DOUBLES, &w, sizeof w);
        }
        if (out) std::copy(last, last + (n - i), out + i);
    }
    double sum[WIDE];
    memcpy(sum, sums, sizeof sum);
    return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

inline int64_t blocks_of(int64_t v) { return (v + BLOCK - 1) / BLOCK; }

struct Candidates {
    std::vector<float> value;
    std::vector<double> weight;
    std::vector<float> best, lanes, some;  // per block; per lane of each block; scratch of selections
    std::vector<double> masses;
};

Candidates &candidates() {
    static thread_local Candidates here;
    return here;
}

// Best logits of every block, and (for `lanes`) of every LANES-th token of it.
void best_of_blocks(const float *x, int64_t v, Candidates &c, bool lanes) {
    int64_t blocks = blocks_of(v);
    c.best.resize(blocks);
    if (lanes) c.lanes.resize(blocks * LANES);
    for (int64_t b = 0; b < blocks; b++) {
        int64_t n = std::min(BLOCK, v - b * BLOCK), i = 0;
        sf most[REGISTERS];
        UNROLLED for (int r = 0; r < REGISTERS; r++) most[r] = all_lanes(NONE);
        for (; i + LANES <= n; i += LANES)
            UNROLLED for (int r = 0; r < REGISTERS; r++) most[r] = larger(get(x + b * BLOCK + i + r * SPAN), most[r]);
        vf top = lanes_of(most);
        for (; i < n; i++) top[i % LANES] = std::max(top[i % LANES], x[b * BLOCK + i]);
        if (lanes) memcpy(&c.lanes[b * LANES], &top, sizeof top);
        c.best[b] = highest(top);
    }
}

// The k-th largest of n values, or -inf where there are fewer.
float kth(const float *values, int64_t n, int64_t k, std::vector<float> &some) {
    if (k > n) return NONE;
    some.assign(values, values + n);
    std::nth_element(some.begin(), some.begin() + k - 1, some.end(), std::greater<float>());
    return some[k - 1];
}

// A logit that the k-th largest cannot lie below: the k-th largest of the bests of k or more disjoint sets of tokens.
float bound_by_count(Candidates &c, int64_t k) {
    int64_t blocks = int64_t(c.best.size());
    if (2 * k <= blocks) return kth(c.best.data(), blocks, k, c.some);
    return kth(c.lanes.data(), int64_t(c.lanes.size()), k, c.some);
}

// The largest of the n values at which the weights of all values as large reach `goal`; the least value if they never do. Reorders.
// Narrowed by histograms over the values' range until few are left, or all are equal.
float reaching(float *value, double *weight, int64_t n, double goal) {
    if (!n) return NONE;
    double above = 0;
    while (n > FEW) {
        auto range = std::minmax_element(value, value + n);
        double low = *range.first, high = *range.second;
        if (low == high) return float(low);
        if (std::isinf(high)) break;  // an overflowed logit: no bin has a place in an infinite range
        double sums[BINS] = {};
        double scale = BINS / (high - low);
        auto bin = [=](float x) { return std::min<int64_t>(BINS - 1, int64_t((high - x) * scale)); };
        for (int64_t i = 0; i < n; i++) sums[bin(value[i])] += weight[i];
        int64_t at = 0, last = bin(float(low)), kept = 0;
        while (at < last && above + sums[at] < goal) above += sums[at++];
        for (int64_t i = 0; i < n; i++) {
            if (bin(value[i]) != at) continue;
            value[kept] = value[i];
            weight[kept++] = weight[i];
        }
        if (kept == n) break;  // a range so narrow that all fall into one bin
        n = kept;
    }
    std::vector<std::pair<float, double>> order(n);
    for (int64_t i = 0; i < n; i++) order[i] = {value[i], weight[i]};
    std::sort(order.begin(), order.end(), [](const auto &a, const auto &b) { return a.first > b.first; });
    for (int64_t i = 0; i < n; i++) {
        above += order[i].second;
        if (above >= goal) return order[i].first;
    }
    return order[n - 1].first;
}

inline float at_least(double x) {  // the least float that is no smaller
    float near = float(x);
    return near < x ? std::nextafter(near, std::numeric_limits<float>::infinity()) : near;
}

void gather_candidates(const float *x, int64_t v, float low, Candidates &c) {
    low = std::max(low, std::numeric_limits<float>::lowest());  // what a mask forbids is none
    c.value.resize(v + 1);
    int64_t n = 0;
    for (int64_t b = 0; b < int64_t(c.best.size()); b++) {
        if (!(c.best[b] >= low)) continue;
        for (int64_t i = b * BLOCK; i < std::min(v, (b + 1) * BLOCK); i++) {
            c.value[n] = x[i];
            n += x[i] >= low;
        }
    }
    c.value.resize(n);
}

struct Cuts {
    double top_p, min_p;
    int64_t top_k;  // 0: off
};

// The least logit that top-k, then top-p over what top-k left, then min-p keep. `mass` is that of all tokens; only needed without top-k.
float threshold(const float *x, int64_t v, const Cuts &cuts, double peak, double temperature, double mass, Candidates &c) {
    double factor = tempered(temperature), limit = 1 / factor;
    float floor = cuts.min_p > 0 ? at_least(peak + limit * std::log(cuts.min_p)) : NONE;
    if (!cuts.top_k && cuts.top_p >= 1) return floor;
    // Tokens whose weights together cannot reach what top-p leaves out lie below its threshold, with room for rounding.
    double low = peak + limit * std::log(0.5 * (1 - cuts.top_p) * mass / double(v));
    gather_candidates(x, v, cuts.top_k ? bound_by_count(c, cuts.top_k) : std::nextafter(float(low), NONE), c);
    int64_t n = int64_t(c.value.size());
    c.weight.resize(n);
    if (cuts.top_k) {
        std::fill(c.weight.begin(), c.weight.end(), 1.0);
        c.some.assign(c.value.begin(), c.value.end());
        float by_k = reaching(c.some.data(), c.weight.data(), n, double(cuts.top_k));
        floor = std::max(floor, by_k);
        if (cuts.top_p >= 1) return floor;
        n = std::remove_if(c.value.begin(), c.value.end(), [=](float y) { return !(y >= by_k); }) - c.value.begin();
    }
    double all = weigh(c.value.data(), n, peak, factor, NONE, c.weight.data());
    double goal = cuts.top_p * (cuts.top_k ? all : mass);
    return std::max(floor, reaching(c.value.data(), c.weight.data(), n, goal));
}

// One row: its best token, and temperature, peak, floor and mass into `summary`; the blocks' masses into `parts`.
int64_t distribute(const float *x, int64_t v, const double *settings, bool cut, double *summary, double *parts) {
    Candidates &c = candidates();
    Cuts cuts = {settings[1], settings[2], settings[3] > 0 && settings[3] < double(v) ? int64_t(settings[3]) : 0};
    cut = cut && (cuts.top_k || cuts.top_p < 1 || cuts.min_p > 0);
    best_of_blocks(x, v, c, cut);
    int64_t blocks = blocks_of(v), first = std::max_element(c.best.begin(), c.best.end()) - c.best.begin();
    float peak = c.best[first], floor = NONE;
    int64_t best = std::find(x + first * BLOCK, x + std::min(v, (first + 1) * BLOCK), peak) - x;
    double temperature = settings[0], mass = 0, factor = tempered(temperature);
    auto fill_parts = [&] {
        mass = 0;
        for (int64_t b = 0; b < blocks; b++) {
            bool any = c.best[b] >= floor;
            parts[b] = any ? weigh(x + b * BLOCK, std::min(BLOCK, v - b * BLOCK), peak, factor, floor, nullptr) : 0;
            mass += parts[b];
        }
    };
    if (!cut || (!cuts.top_k && cuts.top_p < 1)) fill_parts();
    if (cut) {
        floor = threshold(x, v, cuts, peak, temperature, mass, c);
        fill_parts();
    }
    double found[] = {temperature, peak, floor, mass};
    std::copy(found, found + 4, summary);
    return std::min(best, v - 1);
}

inline Row row_of(const float *logits, int64_t stride, const double *summary, int64_t row) {
    const double *s = summary + 4 * row;
    return {logits + row * stride, s[0], s[1], s[2], s[3]};
}

// Which of the blocks' masses, added up in order, passes `goal`; what lies before it is taken off the goal. -1: none does.
int64_t block_at(const double *parts, int64_t blocks, double *goal) {
    double before = 0;
    int64_t last = -1;
    for (int64_t b = 0; b < blocks; b++) {
        if (parts[b] > 0) {
            last = b;
            if (before + parts[b] > *goal) {
                *goal -= before;
                return b;
            }
        }
        before += parts[b];
    }
    *goal = std::numeric_limits<double>::infinity();  // the total was rounded up: the last token of all
    return last;
}

// The first of n weights at which their sum passes `goal`, else the last that is not zero.
int64_t token_at(const double *weights, int64_t n, double goal) {
    double before = 0;
    int64_t last = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!(weights[i] > 0)) continue;
        before += weights[i];
        last = i;
        if (before > goal) break;
    }
    return last;
}

int64_t draw_row(const Row &r, int64_t v, const double *parts, double number, int64_t best) {
    if (r.temperature < GREEDY) return best;
    double goal = number * r.mass, weights[BLOCK];
    int64_t b = block_at(parts, blocks_of(v), &goal);
    if (b < 0) return best;
    int64_t n = std::min(BLOCK, v - b * BLOCK);
    weigh(r.x + b * BLOCK, n, r.peak, tempered(r.temperature), float(r.floor), weights);
    return b * BLOCK + token_at(weights, n, goal);
}

// max(p - q, 0) of one block, or weights without the refused token's; returns the sum.
double rest_of_block(const Row &r, int64_t v, int64_t b, int64_t refused, const float *q, double *rest) {
    int64_t first = b * BLOCK, n = std::min(BLOCK, v - first);
    weigh(r.x + first, n, r.peak, tempered(r.temperature), float(r.floor), rest);
    double share = 1 / r.mass, sums[WIDE] = {};
    if (q)
        for (int64_t i = 0; i < n; i++) rest[i] = std::max(rest[i] * share - q[first + i], 0.0);
    else if (first <= refused && refused < first + n)
        rest[refused - first] = 0;
    for (int64_t i = 0; i < n; i++) sums[i % WIDE] += rest[i];
    return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

int64_t rest_row(const Row &r, int64_t v, const double *parts, double number, int64_t refused, const float *q) {
    int64_t blocks = blocks_of(v);
    std::vector<double> &masses = candidates().masses;
    masses.assign(blocks, 0);
    double rest[BLOCK], mass = 0;
    for (int64_t b = 0; b < blocks; b++)
        if (parts[b] > 0) mass += masses[b] = rest_of_block(r, v, b, refused, q, rest);
    if (!(mass > 0)) return -1;
    double goal = number * mass;
    int64_t b = block_at(masses.data(), blocks, &goal);
    rest_of_block(r, v, b, refused, q, rest);
    return b * BLOCK + token_at(rest, std::min(BLOCK, v - b * BLOCK), goal);
}

void probs_row(const Row &r, int64_t v, const double *parts, float *out) {
    double weights[BLOCK];
    for (int64_t b = 0; b < blocks_of(v); b++) {
        int64_t first = b * BLOCK, n = std::min(BLOCK, v - first);
        if (parts[b] > 0) {
            weigh(r.x + first, n, r.peak, tempered(r.temperature), float(r.floor), weights);
            for (int64_t i = 0; i < n; i++) out[first + i] = float(weights[i] / r.mass);
        } else {
            std::fill(out + first, out + first + n, 0.f);
        }
    }
}

// splitmix64, as in counter.py.
inline uint64_t hash_bits(uint64_t counter, uint64_t key) {
    uint64_t z = counter * 0x9E3779B97F4A7C15u + key;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

inline double uniform(uint64_t seed, uint64_t position, uint64_t stream) {
    uint64_t bits = hash_bits(hash_bits(seed, 0x5EED) + position, 0x70C5 + stream * 0x9E3779B9);
    return double(bits >> 11) * 0x1p-53;
}

// n elements of a draw that is nearly normal, from number `first` on, as rng.draw_normal has them.
template <class T>
void draw_normal_row(uint64_t key, float factor, uint64_t first, int64_t n, T *out) {
    constexpr int64_t SOME = 256;
    float made[SOME];
    for (int64_t from = 0; from < n; from += SOME) {
        int64_t count = std::min(SOME, n - from);
        for (int64_t i = 0; i < count; i++) {
            uint64_t bits = hash_bits(first + uint64_t(from + i), key);
            int32_t fields = int32_t((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
            made[i] = float(fields - 2 * 0xffff) * factor;
        }
        narrow_all(made, count, out + from);
    }
}
