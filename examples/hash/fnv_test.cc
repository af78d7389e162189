// SPDX-License-Identifier: Apache-2.0

#include "examples/hash/fnv.h"

#include "examples/check/check.h"

int main() {
  CHECK_EQ(hash::Fnv(""), 0xCBF29CE484222325u);
  CHECK_EQ(hash::Fnv("a"), 0xAF63DC4C8601EC8Cu);
  static_assert(hash::Fnv("foobar") == 0x85944171F73967E8u);
  return check::Failures();
}
