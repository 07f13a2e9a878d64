/* Causal attention of prefill rows, of many tokens each, to their paged contexts, as in FlashAttention-2 (Dao 2023).
   Called from Python (attention.py) and decoder.c.

   All query heads that share a KV head form one matrix of queries, which is processed in blocks. Keys and values are
   packed in tiles, once for each block; K is transposed, so that both products are plain ones. */

#include "attention_pairs.h"

#define QUERIES 240 /* queries of a block at most */

/* The work buffers of one thread. */
struct workspace {
    float q[QUERIES * MAX_DIM], sums[QUERIES * MAX_DIM];
    float k[MAX_TOKENS * MAX_DIM], v[MAX_TOKENS * MAX_DIM];
    struct softmax softmax[QUERIES];
};

/* Adds the tile at `place` to the online softmax of queries [first, last). */
static void attend_place(const struct attention *a, struct workspace *w, const struct queries *queries, int64_t first,
                         int64_t last, const struct place *place, int64_t kv_head, int64_t capacity) {
#ifdef __AVX512BF16__
    if (a->unit == DOT) {
        struct pair_tile tile = {.capacity = capacity, .k = (uint16_t *)w->k, .v = (uint16_t *)w->v};
        pack_pair_tile(a, place, kv_head, &tile);
        attend_pair_tile(queries, first, last, &tile, a->dim, (float)a->scale);
        return;
    }
#endif
    struct tile tile = {.capacity = capacity, .k = w->k, .v = w->v};
    pack_tile(a, place, kv_head, &tile, NULL);
    attend_tile(a->lanes, queries, first, last, &tile, a->dim, NULL);
}

/* Attends from tokens [first, last) of a row, at most QUERIES / group, for one KV head. */
static void attend_block(const struct attention *a, struct workspace *w, int64_t row, int64_t kv_head,
                         int64_t first, int64_t last) {
    const int64_t group = a->heads / a->kv_heads, token = a->query_starts[row] + first;
    const int64_t cached = a->context_lens[row] - (a->query_starts[row + 1] - a->query_starts[row]);
    const int64_t position = cached + first, end = cached + last, count = (last - first) * group;
    const struct queries queries = {w->q, w->sums, w->softmax, position, group, (float)a->softcap};
    const int64_t capacity = tile_capacity(a->unit == DOT ? a->dim / 2 : a->dim);
    struct place place;
    for (int64_t i = 0; i < count; i += group) {
        begin_queries(a, &queries, i, group, token + i / group, kv_head * group, position + i / group,
                      a->unit == DOT);
    }
    const int64_t first_tile = first_seen(a, position) / capacity * capacity;
    for (int64_t start = first_tile; start < end; start += capacity) {
        const int64_t keys = end - start < capacity ? end - start : capacity;
        const int64_t seeing = start > position ? (start - position) * group : 0;
        place.start = start, place.count = keys;
        find_tokens(a, row, start, keys, place.tokens);
        attend_place(a, w, &queries, seeing, count, &place, kv_head, capacity);
    }
    for (int64_t i = 0; i < count; i += group) {
        end_queries(a, &queries, i, group, token + i / group, kv_head * group);
    }
}

INLINE int64_t tokens_of(const struct attention *a, int64_t row) {
    return a->query_starts[row + 1] - a->query_starts[row];
}

/* Returns the number of query tokens in a block. */
INLINE int64_t block_tokens(const struct attention *a) {
    const int64_t group = a->heads / a->kv_heads;
    return group < QUERIES ? QUERIES / group : 1;
}

/* Returns twice the number of keys to which the row's tokens [first, last) attend, without a window. */
INLINE int64_t work_of(const struct attention *a, int64_t row, int64_t first, int64_t last) {
    const int64_t cached = a->context_lens[row] - tokens_of(a, row);
    return (last - first) * (2 * cached + first + last + 1);
}

/* Computes part `part` of `parts` of rows [first, last), for one thread: some of the blocks, so that parts have about
   equal work. The head dim must be a multiple of 16 and at most MAX_DIM, and at most QUERIES query heads may share a KV
   head. `scratch` has prefill_scratch_bytes(). */
EXPORT void attend_prefill_part(const struct attention *a, void *scratch, int64_t first, int64_t last,
                                int64_t part, int64_t parts) {
    struct workspace *w = scratch;
    int64_t total = 0, before = 0;
    for (int64_t row = first; row < last; row++) {
        total += a->kv_heads * work_of(a, row, 0, tokens_of(a, row));
    }
    for (int64_t item = first * a->kv_heads; item < last * a->kv_heads; item++) {
        const int64_t row = item / a->kv_heads, tokens = tokens_of(a, row), step = block_tokens(a);
        for (int64_t i = 0; i < tokens; i += step) {
            const int64_t end = i + step < tokens ? i + step : tokens, work = work_of(a, row, i, end);
            const int64_t middle = before + work / 2;
            before += work;
            if (middle < total * part / parts || middle >= total * (part + 1) / parts) continue;
            attend_block(a, w, row, item % a->kv_heads, i, end);
        }
    }
}

EXPORT int64_t prefill_scratch_bytes(void) { return sizeof(struct workspace); }
