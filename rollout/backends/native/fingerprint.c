/* A hash of all elements' bits that says where each stood: a sum over positions, so threads and
   devices may take them in any order. */

#include "vectors.h"

/* SplitMix64 (Steele, Lea and Flood 2014), as in rollout/step/seeds.py. */
INLINE uint64_t mix(uint64_t position, uint64_t bits) {
    uint64_t z = position * 0x9E3779B97F4A7C15u + bits + 1;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* sums += (hash, number of NaN and infinities) of values[first, last), of which the first stands at
   `position`. `exponent` has the bits that all are set in NaN and infinity; `size`, in bytes, is a
   constant of the caller. */
INLINE void add(uint64_t *sums, const void *values, const int size, uint64_t exponent, uint64_t position,
                int64_t first, int64_t last) {
    uint64_t hash = 0, count = 0;
    for (int64_t i = first; i < last; i++) {
        uint64_t bits = size == 2 ? ((const uint16_t *)values)[i] : ((const uint32_t *)values)[i];
        hash += mix(position + (i - first), bits);
        count += (bits & exponent) == exponent;
    }
    sums[0] += hash;
    sums[1] += count;
}

/* `values` begin at element `start` of a part of a tensor; element k of the part stands at
   place + k / row_length * row_stride + k % row_length. `size` is 2 or 4. */
EXPORT void fingerprint(uint64_t *sums, const void *values, int64_t size, int64_t exponent, int64_t start,
                        int64_t place, int64_t row_length, int64_t row_stride, int64_t first, int64_t last) {
    while (first < last) {
        const int64_t row = (start + first) / row_length, column = (start + first) % row_length;
        const int64_t left = row_length - column, end = last - first < left ? last : first + left;
        const int64_t position = place + row * row_stride + column;
        if (size == 2) add(sums, values, 2, exponent, position, first, end);
        else add(sums, values, 4, exponent, position, first, end);
        first = end;
    }
}
