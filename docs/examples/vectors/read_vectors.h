/* Reads one case of a set of test vectors, which `python -m attnkit_conformance vectors DIR` writes (docs/vectors.md). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define AXES 8

struct tensor {
    char name[64], dtype[16], shape[64]; /* "in.q", "float32", "[2,4,9,5]" */
    long sizes[AXES], entries;           /* of the axes, and their product */
    int axes;
    long size;                           /* in bytes */
    char *bytes;                         /* little-endian, C order */
};

/* The axes of "[2,4,9,5]"; 0 for anything else. */
static int read_shape(struct tensor *t) {
    char *at = t->shape;
    t->axes = 0, t->entries = 1;
    if (*at++ != '[') return 0;
    while (*at != ']') {
        if (t->axes == AXES) return 0;
        char *end;
        long n = strtol(at, &end, 10);
        if (end == at || n < 0 || (*end != ',' && *end != ']')) return 0;
        t->sizes[t->axes++] = n, t->entries *= n;
        at = end + (*end == ',');
    }
    return !at[1];
}

/* Bytes of a number of a dtype; 0 for one that is not known. */
static int width(const char *dtype) {
    if (!strcmp(dtype, "float64") || !strcmp(dtype, "int64")) return 8;
    if (!strcmp(dtype, "float32") || !strcmp(dtype, "int32")) return 4;
    if (!strcmp(dtype, "float16") || !strcmp(dtype, "bfloat16")) return 2;
    return !strcmp(dtype, "bool");
}

/* Fills `found`, which has room for so many tensors of a case, and returns how many there are; -1 if a file cannot be
   read, or is not as docs/vectors.md says. */
static int read_case(const char *folder, const char *wanted, struct tensor *found, int room) {
    char path[4096], id[256], file[256];
    long offset;
    int n = 0, fields;
    snprintf(path, sizeof path, "%s/tensors.txt", folder);
    FILE *index = fopen(path, "r"), *data;
    if (!index) return -1;
    struct tensor t;
    while ((fields = fscanf(index, "%255s %63s %255s %ld %ld %15s %63s", id, t.name, file, &offset, &t.size, t.dtype,
                            t.shape)) == 7) {
        if (strcmp(id, wanted)) continue;
        if (n == room || !read_shape(&t) || !width(t.dtype) || t.size != t.entries * width(t.dtype)) return -1;
        snprintf(path, sizeof path, "%s/%s", folder, file);
        t.bytes = malloc(t.size + 1);
        if (!(data = fopen(path, "rb")) || fseek(data, offset, SEEK_SET)) return -1;
        if (fread(t.bytes, 1, t.size, data) != (size_t)t.size) return -1;
        fclose(data);
        found[n++] = t;
    }
    fclose(index);
    return fields == EOF ? n : -1;
}

/* Whether a case has a parameter, whose name and value are put into `text`; -1 if a file cannot be read. */
static int read_param(const char *folder, const char *wanted, char text[512]) {
    char path[4096], line[1024], id[256];
    snprintf(path, sizeof path, "%s/params.txt", folder);
    FILE *index = fopen(path, "r");
    if (!index) return -1;
    int found = 0;
    while (!found && fgets(line, sizeof line, index))
        found = sscanf(line, "%255s %511[^\n]", id, text) == 2 && !strcmp(id, wanted);
    fclose(index);
    return found;
}
