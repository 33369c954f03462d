// A product cut into tasks for a pool of threads.
#pragma once

#include "kernels.h"
#include "parallel.h"

namespace tierax {

// Of one core, roughly: what the sizes of tasks are reckoned with.
constexpr double kBytesPerNs = 16, kFlopsPerNs = 80;
// Long enough to be worth a wake-up, short enough that threads finish together.
constexpr double kTaskNs = 15000;
// Rows of x that one task goes over again for each tile of w stay within half of a usual L2 cache.
constexpr int64_t kBlockFloats = 65536;
// Tasks own whole tiles of any instruction set.
constexpr int64_t kColumnStep = 12;

template <typename Pool>
void run_linear(const Kernels& kernels, Pool& pool, const Linear& args) {
  const double width = args.type == WeightType::kF32 ? 4 : args.type == WeightType::kBf16 ? 2 : 1;
  const double read = args.k * width / kBytesPerNs, computed = 2.0 * args.m * args.k / kFlopsPerNs;
  const double row_ns = read > computed ? read : computed;

  const int64_t block_rows = kBlockFloats / args.k > 32 ? kBlockFloats / args.k : 32;
  const int64_t row_blocks = (args.m + block_rows - 1) / block_rows;
  int64_t columns = static_cast<int64_t>(kTaskNs * row_blocks / row_ns / kColumnStep + 1) * kColumnStep;
  const int64_t column_blocks = (args.n + columns - 1) / columns;

  parallel_for(pool, row_blocks * column_blocks, [&](int64_t task) {
    const int64_t row = task / column_blocks, column = task % column_blocks * columns;
    const int64_t end = column + columns < args.n ? column + columns : args.n;
    kernels.linear(args, {args.m * row / row_blocks, args.m * (row + 1) / row_blocks, column, end});
  });
}

}  // namespace tierax
