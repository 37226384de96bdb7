// Exchange of tensors between ranks on one machine through shared memory. The struct `Exchange` is mirrored in
// workers/distributed/shm_group.py.
//
// Every rank has a line of 64 bytes and two buffers for tensors, which it uses in turn. Its line holds the number of
// tensors it has published. A rank that has published tensor n has read all it needs of number n - 1. So the buffers of
// n - 1 may be overwritten once all ranks have published n.
#include <fcntl.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

extern "C" {

enum Outcome : int64_t { kDone = 0, kTimedOut = 1, kLeft = 2, kDied = 3, kImpossible = 4, kUneven = 5 };

struct Exchange {
    char* memory;
    int64_t file, rank, size, buffer_bytes;
    int64_t number;       // of this tensor, from 1
    const char* given;
    char* taken;          // the tensors of ranks first .. last - 1, concatenated
    int64_t bytes, first, last;
    int64_t timeout_ns;
    int64_t outcome;
};

}  // extern "C"

namespace {

constexpr int64_t kLine = 64, kHeader = 4096;
constexpr int kPolls = 64;                 // of a peer's line before another thread may run
constexpr int64_t kAwakeNs = 200'000;      // before sleeping: waking up takes as long
constexpr int64_t kPeersEveryNs = 5'000'000;
constexpr long kSleepNs = 50'000;

struct Line {
    int64_t count, has_left;
    int64_t bytes[2];  // of the tensor in each buffer
};

inline Line* line_of(const Exchange& call, int64_t rank) {
    return reinterpret_cast<Line*>(call.memory + rank * kLine);
}

inline char* buffer_of(const Exchange& call, int64_t rank) {
    return call.memory + kHeader + (2 * rank + call.number % 2) * call.buffer_bytes;
}

inline int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

#ifdef F_OFD_SETLK
struct flock lock_of(int64_t rank) {
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = rank;
    lock.l_len = 1;
    return lock;
}

// A rank keeps its byte of the file locked. The kernel releases the lock of a process that is killed.
bool take_lock(const Exchange& call) {
    struct flock lock = lock_of(call.rank);
    return fcntl(static_cast<int>(call.file), F_OFD_SETLK, &lock) == 0;
}

bool is_alive(const Exchange& call, int64_t rank) {
    struct flock lock = lock_of(rank);
    return fcntl(static_cast<int>(call.file), F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}
#else
bool take_lock(const Exchange&) { return false; }
bool is_alive(const Exchange&, int64_t) { return true; }
#endif

inline bool has_left(const Exchange& call, int64_t rank) {
    return __atomic_load_n(&line_of(call, rank)->has_left, __ATOMIC_ACQUIRE);
}

// Waits until a rank has published `count` tensors.
Outcome wait_for(const Exchange& call, int64_t rank, int64_t count) {
    const Line* line = line_of(call, rank);
    int64_t started = 0, checked = 0;
    for (;;) {
        for (int i = 0; i < kPolls; ++i)
            if (__atomic_load_n(&line->count, __ATOMIC_ACQUIRE) >= count) return kDone;
        if (has_left(call, rank) || has_left(call, call.rank)) return kLeft;
        const int64_t now = now_ns();
        if (!started) started = checked = now;
        if (now - started > call.timeout_ns) return kTimedOut;
        if (now - checked > kPeersEveryNs) {
            checked = now;
            if (!is_alive(call, rank) && __atomic_load_n(&line->count, __ATOMIC_ACQUIRE) < count) return kDied;
        }
        if (now - started < kAwakeNs) {
            sched_yield();
        } else {
            const timespec pause{0, kSleepNs};
            nanosleep(&pause, nullptr);
        }
    }
}

Outcome exchange(const Exchange& call) {
    for (int64_t r = 0; r < call.size; ++r)
        if (const Outcome found = wait_for(call, r, call.number - 1)) return found;
    std::memcpy(buffer_of(call, call.rank), call.given, static_cast<size_t>(call.bytes));
    line_of(call, call.rank)->bytes[call.number % 2] = call.bytes;
    __atomic_store_n(&line_of(call, call.rank)->count, call.number, __ATOMIC_RELEASE);
    for (int64_t r = call.first; r < call.last; ++r) {
        if (const Outcome found = wait_for(call, r, call.number)) return found;
        if (line_of(call, r)->bytes[call.number % 2] != call.bytes) return kUneven;
        std::memcpy(call.taken + (r - call.first) * call.bytes, buffer_of(call, r), static_cast<size_t>(call.bytes));
    }
    return kDone;
}

}  // namespace

extern "C" void slipstream_join(Exchange* call) { call->outcome = take_lock(*call) ? kDone : kImpossible; }

extern "C" void slipstream_exchange(Exchange* call) { call->outcome = exchange(*call); }

extern "C" void slipstream_leave(Exchange* call) {
    __atomic_store_n(&line_of(*call, call->rank)->has_left, 1, __ATOMIC_RELEASE);
}
