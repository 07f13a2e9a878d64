/* Unnormalised probabilities (weights) of one row of logits, in blocks, and the row's truncation. Used by sampling.c
   and truncation.c. */

#ifndef ROLLOUT_WEIGHTS_H
#define ROLLOUT_WEIGHTS_H

#include "vectors.h"

#define BLOCK 128 /* logits */

/* A row of logits. weight(x) = exp((x - largest) * inverse_temperature), so the most probable token weighs 1. */
struct row {
    const float *logits;
    int64_t vocabulary;
    float largest, inverse_temperature;
};

/* The truncation of a row. Tokens are ranked by (logit descending, id ascending), and kept up to (logit, id) if
   they also weigh at least `min_weight`. */
struct cutoff {
    float logit;
    int64_t id;
    float min_weight;
};

INLINE int is_kept(const struct cutoff *cut, float logit, int64_t id, float weight) {
    int is_ranked = logit > cut->logit || (logit == cut->logit && id <= cut->id);
    return is_ranked && weight >= cut->min_weight;
}

INLINE int64_t num_blocks(const struct row *r) { return (r->vocabulary + BLOCK - 1) / BLOCK; }

/* Returns the logits of a block. A partial last block is copied to `padded`, followed by -inf. */
INLINE const float *block_logits(const struct row *r, int64_t block, float *padded) {
    int64_t start = block * BLOCK, count = r->vocabulary - start;
    if (count >= BLOCK) return r->logits + start;
    for (int64_t i = 0; i < BLOCK; i++) padded[i] = i < count ? r->logits[start + i] : -INFINITY;
    return padded;
}

INLINE v8f weigh(const struct row *r, v8f logits) {
    return exp_v8((logits - r->largest) * r->inverse_temperature);
}

/* Computes the weights of a block, 0 for tokens that `cut` drops. `cut` may be NULL. */
INLINE void block_weights(const struct row *r, int64_t block, const struct cutoff *cut, float *weights) {
    float padded[BLOCK];
    const float *logits = block_logits(r, block, padded);
    for (int64_t i = 0; i < BLOCK; i += LANES) store(weights + i, weigh(r, load(logits + i)));
    if (!cut) return;
    for (int64_t i = 0; i < BLOCK; i++) {
        if (!is_kept(cut, logits[i], block * BLOCK + i, weights[i])) weights[i] = 0;
    }
}

/* Tokens are put in buckets by their distance from the largest logit. */
#define BUCKET_SHIFT 18 /* keeps 8 bits of exponent and 5 of mantissa: a bucket is at most 3 % wide */
#define BUCKETS (1 << (31 - BUCKET_SHIFT))

/* A token, to be sorted by rank. */
struct ranked {
    float logit;
    int32_t id;
    float weight;
};

/* Number and weight of the tokens in each bucket. */
struct histogram {
    const struct row *row;
    int32_t count[BUCKETS];
    double mass[BUCKETS];
    struct ranked *members; /* work buffer for one bucket, which may have the whole vocabulary */
};

/* Returns the truncation by top-k (off at 0), then top-p (off unless 0 < p < 1), then min-p. */
struct cutoff find_cutoff(const struct row *r, int64_t top_k, float top_p, float min_p,
                          struct histogram *scratch);

#endif
