/* Grouped-query attention: some heads share a key and a value. */

#include <stdlib.h>

#include "attention.h"

int gqa(const gqa_t *c) {
    int64_t width = round_up(c->width, 16), value = round_up(c->value, STRIP), rows = c->count * c->heads;
    int pads = width != c->width, copies = value != c->value;
    float *memory = NULL;
    if ((pads || copies) && !(memory = calloc((size_t)(rows * (pads * width + copies * value)), 4))) return 1;
    attention_t a = {.count = c->count, .groups = c->groups, .heads = c->heads / c->groups, .position = c->position,
                     .window = c->window, .queries = c->queries, .width = width, .value = value, .sinks = c->sinks,
                     .scale = c->scale, .mixed = copies ? memory + pads * rows * width : c->out};
    a.keys[0] = cached(c->keys, c->kind, c->width), a.values = cached(c->values, c->kind, c->value);
    if (pads) {
        for (int64_t i = 0; i < rows; i++) memcpy(memory + i * width, c->queries + i * c->width, (size_t)(4 * c->width));
        a.queries = memory;
    }
    int failed = attend(&a);
    for (int64_t i = 0; copies && i < rows; i++) memcpy(c->out + i * c->value, a.mixed + i * value, (size_t)(4 * c->value));
    free(memory);
    return failed;
}
