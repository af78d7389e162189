// SPDX-License-Identifier: Apache-2.0

#include "examples/store/interner.h"

#include "examples/hash/fnv.h"

namespace store {

size_t Interner::Slot(std::string_view name) const {
  size_t slot = hash::Fnv(name) % slots_.size();
  while (slots_[slot] != kFree && names_[slots_[slot]] != name) slot = (slot + 1) % slots_.size();
  return slot;
}

uint32_t Interner::Number(std::string_view name) {
  size_t slot = Slot(name);
  if (slots_[slot] != kFree) return slots_[slot];
  const uint32_t number = names_.size();
  names_.push_back(arena_.Copy(name));
  slots_[slot] = number;
  if (names_.size() * 2 > slots_.size()) {  // at least half stay free, so that a search ends soon
    slots_.assign(slots_.size() * 2, kFree);
    for (uint32_t n = 0; n < names_.size(); n++) slots_[Slot(names_[n])] = n;
  }
  return number;
}

}  // namespace store
