// SPDX-License-Identifier: Apache-2.0

#include "examples/calc/print.h"

#include "examples/calc/functions.h"
#include "examples/text/number.h"

namespace calc {

std::string Print(const Node& node) {
  const auto child = [&](int i) { return Print(*node.children[i]); };
  switch (node.kind) {
    case 'n':
      return text::FormatDecimal(node.number);
    case 'x':
      return "x";
    case '~':
      return "(-" + child(0) + ")";
    case 'f':
      return std::string(FunctionOf(node.function).name) + "(" + child(0) + ", " + child(1) + ")";
    default:
      return "(" + child(0) + " " + node.kind + " " + child(1) + ")";
  }
}

}  // namespace calc
