// Links of parts by the kernels of paths "cuda_generic" and "cuda_reference", and sequence_cut's, on the CPU.
#include <gtest/gtest.h>

#include "stream_of_ranks.h"

namespace flash_qla {
namespace {

// Every third head decays by e^-0.5 a token, so that it forgets within a chunk; some do not decay at all.
void mix_gates(Case* c, int round) {
  for (size_t i = 0; i < c->g.data.size(); ++i) {
    const int kind = (static_cast<int>(i % static_cast<size_t>(c->Hv)) + round) % 3;
    c->g.data[i] = kind == 0 ? -0.5 : kind == 1 ? 0.0 : 0.05 * c->g.data[i];
  }
}

TEST(LinksEmulated, Generic) {
  hold_to_one_rank<float>("cuda_generic", DeviceType::kCuda, 12, 150, 20, 18, 1e-5, mix_gates);
}

TEST(LinksEmulated, FewKeysAreInDouble) {
  hold_to_one_rank<float>("cuda_generic", DeviceType::kCuda, 4, 90, 3, 2, 1e-5, mix_gates);
}

TEST(LinksEmulated, Oracle) {
  hold_to_one_rank<double>("cuda_reference", DeviceType::kCuda, 5, 90, 5, 3, 1e-12, mix_gates);
}

}  // namespace
}  // namespace flash_qla
