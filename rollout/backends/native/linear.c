/* y = x w^T + bias for a few rows of x: every weight is read once, as it is stored.

   From about a dozen rows on the arithmetic outweighs the reading, and a packed product wins. */

#include "vectors.h"

#define MAX_SIDE 4 /* of the tile of sums that stays in registers */

struct linear {
    float *y;          /* [tokens, outputs], contiguous */
    const float *x;    /* [tokens, inputs], `x_stride` floats apart */
    const float *w;    /* [outputs, inputs], contiguous */
    const float *bias; /* [outputs], or NULL */
    int64_t tokens, inputs, outputs, x_stride;
};

/* y[t][n] for `tokens` rows of x and `outputs` rows of w; both are constants of the caller. */
INLINE void dot_rows(const struct linear *a, int64_t t, int64_t n, const int tokens, const int outputs) {
    const float *x = a->x + t * a->x_stride, *w = a->w + n * a->inputs;
    v8f sums[MAX_SIDE][MAX_SIDE];
    for (int i = 0; i < tokens; i++) {
        for (int j = 0; j < outputs; j++) sums[i][j] = splat(0);
    }
    for (int64_t k = 0; k < a->inputs; k += LANES) {
        v8f weights[MAX_SIDE];
        for (int j = 0; j < outputs; j++) {
            weights[j] = load(w + j * a->inputs + k);
            if (t == 0) __builtin_prefetch(w + j * a->inputs + k + outputs * a->inputs, 0, 0);
        }
        for (int i = 0; i < tokens; i++) {
            v8f value = load(x + i * a->x_stride + k);
            for (int j = 0; j < outputs; j++) sums[i][j] += value * weights[j];
        }
    }
    for (int i = 0; i < tokens; i++) {
        for (int j = 0; j < outputs; j++) {
            float bias = a->bias ? a->bias[n + j] : 0;
            a->y[(t + i) * a->outputs + n + j] = sum_v8(sums[i][j]) + bias;
        }
    }
}

INLINE void dot_outputs(const struct linear *a, int64_t n, const int outputs) {
    int64_t t = 0;
    for (; t + 4 <= a->tokens; t += 4) dot_rows(a, t, n, 4, outputs);
    for (; t + 2 <= a->tokens; t += 2) dot_rows(a, t, n, 2, outputs);
    for (; t < a->tokens; t++) dot_rows(a, t, n, 1, outputs);
}

/* Outputs [first, last). `inputs` is a multiple of LANES. */
EXPORT void linear(const struct linear *a, int64_t first, int64_t last) {
    int64_t n = first;
    if (a->tokens == 1) {
        for (; n + 4 <= last; n += 4) dot_rows(a, 0, n, 1, 4);
    }
    for (; n + 2 <= last; n += 2) dot_outputs(a, n, 2);
    for (; n < last; n++) dot_outputs(a, n, 1);
}
