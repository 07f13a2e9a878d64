/* y = x w^T + bias for a few rows of x: every weight is read once, as it is stored.

   Outputs are computed a few at a time, from rows of w that lie far apart: the processor follows
   each of the few long streams. Neighbouring rows, one after the other, would be many short ones.
   Whether to prefetch besides, how, and with how many lanes, is for the caller to measure. */

#include "vectors.h"

#define MAX_TOKENS 4 /* of the tile of sums that stays in registers */
#define MAX_OUTPUTS 8
#define AHEAD 64 /* floats from a read to what is prefetched with it */

struct linear {
    float *y;          /* [tokens, outputs], contiguous */
    const float *x;    /* [tokens, inputs], `x_stride` floats apart */
    const float *w;    /* [outputs, inputs], contiguous */
    const float *bias; /* [outputs], or NULL */
    int64_t tokens, inputs, outputs, x_stride;
    int64_t lanes;    /* 8, or at most linear_max_lanes(); `inputs` is a multiple of it */
    int64_t locality; /* 0 (bypass the caches) to 3 (keep in all), or -1 for no prefetching */
};

INLINE void prefetch(const float *p, const int locality) { /* the builtin wants a literal */
    if (locality == 0) __builtin_prefetch(p, 0, 0);
    if (locality == 1) __builtin_prefetch(p, 0, 1);
    if (locality == 2) __builtin_prefetch(p, 0, 2);
    if (locality == 3) __builtin_prefetch(p, 0, 3);
}

#define WIDTH 8
#include "linear_tile.h"
#undef WIDTH

#ifdef __AVX512F__
#define WIDTH 16
#include "linear_tile.h"
#undef WIDTH
#endif

/* The most lanes that `linear` can work with. */
EXPORT int64_t linear_max_lanes(void) {
#ifdef __AVX512F__
    return 16;
#else
    return 8;
#endif
}

/* Outputs [first, last). */
EXPORT void linear(const struct linear *a, int64_t first, int64_t last) {
#ifdef __AVX512F__
    if (a->lanes == 16) {
        linear_16(a, first, last);
        return;
    }
#endif
    linear_8(a, first, last);
}
