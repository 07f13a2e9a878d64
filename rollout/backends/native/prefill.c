/* Causal attention of many tokens of one row to its paged context.

   All query heads that share a KV head form one matrix of queries, worked on in blocks; keys come
   in tiles that are packed once per block of queries, K transposed, so that both products run in
   the same small kernel. Softmax is online, as in FlashAttention-2 (Dao 2023). */

#include "paged_cache.h"

#define STRIP 6      /* queries that the small kernel takes */
#define QUERIES 192  /* rows of a block, a multiple of STRIP */
#define KEYS 64      /* tokens of a tile, a multiple of 16 */
#define MAX_DIM 256

struct workspace {
    float q[QUERIES * MAX_DIM];      /* [query, dim], scaled by 1 / sqrt(dim) */
    float k[KEYS * MAX_DIM];         /* [panel of 16 keys][dim][16] */
    float v[KEYS * MAX_DIM];         /* [panel of 16 columns][key][16] */
    float scores[QUERIES * KEYS];    /* [query][key] */
    float sums[QUERIES * MAX_DIM];   /* [query][dim] */
    float largest[QUERIES], total[QUERIES];
    int64_t visible[QUERIES];        /* keys of this tile that the query sees; may be negative */
};

/* c[6][16] (+)= a[6][depth] b[depth][16]; b is contiguous. Twelve accumulators fill the registers. */
INLINE void product_6x16(float *c, int64_t c_stride, const float *a, int64_t a_stride, const float *b,
                         int64_t depth, const int adds) {
    v8f sums[STRIP][2];
    for (int i = 0; i < STRIP; i++) {
        sums[i][0] = adds ? load(c + i * c_stride) : splat(0);
        sums[i][1] = adds ? load(c + i * c_stride + LANES) : splat(0);
    }
    for (int64_t p = 0; p < depth; p++) {
        v8f b0 = load(b + p * 16), b1 = load(b + p * 16 + LANES);
        for (int i = 0; i < STRIP; i++) {
            v8f x = splat(a[i * a_stride + p]);
            sums[i][0] += x * b0;
            sums[i][1] += x * b1;
        }
    }
    for (int i = 0; i < STRIP; i++) {
        store(c + i * c_stride, sums[i][0]);
        store(c + i * c_stride + LANES, sums[i][1]);
    }
}

/* Keys beyond `count` are zero: a zero weight must not meet whatever lies in an unwritten slot. */
static void pack_tile(const struct attention *a, struct workspace *w, int64_t row, int64_t start,
                      int64_t count, int64_t head) {
    const int64_t dim = a->dim, kv_size = a->kv_heads * dim;
    for (int64_t key = 0; key < (count + 15) / 16 * 16; key++) {
        float *k_out = w->k + key / 16 * 16 * dim + key % 16;
        float *v_out = w->v + key * 16;
        if (key >= count) {
            for (int64_t d = 0; d < dim; d++) k_out[d * 16] = 0;
            for (int64_t d = 0; d < dim; d += 16) memset(v_out + d * KEYS, 0, 16 * sizeof(float));
            continue;
        }
        const float *k = token_at(a, row, start + key) + head * dim, *v = k + kv_size;
        for (int64_t d = 0; d < dim; d++) k_out[d * 16] = k[d];
        for (int64_t d = 0; d < dim; d += 16) memcpy(v_out + d * KEYS, v + d, 16 * sizeof(float));
    }
}

/* Row `i` of the scores becomes weights over the keys it sees; its sums shrink with them. */
static void weigh_row(struct workspace *w, int64_t i, int64_t width, int64_t dim) {
    float *scores = w->scores + i * KEYS, *sums = w->sums + i * dim;
    for (int64_t j = w->visible[i] < 0 ? 0 : w->visible[i]; j < width; j++) scores[j] = -INFINITY;
    v8f tile_max = load(scores);
    for (int64_t j = LANES; j < width; j += LANES) tile_max = max_v8(tile_max, load(scores + j));
    float old = w->largest[i], new = fmaxf(old, largest_of(tile_max));
    v8f total = splat(0);
    for (int64_t j = 0; j < width; j += LANES) {
        v8f weight = exp_v8(load(scores + j) - new);
        store(scores + j, weight);
        total += weight;
    }
    float shrink = exp_v8(splat(old - new))[0];
    w->largest[i] = new;
    w->total[i] = w->total[i] * shrink + sum_v8(total);
    if (shrink != 1.0f) {
        for (int64_t d = 0; d < dim; d += LANES) store(sums + d, load(sums + d) * shrink);
    }
}

/* Add what queries [i, i + STRIP) take from the packed tile; the last one sees most. */
static void attend_strip(struct workspace *w, int64_t i, int64_t dim) {
    const int64_t width = (w->visible[i + STRIP - 1] + 15) / 16 * 16;
    if (w->visible[i + STRIP - 1] <= 0) return;
    float *scores = w->scores + i * KEYS, *sums = w->sums + i * dim;
    for (int64_t j = 0; j < width; j += 16) {
        product_6x16(scores + j, KEYS, w->q + i * dim, dim, w->k + j * dim, dim, 0);
    }
    for (int64_t query = i; query < i + STRIP; query++) weigh_row(w, query, width, dim);
    for (int64_t d = 0; d < dim; d += 16) {
        product_6x16(sums + d, dim, scores, KEYS, w->v + d * KEYS, width, 1);
    }
}

/* Query `i` of a row's KV head: token i / group, head i % group of the group. */
static void attend_block(const struct attention *a, struct workspace *w, int64_t row, int64_t kv_head,
                         int64_t first, int64_t count) {
    const int64_t dim = a->dim, group = a->heads / a->kv_heads;
    const int64_t token_start = a->query_starts[row], context = a->context_lens[row];
    const int64_t offset = context - (a->query_starts[row + 1] - token_start); /* position of token 0 */
    const int64_t end = offset + (first + count - 1) / group + 1;  /* keys the last query sees */
    const int64_t padded = (count + STRIP - 1) / STRIP * STRIP;
    const float scale = 1.0f / sqrtf((float)dim);

    for (int64_t i = 0; i < padded; i++) {
        int64_t query = first + (i < count ? i : count - 1), head = kv_head * group + query % group;
        const float *q = a->q + (token_start + query / group) * a->q_stride + head * dim;
        for (int64_t d = 0; d < dim; d += LANES) store(w->q + i * dim + d, load(q + d) * scale);
        w->largest[i] = -INFINITY, w->total[i] = 0;
    }
    memset(w->sums, 0, sizeof(float) * padded * dim);
    for (int64_t start = 0; start < end; start += KEYS) {
        const int64_t keys = end - start < KEYS ? end - start : KEYS;
        pack_tile(a, w, row, start, keys, kv_head);
        for (int64_t i = 0; i < padded; i++) {
            int64_t visible = offset + (first + (i < count ? i : count - 1)) / group + 1 - start;
            w->visible[i] = visible < keys ? visible : keys;
        }
        for (int64_t i = 0; i < padded; i += STRIP) attend_strip(w, i, dim);
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t query = first + i, head = kv_head * group + query % group;
        float *out = a->out + ((token_start + query / group) * a->heads + head) * dim;
        for (int64_t d = 0; d < dim; d += LANES) {
            store(out + d, load(w->sums + i * dim + d) / w->total[i]);
        }
    }
}

/* Items [first, last) of (row, KV head), heads fastest, all rows counted. The head dim is a
   multiple of 16, at most MAX_DIM. `w` has prefill_scratch_bytes(). */
EXPORT void attend_prefill(const struct attention *a, struct workspace *w, int64_t first, int64_t last) {
    for (int64_t item = first; item < last; item++) {
        const int64_t row = item / a->kv_heads;
        const int64_t tokens = a->query_starts[row + 1] - a->query_starts[row];
        const int64_t queries = tokens * (a->heads / a->kv_heads);
        for (int64_t i = 0; i < queries; i += QUERIES) {
            int64_t count = queries - i < QUERIES ? queries - i : QUERIES;
            attend_block(a, w, row, item % a->kv_heads, i, count);
        }
    }
}

EXPORT int64_t prefill_scratch_bytes(void) { return sizeof(struct workspace); }
