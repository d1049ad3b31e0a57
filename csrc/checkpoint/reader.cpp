#include "reader.h"

#include <ATen/ops/empty.h>

#include "dtypes.h"

namespace ampfuse::checkpoint::detail {

Reader::Reader(fs::path folder) : folder_(std::move(folder)), index_(read_index(folder_)) {
  for (const auto& [name, expected] : index_.files) {
    files_.emplace(name, TensorFile(folder_ / name, expected));
  }
}

at::Tensor Reader::tensor(const std::string& name) const {
  const TensorEntry& entry = index_.tensors.at(name);
  const at::ScalarType dtype = dtype_of(entry.dtype);
  const auto read = [&](const Piece& piece) {
    return files_.at(piece.file).read(name, piece, dtype);
  };
  if (entry.pieces.size() == 1 && entry.pieces[0].shape == entry.shape) {
    return read(entry.pieces[0]);
  }
  at::Tensor whole = at::empty(entry.shape, dtype);
  for (const Piece& piece : entry.pieces) {
    at::Tensor target = whole;
    for (size_t dim = 0; dim < piece.shape.size(); ++dim) {
      target = target.narrow(static_cast<int64_t>(dim), piece.start.at(dim), piece.shape[dim]);
    }
    target.copy_(read(piece));
  }
  return whole;
}

}  // namespace ampfuse::checkpoint::detail
