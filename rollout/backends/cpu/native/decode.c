/* Attention of decode rows, of one token each, to their paged contexts; and writing K and V to the cache.
   Called from Python (attention.py) and decoder.c.

   A context is read in tiles of tokens, in order, with an online softmax (Milakov and Gimelshein 2018).
   Decoding many rows is bound by reading the cache. So the next tile is prefetched during the work on a tile,
   and a tile that several rows share, as samples share their prompt, is read once for all of them (cascade
   attention; Juravsky et al. 2024, "Hydragen"). A row goes through the same tiles in the same order and with
   the same arithmetic whether it shares them or not, so its result does not depend on the other rows. */

#include "attention_tiles.h"

#define STATE_BYTES (512 * 1024) /* state of rows that are processed together: about a second-level cache */

/* The work on KV heads [kv_first, kv_last) of some rows, which are sorted so that rows with a common prefix
   are adjacent. Queries are [KV head, row, query head of the group]. */
struct job {
    const struct attention *a;
    const int32_t *rows;
    int64_t num_rows, kv_first, kv_last, group;
    struct queries queries;
    struct tile tile; /* buffers for one packed tile */
};

/* Tokens [start, end) of the contexts of sorted rows [first, last), which share them. */
struct segment {
    int64_t first, last, start, end;
};

/* Returns the number of leading tokens, in whole tiles, that two rows share. */
static int64_t shared_tokens(const struct attention *a, int64_t row, int64_t other) {
    const int32_t *table = a->tables + row * a->table_stride;
    const int32_t *other_table = a->tables + other * a->table_stride;
    int64_t tokens = a->context_lens[row], block = 0;
    if (a->context_lens[other] < tokens) tokens = a->context_lens[other];
    while (block * a->block_size < tokens && table[block] == other_table[block]) block++;
    if (block * a->block_size < tokens) tokens = block * a->block_size;
    return tokens / tile_capacity(a->dim) * tile_capacity(a->dim);
}

/* Returns whether a row comes before another one, by the blocks of their contexts, then by length. */
static int comes_before(const struct attention *a, int64_t row, int64_t other) {
    const int32_t *table = a->tables + row * a->table_stride;
    const int32_t *other_table = a->tables + other * a->table_stride;
    int64_t tokens = a->context_lens[row];
    if (a->context_lens[other] < tokens) tokens = a->context_lens[other];
    for (int64_t block = 0; block * a->block_size < tokens; block++) {
        if (table[block] != other_table[block]) return table[block] < other_table[block];
    }
    return a->context_lens[row] < a->context_lens[other];
}

/* Sorts the rows [first, last) into `rows` by binary insertion, because rows are few, and often in order. */
static void sort_rows(const struct attention *a, int64_t first, int64_t last, int32_t *rows) {
    for (int64_t row = first; row < last; row++) {
        int64_t low = 0, count = row - first, high = count;
        if (count && !comes_before(a, row, rows[count - 1])) low = count;
        while (low < high) {
            int64_t middle = (low + high) / 2;
            if (comes_before(a, row, rows[middle])) high = middle;
            else low = middle + 1;
        }
        memmove(rows + low + 1, rows + low, sizeof(int32_t) * (count - low));
        rows[low] = (int32_t)row;
    }
}

/* Appends the segments of sorted rows [first, last) from token `start` on; up to it the rows share all tokens.
   First comes what all of the rows share beyond it, then, group by group, what fewer rows share. Appends at
   most two segments per row. Returns the new number of segments. */
static int64_t find_segments(const struct job *job, int64_t first, int64_t last, int64_t start,
                             struct segment *segments, int64_t count) {
    const struct attention *a = job->a;
    const int32_t *rows = job->rows;
    int64_t end = a->context_lens[rows[first]];
    if (last - first > 1) end = shared_tokens(a, rows[first], rows[last - 1]);
    if (end > start) segments[count++] = (struct segment){first, last, start, end};
    if (last - first == 1) return count;
    for (int64_t child = first, next; child < last; child = next) {
        next = child + 1;
        while (next < last && shared_tokens(a, rows[child], rows[next]) > end) next++;
        count = find_segments(job, child, next, end, segments, count);
    }
    return count;
}

/* Drops tokens of segments to which none of the segment's rows attends, because of the window. Returns the
   number of segments left. */
static int64_t trim_segments(const struct job *job, struct segment *segments, int64_t count) {
    const int64_t capacity = job->tile.capacity;
    int64_t left = 0;
    for (int64_t i = 0; i < count; i++) {
        struct segment segment = segments[i];
        int64_t seen = segment.end;
        for (int64_t row = segment.first; row < segment.last; row++) {
            const int64_t first = first_seen(job->a, job->a->context_lens[job->rows[row]] - 1);
            if (first < seen) seen = first;
        }
        if (seen / capacity * capacity > segment.start) segment.start = seen / capacity * capacity;
        if (seen < segment.end) segments[left++] = segment;
    }
    return left;
}

/* Finds the addresses of the segment's tile that begins at token `start`. */
static void find_tile(const struct job *job, const struct segment *segment, int64_t start, struct place *place) {
    const int64_t left = segment->end - start;
    place->start = start;
    place->count = left < job->tile.capacity ? left : job->tile.capacity;
    find_tokens(job->a, job->rows[segment->first], start, place->count, place->tokens);
}

/* Returns a plan to prefetch the tile at `next` while `queries` queries of each KV head attend to `count` tokens. */
static struct ahead look_ahead(const struct job *job, const struct place *next, int64_t count,
                               int64_t queries) {
    const struct attention *a = job->a;
    const int64_t num_heads = job->kv_last - job->kv_first, size = size_of(a->cache_type);
    const int64_t runs_per_token = num_heads == a->kv_heads ? 1 : a->planes;
    struct ahead ahead = {
        .tokens = next->tokens,
        .num_runs = next->count * runs_per_token,
        .runs_per_token = runs_per_token,
        .run_bytes = num_heads * a->dim * size * a->planes / runs_per_token,
        .skipped = job->kv_first * a->dim * size,
        .v_bytes = a->kv_heads * a->dim * size,
    };
    const int64_t fetches = num_heads * fetches_of_tile(count, queries, a->dim);
    const int64_t lines = next->count * a->planes * num_heads * a->dim * size / LINE;
    ahead.lines_per_fetch = (lines + fetches - 1) / fetches;
    begin_run(&ahead);
    return ahead;
}

/* Adds the tile at `place` to the online softmax of the segment's queries, and prefetches the tile at `next`. */
static void attend_place(const struct job *job, const struct segment *segment, const struct place *place,
                         const struct place *next) {
    const struct attention *a = job->a;
    const int64_t count = (segment->last - segment->first) * job->group;
    struct tile tile = job->tile;
    struct ahead ahead = look_ahead(job, next, place->count, count);
    for (int64_t head = job->kv_first; head < job->kv_last; head++) {
        const int64_t first = ((head - job->kv_first) * job->num_rows + segment->first) * job->group;
        pack_tile(a, place, head, &tile, &ahead);
        attend_tile(a->lanes, &job->queries, first, first + count, &tile, a->dim, &ahead);
    }
}

/* Attends from all queries of a job, and writes their outputs. */
static void decode_rows(const struct job *job) {
    const struct attention *a = job->a;
    const int64_t group = job->group, num_queries = (job->kv_last - job->kv_first) * job->num_rows * group;
    const int64_t first_head = job->kv_first * group;
    struct segment segments[2 * job->num_rows];
    struct place places[2];
    int turn = 0;
    for (int64_t i = 0; i < num_queries; i += group) {
        const int64_t row = job->rows[i / group % job->num_rows];
        begin_queries(a, &job->queries, i, group, a->query_starts[row],
                      first_head + i / group / job->num_rows * group, a->context_lens[row] - 1, 0);
    }
    int64_t count = find_segments(job, 0, job->num_rows, 0, segments, 0);
    if (a->window) count = trim_segments(job, segments, count);
    find_tile(job, segments, segments[0].start, &places[0]);
    for (const struct segment *now = segments; now < segments + count; now++) {
        for (int64_t start = now->start; start < now->end; start += job->tile.capacity) {
            struct place *place = &places[turn], *next = &places[turn ^= 1];
            const int64_t following = start + job->tile.capacity;
            next->count = 0;
            if (following < now->end) find_tile(job, now, following, next);
            else if (now + 1 < segments + count) find_tile(job, now + 1, now[1].start, next);
            attend_place(job, now, place, next);
        }
    }
    for (int64_t i = 0; i < num_queries; i += group) {
        const int64_t token = a->query_starts[job->rows[i / group % job->num_rows]];
        end_queries(a, &job->queries, i, group, token, first_head + i / group / job->num_rows * group);
    }
}

/* Attends for KV heads [kv_first, kv_last) of rows [first, last), in jobs whose state fits the cache. */
static void decode_heads(const struct attention *a, int64_t first, int64_t last, int64_t kv_first,
                         int64_t kv_last) {
    if (first >= last) return;
    const int64_t group = a->heads / a->kv_heads, row_queries = (kv_last - kv_first) * group;
    const int64_t query_bytes = 2 * a->dim * sizeof(float) + sizeof(struct softmax);
    const int64_t fitting = STATE_BYTES / query_bytes / row_queries;
    const int64_t most = fitting < 1 ? 1 : fitting < last - first ? fitting : last - first;
    const int64_t num_queries = most * row_queries;
    const int64_t tile = tile_capacity(a->dim);
    struct softmax softmax[num_queries];
    float unaligned[2 * (tile + num_queries) * a->dim + LINE];
    float *buffer = (float *)(((uintptr_t)unaligned + LINE - 1) / LINE * LINE);
    int32_t rows[last - first];
    sort_rows(a, first, last, rows);
    for (int64_t i = 0; i < last - first; i += most) {
        const int64_t left = last - first - i;
        struct job job = {.a = a, .rows = rows + i, .num_rows = left < most ? left : most,
                          .kv_first = kv_first, .kv_last = kv_last, .group = group};
        job.tile = (struct tile){.capacity = tile, .k = buffer, .v = buffer + tile * a->dim};
        job.queries.position = INT32_MAX, job.queries.per_position = 1; /* the last token attends to all keys */
        job.queries.softcap = (float)a->softcap;
        job.queries.q = buffer + 2 * tile * a->dim;
        job.queries.sums = job.queries.q + num_queries * a->dim;
        job.queries.softmax = softmax;
        decode_rows(&job);
    }
}

/* Returns the first row with more than half of its context beyond the first `tokens` tokens of all contexts. */
static int64_t row_beyond(const struct attention *a, int64_t first, int64_t last, int64_t tokens) {
    int64_t row = first, before = 0;
    for (; row < last && before + a->context_lens[row] / 2 < tokens; row++) before += a->context_lens[row];
    return row;
}

/* Computes part `part` of `parts` of rows [first, last), one query token each, for one thread. Parts have about
   equal numbers of tokens times KV heads. They are whole KV heads as far as possible, so that no two threads
   read the same memory. The head dim must be a multiple of 16. */
EXPORT void attend_decode_part(const struct attention *a, int64_t first, int64_t last, int64_t part,
                               int64_t parts) {
    int64_t tokens = 0;
    for (int64_t row = first; row < last; row++) tokens += a->context_lens[row];
    if (!tokens) return;
    const int64_t start = tokens * a->kv_heads * part / parts, end = tokens * a->kv_heads * (part + 1) / parts;
    const int64_t end_head = end / tokens, end_row = row_beyond(a, first, last, end % tokens);
    int64_t head = start / tokens, row = row_beyond(a, first, last, start % tokens);
    if (head < end_head && row > first) {
        decode_heads(a, row, last, head, head + 1);
        head++, row = first;
    }
    if (head < end_head) {
        decode_heads(a, first, last, head, end_head);
        row = first;
    }
    if (end_head < a->kv_heads) decode_heads(a, row, end_row, end_head, end_head + 1);
}

/* Writes each token's K to its slot in the cache, and its V unless the cache holds K alone. */
EXPORT void write_tokens(const struct attention *a) {
    const int64_t kv_size = a->kv_heads * a->dim;
    for (int64_t i = 0; i < a->tokens; i++) {
        int64_t block = a->slots[i] / a->block_size, offset = a->slots[i] % a->block_size;
        int64_t slot = block * a->block_stride + offset * token_size(a);
        for (int64_t d = 0; d < kv_size; d += LANES) {
            v8f k = load_as(a->k, i * a->k_stride + d, a->token_type);
            store_as(a->cache, slot + d, k, a->cache_type);
        }
        if (a->planes == 1) continue;
        for (int64_t d = 0; d < kv_size; d += LANES) {
            v8f v = load_as(a->v, i * a->v_stride + d, a->token_type);
            store_as(a->cache, slot + kv_size + d, v, a->cache_type);
        }
    }
}
