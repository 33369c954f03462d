// Attention of one task: an online softmax over blocks of keys (Milakov and Gimelshein, 2018), each folded in by two
// matrix products (Dao et al., 2022). Keys and values are read in their pages and packed, as f32, for both products.
// Sums over head_dim and over keys are chains in order of the index: they depend on nothing but their own operands.
#pragma once

#include "attention_matrix.h"

namespace tierax::TIERAX_ISA {

// Values that no more rows use are not worth a copy.
constexpr int64_t kInPlaceRows = 12;
// Values are asked for out of L2 so many keys before they are used.
constexpr int64_t kNear = 6;
constexpr float kInfinity = __builtin_inff();

static TIERAX_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static TIERAX_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// ---- rows of a page: K and V of one token and head, in codes of 8 bits with the scales of K and V behind (quant.py)

template <typename T>
constexpr bool kScaled = sizeof(T) == 1;

template <typename T>
TIERAX_INLINE float scale_of(const char* row, int64_t codes, int which) {
  uint16_t bits;
  std::memcpy(&bits, row + codes + 2 * which, 2);
  return bits_of<float>(uint32_t(bits) << 16);
}

template <typename T, typename... Count>
TIERAX_INLINE Vec load_row(const char* row, int64_t index, float scale, Count... count) {
  Vec v = load(reinterpret_cast<const T*>(row) + index, count...);
  return kScaled<T> ? v * scale : v;
}

// The values of some keys as a matrix, read where they are; behind the last one `rows` has kNear more, to be asked for.
template <typename T>
struct InPlace {
  const char* const* rows;
  int64_t offset, head_dim;

  template <typename... Count>
  TIERAX_INLINE Vec load(int64_t k, int64_t panel, int v, Count... count) const {
    const char* row = rows[k] + offset;
    __builtin_prefetch(reinterpret_cast<const T*>(rows[k + kNear] + offset) + head_dim + panel * kPanel + v * kWidth);
    float scale = kScaled<T> ? scale_of<T>(row, 2 * head_dim, 1) : 0;
    return load_row<T>(row, head_dim + panel * kPanel + v * kWidth, scale, count...);
  }
};

// ---- softmax

// Of some rows, in progress. A row that saw nothing has top -inf and total 0.
struct State {
  float *mixed, *top, *total;
};

static TIERAX_INLINE State state_in(const Attention& args, float* memory, int64_t rows) {
  float* top = memory + rows * padded(args.head_dim);
  return {memory, top, top + rows};
}

static void clear(const Attention& args, State state, int64_t rows) {
  std::memset(state.mixed, 0, rows * padded(args.head_dim) * sizeof(float));
  std::memset(state.total, 0, rows * sizeof(float));
  for (int64_t r = 0; r < rows; ++r) state.top[r] = -kInfinity;
}

// Folds the later state `from` into `into`.
static void fold(const Attention& args, State into, State from, int64_t rows) {
  int64_t dims = padded(args.head_dim);
  for (int64_t r = 0; r < rows; ++r) {
    if (from.total[r] == 0) continue;
    float top = into.top[r] > from.top[r] ? into.top[r] : from.top[r];
    Vec keep = exp(splat(into.top[r] - top)), add = exp(splat(from.top[r] - top));
    float* to = into.mixed + r * dims;
    for (int64_t d = 0; d < dims; d += kWidth)
      store(to + d, fma(load(to + d), keep, load(from.mixed + r * dims + d) * add));
    into.total[r] = into.total[r] * keep[0] + from.total[r] * add[0];
    into.top[r] = top;
  }
}

TIERAX_INLINE Vec capped(Vec score, float cap) {
  // tanh by the smaller of its two exponentials.
  IVec sign = bits_of<IVec>(score) & INT32_MIN;
  Vec decay = exp(bits_of<Vec>(bits_of<IVec>(score) | INT32_MIN) * (2 / cap));
  Vec tanh = (1 - decay) / (1 + decay);
  return cap * bits_of<Vec>(bits_of<IVec>(tanh) | sign);
}

// Scores of the keys [begin, end) of a block become weights relative to the new top of the row. Returns the factor by
// which the row's earlier state shrinks.
static float soften(float* scores, int64_t begin, int64_t end, float soft_cap, float* top, float* total) {
  IVec lane{};
  for (int i = 0; i < kWidth; ++i) lane[i] = i;
  int64_t first = begin / kWidth * kWidth;
  Vec highest = splat(-kInfinity);
  for (int64_t n = first; n < end; n += kWidth) {
    Vec score = load(scores + n);
    if (soft_cap) score = capped(score, soft_cap);
    if (n < begin || n + kWidth > end) {
      IVec visible = (lane >= int32_t(begin - n)) & (lane < int32_t(end - n));
      score = visible ? score : splat(-kInfinity);
    }
    store(scores + n, score);
    highest = max(highest, score);
  }
  float new_top = largest(highest);
  new_top = *top > new_top ? *top : new_top;
  Vec added = {};
  for (int64_t n = first; n < end; n += kWidth) {
    Vec weight = exp(load(scores + n) - new_top);
    store(scores + n, weight);
    added += weight;
  }
  float keep = exp(splat(*top - new_top))[0];
  *total = *total * keep + sum(added);
  *top = new_top;
  return keep;
}

// ---- a task

// Row of a query and the first head of its group.
static TIERAX_INLINE int64_t row_of(const Attention& args, const AttentionTask& task, int64_t head, int64_t query) {
  return ((head - task.head_begin) * task.queries + query) * args.group();
}

static void write_out(const Attention& args, const AttentionTask& task, State state) {
  for (int64_t h = task.head_begin; h < task.head_end; ++h) {
    for (int64_t row = row_of(args, task, h, 0), i = 0; i < task.queries; ++i) {
      float* to = args.out + ((task.token + i) * args.heads + h * args.group()) * args.head_dim;
      for (int64_t g = 0; g < args.group(); ++g, ++row, to += args.head_dim) {
        const float* mixed = state.mixed + row * padded(args.head_dim);
        for (int64_t d = 0; d < args.head_dim; ++d) to[d] = mixed[d] / state.total[row];
      }
    }
  }
}

template <typename T>
class Tile {
 public:
  Tile(const Attention& args, const AttentionTask& task, const AttentionTask* following, float* scratch)
      : args_(args), task_(task), following_(following), rows_(task.rows(args)), dims_(padded(args.head_dim)) {
    queries_ = scratch;
    scores_ = queries_ + rows_ * dims_;
    values_ = {scores_ + rows_ * kBlock, kBlock * kPanel + kPanel};
    keys_ = {values_.panels + kBlock * dims_ + dims_, args.head_dim * kPanel};
    all_ = state_in(args, keys_.panels + kBlock * dims_, rows_);
    segment_ = state_in(args, task.partial ? task.partial : all_.total + rows_, rows_);
    keep_ = all_.total + rows_ + state_floats(args, rows_);
  }

  void run() {
    load_queries();
    clear(args_, all_, rows_);
    clear(args_, segment_, rows_);
    int64_t end = end_key(task_);
    Keys keys[2] = {locate(task_, first_key(task_)), {}};
    for (int now = 0;; now ^= 1) {
      const int64_t begin = keys[now].end;
      const bool more = begin < end;
      const AttentionTask& task = more || !following_ ? task_ : *following_;
      keys[now ^ 1] = more ? locate(task, begin) : following_ ? locate(task, first_key(task)) : Keys{};
      block(keys[now], task, keys[now ^ 1]);
      if (!more || begin % kSegment == 0) end_segment(more);
      if (!more) break;
    }
    if (!task_.partial) write_out(args_, task_, all_);
  }

 private:
  int64_t row_of(int64_t head, int64_t query) const { return TIERAX_ISA::row_of(args_, task_, head, query); }

  void load_queries() {
    int64_t group = args_.group();
    for (int64_t h = task_.head_begin; h < task_.head_end; ++h) {
      for (int64_t i = 0; i < task_.queries; ++i) {
        const float* from = args_.q + ((task_.token + i) * args_.heads + h * group) * args_.head_dim;
        float* to = queries_ + row_of(h, i) * dims_;
        for (int64_t g = 0; g < group; ++g)
          for (int64_t d = 0; d < args_.head_dim; ++d) to[g * dims_ + d] = from[g * args_.head_dim + d] * args_.scale;
      }
    }
  }

  void end_segment(bool more) {
    if (!task_.partial) {
      fold(args_, all_, segment_, rows_);
    } else if (more) {
      segment_ = state_in(args_, segment_.total + rows_, rows_);
    }
    if (more) clear(args_, segment_, rows_);
  }

  // Keys of a block and the rows of their first KV head.
  struct Keys {
    int64_t base, begin, end;
    const char* rows[kBlock + kNear];
  };

  // Of what any of a task's queries sees.
  int64_t first_key(const AttentionTask& task) const {
    int64_t seen = args_.window ? most(0, task.position + 1 - args_.window) : 0;
    return most(task.segment_begin * kSegment, seen);
  }
  int64_t end_key(const AttentionTask& task) const {
    return least(task.segment_end * kSegment, task.position + task.queries);
  }

  // Folds in some keys, while the rows of those that come `next`, which are of that task, are on their way.
  void block(const Keys& keys, const AttentionTask& task, const Keys& next) {
    int64_t first_query = most(0, keys.base - task_.position);
    int64_t end_query = task_.queries;
    if (args_.window) end_query = least(end_query, keys.base + kBlock + args_.window - 1 - task_.position);
    int64_t begin_line = task.head_begin * args_.row_bytes, end_line = task.head_end * args_.row_bytes;
    Ahead ahead{next.rows + (next.begin - next.base), next.rows + (next.end - next.base), begin_line, begin_line,
                end_line};
    for (int64_t h = task_.head_begin; h < task_.head_end; ++h) {
      int64_t row = row_of(h, first_query), rows = (end_query - first_query) * args_.group();
      bool in_place = rows <= kInPlaceRows && args_.head_dim % kPanel == 0;
      pack_keys(keys, h, ahead, rows <= kFewRows ? kSquareLines / 2 : kSquareLines);
      if (!in_place) pack_values(keys, h);
      multiply_all(ahead, rows, queries_ + row * dims_, dims_, keys_,
                   (keys.begin - keys.base) / kPanel, (keys.end - keys.base + kPanel - 1) / kPanel, 0, args_.head_dim,
                   scores_ + row * kBlock, kBlock);
      for (int64_t i = first_query; i < end_query;) {
        // Neighbours that see the same keys are mixed together: no key is ever masked by a weight of zero.
        Span seen = visible(i, keys);
        int64_t from = row_of(h, i);
        do soften_query(row_of(h, i++), seen);
        while (i < end_query && visible(i, keys) == seen);
        auto mix = [&](auto values) {
          multiply_all(ahead, row_of(h, i) - from, scores_ + from * kBlock, kBlock, values, 0,
                       (args_.head_dim + kPanel - 1) / kPanel, seen.begin, seen.end, segment_.mixed + from * dims_,
                       dims_, keep_ + from);
        };
        if (in_place) {
          mix(InPlace<T>{keys.rows, h * args_.row_bytes, args_.head_dim});
        } else {
          mix(values_);
        }
      }
    }
  }

  struct Span {
    int64_t begin, end;
    bool operator==(const Span& other) const { return begin == other.begin && end == other.end; }
  };

  // What a query sees of the keys, as indices into the block.
  Span visible(int64_t query, const Keys& keys) const {
    int64_t position = task_.position + query;
    int64_t first = args_.window ? most(keys.begin, position + 1 - args_.window) : keys.begin;
    return {first - keys.base, least(keys.end, position + 1) - keys.base};
  }

  void soften_query(int64_t row, Span seen) {
    for (int64_t r = row; r < row + args_.group(); ++r)
      keep_[r] = soften(scores_ + r * kBlock, seen.begin, seen.end, args_.soft_cap, segment_.top + r,
                        segment_.total + r);
  }

  // The keys from `begin` on of its block that are before `end`. Entries of `rows` before them, up to the edge of a
  // panel, and all behind them point to one of them: what comes of those is not used, but what has no row must not be
  // read.
  Keys locate(const AttentionTask& task, int64_t begin) const {
    int64_t end = end_key(task);
    Keys keys;
    keys.base = begin / kBlock * kBlock;
    keys.begin = begin;
    keys.end = least(end, keys.base + kBlock);
    int64_t row_bytes = args_.kv_heads * args_.row_bytes;
    for (int64_t key = begin; key < keys.end;) {
      int64_t page = key / args_.page_size, slot = key % args_.page_size;
      int64_t stop = least(keys.end, (page + 1) * args_.page_size);
      const char* row =
          args_.pool + ((task.pages[page] * args_.layers + args_.layer) * args_.page_size + slot) * row_bytes;
      for (; key < stop; ++key, row += row_bytes) keys.rows[key - keys.base] = row;
    }
    if (begin >= end) return keys;
    for (int64_t n = (begin - keys.base) / kPanel * kPanel; n < begin - keys.base; ++n)
      keys.rows[n] = keys.rows[begin - keys.base];
    for (int64_t n = keys.end - keys.base; n < kBlock + kNear; ++n) keys.rows[n] = keys.rows[n - 1];
    return keys;
  }

  void pack_keys(const Keys& keys, int64_t head, Ahead& ahead, int square_lines) {
    int64_t head_dim = args_.head_dim, end = keys.end - keys.base;
    for (int64_t n = (keys.begin - keys.base) / kWidth * kWidth; n < end; n += kWidth) {
      const char* rows[kWidth];
      float scales[kWidth] = {};
      for (int i = 0; i < kWidth; ++i) {
        rows[i] = keys.rows[n + i] + head * args_.row_bytes;
        if constexpr (kScaled<T>) scales[i] = scale_of<T>(rows[i], 2 * head_dim, 0);
      }
      float* to = keys_.panels + n / kPanel * keys_.stride + n % kPanel;
      int64_t d = 0;
      for (; d + kWidth <= head_dim; d += kWidth) {
        pack_square(rows, scales, d, kWidth, to);
        ahead.step(square_lines);
      }
      if (d < head_dim) pack_square(rows, scales, d, head_dim - d, to, head_dim - d);
    }
  }

  void pack_values(const Keys& keys, int64_t head) {
    int64_t head_dim = args_.head_dim, end = keys.end - keys.base;
    for (int64_t n = keys.begin - keys.base; n < end; ++n) {
      InPlace<T> row{keys.rows, head * args_.row_bytes, head_dim};
      float* to = values_.panels + n * kPanel;
      int64_t d = 0, panel = 0;
      for (; d + kPanel <= head_dim; d += kPanel, ++panel)
        for (int v = 0; v < kPanelVectors; ++v) store(to + panel * values_.stride + v * kWidth, row.load(n, panel, v));
      for (int v = 0; d < head_dim && v < kPanelVectors; ++v, d += kWidth) {
        Vec rest = {};
        if (d + kWidth <= head_dim) rest = row.load(n, panel, v);
        else if (d < head_dim) rest = row.load(n, panel, v, head_dim - d);
        store(to + panel * values_.stride + v * kWidth, rest);
      }
    }
  }

  template <typename... Count>
  TIERAX_INLINE static void pack_square(const char* (&rows)[kWidth], float (&scales)[kWidth], int64_t d,
                                        int64_t dims, float* to, Count... count) {
    Vec square[kWidth];
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) square[i] = load_row<T>(rows[i], d, scales[i], count...);
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) {
      if (i < dims) store(to + (d + i) * kPanel, square[i]);
    }
  }

  const Attention& args_;
  const AttentionTask& task_;
  const AttentionTask* following_;
  int64_t rows_, dims_;
  float *queries_, *scores_, *keep_;
  Packed keys_, values_;
  State segment_, all_;
};

// While the last keys of the task are worked on, the first of the one that is likely to come `following` are asked for;
// null: none is.
static void attend(const Attention& args, const AttentionTask& task, const AttentionTask* following, float* scratch) {
  switch (args.type) {
    case KvType::kF32: return Tile<float>(args, task, following, scratch).run();
    case KvType::kBf16: return Tile<bf16>(args, task, following, scratch).run();
    case KvType::kE4m3: return Tile<e4m3>(args, task, following, scratch).run();
  }
}

// Finishes what was cut into several tasks: the states of all their segments lie behind that of the first.
static void join_attention(const Attention& args, const AttentionTask& first, int64_t segments, float* scratch) {
  int64_t rows = first.rows(args);
  State all = state_in(args, scratch, rows);
  clear(args, all, rows);
  for (int64_t i = 0; i < segments; ++i)
    fold(args, all, state_in(args, first.partial + i * state_floats(args, rows), rows), rows);
  write_out(args, first, all);
}

}  // namespace tierax::TIERAX_ISA
