// Loops over a thread pool that has `num_threads()` and `Schedule(callable)`, as XLA's own intra-op pool does.
#pragma once

#include <atomic>
#include <chrono>
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

// Where helpers linger for a moment after a loop, in case the next one comes: a decode step is some hundred short loops
// with a few microseconds between them, and to wake a thread that sleeps takes longer than many of these loops.
class Lounge {
 public:
  // Gives the loop to up to `helpers` of those that wait, one ownership each; returns how many took it.
  int64_t offer(SharedLoop* loop, int64_t helpers) {
    int64_t taken = 0;
    for (int seat = 0; seat < kSeats && taken < helpers; ++seat) {
      SharedLoop* seen = &waiting_;
      if (seats_[seat].load(std::memory_order_relaxed) == seen &&
          seats_[seat].compare_exchange_strong(seen, loop, std::memory_order_acq_rel))
        ++taken;
    }
    return taken;
  }

  // Works on what is offered, until nothing has been for a moment.
  void linger() {
    for (auto& seat : seats_) {
      SharedLoop* free = nullptr;
      if (!seat.compare_exchange_strong(free, &waiting_, std::memory_order_acq_rel)) continue;
      while (SharedLoop* loop = wait(seat)) {
        loop->work();
        loop->leave();
        seat.store(&waiting_, std::memory_order_release);
      }
      return;
    }
  }

 private:
  static constexpr int kSeats = 64;
  static constexpr std::chrono::microseconds kPatience{100};

  // The loop that was put on the seat; nothing when it was left in vain.
  SharedLoop* wait(std::atomic<SharedLoop*>& seat) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    for (int spins = 1;; ++spins) {
      SharedLoop* seen = seat.load(std::memory_order_acquire);
      if (seen != &waiting_) return seen;
      if (spins % 64 == 0 && std::chrono::steady_clock::now() > until) {
        return seat.compare_exchange_strong(seen, nullptr, std::memory_order_acq_rel) ? nullptr : seen;
      }
      pause();
    }
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  // On a seat: null, it is free; this one, somebody waits; any other, what he works on.
  SharedLoop waiting_{};
  std::atomic<SharedLoop*> seats_[kSeats] = {};
};

inline Lounge& lounge() {
  static Lounge the_one;
  return the_one;
}

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
  for (int64_t i = lounge().offer(loop, helpers); i < helpers; ++i) {
    pool.Schedule([loop] {
      loop->work();
      loop->leave();
      lounge().linger();
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
