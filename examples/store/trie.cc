// SPDX-License-Identifier: Apache-2.0

#include "examples/store/trie.h"

namespace store {

bool Trie::Add(std::string_view word) {
  for (char c : word) {
    if (c < 'a' || c > 'z') return false;
  }
  Trie* node = this;
  node->words_++;
  for (char c : word) {
    auto& next = node->next_[c - 'a'];
    if (next == nullptr) next = std::make_unique<Trie>();
    node = next.get();
    node->words_++;
  }
  return true;
}

int Trie::Count(std::string_view prefix) const {
  const Trie* node = this;
  for (char c : prefix) {
    if (c < 'a' || c > 'z') return 0;
    node = node->next_[c - 'a'].get();
    if (node == nullptr) return 0;
  }
  return node->words_;
}

}  // namespace store
