// Any other processor, and AVX without integers of its width: included by vectors.h. What is here is the meaning of the steps.

constexpr int TILE = SPAN == 8 ? 2 : 4, MIXED = TILE, ACROSS = SPAN == 8 ? 6 : 8, AT_ONCE = 2, FEW_ROWS = 4;
constexpr bool HALVES = false;

inline const char *lacking() {
    return nullptr;
}

template <class V>
INLINE void hold(V &) {}

INLINE su upper_halves(su v) { return v & 0xffff0000u; }

inline v4 fold4(sf v) {
    v4 parts[SPAN / 4];
    memcpy(parts, &v, sizeof v);
    return SPAN == 8 ? parts[0] + parts[SPAN / 4 - 1] : parts[0];
}

INLINE void sums_by_row(const sf (&v)[4][4], int count, v4 (&out)[4]) { sums_one_by_one(v, count, out); }

inline si small_products(ub a, sb x, ub b, sb y) {
    si sums = {};
    for (int i = 0; i < BYTES; i++) sums[i / 4] += int32_t(a[i]) * x[i] + int32_t(b[i]) * y[i];
    return sums;
}

inline si add_bytes(si sums, sb a, const void *x, int64_t i) {
    sb b = fetch<sb>((const int8_t *)x + i);
    for (int j = 0; j < BYTES; j++) sums[j / 4] += int32_t(a[j]) * b[j];
    return sums;
}

inline ub nibbles_above(ub v) { return v >> 4; }

INLINE void widen_nibbles(const uint8_t *p, sf *low, sf *high) {
    for (int i = 0; i < SPAN; i++) {
        (*low)[i] = float(p[i] & 15);
        (*high)[i] = float(p[i] & 0xf0);
    }
}
