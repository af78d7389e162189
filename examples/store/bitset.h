// SPDX-License-Identifier: Apache-2.0

// Sets of small numbers.
#ifndef EXAMPLES_STORE_BITSET_H_
#define EXAMPLES_STORE_BITSET_H_

#include <cstdint>
#include <vector>

namespace store {

class Bitset {
 public:
  void Add(uint32_t n);
  bool Has(uint32_t n) const;
  // Returns the number of members.
  int Size() const;

 private:
  std::vector<uint64_t> words_;
};

}  // namespace store

#endif  // EXAMPLES_STORE_BITSET_H_
