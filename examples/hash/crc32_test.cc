// SPDX-License-Identifier: Apache-2.0

#include "examples/hash/crc32.h"

#include "examples/check/check.h"

int main() {
  CHECK_EQ(hash::Crc32("123456789"), 0xCBF43926u);
  CHECK_EQ(hash::Crc32("456789", hash::Crc32("123")), 0xCBF43926u);
  CHECK_EQ(hash::Crc32(""), 0u);
  return check::Failures();
}
