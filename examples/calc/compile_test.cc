// SPDX-License-Identifier: Apache-2.0

#include "examples/calc/compile.h"

#include "examples/check/check.h"

int main() {
  calc::Tree sum = calc::Number(0);
  sum->kind = '+';
  sum->children.push_back(calc::Number(1));
  sum->children.push_back(calc::Number(0));
  sum->children.back()->kind = 'x';
  CHECK_EQ(calc::Disassemble(calc::Compile(*sum)), "push load add");
  return check::Failures();
}
