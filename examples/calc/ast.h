// SPDX-License-Identifier: Apache-2.0

// Expressions as trees.
#ifndef EXAMPLES_CALC_AST_H_
#define EXAMPLES_CALC_AST_H_

#include <memory>
#include <string>
#include <vector>

#include "examples/calc/token.h"

namespace calc {

// A Node is a number 'n', the variable 'x', an operation + - * / of two, a negation '~' of one, or a
// call 'f' of two.
struct Node {
  char kind = 'n';
  double number = 0;
  int function = 0;
  std::vector<std::unique_ptr<Node>> children;
};

using Tree = std::unique_ptr<Node>;

inline Tree Number(double x) {
  Tree tree = std::make_unique<Node>();
  tree->number = x;
  return tree;
}

}  // namespace calc

#endif  // EXAMPLES_CALC_AST_H_
