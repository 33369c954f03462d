// Ragged paged attention: what a call is about, and how it is cut into tasks.
#pragma once

#include "isa.h"

namespace tierax {

enum class KvType { kF32, kBf16, kE4m3 };

// Keys are taken in blocks and blocks in segments, both at fixed positions of a sequence. A query folds the blocks of a
// segment one after the other, then the segments: in one order of additions, whether it is computed as a decode or within
// a chunk, alone or in a batch, by one thread or many.
constexpr int64_t kBlock = 128;
constexpr int64_t kSegment = 512;

// Queries that share a pass over the keys of a task: about as many rows (query and head) as pay for packing the keys.
constexpr int64_t kTileRows = 96;

struct Attention {
  // f32 [tokens, heads, head_dim]
  const float* q;
  float* out;
  // [pages, layers, page_size, kv_heads, row_bytes], see pages.py and quant.py
  const char* pool;
  KvType type;
  int64_t heads, head_dim, layers, page_size, kv_heads, row_bytes;
  int64_t layer;
  // 0: the whole context
  int64_t window;
  // 0: none
  float soft_cap;
  float scale;

  int64_t group() const { return heads / kv_heads; }
};

// Neighbouring queries of one sequence, some of its KV heads, and the segments [segment_begin, segment_end).
struct AttentionTask {
  const int32_t* pages;
  // Index of the first query's token in q, and its position in the sequence.
  int64_t token, position;
  int64_t queries;
  int64_t head_begin, head_end;
  int64_t segment_begin, segment_end;
  // When other tasks have the remaining segments: where the softmax of each of these goes, one behind the other.
  float* partial;

  int64_t rows(const Attention& args) const { return (head_end - head_begin) * args.group() * queries; }
};

// Sizes in floats. The axis of head_dim is padded so that any instruction set's vectors fit.
constexpr int64_t kPadding = 32;
static inline int64_t padded(int64_t n) { return (n + kPadding - 1) / kPadding * kPadding; }
static inline int64_t state_floats(const Attention& args, int64_t rows) {
  return rows * (padded(args.head_dim) + 2);
}
// Memory that `attend` works in, for tasks of so many rows.
static inline int64_t scratch_floats(const Attention& args, int64_t rows) {
  int64_t dims = padded(args.head_dim);
  return rows * (dims + kBlock + 1) + 2 * state_floats(args, rows) + (2 * kBlock + 1) * dims;
}

}  // namespace tierax
