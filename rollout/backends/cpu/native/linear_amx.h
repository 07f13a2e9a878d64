/* linear_amx: the product by AMX. Included by linear.c. Tiles of the matrix unit have 16 rows of 64 bytes. A tile of x
   has 16 tokens and 32 inputs, a tile of w 16 pairs of inputs and 16 outputs, a tile of y 16 tokens and 16 outputs in
   float32. */

#include "amx.h"

#ifdef HAS_AMX

#define TILE AMX_ROWS     /* tokens, outputs or pairs of inputs of a tile */
#define STEP (2 * TILE)   /* inputs of a tile */
#define LEAD (2 * STEP)   /* inputs that are interleaved ahead of the products, because stores take time */
#define TOKENS (2 * TILE) /* tokens that are multiplied with a panel at once */

/* Interleaves STEP inputs of a panel, from the k-th on, in pairs. Of each pair, 16 outputs come first, then the other
   16. */
INLINE void interleave_step(uint16_t *pairs, const uint16_t *panel, int64_t k, int64_t inputs) {
    for (int64_t i = k; i < k + STEP; i += 2) {
        v32h *out = (v32h *)(pairs + i * PANEL);
        interleave(out, out + 1, panel + i * PANEL, i, inputs);
    }
}

/* Adds x w for STEP inputs to the sums in tiles 0 to 3, of up to 16 tokens or, if `is_full`, of up to 32. `padded`:
   numbers from token to token in x. */
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

/* Stores the sums of `count` tokens, up to 32, from `token` on in y. */
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
        store_pairs(a, token + i, panel, low, high);
    }
}

/* Multiplies a panel with tokens [start, start + count). `x` is rounded to bfloat16; `pairs` is a work buffer. */
static void multiply_panel(const struct linear *a, const uint16_t *x, uint16_t *pairs, int64_t start, int64_t count,
                           int64_t panel, int64_t padded) {
    const uint16_t *w = (const uint16_t *)a->w + panel * PANEL * a->inputs;
    for (int64_t k = 0; k < LEAD && k < padded; k += STEP) interleave_step(pairs, w, k, a->inputs);
    for (int64_t i = 0; i < count; i += TOKENS, x += TOKENS * padded) {
        const int64_t left = count - i < TOKENS ? count - i : TOKENS;
        amx_zero(0);
        amx_zero(1);
        amx_zero(2);
        amx_zero(3);
        for (int64_t k = 0; k < padded; k += STEP) {
            if (i == 0 && k + LEAD < padded) interleave_step(pairs, w, k + LEAD, a->inputs);
            if (left > TILE) multiply_pairs(x + k, pairs + k * PANEL, padded, 1);
            else multiply_pairs(x + k, pairs + k * PANEL, padded, 0);
        }
        store_tokens(a, start + i, left, panel);
    }
}

/* Computes the outputs of panels [first, last). */
static void linear_amx(const struct linear *a, int64_t first, int64_t last) {
    const int64_t padded = (a->inputs + STEP - 1) / STEP * STEP;
    const int64_t block = tokens_at_once(a->inputs, TOKENS) / TOKENS * TOKENS;
    const int64_t most = a->tokens < block ? (a->tokens + TOKENS - 1) / TOKENS * TOKENS : block;
    uint16_t *x = aligned_alloc(CACHE_LINE, (most + PANEL) * padded * sizeof(uint16_t)), *pairs = x + most * padded;
    if (!x) { /* no memory: multiply by vectors, which needs none */
        linear_16(a, first, last);
        return;
    }
    amx_configure();
    for (int64_t start = 0; start < a->tokens; start += most) {
        const int64_t count = a->tokens - start < most ? a->tokens - start : most;
        round_tokens(x, a, start, count, padded, TOKENS);
        for (int64_t panel = first; panel < last; panel++) multiply_panel(a, x, pairs, start, count, panel, padded);
    }
    amx_release();
    free(x);
}

#endif
