/* Thread pool. A job is a number of work items. Each thread runs the items of its own range in order, so that what it
 * prefetches beyond an item is the start of its next one, then steals from the ranges of others: on a shared machine a thread
 * may be 20 times slower than another for a moment. Idle threads spin a few microseconds, then sleep. One job at a time; a
 * caller that finds the pool busy runs its items alone. */
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define MAX_THREADS 256
#define SPINS 4000                 /* polls before a thread sleeps */
#define STACK_BYTES (1 << 20)

static pthread_mutex_t owner = PTHREAD_MUTEX_INITIALIZER; /* held by the caller whose job it is */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static int workers, sleeping;
static atomic_uint open_job;       /* number of the job that workers may join, 0 = none */
static atomic_int inside;          /* workers that have joined, or are about to check whether they may */
static item_t job_work;
static void *job_context;
static int job_ranges;
static atomic_int job_failed;
static struct {
    _Alignas(64) atomic_int_fast64_t next; /* a cache line each */
    int64_t stop;
} ranges[MAX_THREADS];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

/* The items of range number `own`, then what is left of the next ones. */
static void run_ranges(int packed) {
    for (int i = 0; i < job_ranges; i++) {
        int range = (packed + i) % job_ranges;
        for (;;) {
            int64_t item = atomic_fetch_add_explicit(&ranges[range].next, 1, memory_order_relaxed);
            if (item >= ranges[range].stop) break;
            if (job_work(job_context, item)) atomic_store(&job_failed, 1);
        }
    }
}

static int is_new(unsigned visible) {
    unsigned now = atomic_load(&open_job);
    return now && now != visible;
}

static void *worker(void *number) {
    unsigned visible = 0;
    for (;;) {
        for (int i = 0; i < SPINS && !is_new(visible); i++) pause_briefly();
        if (!is_new(visible)) {
            pthread_mutex_lock(&lock);
            sleeping++;
            while (!is_new(visible)) pthread_cond_wait(&wake, &lock);
            sleeping--;
            pthread_mutex_unlock(&lock);
        }
        /* Count in first, then check: the caller closes the job and then waits for those inside. So it never waits for a
         * worker that was descheduled before it took an item. */
        atomic_fetch_add(&inside, 1);
        unsigned now = atomic_load(&open_job);
        if (now && now != visible) {
            visible = now;
            if ((intptr_t)number < job_ranges) run_ranges((int)(intptr_t)number);
        }
        atomic_fetch_sub(&inside, 1);
    }
    return NULL;
}

/* A forked child has no workers: it runs items alone. */
static void in_child(void) {
    workers = sleeping = 0;
    atomic_store(&inside, 0);
    pthread_mutex_init(&owner, NULL);
    pthread_mutex_init(&lock, NULL);
}
static void watch_forks(void) { pthread_atfork(NULL, NULL, in_child); }

/* Work on `threads` threads from now on, the caller's included. Threads are never taken away: more than `workers` + 1 starts
 * some, fewer leaves the rest asleep. */
static int wanted = 1;
void set_threads(int threads) {
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&owner);
    wanted = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
    while (workers < wanted - 1) {
        pthread_attr_t attributes;
        pthread_t thread;
        pthread_attr_init(&attributes);
        pthread_attr_setstacksize(&attributes, STACK_BYTES);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        int failed = pthread_create(&thread, &attributes, worker, (void *)(intptr_t)(workers + 1));
        pthread_attr_destroy(&attributes);
        if (failed) break;
        workers++;
    }
    pthread_mutex_unlock(&owner);
}

int run_items(item_t work, void *context, int64_t items) {
    int failed = 0;
    if (items < 2 || wanted < 2 || !workers || pthread_mutex_trylock(&owner)) {
        for (int64_t item = 0; item < items; item++) failed |= work(context, item);
        return failed;
    }
    static unsigned last;
    job_work = work, job_context = context, job_failed = 0, job_ranges = items < wanted ? (int)items : wanted;
    for (int i = 0; i < job_ranges; i++) {
        atomic_store_explicit(&ranges[i].next, items * i / job_ranges, memory_order_relaxed);
        ranges[i].stop = items * (i + 1) / job_ranges;
    }
    last = last + 1 ? last + 1 : 1;
    pthread_mutex_lock(&lock);
    atomic_store(&open_job, last);
    if (sleeping) pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&lock);
    run_ranges(0);
    atomic_store(&open_job, 0);
    for (int i = 0; atomic_load(&inside); i++)
        if (i < SPINS) pause_briefly(); else sched_yield();
    failed = job_failed;
    pthread_mutex_unlock(&owner);
    return failed;
}

/* Memory of the calling thread, at least `bytes` large, kept for its next call; NULL out of memory. */
void *thread_scratch(int64_t bytes) {
    static _Thread_local void *memory;
    static _Thread_local int64_t size;
    if (bytes > size) {
        free(memory);
        size = 0;
        if (posix_memalign(&memory, 64, (size_t)bytes)) return memory = NULL;
        size = bytes;
    }
    return memory;
}

typedef struct {
    int (*work)(const void *call, int64_t row); /* 1: no memory */
    const void *call;
    int64_t rows, each;
} rows_job_t;

static int rows_item(void *context, int64_t item) {
    rows_job_t *job = context;
    int failed = 0;
    int64_t stop = (item + 1) * job->each < job->rows ? (item + 1) * job->each : job->rows;
    for (int64_t row = item * job->each; row < stop; row++) failed |= job->work(job->call, row);
    return failed;
}

int each_row(int (*work)(const void *, int64_t), const void *call, int64_t rows, int64_t values) {
    rows_job_t job = {work, call, rows, values < ITEM_VALUES ? ITEM_VALUES / (values ? values : 1) : 1};
    return run_items(rows_item, &job, (rows + job.each - 1) / job.each);
}
