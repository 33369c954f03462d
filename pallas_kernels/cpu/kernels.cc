// Compiled once per instruction set, by its flags.
#include "kernels.h"

#include "attention_kernel.h"
#include "layers_kernel.h"
#include "linear_kernel.h"

namespace tierax::TIERAX_ISA {

#define TIERAX_STRING(name) #name
#define TIERAX_NAME(name) TIERAX_STRING(name)

const Kernels kernels{TIERAX_NAME(TIERAX_ISA), linear, attend, join_attention, add_and_norm, place, gate};

}  // namespace tierax::TIERAX_ISA
