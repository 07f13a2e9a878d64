/* The fingerprint of a tensor, which hashes all elements' bits and positions; and a copy in the same pass. Called
   from Python (ops.py).

   The bytes are read as 32-bit words w_0, w_1, ... and the hash is the sum of w_j key(j) modulo 2^64; see
   rollout/backends/ops/fingerprint.py. The order of a sum does not matter, so threads may compute parts of it. */

#include "vectors.h"

#define COLUMNS 512
#define FETCH_AHEAD 256 /* pairs of words (2 KiB) between a read and its prefetch; the hardware prefetches too little */

typedef uint64_t v4l __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint16_t v16h __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t v8w __attribute__((vector_size(32), aligned(2), may_alias));

/* Halves of the keys of columns, each in the low half of a lane: low and high halves of the even columns, then low and
   high halves of the odd columns. */
static uint64_t keys[4][COLUMNS / 2] __attribute__((aligned(64)));

/* Returns SplitMix64 (Steele, Lea and Flood 2014) of number, made odd. */
INLINE uint64_t key_of(uint64_t number) {
    uint64_t z = number * 0x9E3779B97F4A7C15u + 1;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (z ^ (z >> 31)) | 1;
}

__attribute__((constructor)) static void make_keys(void) {
    for (uint64_t column = 0; column < COLUMNS; column++) {
        uint64_t *half = keys[2 * (column & 1)];
        const uint64_t key = key_of(2 * column);
        half[column / 2] = (uint32_t)key;
        half[COLUMNS / 2 + column / 2] = key >> 32;
    }
}

INLINE uint64_t column_key(int64_t column) {
    const uint64_t *half = keys[2 * (column & 1)];
    return half[column / 2] | half[COLUMNS / 2 + column / 2] << 32;
}

/* Returns the products of the low halves of lanes. */
INLINE v4l mul_low(v4l a, v4l b) {
#ifdef __AVX2__
    return (v4l)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#else
    return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

INLINE v4l load_pairs(const void *p) { return *(const v4l *)p; }

/* Returns how many elements in `word` are not finite. Here and below, `size` is the bytes of an element, a constant of
   the caller, and `exponent` the bits of its exponent. */
INLINE uint64_t bad_in(uint32_t word, const int size, uint32_t exponent) {
    if (size == 4) return (word & exponent) == exponent;
    return ((word & exponent) == exponent) + ((word >> 16 & exponent) == exponent);
}

/* Adds (hash, number of elements that are not finite) of `count` words in one row, the first in `column`, to `sums`.
   Copies the words to `out` unless it is NULL. */
INLINE void add_words(uint64_t *sums, const char *words, char *out, int64_t row, int64_t column, int64_t count,
                      const int size, uint32_t exponent) {
    uint64_t hash = 0, bad = 0;
    v4l even_low = {0}, even_high = {0}, odd_low = {0}, odd_high = {0};
    v16h bad_halves = {0};
    v8w bad_words = {0};
    const int64_t end = column + count;
    while (column < end) {
        if (column % 2 || end - column < 8) { /* a word before the pairs, or after the vectors */
            uint32_t word;
            memcpy(&word, words, 4);
            if (out) memcpy(out, &word, 4);
            hash += word * column_key(column);
            bad += bad_in(word, size, exponent);
            column++, words += 4, out = out ? out + 4 : out;
            continue;
        }
        for (; end - column >= 8; column += 8, words += 32) {
            const v4l even = load_pairs(words), odd = even >> 32;
            const int64_t pair = column / 2;
            __builtin_prefetch(words + 8 * FETCH_AHEAD);
            even_low += mul_low(even, load_pairs(keys[0] + pair));
            even_high += mul_low(even, load_pairs(keys[1] + pair));
            odd_low += mul_low(odd, load_pairs(keys[2] + pair));
            odd_high += mul_low(odd, load_pairs(keys[3] + pair));
            if (size == 2) bad_halves -= (v16h)(((v16h)even & (uint16_t)exponent) == (uint16_t)exponent);
            else bad_words -= (v8w)(((v8w)even & exponent) == exponent);
            if (out) store_streaming(out, (v8f)even), out += 32;
        }
    }
    const v4l low = even_low + odd_low, high = even_high + odd_high;
    hash += low[0] + low[1] + low[2] + low[3] + ((high[0] + high[1] + high[2] + high[3]) << 32);
    for (int lane = 0; lane < 16; lane++) bad += bad_halves[lane];
    for (int lane = 0; lane < 8; lane++) bad += bad_words[lane];
    sums[0] += hash * key_of(2 * row + 1);
    sums[1] += bad;
}

/* Does the same as `add_words` for `count` consecutive elements, the first at `position` in the tensor. */
INLINE void add(uint64_t *sums, const char *values, char *out, int64_t position, int64_t count, const int size,
                uint32_t exponent) {
    const int per_word = 4 / size;
    while (count > 0) {
        const int64_t word = position / per_word, column = word % COLUMNS, row = word / COLUMNS;
        int64_t taken;
        if (position % per_word || count < per_word) { /* half of a word */
            uint16_t bits;
            memcpy(&bits, values, 2);
            if (out) memcpy(out, &bits, 2);
            const uint64_t half = (uint64_t)bits << 16 * (position % per_word);
            sums[0] += half * column_key(column) * key_of(2 * row + 1);
            sums[1] += (bits & exponent) == exponent;
            taken = 1;
        } else {
            const int64_t whole = count / per_word, left = COLUMNS - column, words = whole < left ? whole : left;
            add_words(sums, values, out, row, column, words, size, exponent);
            taken = words * per_word;
        }
        position += taken, count -= taken, values += taken * size, out = out ? out + taken * size : out;
    }
}

/* Adds the fingerprint of elements [first, last) of `values` to `sums`. `values` begins at element `start` of a part of
   a tensor. Element k of the part is at place + k / row_length * row_stride + k % row_length in the tensor. `size` is
   2 or 4. */
EXPORT void fingerprint(uint64_t *sums, const char *values, int64_t size, int64_t exponent, int64_t start,
                        int64_t place, int64_t row_length, int64_t row_stride, int64_t first, int64_t last) {
    while (first < last) {
        const int64_t row = (start + first) / row_length, column = (start + first) % row_length;
        const int64_t left = row_length - column, end = last - first < left ? last : first + left;
        const int64_t position = place + row * row_stride + column;
        if (size == 2) add(sums, values + 2 * first, 0, position, end - first, 2, exponent);
        else add(sums, values + 4 * first, 0, position, end - first, 4, exponent);
        first = end;
    }
}

/* Adds the fingerprint of elements [first, last) of a whole tensor to `sums`, and copies them to `out`. */
EXPORT void copy_fingerprint(uint64_t *sums, char *out, const char *values, int64_t size, int64_t exponent,
                             int64_t first, int64_t last) {
    const int64_t at = first * size;
    if (size == 2) add(sums, values + at, out + at, first, last - first, 2, exponent);
    else add(sums, values + at, out + at, first, last - first, 4, exponent);
    end_streaming();
}
