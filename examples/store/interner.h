// SPDX-License-Identifier: Apache-2.0

// Numbers for names.
#ifndef EXAMPLES_STORE_INTERNER_H_
#define EXAMPLES_STORE_INTERNER_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "examples/store/arena.h"

namespace store {

class Interner {
 public:
  // Returns the number of name: 0 for the first, 1 for the next new one, and so on.
  uint32_t Number(std::string_view name);
  // Returns the name of n, which Number returned before.
  std::string_view Name(uint32_t n) const { return names_[n]; }

 private:
  size_t Slot(std::string_view name) const;

  Arena arena_;
  std::vector<std::string_view> names_;
  std::vector<uint32_t> slots_ = std::vector<uint32_t>(16, kFree);
  static constexpr uint32_t kFree = ~uint32_t{0};
};

}  // namespace store

#endif  // EXAMPLES_STORE_INTERNER_H_
