// SPDX-License-Identifier: Apache-2.0

// Writes the table of crc32: a header and its definition.
#include <cstdint>
#include <cstdio>

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: make_crc32_table HEADER SOURCE\n");
    return 2;
  }
  std::FILE* header = std::fopen(argv[1], "w");
  std::FILE* source = std::fopen(argv[2], "w");
  if (header == nullptr || source == nullptr) {
    std::perror("make_crc32_table");
    return 1;
  }
  std::fprintf(header, "#include <cstdint>\n\nnamespace hash {\nextern const uint32_t kCrc32Table[256];\n}\n");
  std::fprintf(source, "#include \"examples/hash/crc32_table.h\"\n\n");
  std::fprintf(source, "const uint32_t hash::kCrc32Table[256] = {\n");
  for (uint32_t i = 0; i < 256; i++) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >> 1 ^ 0xEDB88320 : crc >> 1;
    std::fprintf(source, "    0x%08x,\n", crc);
  }
  std::fprintf(source, "};\n");
  if (std::fclose(header) != 0 || std::fclose(source) != 0) {
    std::perror("make_crc32_table");
    return 1;
  }
  return 0;
}
