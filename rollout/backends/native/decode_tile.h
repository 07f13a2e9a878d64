/* Queries against a tile of a few tokens, with vectors of WIDTH floats; decode.c includes it for each
   width. A score is 16 partial sums at any width, and sums of V go token by token: a query's result
   depends neither on the width nor on where K and V lie nor on which queries go with it. */

#define JOIN_(name, width) name##_##width
#define JOIN(name, width) JOIN_(name, width)
#define vec JOIN(decode_vec, WIDTH)
#define fold JOIN(fold, WIDTH)
#define score_few JOIN(score_few, WIDTH)
#define add_columns JOIN(add_columns, WIDTH)
#define weigh_few JOIN(weigh_few, WIDTH)
#define score_four JOIN(score_four, WIDTH)
#define attend_packed JOIN(attend_packed, WIDTH)
#define attend_in_place JOIN(attend_in_place, WIDTH)
#define PARTS (16 / WIDTH) /* vectors that hold the partial sums of one score */

typedef float vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

/* Sixteen partial sums become eight. */
INLINE v8f fold(const vec *sums) {
#if WIDTH == 8
    return sums[0] + sums[1];
#else
    union { vec whole; v8f half[2]; } u = {sums[0]};
    return u.half[0] + u.half[1];
#endif
}

/* scores[query][token] = q k for four pairs; `queries` is 1 or 2, a constant. */
INLINE void score_few(float *scores, const float *q, const float *const *tokens, int64_t offset,
                      int64_t dim, const int queries) {
    const int count = 4 / queries;
    vec sums[4][PARTS];
    for (int i = 0; i < 4; i++) {
        for (int p = 0; p < PARTS; p++) sums[i][p] = (vec){0};
    }
    for (int64_t d = 0; d < dim; d += 16) {
        for (int p = 0; p < PARTS; p++) {
            for (int t = 0; t < count; t++) {
                vec key = *(const vec *)(tokens[t] + offset + d + p * WIDTH);
                for (int i = 0; i < queries; i++) {
                    sums[i * count + t][p] += *(const vec *)(q + i * dim + d + p * WIDTH) * key;
                }
            }
        }
    }
    v4f four = sums_of_four(fold(sums[0]), fold(sums[1]), fold(sums[2]), fold(sums[3]));
    for (int i = 0; i < 4; i++) scores[i / count * TILE + i % count] = four[i];
}

/* Scores of four tokens, from the t-th on. */
INLINE void score_four(float *scores, const float *q, const struct tile *tile, int64_t t, int64_t dim,
                       struct ahead *ahead, const int queries) {
    for (int i = 0; i < 4; i += 4 / queries) {
        fetch(ahead);
        score_few(scores + t + i, q, tile->tokens + t + i, tile->k_offset, dim, queries);
    }
}

/* sums[query] += weight * V over `count` vectors; `queries` and `count` are constants. */
INLINE void add_columns(float *sums, const float *weights, const struct tile *tile, int64_t column,
                        int64_t dim, const int queries, const int count) {
    vec total[8];
    for (int i = 0; i < queries * count; i++) {
        total[i] = *(const vec *)(sums + i / count * dim + column + i % count * WIDTH);
    }
    for (int64_t t = 0; t < tile->count; t++) {
        const float *v = tile->tokens[t] + tile->v_offset + column;
        for (int j = 0; j < count; j++) {
            vec value = *(const vec *)(v + j * WIDTH);
            for (int i = 0; i < queries; i++) total[i * count + j] += weights[i * TILE + t] * value;
        }
    }
    for (int i = 0; i < queries * count; i++) {
        *(vec *)(sums + i / count * dim + column + i % count * WIDTH) = total[i];
    }
}

INLINE void weigh_few(float *scores, float *sums, struct softmax *softmax, const struct tile *tile,
                      int64_t dim, struct ahead *ahead, const int queries) {
    const int count = 8 / queries;
    int64_t column = 0;
    for (int i = 0; i < queries; i++) {
        weigh(scores + i * TILE, tile->count, TILE, softmax + i, sums + i * dim, dim);
    }
    for (; column + count * WIDTH <= dim; column += count * WIDTH) {
        fetch(ahead);
        add_columns(sums, scores, tile, column, dim, queries, count);
    }
    for (; column < dim; column += 16) add_columns(sums, scores, tile, column, dim, queries, PARTS);
}

/* Many queries of one KV head, whose tile is at hand. */
INLINE void attend_packed(const struct queries *all, int64_t first, int64_t last, const struct tile *tile,
                          int64_t dim, struct ahead *ahead) {
    float scores[2 * TILE];
    for (int64_t i = first; i < last; i += 2) {
        float *q = all->q + i * dim, *sums = all->sums + i * dim;
        if (i + 1 < last) {
            for (int64_t t = 0; t < tile->count; t += 4) score_four(scores, q, tile, t, dim, ahead, 2);
            weigh_few(scores, sums, all->softmax + i, tile, dim, ahead, 2);
        } else {
            for (int64_t t = 0; t < tile->count; t += 4) score_four(scores, q, tile, t, dim, ahead, 1);
            weigh_few(scores, sums, all->softmax + i, tile, dim, ahead, 1);
        }
    }
}

/* The queries of one row. All heads' K of a token are read before the next token's: memory is read
   as it lies. Query i of KV head h is number first + h * stride + i. */
INLINE void attend_in_place(const struct queries *all, int64_t first, int64_t stride, int64_t group,
                            int64_t kv_heads, int64_t kv_size, struct tile *tile, int64_t dim,
                            struct ahead *ahead) {
    const int64_t start = tile->k_offset;
    float scores[kv_heads * group][TILE];
    for (int64_t t = 0; t < tile->count; t += 4) {
        for (int64_t head = 0; head < kv_heads; head++) {
            const float *q = all->q + (first + head * stride) * dim;
            tile->k_offset = start + head * dim;
            int64_t i = 0;
            for (; i + 1 < group; i += 2) {
                score_four(scores[head * group + i], q + i * dim, tile, t, dim, ahead, 2);
            }
            if (i < group) score_four(scores[head * group + i], q + i * dim, tile, t, dim, ahead, 1);
        }
    }
    for (int64_t head = 0; head < kv_heads; head++) {
        tile->v_offset = start + kv_size + head * dim;
        for (int64_t i = 0; i < group; i += 2) {
            const int64_t query = first + head * stride + i;
            float *weights = scores[head * group + i], *sums = all->sums + query * dim;
            if (i + 1 < group) weigh_few(weights, sums, all->softmax + query, tile, dim, ahead, 2);
            else weigh_few(weights, sums, all->softmax + query, tile, dim, ahead, 1);
        }
    }
}

static void JOIN(decode_packed, WIDTH)(const struct queries *all, int64_t first, int64_t last,
                                       const struct tile *tile, int64_t dim, struct ahead *ahead) {
    if (dim == 64) attend_packed(all, first, last, tile, 64, ahead);
    else if (dim == 128) attend_packed(all, first, last, tile, 128, ahead);
    else attend_packed(all, first, last, tile, dim, ahead);
}

static void JOIN(decode_in_place, WIDTH)(const struct queries *all, int64_t first, int64_t stride,
                                         int64_t group, int64_t kv_heads, int64_t kv_size,
                                         struct tile *tile, int64_t dim, struct ahead *ahead) {
    if (dim == 64) attend_in_place(all, first, stride, group, kv_heads, kv_size, tile, 64, ahead);
    else if (dim == 128) attend_in_place(all, first, stride, group, kv_heads, kv_size, tile, 128, ahead);
    else attend_in_place(all, first, stride, group, kv_heads, kv_size, tile, dim, ahead);
}

#undef JOIN_
#undef JOIN
#undef vec
#undef fold
#undef score_few
#undef add_columns
#undef weigh_few
#undef score_four
#undef attend_packed
#undef attend_in_place
#undef PARTS
