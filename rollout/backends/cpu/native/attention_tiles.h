/* Tiles of a context: finds, prefetches and packs them, and attends from queries to one. */

#ifndef ROLLOUT_ATTENTION_TILES_H
#define ROLLOUT_ATTENTION_TILES_H

#include "attention_queries.h"

#define MAX_TOKENS 64     /* of a tile, a multiple of 16 */
#define TILE_NUMBERS 2048 /* of K: packed K and V together leave half of a first-level cache */

/* Tokens of a tile. A row's tiles begin at multiples of this. */
INLINE int64_t tile_capacity(int64_t dim) {
    const int64_t fitting = TILE_NUMBERS / dim / 16 * 16;
    return fitting < 16 ? 16 : fitting < MAX_TOKENS ? fitting : MAX_TOKENS;
}

/* Addresses of the tokens [start, start + count) of a context. */
struct place {
    int64_t start, count;
    const char *tokens[MAX_TOKENS];
};

/* One KV head of a tile, packed. */
struct tile {
    int64_t start, count, capacity;
    float *k, *v; /* [dim][capacity], [token][dim] */
};

/* What will be needed next: K and V of tokens, in stretches of memory. A few lines are fetched now
   and then while work goes on: processors drop prefetches that come in bursts. */
struct ahead {
    const char *const *tokens;
    int64_t runs_per_token, run_bytes, skipped, v_bytes;
    int64_t lines_per_fetch;
    int64_t run, num_runs;
    const char *position, *end; /* of run `run` */
};

INLINE void begin_run(struct ahead *ahead) {
    if (ahead->run == ahead->num_runs) return;
    const int64_t token = ahead->run / ahead->runs_per_token, is_v = ahead->run % ahead->runs_per_token;
    ahead->position = ahead->tokens[token] + ahead->skipped + is_v * ahead->v_bytes;
    ahead->end = ahead->position + ahead->run_bytes;
}

/* Prefetches at most `lines_per_fetch` lines of one run; no-op for NULL. */
INLINE void fetch(struct ahead *ahead) {
    if (!ahead || ahead->run == ahead->num_runs) return;
    const char *position = ahead->position;
    for (int64_t i = ahead->lines_per_fetch; i > 0; i--, position += LINE) __builtin_prefetch(position);
    ahead->position = position;
    if (position < ahead->end) return;
    ahead->run++;
    begin_run(ahead);
}

/* Number of calls of `fetch` that the two functions below make, for `count` tokens and some queries of a KV head. */
int64_t fetches_of_tile(int64_t count, int64_t queries, int64_t dim);

void pack_tile(const struct attention *a, const struct place *place, int64_t kv_head, struct tile *tile,
               struct ahead *ahead);

/* Adds the tile to the online softmax of queries [first, last). */
void attend_tile(int64_t lanes, const struct queries *queries, int64_t first, int64_t last,
                 const struct tile *tile, int64_t dim, struct ahead *ahead);

#endif
