// Products of any number of rows by all threads, included by kernels.cpp: dot products, panels of floats, or units.

constexpr int64_t HELD_GATES = 65536;  // gates of all rows that stay in the second cache

// All rows of x [n, k] as products read them.
template <class W, class X>
float *spread_all(const X *x, int64_t n, int64_t k, int which) {
    int64_t ldx = apart(k);
    float *in = scratch(which, n * ldx);
    split(n, 1, n * k, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) spread<W>(x + i * k, k, in + i * ldx);
    });
    return in;
}

// y [n, rows] = x [n, k] w^T + bias of any shape, x plain.
template <class W, class X, class Y>
void gemm(const X *x, int64_t n, const W *w, int64_t rows, int64_t k, Y *y, const W *bias = nullptr) {
    int64_t block = block_rows(rows, n);
    bool unit = on_unit(w, n);
    const float *in = unit ? nullptr : spread_all<W>(x, n, k, 8);
    const bf16 *plain = unit ? unit_rows(x, n, k, 8) : nullptr;
    share((rows + block - 1) / block, n * rows * k, [=](int64_t i) {
        int64_t first = i * block, high = std::min(block, rows - first), ldy = apart(high);
        float *out = scratch(10, n * ldy);
        if (unit)
            unit_dots(w + first * k, k, high, plain, unit_apart(k), n, k, out, ldy);
        else
            dots(w + first * k, k, high, in, apart(k), n, k, out, ldy);
        for (int64_t t = 0; t < n; t++) {
            for (int64_t r = 0; bias && r < high; r++) out[t * ldy + r] += widen(bias[first + r]);
            keep(out + t * ldy, high, y + t * rows + first);
        }
    });
}

// The dense layer of so many rows that units take them: gates and ups go a block of columns at a time, so that they stay in the caches.
template <class T>
void mlp_units(const T *x, const T *gate_up, const T *down, T *y, int64_t n, int64_t hidden, int64_t size) {
    const bf16 *in = unit_rows(x, n, hidden, 8);
    int64_t ldx = unit_apart(hidden), ldg = unit_apart(size);
    bf16 *g = (bf16 *)scratch(2, n * ldg / 2);
    int64_t width = std::min<int64_t>(block_rows(size, n), std::max<int64_t>(PAIR, HELD_GATES / n / PAIR * PAIR));
    share((size + width - 1) / width, 2 * n * size * hidden, [=](int64_t i) {
        int64_t from = i * width, some = std::min(width, size - from);
        float *h = scratch(10, n * 2 * some), *made = scratch(11, n * some);
        for (int64_t half = 0; half < 2; half++)
            unit_dots(gate_up + (half * size + from) * hidden, hidden, some, in, ldx, n, hidden, h + half * some, 2 * some);
        swiglu_rows(h, n, some, made);
        for (int64_t t = 0; t < n; t++) {
            narrow_all(made + t * some, some, g + t * ldg + from);
            if (from + some == size) std::fill(g + t * ldg + size, g + (t + 1) * ldg, bf16{0});
        }
    });
    int64_t block = block_rows(hidden, n);
    share((hidden + block - 1) / block, n * size * hidden, [=](int64_t i) {
        int64_t first = i * block, high = std::min(block, hidden - first), ldy = apart(high);
        float *out = scratch(10, n * ldy);
        unit_dots(down + first * size, size, high, g, ldg, n, size, out, ldy);
        for (int64_t t = 0; t < n; t++) keep(out + t * ldy, high, y + t * hidden + first);
    });
}
