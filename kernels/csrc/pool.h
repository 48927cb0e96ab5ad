/* The thread pool (pool.c). */
#pragma once
#include "colibri.h"

#define ITEM_VALUES 16384

void set_threads(int threads);
void *thread_scratch(int64_t bytes);
/* Run `work` on each row, several rows to a work item: little work is one item, which wakes no thread. `values`: numbers of
 * a row. */
int each_row(int (*work)(const void *call, int64_t row), const void *call, int64_t rows, int64_t values);
