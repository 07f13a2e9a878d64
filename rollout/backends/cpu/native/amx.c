/* Permission to use AMX, called from Python (products.py). Linux allows AMX only to processes that request it,
   because it makes the state of each thread 8 KiB larger. Without the request, an AMX instruction kills the
   process. */

#include "amx.h"
#include "vectors.h"

#ifdef HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XTILEDATA 18

static int64_t ask(void) { return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0; }
#else
static int64_t ask(void) { return 0; }
#endif

/* Returns 1 if this processor has AMX for bfloat16, the compiler supports it, and Linux lets this process use
   it; else 0. The first call makes the request. Any thread may call. */
EXPORT int64_t amx_is_usable(void) {
    static int64_t answer = -1; /* concurrent calls get the same answer */
    int64_t known = __atomic_load_n(&answer, __ATOMIC_RELAXED);
    if (known < 0) __atomic_store_n(&answer, known = ask(), __ATOMIC_RELAXED);
    return known;
}
