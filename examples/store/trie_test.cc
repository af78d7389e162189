// SPDX-License-Identifier: Apache-2.0

#include "examples/store/trie.h"

#include "examples/check/check.h"

int main() {
  store::Trie trie;
  CHECK(trie.Add("car") && trie.Add("cart") && trie.Add("dog"));
  CHECK(!trie.Add("Cat"));
  CHECK_EQ(trie.Count("car"), 2);
  CHECK_EQ(trie.Count(""), 3);
  CHECK_EQ(trie.Count("cat"), 0);
  CHECK_EQ(trie.Count("do!"), 0);
  return check::Failures();
}
