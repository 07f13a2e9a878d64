/* Norms, rotary embedding and gated activations of one row. Used by layers.c, decoder.c and experts.c. Sizes are
   multiples of LANES. Rows are float32, or of `type` in functions whose names end in `_as`. All is computed in
   float32, and rounded to `type` where torch's operations round. */

#ifndef ROLLOUT_LAYERS_H
#define ROLLOUT_LAYERS_H

#include "vectors.h"

INLINE float sum_of_squares_as(const void *x, int64_t dim, int64_t type) {
    v8f squares = splat(0);
    for (int64_t i = 0; i < dim; i += LANES) {
        const v8f values = load_as(x, i, type);
        squares = fma_8(values, values, squares);
    }
    return sum_v8(squares);
}

INLINE float sum_of_squares(const float *x, int64_t dim) { return sum_of_squares_as(x, dim, FLOAT32); }

/* Computes out = x / rms(x) * weight. out may be x. */
INLINE void norm_row_as(void *out, const void *x, const void *weight, int64_t weight_type, int64_t dim, float eps,
                        int64_t type) {
    const float scale = 1.0f / sqrtf(sum_of_squares_as(x, dim, type) / (float)dim + eps);
    for (int64_t i = 0; i < dim; i += LANES) {
        store_as(out, i, load_as(x, i, type) * scale * load_as(weight, i, weight_type), type);
    }
}

INLINE void norm_row(float *out, const float *x, const float *weight, int64_t dim, float eps) {
    norm_row_as(out, x, weight, FLOAT32, dim, eps, FLOAT32);
}

/* Computes x = x / rms * weight in place, for a part of a row. `mean_square`: of the whole row. */
INLINE void norm_part(float *x, const float *weight, int64_t dim, float mean_square, float eps) {
    const float scale = 1.0f / sqrtf(mean_square + eps);
    for (int64_t i = 0; i < dim; i += LANES) store(x + i, load(x + i) * scale * load(weight + i));
}

/* Computes out = (x - mean) / deviation * weight. out may be x. */
INLINE void layer_norm_row_as(void *out, const void *x, const void *weight, int64_t weight_type, int64_t dim, float eps,
                              int64_t type) {
    v8f sums = splat(0), squares = splat(0);
    for (int64_t i = 0; i < dim; i += LANES) sums += load_as(x, i, type);
    const float mean = sum_v8(sums) / (float)dim;
    for (int64_t i = 0; i < dim; i += LANES) {
        const v8f values = load_as(x, i, type) - mean;
        squares = fma_8(values, values, squares);
    }
    const float scale = 1.0f / sqrtf(sum_v8(squares) / (float)dim + eps);
    for (int64_t i = 0; i < dim; i += LANES) {
        store_as(out, i, (load_as(x, i, type) - mean) * scale * load_as(weight, i, weight_type), type);
    }
}

INLINE void layer_norm_row(float *out, const float *x, const float *weight, int64_t dim, float eps) {
    layer_norm_row_as(out, x, weight, FLOAT32, dim, eps, FLOAT32);
}

/* Rotates the pairs (i, i + dim / 2) of one head by the angles of its token. out may be x. */
INLINE void rotate_head_as(void *out, const void *x, const float *cos, const float *sin, int64_t dim, int64_t type) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const v8f low = load_as(x, i, type), high = load_as(x, half + i, type);
        const v8f low_cos = load(cos + i), low_sin = load(sin + i);
        const v8f high_cos = load(cos + half + i), high_sin = load(sin + half + i);
        store_as(out, i, low * low_cos - high * low_sin, type);
        store_as(out, half + i, high * high_cos + low * high_sin, type);
    }
}

INLINE void rotate_head(float *out, const float *x, const float *cos, const float *sin, int64_t dim) {
    rotate_head_as(out, x, cos, sin, dim, FLOAT32);
}

/* Computes out = gelu(gate) * up, by the tanh approximation. gate_up: `size` gates, then `size` ups. */
INLINE void gelu_mul_row_as(void *out, const void *gate_up, int64_t size, int64_t type) {
    for (int64_t i = 0; i < size; i += LANES) {
        const v8f gate = load_as(gate_up, i, type), inner = 0.797884561f * (gate + 0.044715f * gate * gate * gate);
        const v8f active = round_as(0.5f * gate * (1.0f + tanh_v8(inner)), type);
        store_as(out, i, active * load_as(gate_up, size + i, type), type);
    }
}

INLINE void gelu_mul_row(float *out, const float *gate_up, int64_t size) {
    gelu_mul_row_as(out, gate_up, size, FLOAT32);
}

/* Computes out = silu(gate) * up. gate_up: `size` gates, then `size` ups. */
INLINE void silu_mul_row(float *out, const float *gate_up, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        v8f gate = load(gate_up + i);
        store(out + i, gate / (1.0f + exp_v8(-gate)) * load(gate_up + size + i));
    }
}

/* Computes out = (up + 1) * gate * sigmoid(alpha * gate), after gates are clamped to at most `limit`, and ups to at
   most that far from 0. gate_up: `size` gates, then `size` ups. */
INLINE void clamped_swiglu_row(float *out, const float *gate_up, int64_t size, float alpha, float limit) {
    for (int64_t i = 0; i < size; i += LANES) {
        v8f gate = load(gate_up + i), up = load(gate_up + size + i);
        gate = select_v8(gate > limit, splat(limit), gate);
        up = select_v8(up > limit, splat(limit), select_v8(up < -limit, splat(-limit), up));
        store(out + i, (up + 1.0f) * gate / (1.0f + exp_v8(-alpha * gate)));
    }
}

#endif
