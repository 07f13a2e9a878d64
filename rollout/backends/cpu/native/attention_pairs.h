/* Attention of queries to a tile of a bfloat16 context, by AVX-512's dot products of pairs. q, K, V and the weights are
   bfloat16, scores and sums float32. Included by prefill.c. */

#include "attention_tiles.h"

#ifdef __AVX512BF16__
#include "pairs.h"

#define PAIR_ROWS 6 /* queries whose sums stay in registers, with four vectors each */

/* K and V of one KV head of tokens [start, start + count), packed in pairs. */
struct pair_tile {
    int64_t start, count, capacity;
    uint16_t *k, *v; /* [dim / 2][capacity][2], [capacity / 2][dim][2] */
};

/* Packs K of up to LANES tokens from the i-th on, with zeros for missing ones. A pair of dims is moved like a float. */
INLINE void pack_pairs_of_keys(const char *const *tokens, int64_t i, int64_t count, int64_t offset, int64_t dim,
                               const struct pair_tile *tile) {
    float *out = (float *)tile->k + i;
    for (int64_t d = 0; d < dim; d += 2 * LANES, out += LANES * tile->capacity) {
        v8f rows[LANES];
        for (int64_t t = 0; t < LANES; t++) {
            rows[t] = t < count ? load((const float *)((const uint16_t *)tokens[i + t] + offset + d)) : splat(0);
        }
        store_transposed(out, tile->capacity, rows);
    }
}

/* Packs the V of two tokens in pairs, with zeros for `odd` if it is NULL. */
INLINE void pack_pairs_of_values(const char *even, const char *odd, int64_t offset, int64_t dim, uint16_t *out) {
    for (int64_t d = 0; d < dim; d += 16, out += 32) {
        const v16h a = *(const v16h *)((const uint16_t *)even + offset + d);
        const v16h b = odd ? *(const v16h *)((const uint16_t *)odd + offset + d) : (v16h){0};
        *(v16h *)out = SHUFFLE(v16h, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        *(v16h *)(out + 16) = SHUFFLE(v16h, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
}

/* Packs K and V of one KV head of the tokens at `place`. */
static void pack_pair_tile(const struct attention *a, const struct place *place, int64_t kv_head,
                           struct pair_tile *tile) {
    const int64_t dim = a->dim, count = place->count;
    const char *const *tokens = place->tokens;
    tile->start = place->start, tile->count = count;
    for (int64_t i = 0; i < (count + 15) / 16 * 16; i += LANES) {
        pack_pairs_of_keys(tokens, i, count - i, kv_head * dim, dim, tile);
    }
    for (int64_t i = 0; i < count; i += 2) {
        const char *odd = i + 1 < count ? tokens[i + 1] : NULL;
        pack_pairs_of_values(tokens[i], odd, value_of(a, kv_head), dim, tile->v + i * dim);
    }
}

/* Computes c = scale * a b, or c += a b if `adds`, for `rows` x (16 * count) numbers, which fit the registers. b has
   `b_stride` columns. */
INLINE void product_of_pairs(float *c, int64_t c_stride, const uint16_t *a, int64_t a_stride, const uint16_t *b,
                             int64_t b_stride, int64_t pairs, const int adds, float scale, const int rows,
                             const int count) {
    v16f sums[PAIR_ROWS][4];
    for (int i = 0; i < rows; i++) {
        for (int j = 0; j < count; j++) sums[i][j] = adds ? *(const v16f *)(c + i * c_stride + j * 16) : (v16f){0};
    }
    for (int64_t p = 0; p < pairs; p++, b += 2 * b_stride) {
        v32h row[4];
        for (int j = 0; j < count; j++) row[j] = *(const v32h *)(b + j * 32);
        for (int i = 0; i < rows; i++) {
            const v32h pair = splat_pair(a + i * a_stride + 2 * p);
            for (int j = 0; j < count; j++) sums[i][j] = add_pairs(sums[i][j], pair, row[j]);
        }
    }
    for (int i = 0; i < rows; i++) {
        for (int j = 0; j < count; j++) {
            if (!adds) sums[i][j] *= scale;
            *(v16f *)(c + i * c_stride + j * 16) = sums[i][j];
        }
    }
}

/* Computes `product_of_pairs` for `width` columns, a multiple of 16. */
INLINE void columns_of_pairs(float *c, int64_t c_stride, const uint16_t *a, int64_t a_stride, const uint16_t *b,
                             int64_t b_stride, int64_t pairs, int64_t width, const int adds, float scale,
                             const int rows) {
    int64_t j = 0;
    for (; j + 64 <= width; j += 64) {
        product_of_pairs(c + j, c_stride, a, a_stride, b + 2 * j, b_stride, pairs, adds, scale, rows, 4);
    }
    for (; j + 32 <= width; j += 32) {
        product_of_pairs(c + j, c_stride, a, a_stride, b + 2 * j, b_stride, pairs, adds, scale, rows, 2);
    }
    if (j < width) product_of_pairs(c + j, c_stride, a, a_stride, b + 2 * j, b_stride, pairs, adds, scale, rows, 1);
}

/* Does the same as `weigh` with vectors of 16, but stores the weights rounded to bfloat16. */
INLINE void weigh_pairs(float *scores, int64_t unseen, int64_t seen, int64_t width, struct softmax *softmax,
                        float *sums, int64_t dim, uint16_t *weights) {
    hide_scores(scores, unseen, seen, width);
    v16f most = *(const v16f *)scores, total = {0};
    for (int64_t i = 16; i < width; i += 16) most = max_16(most, *(const v16f *)(scores + i));
    const float old = softmax->largest, new = max_of_16(most), largest = new > old ? new : old;
    if (new > old) {
        const float shrink = exp_v8(splat(old - new))[0];
        softmax->total *= shrink;
        for (int64_t d = 0; d < dim; d += 16) *(v16f *)(sums + d) *= shrink;
    }
    for (int64_t i = 0; i < width; i += 16) {
        const v16f weight = exp_16(*(const v16f *)(scores + i) - largest);
        round_16(weights + i, weight);
        total += weight;
    }
    softmax->largest = largest;
    softmax->total += sum_of_halves(total);
}

/* Adds the tile to the online softmax of queries [i, i + rows); the last of them attends to the most keys. */
INLINE void attend_pairs_of_strip(const struct queries *queries, int64_t i, const struct pair_tile *tile, int64_t dim,
                                  float scale, const int rows) {
    const int64_t depth = visible(queries, i + rows - 1, tile->start, tile->count), width = (depth + 15) / 16 * 16;
    const uint16_t *q = (const uint16_t *)queries->q + i * dim;
    float *sums = queries->sums + i * dim;
    _Alignas(LINE) float scores[PAIR_ROWS * MAX_TOKENS];
    _Alignas(LINE) uint16_t weights[PAIR_ROWS * MAX_TOKENS];
    if (depth <= 0) return;
    columns_of_pairs(scores, MAX_TOKENS, q, dim, tile->k, tile->capacity, dim / 2, width, 0, scale, rows);
    for (int j = 0; j < rows; j++) {
        float *row = scores + j * MAX_TOKENS;
        struct softmax *softmax = queries->softmax + i + j;
        if (queries->softcap > 0) cap_scores(row, width, queries->softcap);
        weigh_pairs(row, softmax->first_seen - tile->start, visible(queries, i + j, tile->start, tile->count), width,
                    softmax, sums + j * dim, dim, weights + j * MAX_TOKENS);
    }
    columns_of_pairs(sums, dim, weights, MAX_TOKENS, tile->v, dim, (depth + 1) / 2, dim, 1, 1, rows);
}

/* Adds the tile to the online softmax of queries [first, last), whose q is bfloat16. */
static void attend_pair_tile(const struct queries *queries, int64_t first, int64_t last, const struct pair_tile *tile,
                             int64_t dim, float scale) {
    for (; first + PAIR_ROWS <= last; first += PAIR_ROWS) {
        attend_pairs_of_strip(queries, first, tile, dim, scale, PAIR_ROWS);
    }
    for (; first < last; first++) attend_pairs_of_strip(queries, first, tile, dim, scale, 1);
}

#endif
