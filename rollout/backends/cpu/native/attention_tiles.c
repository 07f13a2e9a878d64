/* Attention of queries to a tile of a context; see attention_tiles.h. K is packed transposed, so that both products are
   plain ones, as in FlashAttention-2 (Dao 2023). A query's result depends neither on the other queries nor on the width
   of the vectors, so decode, and prefill by these tiles, give a token the same bits. */

#include "attention_tiles.h"

#define STRIP 6       /* queries whose sums stay in registers */
#define FETCH_EVERY 8 /* steps of a product for every two fetches; packing has one fetch for about half as much work */

#define WIDTH 8
#include "attention_tile.h"
#undef WIDTH

#ifdef __AVX512F__
#define WIDTH 16
#include "attention_tile.h"
#undef WIDTH
#endif

/* Uses the widest vectors of this processor, unless `lanes` asks for others. */
void attend_tile(int64_t lanes, const struct queries *queries, int64_t first, int64_t last,
                 const struct tile *tile, int64_t dim, struct ahead *ahead) {
#ifdef __AVX512F__
    if (lanes != 8) {
        attend_tile_16(queries, first, last, tile, dim, ahead);
        return;
    }
#endif
    (void)lanes; /* read with AVX-512 only */
    attend_tile_8(queries, first, last, tile, dim, ahead);
}

/* Packs K of `count` tokens from the i-th on, as LANES tokens: missing ones have keys of zeros. */
INLINE void pack_keys(const char *const *tokens, int64_t i, const int count, int64_t offset, int64_t dim,
                      const int64_t type, struct tile *tile, struct ahead *ahead) {
    float *out = tile->k + i;
    const int64_t stride = tile->capacity;
    for (int64_t d = 0; d < dim; d += LANES, out += LANES * stride) {
        v8f rows[LANES];
        fetch(ahead);
        for (int t = 0; t < LANES; t++) {
            rows[t] = t < count ? load_as(tokens[i + t], offset + d, type) : splat(0);
        }
        store_transposed(out, stride, rows);
    }
}

/* Packs a tile from a cache of `type`. `k_offset`, `v_offset`: where the KV head's K and V lie in a token. */
INLINE void pack_as(const struct place *place, int64_t k_offset, int64_t v_offset, int64_t dim,
                    const int64_t type, struct tile *tile, struct ahead *ahead) {
    const int64_t count = place->count;
    float *v = tile->v;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        pack_keys(place->tokens, i, LANES, k_offset, dim, type, tile, ahead);
    }
    for (; i < (count + 15) / 16 * 16; i += LANES) {
        const int left = count > i ? (int)(count - i) : 0;
        pack_keys(place->tokens, i, left, k_offset, dim, type, tile, ahead);
    }
    for (i = 0; i < count; i++, v += dim) {
        fetch(ahead);
        for (int64_t d = 0; d < dim; d += LANES) store(v + d, load_as(place->tokens[i], v_offset + d, type));
    }
}

void pack_tile(const struct attention *a, const struct place *place, int64_t kv_head, struct tile *tile,
               struct ahead *ahead) {
    const int64_t dim = a->dim, k = kv_head * dim, v = value_of(a, kv_head);
    tile->start = place->start, tile->count = place->count;
    if (a->cache_type == BFLOAT16) pack_as(place, k, v, dim, BFLOAT16, tile, ahead);
    else pack_as(place, k, v, dim, FLOAT32, tile, ahead);
}

int64_t fetches_of_tile(int64_t count, int64_t queries, int64_t dim) {
    const int64_t columns = queries == 1 ? 64 : queries == 2 ? 32 : 16; /* of a product, with vectors of 8 */
    const int64_t steps = (count + columns - 1) / columns * dim + (dim + columns - 1) / columns * count;
    const int64_t strips = (queries + STRIP - 1) / STRIP;
    return (count + LANES - 1) / LANES * (dim / LANES) + count + strips * steps * 2 / FETCH_EVERY;
}
