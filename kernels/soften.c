/* Causal softmax of a block of prefill logits, in place, in one pass a row: weights, log-sum-exp and column mass.
 *
 * A task is CHUNK queries of one head with a mass of its own; masses are added in order, so no result depends on the
 * number of threads. All fp32. Built by native.py.
 */
#include "exponential.h"

#define LANES 16
#define CHUNK 16 /* queries */

typedef struct {
    float *logits, *lse, *mass, *partial; /* [heads, tokens, n], [heads, tokens], [kv_heads, n], [tasks, n] */
    int64_t heads, kv_heads, tokens, n, own, window, threads;
} block;

/* Columns begin..end of a row are visible. Sums run over LANES columns side by side, or the compiler cannot. */
static float row(float *restrict x, int64_t n, int64_t begin, int64_t end, float *restrict mass) {
    float tops[LANES], sums[LANES] = {0};
    float top = -INFINITY, sum = 0;
    int64_t i;
    for (int j = 0; j < LANES; j++) tops[j] = -INFINITY;
    for (i = begin; i + LANES <= end; i += LANES)
        for (int j = 0; j < LANES; j++) tops[j] = x[i + j] > tops[j] ? x[i + j] : tops[j];
    for (; i < end; i++) top = x[i] > top ? x[i] : top;
    for (int j = 0; j < LANES; j++) top = tops[j] > top ? tops[j] : top;
    for (i = begin; i + LANES <= end; i += LANES)
        for (int j = 0; j < LANES; j++) {
            x[i + j] = exponential(x[i + j] - top);
            sums[j] += x[i + j];
        }
    for (; i < end; i++) {
        x[i] = exponential(x[i] - top);
        sum += x[i];
    }
    for (int j = 0; j < LANES; j++) sum += sums[j];
    float share = 1.0f / sum;
    for (i = begin; i < end; i++) x[i] *= share;
    if (mass)
        for (i = begin; i < end; i++) mass[i] += x[i];
    memset(x, 0, begin * sizeof *x);
    memset(x + end, 0, (n - end) * sizeof *x);
    return top + logf(sum);
}

void kvgate_soften(const block *a) {
    int64_t chunks = (a->tokens + CHUNK - 1) / CHUNK, group = a->heads / a->kv_heads;
#pragma omp parallel num_threads((int)a->threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < a->heads * chunks; task++) {
            int64_t head = task / chunks, first = task % chunks * CHUNK;
            float *mass = a->mass ? a->partial + task * a->n : 0;
            if (mass) memset(mass, 0, a->n * sizeof *mass);
            for (int64_t t = first; t < a->tokens && t < first + CHUNK; t++) {
                int64_t at = head * a->tokens + t, end = a->own + t + 1;
                int64_t begin = a->window && end > a->window ? end - a->window : 0;
                a->lse[at] = row(a->logits + at * a->n, a->n, begin, end, mass);
            }
        }
        if (a->mass) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < a->n; i++)
                for (int64_t head = 0; head < a->kv_heads; head++) {
                    float sum = 0;
                    for (int64_t part = 0; part < group * chunks; part++)
                        sum += a->partial[(head * group * chunks + part) * a->n + i];
                    a->mass[head * a->n + i] = sum;
                }
        }
    }
}
