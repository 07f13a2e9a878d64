/* A whole forward pass of a decoder, of attention and gated MLPs, in one call from Python (decoder.py): the same
   arithmetic as the layers one by one, in the same order.

   Every thread runs `forward` and takes a fixed share of each phase; a barrier ends a phase. In a group of
   processes that share the decoder, each has some heads, columns of the MLP and rows of the embedding. Their
   results are summed between phases by `add_up`, a collective of the processes. */

#include "layers.h"
#include "linear.h"
#include "paged_cache.h"

#ifdef _OPENMP
#include <omp.h>
#endif

#define TOKENS_AT_ONCE 256 /* tokens whose gated activations, the widest buffer, exist at once */

/* The weight of a product. */
struct weight {
    const void *packed; /* as in struct linear */
    const float *bias;  /* or NULL */
    int64_t outputs;
};

/* A layer: attention and an MLP, each a residual branch. All norms may be NULL: before and after each branch, and of
   query and key heads. */
struct layer {
    const float *attention_norm, *attention_after, *mlp_norm, *mlp_after, *q_norm, *k_norm;
    struct weight qkv, output, gate_up, down;
    void *cache;
    const float *cos, *sin;  /* [positions, dim], or NULL for no rotation */
    const int64_t *order;    /* the order that the dims of query and key heads must get, or NULL */
    const float *sinks;      /* this and the fields below without a comment: as in struct attention */
    int64_t window;
    int64_t is_parallel;     /* the MLP reads the same input as attention */
    int64_t has_whole_norms; /* q_norm and k_norm are over all heads together */
    double scale, softcap;
};

/* The weights and constants of a decoder. */
struct decoder {
    const struct layer *layers;
    const void *embedding; /* of the dtype of the packed weights; in panels or not, see embedding_width */
    const float *final_norm;
    int64_t embedding_width; /* outputs of an embedding's panel; 1 for a plain [vocabulary, hidden] */
    int64_t num_layers, hidden, lanes, is_bfloat16;
    int64_t is_layer_norm, is_gelu;
    int64_t growth_positions; /* queries are multiplied by 1 + query_growth ln(1 + floor(position / this)) */
    double eps, embedding_multiplier, residual_multiplier, query_growth;
    void (*add_up)(void *context, float *x, int64_t count); /* sums over the group, in place; NULL without a group */
    void *context;
    int64_t first_id, num_ids;          /* the token ids whose embeddings this process has */
    int64_t q_size, k_size;             /* dims of whole norms, over the group */
    int64_t counts_k;                   /* 0 if a lower rank has the same key heads, which then count once */
};

/* The inputs, outputs and work buffers of one forward pass. */
struct pass {
    float *out;                         /* [kept, hidden] */
    const int64_t *token_ids, *positions, *kept;
    float *residual;                    /* [tokens, hidden]: a work buffer, like the next ones */
    float *normed;                      /* [tokens, max(hidden, heads * dim)] */
    float *fused;                       /* [tokens, (heads + 2 * kv_heads) * dim] */
    float *wide;                        /* [min(tokens, TOKENS_AT_ONCE), 3 * intermediate] */
    float *added;                       /* [max(tokens, kept), hidden], if a branch is not added directly */
    float *squares;                     /* [tokens, 2], in a group: sums of squares of q and of k */
    char *scratch;                      /* [threads, prefill_scratch_bytes()] */
    int64_t num_kept, rows, decode_rows, threads;
    int64_t unit;                       /* unit of all products, as in struct linear */
    struct attention attention;         /* of float32 tokens; without out, q, k, v, their strides and cache */
};

EXPORT int64_t decoder_tokens_at_once(void) { return TOKENS_AT_ONCE; }

/* Thread `index` of the `count` threads that run a pass. */
struct thread {
    int64_t index, count;
};

/* Return the bounds of this thread's share of `items`. */
INLINE int64_t first_of(struct thread t, int64_t items) { return items * t.index / t.count; }

INLINE int64_t end_of(struct thread t, int64_t items) { return items * (t.index + 1) / t.count; }

INLINE void barrier(struct thread t) {
    if (t.count > 1) {
#pragma omp barrier
    }
}

/* Sums x over the group of processes, in place. All threads must have written it and passed a barrier. */
static void add_up(const struct decoder *d, struct thread t, float *x, int64_t count) {
    if (!d->add_up) return;
    if (t.index == 0) d->add_up(d->context, x, count);
    barrier(t);
}

INLINE float value_as(const void *array, int64_t i, int64_t type) {
    if (type == FLOAT32) return ((const float *)array)[i];
    union { uint32_t bits; float value; } wide = {(uint32_t)((const uint16_t *)array)[i] << 16};
    return wide.value;
}

INLINE void scale_row(float *x, float factor, int64_t dim) {
    for (int64_t i = 0; i < dim; i += LANES) store(x + i, load(x + i) * factor);
}

/* Writes the tokens' embeddings to the residual stream, summed over the group. */
static void embed(const struct decoder *d, const struct pass *p, struct thread t) {
    const int64_t type = d->is_bfloat16 ? BFLOAT16 : FLOAT32, tokens = p->attention.tokens;
    const int64_t width = d->embedding_width;
    for (int64_t i = first_of(t, tokens); i < end_of(t, tokens); i++) {
        const int64_t id = p->token_ids[i] - d->first_id, first = id / width * width * d->hidden + id % width;
        float *out = p->residual + i * d->hidden;
        if (id < 0 || id >= d->num_ids) {
            memset(out, 0, d->hidden * sizeof(float));
        } else if (width == 1) {
            for (int64_t j = 0; j < d->hidden; j += LANES) store(out + j, load_as(d->embedding, first + j, type));
        } else {
            for (int64_t j = 0; j < d->hidden; j++) out[j] = value_as(d->embedding, first + j * width, type);
        }
        if (d->embedding_multiplier != 1) scale_row(out, (float)d->embedding_multiplier, d->hidden);
    }
    barrier(t);
    add_up(d, t, p->residual, tokens * d->hidden);
}

/* Computes y = x w^T + bias, or adds it to y if `accumulate`. */
static void multiply(const struct decoder *d, const struct pass *p, struct thread t, const struct weight *w, float *y,
                     const float *x, int64_t tokens, int64_t inputs, int accumulate) {
    const struct linear a = {
        .y = y, .x = x, .w = w->packed, .bias = w->bias, .tokens = tokens, .inputs = inputs, .outputs = w->outputs,
        .x_stride = inputs, .lanes = d->lanes, .is_bfloat16 = d->is_bfloat16, .unit = p->unit,
        .accumulate = accumulate,
    };
    int64_t panels = (w->outputs + 2 * d->lanes - 1) / (2 * d->lanes);
    linear(&a, first_of(t, panels), end_of(t, panels));
    barrier(t);
}

INLINE void norm_token(const struct decoder *d, float *out, const float *x, const float *weight) {
    if (d->is_layer_norm) layer_norm_row(out, x, weight, d->hidden, (float)d->eps);
    else norm_row(out, x, weight, d->hidden, (float)d->eps);
}

/* Returns the input of a branch: x if `weight` is NULL, else `normed`, to which the normed x is written. */
static const float *norm(const struct decoder *d, struct thread t, float *normed, const float *x,
                         const float *weight, int64_t tokens) {
    if (!weight) return x;
    for (int64_t i = first_of(t, tokens); i < end_of(t, tokens); i++) {
        norm_token(d, normed + i * d->hidden, x + i * d->hidden, weight);
    }
    barrier(t);
    return normed;
}

/* Returns whether a branch's output is added to the residual stream unchanged. `after`: the norm after it, or NULL. */
INLINE int is_added_directly(const struct decoder *d, const struct layer *layer, const float *after) {
    return !after && !layer->is_parallel && d->residual_multiplier == 1 && !d->add_up;
}

/* Sums a branch's output over the group, norms and scales it, and adds it to the residual stream. */
static void add_branch(const struct decoder *d, const struct pass *p, struct thread t, const float *after,
                       float *residual, int64_t tokens) {
    add_up(d, t, p->added, tokens * d->hidden);
    for (int64_t i = first_of(t, tokens); i < end_of(t, tokens); i++) {
        float *added = p->added + i * d->hidden, *out = residual + i * d->hidden;
        if (after) norm_token(d, added, added, after);
        if (d->residual_multiplier != 1) scale_row(added, (float)d->residual_multiplier, d->hidden);
        for (int64_t j = 0; j < d->hidden; j += LANES) store(out + j, load(out + j) + load(added + j));
    }
    barrier(t);
}

INLINE void reorder_head(float *head, const int64_t *order, int64_t dim) {
    float old[MAX_DIM];
    memcpy(old, head, dim * sizeof(float));
    for (int64_t i = 0; i < dim; i++) head[i] = old[order[i]];
}

/* Computes the sums of squares of q and k for whole norms, over the group. */
static void sum_squares(const struct decoder *d, const struct pass *p, struct thread t, const struct attention *a) {
    const int64_t q_size = a->heads * a->dim, k_size = a->kv_heads * a->dim;
    for (int64_t i = first_of(t, a->tokens); i < end_of(t, a->tokens); i++) {
        const float *q = p->fused + i * a->q_stride;
        p->squares[2 * i] = sum_of_squares(q, q_size);
        p->squares[2 * i + 1] = d->counts_k ? sum_of_squares(q + q_size, k_size) : 0;
    }
    barrier(t);
    add_up(d, t, p->squares, 2 * a->tokens);
}

/* Norms, reorders and rotates the query and key heads of this thread's tokens in place, as the layer says, and
   writes their K and V to the cache. */
static void enter_cache(const struct decoder *d, const struct pass *p, struct thread t, const struct layer *layer,
                        const struct attention *a) {
    const int64_t first = first_of(t, a->tokens), end = end_of(t, a->tokens), dim = a->dim;
    struct attention own = *a;
    for (int64_t i = first; i < end; i++) {
        float *head = p->fused + i * a->q_stride, *k = head + a->heads * dim;
        const int64_t position = p->positions[i];
        if (layer->has_whole_norms && d->add_up) {
            const float *squares = p->squares + 2 * i;
            norm_part(head, layer->q_norm, a->heads * dim, squares[0] / (float)d->q_size, (float)d->eps);
            norm_part(k, layer->k_norm, a->kv_heads * dim, squares[1] / (float)d->k_size, (float)d->eps);
        } else if (layer->has_whole_norms) {
            norm_row(head, head, layer->q_norm, a->heads * dim, (float)d->eps);
            norm_row(k, k, layer->k_norm, a->kv_heads * dim, (float)d->eps);
        }
        if (d->query_growth > 0) {
            const float turns = (float)(position / d->growth_positions);
            scale_row(head, 1.0f + (float)d->query_growth * log1pf(turns), a->heads * dim);
        }
        for (int64_t h = 0; h < a->heads + a->kv_heads; h++, head += dim) {
            const float *weight = h < a->heads ? layer->q_norm : layer->k_norm;
            if (layer->order) reorder_head(head, layer->order, dim);
            if (weight && !layer->has_whole_norms) norm_row(head, head, weight, dim, (float)d->eps);
            if (layer->cos) rotate_head(head, head, layer->cos + position * dim, layer->sin + position * dim, dim);
        }
    }
    own.slots += first;
    own.k = (const float *)a->k + first * a->k_stride, own.v = (const float *)a->v + first * a->v_stride;
    own.tokens = end - first;
    write_tokens(&own);
    barrier(t);
}

static void attend(const struct pass *p, struct thread t, const struct attention *a) {
    char *scratch = p->scratch + t.index * prefill_scratch_bytes();
    if (p->decode_rows) attend_decode_part(a, 0, p->decode_rows, t.index, t.count);
    if (p->rows > p->decode_rows) attend_prefill_part(a, scratch, p->decode_rows, p->rows, t.index, t.count);
    barrier(t);
}

/* Copies the kept rows of x, `width` numbers each, to `out`, one after the other. */
static void gather(const struct pass *p, struct thread t, float *out, const float *x, int64_t width) {
    for (int64_t i = first_of(t, p->num_kept); i < end_of(t, p->num_kept); i++) {
        memcpy(out + i * width, x + p->kept[i] * width, width * sizeof(float));
    }
}

/* Runs the MLP branch and adds it to the residual stream. If branches are parallel, `p->added` holds the output of
   attention, which is added as well. */
static void feed_forward(const struct decoder *d, const struct pass *p, struct thread t, const struct layer *layer,
                         float *residual, int64_t tokens) {
    const int64_t size = layer->gate_up.outputs / 2;
    const int64_t most = tokens < TOKENS_AT_ONCE ? tokens : TOKENS_AT_ONCE;
    float *gate_up = p->wide, *active = p->wide + most * 2 * size;
    const int is_direct = is_added_directly(d, layer, layer->mlp_after);
    float *target = is_direct ? residual : p->added;
    const float *weight = layer->is_parallel ? layer->attention_norm : layer->mlp_norm;
    const float *x = norm(d, t, p->normed, residual, weight, tokens);
    for (int64_t start = 0; start < tokens; start += most) {
        const int64_t count = tokens - start < most ? tokens - start : most;
        multiply(d, p, t, &layer->gate_up, gate_up, x + start * d->hidden, count, d->hidden, 0);
        for (int64_t i = first_of(t, count); i < end_of(t, count); i++) {
            if (d->is_gelu) gelu_mul_row(active + i * size, gate_up + 2 * i * size, size);
            else silu_mul_row(active + i * size, gate_up + 2 * i * size, size);
        }
        barrier(t);
        multiply(d, p, t, &layer->down, target + start * d->hidden, active, count, size, is_direct || layer->is_parallel);
    }
    if (!is_direct) add_branch(d, p, t, layer->mlp_after, residual, tokens);
}

/* Runs this thread's share of the forward pass. */
static void forward(const struct decoder *d, const struct pass *p, struct thread t) {
    struct attention a = p->attention;
    const int64_t heads_size = a.heads * a.dim;
    float *residual = p->residual, *context = p->normed;
    embed(d, p, t);
    a.q = p->fused, a.k = p->fused + heads_size, a.v = p->fused + heads_size + a.kv_heads * a.dim;
    a.q_stride = a.k_stride = a.v_stride = d->layers[0].qkv.outputs;
    a.out = context;
    for (int64_t i = 0; i < d->num_layers; i++) {
        const struct layer *layer = d->layers + i;
        const int is_direct = is_added_directly(d, layer, layer->attention_after);
        int64_t tokens = a.tokens;
        a.cache = layer->cache, a.window = layer->window, a.sinks = layer->sinks;
        a.scale = layer->scale, a.softcap = layer->softcap;
        const float *x = norm(d, t, p->normed, residual, layer->attention_norm, tokens);
        multiply(d, p, t, &layer->qkv, p->fused, x, tokens, d->hidden, 0);
        if (layer->has_whole_norms && d->add_up) sum_squares(d, p, t, &a);
        enter_cache(d, p, t, layer, &a);
        attend(p, t, &a);
        if (i == d->num_layers - 1) { /* tokens without logits are dropped here */
            gather(p, t, p->fused, context, heads_size);
            gather(p, t, p->out, residual, d->hidden);
            barrier(t);
            context = p->fused, residual = p->out, tokens = p->num_kept;
        }
        multiply(d, p, t, &layer->output, is_direct ? residual : p->added, context, tokens, heads_size, is_direct);
        if (!is_direct && !layer->is_parallel) add_branch(d, p, t, layer->attention_after, residual, tokens);
        feed_forward(d, p, t, layer, residual, tokens);
    }
    norm(d, t, p->out, p->out, d->final_norm, p->num_kept);
}

/* Writes the hidden states of the kept tokens after the final norm to `p->out`, and K and V of all tokens to the
   caches. */
EXPORT void decoder_forward(const struct decoder *d, const struct pass *p) {
#ifdef _OPENMP
    if (p->threads > 1) {
#pragma omp parallel num_threads(p->threads)
        forward(d, p, (struct thread){omp_get_thread_num(), omp_get_num_threads()});
        return;
    }
#endif
    forward(d, p, (struct thread){0, 1});
}
