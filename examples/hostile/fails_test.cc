// SPDX-License-Identifier: Apache-2.0

#include "examples/check/check.h"

int main() {
  CHECK_EQ(6 * 9, 42);
  return check::Failures();
}
