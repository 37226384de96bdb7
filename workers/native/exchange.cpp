// Ranks on one machine put down tensors for each other in memory that they share. See workers/distributed/shm_group.py, which
// mirrors `Exchange`.
//
// Every rank has a line of 64 bytes, and two places for tensors, which it uses in turn. It says in its line how many
// tensors it has put down. One that has put down number n has taken all it wanted of number n - 1; so the places of
// n - 1 may be written over once everybody has put down n.
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
    int64_t file, rank, size, place_bytes;
    int64_t number;       // of this tensor, from 1
    const char* given;
    char* taken;          // of ranks first .. last - 1, one behind the other
    int64_t bytes, first, last;
    int64_t timeout_ns;
    int64_t outcome;
};

}  // extern "C"

namespace {

constexpr int64_t kLine = 64, kHeader = 4096;
constexpr int kLooks = 64;                 // at a peer's line before another thread may run
constexpr int64_t kAwakeNs = 200'000;      // so long nobody sleeps: waking up takes as long
constexpr int64_t kPeersEveryNs = 5'000'000;
constexpr long kSleepNs = 50'000;

struct Line {
    int64_t count, has_left;
    int64_t bytes[2];  // of what lies in each place
};

inline Line* line_of(const Exchange& call, int64_t rank) {
    return reinterpret_cast<Line*>(call.memory + rank * kLine);
}

inline char* place_of(const Exchange& call, int64_t rank) {
    return call.memory + kHeader + (2 * rank + call.number % 2) * call.place_bytes;
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

// A rank holds its byte of the file locked for as long as it lives: the kernel lets go for those that are killed.
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

// Wait until a rank has put down `count` tensors.
Outcome wait_for(const Exchange& call, int64_t rank, int64_t count) {
    const Line* line = line_of(call, rank);
    int64_t started = 0, looked = 0;
    for (;;) {
        for (int i = 0; i < kLooks; ++i)
            if (__atomic_load_n(&line->count, __ATOMIC_ACQUIRE) >= count) return kDone;
        if (has_left(call, rank) || has_left(call, call.rank)) return kLeft;
        const int64_t now = now_ns();
        if (!started) started = looked = now;
        if (now - started > call.timeout_ns) return kTimedOut;
        if (now - looked > kPeersEveryNs) {
            looked = now;
            if (!is_alive(call, rank) && __atomic_load_n(&line->count, __ATOMIC_ACQUIRE) < count) return kDied;
        }
        if (now - started < kAwakeNs) {
            sched_yield();
        } else {
            const timespec nap{0, kSleepNs};
            nanosleep(&nap, nullptr);
        }
    }
}

Outcome exchange(const Exchange& call) {
    for (int64_t r = 0; r < call.size; ++r)
        if (const Outcome found = wait_for(call, r, call.number - 1)) return found;
    std::memcpy(place_of(call, call.rank), call.given, static_cast<size_t>(call.bytes));
    line_of(call, call.rank)->bytes[call.number % 2] = call.bytes;
    __atomic_store_n(&line_of(call, call.rank)->count, call.number, __ATOMIC_RELEASE);
    for (int64_t r = call.first; r < call.last; ++r) {
        if (const Outcome found = wait_for(call, r, call.number)) return found;
        if (line_of(call, r)->bytes[call.number % 2] != call.bytes) return kUneven;
        std::memcpy(call.taken + (r - call.first) * call.bytes, place_of(call, r), static_cast<size_t>(call.bytes));
    }
    return kDone;
}

}  // namespace

extern "C" void slipstream_join(Exchange* call) { call->outcome = take_lock(*call) ? kDone : kImpossible; }

extern "C" void slipstream_exchange(Exchange* call) { call->outcome = exchange(*call); }

extern "C" void slipstream_leave(Exchange* call) {
    __atomic_store_n(&line_of(*call, call->rank)->has_left, 1, __ATOMIC_RELEASE);
}
