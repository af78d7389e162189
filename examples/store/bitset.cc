// SPDX-License-Identifier: Apache-2.0

#include "examples/store/bitset.h"

#include "examples/num/bits.h"

namespace store {

void Bitset::Add(uint32_t n) {
  if (n / 64 >= words_.size()) words_.resize(n / 64 + 1);
  words_[n / 64] |= uint64_t{1} << n % 64;
}

bool Bitset::Has(uint32_t n) const { return n / 64 < words_.size() && words_[n / 64] >> n % 64 & 1; }

int Bitset::Size() const {
  int size = 0;
  for (uint64_t word : words_) size += num::CountOnes(word);
  return size;
}

}  // namespace store
