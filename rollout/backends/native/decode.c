/* Attention of single tokens to their paged context, reading blocks in place.

   A row's context is read once, in order, for all heads, a tile at a time with an online softmax
   (Milakov and Gimelshein 2018). Decoding many rows is bound by reading the cache, so the next tile,
   of the next row at last, is prefetched while a tile is worked on. */

#include "paged_cache.h"

#define TILE 16
#define LINE 16 /* floats in a cache line */

struct tile {
    int count;            /* tokens */
    const float *k[TILE]; /* each token's K of all heads, then its V */
};

INLINE void prefetch(const float *start, int64_t count) {
    for (int64_t i = 0; i < count; i += LINE) __builtin_prefetch(start + i);
}

static void find_tile(const struct attention *a, int64_t row, int64_t start, struct tile *tile) {
    int64_t left = a->context_lens[row] - start;
    tile->count = left < TILE ? (int)left : TILE;
    for (int i = 0; i < tile->count; i++) tile->k[i] = token_at(a, row, start + i);
}

INLINE float dot(const float *a, const float *b, int64_t dim) {
    v8f even = splat(0), odd = splat(0);
    for (int64_t i = 0; i < dim; i += 2 * LANES) {
        even += load(a + i) * load(b + i);
        odd += load(a + i + LANES) * load(b + i + LANES);
    }
    return sum_v8(even + odd);
}

/* scores[head][token] = q k; meanwhile K and V of the next tile are fetched, evenly spread. */
INLINE void score_tile(const struct attention *a, const float *q, const struct tile *tile,
                       const struct tile *next, float (*scores)[TILE], int64_t dim) {
    const int64_t group = a->heads / a->kv_heads, share = 2 * dim / group;
    for (int i = 0; i < tile->count; i++) {
        const float *k = tile->k[i];
        for (int64_t head = 0; head < a->heads; k += dim) {
            for (int64_t end = head + group; head < end; head++) {
                if (i < next->count) prefetch(next->k[i] + head * share, share);
                scores[head][i] = dot(q + head * dim, k, dim);
            }
        }
    }
    for (int64_t head = 0; head < a->heads; head++) {
        for (int i = tile->count; i < TILE; i++) scores[head][i] = -INFINITY;
    }
}

/* Scores become weights. Returns what older sums must be multiplied with. */
INLINE float weigh(float *scores, float scale, float *largest, float *sum) {
    v8f tile_max = load(scores);
    for (int i = LANES; i < TILE; i += LANES) tile_max = max_v8(tile_max, load(scores + i));
    float old = *largest, new = fmaxf(old, largest_of(tile_max) * scale);
    v8f total = splat(0);
    for (int i = 0; i < TILE; i += LANES) {
        v8f weight = exp_v8(load(scores + i) * scale - new);
        store(scores + i, weight);
        total += weight;
    }
    float shrink = exp_v8(splat(old - new))[0];
    *largest = new;
    *sum = *sum * shrink + sum_v8(total);
    return shrink;
}

/* out = out * shrink + sum of weight * V, over `width` columns; width is a constant of the caller. */
INLINE void add_values(float *out, const float *weights, const struct tile *tile, int64_t offset,
                       float shrink, const int width) {
    v8f sums[8];
    for (int j = 0; j < width / LANES; j++) sums[j] = load(out + j * LANES) * shrink;
    for (int i = 0; i < tile->count; i++) {
        const float *v = tile->k[i] + offset;
        for (int j = 0; j < width / LANES; j++) sums[j] += weights[i] * load(v + j * LANES);
    }
    for (int j = 0; j < width / LANES; j++) store(out + j * LANES, sums[j]);
}

INLINE void decode_row(const struct attention *a, int64_t row, int64_t last, struct tile *tile,
                       int64_t dim) {
    const int64_t heads = a->heads, group = heads / a->kv_heads, kv_size = a->kv_heads * dim;
    const int64_t token = a->query_starts[row], context = a->context_lens[row];
    const float *q = a->q + token * a->q_stride;
    const float scale = 1.0f / sqrtf((float)dim);
    float *out = a->out + token * heads * dim;
    float scores[heads][TILE], largest[heads], sum[heads];
    struct tile next;

    memset(out, 0, sizeof(float) * heads * dim);
    for (int64_t head = 0; head < heads; head++) largest[head] = -INFINITY, sum[head] = 0;
    for (int64_t start = 0; start < context; start += TILE, *tile = next) {
        next.count = 0;
        if (start + TILE < context) find_tile(a, row, start + TILE, &next);
        else if (row + 1 < last) find_tile(a, row + 1, 0, &next);
        score_tile(a, q, tile, &next, scores, dim);
        for (int64_t head = 0; head < heads; head++) {
            const int64_t kv_offset = head / group * dim;
            float shrink = weigh(scores[head], scale, &largest[head], &sum[head]);
            int64_t j = 0;
            for (; j + 64 <= dim; j += 64) {
                add_values(out + head * dim + j, scores[head], tile, kv_size + kv_offset + j, shrink, 64);
            }
            for (; j < dim; j += 16) {
                add_values(out + head * dim + j, scores[head], tile, kv_size + kv_offset + j, shrink, 16);
            }
        }
    }
    for (int64_t head = 0; head < heads; head++) {
        for (int64_t i = 0; i < dim; i += LANES) {
            store(out + head * dim + i, load(out + head * dim + i) / sum[head]);
        }
    }
}

/* Rows [first, last), one query token each. The head dim is a multiple of 16. */
EXPORT void attend_decode(const struct attention *a, int64_t first, int64_t last) {
    struct tile tile;
    find_tile(a, first, 0, &tile);
    for (int64_t row = first; row < last; row++) {
        if (a->dim == 64) decode_row(a, row, last, &tile, 64);
        else if (a->dim == 128) decode_row(a, row, last, &tile, 128);
        else decode_row(a, row, last, &tile, a->dim);
    }
}

/* Write each token's K and V at its slot. */
EXPORT void write_tokens(const struct attention *a) {
    const int64_t kv_size = a->kv_heads * a->dim;
    for (int64_t i = 0; i < a->tokens; i++) {
        int64_t block = a->slots[i] / a->block_size, offset = a->slots[i] % a->block_size;
        float *slot = a->cache + block * a->block_stride + offset * 2 * kv_size;
        memcpy(slot, a->k + i * a->k_stride, sizeof(float) * kv_size);
        memcpy(slot + kv_size, a->v + i * a->v_stride, sizeof(float) * kv_size);
    }
}
