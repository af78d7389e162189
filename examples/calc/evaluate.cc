// SPDX-License-Identifier: Apache-2.0

#include "examples/calc/evaluate.h"

#include "examples/calc/compile.h"
#include "examples/calc/fold.h"
#include "examples/calc/parser.h"
#include "examples/calc/vm.h"

namespace calc {

bool Evaluate(std::string_view s, double x, double* result, std::string* error) {
  Tree tree = Parse(s, error);
  if (tree == nullptr) return false;
  *result = Run(Compile(*Fold(std::move(tree))), x);
  return true;
}

}  // namespace calc
