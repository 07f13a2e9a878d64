/* Norms, rotary embedding and gated activations of all rows, called from Python (ops.py) when layers run one by one.
   `type`, FLOAT32 or BFLOAT16, is the type of all tensors, unless a comment says otherwise. */

#include "layers.h"

/* Calls function(..., type) with a type that is a constant for the compiler. */
#define WITH_TYPE(type, function, ...) \
    do { \
        if (type == BFLOAT16) function(__VA_ARGS__, BFLOAT16); \
        else function(__VA_ARGS__, FLOAT32); \
    } while (0)

/* Computes the RMS norm of each head. x is [rows, heads, dim] with `row_stride` elements from row to row; out is
   contiguous. */
EXPORT void rms_norm(void *out, const void *x, const void *weight, int64_t rows, int64_t heads, int64_t dim,
                     int64_t row_stride, float eps, int64_t weight_type, int64_t type) {
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t head = 0; head < heads; head++) {
            void *to = place_of(out, (row * heads + head) * dim, type);
            const void *from = place_of(x, row * row_stride + head * dim, type);
            WITH_TYPE(type, norm_row_as, to, from, weight, weight_type, dim, eps);
        }
    }
}

/* Computes the layer norm of each row. out and x are [rows, dim] and contiguous. */
EXPORT void layer_norm(void *out, const void *x, const void *weight, int64_t rows, int64_t dim, float eps,
                       int64_t weight_type, int64_t type) {
    for (int64_t row = 0; row < rows; row++) {
        void *to = place_of(out, row * dim, type);
        const void *from = place_of(x, row * dim, type);
        WITH_TYPE(type, layer_norm_row_as, to, from, weight, weight_type, dim, eps);
    }
}

INLINE void add_rows(void *total, const void *x, const void *residual, int64_t size, int64_t type) {
    for (int64_t i = 0; i < size; i += LANES) {
        store_as(total, i, load_as(x, i, type) + load_as(residual, i, type), type);
    }
}

/* Computes total = x + residual, and out = the RMS norm of total. All are [rows, dim] and contiguous. */
EXPORT void add_rms_norm(void *out, void *total, const void *x, const void *residual, const void *weight,
                         int64_t rows, int64_t dim, float eps, int64_t weight_type, int64_t type) {
    for (int64_t row = 0; row < rows; row++) {
        void *to = place_of(out, row * dim, type), *sum = place_of(total, row * dim, type);
        const void *from = place_of(x, row * dim, type), *added = place_of(residual, row * dim, type);
        WITH_TYPE(type, add_rows, sum, from, added, dim);
        WITH_TYPE(type, norm_row_as, to, sum, weight, weight_type, dim, eps);
    }
}

/* Rotates each head. x is [tokens, heads, dim] with `stride` elements from token to token; cos and sin are float32,
   [tokens, dim]. dim / 2 is a multiple of LANES. out is contiguous. */
EXPORT void rotary(void *out, const void *x, const float *cos, const float *sin, int64_t tokens, int64_t heads,
                   int64_t dim, int64_t stride, int64_t type) {
    for (int64_t token = 0; token < tokens; token++, cos += dim, sin += dim) {
        for (int64_t head = 0; head < heads; head++) {
            void *to = place_of(out, (token * heads + head) * dim, type);
            const void *from = place_of(x, token * stride + head * dim, type);
            WITH_TYPE(type, rotate_head_as, to, from, cos, sin, dim);
        }
    }
}

/* Computes gelu(first half) * second half of each row. gate_up is [rows, 2 * size] and contiguous. */
EXPORT void gelu_mul(void *out, const void *gate_up, int64_t rows, int64_t size, int64_t type) {
    for (int64_t row = 0; row < rows; row++) {
        void *to = place_of(out, row * size, type);
        WITH_TYPE(type, gelu_mul_row_as, to, place_of(gate_up, 2 * row * size, type), size);
    }
}

/* Computes silu(first half) * second half of each row, in float32 only: in bfloat16 torch is as fast. */
EXPORT void silu_mul(float *out, const float *gate_up, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++) silu_mul_row(out + row * size, gate_up + 2 * row * size, size);
}
