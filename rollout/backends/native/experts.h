/* Routed experts: what experts.c offers the other kernels. */

#ifndef ROLLOUT_EXPERTS_H
#define ROLLOUT_EXPERTS_H

#include "vectors.h"

enum { SILU, GELU_TANH, CLAMPED_SWIGLU };

/* A gated feed-forward network for each expert, and the experts of each token. Sizes are multiples of 8.
   An assignment is a token's place among its experts: token * per_token + k. */
struct experts {
    float *out;           /* [tokens, hidden], zeros before `experts_down`; contiguous, as all that follows */
    const float *x;       /* [tokens, hidden] */
    const int64_t *ids;   /* [tokens, per_token], each in [0, experts) */
    const float *weights; /* [tokens, per_token] */
    const void *gate_up;  /* [experts, 2 * size, hidden], all gates, then all ups; float32 or bfloat16 */
    const void *down;     /* [experts, hidden, size], of the same type, as are the biases */
    const void *gate_up_bias, *down_bias; /* [experts, 2 * size] and [experts, hidden], or NULL */
    int64_t *starts;      /* [experts + 1]: room to work in, as all that follows */
    int64_t *order;       /* [tokens * per_token]: the assignments by their expert */
    float *active;        /* [tokens * per_token, size]: in this order */
    int64_t tokens, per_token, experts, hidden, size;
    int64_t type;         /* FLOAT32 or BFLOAT16, of gate_up and down */
    int64_t lanes;        /* 8 for 256-bit vectors; 0 for the widest there are */
    int64_t activation;   /* SILU, GELU_TANH or CLAMPED_SWIGLU */
    double alpha, limit;  /* of CLAMPED_SWIGLU */
};

/* In this order, each done before the next begins; items [first, last) are groups of 8 of `size` and of
   `hidden`. */
void experts_sort(const struct experts *a);
void experts_gate_up(const struct experts *a, int64_t first, int64_t last);
void experts_down(const struct experts *a, int64_t first, int64_t last);

#endif
