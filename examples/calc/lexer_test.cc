// SPDX-License-Identifier: Apache-2.0

#include "examples/calc/lexer.h"

#include "examples/check/check.h"

int main() {
  std::string_view s = " 1.5*( rate";
  std::string kinds;
  for (int i = 0; i < 6; i++) {
    const calc::Token token = calc::TakeToken(&s);
    kinds += token.kind == 0 ? '.' : token.kind;
    if (token.kind == 'n') CHECK_EQ(token.number, 1.5);
    if (token.kind == 'a') CHECK(token.text == "rate");
  }
  CHECK_EQ(kinds, "n*(a..");
  s = "1.2.3";
  CHECK_EQ(calc::TakeToken(&s).kind, '?');
  s = "#";
  CHECK_EQ(calc::TakeToken(&s).kind, '?');
  return check::Failures();
}
