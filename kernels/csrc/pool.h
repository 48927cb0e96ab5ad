#pragma once
#include "colibri.h"

#define PIECE_VALUES 16384

void set_threads(int threads);
void *thread_scratch(int64_t bytes);
/* Work on each row, several to a piece: little work is one piece, which wakes no thread. `values`: of a row. */
int each_row(int (*work)(const void *call, int64_t row), const void *call, int64_t rows, int64_t values);
