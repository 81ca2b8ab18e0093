// Calls the kernels with what a broken model or a caller's mistake hands them, every array exactly
// as large as it says. test_memory.py compiles it with the address sanitizer, which ends the
// program at the first access outside an array.

#include "kernels.cpp"

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float BAD = std::numeric_limits<float>::quiet_NaN();

void expect(bool holds, const char *what) {
    if (holds) return;
    std::printf("not so: %s\n", what);
    std::exit(1);
}

std::vector<float> values(int64_t n) {
    std::vector<float> out(n);
    for (int64_t i = 0; i < n; i++) out[i] = float(i * 7919 % 1000) / 500 - 1;
    return out;
}

template <class T>
std::vector<T> stored(const std::vector<float> &x) {
    std::vector<T> out(x.size());
    narrow_all(x.data(), int64_t(x.size()), out.data());
    return out;
}

constexpr int64_t SLOTS = 6, HIDDEN = 40, SIZE = 24;  // neither is a multiple of PAIR

template <class T>
struct Layer {
    std::vector<T> gate_up = stored<T>(values(SLOTS * 2 * SIZE * HIDDEN));
    std::vector<T> down = stored<T>(values(SLOTS * HIDDEN * SIZE));

    int64_t run(const std::vector<T> &x, const std::vector<int64_t> &ids, std::vector<T> &y) const {
        int64_t n = int64_t(x.size()) / HIDDEN;
        std::vector<float> weights = values(int64_t(ids.size()));
        return rq_experts(sizeof(T) == 4, x.data(), ids.data(), weights.data(), gate_up.data(),
                          down.data(), y.data(), n, int64_t(ids.size()) / n, SLOTS, HIDDEN, SIZE);
    }
};


template <class T>
void repeated_picks(int64_t n, int64_t top_k) {
    Layer<T> layer;
    std::vector<T> x = stored<T>(values(n * HIDDEN)), y(x.size());
    std::vector<int64_t> ids(n * top_k);
    for (int kind = 0; kind < 4; kind++) {
        for (int64_t i = 0; i < n * top_k; i++) {
            int64_t all[] = {SLOTS - 1, i / 2 % SLOTS, -1, i % (SLOTS + 1) - 1};
            ids[i] = all[kind];
        }
        expect(layer.run(x, ids, y) == n * top_k, "all picks are known");
    }
}

template <class T>
void unknown_picks() {
    Layer<T> layer;
    std::vector<T> x = stored<T>(values(2 * HIDDEN)), none;
    // y has no room: any write is found
    for (int64_t id : {SLOTS, int64_t(-2), int64_t(1) << 62, std::numeric_limits<int64_t>::min()})
        expect(layer.run(x, {0, 1, id, 2}, none) == 2, "an unknown pick is refused");
}

template <class T>
void broken_hidden_states() {
    constexpr int64_t EXPERTS = SLOTS, TOP_K = 4, ROWS = 5;
    std::vector<float> wide = values(ROWS * HIDDEN), bias = values(EXPERTS), weights(ROWS * TOP_K);
    std::fill(wide.begin(), wide.begin() + HIDDEN, BAD);
    wide[HIDDEN] = INF;
    wide[2 * HIDDEN] = -INF;
    std::vector<T> x = stored<T>(wide), y(x.size());
    std::vector<T> gate = stored<T>(values(EXPERTS * HIDDEN));
    std::vector<int64_t> ids(ROWS * TOP_K);
    for (int kind = 0; kind < 8; kind++) {
        int64_t sigmoid = kind & 1, best_two = kind >> 1 & 1, grouped = kind >> 2;
        Router r = {EXPERTS, TOP_K, 3, 2, sigmoid, best_two, grouped, 1, sigmoid, 1.0, gate.data(),
                    bias.data()};
        int wide_type = sizeof(T) == 4;
        rq_route(wide_type, wide_type, &r, x.data(), ids.data(), weights.data(), ROWS, HIDDEN);
        for (int64_t id : ids) expect(0 <= id && id < EXPERTS, "the router picks experts");
        expect(Layer<T>().run(x, ids, y) == ROWS * TOP_K, "all picks are known");
    }
}

// Overflowed and undefined logits, and every filter.
void broken_logits(int kind, double top_k, double top_p, double min_p, double temperature) {
    constexpr int64_t V = 1000;
    std::vector<float> x = values(V), plane(V), q(V, 1e-3f);
    if (kind == 0) x[3] = INF;
    if (kind == 1) x[3] = BAD;
    if (kind == 2) std::fill(x.begin(), x.end(), BAD);
    if (kind == 3) std::fill(x.begin(), x.end(), INF);
    if (kind == 4) std::fill(x.begin(), x.end(), -INF);
    for (int64_t i = 0; kind == 5 && i < V; i += 2) x[i] = INF;
    for (int64_t i = 0; kind == 6 && i < V; i += 3) x[i] = i % 2 ? BAD : i % 4 ? -INF : INF;
    std::vector<double> settings = {temperature, top_p, min_p, top_k};
    std::vector<double> summary(4), parts(blocks_of(V));
    std::vector<int64_t> best(1), out(1), rows = {0}, refused = {3};
    rq_distribution(x.data(), V, 1, V, settings.data(), 1, summary.data(), parts.data(),
                    best.data());
    for (double number : {0.0, 0.5, 0.999999}) {
        rq_draw(x.data(), V, 1, V, summary.data(), parts.data(), best.data(), &number, out.data());
        expect(0 <= out[0] && out[0] < V, "a token of the vocabulary is drawn");
        for (const float *draft : {(const float *)nullptr, (const float *)q.data()}) {
            rq_draw_rest(x.data(), V, V, summary.data(), parts.data(), rows.data(), &number,
                         refused.data(), draft, rows.data(), out.data(), 1);
            expect(-1 <= out[0] && out[0] < V, "a token of the vocabulary or none is drawn");
        }
    }
    float *to = plane.data();
    rq_write_probs(x.data(), V, 1, V, summary.data(), parts.data(), to, rows.data());
}

// Every number of rows in a tile, and matrices whose last row and column are in no full register.
template <class T>
void odd_products() {
    for (int64_t n : {1, 2, 5, 6, 7, 200})
        for (int64_t rows : {1, 4, 13, 300})
            for (int64_t k : {1, 31, 33, 70}) {
                std::vector<T> x = stored<T>(values(n * k)), w = stored<T>(values(rows * k));
                std::vector<T> bias = stored<T>(values(rows)), y(n * rows);
                rq_linear(sizeof(T) == 4, x.data(), w.data(), bias.data(), y.data(), n, rows, k);
            }
}

// Three requests of one page and more, whose last page is cut off where it ends.
template <class T>
void paged_attention() {
    constexpr int64_t PAGE = 16, PAGES = 80, GROUPS = 2, HEADS = 6, D = 24, N = 3;
    std::vector<int64_t> tables(N * PAGES), lens = {1, 37, 1200};
    for (int64_t i = 0; i < N * PAGES; i++) tables[i] = i % PAGES;
    int64_t entries = 1200 * GROUPS * D;
    std::vector<T> keys = stored<T>(values(entries)), held = stored<T>(values(entries));
    std::vector<T> q = stored<T>(values(N * HEADS * D)), out(q.size());
    int wide = sizeof(T) == 4;
    rq_gqa_decode(wide, q.data(), keys.data(), held.data(), tables.data(), PAGES, lens.data(), PAGE,
                  0.1, out.data(), N, HEADS, GROUPS, D);
    constexpr int64_t NOPE = 20, ROPE = 6, V = 18, RANK = 36;
    std::vector<T> up = stored<T>(values(HEADS * (NOPE + V) * RANK));
    std::vector<T> plane = stored<T>(values(1200 * (RANK + ROPE)));
    std::vector<T> queries = stored<T>(values(N * HEADS * (NOPE + ROPE))), heads(N * HEADS * V);
    MlaLayer layer = {64, 0, HEADS, NOPE, ROPE, V, RANK, 1, 1e-6, nullptr, nullptr, nullptr,
                      nullptr, nullptr, up.data()};
    rq_mla_absorbed(wide, &layer, queries.data(), plane.data(), tables.data(), PAGES, lens.data(),
                    PAGE, 0.1, heads.data(), N);
}

template <class T>
void everything() {
    for (int threads : {1, 2}) {
        rq_threads(threads);
        odd_products<T>();
        paged_attention<T>();
    }
}

// Norms, dense layers and both prologues.
template <class T>
void layer_rows(int64_t n, int64_t hidden, int64_t size) {
    constexpr int64_t GROUPS = 2, HEADS = 3, D = 10, NOPE = 7, ROPE = 4, V = 9, RANK = 33;
    int wide = sizeof(T) == 4;
    std::vector<T> x = stored<T>(values(n * hidden)), other = x, normed(x.size()), sum(x.size());
    std::vector<T> norm = stored<T>(values(hidden)), up = stored<T>(values(2 * size * hidden));
    std::vector<T> down = stored<T>(values(hidden * size)), y(x.size());
    rq_add_norm(wide, x.data(), other.data(), norm.data(), normed.data(), sum.data(), n, hidden,
                1e-6);
    rq_add_norm(wide, x.data(), nullptr, norm.data(), normed.data(), x.data(), n, hidden, 1e-6);
    rq_mlp(wide, x.data(), up.data(), down.data(), y.data(), n, hidden, size);

    std::vector<int64_t> slots(n);
    for (int64_t i = 0; i < n; i++) slots[i] = n - 1 - i;
    std::vector<float> cos = values(n * D / 2), sin = cos;
    std::vector<T> qkv = stored<T>(values(n * (HEADS * GROUPS + 2 * GROUPS) * D));
    std::vector<T> own = stored<T>(values(D)), keys(n * GROUPS * D), held(keys.size());
    std::vector<T> q(n * HEADS * GROUPS * D);
    rq_gqa_prologue(wide, qkv.data(), own.data(), own.data(), 1e-6, cos.data(), sin.data(),
                    keys.data(), held.data(), slots.data(), q.data(), n, HEADS * GROUPS, GROUPS, D);

    constexpr int64_t QUERIES = HEADS * (NOPE + ROPE), ENTRY = RANK + ROPE;
    for (int64_t q_rank : {int64_t(0), int64_t(17)}) {
        int64_t first = q_rank ? q_rank : QUERIES;
        std::vector<T> matrix = stored<T>(values((first + ENTRY) * hidden));
        std::vector<T> latent_norm = stored<T>(values(17)), rank_norm = stored<T>(values(RANK));
        std::vector<T> q_b = stored<T>(values(QUERIES * 17)), plane(n * ENTRY), made(n * QUERIES);
        std::vector<float> angles = values(n * ROPE / 2);
        MlaLayer layer = {hidden, q_rank, HEADS, NOPE, ROPE, V, RANK, 1, 1e-6, matrix.data(),
                          nullptr, latent_norm.data(), q_b.data(), rank_norm.data(), nullptr};
        rq_mla_prologue(wide, &layer, x.data(), angles.data(), angles.data(), plane.data(),
                        slots.data(), made.data(), n);
    }
}

// Prompts, whole and behind a prefix; keys and values in arrays of their own, and side by side.
template <class T>
void prompts(int64_t n, int64_t length, int64_t heads, int64_t groups, int64_t d, int64_t dv) {
    int64_t row = groups * (d + dv), dense[] = {groups * d, d, groups * dv, dv};
    int64_t apart[] = {row, d + dv, row, d + dv};
    std::vector<T> q = stored<T>(values(n * heads * d)), out(n * heads * dv);
    std::vector<T> k = stored<T>(values(length * groups * d));
    std::vector<T> v = stored<T>(values(length * groups * dv));
    std::vector<T> both = stored<T>(values(length * row));
    auto run = [&](const T *keys, const T *held, const int64_t *strides) {
        rq_causal(sizeof(T) == 4, q.data(), keys, held, strides, out.data(), n, length, heads,
                  groups, d, dv, 0.1);
    };
    run(k.data(), v.data(), dense);
    run(both.data(), both.data() + d, apart);
}

// The smallest first: what a call leaves of scratch would hide an overrun of a smaller one.
template <class T>
void all_layers() {
    for (int threads : {1, 3}) {
        rq_threads(threads);
        for (int64_t n : {1, 5, 28, 31, 131}) {
            layer_rows<T>(n, 7, 5);
            layer_rows<T>(n, 40, 24);
            layer_rows<T>(n, 129, 97);
        }
    }
}

template <class T>
void all_prompts() {
    for (int threads : {1, 3}) {
        rq_threads(threads);
        prompts<T>(1, 1, 3, 3, 8, 6);
        prompts<T>(3, 70, 4, 2, 40, 40);
        prompts<T>(97, 130, 3, 3, 96, 50);
        prompts<T>(48, 300, 10, 1, 33, 161);
    }
}

template <class T>
void all_experts() {
    for (int threads : {1, 2}) {
        rq_threads(threads);
        repeated_picks<T>(1, 4);
        repeated_picks<T>(3, 8);
        repeated_picks<T>(130, 6);
    }
    unknown_picks<T>();
    broken_hidden_states<T>();
}

}  // namespace

// What to check comes from outside: scratch only grows within a process, and would hide an overrun
// of the next check.
int main(int, char **arguments) {
    std::string what = arguments[1];
    if (what == "fp32") all_experts<float>();
    if (what == "bf16") all_experts<bf16>();
    if (what == "fp32 products") everything<float>();
    if (what == "bf16 products") everything<bf16>();
    if (what == "fp32 layers") all_layers<float>();
    if (what == "bf16 layers") all_layers<bf16>();
    if (what == "fp32 prompts") all_prompts<float>();
    if (what == "bf16 prompts") all_prompts<bf16>();
    if (what == "logits")
        for (int kind = 0; kind < 7; kind++)
            for (double top_k : {0., 1., 200., 999.})
                for (double top_p : {1., 0.9})
                    for (double min_p : {0., 0.1})
                        for (double temperature : {0., 1.})
                            broken_logits(kind, top_k, top_p, min_p, temperature);
    std::puts("done");
}
