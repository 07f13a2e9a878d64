/* linear_dot: the product by AVX-512's dot products of bfloat16 pairs. Included by linear.c. */

#ifdef __AVX512BF16__

#define TOKENS 12 /* tokens of a tile at most, whose 24 sums stay in registers */

/* Multiplies a panel with `tokens` tokens, a constant, from `token` on. `x` is rounded to bfloat16. */
INLINE void dot_tile(const struct linear *a, const uint16_t *x, int64_t token, int64_t panel, int64_t padded,
                     const int tokens) {
    const uint16_t *w = (const uint16_t *)a->w + panel * PANEL * a->inputs;
    v16f sums[TOKENS][2];
    UNROLL for (int i = 0; i < tokens; i++) {
        sums[i][0] = sums[i][1] = (v16f){0};
        __builtin_prefetch(a->y + (token + i) * a->outputs + panel * PANEL, 1);
    }
    for (int64_t k = 0; k < a->inputs; k += 2, w += 2 * PANEL) {
        v32h low, high;
        interleave(&low, &high, w, k, a->inputs);
        UNROLL for (int i = 0; i < tokens; i++) {
            const v32h pair = splat_pair(x + i * padded + k);
            sums[i][0] = add_pairs(sums[i][0], pair, low);
            sums[i][1] = add_pairs(sums[i][1], pair, high);
        }
    }
    UNROLL for (int i = 0; i < tokens; i++) store_pairs(a, token + i, panel, sums[i][0], sums[i][1]);
}

/* Calls `dot_tile` with a constant number of tokens. */
static void dot_tile_of(const struct linear *a, const uint16_t *x, int64_t token, int64_t panel, int64_t padded,
                        int64_t tokens) {
    switch (tokens) {
        case 1: dot_tile(a, x, token, panel, padded, 1); break;
        case 2: dot_tile(a, x, token, panel, padded, 2); break;
        case 3: dot_tile(a, x, token, panel, padded, 3); break;
        case 4: dot_tile(a, x, token, panel, padded, 4); break;
        case 5: dot_tile(a, x, token, panel, padded, 5); break;
        case 6: dot_tile(a, x, token, panel, padded, 6); break;
        case 7: dot_tile(a, x, token, panel, padded, 7); break;
        case 8: dot_tile(a, x, token, panel, padded, 8); break;
        case 9: dot_tile(a, x, token, panel, padded, 9); break;
        case 10: dot_tile(a, x, token, panel, padded, 10); break;
        case 11: dot_tile(a, x, token, panel, padded, 11); break;
        default: dot_tile(a, x, token, panel, padded, TOKENS);
    }
}

/* Computes the outputs of panels [first, last). */
static void linear_dot(const struct linear *a, int64_t first, int64_t last) {
    const int64_t line = CACHE_LINE / sizeof(uint16_t), padded = (a->inputs + line - 1) / line * line;
    const int64_t block = tokens_at_once(a->inputs, TOKENS), most = a->tokens < block ? a->tokens : block;
    uint16_t *x = aligned_alloc(CACHE_LINE, (most > 0 ? most : 1) * padded * sizeof(uint16_t));
    if (!x) { /* no memory: multiply by vectors, which needs none */
        linear_16(a, first, last);
        return;
    }
    for (int64_t start = 0; start < a->tokens; start += most) {
        const int64_t count = a->tokens - start < most ? a->tokens - start : most;
        const int64_t tiles = (count + TOKENS - 1) / TOKENS;
        round_tokens(x, a, start, count, padded, 1);
        for (int64_t panel = first; panel < last; panel++) {
            for (int64_t i = 0; i < tiles; i++) { /* tiles of nearly equal size */
                const int64_t token = count * i / tiles, next = count * (i + 1) / tiles;
                dot_tile_of(a, x + token * padded, start + token, panel, padded, next - token);
            }
        }
    }
    free(x);
}

#undef TOKENS
#endif
