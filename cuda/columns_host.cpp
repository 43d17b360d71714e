// Selected columns on the host, row by row: a row of the matrix is read in order.
#include "columns.h"

namespace lightning_zero {
namespace {

template <typename T>
void gather_of(const ColumnSelection& s, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    const T* const matrix = static_cast<const T*>(s.matrix) + row * s.columns;
    T* const packed = static_cast<T*>(s.packed) + row * s.count;
    for (std::int64_t i = 0; i < s.count; ++i) packed[i] = matrix[s.indices[i]];
  }
}

template <typename T>
void scatter_of(const ColumnSelection& s, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    T* const matrix = static_cast<T*>(s.matrix) + row * s.columns;
    const T* const packed = static_cast<const T*>(s.packed) + row * s.count;
    for (std::int64_t i = 0; i < s.count; ++i) matrix[s.indices[i]] = packed[i];
  }
}

}  // namespace

void gather_columns_host(const ColumnSelection& selection, std::int64_t begin, std::int64_t end) {
  if (selection.value_nbytes == 4) return gather_of<std::uint32_t>(selection, begin, end);
  gather_of<std::uint16_t>(selection, begin, end);
}

void scatter_columns_host(const ColumnSelection& selection, std::int64_t begin, std::int64_t end) {
  if (selection.value_nbytes == 4) return scatter_of<std::uint32_t>(selection, begin, end);
  scatter_of<std::uint16_t>(selection, begin, end);
}

}  // namespace lightning_zero
