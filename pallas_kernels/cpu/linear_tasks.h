// A product cut into tasks for a pool of threads: each has some rows of w, so that these are read once in all.
#pragma once

#include <vector>

#include "kernels.h"
#include "parallel.h"

namespace tierax {

// Of one core, roughly: what the sizes of tasks are reckoned with.
constexpr double kBytesPerNs = 16, kFlopsPerNs = 80;
// Shorter tasks are not worth what it takes to begin one.
constexpr double kLeastTaskNs = 2000;
// Products that take less than twice this are not worth a second thread. It need not be woken in most cases: in a decode
// step it waits nearby (see `Lounge`).
constexpr double kLeastShareNs = 6000;
// Tasks own whole tiles of any instruction set.
constexpr int64_t kColumnStep = 12;

// Where tasks begin, and the end of the last one. Each takes a share of what is left (guided self-scheduling,
// Polychronopoulos and Kuck, 1987): few in all, and threads end together though one may have come late.
inline std::vector<int64_t> cut(int64_t columns, int64_t threads, int64_t least) {
  std::vector<int64_t> begins{0};
  while (begins.back() < columns) {
    const int64_t left = columns - begins.back(), share = left / (2 * threads);
    const int64_t size = ((share > least ? share : least) + kColumnStep - 1) / kColumnStep * kColumnStep;
    begins.push_back(size < left ? begins.back() + size : columns);
  }
  return begins;
}

template <typename Pool>
void run_linear(const Kernels& kernels, Pool& pool, const Linear& args) {
  const double width = args.type == WeightType::kF32 ? 4 : args.type == WeightType::kBf16 ? 2 : 1;
  const double read_ns = args.k * width / kBytesPerNs, compute_ns = 2.0 * args.m * args.k / kFlopsPerNs;
  const double column_ns = read_ns > compute_ns ? read_ns : compute_ns;
  const int64_t shares = static_cast<int64_t>(args.n * column_ns / kLeastShareNs);
  const int64_t threads = shares < pool.num_threads() ? shares : pool.num_threads();
  if (threads < 2) return kernels.linear(args, 0, args.n);
  const std::vector<int64_t> begins = cut(args.n, threads, static_cast<int64_t>(kLeastTaskNs / column_ns));
  parallel_for(pool, begins.size() - 1,
               [&](int64_t task) { kernels.linear(args, begins[task], begins[task + 1]); });
}

}  // namespace tierax
