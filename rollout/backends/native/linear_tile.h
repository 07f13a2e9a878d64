/* linear_<WIDTH>, the product with vectors of WIDTH floats. linear.c includes it for each width. */

#define JOIN_(name, width) name##_##width
#define JOIN(name, width) JOIN_(name, width)
#define vec JOIN(vec, WIDTH)
#define dot_rows JOIN(dot_rows, WIDTH)
#define dot_tokens JOIN(dot_tokens, WIDTH)
#define dot_streams JOIN(dot_streams, WIDTH)
#define dot_all JOIN(dot_all, WIDTH)

typedef float vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

/* y[t][n] for `tokens` rows of x and `outputs` rows of w, `step` apart; the other three are constants. */
INLINE void dot_rows(const struct linear *a, int64_t t, int64_t n, int64_t step, const int tokens,
                     const int outputs, const int locality) {
    const float *x = a->x + t * a->x_stride, *w = a->w + n * a->inputs;
    const int64_t stream = step * a->inputs;
    vec sums[MAX_TOKENS][MAX_OUTPUTS];
    for (int i = 0; i < tokens; i++) {
        for (int j = 0; j < outputs; j++) sums[i][j] = (vec){0};
    }
    for (int64_t k = 0; k < a->inputs; k += WIDTH) {
        vec weights[MAX_OUTPUTS];
        for (int j = 0; j < outputs; j++) {
            weights[j] = *(const vec *)(w + j * stream + k);
            if (t == 0) prefetch(w + j * stream + k + AHEAD, locality);
        }
        for (int i = 0; i < tokens; i++) {
            vec value = *(const vec *)(x + i * a->x_stride + k);
            for (int j = 0; j < outputs; j++) sums[i][j] += value * weights[j];
        }
    }
    for (int i = 0; i < tokens; i++) {
        for (int j = 0; j < outputs; j++) {
            float sum = a->bias ? a->bias[n + j * step] : 0;
            for (int lane = 0; lane < WIDTH; lane += 8) {
                sum += sum_v8(*(const v8f *)((const float *)&sums[i][j] + lane));
            }
            a->y[(t + i) * a->outputs + n + j * step] = sum;
        }
    }
}

INLINE void dot_tokens(const struct linear *a, int64_t n, int64_t step, const int outputs,
                       const int locality) {
    int64_t t = 0;
    if (outputs <= 2) {
        for (; t + 4 <= a->tokens; t += 4) dot_rows(a, t, n, step, 4, outputs, locality);
    }
    if (outputs <= 4) {
        for (; t + 2 <= a->tokens; t += 2) dot_rows(a, t, n, step, 2, outputs, locality);
    }
    for (; t < a->tokens; t++) dot_rows(a, t, n, step, 1, outputs, locality);
}

/* Outputs [first, last) from `streams` equal parts of w at once, and the few left over. */
INLINE void dot_streams(const struct linear *a, int64_t first, int64_t last, const int streams,
                        const int locality) {
    int64_t step = (last - first) / streams;
    for (int64_t n = first; n < first + step; n++) dot_tokens(a, n, step, streams, locality);
    for (int64_t n = first + step * streams; n < last; n++) dot_tokens(a, n, 1, 1, locality);
}

INLINE void dot_all(const struct linear *a, int64_t first, int64_t last, const int locality) {
    if (a->tokens == 1) {
        dot_streams(a, first, last, 8, locality);
    } else if (a->tokens < 4) {
        dot_streams(a, first, last, 4, locality);
    } else {
        dot_streams(a, first, last, 2, locality);
    }
}

static void JOIN(linear, WIDTH)(const struct linear *a, int64_t first, int64_t last) {
    switch (a->locality) {
        case 0: dot_all(a, first, last, 0); break;
        case 1: dot_all(a, first, last, 1); break;
        case 2: dot_all(a, first, last, 2); break;
        case 3: dot_all(a, first, last, 3); break;
        default: dot_all(a, first, last, -1);
    }
}

#undef JOIN_
#undef JOIN
#undef vec
#undef dot_rows
#undef dot_tokens
#undef dot_streams
#undef dot_all
