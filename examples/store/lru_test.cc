// SPDX-License-Identifier: Apache-2.0

#include "examples/store/lru.h"

#include "examples/check/check.h"

int main() {
  store::Lru<int, int> lru(2);
  lru.Put(1, 10);
  lru.Put(2, 20);
  CHECK(lru.Get(1) != nullptr);
  lru.Put(3, 30);
  CHECK(lru.Get(2) == nullptr);
  CHECK_EQ(*lru.Get(1), 10);
  lru.Put(1, 11);
  CHECK_EQ(*lru.Get(1), 11);
  CHECK_EQ(*lru.Get(3), 30);
  return check::Failures();
}
