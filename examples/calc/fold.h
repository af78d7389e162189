// SPDX-License-Identifier: Apache-2.0

// Constant folding.
#ifndef EXAMPLES_CALC_FOLD_H_
#define EXAMPLES_CALC_FOLD_H_

#include "examples/calc/ast.h"

namespace calc {

// Returns tree with each part without x replaced by its value.
Tree Fold(Tree tree);

}  // namespace calc

#endif  // EXAMPLES_CALC_FOLD_H_
