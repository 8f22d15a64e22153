/* Softmax attention held against its test vectors, without JSON and without libraries:

   cc -O2 softmax_attention.c -lm -o softmax_attention
   ./softmax_attention VECTORS softmax_attention/float32/small-cross mine.safetensors

   It serves plain cases: q, k and v of four axes and one batch, single or double precision, without parameters. It refuses all
   others by what it does not know, with exit status 2, shows the largest error relative to what is allowed (exit status 1 if that
   is exceeded), and writes what it read and computed for `python -m attnkit_conformance compare VECTORS mine.safetensors`. */
#include <math.h>
#include <stdarg.h>

#include "read_vectors.h"

static struct tensor held[64];
static int count;

/* Ends with a sentence and exit status 2. */
static void refuse(const char *text, ...) {
    va_list values;
    va_start(values, text);
    vfprintf(stderr, text, values);
    va_end(values);
    fputc('\n', stderr);
    exit(2);
}

static struct tensor *named(const char *name) {
    for (int n = 0; n < count; n++)
        if (!strcmp(held[n].name, name)) return held + n;
    refuse("the case has no tensor %s", name);
    return NULL;
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

/* Refuses a case unless it is one of those that `attend` computes. */
static void require_plain(const char *folder, const char *id) {
    static const char *known[] = {"in.q", "in.k", "in.v", "out.o", "allowed.out.o"};
    char param[512];
    if (strncmp(id, "softmax_attention/", 18)) refuse("%s: only softmax_attention is known", id);
    int has_param = read_param(folder, id, param);
    if (has_param < 0) refuse("%s/params.txt cannot be read", folder);
    if (has_param) refuse("%s: the parameter %s is not known", id, param);
    for (int n = 0; n < count; n++) {
        int found = !strncmp(held[n].name, "cotangent.", 10) || strstr(held[n].name, "grad."); /* outputs alone */
        for (int i = 0; i < 5; i++) found |= !strcmp(held[n].name, known[i]);
        if (!found) refuse("%s: the tensor %s is not known", id, held[n].name);
    }
    struct tensor *q = named("in.q");
    for (int i = 0; i < 5; i++) {
        struct tensor *t = named(known[i]);
        if (t->axes != 4) refuse("%s: %s has %d axes; only 4 are known", id, t->name, t->axes);
        if (strcmp(t->dtype, "float32") && strcmp(t->dtype, "float64"))
            refuse("%s: %s has dtype %s; only float32 and float64 are known", id, t->name, t->dtype);
        if (t->sizes[0] != q->sizes[0] || t->sizes[1] != q->sizes[1])
            refuse("%s: %s has other batches or heads than in.q, %s; only equal ones are known", id, t->name, t->shape);
    }
    struct tensor *k = named("in.k"), *v = named("in.v"), *o = named("out.o"), *allowed = named("allowed.out.o");
    int fits = k->sizes[3] == q->sizes[3] && v->sizes[2] == k->sizes[2] && o->sizes[2] == q->sizes[2];
    fits = fits && o->sizes[3] == v->sizes[3] && allowed->entries == o->entries;
    fits = fits && !strcmp(k->dtype, q->dtype) && !strcmp(v->dtype, q->dtype) && is_double(o);
    if (!fits) refuse("%s: %s %s %s %s do not fit together", id, q->shape, k->shape, v->shape, o->shape);
}

int main(int argc, char **argv) {
    if (argc != 4 || (count = read_case(argv[1], argv[2], held, 64)) <= 0)
        refuse("expected VECTORS CASE OUT, a folder of test vectors, one of its cases, and a file to write");
    require_plain(argv[1], argv[2]);
    struct tensor *q = named("in.q"), *k = named("in.k"), *v = named("in.v"), *golden = named("out.o"), *allowed = named("allowed.out.o");
    struct tensor o = *golden;
    long L = q->sizes[2], S = k->sizes[2], d = q->sizes[3], e = v->sizes[3], rows = q->sizes[0] * q->sizes[1] * L;
    strcpy(o.dtype, q->dtype); /* the golden output is in double precision, ours in the dtype of the case */
    o.size = o.entries * width(o.dtype);
    o.bytes = malloc(o.size + 1);
    double share = 0, *w = malloc((S + 1) * sizeof *w);
    for (long row = 0; row < rows; row++) attend(q, k, v, &o, row, row / L * S, S, d, e, w);
    long wrong = 0;
    for (long n = 0; n < o.entries; n++) {
        double gap = get(&o, n) == get(golden, n) ? 0 : fabs(get(&o, n) - get(golden, n));
        if (gap > 0) share = fmax(share, gap / get(allowed, n));
        wrong += !(gap <= get(allowed, n)); /* NaN as well */
    }
    printf("%s: %ld of %ld entries wrong, max error %.3g of what is allowed\n", argv[2], wrong, o.entries, share);
    if (!write_tensors(argv[3], argv[2], (struct tensor *[]){q, k, v, &o}, 4)) refuse("cannot write %s", argv[3]);
    return wrong > 0;
}
