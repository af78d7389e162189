// SPDX-License-Identifier: Apache-2.0

#include "examples/calc/parser.h"

#include "examples/check/check.h"

namespace {

std::string ErrorOf(const std::string& s) {
  std::string error;
  return calc::Parse(s, &error) == nullptr ? error : "none";
}

}  // namespace

int main() {
  CHECK_EQ(ErrorOf("1 + 2 * -(3 - x)"), "none");
  CHECK_EQ(ErrorOf("max(1, min(2, 3))"), "none");
  CHECK_EQ(ErrorOf("1 +"), "unexpected end");
  CHECK_EQ(ErrorOf("(1"), "unexpected end");
  CHECK_EQ(ErrorOf("1 2"), "unexpected 2");
  CHECK_EQ(ErrorOf("1 $ 2"), "unexpected $");
  CHECK_EQ(ErrorOf("maks(1, 2)"), "unknown name maks, did you mean max?");
  CHECK_EQ(ErrorOf(std::string(100000, '(')), "too deeply nested");
  return check::Failures();
}
