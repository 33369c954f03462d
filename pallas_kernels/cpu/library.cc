// The instruction set is chosen when the library is loaded.
#include "kernels.h"

namespace tierax {
namespace {

const Kernels& best() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  auto has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  auto has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has_avx2 && has_avx512 ? avx512::kernels : has_avx2 ? avx2::kernels : plain::kernels;
#elif defined(__aarch64__)
  return neon::kernels;
#else
  return plain::kernels;
#endif
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = best();
  return chosen;
}

}  // namespace tierax

extern "C" __attribute__((visibility("default"))) const char* tierax_isa() { return tierax::kernels().isa; }
