// A pool whose threads start late and in any order, as those of a busy one do.
#pragma once

#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

class LatePool {
 public:
  explicit LatePool(int threads) : threads_(threads) {}
  ~LatePool() {
    for (auto& helper : helpers_) helper.join();
  }
  int64_t num_threads() const { return threads_; }
  template <typename F>
  void Schedule(F f) {
    helpers_.emplace_back(std::move(f));
  }

 private:
  int threads_;
  std::vector<std::thread> helpers_;
};
