/* y = x w^T + bias with packed weights. Implemented by linear.c; used by Python, through linear_part, and decoder.c. */

#ifndef ROLLOUT_LINEAR_H
#define ROLLOUT_LINEAR_H

#include "vectors.h"

/* Arguments of a product. Weights are packed in panels of 2 * lanes outputs, [panels, inputs, 2 * lanes], so
   that the numbers that multiply one input are contiguous. The last panel is padded with zeros. */
struct linear {
    float *y;          /* [tokens, outputs], contiguous */
    const float *x;    /* [tokens, inputs], `x_stride` floats apart */
    const void *w;     /* packed, float32 or bfloat16 */
    const float *bias; /* [outputs], or NULL */
    int64_t tokens, inputs, outputs, x_stride;
    int64_t lanes;      /* 8 or 16 floats in a vector */
    int64_t is_bfloat16; /* whether w is bfloat16 */
    int64_t unit;        /* enum unit; DOT and AMX need bfloat16 w in panels of 32, and round x to bfloat16 */
    int64_t accumulate;  /* whether to add to y instead of replacing it */
};

/* Computes the outputs of panels [first, last). */
void linear(const struct linear *a, int64_t first, int64_t last);

#endif
