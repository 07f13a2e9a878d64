/* Norms, rotary embedding and the gated activation for layers that run one by one. */

#include "layers.h"

/* x is [rows, heads, dim] with `row_stride` floats from row to row; out is contiguous. */
EXPORT void rms_norm(float *out, const float *x, const float *weight, int64_t rows, int64_t heads,
                     int64_t dim, int64_t row_stride, float eps) {
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t head = 0; head < heads; head++, out += dim) {
            norm_row(out, x + row * row_stride + head * dim, weight, dim, eps);
        }
    }
}

/* All [rows, dim] and contiguous. */
EXPORT void layer_norm(float *out, const float *x, const float *weight, int64_t rows, int64_t dim, float eps) {
    for (int64_t row = 0; row < rows; row++) layer_norm_row(out + row * dim, x + row * dim, weight, dim, eps);
}

/* total = x + residual and its norm; all [rows, dim] and contiguous. */
EXPORT void add_rms_norm(float *out, float *total, const float *x, const float *residual,
                         const float *weight, int64_t rows, int64_t dim, float eps) {
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t i = 0; i < dim; i += LANES) store(total + i, load(x + i) + load(residual + i));
        norm_row(out, total, weight, dim, eps);
        out += dim, total += dim, x += dim, residual += dim;
    }
}

/* x is [tokens, heads, dim] with `stride` floats per token, cos and sin [tokens, dim]; dim / 2 is a
   multiple of LANES; out is contiguous. */
EXPORT void rotary(float *out, const float *x, const float *cos, const float *sin, int64_t tokens,
                   int64_t heads, int64_t dim, int64_t stride) {
    for (int64_t token = 0; token < tokens; token++, cos += dim, sin += dim) {
        for (int64_t head = 0; head < heads; head++, out += dim) {
            rotate_head(out, x + token * stride + head * dim, cos, sin, dim);
        }
    }
}

/* gate_up is [rows, 2 * size] and contiguous: gelu(first half) * second half. */
EXPORT void gelu_mul(float *out, const float *gate_up, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++) gelu_mul_row(out + row * size, gate_up + 2 * row * size, size);
}

/* gate_up is [rows, 2 * size] and contiguous: silu(first half) * second half. */
EXPORT void silu_mul(float *out, const float *gate_up, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++) silu_mul_row(out + row * size, gate_up + 2 * row * size, size);
}
