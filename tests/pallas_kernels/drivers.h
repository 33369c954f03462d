// What the drivers have in common: both sets of kernels go through the same checks.
#pragma once

#include <cstdio>
#include <random>

#include "kernels.h"

// Has `agree(kernels, random)` say whether the kernels of this machine's best instructions, and those that need none, agree
// with double; returns what `main` does.
template <typename Agree>
int check_kernels(Agree agree) {
  const tierax::Kernels& best = tierax::kernels();
#if defined(__aarch64__)
  const tierax::Kernels& simple = best;
#else
  const tierax::Kernels& simple = tierax::plain::kernels;
#endif
  for (const tierax::Kernels* kernels : {&best, &simple}) {
    std::mt19937 random(1);
    if (!agree(*kernels, random)) return 1;
  }
  std::printf("%s and %s agree with double\n", best.isa, simple.isa);
  return 0;
}
