// The convolution's checks of device data, made only when the caller asks for them.
#include <algorithm>
#include <unordered_map>

#include "core/convolution.h"
#include "core/device_reader.h"

namespace flash_qla {
namespace {

long long as_ll(int64_t x) { return static_cast<long long>(x); }

class ConvDataCheck : public DeviceReader {
 public:
  ConvDataCheck(const flash_qla_conv_arguments& args, const char* operation, const ConvProblem& p, void* stream)
      : DeviceReader(operation, args.options, stream), args_(args), p_(p), ledger_(operation, "initial_state") {
    ledger_.open(p.slots, args.null_index);
  }

  Status all() {
    FLASH_QLA_RETURN_IF_ERROR(possible());
    if (p_.varlen) FLASH_QLA_RETURN_IF_ERROR(sequences(args_.cu_seqlens, p_.T, "x.shape[1]", &cu_));
    FLASH_QLA_RETURN_IF_ERROR(accepted());
    FLASH_QLA_RETURN_IF_ERROR(starts());
    FLASH_QLA_RETURN_IF_ERROR(finals());
    FLASH_QLA_RETURN_IF_ERROR(listed());
    FLASH_QLA_RETURN_IF_ERROR(read_and_written());
    return draft_rows();
  }

 private:
  static constexpr int64_t kFromZero = -1, kSkipped = -2;  // in place of the slot that a sequence reads

  int64_t length(int64_t n) const { return p_.varlen ? cu_.at(n + 1) - cu_.at(n) : p_.T; }

  Status accepted() const {
    Integers counts;
    FLASH_QLA_RETURN_IF_ERROR(read(args_.num_accepted_tokens, &counts));
    for (int64_t n = 0; n < counts.rows() && counts.given(); ++n) {
      const int64_t most = p_.L - (p_.W - 1) + 1;
      if (counts.at(n) < 1 || counts.at(n) > most) {
        return make_status(FLASH_QLA_INVALID_VALUE, "%s: num_accepted_tokens[%lld] (%lld) must be from 1 to %lld",
                           operation(), as_ll(n), as_ll(counts.at(n)), as_ll(most));
      }
      if (p_.W - 2 + length(n) > p_.L) {
        return make_status(FLASH_QLA_INVALID_VALUE,
                           "%s: cu_seqlens[%lld] (%lld tokens before it) must leave at most %lld in a sequence of "
                           "num_accepted_tokens",
                           operation(), as_ll(n + 1), as_ll(length(n)), as_ll(p_.L - (p_.W - 2)));
      }
    }
    return Status();
  }

  Status starts() {
    starts_.assign(static_cast<size_t>(p_.N), kFromZero);
    Integers initial, has;
    FLASH_QLA_RETURN_IF_ERROR(read(args_.initial_state_indices, &initial));
    FLASH_QLA_RETURN_IF_ERROR(read(args_.has_initial_state, &has));
    for (int64_t n = 0; n < p_.N && initial.given(); ++n) {
      if (has.given() && has.at(n) == 0) continue;
      FLASH_QLA_RETURN_IF_ERROR(ledger_.in_pool("initial_state_indices", n, initial.at(n)));
      starts_[static_cast<size_t>(n)] = ledger_.is_null(initial.at(n)) ? kSkipped : initial.at(n);
    }
    return Status();
  }

  Status finals() {
    if (!present(args_.initial_state_indices) || !present(args_.parts[0].final_state)) return Status();
    const bool own = present(args_.final_state_indices);
    Integers final;
    FLASH_QLA_RETURN_IF_ERROR(read(own ? args_.final_state_indices : args_.initial_state_indices, &final));
    for (int64_t n = 0; n < p_.N; ++n) {
      if (starts_[static_cast<size_t>(n)] == kSkipped) continue;
      FLASH_QLA_RETURN_IF_ERROR(
          ledger_.write(own ? "final_state_indices" : "initial_state_indices", n, final.at(n), n));
    }
    return Status();
  }

  // Listed positions: those of sequences that are not skipped write their slots.
  Status listed() {
    Integers offsets, slots;
    FLASH_QLA_RETURN_IF_ERROR(read(args_.checkpoint_offsets, &offsets));
    FLASH_QLA_RETURN_IF_ERROR(read(args_.checkpoint_indices, &slots));
    for (int64_t m = 0; m < offsets.rows() && offsets.given(); ++m) {
      const int64_t offset = offsets.at(m);
      if (offset < 1 || offset > p_.B * p_.T) {
        return make_status(FLASH_QLA_INVALID_VALUE, "%s: checkpoint_offsets[%lld] (%lld) must be from 1 to %lld tokens",
                           operation(), as_ll(m), as_ll(offset), as_ll(p_.B * p_.T));
      }
      const int64_t n = sequence_before(offset, cu_, p_.T);
      if (n < p_.N && starts_[static_cast<size_t>(n)] != kSkipped) {
        FLASH_QLA_RETURN_IF_ERROR(ledger_.write("checkpoint_indices", m, slots.at(m), n));
      }
    }
    return Status();
  }

  // Pools that are read and written are mostly the same memory.
  Status read_and_written() const {
    if (args_.parts[0].initial_state.data != args_.parts[0].final_state.data) return Status();
    for (int64_t n = 0; n < p_.N; ++n) {
      FLASH_QLA_RETURN_IF_ERROR(ledger_.read(n, starts_[static_cast<size_t>(n)]));
    }
    return Status();
  }

  Status draft_rows() const {
    Integers rows;
    FLASH_QLA_RETURN_IF_ERROR(read(args_.draft_state_indices, &rows));
    std::unordered_map<int64_t, int64_t> seen;
    for (int64_t n = 0; n < p_.N && rows.given(); ++n) {
      const int64_t row = rows.at(n);
      if (row < 0 || starts_[static_cast<size_t>(n)] == kSkipped) continue;
      if (row >= args_.draft_states.shape[0] || !seen.emplace(row, n).second) {
        return make_status(FLASH_QLA_INVALID_VALUE,
                           "%s: draft_state_indices[%lld] (%lld) must name a row of its own below %lld", operation(),
                           as_ll(n), as_ll(row), as_ll(args_.draft_states.shape[0]));
      }
    }
    return Status();
  }

  const flash_qla_conv_arguments& args_;
  const ConvProblem& p_;
  Integers cu_;
  std::vector<int64_t> starts_;  // [N] the slot that a sequence reads, kFromZero or kSkipped
  SlotLedger ledger_;
};

}  // namespace

Status check_conv_data(const flash_qla_conv_arguments& args, const char* operation, const ConvProblem& p,
                       void* stream) {
  return ConvDataCheck(args, operation, p, stream).all();
}

Status check_conv_backward_data(const flash_qla_conv_backward_arguments& args, const char* operation,
                                const ConvProblem& p, void* stream) {
  const DeviceReader reader(operation, args.options, stream);
  FLASH_QLA_RETURN_IF_ERROR(reader.possible());
  Integers cu;
  return p.varlen ? reader.sequences(args.cu_seqlens, p.T, "x.shape[1]", &cu) : Status();
}

}  // namespace flash_qla
