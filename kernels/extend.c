/* Attention of several tokens a row over pages, and prefill with column mass (the same without tables).
 *
 * The queries of a row and kv head, token by token, form blocks; a task is a block and a split of 512 slots at absolute
 * multiples. A split's keys are copied together once for all blocks (panel.h), its softmax is taken apart and the splits
 * are merged in order. Every query has a lane of its own and masked slots add exact zeros, so its result depends on what
 * it sees and on the slots that lie in, and not on other rows, other tokens of its row or the number of threads; a row's
 * mass is added block after block. Logits, softmax, sums and mass are fp32; under AMX the weights meet V in bf16.
 */
#include "tiles.h"
#if WITH_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define PANELS (4 << 20) /* bytes of panels made at once, at least one row and kv head for each thread */
#define WAVE (3 << 19) /* bytes of weights and parts kept for each thread: they stay in its second cache */

typedef struct {
    int64_t row, head, pair, first; /* first: of the packed queries, token * group + query head of the group */
    int32_t queries, vectors;
    int32_t position[BLOCK], lower[BLOCK], earliest, latest, highest_lower;
    char *q, *q_sink;
} block;

typedef struct { /* of a block over a split */
    float top[BLOCK], sum[BLOCK];
    int32_t first, last; /* slots of the panel that were used */
    float *weights; /* [last, lane], relative to top; kept for the mass */
    float *out; /* [dim, lane] */
} part;

typedef struct {
    int64_t splits, pairs, wave, dim, panel, block, part, threads; /* counts and bytes of each */
    int64_t panels_at, starts_at, blocks_at, parts_at, own_at, own, total;
} plan;

static int64_t blocks_of(const launch *a, int64_t pair) {
    int64_t row = pair / a->heads;
    int64_t tokens = a->row_start ? a->row_start[row + 1] - a->row_start[row] : a->contiguous;
    return (tokens * a->group + BLOCK - 1) / BLOCK;
}

static plan make_plan(const launch *a) {
    plan p = {0};
    int64_t all = a->rows * a->heads, slots = a->tables ? a->width * a->size : a->contiguous, blocks = 0;
    int64_t weights = SPLIT * BLOCK * sizeof(float);
    p.threads = a->threads;
    p.splits = (slots + SPLIT - 1) / SPLIT;
    p.dim = padded_dim(a);
    p.panel = panel_bytes(a);
    p.pairs = p.splits ? PANELS / (p.splits * p.panel) : 1;
    p.pairs = p.pairs > p.threads ? p.pairs : p.threads;
    p.pairs = p.pairs < all ? p.pairs : all;
    for (int64_t pair = 0; pair < all; pair += a->heads) blocks += blocks_of(a, pair) * a->heads;
    p.block = aligned(sizeof(block)) + 2 * aligned(p.dim * BLOCK * (a->amx ? 2 : 4));
    p.part = aligned(sizeof(part)) + p.dim * BLOCK * sizeof(float) + (a->mass ? weights : 0);
    p.wave = p.splits ? WAVE * p.threads / (p.splits * p.part) : 1;
    p.wave = p.wave > p.threads ? p.wave : p.threads;
    p.wave = p.wave < blocks ? p.wave : blocks;
    p.starts_at = 64;
    p.panels_at = p.starts_at + aligned((p.pairs + 1) * sizeof(int64_t));
    p.blocks_at = p.panels_at + p.pairs * p.splits * p.panel;
    p.parts_at = p.blocks_at + p.wave * p.block;
    p.own_at = p.parts_at + p.wave * p.splits * p.part;
    p.own = (a->mass ? 0 : weights) + (a->amx ? weights / 2 : 0);
    p.total = p.own_at + p.threads * p.own;
    return p;
}

int64_t kvgate_extend_bytes(const launch *a) { return make_plan(a).total + 64; }

/* One query into its lane: fp32 and scaled, or bf16 pairs. */
static void pack_query(const launch *a, const void *from, int64_t at, int64_t dim, int64_t across, int lane, char *to) {
    const uint16_t *half = (const uint16_t *)from + at;
    const float *whole = (const float *)from + at;
    for (int64_t d = 0; d < a->dim; d++) {
        if (a->amx) ((uint16_t *)to)[(d / 2 * across + lane) * 2 + d % 2] = half[d];
        else ((float *)to)[d * across + lane] = (a->bf16 ? widen(half[d]) : whole[d]) * a->scale;
    }
}

static void fill_block(const launch *a, const plan *p, int64_t pair, int64_t number, block *to) {
    int64_t row = pair / a->heads, start = a->row_start ? a->row_start[row] : 0, first = number * BLOCK;
    int64_t tokens = a->row_start ? a->row_start[row + 1] - start : a->contiguous, left = tokens * a->group - first;
    int64_t size = p->dim * BLOCK * (a->amx ? 2 : 4);
    to->row = row;
    to->head = pair % a->heads;
    to->pair = pair;
    to->first = first;
    to->queries = (int32_t)(left < BLOCK ? left : BLOCK);
    to->vectors = (to->queries + LANES - 1) / LANES;
    to->q = (char *)to + aligned(sizeof(block));
    to->q_sink = to->q + aligned(size);
    to->earliest = INT32_MAX;
    to->latest = to->highest_lower = INT32_MIN;
    memset(to->q, 0, size);
    if (a->q_sink) memset(to->q_sink, 0, size);
    for (int i = 0; i < to->vectors * LANES; i++) {
        int64_t query = first + i, token = start + query / a->group, head = to->head * a->group + query % a->group;
        to->position[i] = INT32_MIN; /* an empty lane sees nothing */
        to->lower[i] = INT32_MIN;
        if (i >= to->queries) continue;
        pack_query(a, a->q, token * a->q_row + head * a->q_head, p->dim, to->vectors * LANES, i, to->q);
        if (a->q_sink)
            pack_query(a, a->q_sink, token * a->sink_row + head * a->sink_head, p->dim, to->vectors * LANES, i, to->q_sink);
        int32_t at = a->query_position ? a->query_position[token] : (int32_t)token;
        to->position[i] = at;
        if (a->lower) to->lower[i] = a->lower[token];
        to->earliest = at < to->earliest ? at : to->earliest;
        to->latest = at > to->latest ? at : to->latest;
        to->highest_lower = to->lower[i] > to->highest_lower ? to->lower[i] : to->highest_lower;
    }
}

/* The part of the panel that some query may see, in whole groups under AMX: the rest would add zeros. */
static void used_slots(const launch *a, const block *b, const panel *keys, part *to) {
    int last = keys->count, first = 0;
    while (last > 0 && (keys->position[last - 1] > b->latest)) last--;
    if (a->window)
        while (first < last && (int64_t)b->earliest - keys->position[first] >= a->window) first++;
    if (a->lower && !keys->exempts) {
        int32_t lowest = INT32_MAX;
        for (int i = 0; i < b->queries; i++) lowest = b->lower[i] < lowest ? b->lower[i] : lowest;
        while (first < last && keys->position[first] < lowest) first++;
    }
    to->first = a->amx ? first / TURN * TURN : first;
    to->last = a->amx ? (last + TURN - 1) / TURN * TURN : last;
    if (first == last) to->first = to->last = 0;
}

/* Whether each query sees this slot, as all ones or zeros. */
INLINE words sight(const launch *a, const int32_t *position, const int32_t *lower, int32_t k, int exempt) {
    typedef int32_t ints __attribute__((vector_size(64)));
    ints at, low;
    memcpy(&at, position, sizeof at);
    ints sees = at >= k;
    if (a->window) { /* at - k < window, without overflow: at >= k where it matters */
        int32_t most = a->window > INT32_MAX ? INT32_MAX : (int32_t)a->window;
        sees &= (at & sees) - (k & sees) < most;
    }
    if (a->lower && !exempt) {
        memcpy(&low, lower, sizeof low);
        sees &= low <= k;
    }
    return (words)sees;
}

INLINE void sink_logits(const launch *a, const block *b, const panel *keys, int first, int last, int vectors, float *logits, int64_t dim) {
    float other[TURN * VECTORS * LANES];
    for (int i = first; i < last; i += TURN) {
        int to = last < i + TURN ? last : i + TURN, any = 0;
        for (int s = i; s < to; s++) any |= keys->flags[s] & SINK;
        if (!any) continue;
        float *shifted = other - i * vectors * LANES;
        if (a->amx) score_tiles(b->q_sink, keys->k, dim, i, to, vectors, shifted);
        else score_floats((const float *)b->q_sink, (const float *)keys->k, dim, i, to, vectors, shifted);
        for (int s = i; s < to; s++)
            if (keys->flags[s] & SINK)
                memcpy(logits + s * vectors * LANES, shifted + s * vectors * LANES, vectors * sizeof(lanes));
    }
}

/* Scale, cap and mask in place; the largest logit of each lane. */
INLINE void mask_logits(const launch *a, const block *b, const panel *keys, part *to, int vectors, float *logits) {
    int clear = keys->latest <= b->earliest && (!a->window || (int64_t)b->latest - keys->earliest < a->window)
        && (!a->lower || keys->earliest >= b->highest_lower) && b->queries == vectors * LANES;
    lanes top[VECTORS], hidden;
    for (int j = 0; j < LANES; j++) hidden[j] = -INFINITY;
    for (int j = 0; j < vectors; j++) top[j] = hidden;
    for (int i = to->first; i < to->last; i++)
        for (int j = 0; j < vectors; j++) {
            float *at = logits + (i * vectors + j) * LANES;
            lanes x;
            memcpy(&x, at, sizeof x);
            if (a->amx) x *= a->scale;
            if (a->softcap > 0)
                for (int l = 0; l < LANES; l++) x[l] = a->softcap * tanhf(x[l] / a->softcap);
            if (!clear) {
                words sees = sight(
                    a, b->position + j * LANES, b->lower + j * LANES, keys->position[i], keys->flags[i] & EXEMPT
                );
                x = (lanes)(((words)x & sees) | ((words)hidden & ~sees));
            }
            if (!clear || a->amx || a->softcap > 0) memcpy(at, &x, sizeof x);
            top[j] = larger(top[j], x);
        }
    memcpy(to->top, top, vectors * sizeof(lanes));
}

/* Logits to weights in place, and as pairs for AMX. */
INLINE void weigh(const launch *a, part *to, int vectors, float *logits, char *pairs) {
    lanes sum[VECTORS] = {{0}}, top[VECTORS];
    memcpy(top, to->top, vectors * sizeof(lanes));
    for (int j = 0; j < vectors; j++)
        for (int l = 0; l < LANES; l++) top[j][l] = top[j][l] == -INFINITY ? 0 : top[j][l];
    for (int i = to->first; i < to->last; i += a->amx ? 2 : 1)
        for (int j = 0; j < vectors; j++) {
            lanes even, odd;
            memcpy(&even, logits + (i * vectors + j) * LANES, sizeof even);
            even = exponentials(even - top[j]);
            sum[j] += even;
            if (!a->amx || a->mass) memcpy(logits + (i * vectors + j) * LANES, &even, sizeof even);
            if (!a->amx) continue;
            memcpy(&odd, logits + ((i + 1) * vectors + j) * LANES, sizeof odd);
            odd = exponentials(odd - top[j]);
            sum[j] += odd;
            if (a->mass) memcpy(logits + ((i + 1) * vectors + j) * LANES, &odd, sizeof odd);
            pair_weights(even, odd, pairs + (i / 2 * vectors + j) * sizeof(lanes));
        }
    memcpy(to->sum, sum, vectors * sizeof(lanes));
}

INLINE void attend_vectors(
    const launch *a, int64_t dim, const block *b, const panel *keys, part *to, int vectors, float *logits, char *pairs
) {
    int first = to->first, last = to->last;
    if (a->amx) score_tiles(b->q, keys->k, dim, first, last, vectors, logits);
    else score_floats((const float *)b->q, (const float *)keys->k, dim, first, last, vectors, logits);
    if (keys->sinks) sink_logits(a, b, keys, first, last, vectors, logits, dim);
    mask_logits(a, b, keys, to, vectors, logits);
    weigh(a, to, vectors, logits, pairs);
    if (a->amx) mix_tiles(pairs, keys->v, dim, first, last, vectors, to->out);
    else mix_floats(logits, (const float *)keys->v, dim, first, last, vectors, to->out);
}

static void attend(const launch *a, const plan *p, const block *b, const panel *keys, part *to, char *own) {
    to->out = (float *)((char *)to + aligned(sizeof(part)));
    to->weights = a->mass ? to->out + p->dim * BLOCK : (float *)own;
    char *pairs = a->mass ? own : own + SPLIT * BLOCK * sizeof(float);
    used_slots(a, b, keys, to);
    if (to->first == to->last) return;
    switch (b->vectors) {
    case 1: attend_vectors(a, p->dim, b, keys, to, 1, to->weights, pairs); break;
#if VECTORS == 3
    case 2: attend_vectors(a, p->dim, b, keys, to, 2, to->weights, pairs); break;
    case 3: attend_vectors(a, p->dim, b, keys, to, 3, to->weights, pairs); break;
#endif
    }
}

static void write_query(const launch *a, const block *b, int lane, const float *all) {
    int64_t query = b->first + lane, token = (a->row_start ? a->row_start[b->row] : 0) + query / a->group;
    int64_t at = (token * a->heads + b->head) * a->group + query % a->group, across = b->vectors * LANES;
    for (int64_t d = 0; d < a->dim; d++) {
        float value = all[d * across + lane];
        if (a->bf16) ((uint16_t *)a->out)[at * a->dim + d] = narrow(value);
        else ((float *)a->out)[at * a->dim + d] = value;
    }
}

/* The splits of a block in order; afterwards a part's `sum` is what its weights are multiplied by for the mass. */
static void merge(const launch *a, const plan *p, const block *b, char *parts) {
    int across = b->vectors * LANES;
    float top[BLOCK], sum[BLOCK] = {0}, all[BLOCK * p->dim];
    memset(all, 0, sizeof(float) * across * p->dim);
    for (int l = 0; l < across; l++) top[l] = -INFINITY;
    for (int64_t s = 0; s < p->splits; s++) {
        part *from = (part *)(parts + s * p->part);
        if (from->first == from->last) continue;
        for (int l = 0; l < across; l++) top[l] = from->top[l] > top[l] ? from->top[l] : top[l];
    }
    for (int64_t s = 0; s < p->splits; s++) {
        part *from = (part *)(parts + s * p->part);
        if (from->first == from->last) continue;
        for (int l = 0; l < across; l++) {
            float share = from->top[l] == -INFINITY ? 0.0f : exponential(from->top[l] - top[l]);
            sum[l] += share * from->sum[l];
            from->sum[l] = share;
        }
        for (int64_t d = 0; d < p->dim; d++)
            for (int l = 0; l < across; l++) all[d * across + l] += from->sum[l] * from->out[d * across + l];
    }
    for (int l = 0; l < across; l++) sum[l] = sum[l] > 0 ? 1.0f / sum[l] : 0.0f;
    for (int64_t d = 0; d < p->dim; d++)
        for (int l = 0; l < across; l++) all[d * across + l] *= sum[l];
    for (int64_t s = 0; s < p->splits; s++) {
        part *from = (part *)(parts + s * p->part);
        if (from->first == from->last) continue;
        for (int l = 0; l < across; l++) from->sum[l] *= sum[l];
    }
    for (int l = 0; l < b->queries; l++) {
        int64_t query = b->first + l, token = (a->row_start ? a->row_start[b->row] : 0) + query / a->group;
        int64_t at = (token * a->heads + b->head) * a->group + query % a->group;
        a->lse[at] = sum[l] > 0 ? top[l] - logf(sum[l]) : -INFINITY;
        write_query(a, b, l, all);
    }
}

/* Adds a block's column mass over a split. */
static void add_mass(const launch *a, const block *b, const panel *keys, const part *from) {
    int64_t slots = a->tables ? a->width * a->size : a->contiguous;
    float *mass = a->mass + (b->row * a->heads + b->head) * slots;
    for (int i = from->first; i < from->last; i++) {
        lanes all = {0};
        float sum[LANES];
        for (int j = 0; j < b->vectors; j++) {
            lanes weight, share;
            memcpy(&weight, from->weights + (i * b->vectors + j) * LANES, sizeof weight);
            memcpy(&share, from->sum + j * LANES, sizeof share);
            all += weight * share;
        }
        memcpy(sum, &all, sizeof sum);
        for (int width = LANES / 2; width; width /= 2)
            for (int l = 0; l < width; l++) sum[l] += sum[l + width];
        mass[keys->slot[i]] += sum[0];
    }
}

/* Which row and kv head of the group a block belongs to, and its number there. */
static int64_t find_pair(const int64_t *starts, int64_t pairs, int64_t block_number, int64_t *number) {
    int64_t pair = 0;
    while (pair + 1 < pairs && starts[pair + 1] <= block_number) pair++;
    *number = block_number - starts[pair];
    return pair;
}

/* Every thread runs this; the loops share out the work. */
static void extend_pairs(const launch *a, const plan *p, char *room, int64_t begin, int64_t pairs, char *own) {
    int64_t *starts = (int64_t *)(room + p->starts_at);
    char *panels = room + p->panels_at, *blocks = room + p->blocks_at, *parts = room + p->parts_at;
#pragma omp single
    {
        starts[0] = 0;
        for (int64_t i = 0; i < pairs; i++) starts[i + 1] = starts[i] + blocks_of(a, begin + i);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < pairs * p->splits; task++) {
        int64_t pair = begin + task / p->splits;
        if (blocks_of(a, pair))
            fill_panel(a, pair / a->heads, pair % a->heads, task % p->splits, (panel *)(panels + task * p->panel));
    }
    for (int64_t done = 0; done < starts[pairs]; done += p->wave) {
        int64_t count = starts[pairs] - done < p->wave ? starts[pairs] - done : p->wave;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < count; i++) {
            int64_t number, pair = find_pair(starts, pairs, done + i, &number);
            fill_block(a, p, begin + pair, number, (block *)(blocks + i * p->block));
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < count * p->splits; task++) {
            const block *b = (block *)(blocks + task / p->splits * p->block);
            char *keys = panels + ((b->pair - begin) * p->splits + task % p->splits) * p->panel;
            attend(a, p, b, (panel *)keys, (part *)(parts + task * p->part), own);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < count; i++)
            merge(a, p, (block *)(blocks + i * p->block), parts + i * p->splits * p->part);
        if (!a->mass) continue;
#pragma omp for schedule(dynamic, 1)
        for (int64_t split = 0; split < p->splits; split++)
            for (int64_t i = 0; i < count; i++) {
                const block *b = (block *)(blocks + i * p->block);
                const part *from = (part *)(parts + (i * p->splits + split) * p->part);
                char *keys = panels + ((b->pair - begin) * p->splits + split) * p->panel;
                if (from->first < from->last) add_mass(a, b, (panel *)keys, from);
            }
    }
}

void kvgate_extend(const launch *a) {
    plan p = make_plan(a);
    char *room = a->scratch + (64 - (intptr_t)a->scratch % 64) % 64;
    int64_t all = a->rows * a->heads, next = 0;
#pragma omp parallel num_threads((int)a->threads)
    {
        int64_t me;
        tile_shape before;
#pragma omp atomic capture
        me = next++;
        if (a->amx) tiles_on(&before);
        for (int64_t begin = 0; begin < all; begin += p.pairs)
            extend_pairs(a, &p, room, begin, all - begin < p.pairs ? all - begin : p.pairs, room + p.own_at + me * p.own);
        if (a->amx) tiles_off(&before);
    }
}

/* Whether this build has the AMX path and Linux lets this process use it. */
int kvgate_amx(void) {
#if WITH_AMX
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
#else
    return 0;
#endif
}
