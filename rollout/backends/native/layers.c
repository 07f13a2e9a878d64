/* Norms, rotary embedding and the gated activation, in float32. Sizes are multiples of LANES. */

#include "vectors.h"

INLINE float inverse_rms(const float *x, int64_t dim, float eps) {
    v8f squares = splat(0);
    for (int64_t i = 0; i < dim; i += LANES) squares += load(x + i) * load(x + i);
    return 1.0f / sqrtf(sum_v8(squares) / (float)dim + eps);
}

INLINE void scale_by_weight(float *out, const float *x, const float *weight, int64_t dim, float scale) {
    for (int64_t i = 0; i < dim; i += LANES) store(out + i, load(x + i) * scale * load(weight + i));
}

/* x is [rows, heads, dim] with `row_stride` floats from row to row; out is contiguous. */
EXPORT void rms_norm(float *out, const float *x, const float *weight, int64_t rows, int64_t heads,
                     int64_t dim, int64_t row_stride, float eps) {
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t head = 0; head < heads; head++, out += dim) {
            const float *source = x + row * row_stride + head * dim;
            scale_by_weight(out, source, weight, dim, inverse_rms(source, dim, eps));
        }
    }
}

/* total = x + residual and its norm; all [rows, dim] and contiguous. */
EXPORT void add_rms_norm(float *out, float *total, const float *x, const float *residual,
                         const float *weight, int64_t rows, int64_t dim, float eps) {
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t i = 0; i < dim; i += LANES) store(total + i, load(x + i) + load(residual + i));
        scale_by_weight(out, total, weight, dim, inverse_rms(total, dim, eps));
        out += dim, total += dim, x += dim, residual += dim;
    }
}

/* x is [tokens, heads, dim] with `stride` floats per token, cos and sin [tokens, dim]; dim / 2 is a
   multiple of LANES; out is contiguous. */
EXPORT void rotary(float *out, const float *x, const float *cos, const float *sin, int64_t tokens,
                   int64_t heads, int64_t dim, int64_t stride) {
    const int64_t half = dim / 2;
    for (int64_t token = 0; token < tokens; token++, cos += dim, sin += dim) {
        for (int64_t head = 0; head < heads; head++, out += dim) {
            const float *source = x + token * stride + head * dim;
            for (int64_t i = 0; i < half; i += LANES) {
                v8f low = load(source + i), high = load(source + half + i);
                store(out + i, low * load(cos + i) - high * load(sin + i));
                store(out + half + i, high * load(cos + half + i) + low * load(sin + half + i));
            }
        }
    }
}

/* gate_up is [rows, 2 * size] and contiguous: silu(first half) * second half. */
EXPORT void silu_mul(float *out, const float *gate_up, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++, gate_up += 2 * size, out += size) {
        for (int64_t i = 0; i < size; i += LANES) {
            v8f gate = load(gate_up + i);
            store(out + i, gate / (1.0f + exp_v8(-gate)) * load(gate_up + size + i));
        }
    }
}
