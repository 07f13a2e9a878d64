/* Vectors of eight floats, by the vector extensions of GCC and Clang, for any CPU. Included by all sources of this
   folder. Intrinsics are used for two things: the fused multiply-add, whose product and sum are rounded once, and
   stores that bypass the caches. */

#ifndef ROLLOUT_VECTORS_H
#define ROLLOUT_VECTORS_H

#if defined(__FMA__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 8
#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

/* aligned(4): pointers to these types may point to any float. */
typedef float v8f __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t v8i __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t v8u __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t v4i __attribute__((vector_size(16), aligned(4), may_alias));
typedef float v4f __attribute__((vector_size(16), aligned(4), may_alias));
typedef double v4d __attribute__((vector_size(32), aligned(8), may_alias));

INLINE v8f splat(float x) { return (v8f){x, x, x, x, x, x, x, x}; }

INLINE v8f load(const float *p) { return *(const v8f *)p; }

INLINE void store(float *p, v8f x) { *(v8f *)p = x; }

/* Stores x without filling the caches, if the processor can: a copy of gigabytes would only flush them. The caller
   calls `end_streaming` before other threads may read it. */
INLINE void store_streaming(void *out, v8f x) {
#ifdef __AVX2__
    if (((uintptr_t)out & 31) == 0) {
        _mm256_stream_ps((float *)out, (__m256)x);
        return;
    }
#endif
    store((float *)out, x);
}

INLINE void end_streaming(void) {
#ifdef __AVX2__
    _mm_sfence();
#endif
}

INLINE v8f select_v8(v8i mask, v8f yes, v8f no) {
    return (v8f)(((v8i)yes & mask) | ((v8i)no & ~mask));
}

INLINE v8f max_v8(v8f a, v8f b) { return select_v8(a > b, a, b); }

/* Returns a * b + c, rounded once. The compiler does not make this instruction from other products and sums
   (-ffp-contract=off), so that their results do not depend on the processor. A processor without the
   instruction rounds twice here. */
INLINE v8f fma_8(v8f a, v8f b, v8f c) {
#ifdef __FMA__
    return (v8f)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    union { v8f whole; float32x4_t half[2]; } x = {a}, y = {b}, z = {c};
    z.half[0] = vfmaq_f32(z.half[0], x.half[0], y.half[0]);
    z.half[1] = vfmaq_f32(z.half[1], x.half[1], y.half[1]);
    return z.whole;
#else
    return a * b + c;
#endif
}

#ifdef __AVX512F__
typedef float v16f __attribute__((vector_size(64), aligned(4), may_alias));

INLINE v16f fma_16(v16f a, v16f b, v16f c) { return (v16f)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#endif

INLINE float sum_v8(v8f x) {
    union { v8f whole; v4f half[2]; } u = {x};
    v4f s = u.half[0] + u.half[1];
    return (s[0] + s[2]) + (s[1] + s[3]);
}

INLINE float largest_of(v8f x) {
    float best = x[0];
    for (int lane = 1; lane < LANES; lane++) best = x[lane] > best ? x[lane] : best;
    return best;
}

enum { FLOAT32, BFLOAT16 };

/* The unit that multiplies. DOT and AMX add products of bfloat16 pairs. They may be used only if dot_is_usable() and
   amx_is_usable(). */
enum unit { VECTORS, DOT, AMX };

typedef uint16_t v8h __attribute__((vector_size(16), aligned(2), may_alias));

INLINE int64_t size_of(int64_t type) { return type == BFLOAT16 ? 2 : 4; }

/* Returns numbers [i, i + 8) of an array of this type. */
INLINE v8f load_as(const void *array, int64_t i, int64_t type) {
    if (type == FLOAT32) return load((const float *)array + i);
    const uint16_t *h = (const uint16_t *)array + i; /* GCC makes one instruction of these eight loads */
    return (v8f)((v8u){h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]} << 16);
}

/* Returns x rounded to bfloat16, to nearest, ties to even, in the upper halves of lanes. NaN stays NaN. */
INLINE v8u rounded_bits(v8f x) {
    v8u bits = (v8u)x, rounded = bits + 0x7fff + (bits >> 16 & 1);
    return (v8u)select_v8(x == x, (v8f)rounded, (v8f)((v8u){0} + 0x7fc00000));
}

/* Stores x as numbers [i, i + 8) of an array of this type. */
INLINE void store_as(void *array, int64_t i, v8f x, int64_t type) {
    if (type == FLOAT32) {
        store((float *)array + i, x);
        return;
    }
    *(v8h *)((uint16_t *)array + i) = __builtin_convertvector(rounded_bits(x) >> 16, v8h);
}

/* Returns x as it is after `store_as` and `load_as`. */
INLINE v8f round_as(v8f x, int64_t type) {
    return type == FLOAT32 ? x : (v8f)(rounded_bits(x) & 0xffff0000);
}

/* Returns the address of element i. */
INLINE void *place_of(const void *array, int64_t i, int64_t type) { return (char *)array + i * size_of(type); }

/* GCC before 12 has no __builtin_shufflevector, and Clang no __builtin_shuffle. */
#ifdef __clang__
#define SHUFFLE(places, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(places, a, b, ...) __builtin_shuffle(a, b, (places){__VA_ARGS__})
#endif
#define SHUFFLE8(a, b, ...) SHUFFLE(v8i, a, b, __VA_ARGS__)

/* Transposes a matrix of eight rows of eight floats. */
INLINE void transpose_8(v8f *rows) {
    v8f pairs[8], fours[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = SHUFFLE8(rows[i], rows[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        pairs[i + 1] = SHUFFLE8(rows[i], rows[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; i += 4) {
        for (int j = 0; j < 2; j++) {
            fours[i + 2 * j] = SHUFFLE8(pairs[i + j], pairs[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            fours[i + 2 * j + 1] = SHUFFLE8(pairs[i + j], pairs[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    }
    for (int i = 0; i < 4; i++) {
        rows[i] = SHUFFLE8(fours[i], fours[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        rows[i + 4] = SHUFFLE8(fours[i], fours[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

/* Stores eight vectors of eight floats as columns of a matrix whose rows are `stride` floats apart. */
INLINE void store_transposed(float *out, int64_t stride, const v8f *rows) {
    v8f columns[8];
    memcpy(columns, rows, sizeof columns);
    transpose_8(columns);
    for (int i = 0; i < 8; i++) store(out + i * stride, columns[i]);
}

/* Keeps x in a register. Otherwise GCC would load it from memory for each use. Without AVX no register holds eight
   floats. */
#if defined(__GNUC__) && defined(__AVX__)
#define KEEP(x) __asm__("" : "+v"(x))
#else
#define KEEP(x) (void)0
#endif

INLINE float max_of_lanes(v8f x) {
    union { v8f whole; v4f half[2]; } u = {x};
    v4f a = u.half[0], b = u.half[1];
    v4f best = (v4f)(((v4i)a & (a > b)) | ((v4i)b & ~(a > b)));
    float low = best[0] > best[1] ? best[0] : best[1], high = best[2] > best[3] ? best[2] : best[3];
    return low > high ? low : high;
}

/* Returns four sums in double precision, to each of which two of the eight floats are added. */
INLINE v4d add_as_doubles(v4d sums, v8f x) {
    union { v8f whole; v4f half[2]; } u = {x};
    return sums + (__builtin_convertvector(u.half[0], v4d) + __builtin_convertvector(u.half[1], v4d));
}

/* Returns exp(x), with an error of at most 2 units in the last place; 0 below -86.5 and for NaN, exp(88) above 88.
   exp(x) = 2^n exp(r) with |r| <= ln(2)/2. Taylor's series to r^7 has an error below 6e-9. */
INLINE v8f exp_v8(v8f x) {
    const v8f magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to whole numbers */
    v8f capped = select_v8(x > 88.0f, splat(88.0f), x);
    v8f shifted = fma_8(capped, splat(1.44269504f), magic);
    v8f n = shifted - magic;
    v8f r = fma_8(n, splat(-0.693145752f), capped); /* ln(2), its 16 leading bits and the rest */
    r = fma_8(n, splat(-1.42860677e-6f), r);
    v8f y = fma_8(r, splat(1.0f / 5040), splat(1.0f / 720));
    y = fma_8(y, r, splat(1.0f / 120));
    y = fma_8(y, r, splat(1.0f / 24));
    y = fma_8(y, r, splat(1.0f / 6));
    y = fma_8(y, r, splat(0.5f));
    y = fma_8(y, r, splat(1.0f));
    y = fma_8(y, r, splat(1.0f));
    v8u scaled = (v8u)y + (((v8u)shifted - (v8u)magic) << 23); /* wraps where it is masked */
    return (v8f)((v8i)scaled & (x >= -86.5f));
}

/* Returns tanh(x), with an error of at most 1e-7. Near 0, where 1 - 2 / (e^2x + 1) cancels digits, it is Taylor's
   series to x^9, whose error is below 3e-9 for |x| < 0.25. */
INLINE v8f tanh_v8(v8f x) {
    v8f square = x * x, far = 1.0f - 2.0f / (exp_v8(x + x) + 1.0f);
    v8f y = fma_8(square, splat(62.0f / 2835), splat(-17.0f / 315));
    y = fma_8(y, square, splat(2.0f / 15));
    y = fma_8(y, square, splat(-1.0f / 3));
    y = fma_8(y, square, splat(1.0f)) * x;
    return select_v8(square < 0.0625f, y, far);
}

#endif
