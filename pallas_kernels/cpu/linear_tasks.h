// A product cut into tasks for a pool of threads: each has some rows of w, so that these are read once in all.
#pragma once

#include "kernels.h"
#include "parallel.h"

namespace tierax {

// Of one core, roughly: what the sizes of tasks are reckoned with.
constexpr double kBytesPerNs = 16, kFlopsPerNs = 80;
// Shorter tasks are not worth a wake-up, which takes some microseconds.
constexpr double kLeastTaskNs = 15000;
// Enough for threads to finish together, though one may be late.
constexpr int64_t kTasksPerThread = 4;
// Tasks own whole tiles of any instruction set.
constexpr int64_t kColumnStep = 12;

template <typename Pool>
void run_linear(const Kernels& kernels, Pool& pool, const Linear& args) {
  const double width = args.type == WeightType::kF32 ? 4 : args.type == WeightType::kBf16 ? 2 : 1;
  const double read_ns = args.k * width / kBytesPerNs, compute_ns = 2.0 * args.m * args.k / kFlopsPerNs;
  const int64_t least = static_cast<int64_t>(kLeastTaskNs / (read_ns > compute_ns ? read_ns : compute_ns));
  const int64_t share = args.n / (kTasksPerThread * pool.num_threads());
  const int64_t columns = ((share > least ? share : least) / kColumnStep + 1) * kColumnStep;

  parallel_for(pool, (args.n + columns - 1) / columns, [&](int64_t task) {
    const int64_t begin = task * columns, end = begin + columns;
    kernels.linear(args, begin, end < args.n ? end : args.n);
  });
}

}  // namespace tierax
