// sequence_cut on the host.
#include "core/host_tensor.h"
#include "core/stream_cut.h"
#include "cpu/paths.h"

namespace flash_qla {
namespace cpu {
namespace {

using Arguments = flash_qla_sequence_cut_arguments;

void put(const Tensor& t, int64_t value, int64_t i, int64_t j = 0) {
  if (!present(t)) return;
  const int64_t offset = i * t.stride[0] + (t.ndim > 1 ? j * t.stride[1] : 0);
  switch (dtype(t)) {
    case DType::kInt32:
      static_cast<int32_t*>(t.data)[offset] = static_cast<int32_t>(value);
      break;
    case DType::kInt64:
      static_cast<int64_t*>(t.data)[offset] = value;
      break;
    default:
      static_cast<uint8_t*>(t.data)[offset] = value != 0;
  }
}

class Cut {
 public:
  Cut(const Arguments& args, const CutProblem& p) : args_(args), p_(p) {}

  void run() {
    put(args_.local_cu_seqlens, 0, 0);
    for (int64_t part = 0; part < p_.P; ++part) cut_part(part);
    for (; row_ < p_.R; ++row_) put_row(-1, false, false);
  }

 private:
  int64_t offset(int64_t n) const { return load_index(args_.cu_seqlens, n); }

  void cut_part(int64_t part) {
    const PartCut cut = flash_qla::cut_part(load_index(args_.bounds, part, 0), load_index(args_.bounds, part, 1),
                                            part == args_.last_part, p_.N, [this](int64_t n) { return offset(n); });
    const int64_t first_row = row_;
    const bool all = args_.all_rows != 0;
    for (int64_t n = all ? 0 : cut.first; n < (all ? p_.N : cut.behind); ++n) {
      const bool in_part = n >= cut.first && n < cut.behind;
      local_ += cut.inside(offset(n + 1)) - cut.inside(offset(n));
      put_row(n, in_part && offset(n) >= cut.begin, in_part && offset(n + 1) <= cut.end);
    }
    put(args_.row_counts, row_ - first_row, part);

    const int64_t of_zero = first_row - (all ? 0 : cut.first);  // where the row of sequence 0 would be
    const bool has_tokens = cut.left >= 0;
    const int64_t rows[2] = {has_tokens ? of_zero + cut.left : -1, has_tokens ? of_zero + cut.right : -1};
    for (int64_t i = 0; i < 2; ++i) put(args_.rows, rows[i], part, i);
    put(args_.enters, cut.enters, part);
    put(args_.leaves, cut.leaves, part);
    put(args_.through, cut.through, part);
    put(args_.entering_rows, cut.enters ? rows[0] : -1, part);
    put(args_.leaving_rows, cut.leaves ? rows[1] : -1, part);
    put(args_.halo_tokens, cut.halo, part);
  }

  // Rows for which there is no room are counted.
  void put_row(int64_t n, bool starts, bool ends) {
    if (row_ < p_.R) {
      put(args_.local_cu_seqlens, local_, row_ + 1);
      put(args_.sequences, n, row_);
      put(args_.starts_here, starts, row_);
      put(args_.ends_here, ends, row_);
    }
    if (n >= 0) ++row_;
  }

  const Arguments& args_;
  const CutProblem& p_;
  int64_t row_ = 0, local_ = 0;
};

std::string accept(const Arguments&, const CutProblem&) { return {}; }
size_t no_workspace(const Arguments&, const CutProblem&) { return 0; }

Status run(const Arguments& args, const CutProblem& p, void*, void*) {
  Cut(args, p).run();
  return Status();
}

}  // namespace
}  // namespace cpu

const SequenceCutPath kCpuSequenceCut = {"cpu", FLASH_QLA_CPU, false, cpu::accept, cpu::no_workspace, cpu::run};

}  // namespace flash_qla
