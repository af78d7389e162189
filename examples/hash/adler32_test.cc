// SPDX-License-Identifier: Apache-2.0

#include "examples/hash/adler32.h"

#include "examples/check/check.h"

int main() {
  CHECK_EQ(hash::Adler32("Wikipedia"), 0x11E60398u);
  CHECK_EQ(hash::Adler32(""), 1u);
  return check::Failures();
}
