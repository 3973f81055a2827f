/* Loaded with LD_PRELOAD: the N-th change of the disk below a folder fails with an error, in whatever language it is made.

   Counted, but for files named .log: write, pwrite, writev, fsync, fdatasync, close of a changed file, open and openat with O_CREAT, mkdir, rename.
   tests/support/full_disk.py arms it, or FULL_DISK="NUMBER ERROR FOLDER" of the environment. Error 0: every write takes half of what it is given. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX], failed[PATH_MAX + 16];
static long fail_at, seen;
static int armed, lasting, error;

void full_disk_arm(const char *path, long number, int for_ever, int with) {
    snprintf(folder, sizeof folder, "%s/", path);
    failed[0] = 0, seen = 0, fail_at = number, lasting = for_ever, error = with;
    __atomic_store_n(&armed, 1, __ATOMIC_SEQ_CST);
}

__attribute__((constructor)) static void arm_from_environment(void) {
    char path[PATH_MAX];
    long number;
    int with;
    const char *given = getenv("FULL_DISK");
    if (given && sscanf(given, "%ld %d %4095[^\n]", &number, &with, path) == 3) full_disk_arm(path, number, 1, with);
}

/* What failed: "call path"; empty where nothing did. */
const char *full_disk_disarm(void) {
    __atomic_store_n(&armed, 0, __ATOMIC_SEQ_CST);
    return failed;
}

static int below(const char *path) {
    const char *ending = strrchr(path, '.');
    return __atomic_load_n(&armed, __ATOMIC_SEQ_CST) && strncmp(path, folder, strlen(folder)) == 0 && !(ending && strcmp(ending, ".log") == 0);
}

static int refuse(const char *call, const char *path) {
    if (!error || !below(path)) return 0;
    long number = __atomic_add_fetch(&seen, 1, __ATOMIC_SEQ_CST);
    if (number != fail_at && !(lasting && number > fail_at)) return 0;
    if (number == fail_at) snprintf(failed, sizeof failed, "%s %s", call, path);
    errno = error;
    return 1;
}

static int path_of(int fd, char *path) {
    char link[64];
    if (!__atomic_load_n(&armed, __ATOMIC_SEQ_CST)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 2);
    if (length < 0) return 0;
    path[length] = 0;
    struct stat status;
    if (fstat(fd, &status) == 0 && S_ISDIR(status.st_mode)) strcat(path, "/");
    return 1;
}

static int refuse_fd(const char *call, int fd) {
    char path[PATH_MAX];
    return path_of(fd, path) && refuse(call, path);
}

static size_t part(int fd, size_t size) {
    char path[PATH_MAX];
    return !error && size > 1 && path_of(fd, path) && below(path) ? size / 2 : size;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *data, size_t size) { REAL(write); return refuse_fd("write", fd) ? -1 : real(fd, data, part(fd, size)); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { REAL(pwrite); return refuse_fd("write", fd) ? -1 : real(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { REAL(pwrite64); return refuse_fd("write", fd) ? -1 : real(fd, data, size, at); }
ssize_t writev(int fd, const struct iovec *parts, int number) { REAL(writev); return refuse_fd("write", fd) ? -1 : real(fd, parts, number); }
int close(int fd) { REAL(close); int changed = (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY && refuse_fd("close", fd); int with = errno; int result = real(fd); errno = changed ? with : errno; return changed ? -1 : result; }
int fsync(int fd) { REAL(fsync); return refuse_fd("fsync", fd) ? -1 : real(fd); }
int fdatasync(int fd) { REAL(fdatasync); return refuse_fd("fsync", fd) ? -1 : real(fd); }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); return refuse("mkdir", path) ? -1 : real(path, mode); }
int rename(const char *old, const char *new) { REAL(rename); return refuse("rename", new) ? -1 : real(old, new); }

#define MODE mode_t mode = 0; if (flags & O_CREAT) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }
#define CREATED(path) ((flags & O_CREAT) && refuse("open", path))

int open(const char *path, int flags, ...) { MODE REAL(open); return CREATED(path) ? -1 : real(path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE REAL(open64); return CREATED(path) ? -1 : real(path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE REAL(openat); return CREATED(path) ? -1 : real(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE REAL(openat64); return CREATED(path) ? -1 : real(at, path, flags, mode); }
