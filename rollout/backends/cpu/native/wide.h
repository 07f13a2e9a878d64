/* Vectors of WIDTH floats, for linear_tile.h and experts_tile.h, which are included once for each WIDTH. */

#ifndef ROLLOUT_WIDE_H
#define ROLLOUT_WIDE_H

#include "vectors.h"

#define CACHE_LINE 64
#define UNROLL _Pragma("GCC unroll 16")
#define JOIN_(name, width) name##_##width
#define JOIN(name, width) JOIN_(name, width)
#define vec JOIN(vec, WIDTH)
#define words JOIN(words, WIDTH)
#define load_weights JOIN(load_weights, WIDTH)
#define fma_wide JOIN(fma, WIDTH)

#endif

typedef float vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * WIDTH)));

/* Returns WIDTH numbers from p on, float32 or bfloat16, as floats. */
INLINE vec load_weights(const char *p, const int is_bfloat16) {
    if (!is_bfloat16) return *(const vec *)p;
    const uint16_t *h = (const uint16_t *)p; /* GCC makes few instructions of these loads */
#if WIDTH == 8
    return (vec)((words){h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]} << 16);
#else
    return (vec)((words){h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7], h[8], h[9], h[10], h[11], h[12],
                         h[13], h[14], h[15]} << 16);
#endif
}
