/* AVX-512's dot products of bfloat16 pairs, and vectors of 16 floats. Used by linear_pairs.h and attention_pairs.h,
   inside #ifdef __AVX512BF16__. */

#ifndef ROLLOUT_PAIRS_H
#define ROLLOUT_PAIRS_H

#ifdef __AVX512BF16__
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "vectors.h"

typedef uint16_t v16h __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint16_t v32h __attribute__((vector_size(64), aligned(2), may_alias));

/* Returns sums[i] + x[2 i] * y[2 i] + x[2 i + 1] * y[2 i + 1]. Subnormal numbers count as 0. */
INLINE v16f add_pairs(v16f sums, v32h x, v32h y) {
    return (v16f)_mm512_dpbf16_ps((__m512)sums, (__m512bh)x, (__m512bh)y);
}

/* Returns two numbers, repeated. */
INLINE v32h splat_pair(const uint16_t *numbers) {
    int32_t pair;
    memcpy(&pair, numbers, sizeof pair);
    return (v32h)_mm512_set1_epi32(pair);
}

INLINE v16f max_16(v16f a, v16f b) { return (v16f)_mm512_max_ps((__m512)a, (__m512)b); }

INLINE float max_of_16(v16f x) { return _mm512_reduce_max_ps((__m512)x); }

/* Returns the sums of lanes i and i + 8. */
INLINE v8f sum_of_halves(v16f x) {
    return (v8f)_mm512_castps512_ps256((__m512)x) + (v8f)_mm512_extractf32x8_ps((__m512)x, 1);
}

/* Returns exp(x) for x <= 0, with a relative error of at most 2e-6; 0 below -87 and for NaN. exp(x) = 2^n 2^r with
   |r| <= 1/2. Taylor's series of 2^r to r^6 has an error below 2e-7; log2(e) in float32 adds the rest if x is far below
   0. */
INLINE v16f exp_16(v16f x) {
    const __m512 log2_e = _mm512_set1_ps(1.44269504f);
    const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_GE_OQ);
    const __m512 n = _mm512_roundscale_ps((__m512)x * log2_e, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const v16f r = (v16f)_mm512_fmsub_ps((__m512)x, log2_e, n);
    v16f y = r * 1.54035304e-4f + 1.33335581e-3f;
    y = y * r + 9.61812911e-3f;
    y = y * r + 5.55041087e-2f;
    y = y * r + 2.40226507e-1f;
    y = y * r + 6.93147181e-1f;
    y = y * r + 1.0f;
    return (v16f)_mm512_maskz_scalef_ps(counts, (__m512)y, n);
}

/* Stores x rounded to bfloat16, to nearest, ties to even. NaN stays NaN. */
INLINE void round_16(uint16_t *out, v16f x) { *(v16h *)out = (v16h)_mm512_cvtneps_pbh((__m512)x); }

#endif
#endif
