// The two matrix products of attention: operands in panels, and how keys become such an operand.
#pragma once

#include "attention.h"
#include "simd.h"

namespace tierax::TIERAX_ISA {

// Columns of a packed matrix lie in panels: 6 rows by a panel of 2 vectors fill 12 of AVX2's 16 registers with sums.
constexpr int kPanelVectors = 2;
constexpr int kPanel = kPanelVectors * kWidth;
static_assert(kPadding % kPanel == 0 && kBlock % kPanel == 0);

template <int N>
struct Int {
  static constexpr int value = N;
};

// Asks for the memory of the keys that come next, a line at a time, while others are worked on: packing and multiplying
// take turns, and memory should be busy during both, as it is what a decode waits for. Rows that lie kStride keys apart
// take turns: a processor that fetches ahead by itself does so in each page of memory that it sees read, and fetches more
// when these are several.
struct Ahead {
  static constexpr int64_t kStride = 16;
  // Where the next line is: in these bytes of a row.
  const char* const* row;
  const char* const* end;
  int64_t line, begin_line, end_line;
  const char* const* first = row;
  const char* const* last = end - row < kStride ? end : row + kStride;

  TIERAX_INLINE void step(int lines) {
    for (int i = 0; i < lines; ++i, row += kStride) {
      if (row >= end && !turn()) return;
      __builtin_prefetch(*row + line, 0, 2);
    }
  }

  bool turn() {
    line += 64;
    if (line >= end_line) line = begin_line, ++first;
    if (first >= last) end = first;
    row = first;
    return row < end;
  }
};

// A matrix [k, columns]: element (k, c) is at panels[c / kPanel * stride + k * kPanel + c % kPanel].
struct Packed {
  float* panels;
  int64_t stride;

  TIERAX_INLINE Vec load(int64_t k, int64_t panel, int v) const {
    return TIERAX_ISA::load(panels + (panel + v / kPanelVectors) * stride + k * kPanel + v % kPanelVectors * kWidth);
  }
};

// What `Ahead` takes beside a square of kWidth keys and numbers that is packed, so that it keeps pace: 2 * kWidth numbers
// of K and V for each of its keys. With few rows that is shared with the products, a step of which takes the second.
constexpr int kSquareLines = kWidth * kWidth / 8;
constexpr int kStepLines = kWidth > 8 ? kWidth / 8 : 1;
constexpr int64_t kFewRows = 3;

// c = a b, or, with one factor `keep` for each row, c = keep c + a b. a: [R, k]; b: some panels, from `panel` on.
template <int R, int Panels, typename Matrix, typename... Keep>
TIERAX_INLINE void multiply(Ahead& ahead, const float* a, int64_t lda, const Matrix& b, int64_t panel,
                            int64_t k_begin, int64_t k_end, float* c, int64_t ldc, Keep... keep) {
  constexpr int V = Panels * kPanelVectors;
  Vec acc[R][V] = {};
  for (int64_t k = k_begin; k < k_end; ++k) {
    // What there is less of stays in registers, beside the sums: rows or columns.
    if constexpr (R < V) {
      ahead.step(kStepLines);
      Vec factors[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) factors[r] = splat(a[r * lda + k]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        Vec column = b.load(k, panel, v);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[r][v] = fma(factors[r], column, acc[r][v]);
      }
    } else {
      Vec columns[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) columns[v] = b.load(k, panel, v);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        Vec factor = splat(a[r * lda + k]);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) acc[r][v] = fma(factor, columns[v], acc[r][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      float* to = c + r * ldc + v * kWidth;
      if constexpr (sizeof...(Keep) == 0) {
        store(to, acc[r][v]);
      } else {
        store(to, fma(load(to), splat(keep[r]...), acc[r][v]));
      }
    }
  }
}

// The same for any number of rows and the panels [panel_begin, panel_end). Few rows take two panels at once: it needs 8
// independent sums to hide the latency of an addition.
template <typename Matrix, typename... Keep>
void multiply_all(Ahead& ahead, int64_t rows, const float* a, int64_t lda, Matrix b, int64_t panel_begin,
                  int64_t panel_end, int64_t k_begin, int64_t k_end, float* c, int64_t ldc, Keep... keep) {
  int64_t panel = panel_begin, row = 0;
  auto tile = [&](auto count, auto panels) __attribute__((always_inline)) {
    multiply<count.value, panels.value>(ahead, a + row * lda, lda, b, panel, k_begin, k_end,
                                        c + row * ldc + panel * kPanel, ldc, (keep + row)...);
  };
  for (; rows <= kFewRows && panel + 2 <= panel_end; panel += 2) {
    if (rows == 3) tile(Int<3>{}, Int<2>{});
    if (rows == 2) tile(Int<2>{}, Int<2>{});
    if (rows == 1) tile(Int<1>{}, Int<2>{});
  }
  for (; panel < panel_end; ++panel) {
    for (row = 0; row + 6 <= rows; row += 6) tile(Int<6>{}, Int<1>{});
    if (rows - row == 5) tile(Int<5>{}, Int<1>{});
    if (rows - row == 4) tile(Int<4>{}, Int<1>{});
    if (rows - row == 3) tile(Int<3>{}, Int<1>{});
    if (rows - row == 2) tile(Int<2>{}, Int<1>{});
    if (rows - row == 1) tile(Int<1>{}, Int<1>{});
  }
}

template <int... I>
struct Lanes {};
template <int N, int... I>
struct FirstLanes : FirstLanes<N - 1, N - 1, I...> {};
template <int... I>
struct FirstLanes<0, I...> {
  using type = Lanes<I...>;
};

// Shuffles two vectors by `Order::lane(l)`: the lane of a, or kWidth more and of b, that lane l of the result is.
template <typename Order, int... L>
TIERAX_INLINE Vec shuffle(Vec a, Vec b, Lanes<L...>) {
  return __builtin_shufflevector(a, b, Order::lane(L)...);
}

// The even or the odd runs of so many lanes of a, each before that of b.
template <int Run, int Odd>
struct Runs {
  static constexpr int lane(int l) { return l / Run % 2 ? l + kWidth - Run + Odd * Run : l + Odd * Run; }
};

// In each four lanes: the first or the last two of a, in turns with those of b.
template <int Last>
struct Turns {
  static constexpr int lane(int l) { return l / 4 * 4 + l % 4 / 2 + 2 * Last + l % 2 * kWidth; }
};

template <typename Low, typename High>
TIERAX_INLINE void exchange(Vec& a, Vec& b) {
  typename FirstLanes<kWidth>::type all;
  Vec low = shuffle<Low>(a, b, all);
  b = shuffle<High>(a, b, all);
  a = low;
}

// Rows become columns: first in blocks of at least four lanes, then within these.
template <int Run = kWidth / 2>
TIERAX_INLINE void transpose(Vec (&v)[kWidth]) {
  if constexpr (Run >= 4) {
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) {
      if (!(i & Run)) exchange<Runs<Run, 0>, Runs<Run, 1>>(v[i], v[i + Run]);
    }
    return transpose<Run / 2>(v);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; i += 4) {
    exchange<Turns<0>, Turns<1>>(v[i], v[i + 1]);
    exchange<Turns<0>, Turns<1>>(v[i + 2], v[i + 3]);
    exchange<Runs<2, 0>, Runs<2, 1>>(v[i], v[i + 2]);
    exchange<Runs<2, 0>, Runs<2, 1>>(v[i + 1], v[i + 3]);
    Vec second = v[i + 2];
    v[i + 2] = v[i + 1];
    v[i + 1] = second;
  }
}

}  // namespace tierax::TIERAX_ISA
