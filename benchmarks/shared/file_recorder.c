/* Loaded with LD_PRELOAD: appends every change below a folder to a log, with its data, in the order in which they happened over all processes.

   A change and its record are made under one lock (a mutex of the process and a record lock of the log), so the order of the log is that of the changes.
   The folder and the log: file_recorder_arm, or the variables FILE_RECORDER_ROOT, _LOG and _KILL for programs that are started later.
   Not seen: writes of C's stdio (fwrite) and stores into shared mappings; the mapping itself is recorded. shared/crash_model.py reads the log. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE = 1, TRUNCATE, WRITE, FSYNC, MKDIR, RENAME, UNLINK, RMDIR, LINK, SYMLINK, MAPPING, UNSUPPORTED };
struct head { int64_t inode, offset, size; int32_t operation, pid, length_1, length_2; };

static char root[PATH_MAX], kill_path[PATH_MAX];
static int log_file = -1;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void lock_process(void) { pthread_mutex_lock(&mutex); }
static void unlock_process(void) { pthread_mutex_unlock(&mutex); }

static void set_lock(short kind) {
    struct flock lock = {.l_type = kind, .l_whence = SEEK_SET};
    while (fcntl(log_file, F_SETLKW, &lock) == -1 && errno == EINTR);
}
static void begin(void) { lock_process(); set_lock(F_WRLCK); }
static void end(void) { int number = errno; set_lock(F_UNLCK); unlock_process(); errno = number; }

/* kill_at: SIGKILL after the first flush of a path that contains it; empty: none. An empty folder: nothing is recorded from now on. */
void file_recorder_arm(const char *folder, const char *log, const char *kill_at) {
    root[0] = 0;
    if (!folder[0]) return;
    int file = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT, 0644);
    log_file = fcntl(file, F_DUPFD_CLOEXEC, 500);
    syscall(SYS_close, file);
    snprintf(kill_path, sizeof kill_path, "%s", kill_at);
    snprintf(root, sizeof root, "%s/", folder);
}

__attribute__((constructor)) static void start(void) {
    pthread_atfork(lock_process, unlock_process, unlock_process);
    const char *folder = getenv("FILE_RECORDER_ROOT"), *log = getenv("FILE_RECORDER_LOG"), *kill_at = getenv("FILE_RECORDER_KILL");
    if (folder && log) file_recorder_arm(folder, log, kill_at ? kill_at : "");
}

static void record(int operation, int64_t inode, int64_t offset, const char *one, const char *two, const void *data, size_t size) {
    int number = errno;
    struct head head = {inode, offset, (int64_t)size, operation, getpid(), strlen(one), strlen(two)};
    size_t paths = sizeof head + head.length_1 + head.length_2, total = paths + (data ? size : 0);
    char *text = malloc(total);
    memcpy(text, &head, sizeof head);
    memcpy(text + sizeof head, one, head.length_1);
    memcpy(text + sizeof head + head.length_1, two, head.length_2);
    if (data) memcpy(text + paths, data, size);
    for (size_t done = 0; done < total;) {
        ssize_t more = syscall(SYS_write, log_file, text + done, total - done);
        if (more <= 0) abort();
        done += more;
    }
    free(text);
    if (operation == FSYNC && kill_path[0] && strstr(one, kill_path)) kill(getpid(), SIGKILL);
    errno = number;
}

static int is_inside(const char *path) { return root[0] && strncmp(path, root, strlen(root)) == 0; }

static const char *path_of(int file, char *path) {
    char link[64];
    if (!root[0] || file < 0) return NULL;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length <= 0) return NULL;
    path[length] = 0;
    return is_inside(path) || strncmp(path, root, strlen(root) - 1) == 0 ? path : NULL;
}

/* The absolute path, if it is inside; NULL otherwise. */
static const char *absolute(int folder, const char *name, char *path) {
    if (!root[0] || !name) return NULL;
    if (name[0] == '/') snprintf(path, PATH_MAX, "%s", name);
    else {
        char base[PATH_MAX];
        if (folder == AT_FDCWD) { if (!getcwd(base, sizeof base)) return NULL; }
        else if (!path_of(folder, base)) return NULL;
        if (snprintf(path, PATH_MAX, "%s/%s", base, name) >= PATH_MAX) return NULL;
    }
    return is_inside(path) ? path : NULL;
}

static int64_t inode_of(int file) { struct stat status; return fstat(file, &status) ? 0 : (int64_t)status.st_ino; }

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* ---- files that begin or become shorter ---- */

#define OPENED(path, truncates, CALL, NUMBER) \
    struct stat before; \
    begin(); \
    int existed = stat(path, &before) == 0; \
    CALL; \
    int file = NUMBER; \
    if (file >= 0 && !existed) record(CREATE, inode_of(file), 0, path, "", NULL, 0); \
    else if (file >= 0 && (truncates) && before.st_size) record(TRUNCATE, inode_of(file), 0, path, "", NULL, 0); \
    end();

#define MODE mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }
#define OPEN(name, AT, FOLDER, ARGUMENTS, PARAMETERS) \
    int name PARAMETERS { \
        char space[PATH_MAX]; \
        MODE REAL(name); \
        const char *path = flags & (O_CREAT | O_TRUNC) ? absolute(FOLDER, file_name, space) : NULL; \
        if (!path) return real ARGUMENTS; \
        OPENED(path, flags & O_TRUNC, int result = real ARGUMENTS, result) \
        return result; \
    }
OPEN(open, , AT_FDCWD, (file_name, flags, mode), (const char *file_name, int flags, ...))
OPEN(open64, , AT_FDCWD, (file_name, flags, mode), (const char *file_name, int flags, ...))
OPEN(openat, at, folder, (folder, file_name, flags, mode), (int folder, const char *file_name, int flags, ...))
OPEN(openat64, at, folder, (folder, file_name, flags, mode), (int folder, const char *file_name, int flags, ...))

#define FOPEN(name) \
    FILE *name(const char *file_name, const char *how) { \
        char space[PATH_MAX]; \
        REAL(name); \
        const char *path = how[0] == 'r' ? NULL : absolute(AT_FDCWD, file_name, space); \
        if (!path) return real(file_name, how); \
        OPENED(path, how[0] == 'w', FILE *result = real(file_name, how), result ? fileno(result) : -1) \
        return result; \
    }
FOPEN(fopen)
FOPEN(fopen64)

int creat(const char *path, mode_t mode) { return open(path, O_WRONLY | O_CREAT | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return open64(path, O_WRONLY | O_CREAT | O_TRUNC, mode); }

#define FTRUNCATE(name, type) \
    int name(int file, type size) { \
        char space[PATH_MAX]; \
        REAL(name); \
        const char *path = path_of(file, space); \
        if (!path) return real(file, size); \
        begin(); \
        int result = real(file, size); \
        if (!result) record(TRUNCATE, inode_of(file), size, path, "", NULL, 0); \
        end(); \
        return result; \
    }
FTRUNCATE(ftruncate, off_t)
FTRUNCATE(ftruncate64, off64_t)

/* ---- data ---- */

static void record_write(int file, const char *path, off64_t offset, const void *data, ssize_t size) {
    void *copy = NULL;
    if (!data) { /* the kernel copied it: it is read back */
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", file);
        int again = syscall(SYS_openat, AT_FDCWD, link, O_RDONLY);
        data = copy = malloc(size);
        if (again < 0 || syscall(SYS_pread64, again, copy, size, offset) != size) abort();
        syscall(SYS_close, again);
    }
    record(WRITE, inode_of(file), offset, path, "", data, size);
    free(copy);
}

/* offset < 0: the file's own position, after the call. */
#define WRITTEN(file, at, data, CALL) \
    char space[PATH_MAX]; \
    const char *path = path_of(file, space); \
    if (!path) return CALL; \
    begin(); \
    ssize_t result = CALL; \
    if (result > 0) record_write(file, path, (at) < 0 ? lseek64(file, 0, SEEK_CUR) - result : (at), data, result); \
    end(); \
    return result;

ssize_t write(int file, const void *data, size_t size) { REAL(write); WRITTEN(file, -1, data, real(file, data, size)) }
ssize_t pwrite(int file, const void *data, size_t size, off_t at) { REAL(pwrite); WRITTEN(file, at, data, real(file, data, size, at)) }
ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) { REAL(pwrite64); WRITTEN(file, at, data, real(file, data, size, at)) }
ssize_t writev(int file, const struct iovec *parts, int number) { REAL(writev); WRITTEN(file, -1, NULL, real(file, parts, number)) }
ssize_t pwritev(int file, const struct iovec *parts, int number, off_t at) { REAL(pwritev); WRITTEN(file, at, NULL, real(file, parts, number, at)) }
ssize_t pwritev64(int file, const struct iovec *parts, int number, off64_t at) { REAL(pwritev64); WRITTEN(file, at, NULL, real(file, parts, number, at)) }
ssize_t sendfile(int file, int from, off_t *at, size_t size) { REAL(sendfile); WRITTEN(file, -1, NULL, real(file, from, at, size)) }
ssize_t sendfile64(int file, int from, off64_t *at, size_t size) { REAL(sendfile64); WRITTEN(file, -1, NULL, real(file, from, at, size)) }
ssize_t copy_file_range(int from, off64_t *at, int file, off64_t *to, size_t size, unsigned flags) {
    REAL(copy_file_range);
    off64_t offset = to ? *to : -1;
    WRITTEN(file, offset, NULL, real(from, at, file, to, size, flags))
}

#define REFUSED(name, PARAMETERS, ARGUMENTS) \
    int name PARAMETERS { \
        char space[PATH_MAX]; \
        REAL(name); \
        const char *path = path_of(file, space); \
        if (path) { begin(); record(UNSUPPORTED, inode_of(file), 0, path, #name, NULL, 0); end(); } \
        return real ARGUMENTS; \
    }
REFUSED(fallocate, (int file, int how, off_t at, off_t size), (file, how, at, size))
REFUSED(fallocate64, (int file, int how, off64_t at, off64_t size), (file, how, at, size))
REFUSED(posix_fallocate, (int file, off_t at, off_t size), (file, at, size))
REFUSED(posix_fallocate64, (int file, off64_t at, off64_t size), (file, at, size))

/* ---- flushes: sync_file_range promises nothing after a power cut, so it is none ---- */

#define FLUSH(name) \
    int name(int file) { \
        char space[PATH_MAX]; \
        REAL(name); \
        const char *path = path_of(file, space); \
        if (!path) return real(file); \
        begin(); \
        int result = real(file); \
        if (!result) record(FSYNC, inode_of(file), 0, path, "", NULL, 0); \
        end(); \
        return result; \
    }
FLUSH(fsync)
FLUSH(fdatasync)

/* ---- names ---- */

#define NAMED(operation, one, two, inode, CALL) \
    char space[PATH_MAX], more[PATH_MAX]; \
    (void)more; \
    const char *path = one, *other = two; \
    if (!path && !other) return CALL; \
    begin(); \
    int result = CALL; \
    if (!result) record(path && other ? operation : UNSUPPORTED, inode, 0, path ? path : "", other ? other : "outside", NULL, 0); \
    end(); \
    return result;
#define INODE(path) ({ struct stat status; stat(path, &status) ? 0 : (int64_t)status.st_ino; })
#define AT(folder, name) absolute(folder, name, space)
#define TO(folder, name) absolute(folder, name, more)

int mkdir(const char *name, mode_t mode) { REAL(mkdir); NAMED(MKDIR, AT(AT_FDCWD, name), path ? "" : NULL, INODE(path), real(name, mode)) }
int mkdirat(int folder, const char *name, mode_t mode) { REAL(mkdirat); NAMED(MKDIR, AT(folder, name), path ? "" : NULL, INODE(path), real(folder, name, mode)) }
int rename(const char *old, const char *new) { REAL(rename); NAMED(RENAME, AT(AT_FDCWD, old), TO(AT_FDCWD, new), 0, real(old, new)) }
int renameat(int from, const char *old, int to, const char *new) { REAL(renameat); NAMED(RENAME, AT(from, old), TO(to, new), 0, real(from, old, to, new)) }
int unlink(const char *name) { REAL(unlink); NAMED(UNLINK, AT(AT_FDCWD, name), path ? "" : NULL, 0, real(name)) }
int rmdir(const char *name) { REAL(rmdir); NAMED(RMDIR, AT(AT_FDCWD, name), path ? "" : NULL, 0, real(name)) }
int unlinkat(int folder, const char *name, int flags) { REAL(unlinkat); NAMED(flags & AT_REMOVEDIR ? RMDIR : UNLINK, AT(folder, name), path ? "" : NULL, 0, real(folder, name, flags)) }
int link(const char *old, const char *new) { REAL(link); NAMED(LINK, AT(AT_FDCWD, old), TO(AT_FDCWD, new), 0, real(old, new)) }
int linkat(int from, const char *old, int to, const char *new, int flags) { REAL(linkat); NAMED(LINK, AT(from, old), TO(to, new), 0, real(from, old, to, new, flags)) }
int symlink(const char *target, const char *name) { REAL(symlink); NAMED(SYMLINK, AT(AT_FDCWD, name), path ? target : NULL, 0, real(target, name)) }
int symlinkat(const char *target, int folder, const char *name) { REAL(symlinkat); NAMED(SYMLINK, AT(folder, name), path ? target : NULL, 0, real(target, folder, name)) }
int remove(const char *name) {
    struct stat status;
    if (lstat(name, &status)) return -1;
    return S_ISDIR(status.st_mode) ? rmdir(name) : unlink(name);
}

/* ---- mappings ---- */

void *mmap(void *address, size_t size, int protection, int flags, int file, off_t offset) {
    char space[PATH_MAX];
    const char *path = (flags & MAP_SHARED) && (protection & PROT_WRITE) ? path_of(file, space) : NULL;
    if (path) { begin(); record(MAPPING, inode_of(file), offset, path, "", NULL, 0); end(); }
    return (void *)syscall(SYS_mmap, address, size, protection, flags, file, offset);
}
void *mmap64(void *address, size_t size, int protection, int flags, int file, off64_t offset) { return mmap(address, size, protection, flags, file, offset); }
