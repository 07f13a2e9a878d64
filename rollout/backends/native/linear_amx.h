/* The product with bfloat16 weights by AMX, for which x is rounded to bfloat16. linear.c includes it.

   Tiles of the matrix unit have 16 rows of 64 bytes: of x 16 tokens and 32 inputs, of w 16 pairs of inputs and
   16 outputs, of y 16 tokens and 16 outputs in float32. A pair is two inputs of one output side by side, so two
   rows of a panel are interleaved; lanes of 128 bits are, each by itself, which leaves the outputs in another
   order until their sums are stored. All tokens, also few, take this path: what a token gets does not depend on
   the tokens beside it. */

#include "amx.h"

#ifdef HAS_AMX

#define TILE AMX_ROWS     /* tokens, outputs or pairs of inputs of a tile */
#define STEP (2 * TILE)   /* inputs of a tile */
#define LEAD (2 * STEP)   /* inputs that are interleaved ahead of the products: stores take their time */
#define PANEL (2 * TILE)  /* outputs of a panel */
#define TOKENS (2 * TILE) /* that are multiplied with a panel at once */

typedef uint16_t v32h __attribute__((vector_size(64), aligned(2), may_alias));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef float v16f __attribute__((vector_size(64), aligned(4), may_alias));

/* Of each lane of 8 numbers, the first or the last four of both vectors, taken in turns. */
#define LOW_PAIRS(a, b)                                                                                        \
    SHUFFLE(v32h, a, b, 0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, 43, 16, 48, 17, 49, 18, 50, 19, \
            51, 24, 56, 25, 57, 26, 58, 27, 59)
#define HIGH_PAIRS(a, b)                                                                                       \
    SHUFFLE(v32h, a, b, 4, 36, 5, 37, 6, 38, 7, 39, 12, 44, 13, 45, 14, 46, 15, 47, 20, 52, 21, 53, 22, 54,   \
            23, 55, 28, 60, 29, 61, 30, 62, 31, 63)
/* Sums of the low and the high pairs in the order of outputs: the first 16 and the others. */
#define FIRST_OUTPUTS(low, high) \
    SHUFFLE(v16i, low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23)
#define LAST_OUTPUTS(low, high) \
    SHUFFLE(v16i, low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31)

/* STEP inputs of a panel from the k-th on, in pairs: 16 outputs of a pair, then the other 16. Those that the panel
   does not have are zeros. */
INLINE void interleave(uint16_t *pairs, const uint16_t *panel, int64_t k, int64_t inputs) {
    const uint16_t *here = panel + k * PANEL;
    uint16_t *out = pairs + k * PANEL;
    for (int64_t i = 0; i < STEP; i += 2, here += 2 * PANEL, out += 2 * PANEL) {
        const v32h even = k + i < inputs ? *(const v32h *)here : (v32h){0};
        const v32h odd = k + i + 1 < inputs ? *(const v32h *)(here + PANEL) : (v32h){0};
        __builtin_prefetch(here + FAR_AHEAD * PANEL);
        __builtin_prefetch(here + (FAR_AHEAD + 1) * PANEL);
        *(v32h *)out = LOW_PAIRS(even, odd);
        *(v32h *)(out + PANEL) = HIGH_PAIRS(even, odd);
    }
}

/* `count` tokens of x from the first on, rounded to bfloat16, with zeros up to `padded` inputs and up
   to whole tiles of tokens. */
static void round_tokens(uint16_t *out, const struct linear *a, int64_t first, int64_t count, int64_t padded) {
    for (int64_t i = 0; i < (count + TOKENS - 1) / TOKENS * TOKENS; i++, out += padded) {
        const float *x = a->x + (first + i) * a->x_stride;
        int64_t k = 0;
        for (; i < count && k < a->inputs; k += LANES) {
            v8f values = splat(0);
            if (k + LANES <= a->inputs) values = load(x + k);
            else for (int64_t j = 0; k + j < a->inputs; j++) values[j] = x[k + j];
            store_as(out, k, values, BFLOAT16);
        }
        memset(out + k, 0, (padded - k) * sizeof(uint16_t));
    }
}

/* Sums += x w for STEP inputs, of up to 16 tokens or, if `is_full`, of up to 32. */
INLINE void multiply_pairs(const uint16_t *x, const uint16_t *pairs, int64_t padded, const int is_full) {
    amx_load(6, pairs, 2 * PANEL * sizeof(uint16_t));
    amx_load(7, pairs + PANEL, 2 * PANEL * sizeof(uint16_t));
    amx_load(4, x, padded * sizeof(uint16_t));
    amx_multiply(0, 4, 6);
    amx_multiply(1, 4, 7);
    if (!is_full) return;
    amx_load(5, x + TILE * padded, padded * sizeof(uint16_t));
    amx_multiply(2, 5, 6);
    amx_multiply(3, 5, 7);
}

/* The sums of up to 32 tokens, from `token` on. */
static void store_tokens(const struct linear *a, int64_t token, int64_t count, int64_t panel) {
    _Alignas(CACHE_LINE) float sums[4][TILE][TILE];
    amx_store(0, sums[0], sizeof sums[0][0]);
    amx_store(1, sums[1], sizeof sums[0][0]);
    if (count > TILE) {
        amx_store(2, sums[2], sizeof sums[0][0]);
        amx_store(3, sums[3], sizeof sums[0][0]);
    }
    for (int64_t i = 0; i < count; i++) {
        const v16f low = *(const v16f *)sums[i / TILE * 2][i % TILE];
        const v16f high = *(const v16f *)sums[i / TILE * 2 + 1][i % TILE];
        const v16f outputs[2] = {FIRST_OUTPUTS(low, high), LAST_OUTPUTS(low, high)};
        store_sums_16(a, token + i, panel, (const float *)outputs);
    }
}

/* A panel for tokens [start, start + count), whose rounded x this is. */
static void multiply_panel(const struct linear *a, const uint16_t *x, uint16_t *pairs, int64_t start, int64_t count,
                           int64_t panel, int64_t padded) {
    const uint16_t *w = (const uint16_t *)a->w + panel * PANEL * a->inputs;
    for (int64_t k = 0; k < LEAD && k < padded; k += STEP) interleave(pairs, w, k, a->inputs);
    for (int64_t i = 0; i < count; i += TOKENS, x += TOKENS * padded) {
        const int64_t left = count - i < TOKENS ? count - i : TOKENS;
        amx_zero(0);
        amx_zero(1);
        amx_zero(2);
        amx_zero(3);
        for (int64_t k = 0; k < padded; k += STEP) {
            if (i == 0 && k + LEAD < padded) interleave(pairs, w, k + LEAD, a->inputs);
            if (left > TILE) multiply_pairs(x + k, pairs + k * PANEL, padded, 1);
            else multiply_pairs(x + k, pairs + k * PANEL, padded, 0);
        }
        store_tokens(a, start + i, left, panel);
    }
}

static void linear_amx(const struct linear *a, int64_t first, int64_t last) {
    const int64_t padded = (a->inputs + STEP - 1) / STEP * STEP;
    const int64_t block = tokens_at_once(a->inputs, TOKENS) / TOKENS * TOKENS;
    const int64_t most = a->tokens < block ? (a->tokens + TOKENS - 1) / TOKENS * TOKENS : block;
    uint16_t *x = aligned_alloc(CACHE_LINE, (most + PANEL) * padded * sizeof(uint16_t)), *pairs = x + most * padded;
    if (!x) { /* the same panels without more memory */
        linear_16(a, first, last);
        return;
    }
    amx_configure();
    for (int64_t start = 0; start < a->tokens; start += most) {
        const int64_t count = a->tokens - start < most ? a->tokens - start : most;
        round_tokens(x, a, start, count, padded);
        for (int64_t panel = first; panel < last; panel++) multiply_panel(a, x, pairs, start, count, panel, padded);
    }
    amx_release();
    free(x);
}

#endif
