/* Runs work on the OpenMP threads that torch uses, too. Called from Python (kernels.py). Threads of our own would share
   the processors with OpenMP's threads, which busy-wait for more work for some milliseconds. */

#include "vectors.h"

#ifdef _OPENMP
#include <omp.h>
#endif

/* A function that works on items [first, last). `args` is the caller's struct. */
typedef void (*part_function)(const void *args, void *scratch, int64_t first, int64_t last);

/* Runs `part` on all items, one part per thread. Each thread gets its own `scratch_bytes` of `scratch`. */
EXPORT void run_parts(part_function part, const void *args, char *scratch, int64_t scratch_bytes, int64_t items,
                      int64_t threads) {
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
    {
        const int64_t index = omp_get_thread_num(), count = omp_get_num_threads();
        part(args, scratch + index * scratch_bytes, items * index / count, items * (index + 1) / count);
    }
#else
    (void)scratch_bytes, (void)threads;
    part(args, scratch, 0, items);
#endif
}
