// SPDX-License-Identifier: Apache-2.0

#include "examples/calc/fold.h"

#include "examples/calc/functions.h"

namespace calc {

Tree Fold(Tree tree) {
  bool constant = tree->kind != 'x';
  for (Tree& child : tree->children) {
    child = Fold(std::move(child));
    constant = constant && child->kind == 'n';
  }
  if (!constant || tree->children.empty()) return tree;
  const double a = tree->children.front()->number, b = tree->children.back()->number;
  switch (tree->kind) {
    case '+':
      return Number(a + b);
    case '-':
      return Number(a - b);
    case '*':
      return Number(a * b);
    case '/':
      return Number(a / b);
    case '~':
      return Number(-a);
    default:
      return Number(FunctionOf(tree->function).call(a, b));
  }
}

}  // namespace calc
