// Which commit a build is of. Its source file is the one that the build writes (commit.cpp.in), so that another commit
// compiles nothing else anew.
#pragma once

namespace flash_qla {

// Twelve digits, with "+changes" behind them where tracked files differed from it; "unknown" outside of a git checkout.
const char* source_commit();

}  // namespace flash_qla
