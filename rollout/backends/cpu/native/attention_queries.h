/* Queries of attention, each with its online softmax (Milakov and Gimelshein 2018). Used by decode.c,
   prefill.c and the tiles that they attend to. */

#ifndef ROLLOUT_ATTENTION_QUERIES_H
#define ROLLOUT_ATTENTION_QUERIES_H

#include "paged_cache.h"

#define LINE 64 /* bytes of a cache line */

/* The online softmax of one query. */
struct softmax {
    v8f total;          /* sums of weights, by lane */
    float largest;      /* score so far */
    int32_t first_seen; /* position of the first key that the query attends to */
    int64_t padding[3];
};

/* Some queries. Query i attends to keys up to position + i / per_position. */
struct queries {
    float *q;    /* [query][dim]: scaled, or in bfloat16 and not scaled for products of pairs */
    float *sums; /* [query][dim]: sums of weight * V */
    struct softmax *softmax;
    int64_t position, per_position;
    float softcap; /* 0 for none */
};

/* Returns how many of the `count` keys from position `start` on query i attends to; 0 or less for none. */
INLINE int64_t visible(const struct queries *queries, int64_t i, int64_t start, int64_t count) {
    const int64_t seen = queries->position + i / queries->per_position + 1 - start;
    return seen < count ? seen : count;
}

/* Replaces each score by softcap * tanh(score / softcap). */
INLINE void cap_scores(float *scores, int64_t width, float softcap) {
    for (int64_t i = 0; i < width; i += LANES) {
        store(scores + i, tanh_v8(load(scores + i) / softcap) * softcap);
    }
}

/* Sets the scores of keys outside [unseen, seen) to -inf. */
INLINE void hide_scores(float *scores, int64_t unseen, int64_t seen, int64_t width) {
    for (int64_t i = 0; i < unseen && i < width; i++) scores[i] = -INFINITY;
    for (int64_t i = seen < 0 ? 0 : seen; i < width; i++) scores[i] = -INFINITY;
}

/* Replaces the scores of keys [unseen, seen) by weights exp(score - largest), and all others by 0. Rescales
   `sums` and the total if the largest score has grown. */
INLINE void weigh(float *scores, int64_t unseen, int64_t seen, int64_t width, struct softmax *softmax,
                  float *sums, int64_t dim) {
    hide_scores(scores, unseen, seen, width);
    v8f tile_max = load(scores);
    for (int64_t i = LANES; i < width; i += LANES) tile_max = max_v8(tile_max, load(scores + i));
    const float old = softmax->largest, new = max_of_lanes(tile_max), largest = new > old ? new : old;
    v8f total = softmax->total;
    if (new > old) {
        const float shrink = exp_v8(splat(old - new))[0];
        total *= shrink;
        for (int64_t d = 0; d < dim; d += LANES) store(sums + d, load(sums + d) * shrink);
    }
    for (int64_t i = 0; i < width; i += LANES) {
        v8f weight = exp_v8(load(scores + i) - largest);
        store(scores + i, weight);
        total += weight;
    }
    softmax->largest = largest;
    softmax->total = total;
}

/* Starts queries [i, i + count): the query heads from `head` on of the token at `position`. Their sums are
   empty, except for their sinks. */
INLINE void begin_queries(const struct attention *a, const struct queries *queries, int64_t i,
                          int64_t count, int64_t token, int64_t head, int64_t position,
                          const int is_bfloat16) {
    const float scale = (float)a->scale;
    const int64_t q = token * a->q_stride + head * a->dim;
    for (int64_t d = 0; d < count * a->dim; d += LANES) {
        const v8f numbers = load_as(a->q, q + d, a->token_type);
        if (is_bfloat16) store_as(queries->q, i * a->dim + d, numbers, BFLOAT16);
        else store(queries->q + i * a->dim + d, numbers * scale);
        store(queries->sums + i * a->dim + d, splat(0));
    }
    for (int64_t j = i; j < i + count; j++, head++) {
        struct softmax *softmax = queries->softmax + j;
        *softmax = (struct softmax){.total = splat(0), .largest = -INFINITY};
        softmax->first_seen = (int32_t)first_seen(a, position);
        if (a->sinks) softmax->largest = a->sinks[head], softmax->total = (v8f){1};
    }
}

/* Writes the outputs of queries [i, i + count) to the token's heads from `head` on. */
INLINE void end_queries(const struct attention *a, const struct queries *queries, int64_t i,
                        int64_t count, int64_t token, int64_t head) {
    int64_t out = (token * a->heads + head) * a->dim;
    for (int64_t j = i; j < i + count; j++, out += a->dim) {
        const float total = sum_v8(queries->softmax[j].total);
        for (int64_t d = 0; d < a->dim; d += LANES) {
            store_as(a->out, out + d, load(queries->sums + j * a->dim + d) / total, a->token_type);
        }
    }
}

#endif
