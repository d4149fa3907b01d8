/* Stands between a process and the C library: the Nth call on chosen files fails, is cut short, or waits.
 *
 * Preloaded (LD_PRELOAD). What to do is read from a shared file named by FAULTS_CONTROL, so that a test
 * arms and disarms it while the process runs; `faults/interposed.py` has the same layout. Counts over all
 * threads, unlike strace, whose `when=` counts in each thread apart.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { OPEN = 1, WRITE = 2, FSYNC = 4, FDATASYNC = 8, RENAME = 16, FALLOCATE = 32, FTRUNCATE = 64,
       MKDIR = 128, LINK = 256, UNLINK = 512, MMAP = 1024, READ = 2048 };

struct control {
    _Atomic int32_t calls;      /* which calls are looked at; 0: disarmed */
    _Atomic int32_t first;      /* the first of them that is hit, counted from 1 */
    _Atomic int32_t times;      /* how many are hit, one after the other */
    _Atomic int32_t error;      /* errno of a hit; 0: none */
    _Atomic int32_t is_short;   /* a hit moves half of the bytes */
    _Atomic int32_t is_waiting; /* a hit waits until this is 0 */
    _Atomic int64_t seen;
    _Atomic int64_t hit;
    char prefixes[4][256];      /* of paths that are looked at; empty: none */
    char where[512];            /* the first hit */
};

static struct control *control;

__attribute__((constructor)) static void attach(void) {
    const char *path = getenv("FAULTS_CONTROL");
    int fd = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0) : -1;
    if (fd < 0) return;
    void *memory = (void *)syscall(SYS_mmap, NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (memory != MAP_FAILED) control = memory;
}

static int is_looked_at(const char *path) {
    for (int i = 0; i < 4; i++) {
        size_t size = strlen(control->prefixes[i]);
        if (size && !strncmp(path, control->prefixes[i], size)) return 1;
    }
    return 0;
}

/* 0: go on; 1: fail, errno is set; 2: move half. */
static int fate(int call, const char *name, const char *path) {
    if (!control || !(control->calls & call) || !path || !is_looked_at(path)) return 0;
    int64_t number = atomic_fetch_add(&control->seen, 1) + 1;
    int64_t first = control->first;
    if (number < first || number >= first + control->times) return 0;
    if (atomic_fetch_add(&control->hit, 1) == 0)
        snprintf(control->where, sizeof control->where, "%s %s", name, path);
    while (control->is_waiting) {
        struct timespec pause = {0, 2000000};
        syscall(SYS_nanosleep, &pause, NULL);
    }
    if (control->is_short) return 2;
    if (!control->error) return 0;
    errno = control->error;
    return 1;
}

static int fate_of_fd(int call, const char *name, int fd) {
    if (!control || !(control->calls & call)) return 0;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return fate(call, name, path);
}

static size_t half(size_t count) { return count > 1 ? count / 2 : count; }

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define OPENED(name, path) \
    mode_t mode = 0; \
    if (flags & (O_CREAT | __O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); } \
    if (!(flags & O_DIRECTORY) && fate(OPEN, #name, path) == 1) return -1;

int open(const char *path, int flags, ...) { REAL(open); OPENED(open, path) return real(path, flags, mode); }
int open64(const char *path, int flags, ...) { REAL(open64); OPENED(open, path) return real(path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { REAL(openat); OPENED(openat, path) return real(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { REAL(openat64); OPENED(openat, path) return real(at, path, flags, mode); }
FILE *fopen(const char *path, const char *mode) { REAL(fopen); return fate(OPEN, "fopen", path) == 1 ? NULL : real(path, mode); }
FILE *fopen64(const char *path, const char *mode) { REAL(fopen64); return fate(OPEN, "fopen", path) == 1 ? NULL : real(path, mode); }

#define MOVED(call, name, size) int f = fate_of_fd(call, name, fd); if (f == 1) return -1; if (f == 2) size = half(size);

ssize_t write(int fd, const void *data, size_t size) { REAL(write); MOVED(WRITE, "write", size) return real(fd, data, size); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { REAL(pwrite); MOVED(WRITE, "pwrite", size) return real(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { REAL(pwrite64); MOVED(WRITE, "pwrite", size) return real(fd, data, size, at); }
ssize_t read(int fd, void *data, size_t size) { REAL(read); MOVED(READ, "read", size) return real(fd, data, size); }
ssize_t pread(int fd, void *data, size_t size, off_t at) { REAL(pread); MOVED(READ, "pread", size) return real(fd, data, size, at); }
ssize_t pread64(int fd, void *data, size_t size, off64_t at) { REAL(pread64); MOVED(READ, "pread", size) return real(fd, data, size, at); }

/* A vector cut short: its first buffer alone, half of it in pages, so that direct I/O still takes it. */
#define VECTOR(call, name) \
    int f = fate_of_fd(call, name, fd); \
    struct iovec first = count ? parts[0] : (struct iovec){0}; \
    if (f == 1) return -1; \
    if (f == 2 && first.iov_len > 4096) { first.iov_len = half(first.iov_len) & ~(size_t)4095; parts = &first; count = 1; }

ssize_t writev(int fd, const struct iovec *parts, int count) { REAL(writev); VECTOR(WRITE, "writev") return real(fd, parts, count); }
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) { REAL(pwritev); VECTOR(WRITE, "pwritev") return real(fd, parts, count, at); }
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t at) { REAL(pwritev64); VECTOR(WRITE, "pwritev") return real(fd, parts, count, at); }
ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t at, int flags) { REAL(pwritev2); VECTOR(WRITE, "pwritev2") return real(fd, parts, count, at, flags); }
ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t at, int flags) { REAL(pwritev64v2); VECTOR(WRITE, "pwritev2") return real(fd, parts, count, at, flags); }
ssize_t preadv(int fd, const struct iovec *parts, int count, off_t at) { REAL(preadv); VECTOR(READ, "preadv") return real(fd, parts, count, at); }
ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t at) { REAL(preadv64); VECTOR(READ, "preadv") return real(fd, parts, count, at); }
ssize_t preadv2(int fd, const struct iovec *parts, int count, off_t at, int flags) { REAL(preadv2); VECTOR(READ, "preadv2") return real(fd, parts, count, at, flags); }
ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t at, int flags) { REAL(preadv64v2); VECTOR(READ, "preadv2") return real(fd, parts, count, at, flags); }

int fsync(int fd) { REAL(fsync); return fate_of_fd(FSYNC, "fsync", fd) == 1 ? -1 : real(fd); }
int fdatasync(int fd) { REAL(fdatasync); return fate_of_fd(FDATASYNC, "fdatasync", fd) == 1 ? -1 : real(fd); }
int ftruncate(int fd, off_t size) { REAL(ftruncate); return fate_of_fd(FTRUNCATE, "ftruncate", fd) == 1 ? -1 : real(fd, size); }
int ftruncate64(int fd, off64_t size) { REAL(ftruncate64); return fate_of_fd(FTRUNCATE, "ftruncate", fd) == 1 ? -1 : real(fd, size); }
int fallocate(int fd, int mode, off_t at, off_t size) { REAL(fallocate); return fate_of_fd(FALLOCATE, "fallocate", fd) == 1 ? -1 : real(fd, mode, at, size); }
int fallocate64(int fd, int mode, off64_t at, off64_t size) { REAL(fallocate64); return fate_of_fd(FALLOCATE, "fallocate", fd) == 1 ? -1 : real(fd, mode, at, size); }
int posix_fallocate(int fd, off_t at, off_t size) { REAL(posix_fallocate); return fate_of_fd(FALLOCATE, "posix_fallocate", fd) == 1 ? errno : real(fd, at, size); }
int posix_fallocate64(int fd, off64_t at, off64_t size) { REAL(posix_fallocate64); return fate_of_fd(FALLOCATE, "posix_fallocate", fd) == 1 ? errno : real(fd, at, size); }
int rename(const char *from, const char *to) { REAL(rename); return fate(RENAME, "rename", to) == 1 ? -1 : real(from, to); }
int renameat(int a, const char *from, int b, const char *to) { REAL(renameat); return fate(RENAME, "renameat", to) == 1 ? -1 : real(a, from, b, to); }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); return fate(MKDIR, "mkdir", path) == 1 ? -1 : real(path, mode); }
int link(const char *from, const char *to) { REAL(link); return fate(LINK, "link", to) == 1 ? -1 : real(from, to); }
int unlink(const char *path) { REAL(unlink); return fate(UNLINK, "unlink", path) == 1 ? -1 : real(path); }

void *mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset) {
    REAL(mmap);
    return fd >= 0 && fate_of_fd(MMAP, "mmap", fd) == 1 ? MAP_FAILED : real(at, size, protection, flags, fd, offset);
}
void *mmap64(void *at, size_t size, int protection, int flags, int fd, off64_t offset) {
    REAL(mmap64);
    return fd >= 0 && fate_of_fd(MMAP, "mmap", fd) == 1 ? MAP_FAILED : real(at, size, protection, flags, fd, offset);
}
