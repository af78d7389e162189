// SPDX-License-Identifier: Apache-2.0

// The machine that runs code.
#ifndef EXAMPLES_CALC_VM_H_
#define EXAMPLES_CALC_VM_H_

#include "examples/calc/compile.h"

namespace calc {

// Runs code from Compile and returns the value that it leaves on the stack.
double Run(const Code& code, double x);

}  // namespace calc

#endif  // EXAMPLES_CALC_VM_H_
