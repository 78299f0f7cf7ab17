#include "cpu/states.h"

#include <algorithm>

namespace flash_qla::cpu {

StateIo::StateIo(const flash_qla_forward_arguments& args, int64_t n) : args_(args), n_(n) {
  if (!present(args.state_pool)) return;
  per_token_ = final_indices().ndim == 2;
  if (present(args.has_initial_state) &&
      flash_qla::load(args.has_initial_state, offset_of(args.has_initial_state, n)) == 0.0) {
    return;
  }
  int64_t column = 0;
  if (present(args.num_accepted_tokens)) {
    column =
        std::clamp<int64_t>(load_index(args.num_accepted_tokens, n) - 1, 0, args.initial_state_indices.shape[1] - 1);
  }
  read_slot_ =
      slot_or_skip(load_index(args.initial_state_indices, n, column), args.null_index, args.state_pool.shape[0]);
  skipped_ = read_slot_ < 0;
}

}  // namespace flash_qla::cpu
