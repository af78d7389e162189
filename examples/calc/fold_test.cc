// SPDX-License-Identifier: Apache-2.0

#include "examples/calc/fold.h"

#include "examples/calc/parser.h"
#include "examples/calc/print.h"
#include "examples/check/check.h"

namespace {

std::string Folded(const char* s) {
  std::string error;
  return calc::Print(*calc::Fold(calc::Parse(s, &error)));
}

}  // namespace

int main() {
  CHECK_EQ(Folded("1 + 2 * 3"), "7");
  CHECK_EQ(Folded("x * (8 / -2)"), "(x * -4)");
  CHECK_EQ(Folded("max(1, 2) - min(x, 4)"), "(2 - min(x, 4))");
  return check::Failures();
}
