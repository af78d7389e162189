// SPDX-License-Identifier: Apache-2.0

#include "examples/calc/print.h"

#include "examples/calc/parser.h"
#include "examples/check/check.h"

namespace {

std::string Printed(const char* s) {
  std::string error;
  return calc::Print(*calc::Parse(s, &error));
}

}  // namespace

int main() {
  CHECK_EQ(Printed("1+2*3-4"), "((1 + (2 * 3)) - 4)");
  CHECK_EQ(Printed("-x/mean(.5, 2)"), "((-x) / mean(0.5, 2))");
  return check::Failures();
}
