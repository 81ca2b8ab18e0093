// Products of any number of rows by all threads, included by kernels.cpp: dot products, panels of floats, or units.

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
    int64_t block = block_rows(rows);
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
