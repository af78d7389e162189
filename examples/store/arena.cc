// SPDX-License-Identifier: Apache-2.0

#include "examples/store/arena.h"

#include <cstring>

namespace store {

std::string_view Arena::Copy(std::string_view s) {
  if (s.size() > left_) {
    left_ = s.size() > 4096 ? s.size() : 4096;
    blocks_.push_back(std::make_unique<char[]>(left_));
    free_ = blocks_.back().get();
  }
  char* const copy = free_;
  if (!s.empty()) std::memcpy(copy, s.data(), s.size());
  free_ += s.size();
  left_ -= s.size();
  return {copy, s.size()};
}

}  // namespace store
