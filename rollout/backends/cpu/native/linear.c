/* Products with packed weights, for any number of tokens, and packing. Called from Python (products.py,
   native_weight.py) and decoder.c.

   The sums of a few tokens and a panel of outputs stay in registers while the panel is read once, in order
   (Goto and van de Geijn 2008, but x is not packed, because a block of its rows fits the caches). Each sum adds
   its inputs in order, for any number of tokens, so a token's result does not depend on the other tokens. Units
   that add pairs (linear_pairs.h) add in another order, which does not depend on the other tokens either. */

#include "linear.h"

#include <stdlib.h>
#include <unistd.h>

#define FAR_AHEAD 32 /* inputs between a read and the prefetch made with it */

/* Returns how many tokens are multiplied with all panels before the next tokens: as many as fill half of the
   second-level cache with their x, but at least eight tiles. */
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

#include "linear_pairs.h"
#include "linear_dot.h"
#include "linear_amx.h"

/* Returns the number of floats in this processor's widest vectors. */
EXPORT int64_t linear_max_lanes(void) {
#ifdef __AVX512F__
    return 16;
#else
    return 8;
#endif
}

/* Returns 1 if this processor has dot products of bfloat16 pairs; else 0. */
EXPORT int64_t dot_is_usable(void) {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

void linear(const struct linear *a, int64_t first, int64_t last) {
#ifdef HAS_AMX
    if (a->unit == AMX) {
        linear_amx(a, first, last);
        return;
    }
#endif
#ifdef __AVX512BF16__
    if (a->unit == DOT) {
        linear_dot(a, first, last);
        return;
    }
#endif
#ifdef __AVX512F__
    if (a->lanes == 16) {
        linear_16(a, first, last);
        return;
    }
#endif
    linear_8(a, first, last);
}

EXPORT void linear_part(const void *args, void *scratch, int64_t first, int64_t last) {
    (void)scratch;
    linear(args, first, last);
}

/* Copies a square of 8 x 8 numbers of `size` bytes, transposed. Rows are a stride of bytes apart. With `streams`
   floats are stored without filling the caches. */
INLINE void copy_transposed(char *out, int64_t out_stride, const char *in, int64_t in_stride, const int size,
                            const int streams) {
    v8f rows[8];
    for (int i = 0; i < 8; i++) {
        const char *row = in + i * in_stride;
        rows[i] = size == 4 ? load((const float *)row) : (v8f)__builtin_convertvector(*(const v8h *)row, v8u);
    }
    transpose_8(rows);
    for (int i = 0; i < 8; i++) {
        char *row = out + i * out_stride;
        if (size == 4 && streams) store_streaming(row, rows[i]);
        else if (size == 4) store((float *)row, rows[i]);
        else *(v8h *)row = __builtin_convertvector((v8u)rows[i], v8h);
    }
}

/* Copies rows of w, [outputs, inputs], to panels [first, last) of `width` outputs, or back if `is_back`. Numbers
   have `size` bytes. Outputs of the last panel that w does not have are set to zero. */
INLINE void reorder(char *panels, char *w, int64_t outputs, int64_t inputs, int64_t width, int64_t first,
                    int64_t last, const int size, const int is_back) {
    const int64_t line = width * size, stride = inputs * size; /* bytes from one input, or output, to the next */
    for (int64_t panel = first; panel < last; panel++) {
        const int64_t start = panel * width, left = outputs - start, rows = left < width ? left : width;
        char *in_panel = panels + start * stride, *in_w = w + start * stride;
        const int64_t squares = rows == width ? inputs / 8 * 8 : 0;
        for (int64_t k = 0; k < squares; k += 8) {
            /* The rows of the next panel, which lie in one piece: too many places for the hardware's prefetch. */
            for (int64_t i = 0; i < 8 * line && !is_back; i += 64) __builtin_prefetch(in_w + width * stride + k * line + i);
            for (int64_t j = 0; j < width; j += 8) {
                char *square = in_w + j * stride + k * size, *packed = in_panel + k * line + j * size;
                if (is_back) copy_transposed(square, stride, packed, line, size, 0);
                else copy_transposed(packed, line, square, stride, size, 1);
            }
        }
        for (int64_t k = squares; k < inputs; k++) {
            char *packed = in_panel + k * line;
            for (int64_t j = 0; j < rows; j++) {
                char *number = in_w + j * stride + k * size;
                if (is_back) memcpy(number, packed + j * size, size);
                else memcpy(packed + j * size, number, size);
            }
            if (!is_back) memset(packed + rows * size, 0, (width - rows) * size);
        }
    }
}

EXPORT void pack_weights(char *panels, char *w, int64_t outputs, int64_t inputs, int64_t width, int64_t size,
                         int64_t first, int64_t last) {
    if (size == 4) reorder(panels, w, outputs, inputs, width, first, last, 4, 0);
    else reorder(panels, w, outputs, inputs, width, first, last, 2, 0);
    end_streaming();
}

EXPORT void unpack_weights(char *panels, char *w, int64_t outputs, int64_t inputs, int64_t width, int64_t size,
                           int64_t first, int64_t last) {
    if (size == 4) reorder(panels, w, outputs, inputs, width, first, last, 4, 1);
    else reorder(panels, w, outputs, inputs, width, first, last, 2, 1);
}

/* Swaps two arrays of `bytes` bytes. Adds 1 to `times`, so that Python knows after an interrupt whether the swap
   was done. */
EXPORT void exchange(char *a, char *b, int64_t bytes, int64_t threads, int64_t *times) {
    (void)threads; /* read with OpenMP only */
    const int64_t vectors = bytes / (int64_t)sizeof(v8f);
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) if (threads > 1)
#endif
    for (int64_t i = 0; i < vectors; i++) {
        v8f x = load((float *)a + i * LANES), y = load((float *)b + i * LANES);
        store((float *)a + i * LANES, y);
        store((float *)b + i * LANES, x);
    }
    for (int64_t i = vectors * (int64_t)sizeof(v8f); i < bytes; i++) {
        char x = a[i];
        a[i] = b[i];
        b[i] = x;
    }
    *times += 1;
}
