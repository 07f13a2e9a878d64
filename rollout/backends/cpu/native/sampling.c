/* Sampling by inverse CDF, with log-probs, and scoring. Called from Python (ops.py). Without truncation and top-n,
   sampling takes two passes over the logits, or three if log-probs are reported at another temperature. Weights are
   float32, their sums over blocks float64. */

#include "weights.h"

/* Which log-probs a row reports; MODE_CODES of forward_batch.py. */
enum mode { RAW, TEMPERATURE, PROCESSED };

/* Arguments of sample_rows. */
struct sampling {
    const float *logits;         /* [rows, vocabulary], contiguous */
    const double *uniforms;      /* one entry per row, like the arrays below without a comment */
    const float *temperature;
    const int64_t *top_k;
    const float *top_p;
    const float *min_p;
    const int8_t *mode;
    int64_t *tokens;
    uint8_t *is_finite;
    float *logprobs;             /* may be NULL */
    int64_t *top_ids;            /* [rows, top_n] */
    float *top_logprobs;
    int64_t vocabulary, top_n;
};

/* Work buffers of one thread. */
struct scratch {
    struct histogram histogram;
    double *masses; /* one per block */
};

/* Arguments of score_rows. */
struct scoring {
    const float *logits;         /* [rows, vocabulary], contiguous */
    const int64_t *targets;
    float *logprobs;
    int64_t *top_ids;            /* [rows, top_n] */
    float *top_logprobs;
    int64_t vocabulary, top_n;
};

/* Returns the largest logit; NaN if there is a NaN. */
static float find_largest(const float *logits, int64_t count) {
    v8f best = splat(-INFINITY);
    v8i is_nan = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        v8f x = load(logits + i);
        best = max_v8(best, x);
        is_nan |= x != x;
    }
    float largest = largest_of(best);
    int any_nan = 0;
    for (int lane = 0; lane < LANES; lane++) any_nan |= is_nan[lane];
    for (; i < count; i++) {
        largest = logits[i] > largest ? logits[i] : largest;
        any_nan |= logits[i] != logits[i];
    }
    return any_nan ? NAN : largest;
}

static int64_t first_equal(const float *logits, float value) {
    int64_t id = 0;
    while (logits[id] != value) id++;
    return id;
}

/* Computes the sum of weights, the mass, of each block. Returns the sum of all masses. */
static double weigh_blocks(const struct row *r, const struct cutoff *cut, double *masses) {
    float weights[BLOCK];
    double total = 0;
    for (int64_t block = 0; block < num_blocks(r); block++) {
        block_weights(r, block, cut, weights);
        v4d sums = {0};
        for (int i = 0; i < BLOCK; i += LANES) sums = add_as_doubles(sums, load(weights + i));
        masses[block] = (sums[0] + sums[2]) + (sums[1] + sums[3]);
        total += masses[block];
    }
    return total;
}

/* Returns the first id whose cumulative mass exceeds uniform * total; if rounding leaves no such id, the last one with
   mass. */
static int64_t draw(const struct row *r, const struct cutoff *cut, const double *masses, double total,
                    double uniform) {
    const double target = uniform * total;
    double before = 0, after = 0;
    int64_t chosen = 0, offset = 0;
    for (int64_t block = 0; block < num_blocks(r) && after <= target; block++) {
        if (masses[block] == 0) continue;
        chosen = block, before = after, after += masses[block];
    }
    float weights[BLOCK];
    block_weights(r, chosen, cut, weights);
    for (int64_t i = 0; i < BLOCK && before <= target; i++) {
        if (weights[i] == 0) continue;
        offset = i, before += weights[i];
    }
    return chosen * BLOCK + offset;
}

/* Finds the n largest logits, in descending order, equal ones by ascending id. `ids` and `values` have room for n. */
static void find_top(const float *logits, int64_t count, int64_t n, int64_t *ids, float *values) {
    int64_t found = 0;
    for (int64_t id = 0; id < count && n > 0; id++) {
        if (found == n && !(logits[id] > values[n - 1])) continue;
        int64_t place = found < n ? found++ : n - 1;
        for (; place > 0 && logits[id] > values[place - 1]; place--) {
            values[place] = values[place - 1], ids[place] = ids[place - 1];
        }
        values[place] = logits[id], ids[place] = id;
    }
}

/* Writes the results of row i, whose logits are not finite. */
static void report_not_finite(const struct sampling *s, int64_t i) {
    s->tokens[i] = 0;
    if (s->logprobs) s->logprobs[i] = NAN;
    for (int64_t j = 0; j < s->top_n; j++) {
        s->top_ids[i * s->top_n + j] = j, s->top_logprobs[i * s->top_n + j] = NAN;
    }
}

/* Writes the log-prob of row i's token and the row's top-n, as far as asked for. `total`: mass of all tokens that `cut`
   keeps; `cut` may be NULL. */
static void report_logprobs(const struct sampling *s, int64_t i, const struct row *r,
                            const struct cutoff *cut, double total) {
    const double norm = log(total);
    if (s->logprobs) {
        float distance = r->logits[s->tokens[i]] - r->largest;
        s->logprobs[i] = (float)(distance * (double)r->inverse_temperature - norm);
    }
    if (!s->top_n) return;
    int64_t *ids = s->top_ids + i * s->top_n;
    float *values = s->top_logprobs + i * s->top_n;
    find_top(r->logits, r->vocabulary, s->top_n, ids, values);
    for (int64_t j = 0; j < s->top_n; j++) {
        int kept = !cut || is_kept(cut, values[j], ids[j], weigh(r, splat(values[j]))[0]);
        double scaled = (values[j] - r->largest) * (double)r->inverse_temperature;
        values[j] = kept ? (float)(scaled - norm) : -INFINITY;
    }
}

static void sample_row(const struct sampling *s, int64_t i, struct scratch *scratch) {
    double *masses = scratch->masses;
    struct row r = {s->logits + i * s->vocabulary, s->vocabulary, 0, 1};
    r.largest = find_largest(r.logits, r.vocabulary);
    s->is_finite[i] = isfinite(r.largest) != 0;
    if (!s->is_finite[i]) {
        report_not_finite(s, i);
        return;
    }
    const int wants_logprobs = s->logprobs || s->top_n;
    if (s->temperature[i] == 0) {
        s->tokens[i] = first_equal(r.logits, r.largest);
        if (wants_logprobs) report_logprobs(s, i, &r, NULL, weigh_blocks(&r, NULL, masses));
        return;
    }
    r.inverse_temperature = 1.0f / s->temperature[i];
    const int has_p = s->top_p[i] > 0 && s->top_p[i] < 1;
    const int truncates = s->top_k[i] > 0 || has_p || s->min_p[i] > 0;
    struct cutoff found, *cut = NULL;
    if (truncates) {
        found = find_cutoff(&r, s->top_k[i], s->top_p[i], s->min_p[i], &scratch->histogram);
        cut = &found;
    }
    double total = weigh_blocks(&r, cut, masses);
    s->tokens[i] = draw(&r, cut, masses, total, s->uniforms[i]);
    if (!wants_logprobs) return;
    if (s->mode[i] != PROCESSED) {
        const float reported = s->mode[i] == RAW ? 1.0f : r.inverse_temperature;
        const int has_total = !cut && reported == r.inverse_temperature;
        r.inverse_temperature = reported, cut = NULL;
        if (!has_total) total = weigh_blocks(&r, NULL, masses);
    }
    report_logprobs(s, i, &r, cut, total);
}

/* Returns the bytes of scratch memory that each thread needs; it must be aligned to 8 bytes. */
EXPORT int64_t sampling_scratch_bytes(int64_t vocabulary) {
    int64_t num_masses = (vocabulary + BLOCK - 1) / BLOCK;
    return sizeof(struct scratch) + num_masses * sizeof(double) + vocabulary * sizeof(struct ranked);
}

/* Returns the work buffers in a thread's scratch memory. */
static struct scratch *lay_out(void *memory, int64_t vocabulary) {
    struct scratch *scratch = memory;
    scratch->masses = (double *)(scratch + 1);
    scratch->histogram.members = (struct ranked *)(scratch->masses + (vocabulary + BLOCK - 1) / BLOCK);
    return scratch;
}

EXPORT void sample_rows(const struct sampling *s, void *memory, int64_t first, int64_t last) {
    struct scratch *scratch = lay_out(memory, s->vocabulary);
    for (int64_t i = first; i < last; i++) sample_row(s, i, scratch);
}

/* Writes log_softmax of rows [first, last) at their targets, and their top-n. Every logit is finite or -inf. */
EXPORT void score_rows(const struct scoring *s, void *memory, int64_t first, int64_t last) {
    double *masses = lay_out(memory, s->vocabulary)->masses;
    for (int64_t i = first; i < last; i++) {
        struct row r = {s->logits + i * s->vocabulary, s->vocabulary, 0, 1};
        r.largest = find_largest(r.logits, r.vocabulary);
        const double norm = log(weigh_blocks(&r, NULL, masses));
        s->logprobs[i] = (float)((double)(r.logits[s->targets[i]] - r.largest) - norm);
        float *values = s->top_logprobs + i * s->top_n;
        find_top(r.logits, r.vocabulary, s->top_n, s->top_ids + i * s->top_n, values);
        for (int64_t j = 0; j < s->top_n; j++) {
            values[j] = (float)((double)(values[j] - r.largest) - norm);
        }
    }
}
