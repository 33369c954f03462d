// Loops over a thread pool that has `num_threads()` and `Schedule(callable)`, as XLA's own intra-op pool does.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace tierax {

// What the caller and its helpers share. A helper that starts when all is done finds no task left: it touches nothing of
// the caller's, and the last one out frees this.
struct SharedLoop {
  std::atomic<int64_t> next{0}, done{0}, owners;
  int64_t tasks;
  void (*run)(const void* body, int64_t task);
  const void* body;

  void work() {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      run(body, task);
      done.fetch_add(1, std::memory_order_release);
    }
  }

  void leave() {
    if (owners.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }
};

// Runs body(0) … body(tasks - 1), each once and in any order, on the calling thread and whichever threads of the pool
// come to help; returns when all have returned. It never waits for a helper that has not started, so it may be called on
// a thread of the pool. One task, or a pool of one thread, is a plain loop. The body must not throw.
template <typename Pool, typename Body>
void parallel_for(Pool& pool, int64_t tasks, const Body& body) {
  int64_t threads = tasks > 1 ? pool.num_threads() : 1;
  int64_t helpers = (threads < tasks ? threads : tasks) - 1;
  if (helpers <= 0) {
    for (int64_t task = 0; task < tasks; ++task) body(task);
    return;
  }
  auto run = [](const void* body, int64_t task) { (*static_cast<const Body*>(body))(task); };
  auto* loop = new SharedLoop{{0}, {0}, {helpers + 1}, tasks, run, &body};
  for (int64_t i = 0; i < helpers; ++i) {
    pool.Schedule([loop] {
      loop->work();
      loop->leave();
    });
  }
  loop->work();
  // What is left is at most one task per helper, usually some microseconds: sleeping would take longer.
  for (int spins = 0; loop->done.load(std::memory_order_acquire) != tasks; ++spins) {
    if (spins >= 4096) std::this_thread::yield();
  }
  loop->leave();
}

}  // namespace tierax
