// Sums of squares, of everything and by columns. Parts of a fixed numel are summed in double, then
// the parts in order: threads do not change the result.
#pragma once

#include "shared.h"

namespace lightning_zero {

constexpr std::int64_t kPartNumel = 65536;
constexpr std::int64_t kPartRows = 1024;

// Exact in double, finite for every finite fp32 value.
LZ_SHARED double square(float value) {
  return static_cast<double>(value) * static_cast<double>(value);
}

double sum_of_squares_host(const void* values, Format format, std::int64_t begin,
                           std::int64_t end);

// Fills parts[0, blocks_of(numel, kPartNumel)).
void sum_of_squares_device(const void* values, Format format, std::int64_t numel, double* parts,
                           void* stream);

struct Matrix {
  void* values;  // row-major, in `format`
  Format format;
  std::int64_t rows;
  std::int64_t columns;
};

// Squares of columns [begin, end) of the rows of a part, added up into sums[begin, end).
void column_squares_host(const Matrix& matrix, std::int64_t part, std::int64_t begin,
                         std::int64_t end, double* sums);

// Adds words [begin, end) up by columns, word i into sums[i % columns]; overflow wraps around.
void column_words_host(const std::int64_t* words, std::int64_t columns, std::int64_t begin,
                       std::int64_t end, std::uint64_t* sums);

// Into parts [parts, columns], and their sum in order into sums [columns].
void column_squares_device(const Matrix& matrix, double* parts, float* sums, void* stream);

}  // namespace lightning_zero
