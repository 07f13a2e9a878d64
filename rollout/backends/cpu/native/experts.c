/* Routed experts: for each token the weighted sum of its experts, which are gated feed-forward networks. Called from
   Python (experts.py): sort_experts, then experts_gate_up_part, then experts_down_part.

   Tokens are sorted by expert, and each expert's weights are read once for all of its tokens, or once for every
   TOKENS_AT_ONCE of them. The terms of a sum, and a token's experts, are added in an order that does not depend on
   the other tokens. So a token's result does not depend on them. */

#include "layers.h"

#include <stdlib.h>

enum { SILU, GELU_TANH, CLAMPED_SWIGLU };

/* The weights of all experts, and the experts of each token. Sizes are multiples of 8. An assignment is the k-th
   expert of a token, numbered token * per_token + k. */
struct experts {
    float *out;           /* [tokens, hidden], zeros before `experts_down_part`; all arrays are contiguous */
    const float *x;       /* [tokens, hidden] */
    const int64_t *ids;   /* [tokens, per_token], each in [0, experts]; id `experts` is another rank's expert */
    const float *weights; /* [tokens, per_token] */
    const void *gate_up;  /* [experts, 2 * size, hidden], all gates, then all ups; float32 or bfloat16 */
    const void *down;     /* [experts, hidden, size], of the same type, as are the biases */
    const void *gate_up_bias, *down_bias; /* [experts, 2 * size] and [experts, hidden], or NULL */
    int64_t *starts;      /* [experts + 1]: a work buffer, like the next two */
    int64_t *order;       /* [tokens * per_token]: assignments, sorted by expert */
    float *active;        /* [tokens * per_token, size]: activations, in the order of `order` */
    int64_t tokens, per_token, experts, hidden, size;
    int64_t type;         /* FLOAT32 or BFLOAT16, of gate_up and down */
    int64_t lanes;        /* 8 for 256-bit vectors; 0 for the widest there are */
    int64_t activation;   /* SILU, GELU_TANH or CLAMPED_SWIGLU */
    double alpha, limit;  /* of CLAMPED_SWIGLU */
};

#define TOKENS_AT_ONCE 96 /* tokens of one expert, whose x fits the second-level cache */
#define ROWS 8            /* rows of a weight that are multiplied at once */

#define WIDTH 8
#define MAX_TOKENS 3 /* 12 sums in 16 registers */
#include "experts_tile.h"
#undef WIDTH
#undef MAX_TOKENS

#ifdef __AVX512F__
#ifdef __clang__
#define SHUFFLE16_(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE16_(a, b, ...) __builtin_shuffle(a, b, (words_16){__VA_ARGS__})
#endif
/* Shuffles each quarter of the vectors in the same way. */
#define SHUFFLE16(a, b, i, j, k, l) SHUFFLE16_(a, b, i, j, k, l, i + 4, j + 4, k + 4, l + 4, i + 8, j + 8, \
                                               k + 8, l + 8, i + 12, j + 12, k + 12, l + 12)
#define WIDTH 16
#define MAX_TOKENS 6 /* 24 sums in 32 registers */
#include "experts_tile.h"
#undef WIDTH
#undef MAX_TOKENS
#endif

/* Multiplies 8 rows of a weight, from `row` on, with the tokens of x, into y[token * y_stride + row]. */
static void multiply_rows(const struct experts *a, float *y, int64_t y_stride, const void *weight, int64_t row,
                          int64_t inputs, const float *const *x, int64_t tokens, float *room) {
    const char *w = (const char *)weight + row * inputs * size_of(a->type);
#ifdef __AVX512F__
    if (a->lanes != 8 && inputs % 16 == 0) {
        multiply_rows_16(y, y_stride, w, inputs, x, tokens, a->type, room);
        return;
    }
#endif
    multiply_rows_8(y, y_stride, w, inputs, x, tokens, a->type, room);
}

/* Sorts the assignments by expert, stably, by counting. Writes `starts` and `order`. */
EXPORT void sort_experts(const struct experts *a) {
    const int64_t count = a->tokens * a->per_token;
    memset(a->starts, 0, (a->experts + 1) * sizeof(int64_t));
    for (int64_t i = 0; i < count; i++) a->starts[a->ids[i]]++;
    for (int64_t e = 0, end = 0; e <= a->experts; e++) a->starts[e] = end += a->starts[e];
    for (int64_t i = count - 1; i >= 0; i--) a->order[--a->starts[a->ids[i]]] = i;
}

INLINE void activate(const struct experts *a, float *out, const float *gate_up) {
    if (a->activation == SILU) silu_mul_row(out, gate_up, ROWS);
    else if (a->activation == GELU_TANH) gelu_mul_row(out, gate_up, ROWS);
    else clamped_swiglu_row(out, gate_up, ROWS, (float)a->alpha, (float)a->limit);
}

/* Computes the activations of one expert, groups of 8 rows [first, last), for sorted assignments [start, end). */
static void gate_up_of(const struct experts *a, int64_t expert, int64_t start, int64_t end, int64_t first,
                       int64_t last, float *room) {
    const float *x[TOKENS_AT_ONCE];
    float gate_up[TOKENS_AT_ONCE][2 * ROWS];
    const int64_t count = end - start;
    for (int64_t i = 0; i < count; i++) x[i] = a->x + a->order[start + i] / a->per_token * a->hidden;
    for (int64_t row = first * ROWS; row < last * ROWS; row += ROWS) {
        const int64_t gate = expert * 2 * a->size + row, up = gate + a->size;
        multiply_rows(a, gate_up[0], 2 * ROWS, a->gate_up, gate, a->hidden, x, count, room);
        multiply_rows(a, gate_up[0] + ROWS, 2 * ROWS, a->gate_up, up, a->hidden, x, count, room);
        for (int64_t i = 0; i < count; i++) {
            if (a->gate_up_bias) {
                store(gate_up[i], load(gate_up[i]) + load_as(a->gate_up_bias, gate, a->type));
                store(gate_up[i] + ROWS, load(gate_up[i] + ROWS) + load_as(a->gate_up_bias, up, a->type));
            }
            activate(a, a->active + (start + i) * a->size + row, gate_up[i]);
        }
    }
}

/* Adds one expert's output, groups of 8 rows [first, last), to `out` for sorted assignments [start, end). */
static void down_of(const struct experts *a, int64_t expert, int64_t start, int64_t end, int64_t first,
                    int64_t last, float *room) {
    const float *x[TOKENS_AT_ONCE];
    float y[TOKENS_AT_ONCE][ROWS];
    const int64_t count = end - start;
    for (int64_t i = 0; i < count; i++) x[i] = a->active + (start + i) * a->size;
    for (int64_t row = first * ROWS; row < last * ROWS; row += ROWS) {
        const int64_t place = expert * a->hidden + row;
        const v8f bias = a->down_bias ? load_as(a->down_bias, place, a->type) : splat(0);
        multiply_rows(a, y[0], ROWS, a->down, place, a->size, x, count, room);
        for (int64_t i = 0; i < count; i++) {
            const int64_t assignment = a->order[start + i];
            float *out = a->out + assignment / a->per_token * a->hidden + row;
            store(out, load(out) + a->weights[assignment] * (load(y[i]) + bias));
        }
    }
}

typedef void (*of_expert)(const struct experts *a, int64_t expert, int64_t start, int64_t end, int64_t first,
                          int64_t last, float *room);

/* Runs `function` on groups of 8 rows [first, last) of all experts in use, in order. `inputs`: numbers of a row. */
INLINE void of_experts(of_expert function, const struct experts *a, int64_t first, int64_t last, int64_t inputs) {
    float *room = a->type == BFLOAT16 ? malloc(4 * inputs * sizeof(float)) : NULL;
    for (int64_t e = 0; e < a->experts; e++) {
        for (int64_t start = a->starts[e]; start < a->starts[e + 1]; start += TOKENS_AT_ONCE) {
            const int64_t end = start + TOKENS_AT_ONCE;
            function(a, e, start, end < a->starts[e + 1] ? end : a->starts[e + 1], first, last, room);
        }
    }
    free(room);
}

/* Compute all activations, and then all outputs. Items [first, last) are groups of 8 of the `size` rows of gates and
   ups, and of the `hidden` rows of the output. */
EXPORT void experts_gate_up_part(const void *args, void *scratch, int64_t first, int64_t last) {
    const struct experts *a = args;
    (void)scratch;
    of_experts(gate_up_of, a, first, last, a->hidden);
}

EXPORT void experts_down_part(const void *args, void *scratch, int64_t first, int64_t last) {
    const struct experts *a = args;
    (void)scratch;
    of_experts(down_of, a, first, last, a->size);
}
