// A layer's experts on the CPU, included by kernels.cpp. Tokens are grouped by expert, so that each expert's weights are read once.

// The first of n picks that is neither a slot nor -1 (another rank's expert), n where there is none.
int64_t unknown_pick(const int64_t *ids, int64_t n, int64_t slots) {
    for (int64_t i = 0; i < n; i++)
        if (ids[i] < -1 || ids[i] >= slots) return i;
    return n;
}

struct Group {  // the picks of one expert: places `first` and on in the order of picks
    int64_t slot, first, count;
};

struct Grouped {
    std::vector<int64_t> order, starts;
    std::vector<Group> groups;
};

// Picks by expert. A token may pick one several times: an expert can have more rows than there are tokens.
const Grouped &group_picks(const int64_t *ids, int64_t n, int64_t slots) {
    static thread_local Grouped found;
    found.starts.assign(slots + 1, 0);
    for (int64_t i = 0; i < n; i++)
        if (ids[i] >= 0) found.starts[ids[i] + 1]++;
    found.groups.clear();
    for (int64_t e = 0; e < slots; e++) {
        int64_t count = found.starts[e + 1], first = found.starts[e];
        found.starts[e + 1] += first;
        if (count) found.groups.push_back({e, first, count});
    }
    found.order.resize(n);
    std::vector<int64_t> &next = found.starts;
    for (int64_t i = 0; i < n; i++)
        if (ids[i] >= 0) found.order[next[ids[i]]++] = i;
    return found;
}

// Rows `first` and on of a matrix of rows of k, times rows of x as `units` or products read them: where one expert has many rows and
// another few, each takes what suits it.
template <class T>
void expert_dots(bool units, const T *w, int64_t rows, const float *in, int64_t ldx, int64_t count, int64_t k, float *y, int64_t ldy) {
    if (units)
        unit_dots(w, k, rows, (const bf16 *)in, 2 * ldx, count, k, y, ldy);
    else
        dots(w, k, rows, in, ldx, count, k, y, ldy);
}

// Some columns of silu(gate) * up of one expert's rows to g, as the next product reads them. Rows of the matrix: gates first, then ups.
template <class T>
void expert_gates(bool units, const T *gate_up, const float *in, int64_t ldx, int64_t count, int64_t hidden, int64_t size, int64_t from,
                  int64_t width, float *g, int64_t ldg) {
    float *h = scratch(10, count * 2 * width), *made = scratch(11, count * width);
    for (int64_t half = 0; half < 2; half++)
        expert_dots(units, gate_up + (half * size + from) * hidden, width, in, ldx, count, hidden, h + half * width, 2 * width);
    swiglu_rows(h, count, width, made);
    for (int64_t i = 0; i < count; i++) {
        if (!units) {
            spread<T>(made + i * width, width, g + i * ldg + from);
            continue;
        }
        bf16 *row = (bf16 *)(g + i * ldg);
        narrow_all(made + i * width, width, row + from);
        if (from + width == size) std::fill(row + size, row + edged(2 * size) / 2, bf16{0});
    }
}

// Whether an expert's rows are lanes: where fewer lanes stay empty than turning a panel takes rows. The sums are the same.
template <class T>
inline bool on_lanes(const T *, int64_t) {
    return false;
}

#if defined(__AVX512BF16__)
inline bool on_lanes(const bf16 *, int64_t count) { return count >= PACKED && count <= MOST_LANES && spare_lanes(count) <= 6 && !amx_here(); }

constexpr int64_t LANE_ROWS = 32;  // rows of a matrix whose results stay in the first cache

// `expert_gates` of turned rows, to words that the next product reads.
inline void lane_gates(const bf16 *gate_up, const bf16 *x, const int64_t *order, Group e, int64_t top_k, int64_t hidden, int64_t size,
                       int64_t from, int64_t width, uint32_t *g) {
    int64_t registers = registers_of(e.count), lanes = registers * LANES;
    uint32_t *rows = (uint32_t *)scratch(9, (hidden + 1) / 2 * lanes);
    float *h = scratch(10, 2 * LANE_ROWS * lanes);
    turn_rows([=](int64_t i) { return x + order[e.first + i] / top_k * hidden; }, e.count, hidden, rows);
    for (int64_t some = from; some < from + width; some += LANE_ROWS) {
        int64_t high = std::min(LANE_ROWS, from + width - some);
        for (int64_t half = 0; half < 2; half++)
            lane_dots(gate_up + (half * size + some) * hidden, hidden, high, rows, registers, hidden, h + half * LANE_ROWS * lanes, lanes,
                      from + width - some);
        lane_swiglu(h, h + LANE_ROWS * lanes, lanes, high, registers, some, size, g);
    }
}

// Some rows of the second product, to the places of the expert's picks.
inline void lane_downs(const bf16 *down, const uint32_t *g, const int64_t *order, Group e, int64_t hidden, int64_t size, int64_t from, int64_t rows,
                       float *out) {
    int64_t registers = registers_of(e.count), lanes = registers * LANES;
    float *made = scratch(10, LANE_ROWS * lanes);
    for (int64_t some = from; some < from + rows; some += LANE_ROWS) {
        int64_t high = std::min(LANE_ROWS, from + rows - some);
        lane_dots(down + some * size, size, high, g, registers, size, made, lanes, from + rows - some);
        turn_back(made, lanes, high, e.count, [=](int64_t i) { return out + order[e.first + i] * hidden + some; });
    }
}
#else
inline void lane_gates(const bf16 *, const bf16 *, const int64_t *, Group, int64_t, int64_t, int64_t, int64_t, int64_t, uint32_t *) {}
inline void lane_downs(const bf16 *, const uint32_t *, const int64_t *, Group, int64_t, int64_t, int64_t, int64_t, float *) {}
#endif
inline void lane_gates(const float *, const float *, const int64_t *, Group, int64_t, int64_t, int64_t, int64_t, int64_t, uint32_t *) {}
inline void lane_downs(const float *, const uint32_t *, const int64_t *, Group, int64_t, int64_t, int64_t, int64_t, float *) {}

// The rows of one expert's tokens, as products read them (`spread_rows`) or as units do.
template <class T>
const float *expert_rows(bool units, const T *x, const float *spread_rows, const int64_t *order, Group e, int64_t top_k, int64_t hidden,
                         int64_t ldx) {
    if (!units && e.count == 1) return spread_rows + order[e.first] / top_k * ldx;
    float *own = scratch(9, e.count * ldx);
    for (int64_t i = 0; i < e.count; i++) {
        int64_t token = order[e.first + i] / top_k;
        if (units)
            unit_row(x + token * hidden, hidden, (bf16 *)(own + i * ldx), edged(2 * hidden) / 2);
        else
            std::copy(spread_rows + token * ldx, spread_rows + token * ldx + padded(hidden), own + i * ldx);
    }
    return own;
}

// Each token's picks, whose results [n * top_k, hidden] are in `out`, with their weights.
template <class T>
void sum_picks(const int64_t *ids, const float *weights, float *out, T *y, int64_t n, int64_t top_k, int64_t hidden) {
    split(n, 1, n * top_k * hidden, [=](int64_t begin, int64_t end) {
        float *sum = scratch(4, hidden), *share_ = scratch(6, top_k);
        for (int64_t t = begin; t < end; t++) {
            std::fill(sum, sum + hidden, 0.f);
            for (int64_t i = t * top_k; i < (t + 1) * top_k; i++) {  // a pick that is not here: its weight may be anything, NaN too
                share_[i - t * top_k] = ids[i] < 0 ? 0 : weights[i];
                if (ids[i] < 0) std::fill(out + i * hidden, out + (i + 1) * hidden, 0.f);
            }
            add_rows(sum, 0, share_, out + t * top_k * hidden, hidden, top_k, hidden);
            narrow_all(sum, hidden, y + t * hidden);
        }
    });
}

// Every pick has a row of its own in `out`: threads share nothing, and a token's picks are summed in their order, whoever computed them.
template <class T>
void experts(const T *x, const int64_t *ids, const float *weights, const T *gate_up, const T *down, T *y, int64_t n, int64_t top_k,
             int64_t slots, int64_t hidden, int64_t size) {
    int64_t picks = n * top_k, ldx = apart(hidden), ldg = apart(size);
    const Grouped &grouped = group_picks(ids, picks, slots);
    const Group *groups = grouped.groups.data();
    const int64_t *order = grouped.order.data();
    int64_t used = int64_t(grouped.groups.size()), work = picks * hidden * size;
    const float *in = pairs_take(gate_up) ? nullptr : spread_all<T>(x, n, hidden, 8);
    float *g = scratch(2, picks * ldg), *out = scratch(3, picks * hidden);
    int64_t width = block_rows(used * size, n * top_k / std::max<int64_t>(1, used)), blocks = (size + width - 1) / width;
    share(used * blocks, 2 * work, [=](int64_t unit) {
        Group e = groups[unit / blocks];
        int64_t from = unit % blocks * width;
        if (on_lanes(gate_up, e.count))
            return lane_gates(gate_up + e.slot * 2 * size * hidden, x, order, e, top_k, hidden, size, from, std::min(width, size - from),
                              (uint32_t *)(g + e.first * ldg));
        bool units = on_unit(gate_up, e.count);
        const float *rows = expert_rows(units, x, in, order, e, top_k, hidden, ldx);
        expert_gates(units, gate_up + e.slot * 2 * size * hidden, rows, ldx, e.count, hidden, size, from, std::min(width, size - from),
                     g + e.first * ldg, ldg);
    });
    int64_t height = block_rows(used * hidden, n * top_k / std::max<int64_t>(1, used)), bands = (hidden + height - 1) / height;
    share(used * bands, work, [=](int64_t unit) {
        Group e = groups[unit / bands];
        int64_t from = unit % bands * height, rows = std::min(height, hidden - from);
        if (on_lanes(down, e.count))
            return lane_downs(down + e.slot * hidden * size, (const uint32_t *)(g + e.first * ldg), order, e, hidden, size, from, rows, out);
        float *made = scratch(10, e.count * rows);
        const T *some = down + (e.slot * hidden + from) * size;
        expert_dots(on_unit(down, e.count), some, rows, g + e.first * ldg, ldg, e.count, size, made, rows);
        for (int64_t i = 0; i < e.count; i++) std::copy(made + i * rows, made + (i + 1) * rows, out + order[e.first + i] * hidden + from);
    });
    sum_picks(ids, weights, out, y, n, top_k, hidden);
}

