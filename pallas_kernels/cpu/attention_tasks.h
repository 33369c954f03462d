// Cuts a batch into tasks and runs them on a pool of threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "attention.h"
#include "kernels.h"
#include "parallel.h"

namespace tierax {

// See batch.py.
struct Batch {
  const int32_t *q_starts, *kv_lens, *page_table;
  int64_t rows, table_width, tokens;
};

// Why the batch cannot be computed: empty if it can.
inline std::string fault(const Attention& args, const Batch& batch, int64_t pages) {
  auto row_has = [](int64_t row, const std::string& what) { return "row " + std::to_string(row) + " has " + what; };
  for (int64_t r = 0; r < batch.rows; ++r) {
    int64_t start = batch.q_starts[r], count = batch.q_starts[r + 1] - start, length = batch.kv_lens[r];
    if (start < 0 || count < 0 || start + count > batch.tokens)
      return row_has(r, "tokens outside the " + std::to_string(batch.tokens) + " of the batch");
    if (count > length) return row_has(r, "more tokens than positions");
    int64_t used = (length + args.page_size - 1) / args.page_size;
    if (used > batch.table_width) return row_has(r, "more positions than its page table has");
    for (int64_t i = 0; i < used; ++i) {
      int64_t page = batch.page_table[r * batch.table_width + i];
      if (page < 0 || page >= pages) return row_has(r, "page " + std::to_string(page) + ", outside the pool");
    }
  }
  return {};
}

// Of the keys that a task reads at once, so that they and those that follow them fit into a usual L2 cache.
constexpr int64_t kBlockBytes = 192 * 1024;

// Memory whose rows of vectors do not cross cache lines.
struct Release {
  void operator()(float* memory) const { ::operator delete[](memory, std::align_val_t(64)); }
};
using Floats = std::unique_ptr<float[], Release>;

inline Floats floats(int64_t count) {
  return Floats(static_cast<float*>(::operator new[](count * sizeof(float), std::align_val_t(64))));
}

class AttentionPlan {
 public:
  AttentionPlan(const Attention& args, const Batch& batch, int64_t threads) : args_(args), batch_(batch) {
    int64_t chunk_queries = 0, segments = 0;
    for (int64_t r = 0; r < batch.rows; ++r) {
      if (count(r) > 1) chunk_queries += count(r);
      if (count(r) == 1) segments += end_segment(r) - begin_segment(r);
    }
    // Some tasks per thread, so that all threads end at about the same time.
    int64_t enough = 4 * threads;
    int64_t tile = std::min(kTileRows / args.group(), chunk_queries * args.kv_heads / enough);
    // KV heads of a token are neighbours in memory: a task reads several, unless there is little to share out.
    int64_t heads = segments < enough ? 1 : std::min(kBlockBytes / (kBlock * args.row_bytes), args.kv_heads);
    heads = std::max<int64_t>(heads, 1);
    int64_t length = std::max<int64_t>(segments * args.kv_heads / heads / enough, 1);
    for (int64_t r = 0; r < batch.rows; ++r)
      if (count(r) > 1) add_chunk(r, std::max<int64_t>(tile, 1));
    for (int64_t r = 0; r < batch.rows; ++r)
      if (count(r) == 1) add_decode(r, heads, length);
  }

  template <typename Pool>
  void run(Pool& pool, const Kernels& kernels) {
    Floats partial = floats(partial_floats_);
    for (Task& task : tasks_)
      if (task.joint) task.work.partial = partial.get() + task.partial_offset;
    int64_t tasks = tasks_.size(), workers = std::min<int64_t>(tasks, std::max<int64_t>(pool.num_threads(), 1));
    int64_t scratch = padded(scratch_floats(args_, most_rows_));
    Floats memory = floats(workers * scratch);
    std::atomic<int64_t> next{0};
    parallel_for(pool, workers, [&](int64_t worker) {
      float* own = memory.get() + worker * scratch;
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
        // What this worker takes next, most likely: no more than a hint.
        const AttentionTask* following = i + workers < tasks ? &tasks_[i + workers].work : nullptr;
        kernels.attend(args_, tasks_[i].work, following, own);
        Joint* joint = tasks_[i].joint;
        if (joint && joint->running.fetch_sub(1, std::memory_order_acq_rel) == 1)
          kernels.join_attention(args_, tasks_[joint->first_task].work, joint->segments, own);
      }
    });
  }

 private:
  // Tasks of the same row and heads; the one that ends last joins their segments.
  struct Joint {
    int64_t first_task, segments;
    std::atomic<int64_t> running;
    Joint(int64_t first_task, int64_t segments, int64_t tasks)
        : first_task(first_task), segments(segments), running(tasks) {}
  };

  struct Task {
    AttentionTask work;
    Joint* joint;
    int64_t partial_offset;
  };

  int64_t count(int64_t row) const { return batch_.q_starts[row + 1] - batch_.q_starts[row]; }
  int64_t position(int64_t row) const { return batch_.kv_lens[row] - count(row); }
  // Of what a row's first query sees, and the last.
  int64_t begin_segment(int64_t row) const { return first_segment(position(row)); }
  int64_t end_segment(int64_t row) const { return (batch_.kv_lens[row] - 1) / kSegment + 1; }
  int64_t first_segment(int64_t position) const {
    return args_.window ? std::max<int64_t>(position + 1 - args_.window, 0) / kSegment : 0;
  }

  // The longest contexts first: what is left when a thread runs out of work is then short.
  void add_chunk(int64_t row, int64_t tile) {
    for (int64_t first = (count(row) - 1) / tile * tile; first >= 0; first -= tile) {
      int64_t queries = std::min(tile, count(row) - first), start = position(row) + first;
      for (int64_t h = 0; h < args_.kv_heads; ++h)
        add(row, first, queries, h, h + 1, first_segment(start), (start + queries - 1) / kSegment + 1, nullptr);
    }
  }

  // Of so many KV heads and segments for each task.
  void add_decode(int64_t row, int64_t heads, int64_t length) {
    int64_t begin = begin_segment(row), end = end_segment(row);
    for (int64_t h = 0; h < args_.kv_heads; h += heads) {
      int64_t end_head = std::min(h + heads, args_.kv_heads), parts = (end - begin + length - 1) / length;
      Joint* joint = parts > 1 ? &joints_.emplace_back(int64_t(tasks_.size()), end - begin, parts) : nullptr;
      for (int64_t s = begin; s < end; s += length)
        add(row, 0, 1, h, end_head, s, std::min(s + length, end), joint);
    }
  }

  void add(int64_t row, int64_t query, int64_t queries, int64_t head_begin, int64_t head_end, int64_t segment_begin,
           int64_t segment_end, Joint* joint) {
    AttentionTask task{batch_.page_table + row * batch_.table_width,
                       batch_.q_starts[row] + query,
                       position(row) + query,
                       queries,
                       head_begin,
                       head_end,
                       segment_begin,
                       segment_end,
                       nullptr};
    tasks_.push_back({task, joint, partial_floats_});
    if (joint) partial_floats_ += (segment_end - segment_begin) * state_floats(args_, task.rows(args_));
    most_rows_ = std::max(most_rows_, task.rows(args_));
  }

  const Attention& args_;
  const Batch& batch_;
  std::vector<Task> tasks_;
  std::deque<Joint> joints_;
  int64_t partial_floats_ = 0, most_rows_ = 0;
};

template <typename Pool>
void run_attention(const Kernels& kernels, Pool& pool, const Attention& args, const Batch& batch) {
  AttentionPlan(args, batch, std::max<int64_t>(pool.num_threads(), 1)).run(pool, kernels);
  // Tokens of padding are undefined, but finite.
  int64_t token = args.heads * args.head_dim, used = batch.rows ? batch.q_starts[batch.rows] : 0;
  std::fill(args.out + used * token, args.out + batch.tokens * token, 0.0f);
}

}  // namespace tierax
