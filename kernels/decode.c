/* Paged decode attention on the CPU: reads K and V where they lie in the pages, each byte once, with no gathered copy.
 *
 * A task is a split of 512 slots, at absolute multiples, of one row and kv head; splits are merged in order. So no result
 * depends on other rows or on the number of threads. Logits, softmax and sums are fp32. Built by native.py, which checks
 * that head_dim is a multiple of 16. Shapes and rules: types.py.
 */
#include "attention.h"

#define AHEAD 24 /* slots to fetch before they are needed */
#define AT_ONCE 4 /* query heads that share a pass over K and V */

typedef float eight __attribute__((vector_size(32)));

typedef struct {
    int count;
    int32_t slot[SPLIT];
    int32_t sink[SPLIT];
    const char *k[SPLIT], *v[SPLIT];
} visible_slots;

static inline eight half_of(lanes value) {
    eight low, high;
    memcpy(&low, &value, sizeof low);
    memcpy(&high, (const char *)&value + sizeof low, sizeof high);
    return low + high;
}

static inline eight pair_up(eight a, eight b) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) + __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
}

/* The sums of four vectors, in the first four places. */
static inline eight totals(const lanes *four) {
    eight a = pair_up(half_of(four[0]), half_of(four[1])), b = pair_up(half_of(four[2]), half_of(four[3]));
    eight c = pair_up(a, b);
    return pair_up(c, c);
}

/* Pages lie anywhere, so the processor does not guess the next one. */
static inline void ahead(const char *const *at, int i, int count, int64_t bytes) {
    if (i < count)
        for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(at[i] + b);
}

static int visible(const launch *a, int64_t row, int32_t k, int32_t p) {
    if (k > p || (a->window && (int64_t)p - k >= a->window)) return 0;
    return !a->lower || k >= a->lower[row] || is_exempt(a, row, k);
}

static void find_visible(const launch *a, int64_t row, int64_t head, int64_t begin, int64_t end, visible_slots *seen) {
    const int32_t *table = a->tables + row * a->tables_row + head * a->tables_head;
    const int32_t *live = a->live + row * a->live_row + head * a->live_head;
    int64_t bytes = a->bf16 ? 2 : 4;
    int32_t p = a->query_position[row];
    int plain = !a->window && !a->lower && !a->sink_end, count = 0;
    uint32_t full = a->size == 32 ? UINT32_MAX : (1u << a->size) - 1;
    for (int64_t at = begin; at < end; at++) {
        int64_t page = at / a->size, slot = at % a->size;
        uint32_t word = (uint32_t)live[page];
        if (!(word >> slot)) { /* nothing alive from here to the end of the page */
            at += a->size - slot - 1;
            continue;
        }
        if (!(word >> slot & 1)) continue;
        int64_t id = table[page];
        if (slot == 0 && at + 8 * a->size < end && live[page + 8])
            __builtin_prefetch(a->positions + table[page + 8] * a->positions_page);
        if (plain && word == full && slot == 0 && at + a->size <= end) {
            const int32_t *where = a->positions + id * a->positions_page;
            const char *k = (const char *)a->k + id * a->k_page * bytes, *v = (const char *)a->v + id * a->v_page * bytes;
            int32_t last = INT32_MIN;
            for (int64_t s = 0; s < a->size; s++) last = where[s] > last ? where[s] : last;
            if (last <= p) {
                for (int64_t s = 0; s < a->size; s++) {
                    seen->slot[count + s] = (int32_t)(at + s);
                    seen->sink[count + s] = 0;
                    seen->k[count + s] = k + s * a->k_slot * bytes;
                    seen->v[count + s] = v + s * a->v_slot * bytes;
                }
                count += (int)a->size;
                at += a->size - 1;
                continue;
            }
        }
        int32_t k = a->positions[id * a->positions_page + slot];
        if (!visible(a, row, k, p)) continue;
        seen->slot[count] = (int32_t)at;
        seen->sink[count] = a->sink_end && k < a->sink_end[row];
        seen->k[count] = (const char *)a->k + (id * a->k_page + slot * a->k_slot) * bytes;
        seen->v[count] = (const char *)a->v + (id * a->v_page + slot * a->v_slot) * bytes;
        count++;
    }
    seen->count = count;
}

static inline __attribute__((always_inline)) void score_one(
    const visible_slots *seen, int i, int heads, int64_t dim, int bf16, const float *q, const float *q_sink, float *logits
) {
    const float *query = seen->sink[i] ? q_sink : q;
    lanes acc[AT_ONCE] = {{0}};
    for (int64_t d = 0; d < dim; d += LANES) {
        lanes key = load(seen->k[i] + d * (bf16 ? 2 : 4), bf16);
        for (int g = 0; g < heads; g++) acc[g] += load((const char *)(query + g * dim + d), 0) * key;
    }
    eight sums = totals(acc);
    for (int g = 0; g < heads; g++) logits[g * SPLIT + i] = sums[g];
}

static inline __attribute__((always_inline)) void score(
    const launch *a, const visible_slots *seen, int heads, int bf16, const float *q, const float *q_sink, float *logits,
    float *peak
) {
    int64_t dim = a->dim, bytes = bf16 ? 2 : 4;
    int count = seen->count;
    int i = 0;
    for (; i + 4 <= count; i += 4) { /* four slots at once share the loads of the queries and the sums across lanes */
        if (seen->sink[i] | seen->sink[i + 1] | seen->sink[i + 2] | seen->sink[i + 3]) {
            for (int j = i; j < i + 4; j++) score_one(seen, j, heads, dim, bf16, q, q_sink, logits);
            continue;
        }
        for (int j = 0; j < 4; j++) ahead(seen->k, i + AHEAD + j, count, dim * bytes);
        lanes acc[AT_ONCE][4] = {{{0}}};
        for (int64_t d = 0; d < dim; d += LANES) {
            lanes key[4];
            for (int j = 0; j < 4; j++) key[j] = load(seen->k[i + j] + d * bytes, bf16);
            for (int g = 0; g < heads; g++) {
                lanes query = load((const char *)(q + g * dim + d), 0);
                for (int j = 0; j < 4; j++) acc[g][j] += query * key[j];
            }
        }
        for (int g = 0; g < heads; g++) {
            eight sums = totals(acc[g]);
            memcpy(logits + g * SPLIT + i, &sums, 4 * sizeof(float));
        }
    }
    for (; i < count; i++) score_one(seen, i, heads, dim, bf16, q, q_sink, logits);
    for (int g = 0; g < heads; g++) {
        float *x = logits + g * SPLIT, top = -INFINITY;
        if (a->softcap > 0)
            for (int i = 0; i < count; i++) x[i] = a->softcap * tanhf(x[i] / a->softcap);
        for (int i = 0; i < count; i++) top = x[i] > top ? x[i] : top;
        peak[g] = top;
    }
}

#define WIDE 4 /* vectors of V that share the loads of the weights */

static inline __attribute__((always_inline)) void weigh_part(
    const visible_slots *seen, int count, int heads, int bf16, int vectors, int64_t d, int64_t fetch, int64_t dim,
    const float *logits, float *out
) {
    lanes acc[AT_ONCE][WIDE] = {{{0}}};
    for (int i = 0; i < count; i++) {
        const char *at = seen->v[i] + d * (bf16 ? 2 : 4);
        if (fetch) ahead(seen->v, i + AHEAD, count, fetch);
        lanes value[WIDE];
        for (int j = 0; j < vectors; j++) value[j] = load(at + j * LANES * (bf16 ? 2 : 4), bf16);
        for (int g = 0; g < heads; g++)
            for (int j = 0; j < vectors; j++) acc[g][j] += logits[g * SPLIT + i] * value[j];
    }
    for (int g = 0; g < heads; g++)
        for (int j = 0; j < vectors; j++) memcpy(out + g * dim + d + j * LANES, &acc[g][j], sizeof(lanes));
}

static inline __attribute__((always_inline)) void weigh(
    const launch *a, const visible_slots *seen, int heads, int bf16, float *logits, const float *peak, float *sum, float *out
) {
    int64_t dim = a->dim, bytes = bf16 ? 2 : 4;
    int count = seen->count;
    for (int g = 0; g < heads; g++) {
        float *x = logits + g * SPLIT, all = 0;
        for (int i = 0; i < count; i++) x[i] = exponential(x[i] - peak[g]);
        for (int i = 0; i < count; i++) all += x[i];
        sum[g] = all;
    }
    for (int64_t d = 0; d < dim; d += WIDE * LANES) {
        int64_t vectors = (dim - d) / LANES < WIDE ? (dim - d) / LANES : WIDE;
        if (vectors == WIDE) weigh_part(seen, count, heads, bf16, WIDE, d, d == 0 ? dim * bytes : 0, dim, logits, out);
        else for (int64_t one = 0; one < vectors; one++)
            weigh_part(seen, count, heads, bf16, 1, d + one * LANES, d + one == 0 ? dim * bytes : 0, dim, logits, out);
    }
}

static void copy_query(const launch *a, const void *from, int64_t offset, float scale, float *to) {
    for (int64_t d = 0; d < a->dim; d++) {
        float value = a->bf16 ? widen(((const uint16_t *)from)[offset + d]) : ((const float *)from)[offset + d];
        to[d] = value * scale;
    }
}

static void one_split(const launch *a, int64_t row, int64_t head, int64_t split, int64_t splits) {
    int64_t end = (int64_t)a->counts[row * a->counts_row + head * a->counts_head] * a->size;
    int64_t begin = split * SPLIT, slots = a->width * a->size;
    if (end > begin + SPLIT) end = begin + SPLIT;
    visible_slots seen;
    find_visible(a, row, head, begin, end, &seen);
    float logits[AT_ONCE * SPLIT], q[AT_ONCE * a->dim], q_sink[AT_ONCE * a->dim];
    for (int64_t g = 0; g < a->group; g += AT_ONCE) {
        int heads = a->group - g < AT_ONCE ? (int)(a->group - g) : AT_ONCE;
        int64_t first = head * a->group + g;
        int64_t part[AT_ONCE];
        float peak[AT_ONCE], sum[AT_ONCE], out[AT_ONCE * a->dim];
        for (int j = 0; j < heads; j++) {
            copy_query(a, a->q, row * a->q_row + (first + j) * a->q_head, a->scale, q + j * a->dim);
            if (a->q_sink)
                copy_query(a, a->q_sink, row * a->sink_row + (first + j) * a->sink_head, a->scale, q_sink + j * a->dim);
            part[j] = (row * a->heads * a->group + first + j) * splits + split;
        }
#define SCORE(N)                                                                                       \
    case N:                                                                                            \
        if (a->bf16) score(a, &seen, N, 1, q, q_sink, logits, peak);                                   \
        else score(a, &seen, N, 0, q, q_sink, logits, peak);                                           \
        break;
        switch (heads) { SCORE(1) SCORE(2) SCORE(3) SCORE(4) }
        if (a->scores)
            for (int j = 0; j < heads; j++) {
                float *scores = a->scores + (row * a->heads * a->group + first + j) * slots;
                for (int64_t s = begin; s < end; s++) scores[s] = -INFINITY;
                for (int i = 0; i < seen.count; i++) scores[seen.slot[i]] = logits[j * SPLIT + i];
            }
#define WEIGH(N)                                                                                       \
    case N:                                                                                            \
        if (a->bf16) weigh(a, &seen, N, 1, logits, peak, sum, out);                                    \
        else weigh(a, &seen, N, 0, logits, peak, sum, out);                                            \
        break;
        switch (heads) { WEIGH(1) WEIGH(2) WEIGH(3) WEIGH(4) }
        for (int j = 0; j < heads; j++) {
            a->part_max[part[j]] = peak[j];
            a->part_sum[part[j]] = sum[j];
            memcpy(a->part + part[j] * a->dim, out + j * a->dim, a->dim * sizeof(float));
        }
    }
}

static void merge(const launch *a, int64_t row, int64_t head, int64_t splits) {
    int64_t end = (int64_t)a->counts[row * a->counts_row + head * a->counts_head] * a->size;
    int64_t filled = (end + SPLIT - 1) / SPLIT, slots = a->width * a->size;
    for (int64_t g = 0; g < a->group; g++) {
        int64_t query = row * a->heads * a->group + head * a->group + g;
        float top = -INFINITY, sum = 0, *out = (float *)a->out + query * a->dim;
        for (int64_t s = 0; s < filled; s++)
            if (a->part_max[query * splits + s] > top) top = a->part_max[query * splits + s];
        memset(out, 0, a->dim * sizeof(float));
        a->lse[query] = -INFINITY;
        if (top == -INFINITY) continue; /* nothing visible */
        for (int64_t s = 0; s < filled; s++) {
            int64_t part = query * splits + s;
            float share = exponential(a->part_max[part] - top);
            if (share == 0) continue;
            sum += share * a->part_sum[part];
            for (int64_t d = 0; d < a->dim; d++) out[d] += share * a->part[part * a->dim + d];
        }
        for (int64_t d = 0; d < a->dim; d++) out[d] /= sum;
        a->lse[query] = top + logf(sum);
        if (!a->scores) continue;
        float *mass = a->mass + (row * a->heads + head) * slots, *scores = a->scores + query * slots;
        for (int64_t s = 0; s < end; s++) mass[s] += exponential(scores[s] - top) / sum;
    }
}

void kvgate_decode(const launch *a) {
    int64_t splits = (a->width * a->size + SPLIT - 1) / SPLIT, pairs = a->rows * a->heads;
#pragma omp parallel num_threads((int)a->threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < pairs * splits; task++) {
            int64_t pair = task / splits, split = task % splits, row = pair / a->heads, head = pair % a->heads;
            if (split * SPLIT < (int64_t)a->counts[row * a->counts_row + head * a->counts_head] * a->size)
                one_split(a, row, head, split, splits);
        }
#pragma omp for schedule(dynamic, 4)
        for (int64_t pair = 0; pair < pairs; pair++) merge(a, pair / a->heads, pair % a->heads, splits);
    }
}
