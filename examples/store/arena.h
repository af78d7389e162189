// SPDX-License-Identifier: Apache-2.0

// Memory that is released all at once.
#ifndef EXAMPLES_STORE_ARENA_H_
#define EXAMPLES_STORE_ARENA_H_

#include <memory>
#include <string_view>
#include <vector>

namespace store {

class Arena {
 public:
  // Returns a copy of s that lives as long as the arena.
  std::string_view Copy(std::string_view s);

 private:
  std::vector<std::unique_ptr<char[]>> blocks_;
  char* free_ = nullptr;
  size_t left_ = 0;
};

}  // namespace store

#endif  // EXAMPLES_STORE_ARENA_H_
