// sequence_cut on the host.
#include <algorithm>
#include <vector>

#include "core/host_tensor.h"
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
  Cut(const Arguments& args, const CutProblem& p) : args_(args), p_(p), cu_(static_cast<size_t>(p.N + 1)) {
    for (int64_t n = 0; n <= p.N; ++n) cu_[static_cast<size_t>(n)] = load_index(args.cu_seqlens, n);
  }

  void run() {
    put(args_.local_cu_seqlens, 0, 0);
    for (int64_t part = 0; part < p_.P; ++part) cut_part(part);
    for (; row_ < p_.R; ++row_) put_row(-1, false, false);
  }

 private:
  int64_t offset(int64_t n) const { return cu_[static_cast<size_t>(n)]; }
  // The sequence with the token at a position that lies in one.
  int64_t sequence_at(int64_t token) const { return std::upper_bound(cu_.begin(), cu_.end(), token) - cu_.begin() - 1; }

  void cut_part(int64_t part) {
    const int64_t begin = load_index(args_.bounds, part, 0), end = load_index(args_.bounds, part, 1);
    const bool is_last = part == args_.last_part;
    // Sequences [first, behind) are in the part: those with tokens there, and empty ones at offsets in [begin, end),
    // with those at the end where the stream ends.
    const auto place = [this](auto found) { return std::min<int64_t>(found - cu_.begin(), p_.N); };
    int64_t first = place(std::lower_bound(cu_.begin(), cu_.end(), begin));
    if (begin < end && first > 0 && offset(first) > begin) --first;
    const int64_t behind = is_last       ? p_.N
                           : begin < end ? std::max(first, place(std::lower_bound(cu_.begin(), cu_.end(), end)))
                                         : first;

    const int64_t first_row = row_;
    if (args_.all_rows) {
      for (int64_t n = 0; n < p_.N; ++n) sequence_row(n, begin, end, n >= first && n < behind);
    } else {
      for (int64_t n = first; n < behind; ++n) sequence_row(n, begin, end, true);
    }

    put(args_.row_counts, row_ - first_row, part);

    const int64_t last_token = std::min(end, offset(p_.N)) - 1;
    const bool has_tokens = begin >= offset(0) && begin <= last_token;
    int64_t rows[2] = {-1, -1}, halo = 0;
    bool enters = false, leaves = false, through = false;
    if (has_tokens) {
      const int64_t left = sequence_at(begin), right = sequence_at(last_token);
      const int64_t of_zero = first_row - (args_.all_rows ? 0 : first);  // where the row of sequence 0 would be
      rows[0] = of_zero + left;
      rows[1] = of_zero + right;
      enters = offset(left) < begin;
      leaves = offset(right + 1) > end;
      through = enters && leaves && left == right;
      if (enters) halo = begin - offset(left);
    }
    for (int64_t i = 0; i < 2; ++i) put(args_.rows, rows[i], part, i);
    put(args_.enters, enters, part);
    put(args_.leaves, leaves, part);
    put(args_.through, through, part);
    put(args_.entering_rows, enters ? rows[0] : -1, part);
    put(args_.leaving_rows, leaves ? rows[1] : -1, part);
    put(args_.halo_tokens, halo, part);
  }

  void sequence_row(int64_t n, int64_t begin, int64_t end, bool in_part) {
    const auto inside = [begin, end](int64_t x) { return std::max(begin, std::min(x, end)); };
    local_ += inside(offset(n + 1)) - inside(offset(n));
    put_row(n, in_part && offset(n) >= begin, in_part && offset(n + 1) <= end);
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
  std::vector<int64_t> cu_;
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
