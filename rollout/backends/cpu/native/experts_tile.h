/* multiply_rows_<WIDTH>: products of 8 rows of a weight with some tokens, with vectors of WIDTH floats along the rows.
   Included by experts.c for each width. MAX_TOKENS: tokens of a tile at most. */

#include "wide.h"

#define sums_of_rows JOIN(sums_of_rows, WIDTH)
#define tile JOIN(experts_tile, WIDTH)
#define tile_of JOIN(experts_tile_of, WIDTH)
#define tiles_of JOIN(experts_tiles_of, WIDTH)
#define multiply_rows JOIN(multiply_rows, WIDTH)

/* Returns the sum of each of 4 vectors. */
INLINE v4f sums_of_rows(const vec *rows) {
    const vec a = rows[0], b = rows[1], c = rows[2], d = rows[3];
#if WIDTH == 8
    const vec ab = SHUFFLE8(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE8(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    const vec cd = SHUFFLE8(c, d, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE8(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
    union { vec whole; v4f part[2]; } u = {SHUFFLE8(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) +
                                           SHUFFLE8(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15)};
    return u.part[0] + u.part[1];
#else
    const vec ab = SHUFFLE16(a, b, 0, 16, 1, 17) + SHUFFLE16(a, b, 2, 18, 3, 19);
    const vec cd = SHUFFLE16(c, d, 0, 16, 1, 17) + SHUFFLE16(c, d, 2, 18, 3, 19);
    union { vec whole; v4f part[4]; } u = {SHUFFLE16(ab, cd, 0, 1, 16, 17) + SHUFFLE16(ab, cd, 2, 3, 18, 19)};
    return (u.part[0] + u.part[2]) + (u.part[1] + u.part[3]);
#endif
}

/* Multiplies 4 rows with `tokens` tokens, a constant, into y[token * y_stride + row]. Prefetches the rows at `next`. */
INLINE void tile(float *y, int64_t y_stride, const char *w, const char *next, int64_t inputs,
                 const float *const *x, const int tokens, const int is_bfloat16) {
    const int64_t size = is_bfloat16 ? sizeof(uint16_t) : sizeof(float), row = inputs * size;
    vec sums[MAX_TOKENS][4];
    UNROLL for (int i = 0; i < tokens; i++) {
        UNROLL for (int j = 0; j < 4; j++) sums[i][j] = (vec){0};
    }
    for (int64_t k = 0; k < inputs; k += WIDTH) {
        vec weights[4];
        UNROLL for (int j = 0; j < 4; j++) {
            weights[j] = load_weights(w + j * row + k * size, is_bfloat16);
            __builtin_prefetch(next + j * row + k * size, 0, 2);
        }
        UNROLL for (int i = 0; i < tokens; i++) {
            const vec values = *(const vec *)(x[i] + k);
            UNROLL for (int j = 0; j < 4; j++) sums[i][j] = fma_wide(values, weights[j], sums[i][j]);
        }
    }
    UNROLL for (int i = 0; i < tokens; i++) *(v4f *)(y + i * y_stride) = sums_of_rows(sums[i]);
}

/* Calls `tile` with a constant number of tokens. */
INLINE void tile_of(float *y, int64_t y_stride, const char *w, const char *next, int64_t inputs,
                    const float *const *x, int64_t tokens, const int is_bfloat16) {
    switch (tokens) {
        case 1: tile(y, y_stride, w, next, inputs, x, 1, is_bfloat16); break;
        case 2: tile(y, y_stride, w, next, inputs, x, 2, is_bfloat16); break;
        case 3: tile(y, y_stride, w, next, inputs, x, 3, is_bfloat16); break;
#if MAX_TOKENS == 6
        case 4: tile(y, y_stride, w, next, inputs, x, 4, is_bfloat16); break;
        case 5: tile(y, y_stride, w, next, inputs, x, 5, is_bfloat16); break;
        case 6: tile(y, y_stride, w, next, inputs, x, 6, is_bfloat16); break;
#endif
    }
}

/* Multiplies 4 rows with all tokens, in tiles of nearly equal size. The first tile prefetches the next 4 rows. */
INLINE void tiles_of(float *y, int64_t y_stride, const char *w, int64_t inputs, const float *const *x,
                     int64_t tokens, const int is_bfloat16) {
    const int64_t tiles = (tokens + MAX_TOKENS - 1) / MAX_TOKENS;
    const char *next = w + 4 * inputs * (is_bfloat16 ? sizeof(uint16_t) : sizeof(float));
    for (int64_t i = 0; i < tiles; i++) {
        const int64_t first = tokens * i / tiles, last = tokens * (i + 1) / tiles;
        tile_of(y + first * y_stride, y_stride, w, i ? w : next, inputs, x + first, last - first, is_bfloat16);
    }
}

/* Computes y[token * y_stride + row] of 8 rows. For many tokens, converts bfloat16 rows to float32 in `room` once,
   unless it is NULL. */
static void multiply_rows(float *y, int64_t y_stride, const char *w, int64_t inputs, const float *const *x,
                          int64_t tokens, int64_t type, float *room) {
    for (int64_t j = 0; j < 8; j += 4) {
        const char *rows = w + j * inputs * size_of(type);
        if (type == FLOAT32) {
            tiles_of(y + j, y_stride, rows, inputs, x, tokens, 0);
        } else if (tokens <= 2 * MAX_TOKENS || !room) {
            tiles_of(y + j, y_stride, rows, inputs, x, tokens, 1);
        } else {
            for (int64_t i = 0; i < 4 * inputs; i += WIDTH) *(vec *)(room + i) = load_weights(rows + 2 * i, 1);
            tiles_of(y + j, y_stride, (const char *)room, inputs, x, tokens, 0);
        }
    }
}

#undef sums_of_rows
#undef tile
#undef tile_of
#undef tiles_of
#undef multiply_rows
