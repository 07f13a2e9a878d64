/* linear_<WIDTH>: the product with vectors of WIDTH floats and tiles of up to MAX_TOKENS tokens. Included by
   linear.c for each width. */

#include "wide.h"

#define store_sums JOIN(store_sums, WIDTH)
#define tile JOIN(tile, WIDTH)
#define tile_of JOIN(tile_of, WIDTH)
#define tiles_of JOIN(tiles_of, WIDTH)
#define widened JOIN(widened, WIDTH)
#define few_tokens JOIN(few_tokens, WIDTH)
#define PANEL (2 * WIDTH)

/* Stores a panel's sums of one token in y. The last panel may have more sums than there are outputs left. */
static __attribute__((noinline)) void store_sums(const struct linear *a, int64_t token, int64_t panel,
                                                 const float *sums) {
    int64_t n = panel * PANEL, left = a->outputs - n < PANEL ? a->outputs - n : PANEL;
    float *y = a->y + token * a->outputs + n;
    if (left == PANEL) {
        vec low = *(const vec *)sums, high = *(const vec *)(sums + WIDTH);
        if (a->bias) {
            low += *(const vec *)(a->bias + n);
            high += *(const vec *)(a->bias + n + WIDTH);
        }
        if (a->accumulate) {
            low = *(const vec *)y + low;
            high = *(const vec *)(y + WIDTH) + high;
        }
        *(vec *)y = low;
        *(vec *)(y + WIDTH) = high;
        return;
    }
    for (int64_t j = 0; j < left; j++) {
        float sum = a->bias ? sums[j] + a->bias[n + j] : sums[j];
        y[j] = a->accumulate ? y[j] + sum : sum;
    }
}

/* Multiplies `tokens` tokens from `token` on with `panels` panels, `step` panels apart. Both counts are constants. */
INLINE void tile(const struct linear *a, int64_t token, int64_t panel, int64_t step, const int tokens,
                 const int panels, const int is_bfloat16) {
    const int64_t size = is_bfloat16 ? sizeof(uint16_t) : sizeof(float), bytes = a->inputs * PANEL * size;
    const float *x = a->x + token * a->x_stride;
    const char *w = (const char *)a->w + panel * bytes;
    vec sums[MAX_TOKENS][8], weights[8];
    UNROLL for (int i = 0; i < tokens; i++) {
        UNROLL for (int j = 0; j < 2 * panels; j++) sums[i][j] = (vec){0};
    }
    UNROLL for (int i = 0; i < tokens; i++) { /* y is written far apart: fetch it early */
        UNROLL for (int j = 0; j < panels; j++) {
            __builtin_prefetch(a->y + (token + i) * a->outputs + (panel + j * step) * PANEL, 1);
        }
    }
    for (int64_t k = 0; k < a->inputs; k++, w += PANEL * size) {
        UNROLL for (int j = 0; j < panels; j++) {
            const char *here = w + j * step * bytes;
            weights[2 * j] = load_weights(here, is_bfloat16);
            weights[2 * j + 1] = load_weights(here + WIDTH * size, is_bfloat16);
            UNROLL for (int64_t line = 0; line < PANEL * size; line += CACHE_LINE) {
                __builtin_prefetch(here + FAR_AHEAD * PANEL * size + line);
            }
        }
        UNROLL for (int i = 0; i < tokens; i++) {
            vec value = x[i * a->x_stride + k] - (vec){0}; /* in every lane; x - 0 is x */
            UNROLL for (int j = 0; j < 2 * panels; j++) sums[i][j] = fma_wide(value, weights[j], sums[i][j]);
        }
    }
    UNROLL for (int i = 0; i < tokens; i++) {
        UNROLL for (int j = 0; j < panels; j++) {
            vec stored[2] = {sums[i][2 * j], sums[i][2 * j + 1]};
            store_sums(a, token + i, panel + j * step, (const float *)stored);
        }
    }
}

/* Calls `tile` for one panel, with a constant number of tokens. */
INLINE void tile_of(const struct linear *a, int64_t token, int64_t panel, int64_t tokens, const int is_bfloat16) {
    switch (tokens) {
        case 1: tile(a, token, panel, 0, 1, 1, is_bfloat16); break;
        case 2: tile(a, token, panel, 0, 2, 1, is_bfloat16); break;
        case 3: tile(a, token, panel, 0, 3, 1, is_bfloat16); break;
        case 4: tile(a, token, panel, 0, 4, 1, is_bfloat16); break;
        case 5: tile(a, token, panel, 0, 5, 1, is_bfloat16); break;
        case 6: tile(a, token, panel, 0, 6, 1, is_bfloat16); break;
#if MAX_TOKENS == 12
        case 7: tile(a, token, panel, 0, 7, 1, is_bfloat16); break;
        case 8: tile(a, token, panel, 0, 8, 1, is_bfloat16); break;
        case 9: tile(a, token, panel, 0, 9, 1, is_bfloat16); break;
        case 10: tile(a, token, panel, 0, 10, 1, is_bfloat16); break;
        case 11: tile(a, token, panel, 0, 11, 1, is_bfloat16); break;
        case 12: tile(a, token, panel, 0, 12, 1, is_bfloat16); break;
#endif
    }
}

/* Multiplies few tokens with several panels at once, which lie far apart. With one panel, the few sums would
   wait for each other, and so would reads of memory. Returns the first panel that is not done. */
INLINE int64_t few_tokens(const struct linear *a, int64_t first, int64_t last, const int is_bfloat16) {
    int64_t step = (last - first) / (a->tokens == 1 ? 4 : 2);
    for (int64_t panel = first; panel < first + step; panel++) {
        switch (a->tokens) {
            case 1: tile(a, 0, panel, step, 1, 4, is_bfloat16); break;
            case 2: tile(a, 0, panel, step, 2, 2, is_bfloat16); break;
            case 3: tile(a, 0, panel, step, 3, 2, is_bfloat16); break;
#if MAX_TOKENS == 12
            case 4: tile(a, 0, panel, step, 4, 2, is_bfloat16); break;
            case 5: tile(a, 0, panel, step, 5, 2, is_bfloat16); break;
            case 6: tile(a, 0, panel, step, 6, 2, is_bfloat16); break;
#endif
        }
    }
    return first + step * (a->tokens == 1 ? 4 : 2);
}

/* Multiplies one panel with tokens [start, end), in tiles of nearly equal size. */
INLINE void tiles_of(const struct linear *a, int64_t start, int64_t end, int64_t panel, const int is_bfloat16) {
    int64_t tiles = (end - start + MAX_TOKENS - 1) / MAX_TOKENS;
    for (int64_t i = 0; i < tiles; i++) {
        int64_t token = start + (end - start) * i / tiles, next = start + (end - start) * (i + 1) / tiles;
        tile_of(a, token, panel, next - token, is_bfloat16);
    }
}

/* Does the same as `tiles_of` for bfloat16, but converts the panel to float32 in `wide` once for all tiles. */
static void widened(const struct linear *a, int64_t start, int64_t end, int64_t panel, float *wide) {
    const uint16_t *w = (const uint16_t *)a->w + panel * PANEL * a->inputs;
    struct linear one = *a; /* a view in which this panel is panel 0 */
    for (int64_t i = 0; i < a->inputs * PANEL; i += WIDTH) {
        *(vec *)(wide + i) = load_weights((const char *)(w + i), 1);
    }
    one.w = wide - panel * PANEL * a->inputs;
    tiles_of(&one, start, end, panel, 0);
}

/* Computes the outputs of panels [first, last). */
static void JOIN(linear, WIDTH)(const struct linear *a, int64_t first, int64_t last) {
    const int64_t block = tokens_at_once(a->inputs, MAX_TOKENS);
    float *wide = NULL;
    if (a->tokens <= MAX_TOKENS / 2) {
        first = a->is_bfloat16 ? few_tokens(a, first, last, 1) : few_tokens(a, first, last, 0);
    }
    if (a->is_bfloat16 && a->tokens > 2 * MAX_TOKENS) wide = malloc(a->inputs * PANEL * sizeof(float));
    for (int64_t start = 0; start < a->tokens; start += block) {
        int64_t end = start + block < a->tokens ? start + block : a->tokens;
        for (int64_t panel = first; panel < last; panel++) {
            if (wide) widened(a, start, end, panel, wide);
            else if (a->is_bfloat16) tiles_of(a, start, end, panel, 1);
            else tiles_of(a, start, end, panel, 0);
        }
    }
    free(wide);
}

#undef store_sums
#undef tile
#undef tile_of
#undef tiles_of
#undef widened
#undef few_tokens
#undef PANEL
