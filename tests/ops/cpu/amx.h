// What a processor with AMX has, in plain C++: included before the kernels, so that the form for
// such processors is compiled and checked here. As Intel's manual has the instructions; what is an
// error there ends the program.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <immintrin.h>
#include <initializer_list>

#ifndef __AMX_TILE__
#define __AMX_TILE__ 1
#endif
#ifndef __AMX_BF16__
#define __AMX_BF16__ 1
#endif
#ifndef __AMX_INT8__
#define __AMX_INT8__ 1
#endif
#define EMULATED_AMX 1

struct EmulatedTiles {
    bool configured;
    int rows[8], row_bytes[8];
    unsigned char data[8][16][64];
};

static thread_local EmulatedTiles tiles;

static inline void tile_must(bool holds, const char *what) {
    if (holds) return;
    std::fprintf(stderr, "AMX: %s\n", what);
    std::abort();
}

static inline void emulated_loadconfig(const void *from) {
    unsigned char all[64];
    std::memcpy(all, from, 64);
    tile_must(all[0] == 1 && all[1] == 0, "palette 1, no restart");
    for (int i = 2; i < 16; i++) tile_must(all[i] == 0, "reserved bytes are zero");
    for (int i = 0; i < 8; i++) {
        uint16_t wide;
        std::memcpy(&wide, all + 16 + 2 * i, 2);
        tile_must(wide <= 64 && wide % 4 == 0 && all[48 + i] <= 16, "shapes within a tile");
        tiles.rows[i] = all[48 + i];
        tiles.row_bytes[i] = wide;
    }
    std::memset(tiles.data, 0, sizeof tiles.data);
    tiles.configured = true;
}

static inline void emulated_release() { tiles.configured = false; }

static inline void tile_used(int t) {
    tile_must(tiles.configured && tiles.rows[t] && tiles.row_bytes[t], "a tile without a shape");
}

static inline void emulated_zero(int t) {
    tile_used(t);
    std::memset(tiles.data[t], 0, sizeof tiles.data[t]);
}

static inline void emulated_load(int t, const void *from, int64_t stride) {
    tile_used(t);
    std::memset(tiles.data[t], 0, sizeof tiles.data[t]);
    for (int r = 0; r < tiles.rows[t]; r++)
        std::memcpy(tiles.data[t][r], (const char *)from + r * stride, tiles.row_bytes[t]);
}

static inline void emulated_store(int t, void *to, int64_t stride) {
    tile_used(t);
    for (int r = 0; r < tiles.rows[t]; r++)
        std::memcpy((char *)to + r * stride, tiles.data[t][r], tiles.row_bytes[t]);
}

static inline void tiles_fit(int sums, int a, int b) {
    tile_must(sums != a && sums != b && a != b, "three different tiles");
    for (int t : {sums, a, b}) tile_used(t);
    tile_must(tiles.rows[sums] == tiles.rows[a], "rows of sums and of the first");
    tile_must(tiles.row_bytes[sums] == tiles.row_bytes[b], "columns of sums and of the second");
    tile_must(tiles.row_bytes[a] == 4 * tiles.rows[b], "words of the first, rows of the second");
}

static inline float without_denormals(float x) {
    return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.f, x) : x;
}

static inline float emulated_float(uint16_t bits) {
    uint32_t u = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &u, 4);
    return without_denormals(x);
}

// Even and odd columns are summed apart, then together, then added.
static inline void emulated_dpbf16ps(int sums, int a, int b) {
    tiles_fit(sums, a, b);
    for (int m = 0; m < tiles.rows[sums]; m++)
        for (int n = 0; n < tiles.row_bytes[sums] / 4; n++) {
            float two[2] = {0, 0}, before;
            for (int k = 0; k < tiles.rows[b]; k++)
                for (int half = 0; half < 2; half++) {
                    uint16_t x, y;
                    std::memcpy(&x, tiles.data[a][m] + 4 * k + 2 * half, 2);
                    std::memcpy(&y, tiles.data[b][k] + 4 * n + 2 * half, 2);
                    float sum = std::fma(emulated_float(x), emulated_float(y), two[half]);
                    two[half] = without_denormals(sum);
                }
            std::memcpy(&before, tiles.data[sums][m] + 4 * n, 4);
            float after = without_denormals(before + without_denormals(two[0] + two[1]));
            std::memcpy(tiles.data[sums][m] + 4 * n, &after, 4);
        }
}

static inline void emulated_dpbssd(int sums, int a, int b) {
    tiles_fit(sums, a, b);
    for (int m = 0; m < tiles.rows[sums]; m++)
        for (int n = 0; n < tiles.row_bytes[sums] / 4; n++) {
            int32_t sum;
            std::memcpy(&sum, tiles.data[sums][m] + 4 * n, 4);
            for (int k = 0; k < tiles.rows[b]; k++)
                for (int i = 0; i < 4; i++)
                    sum += int32_t((int8_t)tiles.data[a][m][4 * k + i]) *
                           int32_t((int8_t)tiles.data[b][k][4 * n + i]);
            std::memcpy(tiles.data[sums][m] + 4 * n, &sum, 4);
        }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_zero emulated_zero
#define _tile_loadd emulated_load
#define _tile_stored emulated_store
#define _tile_dpbf16ps emulated_dpbf16ps
#define _tile_dpbssd emulated_dpbssd

#include "bf16.h"
#include "vnni.h"
