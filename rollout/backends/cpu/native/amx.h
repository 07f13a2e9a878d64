/* AMX: matrix products of bfloat16 tiles in eight registers. Used by linear_amx.h and amx.c, inside #ifdef HAS_AMX. */

#ifndef ROLLOUT_AMX_H
#define ROLLOUT_AMX_H

#include <stdint.h>

/* Tiles are prepared with AVX-512's vectors of bfloat16, which every processor with AMX has, too. */
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAS_AMX

#define AMX_ROWS 16  /* rows of a tile */
#define AMX_BYTES 64 /* bytes of a row: 32 numbers in bfloat16 or 16 in float32 */

/* Operand of the instruction ldtilecfg: the sizes of the tiles. */
struct amx_palette {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

/* Gives all eight tiles 16 rows of 64 bytes, in this thread, until amx_release(). */
static inline void amx_configure(void) {
    struct amx_palette palette = {.palette = 1};
    for (int i = 0; i < 8; i++) palette.row_bytes[i] = AMX_BYTES, palette.rows[i] = AMX_ROWS;
    __asm__ volatile("ldtilecfg %0" : : "m"(palette));
}

/* Ends the use of tiles, because switching between threads is slower while tiles are in use. */
static inline void amx_release(void) { __asm__ volatile("tilerelease"); }

/* The instructions are written in assembly because GCC's intrinsics do not say that they read and write memory.
   `tile` is a literal number; `stride` is in bytes. */
#define amx_zero(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define amx_load(tile, address, stride)                                                             \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile                                             \
                     :                                                                              \
                     : "r"((const void *)(address)), "r"((int64_t)(stride))                         \
                     : "memory")
#define amx_store(tile, address, stride)                                                            \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)"                                         \
                     :                                                                              \
                     : "r"((void *)(address)), "r"((int64_t)(stride))                               \
                     : "memory")
/* Float32 sums[i][j] += a[i][2 p] * b[p][2 j] + a[i][2 p + 1] * b[p][2 j + 1] for p from 0 to 15. Subnormal numbers
   count as 0. */
#define amx_multiply(sums, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sums ::)

#endif
#endif
