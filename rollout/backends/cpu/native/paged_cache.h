/* Attention over the paged cache of one layer, [block, offset, K or V, KV head, D]: its arguments and functions.
   Implemented by decode.c and prefill.c, used by Python and decoder.c. */

#ifndef ROLLOUT_PAGED_CACHE_H
#define ROLLOUT_PAGED_CACHE_H

#include "vectors.h"

#define MAX_DIM 576 /* dims of a head at most: a latent of 512 and a key of 64 */

/* Arguments of attention. Strides count numbers, from token to token and, in the cache, from block to block.
   Heads of one token are contiguous. Decode rows come first, one token each. */
struct attention {
    void *out; /* [tokens, heads, dim], contiguous */
    const void *q, *k, *v;
    void *cache;
    const int64_t *slots;        /* [tokens]: where each token's K and V are written */
    const int32_t *tables;       /* [rows, table_stride] */
    const int32_t *query_starts; /* [rows + 1] */
    const int32_t *context_lens; /* [rows] */
    int64_t q_stride, k_stride, v_stride, table_stride, block_stride;
    int64_t block_size, tokens, heads, kv_heads, dim;
    int64_t planes;                 /* 2 for a cache of K and V, or 1 if it holds K alone, which is then also V */
    int64_t token_type, cache_type; /* FLOAT32 or BFLOAT16, of out, q, k and v, and of the cache */
    int64_t lanes;                  /* 8 for 256-bit vectors; 0 for the widest there are */
    int64_t unit;                   /* unit of prefill: VECTORS, or DOT for a cache in bfloat16 */
    int64_t window;                 /* positions that a token attends to, its own included; 0 for all */
    const float *sinks;             /* [heads]: scores without a value; or NULL */
    double scale, softcap;          /* of scores; softcap 0 for none */
};

/* Returns the first position that the token at `position` attends to. */
static inline int64_t first_seen(const struct attention *a, int64_t position) {
    return a->window && position >= a->window ? position - a->window + 1 : 0;
}

/* Return the numbers per token in the cache, and the offset of a KV head's V among them. */
INLINE int64_t token_size(const struct attention *a) { return a->planes * a->kv_heads * a->dim; }
INLINE int64_t value_of(const struct attention *a, int64_t kv_head) {
    return ((a->planes - 1) * a->kv_heads + kv_head) * a->dim;
}

/* Returns the address of a row's token in the cache. */
INLINE const char *token_at(const struct attention *a, int64_t row, int64_t position) {
    int64_t block = a->tables[row * a->table_stride + position / a->block_size];
    int64_t offset = position % a->block_size;
    int64_t number = block * a->block_stride + offset * token_size(a);
    return (const char *)a->cache + number * size_of(a->cache_type);
}

/* Writes the addresses of a row's tokens [start, start + count) to `tokens`. */
static inline void find_tokens(const struct attention *a, int64_t row, int64_t start, int64_t count,
                               const char **tokens) {
    const int64_t token_bytes = token_size(a) * size_of(a->cache_type);
    int64_t offset = start % a->block_size;
    for (int64_t i = 0; i < count; offset = 0) {
        const char *token = token_at(a, row, start + i);
        for (; i < count && offset < a->block_size; i++, offset++, token += token_bytes) tokens[i] = token;
    }
}

/* Writes K and V of the step's tokens to the cache. */
void write_tokens(const struct attention *a);
/* Compute part `part` of `parts` of the work of decode rows, or of prefill rows, [first, last), for one thread. */
void attend_decode_part(const struct attention *a, int64_t first, int64_t last, int64_t part, int64_t parts);
void attend_prefill_part(const struct attention *a, void *scratch, int64_t first, int64_t last, int64_t part,
                         int64_t parts);
int64_t prefill_scratch_bytes(void);

#endif
