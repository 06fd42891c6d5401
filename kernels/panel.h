/* The live keys and values of one split of a row and kv head, copied together in slot order for extend.
 *
 * fp32: rows [count, dim] of K and of V. For AMX, bf16: K rows, and V by groups of 32 slots turned round, [dim, 32] each;
 * a group stands at absolute multiples of 32 slots and has all its slots, the dead as zeros that nobody sees, so that a
 * product adds the same things in the same order whatever else is alive.
 */
#include "attention.h"

#define NEVER INT32_MAX /* position of a dead slot */
#define TURN 32 /* slots of a group under AMX */
#define SINK 1
#define EXEMPT 2

typedef struct {
    char *k, *v;
    int32_t position[SPLIT], slot[SPLIT];
    uint8_t flags[SPLIT];
    int32_t count, earliest, latest; /* positions, dead slots included in the latest */
    int sinks, exempts;
} panel;

static inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static inline int64_t padded_dim(const launch *a) { return a->amx ? (a->dim + 31) / 32 * 32 : (a->dim + 15) / 16 * 16; }

static inline int64_t panel_bytes(const launch *a) {
    return aligned(sizeof(panel)) + 2 * SPLIT * padded_dim(a) * (a->amx ? 2 : 4);
}

static inline int64_t row_slots(const launch *a, int64_t row, int64_t head) {
    return a->tables ? a->counts[row * a->counts_row + head * a->counts_head] * a->size : a->contiguous;
}

/* One row of K or V, as fp32 or as it is. */
static inline void copy_row(const launch *a, const char *from, char *to, int64_t dim) {
    if (a->amx) {
        memcpy(to, from, a->dim * 2);
        memset(to + a->dim * 2, 0, (dim - a->dim) * 2);
        return;
    }
    float *out = (float *)to;
    int64_t d = 0;
    for (; d + LANES <= a->dim; d += LANES) {
        lanes value = load(from + d * (a->bf16 ? 2 : 4), (int)a->bf16);
        memcpy(out + d, &value, sizeof value);
    }
    for (; d < a->dim; d++) out[d] = a->bf16 ? widen(((const uint16_t *)from)[d]) : ((const float *)from)[d];
    for (; d < dim; d++) out[d] = 0;
}

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__)
#define WITH_AMX 1
/* 16 rows of 16 words turned round. */
static inline void turn(__m512i *x) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
        y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
        y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
        y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    }
}

/* V rows of 32 slots, 0 where dead, to [dim, 32]. */
static inline void turn_values(const launch *a, const char *const *rows, char *to, int64_t dim) {
    for (int64_t d = 0; d < dim; d += LANES) {
        int64_t left = a->dim - d < LANES ? a->dim - d : LANES;
        __mmask16 kept = left <= 0 ? 0 : (__mmask16)(0xffff >> (LANES - left));
        __m512i x[16];
        for (int i = 0; i < 16; i++) {
            __m256i low = rows[2 * i] ? _mm256_maskz_loadu_epi16(kept, rows[2 * i] + d * 2) : _mm256_setzero_si256();
            __m256i high =
                rows[2 * i + 1] ? _mm256_maskz_loadu_epi16(kept, rows[2 * i + 1] + d * 2) : _mm256_setzero_si256();
            x[i] = _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
        }
        turn(x);
        for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + (d + i) * TURN * 2, x[i]);
    }
}
#else
#define WITH_AMX 0
static inline void turn_values(const launch *a, const char *const *rows, char *to, int64_t dim) {}
#endif

/* Where slots from..from + TURN lie, 0 where dead; their positions, NEVER where dead. Returns how many live. */
static int live_slots(
    const launch *a, int64_t row, int64_t head, int64_t from, int64_t end, const char **k, const char **v,
    int32_t *position
) {
    int64_t bytes = a->bf16 ? 2 : 4, page = a->tables ? from / a->size : 0, slot = a->tables ? from % a->size : 0;
    const int32_t *table = a->tables + row * a->tables_row + head * a->tables_head;
    const int32_t *live = a->live + row * a->live_row + head * a->live_head;
    int alive = 0;
    for (int i = 0; i < TURN; i++) {
        int64_t at = from + i;
        k[i] = v[i] = 0;
        position[i] = NEVER;
        if (at >= end) continue;
        if (!a->tables) {
            k[i] = (const char *)a->k + (at * a->k_slot + head * a->k_head) * bytes;
            v[i] = (const char *)a->v + (at * a->v_slot + head * a->v_head) * bytes;
            position[i] = (int32_t)at;
            alive++;
            continue;
        }
        if ((uint32_t)live[page] >> slot & 1) {
            int64_t id = table[page];
            k[i] = (const char *)a->k + (id * a->k_page + slot * a->k_slot) * bytes;
            v[i] = (const char *)a->v + (id * a->v_page + slot * a->v_slot) * bytes;
            position[i] = a->positions[id * a->positions_page + slot];
            alive++;
        }
        if (++slot == a->size) {
            slot = 0;
            page++;
        }
    }
    return alive;
}

static void fill_panel(const launch *a, int64_t row, int64_t head, int64_t split, panel *to) {
    int64_t end = row_slots(a, row, head), dim = padded_dim(a), bytes = dim * (a->amx ? 2 : 4);
    int64_t begin = split * SPLIT, stop = end < begin + SPLIT ? end : begin + SPLIT;
    const char *k[TURN], *v[TURN];
    int32_t position[TURN];
    to->k = (char *)to + aligned(sizeof(panel));
    to->v = to->k + SPLIT * bytes;
    to->count = 0;
    to->earliest = NEVER;
    to->latest = INT32_MIN;
    to->sinks = to->exempts = 0;
    for (int64_t from = begin; from < stop; from += TURN) {
        if (!live_slots(a, row, head, from, stop, k, v, position)) continue;
        if (a->amx) turn_values(a, v, to->v + to->count * bytes, dim);
        for (int i = 0; i < TURN; i++) {
            if (!k[i] && !a->amx) continue;
            int at = to->count++;
            if (k[i]) copy_row(a, k[i], to->k + at * bytes, dim);
            else memset(to->k + at * bytes, 0, bytes);
            if (!a->amx) copy_row(a, v[i], to->v + at * bytes, dim);
            to->position[at] = position[i];
            to->slot[at] = (int32_t)(from + i);
            to->earliest = position[i] < to->earliest ? position[i] : to->earliest;
            to->latest = position[i] > to->latest ? position[i] : to->latest;
            to->flags[at] = 0;
            if (a->sink_end && position[i] < a->sink_end[row]) to->flags[at] |= SINK, to->sinks = 1;
            if (a->lower && a->spans && is_exempt(a, row, position[i])) to->flags[at] |= EXEMPT, to->exempts = 1;
        }
    }
}
