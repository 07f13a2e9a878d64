/* Functions that linear_dot.h and linear_amx.h share: products of bfloat16 weights by pairs of inputs, for which x is
   rounded to bfloat16. linear.c includes all three.

   Both add x[k] w[k] + x[k + 1] w[k + 1] to a sum at once, so the two weights must be neighbours. In a panel all
   outputs of one input are contiguous, so two rows of it are interleaved. Each lane of 128 bits is interleaved by
   itself, which leaves the outputs in another order until their sums are stored. Any number of tokens takes the same
   path, so a token's result does not depend on the other tokens. */

#include "pairs.h"

#ifdef __AVX512BF16__

#define PANEL 32 /* outputs of a panel */

typedef int32_t v16i __attribute__((vector_size(64)));

/* Interleave the first, or the last, four numbers of both vectors in each lane of 8 numbers. */
#define LOW_PAIRS(a, b)                                                                                        \
    SHUFFLE(v32h, a, b, 0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, 43, 16, 48, 17, 49, 18, 50, 19, \
            51, 24, 56, 25, 57, 26, 58, 27, 59)
#define HIGH_PAIRS(a, b)                                                                                       \
    SHUFFLE(v32h, a, b, 4, 36, 5, 37, 6, 38, 7, 39, 12, 44, 13, 45, 14, 46, 15, 47, 20, 52, 21, 53, 22, 54,   \
            23, 55, 28, 60, 29, 61, 30, 62, 31, 63)
/* Put sums of the low and the high pairs in the order of outputs: the first 16, and the last 16. */
#define FIRST_OUTPUTS(low, high) \
    SHUFFLE(v16i, low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23)
#define LAST_OUTPUTS(low, high) \
    SHUFFLE(v16i, low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31)

/* Interleaves inputs k and k + 1 of a panel, at which `here` points, in pairs. Missing inputs are zeros. */
INLINE void interleave(v32h *low, v32h *high, const uint16_t *here, int64_t k, int64_t inputs) {
    const v32h even = k < inputs ? *(const v32h *)here : (v32h){0};
    const v32h odd = k + 1 < inputs ? *(const v32h *)(here + PANEL) : (v32h){0};
    __builtin_prefetch(here + FAR_AHEAD * PANEL);
    __builtin_prefetch(here + (FAR_AHEAD + 1) * PANEL);
    *low = LOW_PAIRS(even, odd), *high = HIGH_PAIRS(even, odd);
}

/* Stores the sums of the low and the high pairs of a panel as outputs of `token`. */
INLINE void store_pairs(const struct linear *a, int64_t token, int64_t panel, v16f low, v16f high) {
    const v16f outputs[2] = {FIRST_OUTPUTS(low, high), LAST_OUTPUTS(low, high)};
    store_sums_16(a, token, panel, (const float *)outputs);
}

/* Writes `count` tokens of x from `first` on to `out`, rounded to bfloat16, with zeros up to `padded` inputs; then
   tokens of zeros, up to a multiple of `group` tokens. */
static void round_tokens(uint16_t *out, const struct linear *a, int64_t first, int64_t count, int64_t padded,
                         int64_t group) {
    for (int64_t i = 0; i < (count + group - 1) / group * group; i++, out += padded) {
        const float *x = a->x + (first + i) * a->x_stride;
        int64_t k = 0;
        for (; i < count && k < a->inputs; k += LANES) {
            v8f values = splat(0);
            if (k + LANES <= a->inputs) values = load(x + k);
            else for (int64_t j = 0; k + j < a->inputs; j++) values[j] = x[k + j];
            store_as(out, k, values, BFLOAT16);
        }
        memset(out + k, 0, (padded - k) * sizeof(uint16_t));
    }
}

#endif
