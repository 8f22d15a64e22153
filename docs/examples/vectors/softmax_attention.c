/* Softmax attention held against its test vectors, without JSON and without libraries:

   cc -O2 softmax_attention.c -lm -o softmax_attention
   ./softmax_attention VECTORS softmax_attention/float32/small-cross mine.safetensors

   It serves plain cases (no mask, no bias, as many heads of q as of k), shows the largest error relative to what is allowed, and
   writes what it read and computed for `python -m attnkit_conformance compare VECTORS mine.safetensors`. */
#include <math.h>

#include "read_vectors.h"

static struct tensor held[64];
static int count;

static struct tensor *named(const char *name) {
    for (int n = 0; n < count; n++)
        if (!strcmp(held[n].name, name)) return held + n;
    fprintf(stderr, "no tensor %s\n", name);
    exit(2);
}

static int is_double(const struct tensor *t) { return !strcmp(t->dtype, "float64"); }

static double get(const struct tensor *t, long n) {
    return is_double(t) ? ((double *)t->bytes)[n] : ((float *)t->bytes)[n];
}

static void set(struct tensor *t, long n, double x) {
    if (is_double(t)) ((double *)t->bytes)[n] = x;
    else ((float *)t->bytes)[n] = (float)x;
}

/* One row of weights, and of the output, whose batch and head begin at key `first`. */
static void attend(const struct tensor *q, const struct tensor *k, const struct tensor *v, struct tensor *o, long row,
                   long first, long S, long d, long e, double *w) {
    double top = -INFINITY, sum = 0;
    for (long j = 0; j < S; j++) {
        w[j] = 0;
        for (long c = 0; c < d; c++) w[j] += get(q, row * d + c) * get(k, (first + j) * d + c) / sqrt(d);
        top = fmax(top, w[j]);
    }
    for (long j = 0; j < S; j++) sum += w[j] = exp(w[j] - top);
    for (long c = 0; c < e; c++) {
        double x = 0;
        for (long j = 0; j < S; j++) x += w[j] / sum * get(v, (first + j) * e + c);
        set(o, row * e + c, x);
    }
}

/* A safetensors file: the length of a JSON header, the header, the bytes. */
static int write_tensors(const char *path, const char *id, struct tensor **tensors, int n) {
    static char header[65536] = "{";
    long at = 1, offset = 0;
    for (int i = 0; i < n; offset += tensors[i++]->size)
        at += sprintf(header + at, "%s\"%s/%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%ld,%ld]}", i ? "," : "",
                      id, tensors[i]->name, is_double(tensors[i]) ? "F64" : "F32", tensors[i]->shape, offset,
                      offset + tensors[i]->size);
    at += sprintf(header + at, "}");
    unsigned long long length = at;
    FILE *file = fopen(path, "wb");
    if (!file) return 0;
    fwrite(&length, 8, 1, file);
    fwrite(header, 1, at, file);
    for (int i = 0; i < n; i++) fwrite(tensors[i]->bytes, 1, tensors[i]->size, file);
    return !fclose(file);
}

int main(int argc, char **argv) {
    if (argc != 4 || (count = read_case(argv[1], argv[2], held)) <= 0) {
        fprintf(stderr, "expected VECTORS CASE OUT, a folder of test vectors, one of its cases, and a file to write\n");
        return 2;
    }
    struct tensor *q = named("in.q"), *k = named("in.k"), *v = named("in.v"), *golden = named("out.o"), *allowed = named("allowed.out.o");
    struct tensor o = *golden;
    long B, H, L, S, d, e;
    sscanf(q->shape, "[%ld,%ld,%ld,%ld]", &B, &H, &L, &d);
    sscanf(v->shape, "[%ld,%ld,%ld,%ld]", &B, &H, &S, &e);
    strcpy(o.dtype, q->dtype); /* the golden output is in double precision, ours in the dtype of the case */
    o.size = B * H * L * e * (is_double(q) ? 8 : 4);
    o.bytes = malloc(o.size);
    double share = 0, *w = malloc(S * sizeof *w);
    for (long row = 0; row < B * H * L; row++) attend(q, k, v, &o, row, row / L * S, S, d, e, w);
    long wrong = 0;
    for (long n = 0; n < B * H * L * e; n++) {
        double gap = fabs(get(&o, n) - get(golden, n));
        share = fmax(share, gap / get(allowed, n));
        wrong += !(gap <= get(allowed, n)); /* NaN as well */
    }
    printf("%s: max error %.3g of what is allowed\n", argv[2], share);
    if (!write_tensors(argv[3], argv[2], (struct tensor *[]){q, k, v, &o}, 4)) return 2;
    return wrong > 0;
}
