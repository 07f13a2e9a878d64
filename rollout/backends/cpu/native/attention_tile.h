/* attend_tile_<WIDTH>: attention of queries to a tile, with vectors of WIDTH floats. Included by
   attention_tiles.c for each width. Every number is summed in the order of `depth`, so results depend
   neither on the width nor on the number of rows. */

#define JOIN_(name, width) name##_##width
#define JOIN(name, width) JOIN_(name, width)
#define vec JOIN(tile_vec, WIDTH)
#define product JOIN(product, WIDTH)
#define columns JOIN(columns, WIDTH)
#define attend_strip JOIN(attend_strip, WIDTH)
#define attend_strips JOIN(attend_strips, WIDTH)
#define fma_wide JOIN(fma, WIDTH)

typedef float vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

/* Computes c = a b, or c += a b if `adds`, for `rows` x `count` vectors, which fit the registers; both are
   constants. Calls `fetch` twice per FETCH_EVERY steps, because more frequent calls cost more. */
INLINE void product(float *c, int64_t c_stride, const float *a, int64_t a_stride, const float *b,
                    int64_t b_stride, int64_t depth, const int adds, const int rows, const int count,
                    struct ahead *ahead) {
    vec sums[STRIP][8];
    for (int i = 0; i < rows; i++) {
        for (int j = 0; j < count; j++) {
            sums[i][j] = adds ? *(const vec *)(c + i * c_stride + j * WIDTH) : (vec){0};
        }
    }
    for (int64_t start = 0, end; start < depth; start = end) {
        end = ahead && start + FETCH_EVERY < depth ? start + FETCH_EVERY : depth;
        fetch(ahead);
        fetch(ahead);
        for (int64_t p = start; p < end; p++, b += b_stride) {
            vec row[8];
            for (int j = 0; j < count; j++) {
                row[j] = *(const vec *)(b + j * WIDTH);
                if (rows > 1) KEEP(row[j]);
            }
            for (int i = 0; i < rows; i++) {
                const vec value = a[i * a_stride + p] - (vec){0}; /* in every lane; x - 0 is x */
                for (int j = 0; j < count; j++) sums[i][j] = fma_wide(value, row[j], sums[i][j]);
            }
        }
    }
    for (int i = 0; i < rows; i++) {
        for (int j = 0; j < count; j++) *(vec *)(c + i * c_stride + j * WIDTH) = sums[i][j];
    }
}

/* Computes `product` for `width` columns, a multiple of 16. Eight to twelve sums at once keep the
   arithmetic units busy. */
INLINE void columns(float *c, int64_t c_stride, const float *a, int64_t a_stride, const float *b,
                    int64_t b_stride, int64_t depth, int64_t width, const int adds, const int rows,
                    struct ahead *ahead) {
    const int most = rows == 1 ? 8 : rows == 2 ? 4 : 2;
    int64_t j = 0;
    for (; j + most * WIDTH <= width; j += most * WIDTH) {
        product(c + j, c_stride, a, a_stride, b + j, b_stride, depth, adds, rows, most, ahead);
    }
    if (rows == 1 && j + 4 * WIDTH <= width) {
        product(c + j, c_stride, a, a_stride, b + j, b_stride, depth, adds, rows, 4, ahead);
        j += 4 * WIDTH;
    }
    for (; j < width; j += 16) {
        product(c + j, c_stride, a, a_stride, b + j, b_stride, depth, adds, rows, 16 / WIDTH, ahead);
    }
}

/* Adds the tile to the online softmax of queries [i, i + rows); the last attends to the most keys. */
INLINE void attend_strip(const struct queries *queries, int64_t i, const struct tile *tile, int64_t dim,
                         struct ahead *ahead, const int rows) {
    const int64_t depth = visible(queries, i + rows - 1, tile->start, tile->count), width = (depth + 15) / 16 * 16;
    float *q = queries->q + i * dim, *sums = queries->sums + i * dim;
    _Alignas(LINE) float scores[STRIP * MAX_TOKENS];
    if (depth <= 0) return;
    columns(scores, MAX_TOKENS, q, dim, tile->k, tile->capacity, dim, width, 0, rows, ahead);
    for (int j = 0; j < rows; j++) {
        float *row = scores + j * MAX_TOKENS;
        struct softmax *softmax = queries->softmax + i + j;
        if (queries->softcap > 0) cap_scores(row, width, queries->softcap);
        weigh(row, softmax->first_seen - tile->start, visible(queries, i + j, tile->start, tile->count), width, softmax,
              sums + j * dim, dim);
    }
    columns(sums, dim, scores, MAX_TOKENS, tile->v, dim, depth, dim, 1, rows, ahead);
}

/* Adds the tile to queries [first, last), in strips of rows that fill the registers well: not 1 or 3 if possible. */
INLINE void attend_strips(const struct queries *queries, int64_t first, int64_t last,
                          const struct tile *tile, int64_t dim, struct ahead *ahead) {
    for (int64_t i = first, rows; i < last; i += rows) {
        const int64_t left = last - i;
        rows = left <= STRIP ? left : left == 8 ? 4 : left <= 9 ? 5 : STRIP;
        switch (rows) {
            case 1: attend_strip(queries, i, tile, dim, ahead, 1); break;
            case 2: attend_strip(queries, i, tile, dim, ahead, 2); break;
            case 3: attend_strip(queries, i, tile, dim, ahead, 3); break;
            case 4: attend_strip(queries, i, tile, dim, ahead, 4); break;
            case 5: attend_strip(queries, i, tile, dim, ahead, 5); break;
            default: attend_strip(queries, i, tile, dim, ahead, 6);
        }
    }
}

/* Adds the tile to queries [first, last). With `ahead` NULL, as in prefill, the products are compiled without
   fetches, which would cost a fifth of the time. */
static void JOIN(attend_tile, WIDTH)(const struct queries *queries, int64_t first, int64_t last,
                                     const struct tile *tile, int64_t dim, struct ahead *ahead) {
    if (ahead) attend_strips(queries, first, last, tile, dim, ahead);
    else attend_strips(queries, first, last, tile, dim, NULL);
}

#undef JOIN_
#undef JOIN
#undef vec
#undef product
#undef columns
#undef attend_strip
#undef attend_strips
#undef fma_wide
