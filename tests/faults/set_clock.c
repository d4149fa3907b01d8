/* Sets the wall clock for one process: CLOCK_REALTIME and CLOCK_BOOTTIME, each as far off as a file says.
 *
 * Preloaded (LD_PRELOAD). CLOCK_OFFSETS names a file of two 64-bit numbers of nanoseconds: the wall clock's
 * offset, and that of the time since boot, by which a sleep of the machine is told.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *offsets;

__attribute__((constructor)) static void attach(void) {
    const char *path = getenv("CLOCK_OFFSETS");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *at = mmap(NULL, 16, PROT_READ, MAP_SHARED, fd, 0);
    offsets = at == MAP_FAILED ? NULL : at;
    close(fd);
}

int clock_gettime(clockid_t id, struct timespec *at) {
    int failed = (int)syscall(SYS_clock_gettime, id, at);
    int64_t offset = !offsets ? 0 : id == CLOCK_REALTIME ? offsets[0] : id == CLOCK_BOOTTIME ? offsets[1] : 0;
    if (!failed && offset) {
        int64_t ns = (int64_t)at->tv_sec * 1000000000 + at->tv_nsec + offset;
        at->tv_sec = ns / 1000000000;
        at->tv_nsec = ns % 1000000000;
    }
    return failed;
}
