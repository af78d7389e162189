// SPDX-License-Identifier: Apache-2.0

// Words by their beginnings.
#ifndef EXAMPLES_STORE_TRIE_H_
#define EXAMPLES_STORE_TRIE_H_

#include <array>
#include <memory>
#include <string_view>

namespace store {

// A Trie holds words of lower-case letters.
class Trie {
 public:
  // Returns false, and adds nothing, if word has any other character.
  bool Add(std::string_view word);
  // Returns the number of words that begin with prefix.
  int Count(std::string_view prefix) const;

 private:
  std::array<std::unique_ptr<Trie>, 26> next_;
  int words_ = 0;  // that go through here
};

}  // namespace store

#endif  // EXAMPLES_STORE_TRIE_H_
