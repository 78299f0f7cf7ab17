// Device memory of a call that is made of several calls: what they leave each other, and their scratch.
#pragma once

#include <map>
#include <string>

#include "buffers.h"

namespace flash_qla::testing {

// Pieces by name, each an allocation of its own, so that a write past its end is seen. A piece is taken when it is
// first asked for, and found again in later runs.
class Pieces {
 public:
  // What the pieces are filled with before each run is handed over as so much memory on the device.
  static constexpr size_t kPatternBytes = size_t{1} << 20;

  // fills: pieces hold the pattern when a run begins. Else they hold what was there, as a tool wants it that looks for
  // reads of what was not written.
  Pieces(Arena::Pieces kind, bool fills) : memory_(kind), fills_(fills) {}

  void begin(const void* pattern, cudaStream_t stream) {
    pattern_ = static_cast<const char*>(pattern);
    for (const auto& [name, piece] : pieces_) fill(piece, stream);
  }

  void* take(const std::string& name, size_t bytes, cudaStream_t stream) {
    Piece& piece = pieces_[name];
    if (piece.data == nullptr || piece.bytes < bytes) {
      piece = {static_cast<char*>(memory_.take(bytes)), bytes};
      fill(piece, stream);
    }
    return piece.data;
  }
  Tensor tensor(const std::string& name, DType type, const std::vector<int64_t>& shape, cudaStream_t stream) {
    Tensor t{};
    t.dtype = static_cast<int32_t>(type);
    t.ndim = static_cast<int32_t>(shape.size());
    int64_t elements = 1;
    for (int i = t.ndim - 1; i >= 0; --i) {
      t.shape[i] = shape[static_cast<size_t>(i)];
      t.stride[i] = elements;
      elements *= t.shape[i];
    }
    t.data = take(name, static_cast<size_t>(elements * size_of(type)), stream);
    return t;
  }

  // Whether nothing beside a piece was written.
  bool intact() const { return memory_.intact(); }

 private:
  struct Piece {
    char* data = nullptr;
    size_t bytes = 0;
  };
  void fill(const Piece& piece, cudaStream_t stream) const {
    for (size_t done = 0; fills_ && done < piece.bytes; done += kPatternBytes) {
      check_cuda(cudaMemcpyAsync(piece.data + done, pattern_, std::min(kPatternBytes, piece.bytes - done),
                                 cudaMemcpyDeviceToDevice, stream),
                 "cudaMemcpyAsync");
    }
  }

  Arena memory_;
  const bool fills_;
  const char* pattern_ = nullptr;
  std::map<std::string, Piece> pieces_;
};

// Runs an operation whose scratch is a piece.
template <class Op, class Arguments>
Status run_with_pieces(const Arguments& args, const std::string& name, Pieces& pieces, cudaStream_t stream) {
  size_t bytes = 0;
  if (const Status status = Op::workspace_size(args, &bytes); !status.ok()) return status;
  return Op::run(args, pieces.take(name, bytes, stream), bytes, stream);
}

}  // namespace flash_qla::testing
