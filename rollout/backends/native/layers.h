/* One row each of norms, rotary embedding and the gated activation, in float32; sizes are multiples of LANES. */

#ifndef ROLLOUT_LAYERS_H
#define ROLLOUT_LAYERS_H

#include "vectors.h"

INLINE float sum_of_squares(const float *x, int64_t dim) {
    v8f squares = splat(0);
    for (int64_t i = 0; i < dim; i += LANES) squares += load(x + i) * load(x + i);
    return sum_v8(squares);
}

/* out = x / rms(x) * weight; out may be x. */
INLINE void norm_row(float *out, const float *x, const float *weight, int64_t dim, float eps) {
    const float scale = 1.0f / sqrtf(sum_of_squares(x, dim) / (float)dim + eps);
    for (int64_t i = 0; i < dim; i += LANES) store(out + i, load(x + i) * scale * load(weight + i));
}

/* x = x / rms * weight, where x is a part of a row whose mean square is known. */
INLINE void norm_part(float *x, const float *weight, int64_t dim, float mean_square, float eps) {
    const float scale = 1.0f / sqrtf(mean_square + eps);
    for (int64_t i = 0; i < dim; i += LANES) store(x + i, load(x + i) * scale * load(weight + i));
}

/* out = (x - mean) / deviation * weight; out may be x. */
INLINE void layer_norm_row(float *out, const float *x, const float *weight, int64_t dim, float eps) {
    v8f sums = splat(0), squares = splat(0);
    for (int64_t i = 0; i < dim; i += LANES) sums += load(x + i);
    const float mean = sum_v8(sums) / (float)dim;
    for (int64_t i = 0; i < dim; i += LANES) squares += (load(x + i) - mean) * (load(x + i) - mean);
    const float scale = 1.0f / sqrtf(sum_v8(squares) / (float)dim + eps);
    for (int64_t i = 0; i < dim; i += LANES) store(out + i, (load(x + i) - mean) * scale * load(weight + i));
}

/* One head, rotated by the angles of its token; out may be x. */
INLINE void rotate_head(float *out, const float *x, const float *cos, const float *sin, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        v8f low = load(x + i), high = load(x + half + i);
        store(out + i, low * load(cos + i) - high * load(sin + i));
        store(out + half + i, high * load(cos + half + i) + low * load(sin + half + i));
    }
}

/* gelu(the first `size` of gate_up) * the rest, by the tanh approximation. */
INLINE void gelu_mul_row(float *out, const float *gate_up, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        v8f gate = load(gate_up + i), inner = 0.797884561f * (gate + 0.044715f * gate * gate * gate);
        store(out + i, 0.5f * gate * (1.0f + tanh_v8(inner)) * load(gate_up + size + i));
    }
}

/* silu(the first `size` of gate_up) * the rest. */
INLINE void silu_mul_row(float *out, const float *gate_up, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        v8f gate = load(gate_up + i);
        store(out + i, gate / (1.0f + exp_v8(-gate)) * load(gate_up + size + i));
    }
}

/* (up + 1) * gate * sigmoid(alpha * gate), the first `size` of gate_up the gates: at most `limit`, ups at
   most that far from 0. */
INLINE void clamped_swiglu_row(float *out, const float *gate_up, int64_t size, float alpha, float limit) {
    for (int64_t i = 0; i < size; i += LANES) {
        v8f gate = load(gate_up + i), up = load(gate_up + size + i);
        gate = select_v8(gate > limit, splat(limit), gate);
        up = select_v8(up > limit, splat(limit), select_v8(up < -limit, splat(-limit), up));
        store(out + i, (up + 1.0f) * gate / (1.0f + exp_v8(-alpha * gate)));
    }
}

#endif
