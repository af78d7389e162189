// SPDX-License-Identifier: Apache-2.0

#include "examples/calc/functions.h"

#include "examples/check/check.h"

int main() {
  const int mean = calc::FindFunction("mean");
  CHECK(mean >= 0);
  CHECK_EQ(calc::FunctionOf(mean).call(2, 5), 3.5);
  CHECK_EQ(calc::FindFunction("average"), -1);
  CHECK(calc::Suggest("maxx") == "max");
  CHECK(calc::Suggest("meen") == "mean");
  return check::Failures();
}
