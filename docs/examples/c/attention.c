/* Softmax attention and its gradients, to be judged without a line of Python:

   cc -O2 -shared -fPIC docs/examples/c/attention.c -lm -o libattention.so
   python -m attnkit_conformance run --like c ./libattention.so:attention

   The prototypes are those of attnkit_conformance.adapters.bases.c. Arrays are dense; mask is NULL, or has 1 where a pair is visible. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct {
    const float *q, *k, *v;
    const uint8_t *mask;
    double scale;
    int64_t L, S, d, e;
} call;

/* The weights of query i in the item b of a batch. A row that sees nothing has none. */
static void weigh(const call *c, int64_t b, int64_t i, double *w) {
    const float *q = c->q + (b * c->L + i) * c->d;
    double largest = -INFINITY, total = 0;
    for (int64_t j = 0; j < c->S; j++) {
        const float *k = c->k + (b * c->S + j) * c->d;
        w[j] = -INFINITY;
        if (c->mask && !c->mask[(b * c->L + i) * c->S + j]) continue;
        w[j] = 0;
        for (int64_t n = 0; n < c->d; n++) w[j] += (double)q[n] * k[n];
        w[j] *= c->scale;
        largest = fmax(largest, w[j]);
    }
    for (int64_t j = 0; j < c->S; j++) total += w[j] = isinf(w[j]) ? 0 : exp(w[j] - largest);
    for (int64_t j = 0; j < c->S; j++) w[j] = total == 0 ? 0 : w[j] / total;
}

int attention_float32(const float *q, const float *k, const float *v, const uint8_t *mask, double scale,
                      int64_t n, int64_t L, int64_t S, int64_t d, int64_t e, float *o) {
    call c = {q, k, v, mask, scale, L, S, d, e};
    double *w = malloc((S + 1) * sizeof(double));
    if (!w) return 1;
    for (int64_t b = 0; b < n; b++)
        for (int64_t i = 0; i < L; i++) {
            weigh(&c, b, i, w);
            for (int64_t m = 0; m < e; m++) {
                double sum = 0;
                for (int64_t j = 0; j < S; j++)
                    if (w[j] != 0) sum += w[j] * v[(b * S + j) * e + m];
                o[(b * L + i) * e + m] = (float)sum;
            }
        }
    free(w);
    return 0;
}

int attention_float32_vjp(const float *q, const float *k, const float *v, const uint8_t *mask, double scale,
                          int64_t n, int64_t L, int64_t S, int64_t d, int64_t e,
                          const float *o_bar, float *dq, float *dk, float *dv) {
    call c = {q, k, v, mask, scale, L, S, d, e};
    double *w = malloc((2 * S + 1) * sizeof(double)), *g = w + S;
    double *gq = calloc(d + 1, sizeof(double)), *gk = calloc(S * d + 1, sizeof(double)), *gv = calloc(S * e + 1, sizeof(double));
    if (!w || !gq || !gk || !gv) return 1;
    for (int64_t b = 0; b < n; b++) {
        for (int64_t x = 0; x < S * d; x++) gk[x] = 0;
        for (int64_t x = 0; x < S * e; x++) gv[x] = 0;
        for (int64_t i = 0; i < L; i++) {
            const float *do_ = o_bar + (b * L + i) * e, *qi = q + (b * L + i) * d;
            double mean = 0;
            weigh(&c, b, i, w);
            for (int64_t j = 0; j < S; j++) {
                g[j] = 0;
                if (w[j] == 0) continue;
                for (int64_t m = 0; m < e; m++) {
                    g[j] += (double)do_[m] * v[(b * S + j) * e + m];
                    gv[j * e + m] += w[j] * do_[m];
                }
                mean += w[j] * g[j];
            }
            for (int64_t x = 0; x < d; x++) gq[x] = 0;
            for (int64_t j = 0; j < S; j++) {
                double ds = w[j] * (g[j] - mean) * scale;
                if (w[j] == 0) continue;
                for (int64_t x = 0; x < d; x++) {
                    gq[x] += ds * k[(b * S + j) * d + x];
                    gk[j * d + x] += ds * qi[x];
                }
            }
            for (int64_t x = 0; x < d; x++) dq[(b * L + i) * d + x] = (float)gq[x];
        }
        for (int64_t x = 0; x < S * d; x++) dk[b * S * d + x] = (float)gk[x];
        for (int64_t x = 0; x < S * e; x++) dv[b * S * e + x] = (float)gv[x];
    }
    free(w), free(gq), free(gk), free(gv);
    return 0;
}
