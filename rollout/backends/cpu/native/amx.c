/* Linux allows AMX only to processes that request it, since it makes the state of each thread 8 KiB
   larger. Without the request, an AMX instruction kills the process. */

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

/* 1 where this processor has AMX for bfloat16, the compiler knows it, and the kernel lets this process
   use it; else 0. Requested once; any thread may call. */
EXPORT int64_t amx_is_usable(void) {
    static int64_t answer = -1; /* concurrent calls get the same answer */
    int64_t known = __atomic_load_n(&answer, __ATOMIC_RELAXED);
    if (known < 0) __atomic_store_n(&answer, known = ask(), __ATOMIC_RELAXED);
    return known;
}
