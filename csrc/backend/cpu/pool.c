/* pool.c - the one thread pool of the process.
 *
 * A region is a function, a context and a number of chunks. Threads claim chunks by moving one
 * atomic ticket (region number << 32 | next chunk). The caller claims too, and at the end waits
 * only for chunks that somebody has claimed: a worker that never got a processor delays nothing.
 * One region runs at a time; a caller that finds the pool busy runs its chunks itself. Workers
 * spin for a moment after a region, then sleep. They start with the first region that wants them,
 * and a forked child, which has none of them, starts its own.
 */
#if defined(__linux__)
#define _GNU_SOURCE /* sched_getaffinity */
#endif
#include "cpu.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <sched.h>
#endif

enum { MAX_THREADS = 256, SPIN_NANOSECONDS = 40000 };
#define CLOSED 0xffffffffu

static struct {
    pthread_mutex_t lock; /* guards n_wanted, sleeping and the workers' wake-up */
    pthread_cond_t wake;
    pthread_t threads[MAX_THREADS];
    int n_wanted;  /* threads of a region, the caller's included; 0: not yet known */
    int n_started; /* workers running; changed while busy */
    atomic_bool busy;
    atomic_bool quit;
    atomic_int n_sleeping;
    /* the region: fields change only while the ticket is closed */
    _Atomic uint64_t ticket;
    _Atomic(cpu_work) work;
    _Atomic(void *) context;
    atomic_size_t n_chunks;
    atomic_size_t n_done;
    atomic_int n_allowed; /* workers from this number on have no scratch and stay out */
    atomic_bool stop;     /* chunks still to come are claimed and skipped */
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .ticket = CLOSED};

static uint64_t now_nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Whole processors that the cgroup's quota allows, or 0 for no quota. */
static int quota_processors(void) {
    long long quota = -1, period = 0;
    FILE *f = fopen("/sys/fs/cgroup/cpu.max", "r");
    if (f) {
        if (fscanf(f, "%lld %lld", &quota, &period) != 2) quota = -1;
        fclose(f);
    } else if ((f = fopen("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "r"))) {
        if (fscanf(f, "%lld", &quota) != 1) quota = -1;
        fclose(f);
        if ((f = fopen("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "r"))) {
            if (fscanf(f, "%lld", &period) != 1) period = 0;
            fclose(f);
        }
    }
    if (quota <= 0 || period <= 0) return 0;
    return quota / period < 1 ? 1 : (int)(quota / period);
}

static int default_threads(void) {
    const char *text = getenv("KVCOMM_NUM_THREADS");
    if (!text) text = getenv("OMP_NUM_THREADS");
    long n = text ? strtol(text, NULL, 10) : 0;
    if (n < 1) {
        n = sysconf(_SC_NPROCESSORS_ONLN);
#if defined(__linux__)
        cpu_set_t set;
        if (sched_getaffinity(0, sizeof set, &set) == 0) n = CPU_COUNT(&set);
#endif
        int quota = quota_processors();
        if (quota && quota < n) n = quota;
    }
    return n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : (int)n;
}

/* Claims and runs chunks of the open region until there are none. s: the caller's, else NULL. */
static void run_chunks(int worker, kvc_stream *s) {
    for (;;) {
        uint64_t ticket = atomic_load(&pool.ticket);
        size_t chunk = (uint32_t)ticket;
        cpu_work work = atomic_load(&pool.work);
        void *context = atomic_load(&pool.context);
        if (chunk == CLOSED || chunk >= atomic_load(&pool.n_chunks)) return;
        if (worker >= atomic_load(&pool.n_allowed)) return;
        /* success means that the region is still the one whose fields were just read */
        if (!atomic_compare_exchange_weak(&pool.ticket, &ticket, ticket + 1)) continue;
        if (!atomic_load(&pool.stop)) {
            work(context, chunk, worker);
            if (s && s->interrupt && s->interrupt(s->interrupt_context)) {
                atomic_store(&pool.stop, true);
            }
        }
        atomic_fetch_add(&pool.n_done, 1);
    }
}

/* Nothing to do yet: the region is one that was seen, or still being set up. */
static bool nothing_new(uint64_t seen) {
    uint64_t ticket = atomic_load(&pool.ticket);
    return (ticket >> 32 == seen || (uint32_t)ticket == CLOSED) && !atomic_load(&pool.quit);
}

static void wait_for_region(uint64_t seen) {
    uint64_t start = now_nanoseconds();
    while (nothing_new(seen)) {
        pause_briefly();
        if (now_nanoseconds() - start < SPIN_NANOSECONDS) continue;
        pthread_mutex_lock(&pool.lock);
        atomic_fetch_add(&pool.n_sleeping, 1);
        while (nothing_new(seen)) {
            pthread_cond_wait(&pool.wake, &pool.lock);
        }
        atomic_fetch_sub(&pool.n_sleeping, 1);
        pthread_mutex_unlock(&pool.lock);
    }
}

static void *worker_main(void *argument) {
    int worker = (int)(intptr_t)argument;
    uint64_t seen = 0;
    while (!atomic_load(&pool.quit)) {
        wait_for_region(seen);
        uint64_t ticket = atomic_load(&pool.ticket);
        if ((uint32_t)ticket != CLOSED) seen = ticket >> 32;
        run_chunks(worker, NULL);
    }
    return NULL;
}

static void wake_sleepers(void) {
    if (atomic_load(&pool.n_sleeping) == 0) return;
    pthread_mutex_lock(&pool.lock);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
}

static void after_fork_in_child(void) {
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pool.n_started = 0;
    atomic_store(&pool.n_sleeping, 0);
    atomic_store(&pool.busy, false);
    atomic_store(&pool.quit, false);
    atomic_store(&pool.ticket, (uint64_t)CLOSED);
}

/* Before anything else: a fork may come while another thread holds the lock for the first time. */
__attribute__((constructor)) static void set_at_fork(void) {
    pthread_atfork(NULL, NULL, after_fork_in_child);
}

/* Called with the pool busy. Starts what is missing; fewer workers than wanted is no error. */
static void start_workers(void) {
    pthread_mutex_lock(&pool.lock);
    while (pool.n_started + 1 < pool.n_wanted) {
        intptr_t worker = pool.n_started + 1;
        if (pthread_create(&pool.threads[pool.n_started], NULL, worker_main, (void *)worker)) {
            pool.n_wanted = pool.n_started + 1;
            break;
        }
        pool.n_started++;
    }
    pthread_mutex_unlock(&pool.lock);
}

static void stop_workers(void) {
    atomic_store(&pool.quit, true);
    pthread_mutex_lock(&pool.lock);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    for (int i = 0; i < pool.n_started; i++) pthread_join(pool.threads[i], NULL);
    pool.n_started = 0;
    atomic_store(&pool.quit, false);
}

int cpu_threads(void) {
    pthread_mutex_lock(&pool.lock);
    if (!pool.n_wanted) pool.n_wanted = default_threads();
    int n = pool.n_wanted;
    pthread_mutex_unlock(&pool.lock);
    return n;
}

int kvc_get_num_threads(void) {
    return cpu_threads();
}

kvc_status kvc_set_num_threads(int n, kvc_error *err) {
    if (n < 0 || n > MAX_THREADS) {
        return kvc_fail(err, KVC_ERROR_VALUE, "number of threads must be 0 to %d, not %d",
                        MAX_THREADS, n);
    }
    bool idle = false;
    while (!atomic_compare_exchange_weak(&pool.busy, &idle, true)) {
        idle = false;
        struct timespec moment = {0, 100000};
        nanosleep(&moment, NULL);
    }
    stop_workers();
    pthread_mutex_lock(&pool.lock);
    pool.n_wanted = n ? n : default_threads();
    pthread_mutex_unlock(&pool.lock);
    atomic_store(&pool.busy, false);
    return KVC_OK;
}

static void run_region(kvc_stream *s, cpu_work work, void *context, size_t n_chunks) {
    uint64_t region = (atomic_load(&pool.ticket) >> 32) + 1;
    atomic_store(&pool.ticket, region << 32 | CLOSED);
    atomic_store(&pool.work, work);
    atomic_store(&pool.context, context);
    atomic_store(&pool.n_chunks, n_chunks);
    atomic_store(&pool.n_done, 0);
    atomic_store(&pool.n_allowed, s->scratch_workers ? s->scratch_workers : MAX_THREADS);
    atomic_store(&pool.stop, false);
    atomic_store(&pool.ticket, region << 32);
    wake_sleepers();
    run_chunks(0, s);
    for (unsigned spins = 0; atomic_load(&pool.n_done) < n_chunks; spins++) {
        pause_briefly();
        if (spins > 2000) sched_yield();
    }
}

kvc_status cpu_parallel(kvc_stream *s, cpu_work work, void *context, size_t n_chunks,
                        kvc_error *err) {
    bool stopped = false, idle = false;
    if (n_chunks > 1 && n_chunks < CLOSED && cpu_threads() > 1 &&
        atomic_compare_exchange_strong(&pool.busy, &idle, true)) {
        start_workers();
        run_region(s, work, context, n_chunks);
        stopped = atomic_load(&pool.stop) || (s->interrupt && s->interrupt(s->interrupt_context));
        atomic_store(&pool.busy, false);
    } else {
        for (size_t chunk = 0; chunk < n_chunks && !stopped; chunk++) {
            work(context, chunk, 0);
            stopped = s->interrupt && s->interrupt(s->interrupt_context);
        }
    }
    if (stopped) return kvc_fail(err, KVC_ERROR_INTERRUPTED, "interrupted");
    return KVC_OK;
}
