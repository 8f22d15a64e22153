/* Reads one case of a set of test vectors, which `python -m attnkit_conformance vectors DIR` writes (docs/vectors.md). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct tensor {
    char name[64], dtype[16], shape[64]; /* "in.q", "float32", "[2,4,9,5]" */
    long size;                           /* in bytes */
    char *bytes;                         /* little-endian, C order */
};

/* Fills `found`, which has room for all tensors of a case, and returns how many there are; -1 if a file cannot be read. */
static int read_case(const char *folder, const char *wanted, struct tensor *found) {
    char path[4096], id[256], file[256];
    long offset;
    int n = 0;
    snprintf(path, sizeof path, "%s/tensors.txt", folder);
    FILE *index = fopen(path, "r"), *data;
    if (!index) return -1;
    for (struct tensor *t = found; fscanf(index, "%255s %63s %255s %ld %ld %15s %63s", id, t->name, file, &offset,
                                          &t->size, t->dtype, t->shape) == 7; t = found + n) {
        if (strcmp(id, wanted)) continue;
        snprintf(path, sizeof path, "%s/%s", folder, file);
        t->bytes = malloc(t->size + 1);
        if (!(data = fopen(path, "rb")) || fseek(data, offset, SEEK_SET)) return -1;
        if (fread(t->bytes, 1, t->size, data) != (size_t)t->size) return -1;
        fclose(data);
        n++;
    }
    fclose(index);
    return n;
}
