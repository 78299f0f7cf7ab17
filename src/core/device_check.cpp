#include "core/device_check.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "core/device_reader.h"

namespace flash_qla {
namespace {

long long as_ll(int64_t x) { return static_cast<long long>(x); }

// The check of one call. A member that reads something stands before those that use it.
class DataCheck : public DeviceReader {
 public:
  DataCheck(const char* operation, const flash_qla_options& options, const Problem& p, void* stream)
      : DeviceReader(operation, options, stream), operation_(operation), p_(p), ledger_(operation, "state_pool") {}

  Status sequences(const Tensor& cu_seqlens) {
    return p_.varlen ? DeviceReader::sequences(cu_seqlens, p_.T, "q.shape[1]", &cu_) : Status();
  }

  Status chunk_states(const Tensor& h) const {
    if (!present(h) || !p_.varlen) return Status();
    int64_t chunks = 0;
    for (int64_t n = 0; n < p_.N; ++n) chunks += ceil_div(length(n), kChunkSize);
    if (h.shape[0] >= chunks) return Status();
    return make_status(FLASH_QLA_INVALID_VALUE, "%s: h.shape[0] (%lld) must be at least %lld, the chunks of cu_seqlens",
                       operation_, as_ll(h.shape[0]), as_ll(chunks));
  }

  // Which rows are skipped, and which slots the others read.
  Status starts(const flash_qla_forward_arguments& args) {
    starts_.assign(static_cast<size_t>(p_.N), kFromZero);
    if (!present(args.state_pool)) return Status();
    ledger_.open(args.state_pool.shape[0], args.null_index);
    Integers initial, has, accepted;
    FLASH_QLA_RETURN_IF_ERROR(read(args.initial_state_indices, &initial));
    FLASH_QLA_RETURN_IF_ERROR(read(args.has_initial_state, &has));
    FLASH_QLA_RETURN_IF_ERROR(read(args.num_accepted_tokens, &accepted));
    for (int64_t n = 0; n < p_.N; ++n) {
      const int64_t column = accepted.given() ? accepted.at(n) - 1 : 0;
      if (column < 0 || column >= initial.columns) {
        return make_status(FLASH_QLA_INVALID_VALUE, "%s: num_accepted_tokens[%lld] (%lld) must be from 1 to %lld",
                           operation_, as_ll(n), as_ll(column + 1), as_ll(initial.columns));
      }
      if (has.given() && has.at(n) == 0) continue;
      const int64_t index = initial.at(n, column);
      FLASH_QLA_RETURN_IF_ERROR(ledger_.in_pool("initial_state_indices", n, index));
      starts_[static_cast<size_t>(n)] = ledger_.is_null(index) ? kSkipped : index;
    }
    return Status();
  }

  Status slots(const flash_qla_forward_arguments& args) {
    if (!present(args.state_pool)) return Status();
    const bool own = present(args.final_state_indices);
    const Tensor& final_tensor = own ? args.final_state_indices : args.initial_state_indices;
    const char* final_name = own ? "final_state_indices" : "initial_state_indices";
    Integers final;
    FLASH_QLA_RETURN_IF_ERROR(read(final_tensor, &final));
    const int64_t columns = final_tensor.ndim > 1 ? std::min(final.columns, p_.T) : 1;
    for (int64_t n = 0; n < p_.N; ++n) {
      for (int64_t t = 0; t < columns && !skipped(n); ++t) {
        FLASH_QLA_RETURN_IF_ERROR(ledger_.write(final_name, n, final.at(n, t), n));
      }
    }
    FLASH_QLA_RETURN_IF_ERROR(listed(args));
    for (int64_t n = 0; n < p_.N; ++n) {
      FLASH_QLA_RETURN_IF_ERROR(ledger_.read(n, starts_[static_cast<size_t>(n)]));
    }
    return Status();
  }

  Status checkpoint_rows(const flash_qla_forward_arguments& args) const {
    if (args.checkpoint_every <= 0) return Status();
    Integers starts;
    FLASH_QLA_RETURN_IF_ERROR(read(args.checkpoint_cu_starts, &starts));
    for (int64_t n = 0; n < p_.N; ++n) {
      const int64_t rows = skipped(n) ? 0 : length(n) / args.checkpoint_every;
      if (rows == 0) continue;
      if (starts.at(n) < 0 || starts.at(n + 1) - starts.at(n) < rows || starts.at(n + 1) > args.checkpoints.shape[0]) {
        return make_status(FLASH_QLA_INVALID_VALUE,
                           "%s: checkpoint_cu_starts[%lld] (%lld) must leave %lld rows of checkpoints (%lld in all)",
                           operation_, as_ll(n), as_ll(starts.at(n)), as_ll(rows), as_ll(args.checkpoints.shape[0]));
      }
    }
    return Status();
  }

  Status drafts(const flash_qla_verify_arguments& args) {
    ledger_.open(args.state_pool.shape[0], args.null_index);
    std::unordered_map<int64_t, int64_t> writer;  // the sequence that writes a row of states_out
    Integers initial, parents, rows;
    FLASH_QLA_RETURN_IF_ERROR(read(args.initial_state_indices, &initial));
    FLASH_QLA_RETURN_IF_ERROR(read(args.parents, &parents));
    FLASH_QLA_RETURN_IF_ERROR(read(args.states_out_indices, &rows));
    for (int64_t n = 0; n < p_.N; ++n) {
      FLASH_QLA_RETURN_IF_ERROR(ledger_.in_pool("initial_state_indices", n, initial.at(n)));
      if (ledger_.is_null(initial.at(n))) continue;
      for (int64_t t = 0; t < p_.T && parents.given(); ++t) {
        if (parents.at(n, t) >= -1 && parents.at(n, t) < t) continue;
        return make_status(FLASH_QLA_INVALID_VALUE,
                           "%s: parents[%lld, %lld] (%lld) must be -1 or an earlier token, at most %lld", operation_,
                           as_ll(n), as_ll(t), as_ll(parents.at(n, t)), as_ll(t - 1));
      }
      if (!rows.given() || rows.at(n) < 0) continue;
      if (rows.at(n) >= args.states_out.shape[0]) {
        return make_status(FLASH_QLA_INVALID_VALUE,
                           "%s: states_out_indices[%lld] (%lld) must be below states_out.shape[0] (%lld)", operation_,
                           as_ll(n), as_ll(rows.at(n)), as_ll(args.states_out.shape[0]));
      }
      if (!writer.emplace(rows.at(n), n).second) {
        return make_status(FLASH_QLA_INVALID_VALUE,
                           "%s: states_out_indices[%lld] (%lld) must not name a row that is written twice", operation_,
                           as_ll(n), as_ll(rows.at(n)));
      }
    }
    return Status();
  }

 private:
  static constexpr int64_t kFromZero = -1, kSkipped = -2;  // in place of the slot that a row reads

  int64_t length(int64_t n) const { return p_.varlen ? cu_.at(n + 1) - cu_.at(n) : p_.T; }
  bool skipped(int64_t n) const { return starts_[static_cast<size_t>(n)] == kSkipped; }

  // Listed tokens: those of sequences that are not skipped write their slots.
  Status listed(const flash_qla_forward_arguments& args) {
    if (!present(args.checkpoint_offsets)) return Status();
    Integers offsets, slots;
    FLASH_QLA_RETURN_IF_ERROR(read(args.checkpoint_offsets, &offsets));
    FLASH_QLA_RETURN_IF_ERROR(read(args.checkpoint_indices, &slots));
    for (int64_t m = 0; m < offsets.rows(); ++m) {
      const int64_t offset = offsets.at(m);
      if (offset < 1 || offset > p_.B * p_.T) {
        return make_status(FLASH_QLA_INVALID_VALUE, "%s: checkpoint_offsets[%lld] (%lld) must be from 1 to %lld tokens",
                           operation_, as_ll(m), as_ll(offset), as_ll(p_.B * p_.T));
      }
      const int64_t n = sequence_before(offset, cu_, p_.T);
      if (n < p_.N && !skipped(n)) FLASH_QLA_RETURN_IF_ERROR(ledger_.write("checkpoint_indices", m, slots.at(m), n));
    }
    return Status();
  }

  const char* operation_;
  const Problem& p_;
  Integers cu_;
  std::vector<int64_t> starts_;  // [N] the slot that a row reads, kFromZero or kSkipped
  SlotLedger ledger_;
};

}  // namespace

bool wants_device_check(const flash_qla_options& options) {
  if (options.check_device_data) return true;
  const char* value = std::getenv("FLASH_QLA_CHECK");
  return value != nullptr && std::strcmp(value, "1") == 0;
}

Status check_forward_data(const flash_qla_forward_arguments& args, const char* operation, const Problem& problem,
                          void* stream) {
  DataCheck check(operation, args.options, problem, stream);
  FLASH_QLA_RETURN_IF_ERROR(check.possible());
  FLASH_QLA_RETURN_IF_ERROR(check.sequences(args.cu_seqlens));
  FLASH_QLA_RETURN_IF_ERROR(check.chunk_states(args.h));
  FLASH_QLA_RETURN_IF_ERROR(check.starts(args));
  FLASH_QLA_RETURN_IF_ERROR(check.slots(args));
  return check.checkpoint_rows(args);
}

Status check_backward_data(const flash_qla_backward_arguments& args, const char* operation, const Problem& problem,
                           void* stream) {
  DataCheck check(operation, args.options, problem, stream);
  FLASH_QLA_RETURN_IF_ERROR(check.possible());
  return check.sequences(args.cu_seqlens);
}

Status check_verify_data(const flash_qla_verify_arguments& args, const char* operation, const Problem& problem,
                         void* stream) {
  DataCheck check(operation, args.options, problem, stream);
  FLASH_QLA_RETURN_IF_ERROR(check.possible());
  return check.drafts(args);
}

}  // namespace flash_qla
