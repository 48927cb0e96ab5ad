#pragma once
#include "colibri.h"

void set_threads(int threads);
void *thread_scratch(int64_t bytes);
