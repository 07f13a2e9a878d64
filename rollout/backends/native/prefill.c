/* Causal attention of many tokens of one row to its paged context, as in FlashAttention-2 (Dao 2023):
   all query heads that share a KV head form one matrix of queries, worked on in blocks; keys come in
   tiles that are packed once for each block, K transposed, so that both products are plain ones. */

#include "attention_queries.h"

#define STRIP 6           /* queries whose sums stay in registers */
#define QUERIES 240       /* of a block, a multiple of STRIP */
#define MAX_TOKENS 64     /* of a tile, a multiple of 16 */
#define TILE_NUMBERS 4096 /* of K in a tile */
#define MAX_DIM 256

struct workspace {
    float q[QUERIES * MAX_DIM], sums[QUERIES * MAX_DIM];
    float k[MAX_TOKENS * MAX_DIM], v[MAX_TOKENS * MAX_DIM];
    struct softmax softmax[QUERIES];
};

/* Tokens [start, start + count) of a context, at most `capacity`, a multiple of 16. */
struct tile {
    int64_t start, count, capacity;
    float *k, *v; /* [dim][capacity], [token][dim] */
};

/* A block: query i sees keys up to position + i / group. */
struct block {
    struct queries queries;
    int64_t position, group;
};

INLINE int64_t visible(const struct block *block, int64_t i, const struct tile *tile) {
    const int64_t seen = block->position + i / block->group + 1 - tile->start;
    return seen < tile->count ? seen : tile->count;
}

#define WIDTH 8
#include "prefill_tile.h"
#undef WIDTH

#ifdef __AVX512F__
#define WIDTH 16
#include "prefill_tile.h"
#undef WIDTH
#endif

/* Eight rows of eight floats become columns, `stride` apart. */
INLINE void store_transposed(float *out, int64_t stride, const v8f *rows) {
    v8f pairs[8], fours[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = SHUFFLE8(rows[i], rows[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        pairs[i + 1] = SHUFFLE8(rows[i], rows[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; i += 4) {
        for (int j = 0; j < 2; j++) {
            fours[i + 2 * j] = SHUFFLE8(pairs[i + j], pairs[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            fours[i + 2 * j + 1] = SHUFFLE8(pairs[i + j], pairs[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    }
    for (int i = 0; i < 4; i++) {
        store(out + i * stride, SHUFFLE8(fours[i], fours[i + 4], 0, 1, 2, 3, 8, 9, 10, 11));
        store(out + (i + 4) * stride, SHUFFLE8(fours[i], fours[i + 4], 4, 5, 6, 7, 12, 13, 14, 15));
    }
}

/* K of `count` tokens, at most eight, from the i-th on; those that are missing have zero keys. */
INLINE void pack_keys(const char *const *tokens, int64_t i, const int count, int64_t offset, int64_t dim,
                      const int64_t type, struct tile *tile) {
    for (int64_t d = 0; d < dim; d += LANES) {
        v8f rows[LANES];
        for (int t = 0; t < LANES; t++) {
            rows[t] = t < count ? load_as(tokens[i + t], offset + d, type) : splat(0);
        }
        store_transposed(tile->k + d * tile->capacity + i, tile->capacity, rows);
    }
}

INLINE void pack_as(const char *const *tokens, int64_t k_offset, int64_t v_offset, int64_t dim,
                    const int64_t type, struct tile *tile) {
    int64_t i = 0;
    for (; i + LANES <= tile->count; i += LANES) {
        pack_keys(tokens, i, LANES, k_offset, dim, type, tile);
    }
    for (; i < (tile->count + 15) / 16 * 16; i += LANES) {
        pack_keys(tokens, i, tile->count > i ? (int)(tile->count - i) : 0, k_offset, dim, type, tile);
    }
    for (i = 0; i < tile->count; i++) {
        const char *token = tokens[i];
        for (int64_t d = 0; d < dim; d += LANES) {
            store(tile->v + i * dim + d, load_as(token, v_offset + d, type));
        }
    }
}

/* One KV head of a row's tokens [start, start + count). */
static void pack_tile(const struct attention *a, int64_t row, int64_t start, int64_t count,
                      int64_t kv_head, struct tile *tile) {
    const int64_t dim = a->dim, k = kv_head * dim, v = (a->kv_heads + kv_head) * dim;
    const char *tokens[MAX_TOKENS];
    tile->start = start, tile->count = count;
    find_tokens(a, row, start, count, tokens);
    if (a->cache_type == BFLOAT16) pack_as(tokens, k, v, dim, BFLOAT16, tile);
    else pack_as(tokens, k, v, dim, FLOAT32, tile);
}

/* Tokens [first, last) of a row, at most QUERIES / group, and one KV head. */
static void attend_block(const struct attention *a, struct workspace *w, int64_t row, int64_t kv_head,
                         int64_t first, int64_t last) {
    const int64_t group = a->heads / a->kv_heads, token = a->query_starts[row] + first;
    const int64_t cached = a->context_lens[row] - (a->query_starts[row + 1] - a->query_starts[row]);
    const int64_t position = cached + first, end = cached + last, count = (last - first) * group;
    const int64_t fitting = TILE_NUMBERS / a->dim / 16 * 16;
    const struct block block = {{w->q, w->sums, w->softmax}, position, group};
    struct tile tile = {.capacity = fitting < MAX_TOKENS ? fitting : MAX_TOKENS, .k = w->k, .v = w->v};
    for (int64_t i = 0; i < count; i += group) {
        begin_queries(a, &block.queries, i, group, token + i / group, kv_head * group);
    }
    for (int64_t start = 0; start < end; start += tile.capacity) {
        const int64_t keys = end - start < tile.capacity ? end - start : tile.capacity;
        const int64_t seeing = start > position ? (start - position) * group : 0;
        pack_tile(a, row, start, keys, kv_head, &tile);
        CHOOSE_WIDTH(a->lanes, prefill_tile)(&block, seeing, count, &tile, a->dim);
    }
    for (int64_t i = 0; i < count; i += group) {
        end_queries(a, &block.queries, i, group, token + i / group, kv_head * group);
    }
}

INLINE int64_t tokens_of(const struct attention *a, int64_t row) {
    return a->query_starts[row + 1] - a->query_starts[row];
}

/* Query tokens of a block. */
INLINE int64_t block_tokens(const struct attention *a) {
    const int64_t group = a->heads / a->kv_heads;
    return group < QUERIES ? QUERIES / group : 1;
}

/* Twice the pairs of a query token in [first, last) and a key that it sees. */
INLINE int64_t work_of(const struct attention *a, int64_t row, int64_t first, int64_t last) {
    const int64_t cached = a->context_lens[row] - tokens_of(a, row);
    return (last - first) * (2 * cached + first + last + 1);
}

/* One of `parts` parts of rows [first, last), for threads: blocks with about equal work. The head dim
   is a multiple of 16, at most MAX_DIM, and at most QUERIES query heads share a KV head. `scratch` has
   prefill_scratch_bytes(). */
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
