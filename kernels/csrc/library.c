/* The entry points of the library: the kernel table, the number of threads, struct sizes. */
#include "colibri.h"
#include "pool.h"
#include "formats.h"
#include "processor.h"

#define EXPORT __attribute__((visibility("default")))

/* -------------------------------------------------------------------------------------------------------------------
 * A plain read of memory, for benchmarks */

#define READ_BYTES (1 << 20)

typedef struct {
    const uint8_t *data;
    int64_t bytes;
    _Atomic int64_t sum;
} read_job_t;

static int read_item(void *context, int64_t item) {
    read_job_t *job = context;
    const uint8_t *p = job->data + item * READ_BYTES;
    int64_t n = job->bytes - item * READ_BYTES < READ_BYTES ? job->bytes - item * READ_BYTES : READ_BYTES;
    vi a = vi_zero(), b = vi_zero();
    for (int64_t i = 0; i + 128 <= n; i += 128) {
        __builtin_prefetch(p + i + PAGE_AHEAD);
        __builtin_prefetch(p + i + PAGE_AHEAD + 64);
        a = vi_add(a, vi_load((const int32_t *)(p + i))), b = vi_add(b, vi_load((const int32_t *)(p + i + 64)));
    }
    int32_t lanes[16];
    vi_store(lanes, vi_add(a, b));
    job->sum += lanes[0] ^ lanes[7];
    return 0;
}

static int64_t read_memory(const uint8_t *data, int64_t bytes) {
    read_job_t job = {data, bytes, 0};
    run_items(read_item, &job, (bytes + READ_BYTES - 1) / READ_BYTES);
    return job.sum;
}

#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)
static const kernels_t KERNELS = {
    TEXT(NAME), linear, experts, gated_mlp, add_weighted, quantize_kv, mla, gqa, index_scores, top_k_positions, rms_norm, layer_norm, rope,
    route, group_by_expert, logprobs, all_finite, read_memory,
};

/* The kernels, or NULL where this processor lacks the instructions they were compiled for. */
EXPORT const kernels_t *colibri_kernels(void) { return processor_is_able() ? &KERNELS : 0; }

EXPORT void colibri_set_threads(int threads) { set_threads(threads); }

/* Sizes of the structs in the order of colibri.h, for the Python side to check. */
EXPORT int colibri_size(int i) {
    const int sizes[] = {sizeof(weight_t), sizeof(linear_t), sizeof(experts_t), sizeof(mlp_t), sizeof(add_weighted_t),
                         sizeof(kv_rows_t), sizeof(mla_t), sizeof(gqa_t), sizeof(index_t), sizeof(top_k_t), sizeof(norm_t), sizeof(rope_t),
                         sizeof(route_t), sizeof(group_t), sizeof(logprobs_t), sizeof(values_t), sizeof(kernels_t)};
    return i >= 0 && i < (int)(sizeof sizes / sizeof *sizes) ? sizes[i] : 0;
}
