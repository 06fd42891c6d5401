/* What the compiled kernels share: the launch record (native.py fills it), vectors, exp and the visibility rule. */
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define SPLIT 512 /* slots, at absolute multiples, whose softmax is taken together */
#define LANES 16

typedef float lanes __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));
typedef uint32_t words __attribute__((vector_size(64)));

/* Shapes as in types.py; strides in elements. Decode has one token a row, so its queries are counted by row. Without
 * tables the keys are those of a prefill: k[slot * k_slot + head * k_head], position = slot, `contiguous` of them.
 */
typedef struct {
    const void *q, *q_sink, *k, *v;
    const int32_t *positions, *tables, *live, *counts, *query_position, *lower, *exempt, *sink_end, *row_start;
    float *part, *part_max, *part_sum, *scores;
    void *out;
    float *lse, *mass;
    char *scratch;
    int64_t q_row, q_head, sink_row, sink_head, k_page, k_slot, v_page, v_slot, positions_page;
    int64_t tables_row, tables_head, live_row, live_head, counts_row, counts_head, k_head, v_head;
    int64_t rows, heads, group, dim, size, width, contiguous, spans, window, bf16, amx, threads;
    float scale, softcap;
} launch;

static inline lanes load(const char *at, int bf16) {
    lanes value;
    if (bf16) {
        halves half;
        memcpy(&half, at, sizeof half);
        words word = __builtin_convertvector(half, words) << 16;
        memcpy(&value, &word, sizeof value);
    } else {
        memcpy(&value, at, sizeof value);
    }
    return value;
}

static inline float widen(uint16_t half) {
    uint32_t word = (uint32_t)half << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

/* To bf16, to nearest and even. */
static inline uint16_t narrow(float value) {
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    if (value != value) return 0x7fc0;
    return (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

/* exp of x <= 0 to about one unit in the last place; zero below -87 (Cephes' expf, branch free so that it vectorises) */
static inline float exponential(float x) {
    float low = x < -87.0f ? -87.0f : x;
    float n = rintf(low * 1.44269504088896341f);
    float r = low - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : p * power;
}

/* The same polynomial on a vector. */
static inline lanes exponentials(lanes x) {
#if defined(__AVX512F__)
    __m512 value = (__m512)x;
    __mmask16 kept = _mm512_cmp_ps_mask(value, _mm512_set1_ps(-87.0f), _CMP_GE_OQ);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(value, _mm512_set1_ps(1.44269504088896341f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), value);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return (lanes)_mm512_maskz_scalef_ps(kept, p, n);
#else
    lanes value;
    for (int j = 0; j < LANES; j++) value[j] = exponential(x[j]);
    return value;
#endif
}

static inline lanes larger(lanes a, lanes b) {
#if defined(__AVX512F__)
    return (lanes)_mm512_max_ps((__m512)a, (__m512)b);
#else
    for (int j = 0; j < LANES; j++) a[j] = a[j] > b[j] ? a[j] : b[j];
    return a;
#endif
}

/* In an exempt span of its row, or without a lower bound. */
static inline int is_exempt(const launch *a, int64_t row, int32_t position) {
    for (int64_t e = 0; e < a->spans; e++) {
        const int32_t *span = a->exempt + (row * a->spans + e) * 2;
        if (position >= span[0] && position < span[1]) return 1;
    }
    return 0;
}
