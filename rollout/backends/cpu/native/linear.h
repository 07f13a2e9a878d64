/* y = x w^T + bias with packed weights, by linear.c; decoder.c uses it as well. */

#ifndef ROLLOUT_LINEAR_H
#define ROLLOUT_LINEAR_H

#include "vectors.h"

/* Weights are packed in panels of 2 * lanes outputs, [panels, inputs, 2 * lanes]: what one input is
   multiplied with lies together. The last panel is filled up with zeros. */
struct linear {
    float *y;          /* [tokens, outputs], contiguous */
    const float *x;    /* [tokens, inputs], `x_stride` floats apart */
    const void *w;     /* packed, float32 or bfloat16 */
    const float *bias; /* [outputs], or NULL */
    int64_t tokens, inputs, outputs, x_stride;
    int64_t lanes;      /* 8 or 16 floats in a vector */
    int64_t is_bfloat16; /* whether w is bfloat16 */
    int64_t unit;        /* DOT and AMX need bfloat16 w in panels of 32, and round x to bfloat16 */
    int64_t accumulate;  /* y += instead of y = */
};

/* Computes the outputs of panels [first, last). */
void linear(const struct linear *a, int64_t first, int64_t last);

#endif
