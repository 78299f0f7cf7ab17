// Which of the library's kernels this program has launched, and which it has at all: what a run under a tool (a
// sanitizer, say) has looked at. The linker puts launches.cu between the program and the CUDA runtime.
#pragma once

#include <set>
#include <string>

namespace flash_qla::testing {

// Names as in the source, template arguments included, without the library's namespaces and without parameters.
std::set<std::string> kernels_of_the_program();
std::set<std::string> launched_kernels();
// launched_kernels() begins anew.
void forget_launches();

}  // namespace flash_qla::testing
