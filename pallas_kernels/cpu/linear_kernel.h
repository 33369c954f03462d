// Rows of x meet rows of w in tiles whose sums stay in registers over all of k, lanes along k. Both operands are read as
// they lie in memory, nothing is packed; and every element of y is summed in one order, whatever the shape of the tile
// and of the batch: a row's result does not depend on what it is computed with.
#pragma once

#include "linear.h"
#include "simd.h"

namespace tierax::TIERAX_ISA {

// A tile is up to 4 rows of x by these rows of w: the sums, the rows of w and a row of x fill the registers.
constexpr int kLinearRows = 4;
constexpr int kLinearColumns = kRegisters == 32 ? 6 : 3;
// For a single row of x: enough sums that none waits for the addition before.
constexpr int kSingleColumns = 2 * kLinearColumns;

// Weights are asked for at least this far ahead of their use. Rows are a few KiB and read several at a time, which the
// hardware's own prefetchers follow badly: without, a Zen 3 core reads f32 at 12 of 17 GB/s, int8 at 6. They go to L2: for
// as long as they are on their way to L1, they take the few places there that what is used now needs too.
constexpr int64_t kPrefetchBytes = 8192;
// Many rows of x do not stay in L1: then a block of w of about this size, which stays in L2, meets one tile's rows of x
// after the other.
constexpr int64_t kBlockBytes = 131072;
constexpr int64_t kManyRows = 16;

// Rows of w as a tile reads them: kWidth numbers from k on, or the first `count` of them.
template <typename T, int C>
struct Rows {
  using Element = T;
  const T* rows[C];

  Rows(const Linear& args, const int64_t (&n)[C]) {
    for (int j = 0; j < C; ++j) rows[j] = static_cast<const T*>(args.w) + n[j] * args.k;
  }

  template <typename... Count>
  TIERAX_INLINE Vec load(int j, int64_t k, Count... count) const {
    return TIERAX_ISA::load(rows[j] + k, count...);
  }
};

// The stream of weights as it is asked for ahead of its use, evenly over all steps.
struct Stream {
  const char* ahead;
  // Bytes per step.
  int64_t advance;

  template <int64_t Most>
  TIERAX_INLINE void ask() {
#pragma GCC unroll 16
    for (int64_t line = 0; line < Most; line += 64) __builtin_prefetch(ahead + line, 0, 2);
    ahead += advance;
  }
};

// Adds the products of M rows of x with C rows of w over [begin, end) to the sums, lane by lane.
template <int M, int C, typename T>
TIERAX_INLINE void accumulate(const float* x, int64_t x_stride, const Rows<T, C>& w, int64_t begin, int64_t end,
                              Stream& stream, Vec (&sum)[C][M]) {
  int64_t k = begin;
  for (; k + kWidth <= end; k += kWidth) {
    stream.ask<int64_t{C} * kWidth * sizeof(T)>();
    Vec weights[C];
#pragma GCC unroll 16
    for (int j = 0; j < C; ++j) weights[j] = w.load(j, k);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      const Vec row = load(x + i * x_stride + k);
#pragma GCC unroll 16
      for (int j = 0; j < C; ++j) sum[j][i] = fma(row, weights[j], sum[j][i]);
    }
  }
  if (const int64_t rest = end - k) {
#pragma GCC unroll 16
    for (int j = 0; j < C; ++j) {
      const Vec weights = w.load(j, k, rest);
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) sum[j][i] = fma(load(x + i * x_stride + k, rest), weights, sum[j][i]);
    }
  }
}

// Codes are summed group by group, and each group's sums scaled: that takes less than scaling every code.
template <int M, int C>
TIERAX_INLINE void accumulate_groups(const Linear& args, const float* x, const Rows<int8_t, C>& w,
                                     const int64_t (&n)[C], Stream& stream,
                                     Vec (&sum)[C][M]) {
  static_assert(kGroup % kWidth == 0);
  const int64_t groups = (args.k + kGroup - 1) / kGroup;
  for (int64_t g = 0; g < groups; ++g) {
    Vec part[C][M] = {};
    accumulate<M, C>(x, args.k, w, g * kGroup, g + 1 < groups ? (g + 1) * kGroup : args.k, stream, part);
#pragma GCC unroll 16
    for (int j = 0; j < C; ++j) {
      const Vec scale = splat(args.scales[n[j] * groups + g]);
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) sum[j][i] = fma(part[j][i], scale, sum[j][i]);
    }
  }
}

template <int M, int C, typename T>
void linear_tile(const Linear& args, const Rows<T, C>& w, int64_t m, const int64_t (&n)[C], Stream& stream) {
  const float* x = args.x + m * args.k;
  Vec sum[C][M] = {};
  if constexpr (sizeof(T) == 1) {
    accumulate_groups<M, C>(args, x, w, n, stream, sum);
  } else {
    accumulate<M, C>(x, args.k, w, 0, args.k, stream, sum);
  }
#pragma GCC unroll 16
  for (int j = 0; j < C; ++j) {
    const Quad column = sums(sum[j][0], sum[j][M > 1 ? 1 : 0], sum[j][M > 2 ? 2 : 0], sum[j][M > 3 ? 3 : 0]);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) args.y[(m + i) * args.n + n[j]] = column[i];
  }
}

template <typename T, int C>
void linear_columns(const Linear& args, int64_t n_begin, int64_t n_end) {
  const int64_t tiles = (args.m + kLinearRows - 1) / kLinearRows;
  const int64_t tile_bytes = C * args.k * sizeof(T);
  const bool many = args.m > kManyRows && tile_bytes < kBlockBytes;
  const int64_t columns = C * (many ? kBlockBytes / tile_bytes : 1);
  const int64_t block_bytes = tile_bytes / C * columns;
  for (int64_t begin = n_begin; begin < n_end; begin += columns) {
    const int64_t end = begin + columns < n_end ? begin + columns : n_end;
    Stream stream{static_cast<const char*>(args.w) + begin * args.k * int64_t{sizeof(T)} +
                      (block_bytes > kPrefetchBytes ? block_bytes : kPrefetchBytes),
                  int64_t{C} * kWidth * int64_t{sizeof(T)} / tiles};
    for (int64_t t = 0; t < tiles; ++t) {
      // Tiles as equal as can be: 3 + 2 rows take less time than 4 + 1.
      const int64_t m = args.m * t / tiles, m_end = args.m * (t + 1) / tiles;
      for (int64_t column = begin; column < end; column += C) {
        // Past the end the last row of w is taken again: the same numbers go to the same place.
        int64_t n[C];
        for (int j = 0; j < C; ++j) n[j] = column + j < end ? column + j : end - 1;
        const Rows<T, C> w(args, n);
        if constexpr (C == kSingleColumns) {
          linear_tile<1, C>(args, w, m, n, stream);
        } else {
          switch (m_end - m) {
            case 1: linear_tile<1, C>(args, w, m, n, stream); break;
            case 2: linear_tile<2, C>(args, w, m, n, stream); break;
            case 3: linear_tile<3, C>(args, w, m, n, stream); break;
            default: linear_tile<4, C>(args, w, m, n, stream);
          }
        }
      }
    }
  }
}

template <typename T>
TIERAX_INLINE void linear_of(const Linear& args, int64_t n_begin, int64_t n_end) {
  if (args.m == 1) return linear_columns<T, kSingleColumns>(args, n_begin, n_end);
  return linear_columns<T, kLinearColumns>(args, n_begin, n_end);
}

// The columns [n_begin, n_end) of y.
inline void linear(const Linear& args, int64_t n_begin, int64_t n_end) {
  switch (args.type) {
    case WeightType::kF32: return linear_of<float>(args, n_begin, n_end);
    case WeightType::kBf16: return linear_of<bf16>(args, n_begin, n_end);
    case WeightType::kInt8: return linear_of<int8_t>(args, n_begin, n_end);
  }
}

}  // namespace tierax::TIERAX_ISA
