/* Products of a panel with a block of queries. Queries lie along the lanes, so each is summed alone, slot after slot:
 * what it gets does not depend on the queries beside it. Logits and weights are [slot, lane], outputs [dim, lane].
 */
#include "panel.h"

#if defined(__AVX512F__)
#define VECTORS 3 /* of queries in a block */
#define AT_ONCE 8 /* slots or dims that share the loads of a block */
#else
#define VECTORS 1
#define AT_ONCE 4
#endif
#define BLOCK (VECTORS * LANES)
#define NEAR 128 /* slots whose weights stay in the first cache while all dims pass */
#define UNROLLED _Pragma("GCC unroll 8") /* or the sums stay in memory */
#define INLINE static inline __attribute__((always_inline))

INLINE void score_slots(const float *q, const float *k, int64_t dim, int slots, int vectors, float *logits) {
    lanes sum[AT_ONCE][VECTORS] = {{{0}}};
    for (int64_t d = 0; d < dim; d++) {
        lanes query[VECTORS];
        UNROLLED
        for (int j = 0; j < vectors; j++) memcpy(&query[j], q + (d * vectors + j) * LANES, sizeof(lanes));
        UNROLLED
        for (int i = 0; i < slots; i++)
            UNROLLED
            for (int j = 0; j < vectors; j++) sum[i][j] += query[j] * k[i * dim + d];
    }
    UNROLLED
    for (int i = 0; i < slots; i++) memcpy(logits + i * vectors * LANES, sum[i], vectors * sizeof(lanes));
}

INLINE void score_floats(const float *q, const float *k, int64_t dim, int first, int last, int vectors, float *logits) {
    int i = first;
    for (; i + AT_ONCE <= last; i += AT_ONCE)
        score_slots(q, k + i * dim, dim, AT_ONCE, vectors, logits + i * vectors * LANES);
    for (; i < last; i++) score_slots(q, k + i * dim, dim, 1, vectors, logits + i * vectors * LANES);
}

INLINE void mix_floats(const float *weights, const float *v, int64_t dim, int first, int last, int vectors, float *out) {
    memset(out, 0, dim * vectors * sizeof(lanes));
    for (int from = first; from < last; from += NEAR) {
        int to = last < from + NEAR ? last : from + NEAR;
        for (int64_t d = 0; d < dim; d += AT_ONCE) {
            lanes sum[AT_ONCE][VECTORS];
            UNROLLED
            for (int e = 0; e < AT_ONCE; e++)
                memcpy(sum[e], out + (d + e) * vectors * LANES, vectors * sizeof(lanes));
            for (int i = from; i < to; i++) {
                lanes weight[VECTORS];
                UNROLLED
                for (int j = 0; j < vectors; j++) memcpy(&weight[j], weights + (i * vectors + j) * LANES, sizeof(lanes));
                UNROLLED
                for (int e = 0; e < AT_ONCE; e++)
                    UNROLLED
                    for (int j = 0; j < vectors; j++) sum[e][j] += weight[j] * v[i * dim + d + e];
            }
            UNROLLED
            for (int e = 0; e < AT_ONCE; e++)
                memcpy(out + (d + e) * vectors * LANES, sum[e], vectors * sizeof(lanes));
        }
    }
}

#if WITH_AMX
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_shape;

/* Eight tiles of 16 rows of 64 bytes. What was configured before is kept, for oneDNN believes it still is. */
static void tiles_on(tile_shape *before) {
    tile_shape mine = {.palette = 1};
    _tile_storeconfig(before);
    for (int i = 0; i < 8; i++) mine.bytes[i] = 64, mine.rows[i] = 16;
    _tile_loadconfig(&mine);
}

static void tiles_off(const tile_shape *before) {
    if (before->palette) _tile_loadconfig(before);
    else _tile_release();
}

/* q: bf16 pairs [dim / 2, lane, 2]. */
INLINE void score_tiles(const char *q, const char *k, int64_t dim, int first, int last, int vectors, float *logits) {
    int64_t bytes = dim * 2, across = vectors * LANES * 4;
    for (int i = first; i < last; i += TURN)
        for (int j = 0; j < vectors; j++) {
            _tile_zero(0);
            _tile_zero(1);
            for (int64_t d = 0; d < dim; d += 32) {
                _tile_loadd(2, q + d / 2 * across + j * LANES * 4, across);
                _tile_loadd(3, k + i * bytes + d * 2, bytes);
                _tile_loadd(4, k + (i + 16) * bytes + d * 2, bytes);
                _tile_dpbf16ps(0, 3, 2);
                _tile_dpbf16ps(1, 4, 2);
            }
            _tile_stored(0, logits + (i * vectors + j) * LANES, across);
            _tile_stored(1, logits + ((i + 16) * vectors + j) * LANES, across);
        }
}

/* weights: bf16 pairs [slot / 2, lane, 2]; v: [group of 32 slots, dim, 32]. */
INLINE void mix_tiles(const char *weights, const char *v, int64_t dim, int first, int last, int vectors, float *out) {
    int64_t across = vectors * LANES * 4;
    for (int j = 0; j < vectors; j++)
        for (int64_t d = 0; d < dim; d += 32) {
            _tile_zero(0);
            _tile_zero(1);
            for (int i = first; i < last; i += TURN) {
                _tile_loadd(2, weights + i / 2 * across + j * LANES * 4, across);
                _tile_loadd(3, v + (i * dim + d * TURN) * 2, 64);
                _tile_loadd(4, v + (i * dim + (d + 16) * TURN) * 2, 64);
                _tile_dpbf16ps(0, 3, 2);
                _tile_dpbf16ps(1, 4, 2);
            }
            _tile_stored(0, out + (d * vectors + j) * LANES, across);
            _tile_stored(1, out + ((d + 16) * vectors + j) * LANES, across);
        }
}

/* The weights of slots i and i + 1 as pairs. */
INLINE void pair_weights(lanes even, lanes odd, char *to) {
    const __m512i order = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0
    );
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, both));
}
#else
typedef int tile_shape;
static void tiles_on(tile_shape *before) {}
static void tiles_off(const tile_shape *before) {}
INLINE void score_tiles(const char *q, const char *k, int64_t dim, int first, int last, int vectors, float *logits) {}
INLINE void mix_tiles(const char *weights, const char *v, int64_t dim, int first, int last, int vectors, float *out) {}
INLINE void pair_weights(lanes even, lanes odd, char *to) {}
#endif
