// SPDX-License-Identifier: Apache-2.0

#include "examples/store/heap.h"

#include "examples/check/check.h"

int main() {
  store::Heap<int> heap;
  for (int i = 0; i < 100; i++) heap.Push(i * 37 % 101);
  int last = -1;
  while (!heap.Empty()) {
    const int next = heap.Pop();
    CHECK(next >= last);
    last = next;
  }
  CHECK_EQ(last, 100);
  return check::Failures();
}
