/* Tiles of a context: prefetches and packs them, and attends from queries to one. Implemented by
   attention_tiles.c, used by decode.c and prefill.c. */

#ifndef ROLLOUT_ATTENTION_TILES_H
#define ROLLOUT_ATTENTION_TILES_H

#include "attention_queries.h"

#define MAX_TOKENS 64     /* tokens of a tile at most, a multiple of 16 */
#define TILE_NUMBERS 2048 /* numbers of K in a tile: packed K and V fill half of a first-level cache */

/* Returns the number of tokens of a tile. A row's tiles begin at multiples of it. */
INLINE int64_t tile_capacity(int64_t dim) {
    const int64_t fitting = TILE_NUMBERS / dim / 16 * 16;
    return fitting < 16 ? 16 : fitting < MAX_TOKENS ? fitting : MAX_TOKENS;
}

/* Addresses of the tokens [start, start + count) of a context. */
struct place {
    int64_t start, count;
    const char *tokens[MAX_TOKENS];
};

/* K and V of one KV head of tokens [start, start + count), packed. */
struct tile {
    int64_t start, count, capacity;
    float *k, *v; /* [dim][capacity], [token][dim] */
};

/* The memory to prefetch while work on the tile before it goes on: K and V of tokens, in contiguous runs. Each
   `fetch` prefetches a few cache lines, because processors drop prefetches that come in bursts. */
struct ahead {
    const char *const *tokens;       /* addresses of the tokens in the cache */
    int64_t runs_per_token;          /* 2 if K and V are not contiguous, else 1 */
    int64_t run_bytes;
    int64_t skipped, v_bytes;        /* from a token's address to its first run, and from there to its second */
    int64_t lines_per_fetch;
    int64_t run, num_runs;           /* number of the run that is prefetched now, and of all runs */
    const char *position, *end;      /* the rest of this run */
};

/* Starts run `ahead->run`, unless all runs are done. */
INLINE void begin_run(struct ahead *ahead) {
    if (ahead->run == ahead->num_runs) return;
    const int64_t token = ahead->run / ahead->runs_per_token, is_v = ahead->run % ahead->runs_per_token;
    ahead->position = ahead->tokens[token] + ahead->skipped + is_v * ahead->v_bytes;
    ahead->end = ahead->position + ahead->run_bytes;
}

/* Prefetches `lines_per_fetch` cache lines of the current run. Does nothing for NULL, and after the last run. */
INLINE void fetch(struct ahead *ahead) {
    if (!ahead || ahead->run == ahead->num_runs) return;
    const char *position = ahead->position;
    for (int64_t i = ahead->lines_per_fetch; i > 0; i--, position += LINE) __builtin_prefetch(position);
    ahead->position = position;
    if (position < ahead->end) return;
    ahead->run++;
    begin_run(ahead);
}

/* Returns about how many times `pack_tile` and `attend_tile` call `fetch`, for `count` tokens and `queries` queries of
   a KV head. */
int64_t fetches_of_tile(int64_t count, int64_t queries, int64_t dim);

/* Packs K and V of one KV head of the tokens at `place`. `ahead` may be NULL. */
void pack_tile(const struct attention *a, const struct place *place, int64_t kv_head, struct tile *tile,
               struct ahead *ahead);

/* Adds the tile to the online softmax of queries [first, last). `ahead` may be NULL. */
void attend_tile(int64_t lanes, const struct queries *queries, int64_t first, int64_t last,
                 const struct tile *tile, int64_t dim, struct ahead *ahead);

#endif
