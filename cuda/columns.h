// Selected columns of a row-major matrix, copied out of it and back, whatever the values are.
#pragma once

#include "shared.h"

namespace lightning_zero {

struct ColumnSelection {
  void* matrix;  // [rows, columns]
  void* packed;  // [rows, count]
  const std::int64_t* indices;
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t count;
  int value_nbytes;  // 2 or 4
};

// Rows [begin, end), by the calling thread.
void gather_columns_host(const ColumnSelection& selection, std::int64_t begin, std::int64_t end);
void scatter_columns_host(const ColumnSelection& selection, std::int64_t begin, std::int64_t end);

// All rows, on a CUDA stream.
void gather_columns_device(const ColumnSelection& selection, void* stream);
void scatter_columns_device(const ColumnSelection& selection, void* stream);

}  // namespace lightning_zero
