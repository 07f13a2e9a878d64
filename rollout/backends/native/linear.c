/* Products with packed weights, for any number of tokens.

   The sums of a few tokens and a panel of outputs stay in registers while the panel is read, once,
   in order (Goto and van de Geijn 2008, without a packed x: a block of its rows fits the caches as it
   is). Each sum adds its inputs in order, one after the other, whatever the number of tokens: what
   a token gets does not depend on the tokens beside it. */

#include "linear.h"

#include <stdlib.h>
#include <unistd.h>

#define UNROLL _Pragma("GCC unroll 16")
#define FAR_AHEAD 32 /* inputs from a read to what is prefetched with it */

/* How many tokens are multiplied with all panels before the next: half the second cache of x. */
static int64_t tokens_at_once(int64_t inputs, int64_t largest_tile) {
    long cache_bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
    if (cache_bytes <= 0) cache_bytes = 1 << 19;
    int64_t tokens = cache_bytes / 2 / (inputs * (int64_t)sizeof(float));
    return tokens < 8 * largest_tile ? 8 * largest_tile : tokens;
}

#define WIDTH 8
#define MAX_TOKENS 6 /* 12 sums in 16 registers */
#include "linear_tile.h"
#undef WIDTH
#undef MAX_TOKENS

#ifdef __AVX512F__
#define WIDTH 16
#define MAX_TOKENS 12 /* 24 sums in 32 registers */
#include "linear_tile.h"
#undef WIDTH
#undef MAX_TOKENS
#endif

/* The lanes that this processor's vectors have. */
EXPORT int64_t linear_max_lanes(void) {
#ifdef __AVX512F__
    return 16;
#else
    return 8;
#endif
}

EXPORT void linear(const struct linear *a, int64_t first, int64_t last) {
#ifdef __AVX512F__
    if (a->lanes == 16) {
        linear_16(a, first, last);
        return;
    }
#endif
    linear_8(a, first, last);
}

#define PACKING(name, type)                                                                         \
    /* panels [first, last) of `w`, [outputs, inputs], to `packed` and back */                      \
    EXPORT void pack_##name(type *packed, const type *w, int64_t outputs, int64_t inputs,           \
                            int64_t width, int64_t first, int64_t last) {                           \
        for (int64_t panel = first; panel < last; panel++) {                                        \
            int64_t rows = outputs - panel * width < width ? outputs - panel * width : width;       \
            const type *source = w + panel * width * inputs;                                        \
            type *target = packed + panel * width * inputs;                                         \
            for (int64_t k = 0; k < inputs; k++, target += width) {                                 \
                for (int64_t j = 0; j < rows; j++) target[j] = source[j * inputs + k];              \
                for (int64_t j = rows; j < width; j++) target[j] = 0;                               \
            }                                                                                       \
        }                                                                                           \
    }                                                                                               \
    EXPORT void unpack_##name(type *w, const type *packed, int64_t outputs, int64_t inputs,         \
                              int64_t width, int64_t first, int64_t last) {                         \
        for (int64_t panel = first; panel < last; panel++) {                                        \
            int64_t rows = outputs - panel * width < width ? outputs - panel * width : width;       \
            type *target = w + panel * width * inputs;                                              \
            const type *source = packed + panel * width * inputs;                                   \
            for (int64_t k = 0; k < inputs; k++, source += width) {                                 \
                for (int64_t j = 0; j < rows; j++) target[j * inputs + k] = source[j];              \
            }                                                                                       \
        }                                                                                           \
    }

PACKING(float, uint32_t)
PACKING(half, uint16_t)
