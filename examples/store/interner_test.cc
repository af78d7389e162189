// SPDX-License-Identifier: Apache-2.0

#include "examples/store/interner.h"

#include <string>

#include "examples/check/check.h"

int main() {
  store::Interner interner;
  for (uint32_t round = 0; round < 2; round++) {
    for (uint32_t n = 0; n < 1000; n++) CHECK_EQ(interner.Number("name" + std::to_string(n)), n);
  }
  CHECK(interner.Name(77) == "name77");
  return check::Failures();
}
