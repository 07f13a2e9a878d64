/* find_cutoff: where top-k and top-p cut a row, without sorting the row. Called by sampling.c.

   Tokens are counted and weighed in buckets, by their distance from the largest logit. Non-negative floats have the
   same order as their bits, so the leading bits are the bucket's number. Only the bucket in which the cut lies is
   sorted. */

#include <stdlib.h>

#include "weights.h"

INLINE uint32_t bucket_of(const struct row *r, float logit) {
    float distance = r->largest - logit;
    uint32_t bits;
    memcpy(&bits, &distance, sizeof bits);
    bits &= 0x7fffffff; /* -0.0 - 0.0 is -0.0 */
    return bits >> BUCKET_SHIFT;
}

/* Counts and weighs the row's tokens by bucket. */
static void fill(struct histogram *h) {
    float weights[BLOCK];
    memset(h->count, 0, sizeof h->count);
    memset(h->mass, 0, sizeof h->mass);
    for (int64_t block = 0; block < num_blocks(h->row); block++) {
        int64_t start = block * BLOCK, end = start + BLOCK;
        if (end > h->row->vocabulary) end = h->row->vocabulary;
        block_weights(h->row, block, NULL, weights);
        for (int64_t id = start; id < end; id++) {
            uint32_t bucket = bucket_of(h->row, h->row->logits[id]);
            h->count[bucket]++;
            h->mass[bucket] += weights[id - start];
        }
    }
}

static int by_rank(const void *left, const void *right) {
    const struct ranked *a = left, *b = right;
    if (a->logit != b->logit) return a->logit > b->logit ? -1 : 1;
    return a->id < b->id ? -1 : 1;
}

/* Writes the tokens of a bucket to `members`, sorted by rank. Returns their number. */
static int64_t sort_bucket(struct histogram *h, uint32_t bucket) {
    const struct row *r = h->row;
    int64_t count = 0;
    for (int64_t id = 0; id < r->vocabulary; id++) {
        if (bucket_of(r, r->logits[id]) != bucket) continue;
        float weight = weigh(r, splat(r->logits[id]))[0];
        h->members[count++] = (struct ranked){r->logits[id], (int32_t)id, weight};
    }
    qsort(h->members, count, sizeof *h->members, by_rank);
    return count;
}

/* Takes tokens by rank until there are `max_count` of them, or until their mass reaches `max_mass`. Returns their mass,
   and the last token's rank in *last; it lets all tokens pass if no limit was reached. */
static double cut(struct histogram *h, int64_t max_count, double max_mass, struct cutoff *last) {
    int64_t count = 0;
    double mass = 0;
    for (uint32_t bucket = 0; bucket < BUCKETS; bucket++) {
        if (!h->count[bucket]) continue;
        if (count + h->count[bucket] < max_count && mass + h->mass[bucket] < max_mass) {
            count += h->count[bucket], mass += h->mass[bucket];
            continue;
        }
        int64_t members = sort_bucket(h, bucket);
        for (int64_t i = 0; i < members; i++) {
            count++, mass += h->members[i].weight;
            last->logit = h->members[i].logit, last->id = h->members[i].id;
            if (count == max_count || mass >= max_mass) return mass;
        }
    }
    last->logit = -INFINITY, last->id = INT64_MAX;
    return mass;
}

struct cutoff find_cutoff(const struct row *r, int64_t top_k, float top_p, float min_p,
                          struct histogram *h) {
    struct cutoff result = {-INFINITY, INT64_MAX, min_p};
    const int has_k = top_k > 0 && top_k < r->vocabulary, has_p = top_p > 0 && top_p < 1;
    if (!has_k && !has_p) return result;
    h->row = r;
    fill(h);
    if (!has_k) top_k = r->vocabulary;
    double mass = cut(h, top_k, INFINITY, &result);
    if (has_p) cut(h, top_k, top_p * mass, &result);
    return result;
}
