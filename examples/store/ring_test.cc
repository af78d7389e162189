// SPDX-License-Identifier: Apache-2.0

#include "examples/store/ring.h"

#include "examples/check/check.h"

int main() {
  store::Ring<int, 3> ring;
  CHECK_EQ(ring.Size(), 0u);
  for (int i = 1; i <= 5; i++) ring.Push(i);
  CHECK_EQ(ring.Size(), 3u);
  CHECK_EQ(ring.Back(0), 5);
  CHECK_EQ(ring.Back(2), 3);
  return check::Failures();
}
