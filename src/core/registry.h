// The table of paths. A path is one way to compute one operation on one kind of device ("cpu", "cuda_generic", "sm90",
// "reference" ...). Adding a kernel touches its own folder, which defines a `const ForwardPath` or `const
// BackwardPath`, and the table in registry.cpp, where order is preference: the first path that does not reject a call
// computes it.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "core/problem.h"
#include "flash_qla/flash_qla.hpp"

namespace flash_qla {

template <class Arguments, class Problem = flash_qla::Problem>
struct Path {
  // What explain() prints and options.path takes.
  const char* name;
  flash_qla_device_type device;
  // Taken only when options.path names it: oracles, and kernels whose path has not passed the tests on a device yet.
  bool only_by_name;
  // Empty: this path computes the call. Otherwise why it does not, as half a sentence ("needs K = V = 128").
  // The arguments are already validated. Reads pointers' alignment at most, never what they point to. A NULL pointer
  // counts as aligned: sizes of scratch are asked for before tensors exist, and are then the largest of all paths that
  // take the shapes.
  std::string (*reject)(const Arguments& args, const Problem& problem);
  // Bytes of scratch, 256-byte aligned, on the call's device. Where q.data is NULL it grows with T and N, so that the
  // size for the largest call serves all smaller ones.
  size_t (*workspace_size)(const Arguments& args, const Problem& problem);
  // Computes the call; writes every element of every present output. No synchronisation, no allocation on the device.
  Status (*run)(const Arguments& args, const Problem& problem, void* workspace, void* stream);
  // Lines, each with its end, that explain() adds: how this path would compute the call, as far as shapes tell. Null:
  // none.
  std::string (*notes)(const Arguments& args, const Problem& problem) = nullptr;
  // chunk_summary: floats of a part's carry. Null: the path makes none.
  int64_t (*carry_floats)(const Arguments& args, const Problem& problem) = nullptr;
};

using ForwardPath = Path<flash_qla_forward_arguments>;
using BackwardPath = Path<flash_qla_backward_arguments>;
using VerifyPath = Path<flash_qla_verify_arguments>;

const std::vector<const ForwardPath*>& chunk_forward_paths();
const std::vector<const ForwardPath*>& recurrent_paths();
const std::vector<const BackwardPath*>& chunk_backward_paths();
const std::vector<const VerifyPath*>& verify_paths();

// What the core needs of a device and cannot do itself. Registered beside the paths.
struct DeviceAccess {
  flash_qla_device_type device;
  // Copies `rows` rows of `width` bytes, `pitch` bytes apart on the device, to the host and waits: only under
  // check_device_data.
  Status (*copy_to_host)(void* host, const void* device, int64_t pitch, int64_t width, int64_t rows, int device_index,
                         void* stream);
  // Whether the stream is being captured into a graph, in which nothing can be copied and waited for.
  bool (*is_capturing)(void* stream);
  // One "key: value" line a fact, for build_info().
  std::string (*describe)();
};
const std::vector<const DeviceAccess*>& device_accesses();

}  // namespace flash_qla
