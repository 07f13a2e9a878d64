/* The cache of one layer, [block, offset, K or V, KV head, D] in float32, and the step's tokens. */

#ifndef ROLLOUT_PAGED_CACHE_H
#define ROLLOUT_PAGED_CACHE_H

#include "vectors.h"

/* Strides count floats: from token to token, and in the cache from block to block; heads of one
   token are contiguous. Decode rows come first, one token each. */
struct attention {
    float *out; /* [tokens, heads, dim], contiguous */
    const float *q, *k, *v;
    float *cache;
    const int64_t *slots;        /* [tokens]: where each token's K and V are written */
    const int32_t *tables;       /* [rows, table_stride] */
    const int32_t *query_starts; /* [rows + 1] */
    const int32_t *context_lens; /* [rows] */
    int64_t q_stride, k_stride, v_stride, table_stride, block_stride;
    int64_t block_size, tokens, heads, kv_heads, dim;
};

/* K of a row's token for all KV heads; its V follows after kv_heads * dim floats. */
INLINE float *token_at(const struct attention *a, int64_t row, int64_t position) {
    int64_t block = a->tables[row * a->table_stride + position / a->block_size];
    int64_t offset = position % a->block_size;
    return a->cache + block * a->block_stride + offset * 2 * a->kv_heads * a->dim;
}

#endif
